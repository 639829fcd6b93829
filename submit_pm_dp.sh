#!/bin/bash
# Trains on whole nodes, one task a GPU:
#
#   sbatch -N 4 submit_pm_dp.sh --config=bs256_opt       # writes vit-era5-<jobid>.out
#
# The settings are those of submit_pm.sh, which does the work; this file only asks Slurm for whole nodes.
# TASKS_PER_NODE (a site file sets it) says how many tasks a node gets. Default: the GPUs Slurm gave, or 1.
#SBATCH -J vit-era5
#SBATCH -o vit-era5-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH -t 01:00:00
#SBATCH --exclusive

body=${SLURM_SUBMIT_DIR:-.}/submit_pm.sh
[ -f "$body" ] || { echo "submit_pm_dp.sh: no $body: call sbatch from the root of the repository" >&2; exit 1; }
# shellcheck source=/dev/null
WHOLE_NODES=1 source "$body" "$@"
