#!/usr/bin/env bash
# A run in a partition whose jobs are stopped for others' sake, or one that is longer than a job may be: the job puts
# itself back into the queue until the run is done. Submit it where configs/ and .venv are:
#   sbatch scripts/slurm/preemptible.sh pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
#   sbatch scripts/slurm/preemptible.sh squad --config configs/squad_base.json --pretrained-ckpt-path runs/mine --seeds 5
# What follows the file's name is the command of `bert`; without it, phase 1 of the base model. The run's folder lies on
# a file system that all nodes share.
# Change: partition and account, nodes, GPUs and tasks of a node, time. Give SLURM's signal as much time as a checkpoint takes
# to write, and a minute. MOST_RESTARTS ends what never gets anywhere.
# SLURM sends SIGTERM to the run's processes when the time is nearly up, and when the job has to make room; the run
# saves, and ends with STOPPED where it would end with 0 when it is done.
#SBATCH --job-name=bert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
set -euo pipefail
export PATH="$PWD/.venv/bin:$PATH"
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
[ $# -gt 0 ] || set -- pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
restarts=${SLURM_RESTART_COUNT:-0}
stopped=${STOPPED:-75}
echo "preemptible: job $SLURM_JOB_ID, restart $restarts"

# A job that someone cancels, or that SLURM has put back itself, is COMPLETING; putting it back once more would bring a
# cancelled one to life.
is_ours_to_requeue() {
    [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]
}

# SLURM tells the run itself. This file outlives the signal, to see how the run ended.
trap : TERM
code=0
srun --distribution=block bert "$@" --exit-code-when-stopped "$stopped" || code=$?
case $code in
    0) exit 0 ;;
    "$stopped" | 143) ;; # 143 is a SIGTERM that came before the run could listen
    *) exit "$code" ;;   # 2 to 5: the same would happen again
esac
if ! is_ours_to_requeue; then
    echo "preemptible: the run is stopped; SLURM decides whether job $SLURM_JOB_ID comes back"
elif [ "$restarts" -ge "${MOST_RESTARTS:-100}" ]; then
    echo "preemptible: the run is stopped and job $SLURM_JOB_ID was restarted $restarts times; see whether it gets" \
        "on, and submit it again" >&2
else
    echo "preemptible: the run is stopped before its end; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
