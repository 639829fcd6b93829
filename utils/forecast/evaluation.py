"""One evaluation: its folder, which forecasts are left to make, and what is made of them at the end."""

import logging
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from utils.checkpoint import store as checkpoint
from utils.config.settings import FIELDS, Config
from utils.errors import STOPPED, Ended
from utils.forecast.data import ForecastData
from utils.forecast.judge import Judge
from utils.forecast.results import Results
from utils.forecast.settings import Evaluation
from utils.forecast.store import ForecastStore
from utils.forecast.writer import open_writer
from utils.ranks.agree import all_ranks_agree, share_error
from utils.ranks.stop import StopRequests
from utils.ranks.world import World
from utils.record.log import close_log, open_log

FORMAT = 2  # of what is kept of a forecast
SAID_EVERY = 60  # seconds, where no progress bar is seen


@dataclass(eq=False)
class EvaluationRun:
    """Makes the forecasts that are not there yet, and judges all; an evaluation of the same setting goes on.

    Raises Refused for a folder that cannot be used, and where ranks found different checkpoints. WriteError where
    the folder cannot be written any more.
    """

    settings: Evaluation  # what is evaluated, and how
    config: Config
    info: dict[str, Any] | None  # of the checkpoint; None for exported weights
    data: ForecastData
    models: list[str]  # their names
    world: World
    remarks: list[str]  # for the log

    def __post_init__(self):
        settings, data, world, self.folder = self.settings, self.data, self.world, results_folder(self.settings)
        self.store = ForecastStore(self.folder, len(data))
        self.handlers: list[logging.Handler] = []
        mine = settings.checkpoint  # a training that goes on may have written another one meanwhile
        first: list[Any] = [mine]
        dist.broadcast_object_list(first)
        share_error(f"the newest checkpoint is {mine}, on rank 0 {first[0]}: name one" if mine != first[0] else None)
        left: list[Any] = [None]
        with all_ranks_agree():
            writer = open_writer(settings.forecasts, self.folder, data, settings.checkpoint)
            if world.rank == 0:
                self.store.open(self._setting())
                self.handlers = open_log(self.folder / "out.log")
                left = [self.store.missing()]
                self._describe(len(left[0]))
        if world.rank == 0 and writer and len(left[0]) == len(data):
            with self.store.writing():
                writer.prepare(self.models)
        dist.broadcast_object_list(left)
        self.left = left[0]
        self.judge = Judge(data, self.store, writer)
        self.requests = StopRequests(None, None, self.config.longest_wait)

    def __enter__(self) -> "EvaluationRun":
        return self

    def __exit__(self, *_: Any) -> None:
        self.data.close()
        self.store.close()
        close_log(self.handlers)

    def batches(self) -> Iterator[list[int]]:
        """Yield the forecasts that this rank makes, by number. The ranks go on together, from batch to batch.

        Raises Ended, on all ranks, where a signal asked one of them to stop.
        """
        size = min(self.config.local_batch_size, -(-len(self.data) // self.world.size))
        shares = [share_out(self.left, rank, self.world.size, size) for rank in range(self.world.size)]
        mine, rounds = shares[self.world.rank], len(shares[0])
        with all_ranks_agree():
            self.data.begin(mine)
        bar = tqdm(range(rounds), desc="forecasts", unit="batch", disable=None if self.world.rank == 0 else True)
        said = time.monotonic()
        for i in bar:
            if bar.disable and self.world.rank == 0 and time.monotonic() - said > SAID_EVERY:  # the log of a job
                logging.info("%d of %d batches of forecasts", i, rounds)
                said = time.monotonic()
            self._stop_if_asked()
            if i < len(mine):
                yield mine[i]
        self._stop_if_asked()  # and all ranks have kept their forecasts

    def finish(self) -> None:
        """Make scores and pictures, on rank 0, of the forecasts of all ranks. Raises WriteError."""
        if self.world.rank == 0:
            from utils.forecast.report import report  # Matplotlib and TensorBoard: the other ranks need not read them

            results = Results(self.settings, self.data, self.store, self.models, self.info and self.info["iteration"])
            with self.store.writing():
                report(results)

    def _stop_if_asked(self) -> None:
        if self.requests.agree_now():
            if self.world.rank == 0:
                logging.info("Stopped by a signal: the same command goes on from here")
            raise Ended(STOPPED)

    def _describe(self, left: int) -> None:
        data, settings = self.data, self.settings
        there = len(data) - left
        for remark in (*self.remarks, data.fields.warning):
            if remark:
                logging.info(remark)
        after = f", after {self.info['iteration']} iterations" if self.info else ""
        logging.info("Model: %s%s", settings.checkpoint, after)
        logging.info("%s, %g h in %d step(s) of %s", data.period, data.lead_hours[-1], data.steps, data.fields.hours)
        if data.fields.forced and data.steps > 1:
            logging.info("Not forecast, but read from the files at each time: %s", ", ".join(data.fields.forced_names))
        logging.info("Results: %s%s", self.folder, f" ({there} forecasts are there already)" if there else "")
        if settings.forecasts != "none":
            points = len(data.fields.out_names) * math.prod(self.config.img_size)
            size = 4 * left * len(self.models) * data.steps * points
            logging.info(
                "Forecasts to write: %d, up to %.3g GB; free: %.3g GB",
                *(left, size / 1e9, shutil.disk_usage(self.folder).free / 1e9),
            )

    def _setting(self) -> dict[str, Any]:
        """Return what decides the results."""
        config, settings, data = self.config, self.settings, self.data
        keys = {n: getattr(config, n) for n, field in FIELDS.items() if not field.metadata["same_forecast"]}
        names = ("global_means_path", "global_stds_path", "time_means_path", "time_diff_stds_path")
        statistics = [path for name in names if (path := getattr(config, name)) is not None]
        source = Path(settings.checkpoint)
        return {
            "format": FORMAT,
            "torch": torch.__version__,
            "checkpoint": [str(source), *seen(source / checkpoint.INFO if source.is_dir() else source)[1:]],
            "models": self.models,
            "files": [[str(Path(path).resolve()), *stamp] for path, stamp in zip(data.files.paths, data.files.stamps)],
            "statistics": [seen(path) for path in statistics],
            "climatology": settings.climatology and seen(settings.climatology),
            "lead_hours": data.lead_hours,
            "stride": settings.stride,
            "forecasts": settings.forecasts,
            "device": data.device.type,
            "configuration": keys,
        }


def seen(path: str | Path) -> list[str | int]:
    """Return where a file lies, and what changes when it does; also of a folder of files, as Zarr writes them."""
    status = [file.stat() for file in Path(path).rglob("*") if file.is_file()] or [Path(path).stat()]
    total, newest = sum(one.st_size for one in status), max(one.st_mtime_ns for one in status)
    return [str(Path(path).resolve()), len(status), total, newest]


def results_folder(settings: Evaluation) -> Path:
    """Return where the results go."""
    if settings.out is not None:
        return Path(settings.out).resolve()
    source = Path(settings.checkpoint)
    if source.is_dir():
        in_run = source.parent.name == "checkpoints"  # <run>/checkpoints/00000128
        return source.parent.parent / "evaluation" if in_run else source.with_name(f"{source.name}_evaluation")
    return source.with_name(f"{source.stem}_evaluation")


def share_out(forecasts: list[int], rank: int, ranks: int, size: int) -> list[list[int]]:
    """Return a rank's forecasts in batches of `size`: the last one fills up its batch."""
    mine = forecasts[rank::ranks]
    batches = [mine[i : i + size] for i in range(0, len(mine), size)]
    return [batch + batch[-1:] * (size - len(batch)) for batch in batches]
