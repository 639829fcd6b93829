"""What a model reads beside the state: fields that do not change, and what place and time alone decide.

They are added to the input on the device, and in a forecast of several steps to each later input, for its own time.

Shapes:  B states   C_b channels beside the state   H W rows, columns   h w those of one rank's part
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from utils.config.settings import FORCINGS, Config
from utils.data.files import Files, channel_indices, check_each_once
from utils.data.frames import FrameReader
from utils.errors import ReadError

SOLAR_CONSTANT = 1361.0  # W m-2, at one astronomical unit (Kopp and Lean 2011)
# Over the sphere the cosine of the zenith angle is spread evenly from -1 to 1, and half of it is night.
SOLAR_MEAN, SOLAR_STD = SOLAR_CONSTANT / 4, SOLAR_CONSTANT * (5 / 48) ** 0.5
DAY, YEAR = 86_400.0, 365.2425 * 86_400  # seconds
J2000 = 946_728_000.0  # the noon of 2000-01-01, in seconds since 1970-01-01


@dataclass(frozen=True, eq=False)
class Forcings:
    """The channels beside the state: constants first, then what is computed."""

    latitude: np.ndarray  # degrees north, [H]
    longitude: np.ndarray  # degrees east, [W]
    kinds: tuple[str, ...] = ()  # of FORCINGS
    constants: tuple[str, ...] = ()
    values: np.ndarray | None = None  # of the constants, normalised, [C, H, W]; None where they are not read
    stats: list[list[float]] = field(default_factory=list)  # mean and standard deviation of each

    @staticmethod
    def open(config: Config, latitude: np.ndarray, longitude: np.ndarray) -> "Forcings":
        """Return what a configuration asks for, on a grid in degrees, [H] and [W].

        Raises ValueError, in one line with the remedy, for a file of constants that cannot be read, lacks one, or has
        another grid, and for one that is the same everywhere, or not finite.
        """
        kinds, wanted, path = tuple(config.forcings or ()), tuple(config.constants or ()), config.constants_file
        for key, names in (("forcings", kinds), ("constants", wanted)):
            check_each_once(names, key)
        if not wanted:
            return Forcings(latitude, longitude, kinds)
        if not Path(path).exists():
            raise ValueError(
                f"no file {path} of constants: make it (prepare_data --constants), or give --constants_path"
            )
        files = Files.of([Path(path)])
        names, _ = files.names(None)
        channels = channel_indices(names, wanted, 0, "constants")
        for axis, here, there in (
            ("latitude", files.latitude, latitude),
            ("longitude", files.longitude, longitude),
        ):
            if len(here) < len(there) or not np.allclose(here[: len(there)], there, atol=1e-3):
                raise ValueError(
                    f"{path} has {len(here)} values of {axis} from {here[0]:g} to {here[-1]:g}, and the model "
                    f"{len(there)} from {there[0]:g} to {there[-1]:g}: make it of files on the same grid"
                )
        try:
            values = FrameReader(files, channels, range(len(latitude)), len(longitude)).read_frame(0, 0)
        except ReadError as error:
            raise ValueError(str(error)) from None
        values = values.astype(np.float64)
        means, stds = values.mean(axis=(1, 2)), values.std(axis=(1, 2))
        for name, std in zip(wanted, stds):
            if not np.isfinite(std) or not std > 0:
                what = "is the same everywhere" if std == 0 else "holds values that are not finite"
                raise ValueError(f"{path}: {name} {what}: fill it (prepare_data --fill), or leave it out of constants")
        normal = (values - means[:, None, None]) / stds[:, None, None]
        # Of a sum's digits the last ones are the machine's.
        return Forcings(
            latitude, longitude, kinds, wanted, normal, [[float(f"{x:.6g}") for x in of] for of in (means, stds)]
        )

    @property
    def names(self) -> list[str]:
        """The names of all channels beside the state."""
        return [*self.constants, *(name for kind in self.kinds for name in FORCINGS[kind])]

    @property
    def need_time(self) -> bool:
        """Whether somebody must say when a state is valid."""
        return bool(set(self.kinds) - {"position"})

    def check_times(self, files: Files) -> None:
        """Raise ValueError where the time of a state is needed, and some of these files store none."""
        without = [path for path, times in zip(files.paths, files.times) if times is None]
        if self.need_time and without:
            raise ValueError(
                f"forcings {', '.join(self.kinds)} need the time of each state, and {without[0]} stores none: "
                f"take only position, or files with `time` (docs/data.md)"
            )

    @property
    def description(self) -> Any:
        """What a model's data must have in common with its training's; None where nothing is beside the state."""
        return [list(self.constants), list(self.kinds), *self.stats] if self.names else None


class ForcingFields(nn.Module):
    """The channels beside the state, on the device, for a part of the image.

    Args:
        cut: returns the part of an image [..., H, W] that is wanted, [..., h, w].
    """

    def __init__(self, forcings: Forcings, cut: Callable[[Tensor], Tensor] = lambda image: image):
        super().__init__()
        self.kinds, self.channels = forcings.kinds, len(forcings.names)
        if not self.channels:
            return
        degrees = (axis.astype(np.float64) for axis in (forcings.latitude, forcings.longitude))
        phi, lam = np.meshgrid(*map(np.deg2rad, degrees), indexing="ij")
        fields = {
            "constants": np.empty((0, *phi.shape)) if forcings.values is None else forcings.values,
            # A place as a point of the unit sphere: without a seam at the date line, or at a pole.
            "position": np.stack([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)]),
            "meridian": np.stack([np.cos(lam), np.sin(lam)]),
        }
        for name, values in fields.items():
            part = cut(torch.from_numpy(values).to(torch.get_default_dtype()))
            self.register_buffer(name, part.clone(), persistent=False)

    def forward(self, times: Tensor) -> Tensor:
        """Return the channels at times [B], in seconds since 1970-01-01 in float64, normalised, [B, C_b, h, w]."""
        parts = [self.constants.expand(times.shape[0], -1, -1, -1)]
        parts += [getattr(self, f"_{kind}")(times) for kind in self.kinds]
        return torch.cat(parts, dim=1)

    def added(self, x: Tensor, times: Tensor) -> Tensor:
        """Return states [..., B, C, h, w] with the channels of their times [..., B] behind their own."""
        if not self.channels:
            return x
        beside = self(times.flatten()).to(x.dtype)
        return torch.cat([x, beside.view(*x.shape[:-3], *beside.shape[1:])], dim=-3)

    def _position(self, times: Tensor) -> Tensor:
        return self.position.expand(times.shape[0], -1, -1, -1)

    def _day(self, times: Tensor) -> Tensor:
        """Sine and cosine of the local mean solar time, which is that of Greenwich and the longitude."""
        greenwich = 2 * torch.pi / DAY * times
        sin, cos = self._scalars(greenwich.sin(), greenwich.cos())
        east, north = self.meridian[1], self.meridian[0]  # sine and cosine of the longitude
        return torch.stack([sin * north + cos * east, cos * north - sin * east], dim=1)

    def _year(self, times: Tensor) -> Tensor:
        """Sine and cosine of the time of the year."""
        angle = 2 * torch.pi / YEAR * times
        parts = [x.expand(-1, *self.meridian.shape[1:]) for x in self._scalars(angle.sin(), angle.cos())]
        return torch.stack(parts, dim=1)

    def _solar(self, times: Tensor) -> Tensor:
        """The radiation of the sun at the top of the atmosphere, at this moment."""
        direction, distance = sun(times)
        x, y, z = self._scalars(*direction)
        zenith = (x * self.position[0] + y * self.position[1] + z * self.position[2]).clamp(min=0)  # its cosine
        (strength,) = self._scalars(SOLAR_CONSTANT / distance**2)
        return ((strength * zenith - SOLAR_MEAN) / SOLAR_STD)[:, None]

    def _scalars(self, *values: Tensor) -> list[Tensor]:
        """Return numbers of each state [B], computed in float64, ready to be multiplied with fields."""
        return [x.to(self.position.dtype).view(-1, 1, 1) for x in values]


def sun(times: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the sun's direction as seen from the Earth, and its distance in astronomical units, [B] each.

    The direction has length 1; its parts point to 0N 0E, to 0N 90E and to the North Pole, so that the product with a
    place on the unit sphere is the cosine of the zenith angle there. The formulas are those of the Astronomical
    Almanac as Michalsky gives them (1988, Solar Energy 40, 227-235), good to 0.01 degrees from 1950 to 2050.

    Args:
        times: seconds since 1970-01-01, UTC, in float64, [B].
    """
    days = (times - J2000) / DAY
    anomaly = torch.deg2rad(357.528 + 0.9856003 * days)
    longitude = 280.460 + 0.9856474 * days + 1.915 * anomaly.sin() + 0.020 * (2 * anomaly).sin()
    longitude, obliquity = torch.deg2rad(longitude), torch.deg2rad(23.439 - 4e-7 * days)
    x, y, z = longitude.cos(), obliquity.cos() * longitude.sin(), obliquity.sin() * longitude.sin()
    # The Earth turns below it, by Greenwich's mean sidereal time.
    turned = torch.deg2rad(280.460625 + 360.985647363 * days)
    direction = x * turned.cos() + y * turned.sin(), y * turned.cos() - x * turned.sin(), z
    return direction, 1.00014 - 0.01671 * anomaly.cos() - 0.00014 * (2 * anomaly).cos()
