"""Draw vit.png, the model of a section, with the shapes of what passes through it for one sample.

python docs/figures/vit.py [--config=base] [flags of train.py]
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

import train  # noqa: E402
from utils.config.reader import load_config  # noqa: E402
from utils.data.fields import Fields  # noqa: E402

IMAGE, WEIGHTS, PLAIN, SUM, LINE = "#d9e6f2", "#f6dfb5", "#eeeeee", "#c7e3c4", "#444444"


def box(axes: Axes, x: float, y: float, size: tuple[float, float], name: str, told: str, colour: str) -> None:
    """Draw a box around (x, y), with a name and what is told below it."""
    width, height = size
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle="round,pad=0.03", fc=colour, ec="#666666", lw=0.8))
    axes.text(x, y + (0.1 if told else 0), name, ha="center", va="center", fontsize=9)
    if told:
        axes.text(x, y - 0.16, told, ha="center", va="center", fontsize=7)


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, begin, arrowprops=dict(arrowstyle="->", color=LINE, shrinkA=0, shrinkB=0))


def around(axes: Axes, begin: tuple[float, float], end: tuple[float, float], top: float) -> None:
    """Draw an arrow that goes up, across at `top`, and down."""
    axes.plot([begin[0], begin[0], end[0]], [begin[1], top, top], color=LINE, lw=1.1)
    arrow(axes, (end[0], top + 0.01), end)


def image(axes: Axes, x: float, y: float, name: str, shape: str) -> None:
    """Draw an image that is cut into patches."""
    axes.add_patch(Rectangle((x - 0.8, y - 0.4), 1.6, 0.8, fc=IMAGE, ec="#666666", lw=0.8))
    for i in range(1, 8):
        axes.plot([x - 0.8 + 0.2 * i] * 2, [y - 0.4, y + 0.4], color="white", lw=0.8)
    for i in range(1, 4):
        axes.plot([x - 0.8, x + 0.8], [y - 0.4 + 0.2 * i] * 2, color="white", lw=0.8)
    axes.text(x, y - 0.55, name, ha="center", va="center", fontsize=9)
    axes.text(x, y - 0.75, shape, ha="center", va="center", fontsize=7)


def figure_of(argv: list[str]) -> Figure:
    """Return the drawing. Raises ValueError for a section or flags that are none."""
    config, _ = load_config(argv)
    fields = Fields.blank(config)
    model = train.build_model(config, fields)
    (H, W), P, D = config.img_size, config.patch_size, config.embed_dim
    N, h = H // P * (W // P), config.num_heads
    inputs, outputs, _ = fields.sizes
    side = P + 2 * config.patch_overlap
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots()
    row = 3.6  # what passes through the model, from left to right
    stops = [1.0, 3.3, 5.7, 8.1, 10.4]
    image(axes, stops[0], row, "state now", f"{inputs} x {H} x {W}")
    name = "windows" if config.patch_overlap else "patches"
    told = f"{side} x {side}: {inputs * side**2} -> {D}"
    box(axes, stops[1], row, (1.6, 0.7), f"embedding of {name}", told, WEIGHTS)
    box(axes, stops[2], row, (1.6, 0.7), f"{config.depth} blocks", f"{N:,} tokens of {D}", PLAIN)
    box(axes, stops[3], row, (1.6, 0.7), "norm, head", f"{D} -> {outputs * side**2}", WEIGHTS)
    image(axes, stops[4], row, f"state {config.dt} step later", f"{outputs} x {H} x {W}")
    for a, b in zip(stops, stops[1:]):
        arrow(axes, (a + 0.88, row), (b - 0.88, row))
    axes.text(stops[1], row + 0.55, "+ learned positions", ha="center", fontsize=8)
    if config.residual:
        around(axes, (stops[0], row + 0.43), (stops[4], row + 0.43), row + 0.85)
        axes.text(stops[2], row + 0.93, "+ : the network gives the change", ha="center", fontsize=8)

    low = 1.2  # one block
    axes.add_patch(Rectangle((-0.1, low - 0.85), 11.6, 1.6, fill=False, ec="#999999", lw=0.8, ls="--"))
    for begin, end in ((-0.8, -0.1), (0.8, 11.5)):
        axes.plot([stops[2] + begin, end], [row - 0.4, low + 0.75], color="#bbbbbb", lw=0.8, ls="--")
    parts = [
        (0.9, (1.0, 0.6), "norm", "", PLAIN),
        (2.4, (1.3, 0.6), "q, k, v", f"{D} -> 3 x {D}", WEIGHTS),
        (4.0, (1.2, 0.6), "attention", f"{h} heads of {D // h}", PLAIN),
        (5.3, (0.8, 0.6), "proj", f"{D} -> {D}", WEIGHTS),
        (6.2, (0.2, 0.2), "+", "", SUM),
        (7.1, (1.0, 0.6), "norm", "", PLAIN),
        (8.3, (0.9, 0.6), "fc1", f"{D} -> {4 * D}", WEIGHTS),
        (9.35, (0.7, 0.6), "GELU", "", PLAIN),
        (10.35, (0.9, 0.6), "fc2", f"{4 * D} -> {D}", WEIGHTS),
        (11.15, (0.2, 0.2), "+", "", SUM),
    ]
    for x, size, name, told, colour in parts:
        box(axes, x, low, size, name, told, colour)
    arrow(axes, (-0.05, low), (0.36, low))
    for (x, (width, _), *_), (after, (next_width, _), *_) in zip(parts, parts[1:]):
        arrow(axes, (x + width / 2 + 0.04, low), (after - next_width / 2 - 0.04, low))
    for begin, end in ((0.1, 6.2), (6.4, 11.15)):
        around(axes, (begin, low), (end, low + 0.14), low + 0.5)
    count = sum(p.numel() for p in model.parameters())
    told = f"{count / 1e6:.1f} million in all, {model.flops() / 1e9:,.3g} GFLOP a sample forward"
    axes.text(5.7, low - 0.68, f"a block; yellow has weights: {told}", ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.3, 11.7), ylim=(0.2, 5.0 if config.residual else 4.6))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    try:
        figure_of(sys.argv[1:]).savefig(FOLDER / "vit.png", dpi=120)
    except ValueError as error:
        sys.exit(f"vit.py: {error}")
