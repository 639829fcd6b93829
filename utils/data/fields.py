"""What a model reads and forecasts: channels, grid and statistics.

Shapes:  C channels of the files   C_in C_out those that a model reads, and forecasts   H W rows, columns
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from utils.config.settings import Config
from utils.data.files import STORED_STEP_HOURS, Files, channel_indices, check_crop, check_each_once
from utils.data.forcings import Forcings
from utils.data.statistics import Statistics

LONGEST_NAME = 100  # characters
AXES = {"time", "prediction_timedelta", "valid_time", "latitude", "longitude"}  # of the files that hold forecasts
PICTURE = "t2m"  # what the tutorial draws of its 20 channels, whose files name none


@dataclass(frozen=True, eq=False)
class Fields:
    """The inputs and the forecasts of a model, by name, place and scale."""

    inputs: list[int]  # channels of the files, C_in of them
    outputs: list[int]  # C_out
    in_names: list[str]
    out_names: list[str]
    in_units: list[str]
    units: list[str]  # of the forecast channels
    plot_channels: list[int]  # of the forecast channels
    latitude: np.ndarray  # degrees north, [H]
    longitude: np.ndarray  # degrees east, [W]
    means: np.ndarray  # [C]
    stds: np.ndarray  # [C]
    time_means: np.ndarray | None  # of the forecast channels, [C_out, H, W]; None where nobody knows them
    forcings: Forcings  # what is read beside the state
    residual_scale: list[float] | None = None  # of the change that a residual model forecasts, [C_out]
    step_hours: float = STORED_STEP_HOURS  # lead of a forecast
    has_time: bool = False
    statistics: Statistics | None = None  # how their files are read; None: as they are
    remarks: tuple[str, ...] = ()

    @staticmethod
    def open(config: Config, files: Files) -> "Fields":
        """Return what a configuration takes of some files.

        Raises ValueError, in one line with the remedy, for whatever is wrong with the statistics, the crop or the
        channels asked for.
        """
        _, H, W = files.shape
        rows, columns = config.img_size
        check_crop(files, config.img_size, config.patch_size)
        names, assumed = files.names(config.channel_names)
        for key in ("in_channels", "out_channels"):
            if getattr(config, key) == ():
                raise ValueError(f"{key} is empty: name one or more, or leave it out")
        inputs = channel_indices(names, config.in_channels, config.n_in_channels, "in_channels")
        outputs = channel_indices(names, config.out_channels, config.n_out_channels, "out_channels")
        out_names = [names[c] for c in outputs]
        shown = config.plot_channels
        if shown is None:  # the tutorial's picture is that of t2m
            shown = [PICTURE] if assumed and PICTURE in out_names else out_names[:1]
        used = tuple(dict.fromkeys(inputs + outputs))
        statistics = Statistics(names, used, are_named=bool(config.channel_names or files.channel_names))
        means, stds = statistics.moments(config)
        time_means = statistics.time_means(config, (H, W))
        scale = None
        if config.time_diff_stds_path is not None:
            if not config.residual:
                raise ValueError("time_diff_stds_path scales a residual forecast: add --residual, or leave it out")
            diffs = statistics.load(config.time_diff_stds_path, "time_diff_stds_path")[:, 0, 0]
            scale = (diffs[outputs] / stds[outputs]).tolist()
        seconds = files.step_seconds()
        forcings = Forcings.open(config, files.latitude[:rows], files.longitude[:columns])
        forcings.check_times(files)
        return Fields(
            inputs=inputs,
            outputs=outputs,
            in_names=[names[c] for c in inputs],
            out_names=out_names,
            in_units=[files.units[c] for c in inputs],
            units=[files.units[c] for c in outputs],
            plot_channels=channel_indices(tuple(out_names), tuple(shown), 0, "plot_channels"),
            latitude=files.latitude[:rows],
            longitude=files.longitude[:columns],
            means=means,
            stds=stds,
            time_means=time_means if time_means is None else time_means[outputs, :rows, :columns],
            residual_scale=scale,
            step_hours=config.dt * (seconds / 3600 if seconds else STORED_STEP_HOURS),
            has_time=seconds is not None,
            forcings=forcings,
            statistics=statistics,
            remarks=(*filter(None, [assumed, files.assumed_grid]), *statistics.remarks),
        ).checked(config)

    @staticmethod
    def blank(config: Config) -> "Fields":
        """Return fields of the shape that a configuration asks for, of no data: what decides a model's size.

        Raises ValueError as `open`.
        """
        H, W = config.img_size
        known = [f"ch{i}" for i in range(max(config.n_in_channels, config.n_out_channels))]
        kept = config.conserve_mean or ()  # names of the files, which are not known here
        free = [i for i, name in enumerate(known) if name not in kept]
        for i, name in zip(free, (name for name in kept if name not in known)):
            known[i] = name
        in_names = list(config.in_channels or known[: config.n_in_channels])
        out_names = list(config.out_channels or known[: config.n_out_channels])
        names = list(dict.fromkeys(in_names + out_names))
        latitude, longitude = 90 - 180 * np.arange(H) / H, np.arange(W) * 360 / W
        return Fields(
            inputs=[names.index(name) for name in in_names],
            outputs=[names.index(name) for name in out_names],
            in_names=in_names,
            out_names=out_names,
            in_units=[""] * len(in_names),
            units=[""] * len(out_names),
            plot_channels=[],
            latitude=latitude,
            longitude=longitude,
            means=np.zeros(len(names)),
            stds=np.ones(len(names)),
            time_means=None,
            forcings=Forcings(latitude, longitude, tuple(config.forcings or ()), tuple(config.constants or ())),
        ).checked(config)

    def checked(self, config: Config) -> "Fields":
        """Return these fields. Raises ValueError for odd names, and a residual forecast with nothing to start from."""
        check_names([*self.in_names, *self.out_names, *self.forcings.constants], [*self.in_units, *self.units])
        if config.residual and -1 in self.origins:
            missing = self.out_names[self.origins.index(-1)]
            raise ValueError(f"residual needs every forecast channel among the inputs, and {missing!r} is not: add it")
        check_each_once(config.conserve_mean or (), "conserve_mean")
        for name in config.conserve_mean or ():
            for names, key in ((self.out_names, "forecast"), (self.in_names, "input")):
                if name not in names:
                    raise ValueError(
                        f"conserve_mean names {name!r}, and the {key} channels are {', '.join(names)}: take of these"
                    )
        return self

    @property
    def forced(self) -> list[int]:
        """The inputs that are not forecast, C_f channels of the files."""
        return [c for c in self.inputs if c not in self.outputs]

    @property
    def forced_names(self) -> list[str]:
        return [self.in_names[self.inputs.index(c)] for c in self.forced]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many channels the network reads, forecasts, and is given at later steps: those beside the state too."""
        beside = len(self.forcings.names)
        return len(self.inputs) + beside, len(self.outputs), len(self.forced) + beside

    @property
    def feedback(self) -> list[int] | None:
        """Where each input of a next step stands among what is forecast and, after it, given.

        Given are the forced channels, and those beside the state. None where the input is the forecast as it is.
        """
        known, beside = self.outputs + self.forced, len(self.forcings.names)
        if self.inputs == self.outputs and not beside:
            return None
        return [known.index(c) for c in self.inputs] + [len(known) + i for i in range(beside)]

    def kept(self, names: list[str] | None) -> list[tuple[int, int]]:
        """Return where channels stand among those that are forecast, and among the inputs."""
        return [(self.out_names.index(name), self.in_names.index(name)) for name in names or ()]

    @property
    def area(self) -> np.ndarray:
        """The weight of each grid point in a global mean, cos(latitude), adding up to 1, [H, W]."""
        weights = np.cos(np.deg2rad(self.latitude.astype(np.float64))).clip(min=0)
        return np.tile(weights[:, None] / (weights.sum() * len(self.longitude)), len(self.longitude))

    @property
    def origins(self) -> list[int]:
        """Where each forecast channel stands among the inputs, -1 for nowhere: what persistence starts from."""
        return [self.inputs.index(c) if c in self.inputs else -1 for c in self.outputs]

    @property
    def climatology(self) -> np.ndarray | None:
        """The time means, normalised, [C_out, H, W]; None where there are none."""
        if self.time_means is None:
            return None
        return (self.time_means - self.means[self.outputs, None, None]) / self.stds[self.outputs, None, None]

    @property
    def hours(self) -> str:
        """The lead time in words."""
        return f"{self.step_hours:g} h" + ("" if self.has_time else " (assumed: the files store no time)")

    @property
    def description(self) -> dict[str, Any]:
        """What other files and statistics must have in common with these; None where nothing is known."""
        used = self.inputs + self.outputs
        return {
            "input channels": self.in_names,
            "forecast channels": self.out_names,
            "units": self.units if any(self.units) else None,
            "units of the inputs": self.in_units if any(self.in_units) else None,
            "step in hours": self.step_hours if self.has_time else None,
            "latitudes": [round(float(self.latitude[i]), 3) for i in (0, -1)],
            "longitudes": [round(float(self.longitude[i]), 3) for i in (0, -1)],
            "statistics": [self.means[used].tolist(), self.stds[used].tolist(), self.residual_scale],
            "channels beside the state": self.forcings.description,
        }

    def label(self, channel: int) -> str:
        """Return the name of a forecast channel with its units."""
        return self.out_names[channel] + f" [{self.units[channel]}]" * bool(self.units[channel])

    def to_units(self, field: Tensor, channel: int) -> np.ndarray:
        """Return a normalised field [H, W] of forecast channel `channel` in its units, on the host."""
        c = self.outputs[channel]
        return field.double().cpu().numpy() * float(self.stds[c]) + float(self.means[c])


def unlike(fields: Fields, known: dict[str, Any]) -> str | None:
    """Return the first thing that a description of other fields has otherwise; None where there is none."""
    here = fields.description
    both = ((what, there, here.get(what)) for what, there in known.items())
    return next((what for what, there, ours in both if None not in (there, ours) and there != ours), None)


def check_names(names: list[str], units: list[str]) -> None:
    """Raise ValueError for what can stand in no line, and for a name that names no file: pictures have such names."""
    for name in names:
        is_odd = name in (".", "..") or not 0 < len(name.strip()) == len(name) <= LONGEST_NAME
        if is_odd or {*"/$"} & {*name} or not name.isprintable():  # $ begins a formula in pictures
            raise ValueError(f"a channel has the name {name[:LONGEST_NAME]!r}: take letters, digits and _")
        if name in AXES:
            raise ValueError(f"a channel is called {name}, as an axis of forecasts is: give it another name")
    for text in units:
        if "$" in text or not text.isprintable() or len(text) > LONGEST_NAME:
            raise ValueError(f"a channel has the units {text[:LONGEST_NAME]!r}: they take one short line")
