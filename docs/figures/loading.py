"""Draw loading.png: how fast frames come from files into batches, from benchmarks/results/loader.json."""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from matplotlib.figure import Figure  # noqa: E402

from benchmarks.loader import CASES, DEPTHS, LAYOUTS  # noqa: E402

COLOURS = ["0.2", "#9ecae1", "#6baed6", "#3182bd", "#08519c", "#9e9ac8", "#31a354", "#fdae6b", "#e6550d"]


def main() -> None:
    record = json.loads((FOLDER.parent.parent / "benchmarks/results/loader.json").read_text())
    figures, spread = record["figures"], record["spread"]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    width = 0.8 / len(CASES)
    for i, (case, colour) in enumerate(zip(CASES, COLOURS, strict=True)):
        keys = {x: f"{layout}, {case}, GB/s" for x, layout in enumerate(LAYOUTS)}
        keys = {x: key for x, key in keys.items() if key in figures}
        heights = [figures[key] for key in keys.values()]
        errors = [[abs(figures[key] - spread[key][end]) for key in keys.values()] for end in (0, 1)]
        at = [x + (i - len(CASES) / 2 + 0.5) * width for x in keys]
        left.bar(at, heights, width, yerr=errors, error_kw={"linewidth": 0.8}, color=colour, label=case)
    left.set(yscale="log", ylabel="GB/s", xticks=range(len(LAYOUTS)), xticklabels=LAYOUTS)
    left.set_title("Files in the page cache; lines: range of the repeats", fontsize=10)
    left.set_ylim(0.3)
    left.yaxis.set_major_formatter("{x:g}")
    left.legend(ncols=2, fontsize=7, loc="upper center", bbox_to_anchor=(0.57, 1))
    left.grid(axis="y", alpha=0.3)
    left.set_axisbelow(True)

    speed = [depth * figures[f"cold, read_depth {depth}, of what it allows"] for depth in DEPTHS]
    right.plot(DEPTHS, DEPTHS, color="0.6", linestyle="--", label="no wait lost")
    right.plot(DEPTHS, speed, marker="o", color="#08519c", label="measured")
    right.set(xscale="log", yscale="log", xticks=DEPTHS, yticks=DEPTHS, xlabel="--read_depth")
    right.set(xticklabels=DEPTHS, yticklabels=DEPTHS)
    right.minorticks_off()
    right.set_title("Each read waits 5 ms:\nspeed, in multiples of one by one", fontsize=10)
    right.legend(fontsize=8)
    right.grid(alpha=0.3)
    figure.savefig(FOLDER / "loading.png", dpi=120)


if __name__ == "__main__":
    main()
