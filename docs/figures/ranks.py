"""Where four ranks spend a step: traces of three runs in benchmarks/compare_ranks.py, in the last of which one is late.

python docs/figures/ranks.py        needs the data of `make demo` and Holistic Trace Analysis; a minute
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose tensorboard.py would hide the package

LATE, SECONDS = 2, 0.1
RUNS = {
    "data parallel: four ranks, buckets of 1 MiB": ("4GPU", ["--bucket_cap_mb=1"]),
    "tensor parallel: two pairs": ("2MP", ["--tensor_parallel=2"]),
    f"the same, and rank {LATE} sleeps {1000 * SECONDS:.0f} ms in each MLP": ("2MP", ["--tensor_parallel=2", "late"]),
}
FLAGS = [
    "--config=demo", "--num_iters=10", "--rollout_steps=1", "--rollout_from=0", "--global_batch_size=32",
    "--profile=torch", "--profile_steps", "4", "2", "2", "--profile_ranks=all", "--checkpoint_every=None",
]  # fmt: skip


def train(argv: list[str]) -> None:
    """Be one of the ranks."""
    import train as chapter_1
    import train_mp as chapter_2
    from networks.vit import MLP
    from utils.ranks.start import start

    if "late" in argv and os.environ["RANK"] == str(LATE):
        forward = MLP.forward
        MLP.forward = lambda self, x: time.sleep(SECONDS) or forward(self, x)
    chapter = chapter_2 if any("tensor_parallel" in word for word in argv) else chapter_1
    start(chapter.main, [word for word in argv if word != "late"], lambda _: ())


def traced(name: str, flags: list[str], folder: str) -> list[dict]:
    """Return the rows of compare_ranks.py for a run."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", __file__]
    argv = [*FLAGS, *flags, f"--expdir={folder}"]
    subprocess.run([*torchrun, *argv], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    run = Path(folder, "demo", name, "00")
    subprocess.run([sys.executable, "benchmarks/compare_ranks.py", run], cwd=ROOT, check=True)
    with (run / "profile/ranks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = [{kind: float(x) for kind, x in row.items() if kind not in ("rank", "late")} for row in rows]
    return [{"rank": int(a["rank"])} | b | {"late": a["late"] == "True"} for a, b in zip(rows, numbers)]


def main() -> None:
    from benchmarks.compare_ranks import picture
    from benchmarks.harness.record import write_record

    found = {}
    for title, (name, flags) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[title] = traced(name, flags, folder)
    figures = {}
    for title, rows in zip(("dp", "tp", "late"), found.values()):
        others = [row for row in rows if row["rank"] != LATE] if title == "late" else rows
        for kind in ("computing", "only sending", "idle", "of sending hidden"):
            figures[f"{kind}, {title}"] = 100 * sum(row[kind] for row in others) / len(others)
    figures["only sending, the late rank"] = 100 * rows[LATE]["only sending"]
    figures["idle, the late rank"] = 100 * rows[LATE]["idle"]
    write_record(ROOT / "benchmarks/results/compare_ranks.json", figures, {}, runs=found)
    picture(found).savefig(ROOT / "docs/figures/ranks.png", dpi=110)


if __name__ == "__main__":
    train(sys.argv[1:]) if "RANK" in os.environ else main()
