"""Maps of an evaluation: forecast, truth and error at some lead times, and an animation.

Plain latitude and longitude, or a projection of cartopy where it is installed. Coastlines are not drawn: cartopy
downloads them when it draws, and compute nodes have no network.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from utils.forecast.data import ForecastData
from utils.forecast.projections import find_projection
from utils.plots import colour_scale, error_scale, plain_map


class Maps:
    """Draws fields of a grid.

    Args:
        projection: `plain`, or the name of a class of cartopy.crs.

    Raises ValueError where cartopy is needed and not installed, and for a name that it does not know.
    """

    def __init__(self, data: ForecastData, projection: str = "plain"):
        self.data = data
        self.latitude, self.longitude = (x[:: data.map_stride] for x in (data.fields.latitude, data.fields.longitude))
        self.projection, self.transform = find_projection(projection)

    def subplots(self, figure: Figure, rows: int, columns: int) -> np.ndarray:
        """Return the axes of maps, [rows, columns]."""
        return figure.subplots(rows, columns, squeeze=False, subplot_kw={"projection": self.projection})

    def draw(self, axes: Axes, field: np.ndarray, scale: dict[str, Any]) -> Any:
        """Draw a field [H, W]."""
        if self.projection is None:
            plain_map(axes, self.latitude, self.longitude)
            axes.label_outer()
            more = {}
        else:
            axes.set_global()
            more = {"transform": self.transform}
        return axes.pcolormesh(
            self.longitude, self.latitude, field, shading="nearest", rasterized=True, **scale, **more
        )

    def figure(self, c: int, steps: list[int], forecasts: np.ndarray, truths: np.ndarray, source: str) -> Figure:
        """Draw forecasts [K, H, W] of channel `c` beside what happened and the error, a row for each lead time."""
        data, name = self.data, self.data.fields.out_names[c]
        scale, errors = colour_scale(truths), error_scale((forecasts - truths)[steps])
        figure = Figure(figsize=(13, 1.2 + 2.2 * len(steps)), layout="constrained")
        grid = self.subplots(figure, len(steps), 3)
        for axes, k in zip(grid, steps):
            fields = (forecasts[k], truths[k], forecasts[k] - truths[k])
            titles = (f"{source} after {data.lead_hours[k]:g} h", data.date(0, k + 1), "error (forecast - truth)")
            images = [self.draw(*each) for each in zip(axes, fields, (scale, scale, errors))]
            for one, title in zip(axes, titles):
                one.set_title(title, fontsize=9)
        for images_of, columns in ((images[0], grid[:, :2]), (images[2], grid[:, 2:])):
            bar = {"location": "bottom", "extend": "both", "shrink": 0.7, "aspect": 40, "pad": 0.01}
            shown = figure.colorbar(images_of, ax=columns, label=data.fields.label(c), **bar)
            shown.formatter.set_powerlimits((-3, 6))
        if self.projection is None:
            for axes in grid[-1]:
                axes.set_xlabel("longitude [degrees east]", fontsize=9)
            figure.supylabel("latitude [degrees north]", fontsize=9)
        figure.suptitle(f"{name}: a forecast that starts from {data.date(0)}")
        return figure

    def animate(self, path: Path, c: int, forecasts: np.ndarray, truths: np.ndarray, source: str) -> None:
        """Write a forecast beside what happened as a GIF; [K, H, W], or [1 + K, H, W] with the initial state."""
        first = self.data.steps + 1 - len(truths)
        data, scale = self.data, colour_scale(truths)
        figure = Figure(figsize=(10, 3.1), layout="constrained")
        FigureCanvasAgg(figure)
        axes = self.subplots(figure, 1, 2)[0]
        images = [self.draw(one, fields[0], scale) for one, fields in zip(axes, (forecasts, truths))]
        named = data.fields.label(c)
        bar = figure.colorbar(images[0], ax=axes, label=named, extend="both", shrink=0.8, pad=0.01)
        bar.formatter.set_powerlimits((-3, 6))
        if self.projection is None:
            for one in axes:
                one.set_xlabel("longitude [degrees east]", fontsize=9)
            axes[0].set_ylabel("latitude [degrees north]", fontsize=9)

        def show(frame: int) -> None:
            k = first + frame
            for image, fields in zip(images, (forecasts, truths)):
                image.set_array(fields[frame])
            axes[0].set_title(f"{source}: {data.date(0)} + {data.fields.step_hours * k:g} h", fontsize=9)
            axes[1].set_title(f"what happened: {data.date(0, k)}", fontsize=9)

        show(0)
        figure.canvas.draw()
        figure.set_layout_engine("none")  # to lay each frame out anew takes most of the time
        FuncAnimation(figure, show, frames=len(truths)).save(path, PillowWriter(fps=4), dpi=80)
