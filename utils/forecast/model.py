"""A trained model as a function of the state of the atmosphere, in units: numpy or torch, on one device.

    from forecast import load
    model = load("exported/")
    after = model.step(state)                        # six hours later
    for k, after in enumerate(model.rollout(state, steps=20)): ...

Shapes:  B states   C_in C_out channels that are read, and forecast   C_f those that are read and not forecast
         H W rows, columns
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from utils.data.fields import Fields
from utils.data.to_device import normalisers

State = np.ndarray | Tensor


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

    def step(self, state: State) -> State:
        """Return the state one step later, [C_out, H, W] or [B, C_out, H, W], as `state` came: numpy, or torch.

        Args:
            state: in units, [C_in, H, W] or [B, C_in, H, W].

        Raises ValueError for another shape, and for values that are not finite.
        """
        return next(self.rollout(state, 1))

    @torch.no_grad()
    def rollout(self, state: State, steps: int, forced: Iterable[State] | None = None) -> Iterator[State]:
        """Yield the states after 1, 2, ... `steps` steps, each forecast from the one before.

        Between steps the state stays normalised: a loop of `step` differs from this in the last digits.

        Args:
            state: as `step` takes it.
            forced: what is read and not forecast, after 1, 2, ... steps, in units, [C_f, H, W] or [B, C_f, H, W]; a
                model that forecasts all that it reads needs none.

        Raises ValueError as `step`, and where `forced` is missing.
        """
        x, later = self._taken(state, self.in_names), iter(() if forced is None else forced)
        x = self.normalise(x)
        for k in range(steps):
            with self.precision():
                forecast = self.net(x).to(x.dtype)
            yield self._given(self.in_units_of(forecast), like=state)
            if k + 1 < steps:
                x = self.net.next_input(forecast, self._forced(later, len(x)))

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
        if not x.isfinite().all():
            place = x.isfinite().logical_not().nonzero()[0].tolist()
            raise ValueError(f"the state is not finite at {place} (channel {names[place[-3]]}): fill it")
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
        self.net, self.precision = forecaster.net, forecaster.precision
        for name, part in (("in", forecaster.normalise), ("out", forecaster.in_units_of)):
            self.register_buffer(f"{name}_mean", part.mean)
            self.register_buffer(f"{name}_std", part.std)

    def forward(self, state: Tensor) -> Tensor:
        """Return [B, C_out, H, W] from [B, C_in, H, W]."""
        with self.precision():
            forecast = self.net((state - self.in_mean) / self.in_std)
        return (forecast.double() * self.out_std + self.out_mean).float()


def write_program(forecaster: Forecaster, path: Path) -> None:
    """Write one step, for any number of states, as a program: torch.export.load(path).module()(state)."""
    state = torch.zeros(2, len(forecaster.in_names), len(forecaster.latitude), len(forecaster.longitude))
    with torch.no_grad():
        shapes = {"state": {0: torch.export.Dim("states", min=1)}}
        program = torch.export.export(OneStep(forecaster), (state.to(forecaster.device),), dynamic_shapes=shapes)
    torch.export.save(program, path)
