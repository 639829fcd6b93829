#!/bin/bash
# Trains over a grid of data x context x tensor parallel ranks (train_mp.py), on whole nodes, one task a GPU:
#
#   sbatch -N 4 submit_pm_mp.sh --config=mp --tensor_parallel=4       # writes vit-era5-<jobid>.out
#
# With CUDA graphs: TRAIN_SCRIPT=train_mp_graphs.py sbatch -N 4 submit_pm_mp.sh ...
#
# The settings are those of submit_pm.sh, which does the work; -n asks for a number of tasks in place of whole nodes.
# TASKS_PER_NODE (a site file sets it) says how many tasks a node gets. Default: the GPUs Slurm gave, or 1.
#SBATCH -J vit-era5
#SBATCH -o vit-era5-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH -t 01:00:00
#SBATCH --exclusive

body=${SLURM_SUBMIT_DIR:-.}/submit_pm.sh
[ -f "$body" ] || { echo "submit_pm_mp.sh: no $body: call sbatch from the root of the repository" >&2; exit 1; }
# shellcheck source=/dev/null
WHOLE_NODES=1 TRAIN_SCRIPT=${TRAIN_SCRIPT:-train_mp.py} source "$body" "$@"
