# shellcheck shell=bash
# JUWELS Booster (JSC): 4 A100 (40 GB) a node, 48 cores, InfiniBand.
# NOT RUN YET on this machine: written from JSC's public pages (apps.fz-juelich.de/jsc/hps/juwels) and the course of
# HelmholtzAI-FZJ on GitHub. Please report what had to change.
#
#   export SBATCH_ACCOUNT=<your budget>
#   source sites/juwels.sh               # whole nodes only: JUWELS does not share a node
#
# The PyTorch of its modules may be older than this code needs: make a .venv, or name another Python in PYTHON.
if [ -z "$IN_JOB" ]; then
    export SITE=juwels
    export SBATCH_PARTITION=booster # a quick test: sbatch -p develbooster
    export SBATCH_GRES=gpu:4
    export SBATCH_THREADS_PER_CORE=1
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/juwels.sh: set SBATCH_ACCOUNT to your budget" >&2
else
    export TASKS_PER_NODE=4
    export CUDA_VISIBLE_DEVICES=0,1,2,3 # every task sees the node's GPUs, which NCCL wants for NVLink
    export MASTER_ADDR_SUFFIX=i         # a node's name with an i is its address on InfiniBand: others do not pass cells
    export NCCL_SOCKET_IFNAME=ib0
    export GLOO_SOCKET_IFNAME=ib0       # what ranks tell each other beside tensors
    case $CONTAINER in apptainer | singularity) export CONTAINER_ARGS=${CONTAINER_ARGS:---nv} ;; esac
fi
