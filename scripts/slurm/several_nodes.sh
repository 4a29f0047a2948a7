#!/usr/bin/env bash
# Training on several nodes, with one process per GPU. Submit it from the folder that contains configs/ and .venv, on a file
# system that all nodes share:
#   sbatch scripts/slurm/several_nodes.sh
#   sbatch --nodes=4 scripts/slurm/several_nodes.sh pretrain --config configs/pretrain_large_128_phase1.json --parallel.layout auto
# The arguments are a `bert` command; the default is phase 1 of the base model.
# Records are in data/, or in the folder DATASETS_DIR of the environment. --require-gpu stops a run on a node without a GPU;
# --no-require-gpu among the arguments allows one.
# Adjust: partition, account, number of nodes, GPUs and tasks per node. The number of tasks per node is the number of GPUs,
# or a divisor of it if a replica uses several GPUs; `bert plan` prints it. The processes read their addresses from the
# variables of srun and use ports 20000 to 31999, which must be open between the nodes.
# Five minutes before the time limit SLURM sends SIGTERM to all processes: the run saves one checkpoint and exits with 0.
# The same command continues it, also with another number of nodes.
#SBATCH --job-name=bert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --no-requeue
#SBATCH --output=slurm-%x-%j.out
set -euo pipefail
export PATH="$PWD/.venv/bin:$PATH"
# The folder in which the configs look for wikipedia/128 and the like.
export DATASETS_DIR=${DATASETS_DIR:-$PWD/data}
# srun does not use --cpus-per-task of the job without this variable.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
[ $# -gt 0 ] || set -- pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
# SLURM sends the signal to the run itself. This script ignores it and waits until the run has saved.
trap : TERM
# With the block distribution `bert` can derive the node of each rank from the variables of SLURM.
srun --distribution=block bert "$1" --require-gpu "${@:2}"
