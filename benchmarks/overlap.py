"""What do windows that overlap (--patch_overlap) bring, and cost? The figures of chapter 6:

    python benchmarks/overlap.py --json benchmarks/results/overlap.json

Costs are those of a training step with windows that reach half a patch further, over one without: FLOPs, counted, the
most memory in use, simulated (benchmarks/planner/trace.py), and time, pairs of steps of `base` with one sample. What
they bring: two trainings of `demo` and their forecasts of five days. The seams of a field are the mean squared
difference of neighbouring points across a border of patches, over that inside patches. 5 minutes on two cores.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.harness.bench import Bench
from benchmarks.harness.record import Figures, write_record
from benchmarks.planner.trace import trace
from benchmarks.skill import CASES, STRIDE, run

PAIRS = 9
WINDOWS = {"without": "--patch_overlap=0", "overlap": "--patch_overlap=4"}
SIZES = ("--config=demo", "--rollout_steps=1", "--rollout_from=0"), ("--config=base", "--local_batch_size=1")


def seams(field: np.ndarray, patch: int) -> tuple[float, float]:
    """Return the seams of [..., lat, lon] between patches that lie above, and beside, each other. Without any: 1."""
    found = []
    for axis, ends in ((-2, {}), (-1, {"append": np.take(field, [0], -1)})):  # longitude goes round
        squares = np.moveaxis(np.diff(field, axis=axis, **ends) ** 2, axis, 0)
        is_border = np.arange(1, len(squares) + 1) % patch == 0
        found.append(float(squares[is_border].mean() / squares[~is_border].mean()))
    return found[0], found[1]


def seams_of_training(flags: tuple[str, ...]) -> list[float]:
    """Train `demo`, forecast, and return the seams of all channels on the last day, in both directions."""
    import xarray as xr

    with tempfile.TemporaryDirectory() as folder:
        run(["train.py", "--config=demo", f"--expdir={folder}", *flags, "--plot_channels=None"])
        trained = Path(folder) / "demo/1GPU/00"
        run(["evaluate.py", f"--checkpoint={trained}", f"--stride={STRIDE['demo']}", "--forecasts=zarr"])
        with xr.open_zarr(trained / "evaluation/forecasts/model.zarr") as forecasts:
            last = forecasts.isel(prediction_timedelta=-1)
            fields = [last[name].transpose(..., "latitude", "longitude").to_numpy() for name in last.data_vars]
    return [ratio for field in fields for ratio in seams(field, 8)]


def costs(figures: Figures) -> None:
    """Add what overlap costs to the figures."""
    demo, base = ({name: Bench([*size, flag]) for name, flag in WINDOWS.items()} for size in SIZES)
    deeper = Bench([*SIZES[0], WINDOWS["without"], "--depth=6"])
    for name, benches in (("demo", demo), ("base", base)):
        figures[f"{name}: flops"] = benches["overlap"].flops() / benches["without"].flops() - 1
    figures["demo, depth 6: flops"] = deeper.flops() / demo["without"].flops() - 1
    for samples in (16, 1):
        flags = ("--config=base", f"--local_batch_size={samples}")
        peaks = {name: trace(1, (*flags, flag)).summary()["peak"] for name, flag in WINDOWS.items()}
        figures[f"base, {samples} samples: memory"] = peaks["overlap"] / peaks["without"] - 1
    more = []
    for i in range(PAIRS + 1):
        turns = reversed(WINDOWS) if i % 2 else WINDOWS
        seconds = {name: base[name].run_step()["step"] for name in turns}
        more.append(seconds["overlap"] / seconds["without"] - 1)
    figures.add("base, 1 sample: time", more[1:])  # the first pair allocates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    figures = Figures()
    costs(figures)
    for name in ("overlap", "neither"):
        ratios = seams_of_training(CASES["demo"][name])
        figures.add(f"seams, {name}", ratios)
        figures |= {f"least seam, {name}": min(ratios), f"largest seam, {name}": max(ratios)}
        figures[f"seams, {name}"] = statistics.median(ratios)
    for name, value in figures.items():
        print(f"{name:30s} {value:8.3f}  {' to '.join(f'{x:.3f}' for x in figures.spread.get(name, []))}")
    if args.json:
        write_record(args.json, figures, figures.spread)


if __name__ == "__main__":
    main()
