#!/usr/bin/env bash
# Training on the cores of one node, in one process. Submit it from the folder that contains .venv:
#   sbatch scripts/slurm/one_cpu_node.sh pretrain --config pretrain_scratch_mini_128
#   sbatch --cpus-per-task=32 scripts/slurm/one_cpu_node.sh search make manuals.index manuals --model sentence-transformers/all-MiniLM-L6-v2
#   sbatch --time=00:30:00 scripts/slurm/one_cpu_node.sh init articles mine --hours 24
# The arguments are a `bert` command, such as `pretrain --config mine/pretrain.json` for a plan of `bert init`. That measures the
# speed of its node, so start it with the cores of the training.
# Adjust: partition, account, cores, memory, time limit. Options of sbatch override these.
# Five minutes before the time limit SLURM sends SIGTERM: the run saves a checkpoint and exits with 0, and the same
# command continues it.
#SBATCH --job-name=bert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --no-requeue
#SBATCH --output=slurm-%x-%j.out
set -euo pipefail
export PATH="$PWD/.venv/bin:$PATH"
# The folder in which the shipped configs look for wikipedia/128 and the like.
export DATASETS_DIR=${DATASETS_DIR:-$PWD/data}
# srun does not use --cpus-per-task of the job without this variable.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
if [ $# = 0 ]; then
    echo "one_cpu_node: no command is named; run sbatch scripts/slurm/one_cpu_node.sh pretrain --config CONFIG" >&2
    exit 2
fi
# SLURM sends the signal to the run itself. This script ignores it and waits until the run has saved.
trap : TERM
srun bert "$@"
