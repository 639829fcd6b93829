"""Do the optimisations bear each other? Every combination of them, against the plain path: 72 runs of 20 iterations.

    python benchmarks/combinations.py --json FILE

Precision, fused optimiser, compilation, activation checkpointing and chunks of the MLP must change the time and the
memory, and not the losses. In float32 they may differ by rounding, which grows a little in 20 iterations. In 16 bits
each product is rounded to 8 (bf16) or 11 (fp16) binary digits, and the losses are held to float32's, too.
"""

import argparse
import itertools
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.harness.data import PLAIN, path_flags, train_here
from benchmarks.harness.record import write_record
from utils.measure.tables import markdown
from utils.sample_data.write import write_shape

ITERATIONS = 20
AMP, FUSED, JIT = ("none", "bf16", "fp16"), (False, True), (False, True)
CHECKPOINT, CHUNKS = ("none", "block", "mlp"), (1, 4)
# Largest relative difference of a loss from the plain path's of the same precision, and from float32's.
BOUNDS = {"none": (2e-6, 2e-6), "bf16": (1e-4, 2e-4), "fp16": (2e-5, 4e-5)}
MODEL = [
    *PLAIN, "--img_size", "32", "64", "--embed_dim=64", "--depth=2", "--num_heads=4", "--patch_size=4",
    "--plot_channels=None", "--global_batch_size=4", f"--num_iters={ITERATIONS}", "--warmup=0", "--lr=1e-3",
    "--no_residual", "--checkpoint_every=None",
]  # fmt: skip


def flags_of(amp: str, fused: bool, jit: bool, checkpoint: str, chunks: int) -> list[str]:
    """Return the flags of a combination."""
    return [
        f"--amp_mode={amp}", "--enable_fused" if fused else "--no_enable_fused",
        "--enable_jit" if jit else "--no_enable_jit",
        f"--activation_checkpoint={checkpoint}", f"--mlp_chunks={chunks}",
    ]  # fmt: skip


def data(folder: str) -> list[str]:
    """Write data to a folder, and return the flags that all runs on it share."""
    write_shape(f"{folder}/data", (8, 32, 64), samples=4 * ITERATIONS + 1)
    return [*MODEL, *path_flags(f"{folder}/data"), "--expdir", folder]


def losses(flags: list[str]) -> list[float]:
    """Train, and return the loss of each iteration."""
    torch.compiler.reset()
    return [line["loss"] for line in train_here(flags) if line["event"] == "step"]


def difference(curve: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two loss curves."""
    assert len(curve) == len(reference)
    return max(abs(a - b) / b for a, b in zip(curve, reference))


def table(figures: dict[str, float]) -> str:
    """Return the table of docs/combinations.md."""
    columns = list(itertools.product(AMP, FUSED, JIT))
    rows = []
    for saver in itertools.product(CHECKPOINT, CHUNKS):
        cells = (f"{figures[' '.join(flags_of(*column, *saver))]:.0e}" for column in columns)
        rows.append(["checkpoint {}, chunks {}".format(*saver), *cells])
    return markdown(["", *(f"{amp}{', fused' * fused}{', jit' * jit}" for amp, fused, jit in columns)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    figures: dict[str, float] = {}
    plain: dict[str, list[float]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        base = data(folder)
        for amp, checkpoint, chunks, jit, fused in itertools.product(AMP, CHECKPOINT, CHUNKS, JIT, FUSED):
            flags = flags_of(amp, fused, jit, checkpoint, chunks)
            curve = losses([*base, *flags])
            reference = plain.setdefault(amp, curve)
            error, wide = difference(curve, reference), difference(curve, plain["none"])
            name = " ".join(flags)
            figures[name] = error
            figures[f"{amp} from float32"] = max(wide, figures.get(f"{amp} from float32", 0.0))
            print(f"{error:8.1e} {wide:8.1e}  {name}", flush=True)
            if error > BOUNDS[amp][0] or wide > BOUNDS[amp][1]:
                failed.append(name)
    write_record(args.json, figures, {})
    if failed:
        sys.exit(f"combinations.py: {len(failed)} beyond the bounds: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
