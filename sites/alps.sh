# shellcheck shell=bash
# Alps (CSCS; the clusters Daint, Clariden, Santis): 4 GH200 (96 GB) a node, 288 Arm cores, Slingshot.
# NOT RUN YET on this machine: written from CSCS's public documentation (docs.cscs.ch: PyTorch, NCCL).
# Please report what had to change.
#
#   export SBATCH_ACCOUNT=<your project>
#   source sites/alps.sh                 # whole nodes only: these clusters do not share a node
#   sbatch --uenv=pytorch/v2.8.0:v1 --view=default -N 4 submit_pm_dp.sh --config=bs256_opt
#
# What that environment lacks goes into a .venv on top of it: python -m venv --system-site-packages .venv
if [ -z "$IN_JOB" ]; then
    export SITE=alps
    export SBATCH_PARTITION=normal # a quick test: sbatch -p debug
    [ -n "$SBATCH_ACCOUNT" ] || echo "sites/alps.sh: set SBATCH_ACCOUNT to your project" >&2
else
    export TASKS_PER_NODE=4
    export FI_MR_CACHE_MONITOR=userfaultfd
    export FI_CXI_DISABLE_HOST_REGISTER=1
    export FI_CXI_DEFAULT_CQ_SIZE=131072
    export FI_CXI_DEFAULT_TX_SIZE=32768
    export FI_CXI_RX_MATCH_MODE=software
    export NCCL_NET_GDR_LEVEL=PHB
    export NCCL_CROSS_NIC=1
    export NCCL_SOCKET_IFNAME=hsn
    export GLOO_SOCKET_IFNAME=hsn0     # what ranks tell each other beside tensors
    export NCCL_PROTO=^LL128           # slower on Slingshot, and wrong sums were seen on GH200: NVIDIA/nccl issue 2001
    # Between nodes a plugin that is missing is an error then, and not TCP in silence.
    [ "$SLURM_JOB_NUM_NODES" = 1 ] || export NCCL_NET="AWS Libfabric" NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    export HDF5_USE_FILE_LOCKING=FALSE # Lustre
fi
