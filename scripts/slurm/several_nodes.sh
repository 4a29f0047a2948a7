#!/usr/bin/env bash
# A run over several nodes, a process for each GPU. Submit it where configs/ and .venv are, on a file system that all
# nodes share:
#   sbatch scripts/slurm/several_nodes.sh
#   sbatch --nodes=4 scripts/slurm/several_nodes.sh pretrain --config configs/pretrain_large_128_phase1.json --parallel.layout auto
# What follows the file's name is the command of `bert`; without it, phase 1 of the base model.
# Change: partition and account, nodes, and GPUs and tasks of a node. There are as many tasks on a node as GPUs, or a
# number that divides them where a replica takes several; `bert plan` tells. The processes find one another by what
# srun says, on ports from 20000 to 31999, which nodes must let through to one another.
# Five minutes before the time is up all are told to stop; the run saves once and ends with 0, and the same line
# continues it, also with another number of nodes.
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
# srun does not ask for as many cores a task as the job has unless this says so.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
[ $# -gt 0 ] || set -- pretrain --config configs/pretrain_base_128_phase1.json --parallel.layout auto
# The run is told to stop by SLURM itself, and this file waits until it has saved.
trap : TERM
# Ranks count node by node: so every process knows its neighbours.
srun --distribution=block bert "$@"
