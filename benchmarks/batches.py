"""The losses of chapter 1's exercise on batches and learning rates.

    python benchmarks/batches.py --json benchmarks/results/batches.json

Trains `demo` as the exercise says: about five minutes on 2 cores. Figures: the loss of the last validation; where few
samples are seen often, the losses of training and validation after some iterations.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.record import write_record
from benchmarks.skill import run
from utils.files import read_events

SMALL = ("--global_batch_size=16", "--num_iters=108")
LARGE = ("--global_batch_size=64", "--num_iters=27", "--warmup=10")
CASES = {
    "bs16": (*SMALL, "--lr=2e-3"),
    "bs64_same": (*LARGE, "--lr=2e-3"),
    "bs64_sqrt": (*LARGE, "--lr=4e-3"),
    "bs16, lr 4e-3": (*SMALL, "--lr=4e-3"),
    "bs16, lr 4e-2": (*SMALL, "--lr=4e-2"),
    "bs16, lr 0.4": (*SMALL, "--lr=0.4"),
}
FEW, AFTER = ("--limit_nsamples=64", "--lr_schedule=none", "--num_iters=400"), (200, 360)


def epochs(flags: tuple[str, ...]) -> dict[int, dict]:
    """Train, and return the records of the epochs, by iteration."""
    with tempfile.TemporaryDirectory() as folder:
        run(["train.py", "--config=demo", "--plot_channels=None", *flags, f"--expdir={folder}"])
        (record,) = Path(folder).glob("*/1GPU/00/metrics.jsonl")
        return {event["iteration"]: event for event in read_events(record) if event["event"] == "epoch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    figures = {}
    for name, flags in CASES.items():
        found = epochs(flags)
        figures[f"{name}: loss"] = found[max(found)]["valid_loss"]
        print(f"{name:16} {figures[f'{name}: loss']:.4f}")
    few = epochs(FEW)
    for iteration in AFTER:
        for kind in ("train_loss", "valid_loss"):
            figures[f"few samples, {iteration}: {kind}"] = few[iteration][kind]
            print(f"few samples, {iteration}: {kind} {few[iteration][kind]:.4f}")
    write_record(args.json, figures, {})


if __name__ == "__main__":
    main()
