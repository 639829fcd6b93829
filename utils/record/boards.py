"""Curves and pictures of a run: in TensorBoard, and in MLflow where asked for (`--tracker`)."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imsave
from torch.utils.tensorboard import SummaryWriter

from utils.config.settings import Config
from utils.files import whole
from utils.record.mlflow_board import MlflowBoard

# What of a line of metrics.jsonl is a curve. Where a key has several values, each is one, by its name.
TAGS = {
    "step": {"loss": "Loss/step", "grad_norm": "Gradient norm", "lr": "Learning Rate"},
    "speed": {"iters_per_sec": "Avg iters per sec", "samples_per_sec": "Avg samples per sec"},
    "epoch": {
        "train_loss": "Loss/train",
        "valid_loss": "Loss/valid",
        "valid_loss_ema": "Loss/valid_ema",
        "valid_rmse": "RMSE({})/valid",
        "valid_rmse_ema": "RMSE({})/valid_ema",
        "valid_acc_timemean": "ACC_timemean({})/valid",
        "memory_gb": "Memory/{} [GiB]",
        "valid_samples_per_sec": "Speed/validation",
        "loader_samples_per_sec": "Speed/readers",
        "mfu": "MFU",
    },
    "rate": {"training_rate": "Rate/training [samples/s]"},  # during a validation iterations stand still
    "time": {"seconds": "Time/{} [s]"},
    "system": {
        key: f"System/{key}"
        for key in (
            *("cores", "memory_gb", "node_memory", "read_gb", "written_gb", "disk_used", "disk_free_gb"),
            *("sent_gb", "received_gb"),
            *("gpu_use", "gpu_memory_gb", "joules", "joules_per_sample"),
        )
    },
}


class Curves:
    """Writes them below `logs/` of the run's folder. Where the disk is full training goes on without.

    TensorBoard's points that the disk did not take are written once it is there again; pictures are not.

    Args:
        purge_step: what an earlier process wrote from this step on is void; None keeps all.
    """

    def __init__(self, folder: Path, config: Config, purge_step: int | None):
        self.folder = folder
        self.failing: set[str] = set()  # what the disk does not take
        self.unwritten: list[tuple[dict[str, float], int]] = []  # points that may not be on the disk, with their step
        self.lock = threading.Lock()  # held while a point is added, and while the board is opened anew
        self.syncing = threading.Lock()  # held by the one thread that brings points to the disk
        self.boards: list[SummaryWriter | MlflowBoard] = [SummaryWriter(folder / "logs", purge_step=purge_step)]
        if config.tracker == "mlflow":
            self.boards.append(MlflowBoard(folder, config, goes_on=purge_step is not None))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add a point to each curve."""
        with self.lock, self.if_there_is_room("Curves"):
            self.unwritten.append((values, step))
            for board in self.boards:
                _add(board, values, step)

    def points(self, event: dict[str, Any]) -> None:
        """Add a point to each curve that a line of metrics.jsonl tells of."""
        found: dict[str, float] = {}
        for key, tag in TAGS[event["event"]].items():
            value = event.get(key)
            found |= {tag.format(name): x for name, x in value.items()} if isinstance(value, dict) else {tag: value}
        self.scalars({tag: value for tag, value in found.items() if value is not None}, event["iteration"])

    def image(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Add a picture, uint8 [rows, columns, 3]; the latest is pictures/<name>.png, too."""
        path = self.folder / "pictures" / f"{name}.png"
        with self.if_there_is_room("Pictures"):
            path.parent.mkdir(exist_ok=True)
            with whole(path, sync=False) as part:
                imsave(part, pixels, format="png")
            self.failing.discard("Pictures")
        with self.lock, self.if_there_is_room("Curves"):
            for board in self.boards:
                board.add_image(f"Visualization, {name}", pixels, step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        """Add a text, in Markdown."""
        with self.lock, self.if_there_is_room("Curves"):
            for board in self.boards:
                board.add_text(name, text, step)

    def sync(self) -> None:
        """Bring TensorBoard's to the disk: what failed before is opened anew. Any thread may call this."""
        with self.syncing:
            with self.lock, self.if_there_is_room("Curves"):
                points, self.unwritten = self.unwritten, []
                if "Curves" in self.failing:
                    again = min((step for _, step in points), default=None)  # some may be there already
                    self.boards[0] = SummaryWriter(self.folder / "logs", purge_step=again)
                    self.failing.discard("Curves")
                    for values, step in points:
                        _add(self.boards[0], values, step)
            with self.if_there_is_room("Curves"):
                self.boards[0].flush()
            if "Curves" in self.failing:
                with self.lock:
                    self.unwritten = points + self.unwritten

    def send(self) -> None:
        """Bring the trackers' to where it belongs."""
        for tracker in self.boards[1:]:
            tracker.flush()

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED, or KILLED where it can go on."""
        with self.if_there_is_room("Curves"):
            self.boards[0].close()
        for tracker in self.boards[1:]:
            tracker.close(status)

    @contextlib.contextmanager
    def if_there_is_room(self, what: str) -> Iterator[None]:
        """Let training go on where its curves or pictures cannot be written; say so once."""
        try:
            yield
        except OSError as error:
            if what not in self.failing:
                logging.warning("%s are not written (%s): training goes on", what, error)
            self.failing.add(what)  # TensorBoard's thread has ended: each call fails from now on


def _add(board: SummaryWriter | MlflowBoard, values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        board.add_scalar(name, value, step)
