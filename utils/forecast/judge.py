"""The judge of forecasts: looks at each as it comes, and keeps what scores and pictures are made of.

Shapes:  B forecasts of one batch   C channels   H W rows, columns
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from utils.forecast.data import ForecastData
from utils.forecast.ensemble import MEAN, ensemble_moments, rank_histogram
from utils.forecast.skill import moments, row_weights, zonal_spectrum
from utils.forecast.store import ForecastStore
from utils.forecast.writer import ForecastWriter

LARGEST_MOMENT = 1e22  # of weather in its units, squared: what archives fill with gives more


class Judge:
    """Keeps of each forecast its moments, its spectra at some lead times, and of the first one also its maps.

    Args:
        models: the forecasts to judge beside persistence, by name.
        members: those that make an ensemble, whose mean is one more forecast; there may be none.
        writer: where whole forecasts go; None for nowhere.
    """

    def __init__(
        self, data: ForecastData, store: ForecastStore, models: list[str], members: list[str],
        writer: ForecastWriter | None,
    ):  # fmt: skip
        self.data, self.store, self.writer = data, store, writer
        self.models, self.members = models, members
        self.weights = row_weights(data.fields.latitude).to(data.device)

    def keep(self, numbers: list[int], steps: Iterator[tuple[Tensor, dict[str, Tensor]]]) -> None:
        """Follow a batch of forecasts to its end. Raises WriteError, and ReadError for data that are not finite.

        Args:
            numbers: of the forecasts. The last one may come more than once, to fill a batch up.
            steps: yields, for each lead time, the truth and each source's forecast, all [B, C, H, W] in units.
        """
        places = {n: b for b, n in enumerate(numbers)}
        names = "moments", "spectra", "maps", "ensemble", "ranks"
        kept: dict[int, dict[str, list[np.ndarray]]] = {n: {name: [] for name in names} for n in places}
        for k, (truth, forecasts) in enumerate(steps):
            for n, b in places.items():
                found = {name: x[b] for name, x in forecasts.items()}
                if self.members:
                    found[MEAN] = self._look_at_ensemble(kept[n], k, truth[b], found)
                self._look(kept[n], n, k, truth[b], {name: found[name] for name in ("persistence", *self.models)})
                if self.writer:
                    written = {name: x for name, x in found.items() if name != "persistence"}
                    with self.store.writing():
                        self.writer.add(n, k, written)
        for n, lists in kept.items():
            # Climatology's tell of the truth; a model's first ones, and persistence's, of the state that it began with.
            found = np.stack(lists["moments"])
            known = np.concatenate([found[:, -1], found[0, 1:]])
            if not (np.abs(known) < LARGEST_MOMENT).all() or (np.abs(found[0, 0]) >= LARGEST_MOMENT).any():
                self.data.find_nonfinite(n)
            with self.store.writing():
                if self.writer:
                    self.writer.finish(n)
                self.store.keep(n, **{name: np.stack(values) for name, values in lists.items() if values})

    def _look(self, kept: dict[str, list], n: int, k: int, truth: Tensor, forecasts: dict[str, Tensor]) -> None:
        """Keep what is wanted of step k of forecast n."""
        data, true = self.data, truth.double()
        usual = data.climate.at(data.seconds(n, k + 1))
        judged = [moments(x.double(), true, usual, self.weights) for x in (*forecasts.values(), usual)]
        kept["moments"].append(torch.stack(judged).cpu().numpy())
        if k in data.shown_steps:
            spectra = [zonal_spectrum(x.double(), self.weights[:, 0]) for x in (true, *forecasts.values())]
            kept["spectra"].append(torch.stack(spectra).cpu().numpy())
        if n == 0:
            every = data.map_stride
            maps = [x[data.fields.plot_channels, ::every, ::every].float() for x in (truth, *forecasts.values())]
            kept["maps"].append(torch.stack(maps).cpu().numpy())

    def _look_at_ensemble(self, kept: dict[str, list], k: int, truth: Tensor, forecasts: dict[str, Tensor]) -> Tensor:
        """Keep what is wanted of the members at step k, and return their mean."""
        mean, moments, ranks = torch.empty_like(truth, dtype=torch.float32), [], []  # the truth is as stored
        true = truth.double()
        for c in range(len(truth)):  # one by one: in float64 all channels of all members would take much memory
            members = torch.stack([forecasts[name][c : c + 1] for name in self.members]).double()
            moments.append(ensemble_moments(members, true[c : c + 1], self.weights))
            if k in self.data.shown_steps:
                ranks.append(rank_histogram(members, true[c : c + 1], self.weights[:, 0]))
            mean[c] = members.mean(dim=0)[0]
        kept["ensemble"].append(torch.cat(moments).cpu().numpy())
        if ranks:
            kept["ranks"].append(torch.cat(ranks).cpu().numpy())
        return mean
