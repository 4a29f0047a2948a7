#!/usr/bin/env bash
# Prepare records on many machines: a job array whose tasks are the workers of one dask cluster. Submit it from the folder
# that contains .venv (with the extra dask), on a file system that all nodes share:
#   sbatch scripts/slurm/data.sh data /shared/dump /shared/wikipedia --vocab /shared/vocab.txt --sequence-length 128 --mask-tokens 20
#   sbatch --array=0-31 scripts/slurm/data.sh tokenize /shared/sentences /shared/512 --vocab /shared/vocab.txt --masking dynamic
# The arguments are a step of `bert` that supports --executor dask, with absolute paths.
# Adjust: partition, account, number of tasks, cores and memory per task (1 to 2 GB per core), time limit.
# The first task of the array also runs the scheduler and the step. The other tasks may start and stop at any time. They end
# when the file dask-JOB.done says that the step has ended; until then they wait for a first task that is requeued. The
# output does not depend on their number. If the time limit ends the step early, the same command processes the missing shards.
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
    echo "data: no step is named; run sbatch scripts/slurm/data.sh tokenize IN OUT --vocab VOCAB" >&2
    exit 2
fi
meeting=${MEETING:-$PWD}/dask-$SLURM_ARRAY_JOB_ID
scheduler_file=$meeting.json done_file=$meeting.done
patience=${PATIENCE:-600}

# Start a worker process per core; a nanny restarts a killed worker. They end with the scheduler, or after --death-timeout
# without one.
start_workers() {
    dask worker --scheduler-file "$scheduler_file" --nworkers "${SLURM_CPUS_PER_TASK:-1}" --nthreads 1 --no-dashboard \
        --local-directory "${TMPDIR:-/tmp}" --death-timeout 60 &
    workers=$!
}

if [ "$SLURM_ARRAY_TASK_ID" != "$SLURM_ARRAY_TASK_MIN" ]; then
    trap 'kill $(jobs -p) 2> /dev/null; wait; exit 143' TERM
    echo "data: task $SLURM_ARRAY_TASK_ID waits for the scheduler of $scheduler_file"
    since=$SECONDS
    until [ -e "$done_file" ]; do
        if [ -s "$scheduler_file" ]; then
            started=$SECONDS
            start_workers
            # Workers that found a scheduler end well, or later than --death-timeout.
            if wait "$workers" || [ $((SECONDS - started)) -gt 65 ]; then
                since=$SECONDS
            fi
        fi
        if [ $((SECONDS - since)) -gt "$patience" ]; then
            echo "data: task $SLURM_ARRAY_TASK_ID found no scheduler in $patience s; resubmit the array if the step is not done" >&2
            exit 5
        fi
        sleep 1
    done
    exit 0
fi

# The other tasks wait for this file. Remove the files of an earlier attempt, whose scheduler has ended.
rm -f "$scheduler_file" "$done_file"
trap 'rm -f "$scheduler_file"; kill $(jobs -p) 2> /dev/null; wait' EXIT
trap 'exit 143' TERM
dask scheduler --scheduler-file "$scheduler_file" --port 0 --no-dashboard &
scheduler=$!
until [ -s "$scheduler_file" ]; do
    kill -0 "$scheduler" || { echo "data: the scheduler did not start" >&2; exit 5; }
    sleep 0.2
done
# In the background: bash runs no trap while it waits for a foreground process.
bert "$@" --executor dask --scheduler "$scheduler_file" &
step=$!
start_workers
code=0
wait -n "$step" "$workers" || code=$?
if kill -0 "$step" 2> /dev/null; then
    echo "data: the worker of this task ended (exit code $code); stopping the step" >&2
    code=5
fi
touch "$done_file"
# Workers that the scheduler dismisses end without an error. One that is still starting would wait --death-timeout for it.
python -c "import contextlib, sys, distributed
with distributed.Client(scheduler_file=sys.argv[1]) as client:
    with contextlib.suppress(TimeoutError):
        client.wait_for_workers(int(sys.argv[2]), timeout=20)
    client.retire_workers(close_workers=True)" "$scheduler_file" "${SLURM_CPUS_PER_TASK:-1}" &
wait $! || true
[ "$code" = 0 ] || echo "data: the step ended with exit code $code; submit the same command again to continue it" >&2
exit "$code"
