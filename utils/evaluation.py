"""One evaluation: its folder, which forecasts are left to make, and what is made of them at the end."""

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils import checkpoint
from utils.config import Config, Evaluation
from utils.era5 import stamp
from utils.forecast_data import ForecastData
from utils.forecast_store import ForecastStore
from utils.forecast_writer import open_writer
from utils.judge import Judge
from utils.launch import World, all_ranks_agree
from utils.logging_utils import close_log, open_log


class EvaluationFolder:
    """Where an evaluation keeps what it finds; an evaluation of the same setting goes on where one was ended.

    Args:
        info: of the checkpoint; None for exported weights.
        models: the names of the models.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        config: Config,
        info: dict[str, Any] | None,
        data: ForecastData,
        models: list[str],
        world: World,
    ):
        self.evaluation, self.config, self.info, self.data, self.models = evaluation, config, info, data, models
        self.world, self.folder = world, results_folder(evaluation)
        store = self.store = ForecastStore(self.folder, len(data))
        self.handlers: list[logging.Handler] = []
        left: list[list[int]] = [[]]
        with all_ranks_agree():
            writer = open_writer(evaluation.forecasts, self.folder, data)
            if world.rank == 0:
                from utils.maps import find_projection  # Matplotlib: the other ranks need not read it

                find_projection(evaluation.projection)
                store.open(self._setting())
                left = [store.missing()]
                if writer and len(left[0]) == len(data):
                    writer.prepare(models)
                self.handlers = open_log(self.folder / "out.log")
                self._describe(len(data) - len(left[0]))
        dist.broadcast_object_list(left)
        self.left = left[0]
        self.judge = Judge(data, store, writer)

    def __enter__(self) -> "EvaluationFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        close_log(self.handlers)

    def batches(self) -> list[list[int]]:
        """Return the forecasts that this rank makes."""
        return share_out(self.left, self.world.rank, self.world.size, self.config.local_batch_size)

    def finish(self) -> None:
        """Make scores and pictures, on rank 0, once all ranks have made their forecasts."""
        if self.world.rank == 0:
            from utils.skill_report import report

            report(self)

    def _describe(self, there: int) -> None:
        data, evaluation = self.data, self.evaluation
        after = f", after {self.info['iteration']} iterations" if self.info else ""
        logging.info("Model: %s%s", evaluation.checkpoint, after)
        logging.info(
            "Forecasts: %d, from %s to %s, %g h in %d steps of %s",
            *(len(data), data.date(0), data.date(len(data) - 1), data.lead_hours[-1], data.steps, data.hours),
        )
        logging.info("Results: %s%s", self.folder, f" ({there} forecasts are there already)" if there else "")
        if data.warning:
            logging.info(data.warning)

    def _setting(self) -> dict[str, Any]:
        """Return what decides the results."""
        config, evaluation, data = self.config, self.evaluation, self.data
        source = Path(evaluation.checkpoint)
        paths = [config.global_means_path, config.global_stds_path, config.time_means_path]
        return {
            "checkpoint": [str(source), *stamp(source / checkpoint.INFO if source.is_dir() else source)],
            "models": self.models,
            "files": [[path, *seen] for path, seen in zip(data.files.paths, data.files.stamps)],
            "statistics": [[path, *stamp(path)] for path in paths],
            "climatology": evaluation.climatology and [evaluation.climatology, *stamp(evaluation.climatology)],
            "lead_hours": data.lead_hours,
            "stride": evaluation.stride,
            "channels": data.out_names,
            "maps": [data.out_names[c] for c in data.plot_channels],
            "forecasts": evaluation.forecasts,
            "precision": config.amp_mode,
            "device": data.device.type,
        }


def results_folder(evaluation: Evaluation) -> Path:
    """Return where the results go."""
    if evaluation.out is not None:
        return Path(evaluation.out)
    source = Path(evaluation.checkpoint)
    if source.is_dir():  # <run>/checkpoints/00000128
        return source.parent.parent / "evaluation"
    return source.with_name(f"{source.stem}_evaluation")


def share_out(forecasts: list[int], rank: int, ranks: int, batch_size: int) -> list[list[int]]:
    """Return a rank's forecasts in batches of one size: the last one fills up its batch."""
    mine = forecasts[rank::ranks]
    size = min(batch_size, -(-len(forecasts) // ranks)) or 1
    batches = [mine[i : i + size] for i in range(0, len(mine), size)]
    return [batch + batch[-1:] * (size - len(batch)) for batch in batches]
