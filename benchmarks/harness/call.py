"""Start ranks in processes of their own, and say in a line why they failed (for ladder.py and doctor.py)."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from utils.device import cores_in_reach

ROOT = Path(__file__).resolve().parents[2]


def has_srun() -> bool:
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def nodes_in_reach() -> int:
    """Return on how many nodes ranks can be started: on those of a job that has srun, else on this one."""
    return int(os.environ.get("SLURM_NNODES", 1)) if has_srun() else 1


def all_devices() -> int:
    """Return how many ranks there can be: one for each GPU, and one a node where there are none."""
    return max(torch.cuda.device_count(), 1) * nodes_in_reach()


def stay_on(device: str) -> None:
    """Let nothing see a GPU where the configuration says `cpu`."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def check_place() -> None:
    """Raise ValueError in a shell that a job's node does not run: it sees another machine than the ranks."""
    if "SLURM_JOB_ID" in os.environ and "SLURMD_NODENAME" not in os.environ:
        raise ValueError(
            f"job {os.environ['SLURM_JOB_ID']} runs elsewhere than this shell: call this in its script "
            f"(sbatch --wrap 'python ...')"
        )


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as an error does, and with it the run that it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def spread(ranks: int) -> tuple[int, int]:
    """Return on how many nodes so many ranks run, and how many on each: nodes are filled one after another."""
    nodes = min(-(-ranks // (torch.cuda.device_count() or 1)), nodes_in_reach())
    return nodes, -(-ranks // nodes)


def launch(script: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a script on some ranks, and its environment: torchrun here, srun inside a job."""
    command, cpus = [sys.executable, script], len(cores_in_reach()) // ranks
    env = dict(os.environ)
    if has_srun():
        nodes, on_each = spread(ranks)
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", len(cores_in_reach()))) // on_each
        share = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={on_each}"]
        share += [f"--cpus-per-task={max(cpus, 1)}"]
        if env.pop("SLURM_GPUS", None):  # of the whole job: a step on fewer nodes cannot have them
            share += [f"--gpus-per-node={torch.cuda.device_count()}"]
        command = ["srun", "--export=ALL", "--overlap", *share, *command]
    elif ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *torchrun, script]
    return command, {"OMP_NUM_THREADS": str(max(cpus, 1))} | env


@contextlib.contextmanager
def held_back(*numbers: int) -> Iterator[None]:
    """Let signals wait until the block is left."""
    came: list[int] = []
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # what is not stays so
    usual = {number: signal.signal(number, lambda number, _: came.append(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


def call(command: list[str], env: dict[str, str], limit: float) -> tuple[int, str, str]:
    """Run a command and all that it starts; return its exit code, what it printed, and what it said of errors.

    Raises subprocess.TimeoutExpired after `limit` seconds. Nothing of it is left then, or when this is interrupted.
    """
    process = None
    try:
        with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # nobody would know a process half started
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
        told, errors = process.communicate(timeout=limit)
        return process.returncode, told, errors
    except BaseException:
        # srun passes the first on to its ranks, torchrun to its own; what does not listen gets the second.
        for number in (signal.SIGTERM, signal.SIGKILL) if process else ():
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.communicate(timeout=40)
        raise


def reason(errors: str) -> str:
    """Return the line that says why a run failed: our own, else the first error of any; a launcher's comes last."""
    lines = [line.strip() for line in errors.splitlines() if line.strip("=- ")]
    ours = [line for line in lines if ".py: error: " in line]
    any_error = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (ours or any_error or lines[-1:] or ["no message"])[0][-300:]
