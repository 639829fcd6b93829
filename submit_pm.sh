#!/bin/bash
# Trains under Slurm. Any flag of train.py goes after the script's name:
#
#   sbatch -n 1 -t 20 ./submit_pm.sh --config=short      # writes vit-era5-<jobid>.out; -n is the number of tasks (GPUs)
#
# Settings come from the environment (docs/slurm.md has examples):
#   SITE              a file of sites/ by name (perlmutter), or a path to your own. Default: local
#   DATADIR           the folder that stands for /data in the YAML's paths
#   LOGDIR            where runs and profiles go. Default: $SCRATCH/dl-at-scale-training/logs, without SCRATCH ./runs
#   CONTAINER         none (default), shifter, podman-hpc, apptainer or singularity; CONTAINER_IMAGE names the image,
#                     CONTAINER_ARGS adds words to its command line (--nv, --gpu --nccl)
#   PYTHON            Default: .venv/bin/python where that exists, else python; in a container python
#   ENABLE_PROFILING  1 runs rank 0 under nsys; the report is LOGDIR/PROFILE_OUTPUT.nsys-rep
#   TRAIN_SCRIPT      Default: train.py; evaluate.py takes the same way
#
# A job that reaches its time limit goes on by itself: 120 s before (--signal) Slurm sends USR1 to the ranks, they save
# and exit with 75, and this script puts the job into the queue again, until num_iters is done, or three lives in a row
# came to nothing. sbatch --no-requeue for a job that ends instead. docs/4-long-runs.md says more.
#
# Only options that every Slurm knows stand here. What a machine needs besides (account, queue, GPUs) comes from
# SBATCH_* variables, which `source sites/<machine>.sh` sets, or from sbatch's command line.
#SBATCH -J vit-era5
#SBATCH -o vit-era5-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH -t 01:00:00

set -eo pipefail
fail() { echo "submit_pm.sh: $1" >&2; exit 1; }

[ -n "$SLURM_JOB_ID" ] || fail "this is a job script: sbatch -n 1 submit_pm.sh ... (without Slurm: python train.py ...)"

# sbatch runs a copy of this file from its spool folder, so the repository is where sbatch was called.
cd "$SLURM_SUBMIT_DIR"
TRAIN_SCRIPT=${TRAIN_SCRIPT:-train.py}
[ -f "$TRAIN_SCRIPT" ] || fail "no $TRAIN_SCRIPT in $PWD: call sbatch from the root of the repository"

SITE=${SITE:-local}
site_file=$SITE
[[ $SITE == */* ]] || site_file=sites/$SITE.sh
[ -f "$site_file" ] || fail "SITE=$SITE: there is no $site_file; the folder has: $(cd sites && echo *.sh)"
trap 'echo "submit_pm.sh: $site_file failed: its last command, or one before it, did not succeed" >&2' ERR
# shellcheck source=/dev/null
IN_JOB=1 source "$site_file"
trap - ERR

# Tasks and CPUs. submit_pm_dp.sh sets WHOLE_NODES: one task a GPU on every node, unless -n asked for a number.
nodes=$SLURM_JOB_NUM_NODES
tasks=$nodes
[ -z "$WHOLE_NODES" ] || tasks=$((nodes * ${TASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}))
tasks=${SLURM_NTASKS:-$tasks}
per_node=$(((tasks + nodes - 1) / nodes))
srun_args=(--ntasks="$tasks")
[ -z "$WHOLE_NODES" ] || srun_args+=(--ntasks-per-node="$per_node")
# srun gives a task one core if nobody says more, and since Slurm 22.05 it no longer reads sbatch's -c.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then
    srun_args+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
elif [ -z "$SLURM_CPUS_PER_GPU" ] && { [ -n "$WHOLE_NODES" ] || [ "$nodes" = 1 ]; }; then
    cpus=$((SLURM_CPUS_ON_NODE / per_node))
    srun_args+=(--cpus-per-task="$((cpus > 0 ? cpus : 1))")
fi

# Folders. A container mounts them at /data and /logs; outside, two flags name them. The user's flags come last and win.
LOGDIR=${LOGDIR:-${SCRATCH:+$SCRATCH/dl-at-scale-training/logs}}
LOGDIR=$(realpath -m "${LOGDIR:-runs}")
mkdir -p "$LOGDIR"
if [ -n "$DATADIR" ]; then
    [ -d "$DATADIR" ] || fail "DATADIR=$DATADIR: there is no such folder"
    DATADIR=$(realpath "$DATADIR")
fi

container=()
read -ra extra <<<"${CONTAINER_ARGS:-}"
case ${CONTAINER:-none} in
none) ;;
shifter)
    container=(shifter --image="$CONTAINER_IMAGE" "${extra[@]}")
    volume=--volume
    ;;
podman-hpc)
    # Each task is a container of its own: ranks find each other through the host's network and memory. And a container
    # does not see the job's environment unless told to.
    container=(podman-hpc run --rm --network=host --ipc=host --pid=host --workdir="$PWD" --volume="$PWD:$PWD" "${extra[@]}")
    for name in 'SLURM_*' 'NCCL_*' 'GLOO_*' 'FI_*' 'HDF5_*' 'OMP_*' 'TORCH*' 'PYTORCH_*' NVIDIA_TF32_OVERRIDE \
        'MLFLOW_*' LINKED_FILES MASTER_ADDR_SUFFIX ENABLE_PROFILING NSYS_OUTPUT; do
        container+=(--env="$name")
    done
    volume=--volume
    ;;
apptainer | singularity)
    container=("$CONTAINER" exec --pwd="$PWD" --bind="$PWD" "${extra[@]}")
    volume=--bind
    ;;
*) fail "CONTAINER=$CONTAINER: use none, shifter, podman-hpc, apptainer or singularity" ;;
esac

flags=()
if [ ${#container[@]} = 0 ]; then
    [ -z "$DATADIR" ] || flags+=(--data_dir "$DATADIR")
    [ -n "$PYTHON" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python; } || PYTHON=python
else
    [ -n "$CONTAINER_IMAGE" ] || fail "CONTAINER=$CONTAINER needs an image: set CONTAINER_IMAGE"
    command -v "${container[0]}" >/dev/null || fail "CONTAINER=$CONTAINER, but this node has no ${container[0]}"
    container+=("$volume=$LOGDIR:/logs")
    if [ -n "$DATADIR" ]; then
        container+=("$volume=$DATADIR:/data")
        flags=(--data_dir /data)
    fi
    [ "$CONTAINER" = shifter ] || container+=("$CONTAINER_IMAGE")
    LOGDIR=/logs
fi
# An evaluation is written beside its checkpoint.
[ "${TRAIN_SCRIPT##*/}" = evaluate.py ] || flags=(--expdir "$LOGDIR" "${flags[@]}")
export NSYS_OUTPUT="$LOGDIR/${PROFILE_OUTPUT:-profile}"

# Every task runs this: who am I, then python. "$@" stays a list, so spaces and quotes in a flag survive.
# The profiler opens and closes the range from train.py (cudaProfilerApi); --kill none lets the run end by itself.
# shellcheck disable=SC2016  # the task expands these, not this shell
task='source ./export_DDP_vars.sh || exit 1
if [ "$ENABLE_PROFILING" = 1 ]; then
    command -v nsys >/dev/null || { echo "submit_pm.sh: ENABLE_PROFILING=1, but there is no nsys on PATH" >&2; exit 1; }
    [ "$RANK" != 0 ] ||
        exec nsys profile --trace=cuda,cublas,nvtx --kill none -c cudaProfilerApi -f true -o "$NSYS_OUTPUT" "$@"
fi
exec "$@"'

# One rank that fails must end the job: the ranks see to that themselves, and srun 20 s after the first one left.
# (Not --kill-on-bad-exit: it would kill ranks that are about to leave with 75, too. A profiler writes for minutes.)
# --export=ALL: after sbatch --export=NONE the tasks would otherwise miss what the site file set.
[ "$ENABLE_PROFILING" = 1 ] && wait=1800 || wait=20
launch=(srun -u --kill-on-bad-exit=0 --wait="$wait" --export=ALL "${srun_args[@]}" "${container[@]}")
command=("${PYTHON:-python}" "$TRAIN_SCRIPT" "${flags[@]}" "$@")
echo "submit_pm.sh: site $SITE, nodes $nodes, tasks $tasks:$(printf ' %q' "${launch[@]}" "${command[@]}")"
code=0
"${launch[@]}" bash -c "$task" bash "${command[@]}" || code=$?

if [ "$code" = 75 ]; then # saved, and not done
    # In its next life it finds its own run (utils/run/folder.py). One job of an array has the number of the whole array.
    job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    if scontrol requeue "$job"; then
        echo "submit_pm.sh: job $job is in the queue again, and will go on where it stopped"
        sleep 60 # Slurm ends this script
    else
        echo "submit_pm.sh: not in the queue again; to go on: submit the same command, for a training with --resume auto" >&2
    fi
fi
exit "$code"
