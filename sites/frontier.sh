# shellcheck shell=bash
# Frontier (OLCF): 4 MI250X a node = 8 GPUs for PyTorch, 56 usable cores, Slingshot.
# NOT RUN YET on this machine: written from OLCF's public user guide. Please report what had to change.
#
#   export SBATCH_ACCOUNT=<your project>
#   source sites/frontier.sh             # whole nodes only: Frontier does not share a node
#
# Put the repository on Orion: home is read-only on compute nodes. PYTHON names a Python with a ROCm build of torch.
if [ -z "$IN_JOB" ]; then
    export SITE=frontier
    export SBATCH_PARTITION=batch
    export SBATCH_GPUS_PER_NODE=8
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/frontier.sh: set SBATCH_ACCOUNT to your project" >&2
else
    export TASKS_PER_NODE=8
    # Each task sees the one GPU next to its 7 cores (the eighth core of each group belongs to the system).
    export SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-7}
    export SLURM_GPU_BIND=closest
    module load PrgEnv-gnu rocm craype-accel-amd-gfx90a
    # RCCL reaches Slingshot through aws-ofi-rccl, which users build; put its lib folder on LD_LIBRARY_PATH.
    export NCCL_SOCKET_IFNAME=hsn0
    export GLOO_SOCKET_IFNAME=hsn0 # what ranks tell each other beside tensors
    export NCCL_NET_GDR_LEVEL=3
    export NCCL_CROSS_NIC=1
    export FI_MR_CACHE_MONITOR=kdreg2
    export FI_CXI_DEFAULT_CQ_SIZE=131072
    export HDF5_USE_FILE_LOCKING=FALSE # Lustre
    # MIOpen's cache is a database that breaks on a shared file system.
    export MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_JOB_ID
    export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
    case $CONTAINER in apptainer | singularity) export CONTAINER_ARGS=${CONTAINER_ARGS:---rocm} ;; esac
fi
