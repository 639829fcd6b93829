"""What does an optimiser keep, what does a step of it cost, and where does the loss go with it?

    python benchmarks/optimizers.py --json benchmarks/results/optimizers.json [--seeds 0 1]

Trains `demo` (forecasts of one step, 300 iterations) with each optimiser: about 20 minutes on 2 cores. Figures: bytes
that it keeps for a weight, of `base`; the seconds of its step over Adam's, nine pairs on `base`; the loss of the
validation at the end. Adafactor's learning rate is relative to the size of the weights, so it has several.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from benchmarks.harness.record import Figures, write_record
from benchmarks.skill import run
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.files import read_events
from utils.measure.tables import markdown
from utils.optimizers import build_optimizer, kept_of

PAIRS = 9
CASES = {
    "Adam": ("--optimizer=Adam",),
    "Adam, fused": ("--optimizer=Adam", "--enable_fused"),
    "AdamW": ("--optimizer=AdamW",),
    "Adam8bit": ("--optimizer=Adam8bit",),
    "Adafactor": ("--optimizer=Adafactor",),
    "Adafactor, lr x 5": ("--optimizer=Adafactor", "--lr=1e-2"),
    "Adafactor, lr x 25": ("--optimizer=Adafactor", "--lr=5e-2"),
}
TRAINING = ("--config=demo", "--rollout_steps=1", "--rollout_from=0", "--num_iters=300", "--plot_channels=None")


class Updates:
    """Steps of an optimiser on the weights of `base`, with gradients that stay."""

    def __init__(self, flags: tuple[str, ...]):
        config = load_config(["--config=base", "--no_enable_fused", *flags])[0]
        self.model = train.build_model(config, Fields.blank(config))
        for p in self.model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        self.optimizer = build_optimizer(self.model, config)
        self.step()

    def step(self) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    def bytes_kept(self) -> float:
        """Return the bytes for a weight."""
        weights = list(self.model.parameters())
        return sum(x.nbytes for p in weights for x in kept_of(self.optimizer, p).values()) / sum(
            p.numel() for p in weights
        )


def final_loss(flags: tuple[str, ...], seed: int) -> float:
    """Train, and return the loss of the last validation."""
    with tempfile.TemporaryDirectory() as folder:
        run(["train.py", *TRAINING, "--no_enable_fused", *flags, f"--expdir={folder}", f"--seed={seed}"])
        (record,) = Path(folder).glob("*/1GPU/00/metrics.jsonl")
        return [event["valid_loss"] for event in read_events(record) if event["event"] == "epoch"][-1]


def table(figures: dict[str, float], spread: dict[str, list[float]]) -> str:
    """Return the table of chapter 1."""
    rows = []
    for name in CASES:
        cost, loss = f"{name}: step over Adam's", f"{name}: loss"
        low, high = spread[cost]
        ratio = "" if name == "Adam" else f"{figures[cost]:.2f} ({low:.2f} to {high:.2f})"
        kept, losses = figures[f"{name}: bytes a weight"], dict.fromkeys(f"{x:.4f}" for x in spread[loss])
        rows.append([name, f"{kept:.2f}", ratio, " / ".join(losses)])
    return markdown(["", "bytes a weight", "step, over Adam's", "loss after 300 iterations"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    figures, plain = Figures(), Updates(CASES["Adam"])
    for name, flags in CASES.items():
        updates = Updates(flags)
        figures[f"{name}: bytes a weight"] = updates.bytes_kept()
        print(
            figures.add(f"{name}: step over Adam's", [updates.step() / plain.step() for _ in range(PAIRS)]), flush=True
        )
    for name, flags in CASES.items():
        print(figures.add(f"{name}: loss", [final_loss(flags, seed) for seed in args.seeds]), flush=True)
    write_record(args.json, figures, figures.spread)
    print(table(figures, figures.spread))


if __name__ == "__main__":
    main()
