#!/usr/bin/env bash
# A run on the GPUs of one node, in one process. Submit it where configs/ and .venv are:
#   sbatch scripts/slurm/one_node.sh
#   sbatch scripts/slurm/one_node.sh squad --config configs/squad_base.json --pretrained-ckpt-path runs/mine
# What follows the file's name is the command of `bert`; without it, phase 1 of the base model.
# Change: partition and account, the number of GPUs, cores (16 for four GPUs are plenty), memory, time. Any of them can be
# given at once too, as `sbatch --gpus-per-node=8 ...`.
# Five minutes before the time is up the run is told to stop; it saves and ends with 0, and the same line continues it.
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
# srun does not ask for as many cores a task as the job has unless this says so.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
[ $# -gt 0 ] || set -- pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
# The run is told to stop by SLURM itself, and this file waits until it has saved.
trap : TERM
srun bert "$@"
