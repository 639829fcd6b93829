"""Which records are older than the code that they measure? `make docs` says so, by the commits of the files.

A record that is older may still be right: code changes that change no figure. It says what to look at, and the command
that makes the record anew.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ("networks", "train.py", "utils/loss.py")
GRID = (*MODEL, "distributed", "train_mp.py", "utils/comm.py")
SAVING = ("utils/checkpoint", "utils/run/saving.py")
READING = ("utils/data",)
PLANNER = ("benchmarks/planner",)
# The code whose figures a record holds, beside the script that makes it.
MEASURES = {
    "batches": MODEL, "certificate": GRID, "checkpoint": SAVING, "combinations": (*MODEL, "utils/compiler.py"),
    "compare_ranks": GRID,
    "derivatives": ("utils/sphere.py", "utils/data/loss_weights.py"), "ensembles": (*MODEL, "utils/forecast"),
    "evaluation": ("evaluate.py", "utils/forecast"), "faults": (*GRID, *SAVING, "utils/ranks"),
    "forecasts": (*MODEL, "evaluate.py", "utils/forecast"), "gpu": (*GRID, "utils/compiler.py"),
    "gpu_certificate": GRID, "gpu_loader": READING, "gpu_tests": (*GRID, *SAVING, *READING), "ladder_base": MODEL,
    "ladder_demo": GRID, "loader": READING, "many_ranks": GRID, "memory": MODEL,
    "nightly": (), "observers": ("utils/measure", "utils/spans.py", "utils/run/verify.py"),
    "overlap": MODEL, "optimizers": ("utils/optimizers.py",), "plan": (*GRID, *PLANNER), "plan_mp": (*GRID, *PLANNER),
    "scaling": (*GRID, *PLANNER), "simulate": (*GRID, "benchmarks/planner/trace.py"), "skill_demo": MODEL,
    "skill_era5_djf": MODEL, "soak": (*GRID, *SAVING, "utils/ranks"), "startup": ("utils/ranks",), "step": MODEL,
    "storage": (*SAVING, "utils/data", "utils/record"),
}  # fmt: skip
NO_GPU = (
    "What no record here can say: figures of several GPUs, and one GPU's of memory savers, saves and the report: "
    "python benchmarks/gpu_suite.py --json FILE; make doctor makes a machine's file for the planner."
)


def git(root: Path, *arguments: str) -> list[str]:
    """Return the lines that git says. Raises OSError or CalledProcessError where it cannot."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_since(root: Path, path: str, code: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """Return the day of a file's last commit, and which files of the code have one after it; None without a commit."""
    made = git(root, "log", "-1", "--format=%H %cs", "--", path)
    if not made:
        return None
    commit, day = made[0].split()
    return day, sorted(
        {line for line in git(root, "log", "--format=", "--name-only", f"{commit}..HEAD", "--", *code) if line}
    )


def ages(root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each record that is older than the code that it measures, and what cannot be renewed here."""
    try:
        git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        yield "How old the records are cannot be said: this is no clone of a git repository."
        return
    for name, code in MEASURES.items():
        path = f"benchmarks/results/{name}.json"
        command = json.loads((root / path).read_text())["command"]
        found = changed_since(root, path, code)
        if found and found[1]:
            day, files = found
            more = f" and {len(files) - 1} more" * (len(files) > 1)
            yield f"{name} is of {day}; {files[0]}{more} changed since: {command}"
    yield NO_GPU
