"""Maps of an evaluation: forecast, truth and error at some lead times, and an animation.

Plain latitude and longitude, or a projection of cartopy where it is installed. Coastlines are not drawn: cartopy
downloads them when it draws, and compute nodes have no network.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from utils.forecast.data import Forecasts
from utils.forecast.projections import find_projection
from utils.plots import colour_scale, error_scale, plain_map


class Maps:
    """Draws fields of a grid.

    Args:
        projection: `plain`, or the name of a class of cartopy.crs.

    Raises ValueError where cartopy is needed and not installed, and for a name that it does not know.
    """

    def __init__(self, data: Forecasts, projection: str = "plain"):
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

    def figure(self, c: int, steps: list[int], forecasts: np.ndarray, truths: np.ndarray | None, source: str) -> Figure:
        """Draw forecasts [K, H, W] of channel `c`, a row for each lead time.

        Beside them what happened and the error, where that is known.
        """
        data, name = self.data, self.data.fields.out_names[c]
        columns = 1 if truths is None else 3
        scale = colour_scale(forecasts if truths is None else truths)
        figure = Figure(figsize=(2 + 3.7 * columns, 1.2 + 2.2 * len(steps)), layout="constrained")
        grid = self.subplots(figure, len(steps), columns)
        errors = {} if truths is None else error_scale((forecasts - truths)[steps])
        for axes, k in zip(grid, steps):
            when = f", {data.date(0, k + 1)}" if truths is None else ""
            axes[0].set_title(f"{source} after {data.lead_hours[k]:g} h{when}", fontsize=9)
            images = [self.draw(axes[0], forecasts[k], scale)]
            if truths is not None:
                axes[1].set_title(f"truth, {data.date(0, k + 1)}", fontsize=9)
                axes[2].set_title("error (forecast - truth)", fontsize=9)
                images += [self.draw(axes[1], truths[k], scale), self.draw(axes[2], forecasts[k] - truths[k], errors)]
        for image, below in zip(images[::2], (grid[:, :2], grid[:, 2:])):
            bar = {"location": "bottom", "extend": "both", "shrink": 0.7, "aspect": 40, "pad": 0.01}
            shown = figure.colorbar(image, ax=below, label=data.fields.label(c), **bar)
            shown.formatter.set_powerlimits((-3, 6))
        if self.projection is None:
            for axes in grid[-1]:
                axes.set_xlabel("longitude [degrees east]", fontsize=9)
            figure.supylabel("latitude [degrees north]", fontsize=9)
        figure.suptitle(f"{name}: a forecast that starts from {data.date(0)}")
        return figure

    def animate(self, path: Path, c: int, forecasts: np.ndarray, truths: np.ndarray | None, source: str) -> None:
        """Write a forecast as a GIF; [K, H, W], or [1 + K, H, W] with the initial state.

        Beside it what happened, where that is known.
        """
        films = [forecasts] if truths is None else [forecasts, truths]
        first = self.data.steps + 1 - len(forecasts)
        data, scale = self.data, colour_scale(films[-1])
        figure = Figure(figsize=(1 + 4.5 * len(films), 3.1), dpi=80, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = self.subplots(figure, 1, len(films))[0]
        images = [self.draw(one, fields[0], scale) for one, fields in zip(axes, films)]
        named = data.fields.label(c)
        bar = figure.colorbar(images[0], ax=axes, label=named, extend="both", shrink=0.8, pad=0.01)
        bar.formatter.set_powerlimits((-3, 6))
        if self.projection is None:
            for one in axes:
                one.set_xlabel("longitude [degrees east]", fontsize=9)
            axes[0].set_ylabel("latitude [degrees north]", fontsize=9)

        titles = [one.set_title(source, fontsize=9) for one in axes]
        canvas.draw()  # lays all out
        figure.set_layout_engine("none")

        # What stays is drawn once; on it, for each frame, what moves: that takes a quarter of the time.
        moving = [*images, *titles, *(spine for one in axes for spine in one.spines.values())]
        for artist in moving:
            artist.set_animated(True)
        canvas.draw()
        still, frames = canvas.copy_from_bbox(figure.bbox), []
        for k, fields in enumerate(zip(*films), first):
            titles[0].set_text(f"{source}: {data.date(0)} + {data.fields.step_hours * k:g} h")
            for title in titles[1:]:
                title.set_text(f"what happened: {data.date(0, k)}")
            for image, field in zip(images, fields):
                image.set_array(field)
            canvas.restore_region(still)
            for artist in moving:
                figure.draw_artist(artist)
            frames.append(Image.fromarray(np.array(canvas.buffer_rgba())).convert("RGB"))
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=250, loop=0)
