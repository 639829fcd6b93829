"""Curves and pictures of a run: in TensorBoard, and in MLflow where asked for (`--tracker`)."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from utils.config import Config
from utils.tracker import MlflowBoard


class Curves:
    """Writes them below `logs/` of the run's folder. Where the disk is full training goes on without.

    Args:
        purge_step: what an earlier process wrote from this step on is void; None keeps all.
    """

    def __init__(self, folder: Path, config: Config, purge_step: int | None):
        self.folder, self.is_broken = folder, False
        self.boards: list[SummaryWriter | MlflowBoard] = [SummaryWriter(folder / "logs", purge_step=purge_step)]
        if config.tracker == "mlflow":
            self.boards.append(MlflowBoard(folder, config, goes_on=purge_step is not None))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add a point to each curve."""
        with self.if_there_is_room():
            for name, value in values.items():
                for board in self.boards:
                    board.add_scalar(name, value, step)

    def image(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Add a picture, uint8 [rows, columns, 3]."""
        with self.if_there_is_room():
            for board in self.boards:
                board.add_image(name, pixels, step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        """Add a text, in Markdown."""
        with self.if_there_is_room():
            for board in self.boards:
                board.add_text(name, text, step)

    def sync(self) -> None:
        """Bring TensorBoard's to the disk: what failed before is opened anew. Any thread may call this."""
        with self.if_there_is_room():
            if self.is_broken:
                self.boards[0], self.is_broken = SummaryWriter(self.folder / "logs"), False
            self.boards[0].flush()

    def send(self) -> None:
        """Bring the trackers' to where it belongs."""
        for tracker in self.boards[1:]:
            tracker.flush()

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED, or KILLED where it can go on."""
        with self.if_there_is_room():
            self.boards[0].close()
        for tracker in self.boards[1:]:
            tracker.close(status)

    @contextlib.contextmanager
    def if_there_is_room(self) -> Iterator[None]:
        """Let training go on where its curves and pictures cannot be written."""
        try:
            yield
        except OSError as error:
            if not self.is_broken:
                logging.warning("Curves and pictures are not written (%s): training goes on", error)
            self.is_broken = True  # its thread has ended, and each call fails from now on
