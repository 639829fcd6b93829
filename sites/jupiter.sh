# shellcheck shell=bash
# JUPITER Booster (JSC): 4 GH200 (96 GB) a node, 288 Arm cores, InfiniBand.
# NOT RUN YET on this machine: written from JSC's public pages (apps.fz-juelich.de/jsc/hps/jupiter).
# Please report what had to change.
#
#   export SBATCH_ACCOUNT=<your budget>
#   source sites/jupiter.sh              # whole nodes only
#
# The PyTorch of its modules may be older than this code needs: make a .venv on a login node (its CPU is the same), or
# name another Python in PYTHON.
if [ -z "$IN_JOB" ]; then
    export SITE=jupiter
    export SBATCH_PARTITION=booster
    export SBATCH_GRES=gpu:4
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/jupiter.sh: set SBATCH_ACCOUNT to your budget" >&2
else
    export TASKS_PER_NODE=4
    export CUDA_VISIBLE_DEVICES=0,1,2,3 # every task sees the node's GPUs, which NCCL wants for NVLink
    export NCCL_SOCKET_IFNAME=ib0
    export GLOO_SOCKET_IFNAME=ib0       # what ranks tell each other beside tensors
    case $CONTAINER in apptainer | singularity) export CONTAINER_ARGS=${CONTAINER_ARGS:---nv} ;; esac
fi
