"""A trained model as a function of the state of the atmosphere, in units: numpy or torch, on one device.

    from forecast import load
    model = load("exported/")
    after = model.step(state)                        # six hours later
    for k, after in enumerate(model.rollout(state, steps=20)): ...

Shapes:  B states   C_in C_out channels that are read, and forecast   C_f those that are read and not forecast
         H W rows, columns
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from utils.data.fields import Fields
from utils.data.forcings import ForcingFields
from utils.data.to_device import normalisers
from utils.data.variables import LARGEST

State = np.ndarray | Tensor
Time = str | datetime | np.datetime64 | Sequence | np.ndarray  # one, or one for each state


class Forecaster:
    """Forecasts of a trained model, in float32 and in units.

    Args:
        net: maps normalised states to the next ones, as networks.vit.ViT does.
        precision: makes the context that it runs in.

    Attributes:
        in_names, out_names: of the channels, in the order of a state.
        in_units, out_units: theirs.
        latitude, longitude: of the grid, in degrees north and east, [H] and [W].
        step_hours: how far a step goes.
        forced_names: the channels that are read and not forecast.
        needs_time: whether a forecast takes the time of its state.
    """

    def __init__(
        self, net: nn.Module, fields: Fields, device: torch.device, precision: Callable[[], AbstractContextManager]
    ):
        self.net, self.fields, self.device, self.precision = net.to(device).eval(), fields, device, precision
        self.in_names, self.out_names, self.forced_names = fields.in_names, fields.out_names, fields.forced_names
        self.in_units, self.out_units = fields.in_units, fields.units
        self.latitude, self.longitude, self.step_hours = fields.latitude, fields.longitude, fields.step_hours
        self.normalise, _, self.normalise_forced = normalisers(fields, device, False)
        self.in_units_of = InUnits(fields, device)
        self.beside, self.needs_time = ForcingFields(fields.forcings).to(device), fields.forcings.need_time

    def step(self, state: State, time: Time | None = None) -> State:
        """Return the state one step later, [C_out, H, W] or [B, C_out, H, W], as `state` came: numpy, or torch.

        Args:
            state: in units, [C_in, H, W] or [B, C_in, H, W].
            time: when it is valid, in UTC; of several states one for all, or [B]. Only where `needs_time`.

        Raises ValueError for another shape, for values that are not finite or huge, and where the time is missing.
        """
        return next(self.rollout(state, 1, time=time))

    @torch.no_grad()
    def rollout(
        self, state: State, steps: int, forced: Iterable[State] | None = None, time: Time | None = None
    ) -> Iterator[State]:
        """Yield the states after 1, 2, ... `steps` steps, each forecast from the one before.

        Between steps the state stays normalised: a loop of `step` differs from this in the last digits.

        Args:
            state: as `step` takes it.
            forced: what is read and not forecast, after 1, 2, ... steps, in units, [C_f, H, W] or [B, C_f, H, W]; a
                model that forecasts all that it reads needs none.
            time: as `step` takes it. The later ones follow.

        Raises ValueError as `step`, and where `forced` is missing.
        """
        x, later = self._taken(state, self.in_names), iter(() if forced is None else forced)
        times = self._seconds(time, len(x))
        x = self.beside.added(self.normalise(x), times)
        for k in range(steps):
            with self.precision():
                forecast = self.net(x).to(x.dtype, copy=True)  # a compiled one may lie where the next will
            yield self._given(self.in_units_of(forecast), like=state)
            if k + 1 < steps:
                times = times + 3600 * self.step_hours
                x = self.net.next_input(forecast, self.beside.added(self._forced(later, len(x)), times))

    def _forced(self, later: Iterator[State], states: int) -> Tensor:
        """Return what is read at the next step and not forecast, normalised, [B, C_f, H, W]."""
        if not self.forced_names:
            return torch.empty(states, 0, len(self.latitude), len(self.longitude), device=self.device)
        try:
            found = next(later)
        except StopIteration:
            raise ValueError(
                f"the model reads {', '.join(self.forced_names)} and does not forecast them: give `forced`, "
                f"their values at each step but the last"
            ) from None
        return self.normalise_forced(self._taken(found, self.forced_names).expand(states, -1, -1, -1).clone())

    def _seconds(self, time: Time | None, states: int) -> Tensor:
        """Return times in seconds since 1970-01-01, [B]. Raises ValueError where there is none, and one is needed."""
        if not self.needs_time:
            return torch.zeros(states, dtype=torch.float64, device=self.device)
        if time is None:
            raise ValueError(f"the model reads {', '.join(self.fields.forcings.kinds)}: give the `time` of the state")
        try:
            if isinstance(time, datetime) and time.tzinfo:
                time = time.astimezone(UTC).replace(tzinfo=None)
            seconds = np.atleast_1d(np.asarray(time, "datetime64[s]"))
            if np.isnat(seconds).any() or seconds.shape not in ((1,), (states,)):
                raise ValueError
        except (ValueError, TypeError):
            raise ValueError(
                f"time is {time!r} for {states} state(s): it takes a date such as 2026-02-14T18, or one for each"
            ) from None
        return torch.tensor(seconds.astype(np.float64), device=self.device).expand(states)

    def _taken(self, state: State, names: list[str]) -> Tensor:
        """Return a copy on the device, [B, C, H, W] in float32. Raises ValueError."""
        if isinstance(state, np.ndarray):  # any strides, any byte order
            state = torch.from_numpy(np.array(state, np.float32, order="C"))
        x = state.to(self.device, torch.get_default_dtype(), copy=True)
        wanted = (len(names), len(self.latitude), len(self.longitude))
        if x.shape[-3:] != wanted or x.dim() not in (3, 4):
            raise ValueError(
                f"a state of shape {list(x.shape)}: it takes {list(wanted)} ({', '.join(names)} on the model's grid), "
                f"or several of these"
            )
        if (bad := ~(x.abs() < LARGEST)).any():
            place = bad.nonzero()[0].tolist()
            raise ValueError(f"the state is {x[*place]:g} at {place} (channel {names[place[-3]]}): fill it")
        return x.view(-1, *wanted)

    def _given(self, x: Tensor, like: State) -> State:
        x = x.view(*like.shape[:-3], *x.shape[1:])
        return x.cpu().numpy() if isinstance(like, np.ndarray) else x.to(like.device)


class InUnits:
    """Normalised forecasts in units, computed in float64: what is written, and what is judged."""

    def __init__(self, fields: Fields, device: torch.device):
        stats = (x[fields.outputs].astype(np.float64) for x in (fields.means, fields.stds))
        self.mean, self.std = (torch.from_numpy(x).to(device).view(-1, 1, 1) for x in stats)

    def __call__(self, forecast: Tensor) -> Tensor:
        """Return [B, C_out, H, W] in float32."""
        return (forecast.double() * self.std + self.mean).float()


class OneStep(nn.Module):
    """One step from states in units to states in units, as one program: what `--torch_export` writes."""

    def __init__(self, forecaster: Forecaster):
        super().__init__()
        self.net, self.precision, self.beside = forecaster.net, forecaster.precision, forecaster.beside
        for name, part in (("in", forecaster.normalise), ("out", forecaster.in_units_of)):
            self.register_buffer(f"{name}_mean", part.mean)
            self.register_buffer(f"{name}_std", part.std)

    def forward(self, state: Tensor, time: Tensor | None = None) -> Tensor:
        """Return [B, C_out, H, W] from [B, C_in, H, W] and, where the model reads it, the time.

        That is in seconds since 1970-01-01, UTC, in float64, [B].
        """
        times = torch.zeros(state.shape[0], dtype=torch.float64, device=state.device) if time is None else time
        with self.precision():
            forecast = self.net(self.beside.added((state - self.in_mean) / self.in_std, times))
        return (forecast.double() * self.out_std + self.out_mean).float()


def write_program(forecaster: Forecaster, path: Path) -> None:
    """Write one step, for any number of states, as a program.

    torch.export.load(path).module()(state), or (state, time) where the model needs the time.
    """
    state = torch.zeros(2, len(forecaster.in_names), len(forecaster.latitude), len(forecaster.longitude))
    given = {"state": state, "time": torch.zeros(2, dtype=torch.float64)} if forecaster.needs_time else {"state": state}
    with torch.no_grad():
        any_number = {0: torch.export.Dim("states", min=1)}
        program = torch.export.export(
            OneStep(forecaster),
            tuple(x.to(forecaster.device) for x in given.values()),
            dynamic_shapes=dict.fromkeys(given, any_number),
        )
    torch.export.save(program, path)
