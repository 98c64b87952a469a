#!/usr/bin/env bash
# Two machines with eight GPUs each. In a folder that all machines see:
#   sbatch slurm.sh runs/stapo-1.7b configs/qwen3-1.7b.toml
# The job is queued again where a machine fails or the time is up, and then goes on from the last checkpoint, also with
# another number of machines (scontrol update JobId=.. NumNodes=..): the result has the same bits.
#SBATCH --job-name=stapo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

# Only processes that know this may join the run.
STAPO_RANKS_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export STAPO_RANKS_TOKEN

# Slurm sends TERM to the ranks 300 seconds before the end; they stop after the step and save. One step must take less.
srun --kill-on-bad-exit=0 examples/cluster/rank.sh "$@"
status=$?

# 143: stopped by TERM, with all that was done saved.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
