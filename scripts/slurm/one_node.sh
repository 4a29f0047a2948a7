#!/usr/bin/env bash
# Training on the GPUs of one node, in one process. Submit it from the folder that contains configs/ and .venv:
#   sbatch scripts/slurm/one_node.sh
#   sbatch scripts/slurm/one_node.sh squad --config configs/squad_base.json --pretrained-ckpt-path runs/mine
# The arguments are a `bert` command; the default is phase 1 of the base model.
# Records are in data/, or in the folder DATASETS_DIR of the environment. --require-gpu stops a run on a node without a GPU;
# --no-require-gpu among the arguments allows one.
# Adjust: partition, account, number of GPUs, cores (16 are enough for four GPUs), memory, time limit. Options of sbatch
# override these, for example `sbatch --gpus-per-node=8 ...`.
# Five minutes before the time limit SLURM sends SIGTERM: the run saves a checkpoint and exits with 0, and the same
# command continues it.
#SBATCH --job-name=bert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
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
srun bert "$1" --require-gpu "${@:2}"
