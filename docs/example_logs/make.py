"""Train what lies here: the same run in float32 and in bf16, each small; a trace of one step; a picture of its memory.

Chapter 5 gets the verdict of the first.

python docs/example_logs/make.py
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RUNS = {"float32": [], "bf16": ["--amp_mode=bf16"]}
TRACED = ["--num_iters=13", "--profile=torch", "--profile_steps", "10", "2", "1"]
KEPT = ("out.log", "metrics.jsonl", "config.yaml", "report/report.json")


@contextlib.contextmanager
def trained(name: str, *flags: str) -> Iterator[Path]:
    """Train `demo`, and give the run's folder, which goes afterwards."""
    command = [sys.executable, "train.py", "--config=demo", f"--run_num=example_{name}", "--checkpoint_every=None"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True)
    run = ROOT / f"runs/demo/1GPU/example_{name}"
    yield run
    shutil.rmtree(run)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def main() -> None:
    for name, flags in RUNS.items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        with trained(name, "--num_iters=216", "--report", "--plot_channels=vor_upper", *flags) as run:
            for path in KEPT:
                copy(run / path, HERE / name / path)
            (events,) = (run / "logs").iterdir()
            copy(events, HERE / name / "logs/events.out.tfevents.0")  # its name had that of the machine
    subprocess.run([sys.executable, ROOT / "docs/make.py"], check=True)
    with trained("trace", *TRACED) as run:
        (trace,) = (run / "profile").glob("rank0.*.pt.trace.json.gz")
        copy(trace, HERE / "trace/rank0.pt.trace.json.gz")
    with trained("memory", "--num_iters=15", "--profile=torch") as run:
        copy(run / "profile/rank0_memory.png", ROOT / "docs/figures/memory.png")


if __name__ == "__main__":
    main()
