"""When checkpoints are written, and by whom: in the background, a few kept, the loop hardly waiting."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.checkpoint import store as checkpoint
from utils.checkpoint.state import TrainingState
from utils.ranks.agree import all_ranks_agree, first_message


@dataclass(eq=False)
class Checkpointer:
    """Writes checkpoints into a folder while training goes on.

    The loop copies the state into buffers of the host, which are used again, and a thread of each rank writes them.
    All ranks call the same methods at the same iterations.
    """

    folder: Path  # `checkpoints` of the run
    state: TrainingState
    keep: int  # the newest so many stay, and the best
    newest: Path | None  # complete; at first the one that the run went on from
    sync: Callable[[], None] | None  # on rank 0: brings the records to the disk, before a checkpoint counts
    timeout: timedelta  # how long a rank waits for the others
    thread: threading.Thread | None = None
    failed: str | None = None  # the name of the last one, where it could not be written

    def __post_init__(self):
        self.is_main = dist.get_rank() == 0
        self._new_group()
        with all_ranks_agree():
            if self.is_main:
                self.folder.mkdir(exist_ok=True)

    def _new_group(self) -> None:
        """Create the group of the threads that write: training's groups are in use meanwhile."""
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)

    def save(self, info: dict[str, Any]) -> None:
        """Begin to write a checkpoint; waits for the one before, and on a CPU for the copy.

        Args:
            info: `iteration`, `is_validated`, `best` (name of the best one) and all else that is no tensor.
        """
        self.wait()
        path = self.folder / checkpoint.name(info["iteration"], info["is_validated"])
        if path == self.newest:  # nothing has happened since
            return
        start = time.perf_counter()
        self.state.copy_to_host()
        stall, self.path, self.error = time.perf_counter() - start, path, None
        self.thread = threading.Thread(target=self._write, args=(path, info, stall), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is there, or `failed`; all ranks call this."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        error = first_message(self.error)
        self.failed = self.path.name if error else None
        if not error:
            self.newest = self.path
            return
        if not self.error:  # only other ranks know
            self._tell(error)
        # A rank that was away for longer than the others wait has closed the connections of the group for good.
        dist.destroy_process_group(self.group)
        self._new_group()

    def _tell(self, error: str) -> None:
        if self.is_main:
            logging.warning("Checkpoint %s was not written (%s): training goes on", self.path, error)

    def _write(self, path: Path, info: dict[str, Any], stall: float) -> None:
        start = time.perf_counter()
        try:
            told = {**info, "stacked": list(self.state.stacked)}
            checkpoint.save(path, self.state.shards, told, self.group, self.sync)
        except Exception as error:  # of the disk, or of the group
            self.error = str(error) or repr(error)
            self._tell(self.error)
            return
        if self.is_main:
            seconds = time.perf_counter() - start
            logging.info(
                "Checkpoint %s: written in %.2f sec; the loop waited %.3f sec for the copy", path, seconds, stall
            )
            with contextlib.suppress(OSError):  # they stay, for now
                old = checkpoint.find(self.folder)[self.keep :]
                checkpoint.set_aside(folder for folder in old if folder.name != info["best"]["name"])
                checkpoint.remove(self.folder.glob("*.void"))
