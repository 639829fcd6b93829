"""The hooks of a run: whatever looks at it, or acts on it, is an observer. And what an epoch tells them."""

from dataclasses import dataclass
from typing import Any


@dataclass
class EpochRecord:
    """What is known of an epoch: a line of metrics.jsonl. What its validation tells is there after that.

    Losses and RMSE are of normalised fields, `valid_rmse_units` in units; a channel's value by its name. Memory is in
    GiB. None stands for what nobody knows.
    """

    epoch: int  # from 1
    iteration: int  # done
    train_loss: float | None  # None before the first step, as what follows
    samples_per_sec: float | None
    data_wait_frac: float | None  # of the time after the first batch
    first_iteration_sec: float | None
    memory_gb: dict[str, float]
    iterations: int  # of this process; and the seconds that they took
    seconds: float
    validation_seconds: float = 0.0
    peak_memory_gb: float = 0.0
    valid_samples_per_sec: float = 0.0
    loader_samples_per_sec: float | None = None  # what the readers could give
    valid_loss: float = 0.0
    valid_samples: int = 0
    valid_rmse: dict[str, float] | None = None
    valid_rmse_units: dict[str, float] | None = None
    valid_acc_timemean: dict[str, float] | None = None  # None without time means
    persistence_rmse: dict[str, float | None] | None = None
    mfu: float | None = None
    valid_loss_ema: float | None = None  # of the moving average of the weights, with --ema_decay
    valid_rmse_ema: dict[str, float] | None = None

    @staticmethod
    def before_training(memory_gb: dict[str, float]) -> "EpochRecord":
        """Return that of a validation before the first step."""
        return EpochRecord(0, 0, None, None, None, None, memory_gb, iterations=0, seconds=0.0)

    def set_scores(self, validations: dict[str, dict[str, Any]], names: list[str], stds: list[float]) -> None:
        """Take over what a validation found (`Scores.reduce`) for the forecast channels, by the kind of weights."""
        scores = validations["raw"]
        self.valid_loss, self.valid_samples = scores["loss"], scores["samples"]
        self.valid_rmse = dict(zip(names, scores["rmse"]))
        self.valid_rmse_units = {name: x * std for name, x, std in zip(names, scores["rmse"], stds)}
        self.valid_acc_timemean = scores["acc"] and dict(zip(names, scores["acc"]))
        self.persistence_rmse = dict(zip(names, scores["persistence"]))
        if averaged := validations.get("ema"):
            self.valid_loss_ema, self.valid_rmse_ema = averaged["loss"], dict(zip(names, averaged["rmse"]))

    def event(self) -> dict[str, Any]:
        """Return it as a line of metrics.jsonl."""
        untold = ("iterations", "seconds", "validation_seconds")
        told = {name: x for name, x in vars(self).items() if name not in untold}
        if self.valid_loss_ema is None:
            del told["valid_loss_ema"], told["valid_rmse_ema"]
        return {"event": "epoch", **told}


class Observer:
    """Is told what a run does: every rank tells its observers the same, at the same points, in their order.

    Each method does nothing here. What one raises ends the run, as an error in the loop would; an observer that only
    looks puts what may fail inside `harmless`.
    """

    aside = 0.0  # seconds that it took so far to look: they are no training

    def begin(self, run: Any) -> None:
        """The run is about to train: it has `job`, `folder`, `state`, `iteration`, `memory` and `log`."""

    def before_step(self, left: int) -> None:
        """A step follows; `left` are in this epoch, with it."""

    def after_step(self, iteration: int, left: int) -> None:
        """So many iterations are done, and so many left in this epoch. Raises Ended where the run stops here."""

    def after_validation_batch(self, iteration: int) -> None:
        """A batch of a validation is done. Raises Ended where the run stops here."""

    def step_is_known(self, record: dict[str, Any]) -> None:
        """The loss of an iteration has come to the host, some iterations later: a line of metrics.jsonl."""

    def after_training(self, record: EpochRecord) -> None:
        """The iterations of an epoch are done, and not yet its validation."""

    def after_first_validation(self, record: EpochRecord, example: tuple) -> None:
        """The model is validated as it is before the first step: epoch 0. The arguments are those of `after_epoch`."""

    def after_epoch(self, record: EpochRecord, example: tuple) -> None:
        """An epoch is validated; `example` are input, target and forecast of its first sample, [C, H, W] each."""

    def settle(self) -> None:
        """Wait for collectives that are under way: a profiler stops."""

    def close(self, error: BaseException | None) -> None:
        """The run ends, where there is an `error` by that."""
