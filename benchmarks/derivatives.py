"""Horizontal gradients in the loss: what do they cost, beside those of autograd, and does vorticity fade less?

    python benchmarks/derivatives.py --json benchmarks/results/derivatives.json [--seeds 0 1] [--cost-only]

Cost. A field that is a network of place (three layers of 256, sine and cosine of longitude and latitude in, two fields
out) on 64 x 128 points, and the squared error of its gradient against that of a known one: forward, backward, and both
by finite differences of its values (utils/sphere.py), and by torch.autograd, whose derivatives with respect to place
need a second backward pass through the first. And a training step with and without --loss_gradient: of the reference
model, and of `base`. Nine pairs each, three of `base`; the error of the differences beside autograd's gradient, which
is exact.

Trial. The sections demo and era5_djf with --loss_gradient 0, 0.1 and 1, each judged (evaluate.py): RMSE over
persistence's, and `kept`, the power of vorticity in forecasts over that of the truth, of all waves and of those beyond
16, which fade first. About 40 minutes on 2 cores.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.bench import REFERENCE, Bench
from benchmarks.harness.record import Figures, write_record
from benchmarks.skill import STRIDE, run
from utils.measure.tables import markdown
from utils.sphere import HorizontalGradient

ROWS, COLUMNS, PAIRS = 64, 128, 9
WEIGHTS = (0.0, 0.1, 1.0)
STEPS = [("the reference", REFERENCE, PAIRS), ("base", ["--config=base", "--local_batch_size=1"], 3)]
SHARP = {"demo": "vor_upper", "era5_djf": "vo850"}
HOURS, SMALL = (6, 24, 120), 16


class PlaceNetwork(nn.Module):
    """Two fields of longitude and latitude, [N, 2] in radians -> [N, 2]."""

    def __init__(self):
        super().__init__()
        sizes = (4, 256, 256, 256, 2)
        layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.SiLU())]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, place: Tensor) -> Tensor:
        return self.net(torch.cat([place.sin(), place.cos()], dim=1))


def by_autograd(network: nn.Module, place: Tensor, _: HorizontalGradient) -> Tensor:
    """Return the gradients [4, H, W], exact: what points east of both fields, then north."""
    place = place.detach().requires_grad_()
    fields = network(place)
    slopes = [torch.autograd.grad(f.sum(), place, create_graph=True)[0] for f in fields.unbind(1)]
    cos = place[:, 1].detach().cos()
    east, north = (torch.stack([s[:, i] for s in slopes]) for i in (0, 1))
    return torch.cat([east / cos, north]).view(4, ROWS, COLUMNS)


def by_differences(network: nn.Module, place: Tensor, gradient: HorizontalGradient) -> Tensor:
    return gradient(network(place).T.reshape(2, ROWS, COLUMNS))


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def pairs(first: Callable, second: Callable, count: int = PAIRS) -> list[float]:
    """Return how much longer the second takes, in turn."""
    for step in (first, second):
        step()
    return [seconds(second) / seconds(first) for _ in range(count)]


def costs(figures: Figures) -> None:
    """Measure what gradients cost, and how near differences come."""
    torch.manual_seed(0)
    latitude = 90 - 180 * (torch.arange(ROWS) + 0.5) / ROWS
    longitude = 2 * torch.pi * torch.arange(COLUMNS) / COLUMNS
    p, l = torch.meshgrid(latitude.deg2rad(), longitude, indexing="ij")  # noqa: E741
    place = torch.stack([l, p], -1).view(-1, 2)
    gradient = HorizontalGradient(latitude.numpy(), COLUMNS, range(ROWS), torch.device("cpu"))
    network, target = PlaceNetwork(), torch.zeros(4, ROWS, COLUMNS)
    exact, near = (way(network, place, gradient).detach() for way in (by_autograd, by_differences))
    figures["error of differences"] = ((near - exact).norm() / exact.norm()).item()

    def step(way: Callable) -> None:
        network.zero_grad()
        (way(network, place, gradient) - target).square().mean().backward()

    def plain() -> None:
        network.zero_grad()
        network(place).square().mean().backward()

    ways = {"differences": partial(step, by_differences), "autograd": partial(step, by_autograd)}
    for name, way in ways.items():
        print(figures.add(f"step by {name}, over one without derivatives", pairs(plain, way)), flush=True)
    print(figures.add("step by autograd over differences", pairs(*ways.values())), flush=True)
    for name, flags, count in STEPS:
        benches = (Bench([*flags, f"--loss_gradient={weight}"]) for weight in (0, 0.5))
        ratios = pairs(*(bench.run_step for bench in benches), count)
        print(figures.add(f"training step of {name} with --loss_gradient, over without", ratios), flush=True)


def trial(section: str, weight: float, seed: int) -> dict[str, float]:
    """Train, judge, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--config={section}", f"--expdir={folder}", f"--seed={seed}", f"--loss_gradient={weight}"]
        run(["train.py", *own, "--plot_channels=None"])
        (trained,) = Path(folder).glob("*/1GPU/00")
        run(["evaluate.py", f"--checkpoint={trained}", f"--stride={STRIDE[section]}"])
        return figures_of(json.loads((trained / "evaluation/skill.json").read_text()), SHARP[section])


def figures_of(skill: dict[str, Any], sharp: str) -> dict[str, float]:
    """Return RMSE over persistence's, and how much of a field's power is left."""
    found, spectra = {}, skill["spectra"]
    for hours in HOURS:
        k = skill["lead_hours"].index(hours)
        ratios = skill["scores"]["model"]["rmse_over_persistence"]["cos"]
        found[f"{hours} h"] = statistics.fmean(ratios[name][k][0] for name in ratios)
        found[f"{hours} h, {sharp}"] = ratios[sharp][k][0]
        if hours in spectra["lead_hours"]:
            model, truth = (spectra[of][sharp][spectra["lead_hours"].index(hours)] for of in ("model", "truth"))
            found[f"kept {hours} h"] = sum(model[1:]) / sum(truth[1:])
            found[f"kept {hours} h, small"] = sum(model[SMALL:]) / sum(truth[SMALL:])
    return found


def table(cases: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table of chapter 6: of each case and seed."""
    columns = list(dict.fromkeys(name.split(", v")[0] for case in cases.values() for f in case.values() for name in f))
    rows = [
        [name, *(" / ".join(f"{found[column]:.3f}" for found in case.values()) for column in columns)]
        for name, case in cases.items()
    ]
    return markdown(["", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--cost-only", action="store_true", help="no trainings; those of the record are kept")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    figures, cases = Figures(), {}
    costs(figures)
    if args.cost_only and args.json.exists():
        cases = json.loads(args.json.read_text())["cases"]
    for section in () if args.cost_only else SHARP:
        for weight in WEIGHTS:
            name = f"{section}, {weight:g}"
            cases[name] = {str(seed): trial(section, weight, seed) for seed in args.seeds}
            print(f"{name}: done", flush=True)
    for name, case in cases.items():
        for what in next(iter(case.values())):
            figures.add(f"{name}: {what}", [found[what] for found in case.values()])
    write_record(args.json, figures, figures.spread, cases=cases)
    print(table(cases))


if __name__ == "__main__":
    main()
