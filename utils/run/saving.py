"""When a run saves and when it stops, what a checkpoint says of a run, and how a run goes on from one."""

import dataclasses
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.checkpoint import store as checkpoint
from utils.checkpoint.background import Checkpointer
from utils.checkpoint.info import Unreachable, Unreadable
from utils.config.settings import Config, interval, seconds
from utils.data.dataset import Job
from utils.data.fields import unlike
from utils.errors import NOT_SAVED, STOPPED, Ended, Refused
from utils.observers import EpochRecord, Observer
from utils.ranks.agree import all_ranks_agree, share_error
from utils.ranks.stop import StopRequests
from utils.run.folder import RunFolder, sign
from utils.run.verify import Verifier
from utils.spans import in_span, span

NO_BEST = {"loss": None, "name": None}
IDLE_LIVES = 3  # of a Slurm job, in a row: then it is not to begin again


def resume(run: Any, found: RunFolder) -> tuple[Path, dict[str, Any]]:
    """Set a run to where its newest checkpoint that can be read left it; return its folder, and which was the best.

    Raises Refused, on all ranks, where there is none, where it was trained on other data, and where the storage of one
    fails: those after the one that a run goes on from are removed, and this one may be whole.
    """
    samples, valid = len(run.job.data.train_pairs), len(run.job.data.valid_pairs)
    for path, info in found.checkpoints:
        if info is None:
            continue
        if info["train_samples"] != samples:
            share_error(
                f"{found.path} was trained on {info['train_samples']} samples, and now there are {samples}: "
                f"give the same data, or start another run with --resume none"
            )
        if what := unlike(run.job.data.fields, info["data"]):
            share_error(
                f"{found.path} was trained with other {what} than these data have: give those, or begin another run "
                f"with its weights (--init_from)"
            )
        try:
            run.state.load(path, same_ranks=info["layout"] == layout(run.job))
        except Unreachable as error:
            older = next((there for there, info in found.checkpoints if info and there.name < path.name), None)
            or_else = f"; or go on from the one before: --resume {older}" if older else ""
            raise Refused(f"{error}: wait for its storage, and start again{or_else}") from None
        except Unreadable as error:  # on all ranks
            run.log("Checkpoint left out: %s", error)
            continue
        run.iteration, run.epochs = info["iteration"], info["epochs"]
        run.losses, run.guard.skipped = info["epoch_losses"], info["skipped"]
        if info["config"]["amp_mode"] == run.job.config.amp_mode and info["scaler"]:
            run.state.scaler.load_state_dict(info["scaler"])
        run.log("Resumed after %d iterations from %s", run.iteration, path)
        if (before := info["valid_samples"]) not in (None, valid):
            run.log("Validation had %d samples, and has %d: which checkpoint is best is found anew", before, valid)
            return path, NO_BEST
        return path, info["best"]
    raise Refused(f"no checkpoint of {found.path} can be read (out.log says why): start anew with --resume none")


def describe(run: Any) -> dict[str, Any]:
    """Return what a checkpoint says of a run, but which one is the best."""
    config, data = run.job.config, run.job.data
    return {
        "iteration": run.iteration,
        "epochs": run.epochs,
        "samples": run.iteration * config.global_batch_size,
        "is_validated": run.iteration == min(run.epochs * len(data.train_loader), config.num_iters),
        "is_finished": run.should_stop,
        "epoch_losses": list(run.losses),  # it grows while this is written
        "skipped": run.guard.skipped,
        "scaler": run.state.scaler.state_dict(),
        "layout": layout(run.job),
        "train_samples": len(data.train_pairs),
        "valid_samples": len(data.valid_pairs),
        "data": data.fields.description,
        "config": dataclasses.asdict(config),
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": commit() if run.job.world.rank == 0 else None,  # it writes this
        },
    }


@cache
def commit() -> str | None:
    """Return the commit of this code, marked where it was changed since; None where git does not tell."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def layout(job: Job) -> dict[str, Any]:
    """Return what decides which rank does what."""
    names = ("tensor_parallel", "context_parallel", "parallel_order", "sequence_parallel")
    return {"ranks": job.world.size, **{name: getattr(job.config, name) for name in names}}


def keepers_of(config: Config, resumed: Path | None, best: dict[str, Any]) -> tuple[Verifier | None, "Saving | None"]:
    """Return what compares the replicas of the weights, and what saves them, where a run is to."""
    verifier = Verifier(config.verify_every) if config.verify_every else None
    saving = Saving(resumed, best, verifier) if config.checkpoint_every is not None else None
    return verifier, saving


class Saving(Observer):
    """Decides when a run saves and stops.

    Args:
        resumed: the checkpoint that the run went on from.
        best: `loss` of the best validation before it, and the `name` of its checkpoint; None where there was none.
        verifier: compares the replicas before a checkpoint is written.
    """

    def __init__(self, resumed: Path | None, best: dict[str, Any], verifier: Verifier | None = None):
        self.verifier = verifier
        self.resumed, self.best, self.best_before = resumed, best, best
        self.is_due = False  # a checkpoint is, at the next chance

    def begin(self, run: Any) -> None:
        """Begin to listen to signals, and to the clock."""
        self.run, config = run, run.job.config
        self.begun = run.iteration, run.epochs
        self.iterations, save_seconds = interval("checkpoint_every", config.checkpoint_every)
        limit, wait = config.time_limit, config.longest_wait
        sync = run.logger.sync if run.logger else None
        folder = run.folder / "checkpoints"
        self.checkpointer = Checkpointer(folder, run.state, config.keep_checkpoints, self.resumed, sync, wait)
        with all_ranks_agree():
            if run.logger:
                sign(run.folder)  # not before: checkpoints after the one that it goes on from are set aside by now
        deadline = limit and run.job.world.started + seconds("time_limit", limit)
        self.requests = StopRequests(deadline, save_seconds, wait)

    def close(self, error: BaseException | None) -> None:
        """Wait for what is being written, where all ranks leave here."""
        if error is None or isinstance(error, Ended | Refused):
            self.requests.close()
            self.checkpointer.wait()

    def settle(self) -> None:
        """Wait for the ranks' answers, which stand."""
        self.requests.settle()

    def after_step(self, iteration: int, left: int) -> None:
        """Save if it is time, but the last one of an epoch after its validation. Raises Ended as below."""
        self.is_due |= self.iterations is not None and iteration % self.iterations == 0
        self._stop_if_asked("step", iteration)
        if self.is_due and left:
            self._save()

    def after_validation_batch(self, iteration: int) -> None:
        """Raise Ended as below."""
        self._stop_if_asked("validation", iteration)

    def _stop_if_asked(self, kind: str, iteration: int) -> None:
        """Save and raise Ended, on all ranks after the same iteration, where a signal or the clock stops the run."""
        stop, save = self.requests.agree(kind)
        self.is_due |= save
        if stop:
            why = self.requests.reason or "a signal to another rank"
            self.run.log("Stopping after %d of %d iterations: %s", iteration, self.run.job.config.num_iters, why)
            if self.begun == (self.run.iteration, self.run.epochs):
                self._check_lives()
            if not iteration:
                self.run.log("Stopped before the first step: there is nothing to go on from")
                raise Ended(STOPPED)
            self._save()
            self._wait_for_last()
            self.run.log("Stopped: --resume auto goes on from here, or --resume %s", self.run.folder)
            raise Ended(STOPPED)

    def _check_lives(self) -> None:
        """Raise Refused, on all ranks, where a Slurm job did nothing in its last lives: it would go on so for ever."""
        with all_ranks_agree():
            lives = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
            if self.resumed and self.run.logger:
                lives = min(lives, self.run.logger.begun_here)
            if lives >= IDLE_LIVES and self.run.logger:  # rank 0 has read the records
                goes_on = f", and go on with --resume {self.run.folder}" if self.resumed else ""
                raise ValueError(
                    f"{lives} lives of this job in a row came to no step and no validation that was saved: give a job "
                    f"more time (sbatch -t), or validate less (--limit_nsamples_val){goes_on}"
                )

    def after_epoch(self, record: EpochRecord, example: tuple) -> None:
        """Save if it is time, if this is the best loss, and at the end. Raises Ended where the last is not written.

        The best checkpoint is that of the lowest loss with the weights as they are.
        """
        told = [record.valid_loss]
        with span("logging"):  # the others wait for rank 0, which draws
            dist.broadcast_object_list(told)  # its last digit may differ from rank to rank, and all must save alike
        (loss,) = told
        self._forget_lost_best()
        is_best = self.best["loss"] is None or loss < self.best["loss"]
        if is_best:
            self.best_before = self.best
            self.best = {"loss": loss, "name": checkpoint.name(record.iteration, is_validated=True)}
        if is_best or self.is_due or self.run.should_stop:
            self._save()
        if self.run.should_stop:
            self._wait_for_last()

    @in_span("checkpoint")
    def _save(self) -> None:
        self.run.know_all_losses()
        if self.verifier:
            self.verifier.check(self.run.iteration)
        if self.run.logger:
            self.run.logger.send()  # a run that goes on from here has no more of them
        info = describe(self.run)
        self._forget_lost_best()
        self.checkpointer.save({**info, "best": self.best})
        self.is_due = False

    @in_span("checkpoint")
    def _forget_lost_best(self) -> None:
        """Where the best checkpoint could not be written, the one before is the best: it is still there."""
        self.checkpointer.wait()
        if self.checkpointer.failed and self.checkpointer.failed == self.best["name"]:
            self.best = self.best_before

    @in_span("checkpoint")
    def _wait_for_last(self) -> None:
        """Wait for the last checkpoint of a run. Raises Ended where it could not be written."""
        self.checkpointer.wait()
        if self.checkpointer.failed:
            remedy = "make room, and go on from an older one with --resume auto"
            self.run.log("The last checkpoint was not written: %s", remedy)
            raise Ended(NOT_SAVED)
