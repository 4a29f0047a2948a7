#!/usr/bin/env bash
# Training in a partition with preemption, or longer than the time limit of a job: the job requeues itself until the run is
# complete. Submit it from the folder that contains configs/ and .venv:
#   sbatch scripts/slurm/preemptible.sh pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
#   sbatch scripts/slurm/preemptible.sh squad --config configs/squad_base.json --pretrained-ckpt-path runs/mine --seeds 5
# The arguments are a `bert` command; the default is phase 1 of the base model. The folder of the run must be on a file
# system that all nodes share.
# Records are in data/, or in the folder DATASETS_DIR of the environment. --require-gpu stops a run on a node without a GPU;
# --no-require-gpu among the arguments allows one.
# Adjust: partition, account, number of nodes, GPUs and tasks per node, time limit. The time in --signal must be at least
# one minute more than writing a checkpoint takes. MOST_RESTARTS (3) starts in a row that do not advance the step end the job.
# SLURM sends SIGTERM to the processes of the run before the time limit and at preemption. The run saves a checkpoint and
# exits with the code STOPPED, or with 0 if it is complete.
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
# The folder in which the configs look for wikipedia/128 and the like.
export DATASETS_DIR=${DATASETS_DIR:-$PWD/data}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
[ $# -gt 0 ] || set -- pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
restarts=${SLURM_RESTART_COUNT:-0}
stopped=${STOPPED:-75}
most=${MOST_RESTARTS:-3}

# The job's log has the step at which each of its starts began and ended.
log=$(readlink "/proc/$$/fd/1")
last_step() {
    grep -oE '^run: (continues from .*\(step|stopped at step) [0-9,]+' "$log" | grep -oE '[0-9,]+$' | tail -n 1
}
step=$(last_step 2> /dev/null) || step=0
echo "preemptible: job $SLURM_JOB_ID, restart $restarts, step $step"
starts=$(grep "^preemptible: job $SLURM_JOB_ID, restart" "$log" 2> /dev/null | tail -n $((most + 1))) || starts=
if [ "$restarts" -ge "$most" ] && [ "$(grep -c ", step $step\$" <<< "$starts")" -gt "$most" ]; then
    echo "preemptible: the last $most starts did not advance step $step; allow more time before the signal or the time limit," \
        "then submit it again" >&2
    exit "$stopped"
fi

# A job that was cancelled, or requeued by SLURM itself, is COMPLETING. Requeueing it would restart a cancelled job. A job with
# more restarts than this start runs again already, because this node had lost its network. Requeueing it would end that
# start. Fewer restarts are no sign of that: a job that a restarted job has submitted inherits its SLURM_RESTART_COUNT.
is_ours_to_requeue() {
    local job
    job=$(scontrol show job "$SLURM_JOB_ID")
    [[ $job == *JobState=RUNNING* ]] || return 1
    ! [[ $job =~ " Restarts="([0-9]+) && ${BASH_REMATCH[1]} -gt $restarts ]]
}

# SLURM sends the signal to the run itself. This script ignores it and checks how the run ended.
trap : TERM
code=0
srun --distribution=block bert "$1" --require-gpu "${@:2}" --exit-code-when-stopped "$stopped" || code=$?
case $code in
    0) exit 0 ;;
    # 5: a process or a device is lost; 137: SIGKILL; 143: SIGTERM came before the run installed its handler.
    "$stopped" | 5 | 137 | 143) ;;
    # 2 to 4: mistakes that a restart would repeat.
    *) exit "$code" ;;
esac
if ! is_ours_to_requeue; then
    echo "preemptible: SLURM has ended or restarted job $SLURM_JOB_ID; this start does not requeue it"
else
    echo "preemptible: the run ended before its last step; requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
