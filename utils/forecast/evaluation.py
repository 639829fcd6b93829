"""One evaluation: what decides it, and what is made of its forecasts at the end."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from utils.config.settings import FIELDS
from utils.files import seen
from utils.forecast.data import ForecastData
from utils.forecast.ensemble import MEAN, MEMBER
from utils.forecast.judge import Judge
from utils.forecast.results import Results
from utils.forecast.run import ForecastRun, beside, seen_model
from utils.forecast.settings import Evaluation
from utils.forecast.trained import statistics_of

FORMAT = 2  # of what is kept of a forecast


@dataclass(eq=False)
class EvaluationRun(ForecastRun):
    """Makes the forecasts that are not there yet, and judges all."""

    settings: Evaluation
    data: ForecastData

    def __post_init__(self):
        self.members = [name for name in self.models if name.startswith(MEMBER)]
        if self.members:
            self.models = [*self.models, MEAN]
        super().__post_init__()
        self.judged = [self.models[0], MEAN] if self.members else self.models
        self.judge = Judge(self.data, self.store, self.judged, self.members, self.writer)

    def finish(self) -> None:
        """Make scores and pictures, on rank 0, of the forecasts of all ranks. Raises WriteError."""
        if self.world.rank == 0:
            from utils.forecast.report import report  # Matplotlib and TensorBoard: the other ranks need not read them

            iteration = self.info and self.info["iteration"]
            results = Results(self.settings, self.data, self.store, self.judged, iteration, len(self.members))
            with self.store.writing():
                report(results)

    def describe(self) -> None:
        fields = self.data.fields
        if fields.forced and self.data.steps > 1:
            logging.info("Not forecast, but read from the files at each time: %s", ", ".join(fields.forced_names))
        if fields.forcings.names:
            logging.info("Beside the state: %s", ", ".join(fields.forcings.names))

    def results_folder(self) -> Path:
        return beside(self.settings, "ensemble" if self.settings.is_ensemble else "evaluation")

    def setting(self) -> dict[str, Any]:
        config, settings, data = self.config, self.settings, self.data
        keys = {n: getattr(config, n) for n, field in FIELDS.items() if not field.metadata["same_forecast"]}
        return {
            "format": FORMAT,
            "torch": torch.__version__,
            "checkpoint": [seen_model(Path(source)) for source in settings.checkpoint],
            "models": self.models,
            "ensemble": [settings.perturb, settings.one_kind] if self.members else None,
            "files": [[str(Path(path).resolve()), *stamp] for path, stamp in zip(data.files.paths, data.files.stamps)],
            "statistics": [seen(path) for path in statistics_of(config).values() if Path(path).exists()],
            "climatology": settings.climatology and seen(settings.climatology),
            "lead_hours": data.lead_hours,
            "stride": settings.stride,
            "forecasts": [settings.forecasts, settings.names],
            "device": data.device.type,
            "configuration": keys,
        }
