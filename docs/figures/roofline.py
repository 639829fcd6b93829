"""Draw roofline.png: what limits each part of a transformer block, bytes or FLOPs? `make figures` runs this.

Williams et al. 2009, Roofline: a part that does F FLOPs and moves B bytes to and from memory takes at least
max(F / peak, B / bandwidth). Peaks and bandwidths are those of the makers' datasheets. Forward pass of one block of the
section `base`, 16 samples, bf16 autocast: matrix products in bf16, the residual stream and the norms in float32.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from utils.device import DATASHEET_TFLOPS  # noqa: E402

BANDWIDTH = {"A100": 1.555, "H100": 3.35}  # TB/s: A100 of 40 GB, H100 SXM
N, D, HEADS, SAMPLES = 4050, 384, 8, 16
TOKENS = N * SAMPLES


@dataclass(frozen=True)
class Part:
    """FLOPs and bytes of all tokens; an elementwise part is one that compilation fuses with its neighbours."""

    name: str
    flops: float
    bytes: float
    elementwise: bool = False

    def seconds(self, gpu: str) -> float:
        return max(self.flops / (DATASHEET_TFLOPS[gpu][2] * 1e12), self.bytes / (BANDWIDTH[gpu] * 1e12))


def linear(name: str, inputs: int, outputs: int) -> Part:
    """A matrix product with a bias: tokens in, tokens out and the weight pass once, 2 bytes each."""
    return Part(name, 2 * TOKENS * inputs * outputs, 2 * (TOKENS * (inputs + outputs) + inputs * outputs))


def elementwise(name: str, flops: int, *moved: int) -> Part:
    """`flops` and bytes `moved` for each number of the tokens [N, D]."""
    return Part(name, flops * TOKENS * D, sum(moved) * TOKENS * D, True)


def attention(name: str, flash: bool) -> Part:
    """Two products over all pairs of tokens; the plain one writes and reads the table of weights, float32 and bf16."""
    table = 0 if flash else HEADS * SAMPLES * N**2 * (2 + 2 + 4 + 4 + 2 + 2)
    return Part(name, 4 * TOKENS * N * D, 2 * 4 * TOKENS * D + table)


# Numbers read and written, in bytes for each element of the tokens: 4 in float32, 2 in bf16.
EAGER = [
    elementwise("norm 1, cast", 8, 4, 4, 4, 2),
    linear("qkv", D, 3 * D),
    attention("attention", flash=True),
    linear("proj", D, D),
    elementwise("add 1", 1, 4, 2, 4),
    elementwise("norm 2, cast", 8, 4, 4, 4, 2),
    linear("fc1", D, 4 * D),
    elementwise("GELU", 4 * 10, 4 * 2, 4 * 2),
    linear("fc2", 4 * D, D),
    elementwise("add 2", 1, 4, 2, 4),
]
COMPILED = [
    elementwise("norm 1, cast", 8, 4, 2),
    *EAGER[1:4],
    elementwise("add 1, norm 2, cast", 9, 4, 2, 4, 2),
    *EAGER[6:],
]
MATH = attention("attention, plain formula", flash=False)


def figures() -> dict[str, float]:
    """Return the figures of chapter 1's text."""
    flash = next(part for part in EAGER if part.name == "attention")
    return {
        "attention's FLOPs": flash.flops / sum(part.flops for part in EAGER),
        "formula over flash": MATH.seconds("H100") / flash.seconds("H100"),
    }


def table() -> str:
    """Return the time of each kind of part on an H100, at the least, as chapter 1 shows it."""
    lines = ["| on an H100, at the least | matrix products | attention | all else | in all |", "|---|---|---|---|---|"]
    plain = [MATH if part.name == "attention" else part for part in EAGER]
    for name, parts in {"attention by the formula": plain, "flash attention": EAGER, "compiled": COMPILED}.items():
        kinds = [0.0, 0.0, 0.0]
        for part in parts:
            kinds[2 if part.elementwise else int(part.name.startswith("attention"))] += 1e3 * part.seconds("H100")
        lines.append(f"| {name} | " + " | ".join(f"{ms:.2f} ms" for ms in (*kinds, sum(kinds))) + " |")
    return "\n".join(lines)


# Where a name stands beside its point, in points; parts that lie close together have one name.
NAMES = {
    "norm 1, cast": ("norms, casts", 8, -10), "qkv": ("qkv, fc1, fc2", -8, 4), "attention": ("flash attention", 0, 8),
    "proj": ("proj", -8, 0), "add 1": ("additions", 8, -8), "GELU": ("GELU", 8, -10), MATH.name: (MATH.name, 8, -10),
}  # fmt: skip


def draw_roofs(axes: Axes) -> None:
    """Draw what each part can reach on two GPUs, by its FLOPs for each byte."""
    low, high = 2**-4, 2**15
    for gpu, style in (("A100", "--"), ("H100", "-")):
        peak, bandwidth = DATASHEET_TFLOPS[gpu][2], BANDWIDTH[gpu]
        axes.plot([low, peak / bandwidth, high], [low * bandwidth, peak, peak], style, color="0.5", zorder=1)
        axes.text(
            low * 1.3, 520 if gpu == "H100" else 250, f"{style}  {gpu}: {peak} TFLOP/s, {bandwidth} TB/s", fontsize=8
        )
    for part in (*EAGER, MATH):
        x, y = part.flops / part.bytes, part.flops / part.seconds("H100") / 1e12
        axes.scatter(x, y, s=36, color="tab:orange" if part.elementwise else "tab:blue", zorder=2)
        if part.name in NAMES:
            name, *offset = NAMES[part.name]
            side = "right" if offset[0] < 0 else "left"
            axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", fontsize=8, ha=side)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.15, 3000))
    axes.set(xlabel="FLOPs for each byte to or from memory", ylabel="TFLOP/s at the most", title="Roofline")
    axes.grid(alpha=0.3)


def draw_times(axes: Axes) -> None:
    """Draw how long the parts take on an H100 at the least, one after the other."""
    for row, parts in enumerate((COMPILED, EAGER)):
        left = 0.0
        for part in parts:
            width = 1e3 * part.seconds("H100")
            colour = "tab:orange" if part.elementwise else "tab:blue"
            axes.barh(row, width, left=left, color=colour, edgecolor="white", height=0.6, alpha=0.8)
            axes.text(left + width / 2, row, part.name, ha="center", va="center", fontsize=7, rotation=90)
            left += width
    axes.set(yticks=[0, 1], yticklabels=["compiled", "not compiled"], xlabel="ms on an H100, at the least")
    axes.set(title="Forward pass of a block, with flash attention")


def main() -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    draw_roofs(left)
    draw_times(right)
    figure.savefig(FOLDER / "roofline.png", dpi=110)


if __name__ == "__main__":
    main()
    print(table())
