#!/usr/bin/env bash
# Pre-training in a partition whose jobs are stopped for others' sake, or for longer than a job may last: the job puts
# itself back into the queue until the run is done. Submit it where configs/ and .venv are:
#   RUN=runs/mine sbatch scripts/slurm/preemptible.sh --config configs/pretrain_base_128_phase1.json --parallel.layout auto
# What follows the file's name are flags of `bert pretrain`. RUN is the run's folder, on a file system that all nodes share.
# Change: partition and account, nodes, GPUs and tasks of a node, time. Give SLURM's signal as much time as a checkpoint takes
# to write, and a minute. MOST_RESTARTS ends what never gets anywhere.
# SLURM sends SIGTERM to the run's processes when the time is nearly up, and when the job has to make room; the run
# saves and ends with 0. Which of the two ends it was, its end or a stop, `bert runs` tells.
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
run=${RUN:-runs/base_128_phase1}
[ $# -gt 0 ] || set -- --config configs/pretrain_base_128_phase1.json --parallel.layout auto
restarts=${SLURM_RESTART_COUNT:-0}
echo "preemptible: job $SLURM_JOB_ID, restart $restarts, $run"

# A job that someone cancels, or that SLURM has put back itself, is COMPLETING; putting it back once more would bring a
# cancelled one to life.
is_ours_to_requeue() {
    [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]
}

is_done() {
    [[ $(bert runs "$run" --json -) == *'"state": "done"'* ]]
}

# SLURM tells the run itself. This file outlives the signal, to see how the run ended.
trap : TERM
code=0
srun --distribution=block bert pretrain "$@" --save-ckpt-path "$run" || code=$?
# Its own mistakes (2 to 5) are the same the next time. 143 is a SIGTERM that came before the run listened.
[ "$code" = 0 ] || [ "$code" = 143 ] || exit "$code"
if is_done; then
    echo "preemptible: $run is done"
elif ! is_ours_to_requeue; then
    echo "preemptible: $run is stopped; SLURM decides whether job $SLURM_JOB_ID comes back"
elif [ "$restarts" -ge "${MOST_RESTARTS:-100}" ]; then
    echo "preemptible: $run is stopped and job $SLURM_JOB_ID was restarted $restarts times; see whether it gets on," \
        "and submit it again" >&2
    exit 1
else
    echo "preemptible: $run is stopped before its end; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
