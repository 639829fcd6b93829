"""The records in results/: machine, versions, command, figures with their spread."""

import contextlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from utils.device import cores_in_reach
from utils.files import to_json, write_text

ROOT = Path(__file__).resolve().parents[2]
RECORDS = (":!benchmarks/results", ":!*.md")  # what a proof writes, as git leaves it out


def device_name() -> str:
    """Return the GPU's name, else the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def commit_of_code() -> str:
    """Return the commit of this code, marked where it was changed since, records and pages aside; else `unknown`."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=20, check=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *RECORDS], timeout=60).returncode
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip() + "-dirty" * (changed != 0)


def libraries() -> dict[str, str]:
    """Return the versions of what computes and sends on a GPU; nothing where there is none."""
    if not torch.cuda.is_available() or torch.version.hip:
        return {}
    found = {"cuda": torch.version.cuda}
    with contextlib.suppress(RuntimeError):  # another cuDNN than that it was compiled for
        found["cudnn"] = str(torch.backends.cudnn.version())
    with contextlib.suppress(AttributeError):  # built without NCCL
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


class Figures(dict[str, float]):
    """Figures by name; of those that were measured several times the median, and in `spread` the least and the most."""

    def __init__(self):
        super().__init__()
        self.spread: dict[str, list[float]] = {}

    def add(self, name: str, values: Sequence[float]) -> str:
        """Add a figure that was measured several times, and return a line that tells it."""
        self[name], self.spread[name] = statistics.median(values), [min(values), max(values)]
        return f"{name:60} {self[name]:10.4g}  {min(values):.4g} to {max(values):.4g}"


def write_record(path: Path, figures: dict[str, float], spread: dict[str, list[float]], **more: Any) -> None:
    """Write the figures, and [min, max] of those that vary; null where they are not finite."""
    record = {
        "machine": {"device": device_name(), "cores": len(cores_in_reach()), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **libraries()},
        "command": " ".join(["python", *sys.argv]),
        "figures": figures,
        "spread": spread,
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_json(record, indent=1) + "\n")
