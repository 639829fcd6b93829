# shellcheck shell=bash
# LUMI-G (CSC): 4 MI250X a node = 8 GPUs for PyTorch, 56 usable cores, Slingshot.
# NOT RUN YET on this machine: written from LUMI's public documentation (docs.lumi-supercomputer.eu, LUMI-G example
# batch scripts) and its AI guide on GitHub. Please report what had to change.
#
#   export SBATCH_ACCOUNT=project_<number>
#   source sites/lumi.sh                 # whole nodes, for submit_pm_dp.sh
#   source sites/lumi.sh shared          # a part of a node, for submit_pm.sh: one GPU and 7 cores a task
#   export CONTAINER=singularity CONTAINER_IMAGE=/appl/local/laifs/containers/...    # PyTorch comes in images: ls there
if [ -z "$IN_JOB" ]; then
    export SITE=lumi
    unset SBATCH_GPUS_PER_NODE SBATCH_GPUS_PER_TASK SBATCH_CPUS_PER_GPU
    if [ "$1" = shared ]; then
        export SBATCH_PARTITION=small-g SBATCH_GPUS_PER_TASK=1 SBATCH_CPUS_PER_GPU=7
    else
        export SBATCH_PARTITION=standard-g SBATCH_GPUS_PER_NODE=8
    fi
    export SBATCH_MEM_PER_GPU=60G
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/lumi.sh: set SBATCH_ACCOUNT to your project (project_...)" >&2
else
    export TASKS_PER_NODE=8
    # The seven free cores beside each GPU, in the order of the GPUs; a node that is shared has others.
    if [ "$SLURM_JOB_PARTITION" = standard-g ]; then
        export SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-7}
        cores=0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000
        export SLURM_CPU_BIND=mask_cpu:$cores
    fi
    export SLURM_GPU_BIND=none # every task sees the job's GPUs
    export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
    export GLOO_SOCKET_IFNAME=hsn0 # what ranks tell each other beside tensors
    export NCCL_NET_GDR_LEVEL=PHB
    export HDF5_USE_FILE_LOCKING=FALSE # Lustre
    # MIOpen's cache is a database that breaks on a shared file system.
    export MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_JOB_ID
    export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
    if [ "$CONTAINER" = singularity ]; then # with it a container sees Slingshot and the project's folders
        module use /appl/local/laifs/modules
        module load lumi-aif-singularity-bindings
    fi
fi
