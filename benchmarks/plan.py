"""Which layout? All ways to share out a training over so many ranks, by the time that a step should take.

    python benchmarks/plan.py --config=mp --machine perlmutter --ranks 64       any flag of train_mp.py goes along

A machine is one that comes with the project (benchmarks/planner/machines/), or a file that `make doctor` measured
(--machine machine.json). What the flags say of a layout stays as they say: --tensor_parallel=4 looks at those with 4.
The rest is tried: sizes and order of dp, tp and cp, sequence parallelism, what is gathered or computed again, what dp
ranks share out, attention over cp, parts of a batch. --json FILE keeps all that is shown, and draws it beside it.

Predictions are made from a trace of the model's operations and what the machine can do (benchmarks/planner/).
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from matplotlib import colormaps  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.harness.command import errors_in_one_line, parser_of  # noqa: E402
from benchmarks.harness.record import write_record  # noqa: E402
from benchmarks.planner.layouts import KEYS, Layout  # noqa: E402
from benchmarks.planner.machine import Machine, known, load_machine  # noqa: E402
from benchmarks.planner.outlook import Outlook  # noqa: E402
from benchmarks.planner.ranking import best_of, front, outlooks  # noqa: E402
from utils.config.reader import keys_given, load_config  # noqa: E402
from utils.config.settings import Config  # noqa: E402
from utils.measure.tables import markdown  # noqa: E402

RECORD = ROOT / "benchmarks/results/plan.json"
SHOWN = 12  # rows of a table
NAMES = {
    "product": "matrix products", "attention": "attention", "memory": "all else that computes",
    "host": "the host, which the device waits for", "tp": "tp", "cp": "cp", "tp-cp": "tp-cp", "dp": "dp",
    "dp-cp": "gradients and shared weights", "slowest": "the slowest rank", "reading": "reading",
    "copying": "copies to the GPU",
}  # fmt: skip


def command(layout: Layout, machine: Machine, config: Config, flags: list[str]) -> str:
    """Return the command that runs a layout, of a configuration that these flags gave."""
    nodes = machine.nodes(layout.ranks)
    told = " ".join([*flags, *layout.flags(config)])
    if machine.device == "cpu" or nodes == 1:
        return f"torchrun --nproc_per_node={layout.ranks} train_mp.py {told}"
    return f"sbatch -N {nodes} submit_pm_mp.sh {told}"


def title(layout: Layout, config: Config) -> str:
    """Return a layout in words: the grid, and the flags that are not as in a configuration."""
    told = f"dp {layout.dp} x tp {layout.tensor_parallel} x cp {layout.context_parallel}"
    grid = ("tensor_parallel", "context_parallel")
    return " ".join([told, *(flag for flag in layout.flags(config) if not flag[2:].startswith(grid))])


def table(rows: list[dict[str, Any]]) -> str:
    """Return layouts, as `record_of` tells them, in a table: time, speed, memory, and what limits them."""
    head = ["layout", "ms a step", "samples/s", "GiB a rank", "limited by"]
    numbers = ((1e3 * x["seconds"], x["samples"] / x["seconds"], x["bytes"] / 2**30) for x in rows)
    return markdown(head, ([x["title"], *map("{:.4g}".format, n), x["limit"]] for x, n in zip(rows, numbers)))


def parts(outlook: Outlook) -> str:
    """Return what a step takes, holds and sends, part by part."""
    took = ", ".join(f"{NAMES[part]} {1e3 * x:.3g}" for part, x in outlook.parts.items() if x > 1e-3 * outlook.seconds)
    held = ", ".join(f"{part} {x / 2**30:.3g}" for part, x in outlook.memory.items())
    sends = ", ".join(f"{axes} {x / 1e9:.3g}" for axes, x in outlook.sent.items() if x) or "nothing"
    beside = f" ({1e3 * outlook.hidden:.3g} ms of links go on beside)" * (outlook.hidden > 1e-3 * outlook.seconds)
    return f"  ms a step: {took}{beside}\n  GiB a rank: {held}\n  GB that a rank sends in a step: {sends}"


def losers(found: list[Outlook], best: Outlook, room: float, config: Config) -> list[list[str]]:
    """Return for each other tp and cp the best layout, how much slower it is, and why."""
    grids: dict[tuple[int, int], list[Outlook]] = {}
    for outlook in found:
        grids.setdefault((outlook.layout.tensor_parallel, outlook.layout.context_parallel), []).append(outlook)
    del grids[best.layout.tensor_parallel, best.layout.context_parallel]
    rows = []
    for of_grid in grids.values():
        other = best_of(of_grid, room)
        if other is None:
            least = min(of_grid, key=lambda x: x.bytes)
            rows.append(
                (math.inf, [title(least.layout, config), "does not fit", f"{least.bytes / 2**30:.3g} GiB a rank"])
            )
            continue
        same = best.samples / other.samples
        more = {part: same * x - best.parts.get(part, 0.0) for part, x in other.parts.items()}
        most = max(more, key=more.get)
        why = f"{NAMES[most]}: {1e3 * more[most]:+.3g} ms" if more[most] > 0 else ""
        slower = other.pace / best.pace - 1
        rows.append((slower, [title(other.layout, config), f"{slower:+.0%}", why]))
    return [row for _, row in sorted(rows, key=lambda x: x[0])]


def others_table(rows: list[list[str]]) -> str:
    """Return what `losers` tells, in a table."""
    return markdown(["the best with another tp and cp", "time", "mostly by"], rows[:SHOWN])


def draw(found: list[Outlook], best: Outlook, room: float, path: Path) -> None:
    """Draw all layouts by time and memory, the front that no other beats, and what a rank has room for."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    grids = sorted({(x.layout.tensor_parallel, x.layout.context_parallel) for x in found})
    colors = colormaps["turbo"]
    for i, grid in enumerate(grids):
        ours = [x for x in found if (x.layout.tensor_parallel, x.layout.context_parallel) == grid]
        times, sizes = [1e3 * x.pace for x in ours], [x.bytes / 2**30 for x in ours]
        color = colors((i + 0.5) / len(grids))
        axes.scatter(times, sizes, s=6, alpha=0.5, color=color, label=f"tp {grid[0]}, cp {grid[1]}")
    edge = front(found)
    axes.step([1e3 * x.pace for x in edge], [x.bytes / 2**30 for x in edge], where="post", color="black", lw=1)
    axes.scatter(1e3 * best.pace, best.bytes / 2**30, marker="*", s=200, color="black", zorder=3, label="to run")
    axes.axhline(room / 2**30, color="red", lw=1, ls="--", label="a rank has")
    axes.set(xscale="log", yscale="log", xlabel="ms a sample", ylabel="GiB a rank")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=150)


def record_of(outlook: Outlook, config: Config) -> dict[str, Any]:
    """Return an outlook for a file: times in seconds, sizes in bytes."""
    told = dataclasses.asdict(outlook)
    return {"title": title(outlook.layout, config), **told, "bytes": outlook.bytes}


def main(argv: list[str]) -> None:
    parser = parser_of(__doc__, "train_mp.py")
    parser.add_argument("--machine", required=True, help=f"a file that make doctor wrote, or one of {known()}")
    parser.add_argument("--ranks", type=int, required=True, help="processes, one a GPU")
    parser.add_argument("--json", type=Path, help="file to write, with a picture beside it")
    args, flags = parser.parse_known_args(argv)
    config, _ = load_config(flags, chapter=2)
    machine = load_machine(args.machine)
    if args.ranks < 1:
        raise ValueError(f"ranks is {args.ranks}: take 1 or more")
    begin = time.perf_counter()
    found = outlooks(config, KEYS & keys_given(flags, chapter=2), machine, args.ranks)
    room = machine.memory - machine.beside
    best = best_of(found, room)
    took = time.perf_counter() - begin
    print(f"{len(found)} layouts on {args.ranks} ranks, {machine.name} ({machine.source}), in {took:.0f} s")
    if best is None:
        least = min(found, key=lambda x: x.bytes)
        raise ValueError(
            f"no layout fits in the {room / 2**30:.3g} GiB of a rank: {title(least.layout, config)} needs least, "
            f"{least.bytes / 2**30:.3g} GiB; take more ranks"
        )
    K = config.longest_rollout
    steps = f"\nA step is one of the longest forecasts, {K} steps ahead.\n" * (K > 1)
    print(f"{steps}\nTo run: {title(best.layout, config)}\n\n  {command(best.layout, machine, config, flags)}\n")
    print(f"  {1e3 * best.seconds:.4g} ms a step, {1 / best.pace:.4g} samples/s, limited by {best.limit}")
    print(parts(best))
    shown = {"best": record_of(best, config), "others": losers(found, best, room, config)}
    shown["front"] = [record_of(x, config) for x in thinned(front([x for x in found if x.bytes <= room]))]
    print(f"\nNo other is both faster and smaller:\n\n{table(shown['front'])}")
    if shown["others"]:
        print(f"\nWhy not another grid?\n\n{others_table(shown['others'])}")
    print(f"\n{errors(machine)}")
    if args.json:
        figures = {"ms a step": 1e3 * best.seconds, "GiB a rank": best.bytes / 2**30, "layouts": len(found)}
        write_record(args.json, figures | {"seconds to rank": took}, {}, **shown)
        draw(found, best, room, args.json.with_suffix(".png"))


def thinned(found: list[Outlook]) -> list[Outlook]:
    """Return the fastest of a front for each of SHOWN limits of memory, from that of its first to that of its last."""
    if len(found) <= SHOWN:
        return found
    first, last = found[0].bytes, found[-1].bytes
    limits = (first * (last / first) ** (i / (SHOWN - 1)) for i in range(SHOWN - 1))
    chosen = {next(i for i, x in enumerate(found) if x.bytes <= limit) for limit in limits}
    return [found[i] for i in sorted(chosen | {len(found) - 1})]


def errors(machine: Machine) -> str:
    """Return how far predictions were off where they were held to runs."""
    try:
        figures = json.loads(RECORD.read_text())["figures"]
    except OSError:
        return "How far off this is was not measured: make plan-check."
    where = "here" if machine.source == "measured" else "published"
    about = "runs on two CPU cores" if where == "here" else "published runs on A100"
    drift = f" The machine drifted by {machine.drift:.0%} while it was measured." if machine.drift else ""
    return (
        f"How far off is this? Of {figures[f'{where}: runs']:.0f} {about}, predicted times were off by "
        f"{figures[f'{where}: median error']:.0%} (median), {figures[f'{where}: worst error']:.0%} at worst.{drift}"
    )


if __name__ == "__main__":
    with errors_in_one_line():
        main(sys.argv[1:])
