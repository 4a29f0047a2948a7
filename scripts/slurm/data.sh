#!/usr/bin/env bash
# Prepares records on many machines: a job array whose tasks are the workers of one dask cluster. Submit it where .venv is
# (with the extra dask), on a file system that all nodes share:
#   sbatch scripts/slurm/data.sh data /shared/dump /shared/wikipedia --vocab /shared/vocab.txt --sequence-length 128 --mask-tokens 20
#   sbatch --array=0-31 scripts/slurm/data.sh tokenize /shared/sentences /shared/512 --vocab /shared/vocab.txt --masking dynamic
# What follows the file's name is a step of `bert` that takes --executor dask, with absolute paths.
# Change: partition and account, the number of tasks, cores and memory of each (1 to 2 GB a core), time.
# The first task of the array also runs the scheduler and the step. The others begin whenever there is room for them, may
# be stopped at any time, and end when the step does. The bytes written do not depend on how many there were. When the
# time is up before the step is done, the same line goes on with what is missing.
#SBATCH --job-name=bert-data
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out
set -euo pipefail
export PATH="$PWD/.venv/bin:$PATH"
if [ $# = 0 ]; then
    echo "data: no step is given; as sbatch scripts/slurm/data.sh tokenize IN OUT --vocab VOCAB" >&2
    exit 2
fi
meeting=${MEETING:-$PWD}/dask-$SLURM_ARRAY_JOB_ID.json
scratch=${TMPDIR:-/tmp}

# Works until the scheduler ends, or does not start for as long as the first task may wait for a node. Each shard needs
# a worker process; its nanny restarts one that is killed.
work() {
    dask worker --scheduler-file "$meeting" --nworkers "${SLURM_CPUS_PER_TASK:-1}" --nthreads 1 --no-dashboard \
        --local-directory "$scratch" --death-timeout "${PATIENCE:-600}"
}

if [ "$SLURM_ARRAY_TASK_ID" != "$SLURM_ARRAY_TASK_MIN" ]; then
    echo "data: task $SLURM_ARRAY_TASK_ID works for the scheduler of $meeting"
    # That the scheduler is gone is how it ends.
    work || echo "data: task $SLURM_ARRAY_TASK_ID: its worker ended with exit code $?"
    exit 0
fi

# The others wait for this file; one that an earlier try of this task left names a scheduler that is gone.
rm -f "$meeting"
trap 'rm -f "$meeting"; kill $(jobs -p) 2> /dev/null; wait' EXIT
trap 'exit 143' TERM
dask scheduler --scheduler-file "$meeting" --port 0 --no-dashboard &
scheduler=$!
until [ -s "$meeting" ]; do
    kill -0 "$scheduler" || { echo "data: the scheduler did not start" >&2; exit 5; }
    sleep 0.2
done
# In the background, since a shell hears no signal while it waits for what runs in front.
bert "$@" --executor dask --scheduler "$meeting" &
step=$!
work &
code=0
wait -n "$step" $! || code=$?
if kill -0 "$step" 2> /dev/null; then
    echo "data: the worker of this task ended (exit code $code), so the step is ended too" >&2
    code=5
fi
[ "$code" = 0 ] || echo "data: the step ended with exit code $code; the same line goes on with it" >&2
exit "$code"
