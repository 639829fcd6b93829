"""What every run that makes many forecasts has: its folder, which forecasts are left to make, and who makes them."""

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from utils.checkpoint.info import INFO
from utils.checkpoint.weights import FILE
from utils.config.settings import Config
from utils.errors import STOPPED, Ended
from utils.files import seen
from utils.forecast.data import Forecasts
from utils.forecast.settings import Asked
from utils.forecast.store import ForecastStore
from utils.forecast.writer import Outline, bytes_of, open_writer
from utils.ranks.agree import all_ranks_agree, check_same
from utils.ranks.stop import StopRequests
from utils.ranks.world import World
from utils.record.log import close_log, open_log
from utils.record.progress import Pulse, in_words


@dataclass(eq=False)
class ForecastRun:
    """Makes the forecasts that are not there yet; a run of the same setting goes on.

    Raises Refused for a folder that cannot be used, and where ranks found different checkpoints. WriteError where
    the folder cannot be written any more.
    """

    settings: Asked  # what is made, and how
    config: Config
    info: dict[str, Any] | None  # of the checkpoint; None for exported weights
    data: Forecasts
    models: list[str]  # their names, as forecasts are written
    world: World
    remarks: list[str]  # for the log

    def __post_init__(self):
        settings, data, world, self.folder = self.settings, self.data, self.world, self.results_folder()
        self.store = ForecastStore(self.folder, len(data))
        self.handlers: list[logging.Handler] = []
        with all_ranks_agree():
            starts = [data.seconds(n) for n in range(len(data))]
        views = {"checkpoints": settings.checkpoint, "times to start from": starts, "lead times": list(data.lead_hours)}
        check_same(views, "give all ranks the same files, and of a training that goes on name a checkpoint")
        left: list[Any] = [None]
        with all_ranks_agree():
            self.outline = Outline(data.fields, starts, data.lead_hours, settings.names, self._attributes())
            self.writer = open_writer(settings.forecasts, self.folder / "forecasts", self.outline)
            if world.rank == 0:
                self.store.open(self.setting())
                self.handlers = open_log(self.folder / "out.log")
                left = [self.store.missing()]
                self._describe(len(left[0]))
        if world.rank == 0 and self.writer and len(left[0]) == len(data):
            with self.store.writing():
                self.writer.prepare(self.models)
        dist.broadcast_object_list(left)
        self.left = left[0]
        self.requests = StopRequests(None, None, self.config.longest_wait)

    def __enter__(self) -> "ForecastRun":
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
        pulse, begun = Pulse(), time.monotonic()
        for i in bar:
            if i and self.world.rank == 0 and pulse.is_due():
                left = in_words((time.monotonic() - begun) / i * (rounds - i))
                logging.info("%d of %d batches of forecasts, %s left", i, rounds, left)
            self._stop_if_asked()
            if i < len(mine):
                yield mine[i]
        self._stop_if_asked()  # and all ranks have kept their forecasts

    def results_folder(self) -> Path:
        """Return where the results go."""
        raise NotImplementedError

    def setting(self) -> dict[str, Any]:
        """Return what decides the results."""
        raise NotImplementedError

    def describe(self) -> None:
        """Log what there is to say of this kind of run."""

    def _attributes(self) -> dict[str, str]:
        """Return what files of forecasts say of themselves. No date of writing: the same forecast, the same bytes."""
        names = ", ".join(name_of(Path(source)) for source in self.settings.checkpoint)
        return {
            "title": f"Forecasts of the weather up to {self.data.lead_hours[-1]:g} hours ahead",
            "source": f"vision transformer {names}{self._after}",
            "history": f"forecast from {self.data.origin}",
        }

    @property
    def _after(self) -> str:
        """How long the model was trained, in words; nothing for several."""
        is_one = self.info is not None and len(self.settings.checkpoint) == 1
        return f", after {self.info['iteration']} iterations" if is_one else ""

    def _stop_if_asked(self) -> None:
        if self.requests.agree_now():
            if self.world.rank == 0:
                logging.info("Stopped by a signal: the same command goes on from here")
            raise Ended(STOPPED)

    def _describe(self, left: int) -> None:
        data, settings = self.data, self.settings
        there = len(data) - left
        for remark in (*self.remarks, *data.fields.remarks):
            logging.info(remark)
        logging.info("Model: %s%s", ", ".join(settings.checkpoint), self._after)
        logging.info("%s, %g h in %d step(s) of %s", data.period, data.lead_hours[-1], data.steps, data.fields.hours)
        self.describe()
        logging.info("Results: %s%s", self.folder, f" ({there} forecasts are there already)" if there else "")
        if settings.forecasts != "none":
            logging.info(
                "Forecasts to write: %d, up to %.3g GB; free: %.3g GB", left,
                left / len(data) * len(self.models) * bytes_of(self.outline) / 1e9,
                shutil.disk_usage(self.folder).free / 1e9,
            )  # fmt: skip


def seen_model(source: Path) -> list[str | int]:
    """Return the same of a checkpoint, of an exported folder, or of a file of weights."""
    inside = (path for name in (INFO, FILE) if (path := source / name).exists())
    return [str(source), *seen(next(inside, source))[1:]]


def name_of(source: Path) -> str:
    """Return what others may call a model: `demo/1GPU/00` for a run's, else the name of its folder or file."""
    return "/".join(source.parts[-5:-2]) if source.parent.name == "checkpoints" else source.name


def beside(settings: Asked, name: str) -> Path:
    """Return where the results of this name go: into the run's folder, or beside the weights, unless `--out` says."""
    if settings.out is not None:
        return Path(settings.out).resolve()
    source = settings.source
    if source.is_dir():
        in_run = source.parent.name == "checkpoints"  # <run>/checkpoints/00000128
        return source.parent.parent / name if in_run else source.with_name(f"{source.name}_{name}")
    return source.with_name(f"{source.stem}_{name}")


def share_out(forecasts: list[int], rank: int, ranks: int, size: int) -> list[list[int]]:
    """Return a rank's forecasts in batches of `size`: the last one fills up its batch."""
    mine = forecasts[rank::ranks]
    batches = [mine[i : i + size] for i in range(0, len(mine), size)]
    return [batch + batch[-1:] * (size - len(batch)) for batch in batches]
