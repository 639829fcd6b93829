# shellcheck shell=bash
# Leonardo Booster (CINECA): 4 A100 (64 GB) a node, 32 cores, InfiniBand.
# NOT RUN YET on this machine: written from CINECA's public user guide. Please report what had to change.
#
#   export SBATCH_ACCOUNT=<your account>
#   source sites/leonardo.sh             # whole nodes, for submit_pm_dp.sh
#   source sites/leonardo.sh shared      # a part of a node, for submit_pm.sh: one GPU and 8 cores a task
if [ -z "$IN_JOB" ]; then
    export SITE=leonardo
    export SBATCH_PARTITION=boost_usr_prod # a quick test: sbatch -q boost_qos_dbg
    unset SBATCH_GRES SBATCH_MEM_PER_NODE SBATCH_GPUS_PER_TASK SBATCH_CPUS_PER_GPU
    if [ "$1" = shared ]; then
        export SBATCH_GPUS_PER_TASK=1 SBATCH_CPUS_PER_GPU=8
    else
        export SBATCH_GRES=gpu:4 SBATCH_MEM_PER_NODE=0 # 0: all of the node's memory
    fi
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/leonardo.sh: set SBATCH_ACCOUNT to your project" >&2
else
    export TASKS_PER_NODE=4
    export SLURM_CPU_BIND=cores
    export SLURM_GPU_BIND=none         # every task sees the job's GPUs, which NCCL wants for NVLink
    export HDF5_USE_FILE_LOCKING=FALSE # Lustre
    case $CONTAINER in
    apptainer | singularity) export CONTAINER_ARGS=${CONTAINER_ARGS:---nv} ;;
    *) [ -n "$PYTHON" ] || [ -x .venv/bin/python ] || module load profile/deeplrn cineca-ai ;;
    esac
fi
