"""One run of forecast.py: forecasts of what is not known yet, written as they come, and what they look like."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import FIELDS
from utils.forecast.initial import InitialStates
from utils.forecast.run import ForecastRun, beside, seen_model
from utils.forecast.settings import Outlook

FORMAT = 1  # of what is kept of a forecast


@dataclass(eq=False)
class OutlookRun(ForecastRun):
    """Makes the forecasts that are not there yet, and draws the first."""

    settings: Outlook
    data: InitialStates

    def keep(self, numbers: list[int], initial: Tensor, forecasts: Iterator[Tensor]) -> None:
        """Follow a batch of forecasts to its end. Raises WriteError.

        Args:
            numbers: of the forecasts. The last one may come more than once, to fill a batch up.
            initial: the states that they start from, [B, C_in, H, W] in units.
            forecasts: yields, for each lead time, [B, C_out, H, W] in units.
        """
        places = {n: b for b, n in enumerate(numbers)}
        lasting = dict.fromkeys(places, self.data.steps)  # steps that are finite
        maps: list[np.ndarray] = []
        for k, states in enumerate(forecasts):
            for n, b in places.items():
                if not states[b].isfinite().all():
                    lasting[n] = min(lasting[n], k)
                if self.writer:
                    with self.store.writing():
                        self.writer.add(n, k, {"model": states[b]})
                if n == 0:
                    maps.append(self._shown(states[b], range(len(states[b]))))
        for n, b in places.items():
            with self.store.writing():
                if self.writer:
                    self.writer.finish(n)
                shown = {}
                if n == 0:
                    shown = {"start": self._shown(initial[b], self.data.fields.origins), "maps": np.stack(maps)}
                self.store.keep(n, lasting=np.array(lasting[n]), **shown)

    def finish(self) -> None:
        """Draw the first forecast, on rank 0, and say which ones broke down. Raises WriteError."""
        if self.world.rank:
            return
        lasting = [int(x) for x in self.store.all("lasting")]
        broken = [n for n, steps in enumerate(lasting) if steps < self.data.steps]
        if broken:
            logging.warning(
                "%d of %d forecasts are not finite, the first that of %s after %g h",
                *(len(broken), len(self.data), self.data.date(broken[0]), self.data.lead_hours[lasting[broken[0]]]),
            )
        with self.store.writing():
            paths = self._draw()
        if self.writer:
            logging.info("  %s", self.writer.folder)
        for path in paths:
            logging.info("  %s", path)

    def results_folder(self) -> Path:
        return beside(self.settings, "forecast")

    def setting(self) -> dict[str, Any]:
        settings, data = self.settings, self.data
        return {
            "format": FORMAT,
            "torch": torch.__version__,
            "checkpoint": seen_model(settings.source),
            "weights": settings.weights,
            "initial": data.stamps,
            "starts": [data.date(n) for n in range(len(data))],
            "channels": settings.channels,
            "hold": settings.hold,
            "lead_hours": data.lead_hours,
            "forecasts": [settings.forecasts, settings.names],
            "device": data.device.type,
            "configuration": {n: getattr(self.config, n) for n in FIELDS if not FIELDS[n].metadata["same_forecast"]},
        }

    def _shown(self, state: Tensor, channels: Sequence[int]) -> np.ndarray:
        """Return the channels that pictures show of a state, thinned; NaN where there is none."""
        every, shown = self.data.map_stride, [channels[c] for c in self.data.fields.plot_channels]
        maps = state[[max(c, 0) for c in shown], ::every, ::every].cpu().numpy()
        maps[np.array(shown) < 0] = np.nan
        return maps

    def _draw(self) -> list[Path]:
        """Draw maps and a film of the first forecast below `pictures/`, and return the paths."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        from utils.forecast.maps import Maps  # Matplotlib: the other ranks need not read it

        logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of each animation
        data, folder = self.data, self.folder / "pictures"
        folder.mkdir(exist_ok=True)
        drawn, paths = Maps(data, self.settings.projection), []
        start, maps = (self.store.read(0, name) for name in ("start", "maps"))
        for i, c in enumerate(data.fields.plot_channels):
            name = data.fields.out_names[c]
            figure = drawn.figure(c, data.shown_steps, maps[:, i], None, "forecast")
            FigureCanvasAgg(figure)
            paths += [folder / f"maps_{name}.png", folder / f"forecast_{name}.gif"]
            figure.savefig(paths[-2], dpi=100)
            begun = start[None, i] if data.fields.origins[c] >= 0 else start[:0, i]
            drawn.animate(paths[-1], c, np.concatenate([begun, maps[:, i]]), None, "forecast")
        return paths
