"""When a run saves and when it stops: every so often, at its best, and where a signal or the clock asks for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils import checkpoint
from utils.checkpointer import Checkpointer
from utils.config import Config, interval, seconds
from utils.errors import NOT_SAVED, STOPPED, Ended
from utils.launch import World
from utils.stop import StopRequests
from utils.timeline import span
from utils.training_state import TrainingState


class Saving:
    """Decides when a run saves and stops. All ranks call the same methods at the same iterations.

    Args:
        folder: of the run.
        resumed: the checkpoint that the run went on from.
        best: `loss` of the best validation before it, and the `name` of its checkpoint; None where there was none.
        describe: brings the records up to here, and returns what a checkpoint says of the run besides `best`.
        sync: brings the records to the disk; called on rank 0.
        log: logs a line, on rank 0.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        folder: Path,
        state: TrainingState,
        resumed: Path | None,
        best: dict[str, Any],
        describe: Callable[[], dict[str, Any]],
        sync: Callable[[], None] | None,
        log: Callable[..., None],
    ):
        self.config, self.folder, self.describe, self.log = config, folder, describe, log
        self.best = self.best_before = best
        self.is_due = False  # a checkpoint is, at the next chance
        self.iterations, save_seconds = interval("checkpoint_every", config.checkpoint_every)
        limit, wait = config.time_limit, config.longest_wait
        self.checkpointer = Checkpointer(folder / "checkpoints", state, config.keep_checkpoints, resumed, sync, wait)
        self.requests = StopRequests(limit and world.started + seconds("time_limit", limit), save_seconds, wait)

    def close(self) -> None:
        """Wait for what is being written."""
        self.requests.close()
        self.checkpointer.wait()

    def after_step(self, iteration: int, is_last: bool) -> None:
        """Save if it is time, but the last one of an epoch after its validation. Raises Ended as `stop_if_asked`."""
        self.is_due |= self.iterations is not None and iteration % self.iterations == 0
        self.stop_if_asked(iteration)
        if self.is_due and not is_last:
            self._save()

    def stop_if_asked(self, iteration: int) -> None:
        """Save and raise Ended, on all ranks after the same iteration, where a signal or the clock stops the run."""
        stop, save = self.requests.agree()
        self.is_due |= save
        if stop:
            why = self.requests.reason or "a signal to another rank"
            self.log("Stopping after %d of %d iterations: %s", iteration, self.config.num_iters, why)
            self._save()
            self._wait_for_last()
            self.log("Stopped: --resume auto goes on from here, or --resume %s", self.folder)
            raise Ended(STOPPED)

    def after_validation(self, iteration: int, loss: float, is_finished: bool) -> None:
        """Save if it is time, if this is the best loss, and at the end. Raises Ended where the last is not written."""
        self._forget_lost_best()
        is_best = self.best["loss"] is None or loss < self.best["loss"]
        if is_best:
            self.best_before = self.best
            self.best = {"loss": loss, "name": checkpoint.name(iteration, is_validated=True)}
        if is_best or self.is_due or is_finished:
            self._save()
        if is_finished:
            self._wait_for_last()

    @span("checkpoint")
    def _save(self) -> None:
        info = self.describe()
        self._forget_lost_best()
        self.checkpointer.save({**info, "best": self.best})
        self.is_due = False

    @span("checkpoint")
    def _forget_lost_best(self) -> None:
        """Where the best checkpoint could not be written, the one before is the best: it is still there."""
        self.checkpointer.wait()
        if self.checkpointer.failed and self.checkpointer.failed == self.best["name"]:
            self.best = self.best_before

    @span("checkpoint")
    def _wait_for_last(self) -> None:
        """Wait for the last checkpoint of a run. Raises Ended where it could not be written."""
        self.checkpointer.wait()
        if self.checkpointer.failed:
            self.log("The last checkpoint was not written: make room, and go on from an older one with --resume auto")
            raise Ended(NOT_SAVED)
