# shellcheck shell=bash
# Tells PyTorch who this process is. Source it inside each task:
#
#   srun -n 2 bash -c 'source ./export_DDP_vars.sh && exec python train.py --config=demo'
#
# Only a task of srun is a rank. A batch script's own shell has SLURM_PROCID and SLURM_NTASKS too; the SLURM_STEP_*
# variables are what it lacks. The step's size counts, not the job's: salloc's shell is a step of one task.
if [ -z "$SLURM_STEP_NUM_TASKS" ] || [ -z "$SLURM_STEP_NODELIST" ]; then
    echo "export_DDP_vars.sh: no SLURM_STEP_NUM_TASKS, so this is no task of srun: use srun bash -c 'source ...'" >&2
    return 1
fi

export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS
# Rank 0 runs on the first host of the list: nid[001004-001007,001010] -> nid001004. Not scontrol: containers lack it.
# Where a node has a second name on the fast network, MASTER_ADDR_SUFFIX is what that has more (sites/juwels.sh).
[[ $SLURM_STEP_NODELIST =~ ^([^][,]*)(\[([0-9]+)[^]]*\])?([^][,]*) ]]
export MASTER_ADDR=${BASH_REMATCH[1]}${BASH_REMATCH[3]}${BASH_REMATCH[4]}$MASTER_ADDR_SUFFIX
# From the job's id and the step's, so that two jobs on one node do not meet, nor two steps of a job. Below 32768, where
# Linux starts to hand out ports itself.
export MASTER_PORT=$((10000 + (SLURM_JOB_ID + 1009 * ${SLURM_STEP_ID:-0}) % 20000))
