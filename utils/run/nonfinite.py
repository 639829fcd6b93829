"""Losses and gradients that are not finite: whether the run goes on, and what they came from."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.config.settings import Config
from utils.data.dataset import WeatherData
from utils.errors import Refused
from utils.observers import Observer
from utils.ranks.agree import first_message, share_error

SKIPS_ALLOWED = 30  # in a row: fp16's scale, at first 2^16, is used up by then


@dataclass(eq=False)
class NonfiniteGuard(Observer):
    """Ends a run on every rank where training broke down, with the broken file or the likely cause.

    It goes on where the step was skipped: in fp16 after an overflow, else with `on_nonfinite skip`. All ranks call the
    same methods with the same numbers.
    """

    config: Config
    data: WeatherData
    log: Callable[..., None]  # called with lines for the log
    skipped: int = 0  # steps in a row

    def step_is_known(self, record: dict[str, Any]) -> None:
        """Look at an iteration's loss and gradient norm. Raises Refused where the run cannot go on."""
        iteration, loss, norm = (record[key] for key in ("iteration", "loss", "grad_norm"))
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped = 0
            return
        self.skipped += 1
        what, may_skip = f"iteration {iteration} has loss {loss} and gradient norm {norm}", self.config.on_nonfinite
        # In fp16 a gradient that overflows is usual: the scale, at first 2^16, is then halved.
        overflow = self.config.amp_mode == "fp16" and math.isfinite(loss)
        was_skipped = not math.isfinite(norm) and (overflow or may_skip == "skip")
        if overflow and self.skipped <= SKIPS_ALLOWED:
            return
        epoch, step = divmod(iteration - 1, len(self.data.train_loader))
        found = first_message(self.data.train_loader.find_nonfinite(epoch, step))
        if was_skipped and self.skipped <= SKIPS_ALLOWED:
            self.log("Step skipped: %s; %s", what, found or "its data are finite")
            return
        if self.skipped > 1:
            what = f"{self.skipped} steps in a row were skipped, and {what}"
        if found:
            remedy = ", or use --on_nonfinite skip" if may_skip == "stop" else ""
            raise Refused(f"{what}: {found}; mend or remove the file{remedy}")
        raise Refused(
            f"{what}, and its data are finite: training diverged; lower --lr, set --clip_grad_norm, or use "
            f"--amp_mode bf16 in place of fp16"
        )

    def check_validation(self, loss: float) -> None:
        """Look at the loss of a validation. Raises Refused where it is not finite."""
        if math.isfinite(loss):
            return
        loader = self.data.valid_loader
        found = next(filter(None, (loader.find_nonfinite(0, step) for step in range(len(loader)))), None)
        share_error(found and f"validation: {found}; mend or remove the file")
        share_error(f"the validation loss is {loss}, and the data are finite: training diverged; lower --lr")
