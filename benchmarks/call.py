"""Start a run in processes of its own, and say in a line why it failed (for ladder.py and doctor.py)."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def call(command: list[str], env: dict[str, str], limit: float) -> tuple[int, str, str]:
    """Run a command and all that it starts; return its exit code, what it printed, and what it said of errors.

    Raises subprocess.TimeoutExpired after `limit` seconds. Nothing of it is left then, or when this is interrupted.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        told, errors = process.communicate(timeout=limit)
        return process.returncode, told, errors
    except BaseException:
        # srun passes the first on to its ranks, torchrun to its own; what does not listen gets the second.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.communicate(timeout=40)
        raise


def reason(errors: str) -> str:
    """Return the line that says why a run failed: our own, else the first error of any; a launcher's comes last."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    ours = [line for line in lines if ".py: error: " in line]
    any_error = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (ours or any_error or lines[-1:] or ["no message"])[0][-300:]
