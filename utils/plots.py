"""Pictures: forecasts as plain latitude/longitude maps, with units; the grid of ranks."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MultipleLocator

from utils.comm import rank_groups

MEANING = {
    "tp": "ranks that split the weights of a layer",
    "cp": "ranks that split the tokens of an image",
    "dp": "same weights, different samples",
    "tp-cp": "ranks that hold one copy of the model",
    "dp-cp": "ranks that add up gradients",
}


def forecast_figure(
    fields: dict[str, np.ndarray], latitude: np.ndarray, longitude: np.ndarray, channel: str, units: str, title: str
) -> Figure:
    """Draw the input, the target, the forecast and the error of one channel on four maps.

    Args:
        fields: `input` (None where the channel is no input), `target` and `forecast`, each [H, W] in `units`.
        latitude: degrees north, [H].
        longitude: degrees east, [W].
    """
    states = [field for field in fields.values() if field is not None]
    error = fields["forecast"] - fields["target"]
    scale = colour_scale(np.stack(states))  # one for the three states: colours can be compared

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    for axes, (name, field) in zip(
        figure.subplots(2, 2, sharex=True, sharey=True).flat, {**fields, "error": error}.items()
    ):
        bounds = error_scale(error) if name == "error" else scale
        axes.set_title(name if name != "error" else "error (forecast - target)")
        plain_map(axes, latitude, longitude)
        if field is None:
            axes.text(0.5, 0.5, "no input channel", transform=axes.transAxes, ha="center")
            continue
        image = axes.pcolormesh(longitude, latitude, field, shading="nearest", rasterized=True, **bounds)
        figure.colorbar(image, ax=axes, label=label(channel, units), extend="both", pad=0.02)
    for axes in figure.axes[2:4]:
        axes.set_xlabel("longitude [degrees east]")
    for axes in figure.axes[0:4:2]:
        axes.set_ylabel("latitude [degrees north]")
    figure.suptitle(title)
    return figure


def colour_scale(states: np.ndarray) -> dict[str, Any]:
    """Return the colours of fields, for pcolormesh. Half a per cent at each end is left to outliers."""
    low, high = np.percentile(states, [0.5, 99.5])
    if low < 0 < high:  # a signed field: zero is white
        most = max(-low, high)
        return {"vmin": -most, "vmax": most, "cmap": "RdBu_r"}
    return {"vmin": low, "vmax": high, "cmap": "viridis"}


def error_scale(errors: np.ndarray) -> dict[str, Any]:
    """Return the colours of errors, for pcolormesh. Those that are not finite are left out."""
    finite = np.abs(errors[np.isfinite(errors)])
    most = (np.percentile(finite, 99.5) if finite.size else 0.0) or 1.0
    return {"vmin": -most, "vmax": most, "cmap": "PuOr_r"}


def label(channel: str, units: str) -> str:
    """Return the name of a channel with its units."""
    return f"{channel} [{units}]" if units else channel


def plain_map(axes: Axes, latitude: np.ndarray, longitude: np.ndarray) -> None:
    """Give axes the limits and ticks of a grid."""
    axes.set(xlim=edges(longitude), ylim=edges(latitude))
    for axis, size, apart in ((axes.xaxis, np.ptp(longitude), 60), (axes.yaxis, np.ptp(latitude), 30)):
        if size > 2 * apart:  # a smaller region has Matplotlib's own
            axis.set_major_locator(MultipleLocator(apart))


def edges(centres: np.ndarray) -> tuple[float, float]:
    """Return the outer edges of evenly spaced cells, in increasing order."""
    half = abs(centres[-1] - centres[0]) / max(len(centres) - 1, 1) / 2
    return float(centres.min() - half), float(centres.max() + half)


def grid_figure(sizes: Mapping[str, int], order: str, ranks_per_node: int = 4) -> Figure:
    """Draw which ranks talk to each other: a panel for each kind of group, a row for each node, a colour for a group.

    Args:
        sizes: of the axes dp, cp and tp.
        order: the axes, the one that varies fastest first, such as `tp-cp-dp`.
    """
    nodes = -(-sizes["dp"] * sizes["cp"] * sizes["tp"] // ranks_per_node)
    figure = Figure(figsize=(3.2 * len(MEANING), 1.2 + 0.65 * nodes), layout="constrained")
    for axes, (name, meaning) in zip(figure.subplots(1, len(MEANING)), MEANING.items()):
        groups = rank_groups(sizes, order, name)
        colours = matplotlib.colormaps["tab20"].colors
        if len(groups) > len(colours):
            colours = matplotlib.colormaps["turbo"](np.linspace(0, 1, len(groups)))
        for colour, ranks in zip(colours, groups):
            for rank in ranks:
                node, place = divmod(rank, ranks_per_node)
                corner = (place + 0.12, node + 0.15)
                axes.add_patch(FancyBboxPatch(corner, 0.76, 0.7, "round,pad=0.05", color=colour))
                axes.text(place + 0.5, node + 0.5, str(rank), ha="center", va="center")
        axes.set(xlim=(0, ranks_per_node), ylim=(nodes, 0), xticks=[], yticks=np.arange(nodes) + 0.5)
        axes.set_yticklabels([f"node {node}" for node in range(nodes)] if name == "tp" else [])
        axes.set_title(f"{name}: {len(groups)} group(s) of {len(groups[0])}\n{meaning}", fontsize=9)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    size = " x ".join(f"{axis} {sizes[axis]}" for axis in ("dp", "cp", "tp"))
    figure.suptitle(f"{size}, --parallel_order={order}: ranks of one colour form a group", fontsize=10)
    return figure


def memory_figure(moments: list[float], parts: dict[str, list[int]], title: str) -> Figure:
    """Draw what is in memory over time, part upon part; `moments` in ms, and the bytes of each part from then on."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    order = sorted(parts, key=lambda part: min(parts[part]), reverse=True)  # what lasts lies below
    gigabytes = [np.array(parts[part]) / 2**30 for part in order]
    axes.stackplot(moments, gigabytes, labels=order, step="post", alpha=0.85)
    axes.set(xlabel="time [ms]", ylabel="memory [GiB]", title=title, xlim=(0, moments[-1] or None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    return figure


def render(figure: Figure) -> np.ndarray:
    """Return the figure as pixels, uint8 [rows, columns, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
