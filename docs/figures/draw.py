"""Draw the figures of chapter 2: `make figures` runs this.

grid.png: the groups of 16 ranks. mappings.png: where the collectives of one block, and of windows, stand, forward and
backward.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

from utils.plots import grid_figure  # noqa: E402

WHOLE, SHARD, SLICE, COLLECTIVE = "#d9e6f2", "#ffffff", "#f6dfb5", "#c7e3c4"
# A row: its title, and its boxes from left to right: name, what it holds or `forward|backward`, colour.
ROWS = {
    "MLP, plain tensor parallelism (tp)": [
        ("x", "all tokens", WHOLE),
        ("copy  f", "nothing|all-reduce", COLLECTIVE),
        ("fc1, GELU", "own hidden units", SLICE),
        ("fc2", "own hidden units", SLICE),
        ("reduce  $\\bar{f}$", "all-reduce|nothing", COLLECTIVE),
        ("y", "all tokens", WHOLE),
    ],
    "MLP, sequence parallelism (tp)": [
        ("x", "own tokens", SHARD),
        ("all_gather  g", "all-gather|reduce-scatter", COLLECTIVE),
        ("fc1, GELU", "own hidden units", SLICE),
        ("fc2", "own hidden units", SLICE),
        ("reduce_scatter  $\\bar{g}$", "reduce-scatter|all-gather", COLLECTIVE),
        ("y", "own tokens", SHARD),
    ],
    "attention, gathered (cp)": [
        ("q, k, v", "own tokens", SHARD),
        ("all_gather", "all-gather of k, v|reduce-scatter", COLLECTIVE),
        ("attention", "own q, all k and v", SLICE),
        ("y", "own tokens", SHARD),
    ],
    "attention, Ulysses (cp)": [
        ("q, k, v", "own tokens, all heads", SHARD),
        ("all_to_all", "all-to-all|all-to-all", COLLECTIVE),
        ("attention", "all tokens, own heads", SLICE),
        ("all_to_all", "all-to-all|all-to-all", COLLECTIVE),
        ("y", "own tokens, all heads", SHARD),
    ],
    "windows that overlap (tokens over tp, cp)": [
        ("state", "own points", SHARD),
        ("halo", "borders sent|sent home, added", COLLECTIVE),
        ("windows, blocks", "own tokens", SLICE),
        ("halo_add", "sent home, added|borders sent", COLLECTIVE),
        ("forecast", "own points", SHARD),
    ],
}


def draw_row(axes: Axes, top: float, title: str, boxes: list[tuple[str, str, str]], columns: int) -> None:
    """Draw the boxes of one row, collectives with what they do above (forward) and below (backward)."""
    width, height = 1.25, 0.62
    axes.text(0, top - 0.5, title, fontsize=10, weight="bold")
    step = (2 * columns - width) / (len(boxes) - 1)
    for i, (name, text, colour) in enumerate(boxes):
        left = i * step
        is_collective = "|" in text
        box = dict(boxstyle="round,pad=0.02" if is_collective else "square,pad=0.02", fc=colour, ec="#666666", lw=0.8)
        axes.add_patch(FancyBboxPatch((left, top), width, height, **box))
        middle = left + width / 2
        axes.text(middle, top + (0.31 if is_collective else 0.22), name, ha="center", va="center", fontsize=9)
        if is_collective:
            forward, backward = text.split("|")
            axes.text(middle, top - 0.2, forward, ha="center", va="center", fontsize=7.5, color="#1b4f8a")
            axes.text(middle, top + height + 0.22, backward, ha="center", va="center", fontsize=7.5, color="#a33b20")
        else:
            axes.text(middle, top + 0.46, text, ha="center", va="center", fontsize=7)
        if i:
            start, end = left - step + width + 0.06, left - 0.06
            for y, ends, arrow_colour in ((0.18, (start, end), "#1b4f8a"), (0.46, (end, start), "#a33b20")):
                axes.annotate(
                    "",
                    (ends[1], top + y),
                    (ends[0], top + y),
                    arrowprops=dict(arrowstyle="->", color=arrow_colour, shrinkA=0, shrinkB=0),
                )


def mappings_figure() -> Figure:
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    axes = figure.subplots()
    for i, (title, boxes) in enumerate(ROWS.items()):
        draw_row(axes, 1.75 * i, title, boxes, columns=6)
    axes.text(6.5, -0.78, "forward, to the right", color="#1b4f8a", fontsize=9)
    axes.text(9.2, -0.78, "backward, to the left", color="#a33b20", fontsize=9)
    axes.set(xlim=(-0.1, 12.1), ylim=(1.75 * len(ROWS) - 0.65, -0.95))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    grid_figure(dict(dp=4, cp=2, tp=2), "tp-cp-dp").savefig(FOLDER / "grid.png", dpi=110)
    mappings_figure().savefig(FOLDER / "mappings.png", dpi=130)
