# shellcheck shell=bash
# Perlmutter (NERSC): 4 A100 a node, 128 hardware threads, Slingshot.
# NOT RUN YET on this machine: written from NERSC's public examples. Please report what had to change.
#
#   export SBATCH_ACCOUNT=<your project>_g
#   source sites/perlmutter.sh           # whole nodes, for submit_pm_dp.sh
#   source sites/perlmutter.sh shared    # a part of a node, for submit_pm.sh: one GPU and 32 threads a task
if [ -z "$IN_JOB" ]; then
    export SITE=perlmutter
    export SBATCH_CONSTRAINT=gpu # 80 GB cards: sbatch -C 'gpu&hbm80g'
    unset SBATCH_GPUS_PER_NODE SBATCH_GPUS_PER_TASK SBATCH_CPUS_PER_GPU
    if [ "$1" = shared ]; then
        export SBATCH_QOS=shared SBATCH_GPUS_PER_TASK=1 SBATCH_CPUS_PER_GPU=32
    else
        export SBATCH_QOS=regular SBATCH_GPUS_PER_NODE=4
    fi
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/perlmutter.sh: set SBATCH_ACCOUNT to your project (it ends in _g)" >&2
else
    export TASKS_PER_NODE=4
    export SLURM_CPU_BIND=cores
    export SLURM_GPU_BIND=none              # every task sees the job's GPUs, which NCCL wants for NVLink
    # NCCL on Slingshot: NERSC's own settings (NERSC/nccl-ofi-plugin on GitHub), and what CSCS's documentation has for
    # the same network (docs.cscs.ch, Communication, NCCL).
    export NCCL_SOCKET_IFNAME=hsn
    export NCCL_CROSS_NIC=1
    export FI_MR_CACHE_MONITOR=userfaultfd  # the default monitor can deadlock with NCCL
    export FI_CXI_DISABLE_HOST_REGISTER=1
    export FI_CXI_DEFAULT_CQ_SIZE=131072
    # Between nodes a plugin that is missing is an error then, and not TCP in silence. (A .venv needs it, too: load the
    # module of NCCL that has it, `module avail nccl`.)
    [ "$SLURM_JOB_NUM_NODES" = 1 ] || export NCCL_NET="AWS Libfabric" NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    export HDF5_USE_FILE_LOCKING=FALSE      # Lustre scratch
    case $CONTAINER in
    shifter) export CONTAINER_ARGS=${CONTAINER_ARGS:---module=gpu,nccl-plugin} ;; # image: nersc/pytorch:25.06.01
    podman-hpc) export CONTAINER_ARGS=${CONTAINER_ARGS:---gpu --nccl} ;;
    *) [ -n "$PYTHON" ] || [ -x .venv/bin/python ] || module load pytorch ;;
    esac
fi
