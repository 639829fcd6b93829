"""One evaluation: its folder, which forecasts are left to make, and what is made of them at the end."""

import dataclasses
import logging
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from utils import checkpoint
from utils.config import Config, Evaluation
from utils.era5 import stamp
from utils.forecast_data import ForecastData
from utils.forecast_store import ForecastStore
from utils.forecast_writer import open_writer
from utils.judge import Judge
from utils.launch import STOPPED, Ended, World, all_ranks_agree, share_error
from utils.logging_utils import close_log, open_log
from utils.stop import StopRequests

FORMAT = 1  # of what is kept of a forecast
SAID_EVERY = 60  # seconds, where no progress bar is seen

# Keys of a configuration that do not change a forecast, or that the setting has in another form.
IRRELEVANT = ("local_batch_size", "global_batch_size", "comm_timeout", "expandable_segments", "data_dir", "device")


class EvaluationFolder:
    """Where an evaluation keeps what it finds; an evaluation of the same setting goes on where one was ended.

    Args:
        info: of the checkpoint; None for exported weights.
        models: the names of the models.
        remarks: for the log.

    Raises Refused for a folder that cannot be used, and where ranks found different checkpoints.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        config: Config,
        info: dict[str, Any] | None,
        data: ForecastData,
        models: list[str],
        world: World,
        remarks: list[str],
    ):
        self.evaluation, self.config, self.info, self.data, self.models = evaluation, config, info, data, models
        self.world, self.folder = world, results_folder(evaluation)
        self.store = ForecastStore(self.folder, len(data))
        self.handlers: list[logging.Handler] = []
        found = [[evaluation.checkpoint, []]]
        with all_ranks_agree():
            writer = open_writer(evaluation.forecasts, self.folder, data, evaluation.checkpoint)
            if world.rank == 0:
                self.store.open(self._setting())
                self.handlers = open_log(self.folder / "out.log")
                found[0][1] = self.store.missing()
                if writer and len(found[0][1]) == len(data):
                    writer.prepare(models)
                self._describe(len(found[0][1]), remarks)
        dist.broadcast_object_list(found)
        (first, self.left) = found[0]
        other = evaluation.checkpoint != first  # a training that goes on may write one meanwhile
        share_error(f"the newest checkpoint is {evaluation.checkpoint}, on rank 0 {first}: name one" if other else None)
        self.judge = Judge(data, self.store, writer)
        self.requests = StopRequests(None, None, config.longest_wait)

    def __enter__(self) -> "EvaluationFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.data.close()
        self.store.close()
        close_log(self.handlers)

    def batches(self) -> Iterator[list[int]]:
        """Yield the forecasts that this rank makes. The ranks go on together, from batch to batch.

        Raises Ended, on all ranks, where a signal asked one of them to stop.
        """
        size = min(self.config.local_batch_size, -(-len(self.data) // self.world.size))
        shares = [share_out(self.left, rank, self.world.size, size) for rank in range(self.world.size)]
        mine, rounds = shares[self.world.rank], len(shares[0])
        bar = tqdm(range(rounds), desc="forecasts", unit="batch", disable=None if self.world.rank == 0 else True)
        said = time.monotonic()
        for i in bar:
            if bar.disable and self.world.rank == 0 and time.monotonic() - said > SAID_EVERY:  # the log of a job
                logging.info("%d of %d batches of forecasts", i, rounds)
                said = time.monotonic()
            if self.requests.agree()[0]:
                if self.world.rank == 0:
                    logging.info("Stopped by a signal: the same command goes on from here")
                raise Ended(STOPPED)
            if i < len(mine):
                yield mine[i]
        self.requests.close()
        dist.barrier()

    def finish(self) -> None:
        """Make scores and pictures, on rank 0, of the forecasts of all ranks. Raises WriteError."""
        if self.world.rank == 0:
            from utils.skill_report import report  # Matplotlib and TensorBoard: the other ranks need not read them

            with self.store.writing():
                report(self)

    def _describe(self, left: int, remarks: list[str]) -> None:
        data, evaluation = self.data, self.evaluation
        there = len(data) - left
        for remark in (*remarks, data.warning):
            if remark:
                logging.info(remark)
        after = f", after {self.info['iteration']} iterations" if self.info else ""
        logging.info("Model: %s%s", evaluation.checkpoint, after)
        logging.info(
            "Forecasts: %d, from %s to %s, %g h in %d step(s) of %s",
            *(len(data), data.date(0), data.date(len(data) - 1), data.lead_hours[-1], data.steps, data.hours),
        )
        logging.info("Results: %s%s", self.folder, f" ({there} forecasts are there already)" if there else "")
        if evaluation.forecasts != "none":
            size = 4 * left * len(self.models) * data.steps * len(data.out_names) * math.prod(data.img_size)
            logging.info(
                "Forecasts to write: %d, up to %.3g GB; free: %.3g GB",
                *(left, size / 1e9, shutil.disk_usage(self.folder).free / 1e9),
            )

    def _setting(self) -> dict[str, Any]:
        """Return what decides the results."""
        config, evaluation, data = self.config, self.evaluation, self.data
        keys = {n: x for n, x in dataclasses.asdict(config).items() if n not in IRRELEVANT and not n.endswith("_path")}
        names = ("global_means_path", "global_stds_path", "time_means_path", "time_diff_stds_path")
        statistics = [path for name in names if (path := getattr(config, name)) is not None]
        source, climatology = Path(evaluation.checkpoint), evaluation.climatology
        return {
            "format": FORMAT,
            "torch": torch.__version__,
            "checkpoint": [str(source), *stamp(source / checkpoint.INFO if source.is_dir() else source)],
            "models": self.models,
            "files": [[str(Path(path).resolve()), *seen] for path, seen in zip(data.files.paths, data.files.stamps)],
            "statistics": [[str(Path(path).resolve()), *stamp(path)] for path in statistics],
            "climatology": climatology and [str(Path(climatology).resolve()), *stamp(climatology)],
            "lead_hours": data.lead_hours,
            "stride": evaluation.stride,
            "forecasts": evaluation.forecasts,
            "device": data.device.type,
            "configuration": keys,
        }


def results_folder(evaluation: Evaluation) -> Path:
    """Return where the results go."""
    if evaluation.out is not None:
        return Path(evaluation.out).resolve()
    source = Path(evaluation.checkpoint)
    if source.is_dir():
        in_run = source.parent.name == "checkpoints"  # <run>/checkpoints/00000128
        return source.parent.parent / "evaluation" if in_run else source.with_name(f"{source.name}_evaluation")
    return source.with_name(f"{source.stem}_evaluation")


def share_out(forecasts: list[int], rank: int, ranks: int, size: int) -> list[list[int]]:
    """Return a rank's forecasts in batches of `size`: the last one fills up its batch."""
    mine = forecasts[rank::ranks]
    batches = [mine[i : i + size] for i in range(0, len(mine), size)]
    return [batch + batch[-1:] * (size - len(batch)) for batch in batches]
