"""What an evaluation found: what its tables and pictures are made of.

Shapes:  S sources of forecasts   K lead times   C channels   A weightings of the rows
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from utils.forecast.data import ForecastData
from utils.forecast.ensemble import MEAN, summarise_ensemble
from utils.forecast.settings import Evaluation
from utils.forecast.skill import MOMENTS, OF_ANOMALIES, summarise
from utils.forecast.store import ForecastStore


@dataclass(frozen=True)
class Results:
    """The scores and spectra of all forecasts, made of what is kept of each.

    Attributes:
        models: the names of those that are judged.
        iteration: after which the model was saved; None for exported weights.
    """

    settings: Evaluation
    data: ForecastData
    store: ForecastStore
    models: list[str]
    iteration: int | None
    members: int = 0  # of an ensemble

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.store.folder

    @property
    def sources(self) -> list[str]:
        """The sources of forecasts, in the order of their scores."""
        return ["persistence", *self.models, *(["climatology"] if self.data.climate.name else [])]

    @cached_property
    def _hours_apart(self) -> float:
        """How far apart forecasts start that follow each other: the median."""
        data = self.data
        if not data.fields.has_time or len(data) < 2:
            return data.fields.step_hours / data.config.dt * self.settings.stride
        return float(np.median(np.diff([data.seconds(n) for n in range(len(data))]))) / 3600

    @property
    def block(self) -> int:
        """How many forecasts that follow each other the bootstrap draws together."""
        return min(max(1, round(self.settings.block_hours / self._hours_apart)), len(self.data))

    @property
    def block_hours(self) -> float:
        """How long a block is: as long as asked for, in whole forecasts."""
        return self.block * self._hours_apart

    @property
    def blocks(self) -> float:
        """How many blocks the forecasts make."""
        return len(self.data) / self.block

    @cached_property
    def scores(self) -> dict[str, np.ndarray]:
        """Each score with its interval, [3, K, S, C, A]: value, low, high."""
        found = summarise(self.store.all("moments"), len(self.data), self.block)
        if self.data.climate.name:
            return found
        # The last source tells of the truth alone, and there are no anomalies.
        return {name: x[:, :, :-1] for name, x in found.items() if name not in OF_ANOMALIES}

    @cached_property
    def ensemble(self) -> dict[str, np.ndarray]:
        """Each score of the ensemble with its interval, [3, K, C, A]: value, low, high."""
        kept = np.stack(list(self.store.all("ensemble")))
        squares = np.stack(
            [x[:, self.sources.index(MEAN), ..., MOMENTS.index("ee")] for x in self.store.all("moments")]
        )
        return summarise_ensemble(kept, squares, self.members, self.block)

    @cached_property
    def ranks(self) -> np.ndarray:
        """How often so many members lie below the truth, [lead times shown, C, members + 1]."""
        return sum(self.store.all("ranks")) / len(self.data)

    @cached_property
    def spectra(self) -> np.ndarray:
        """The mean power of the truth, persistence and the models, [lead times, S, C, wavenumbers]."""
        return sum(self.store.all("spectra")) / len(self.data)

    def nonfinite(self, source: int) -> Iterator[tuple[int, int]]:
        """Yield the forecasts of a source that are not finite, each with the first step at which it is not."""
        for n, moments in enumerate(self.store.all("moments")):  # [K, S, C, A, M]
            steps = np.flatnonzero(~np.isfinite(moments[:, source]).all(axis=(1, 2, 3)))
            if len(steps):
                yield n, steps[0]
