"""States to forecast from, without what happened afterwards: of training files, or of an archive.

Shapes:  B states   C_in channels that a model reads   H W rows, columns of its grid
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.data.fields import Fields
from utils.data.files import Files, channel_indices
from utils.data.frames import FrameReader
from utils.data.variables import cf_units, meant, missing
from utils.errors import ReadError
from utils.files import seen
from utils.forecast.data import Forecasts
from utils.forecast.settings import Outlook
from utils.prepare_data.archive import Archive

PARTS = ("train", "valid", "test")  # of a data set


@dataclass(frozen=True)
class Source:
    """Some states that lie together, in the order of time."""

    path: str
    times: list[int | None]  # seconds since 1970-01-01
    read: Callable[[int], np.ndarray]  # the i-th one, [C_in, H, W]
    dates: Callable[[int], str]


def date_of(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M")


class InitialStates(Forecasts):
    """The states that `--initial` and `--dates` name, the earliest first.

    Raises ValueError, in one line with the remedy, for files that cannot be read, that lack a channel of the model or
    have another grid or units, and for a date that they do not hold.
    """

    def __init__(self, settings: Outlook, fields: Fields, channel_names: tuple[str, ...] | None, device: torch.device):
        paths = [Path(path) for path in settings.initial]
        super().__init__(fields, settings.lead_hours, ", ".join(map(str, paths)))
        unknown = [name for name in fields.forced_names if name not in (settings.hold or ())]
        if unknown and self.steps > 1:
            raise ValueError(
                f"the model reads {', '.join(unknown)} and does not forecast them: nobody knows them later; keep them "
                f"as they are (--hold), or forecast one step (--lead_hours {fields.step_hours:g})"
            )
        for name in settings.hold or ():
            if name not in fields.forced_names:
                raise ValueError(
                    f"hold names {name!r}, and the model reads and does not forecast "
                    f"{', '.join(fields.forced_names) or 'nothing'}: leave it out"
                )
        self.held = [fields.in_names.index(name) for name in fields.forced_names]
        self.paths, self.device = paths, device
        self.sources = self._training_files(paths, channel_names)
        if self.sources and settings.channels:
            raise ValueError("channels says where an archive has them, and training files name their own: leave it out")
        self.sources = self.sources or [self._archive(settings)]
        self.chosen = self._choose(list(settings.dates))
        if fields.forcings.need_time and None in map(self.seconds, range(len(self))):
            raise ValueError(
                f"the model reads {', '.join(fields.forcings.kinds)}, and {self.origin} stores no time: "
                f"give states that do"
            )

    def __len__(self) -> int:
        return len(self.chosen)

    def date(self, forecast: int, k: int = 0) -> str:
        seconds = self.seconds(forecast, k)
        if seconds is not None:
            return date_of(seconds)
        source, i = self.chosen[forecast]
        return f"{source.dates(i)}" + (f" + {self.lead_hours[k - 1]:g} h" if k else "")

    def seconds(self, forecast: int, k: int = 0) -> int | None:
        source, i = self.chosen[forecast]
        start = source.times[i]
        return None if start is None else start + round(3600 * self.fields.step_hours * k)

    def read(self, numbers: list[int]) -> Tensor:
        """Return states in units, [B, C_in, H, W], on the device.

        Raises ReadError where one cannot be read, or lacks a value.
        """
        try:
            states = np.stack([source.read(i) for source, i in (self.chosen[n] for n in numbers)])
        except ValueError as error:  # of an archive
            raise ReadError(str(error)) from None
        if (bad := missing(states)).any():
            b, c, y, x = np.argwhere(bad)[0]
            raise ReadError(
                f"{self.chosen[numbers[b]][0].path}: {self.date(numbers[b])}, channel {self.fields.in_names[c]!r}, row "
                f"{y}, column {x} is {states[b, c, y, x]}: fill it, or start from another date"
            )
        return torch.from_numpy(states).to(self.device)

    def times(self, numbers: list[int]) -> np.ndarray | None:
        """Return when states are valid, [B]; None where nobody knows."""
        seconds = [self.seconds(n) for n in numbers]
        return None if None in seconds else np.array(seconds, "datetime64[s]")

    def forced(self, initial: Tensor) -> Iterator[Tensor]:
        """Yield what is read and not forecast at later steps, [B, C_f, H, W]: as it is in the initial states."""
        return itertools.repeat(initial[:, self.held])

    @property
    def stamps(self) -> list[list]:
        """What changes when the files do."""
        return [seen(path) for path in self.paths]

    def _training_files(self, paths: list[Path], channel_names: tuple[str, ...] | None) -> list[Source]:
        """Return what lies in training files, a source for each folder; nothing where the paths are an archive's.

        Raises ValueError where some are and some not.
        """
        alone = [path for path in paths if path.suffix == ".h5"]
        found = [Files.of(alone)] if alone else []
        others = []
        for path in (path for path in paths if path not in alone):
            folders = [one for one in (path, *(path / part for part in PARTS)) if any(one.glob("*.h5"))]
            found += [Files.open(str(folder)) for folder in folders]
            others += [] if folders else [path]
        if found and others:
            raise ValueError(f"{others[0]} holds no training files, and other paths of initial do: give one kind")
        return [self._of_files(files, channel_names) for files in found]

    def _of_files(self, files: Files, channel_names: tuple[str, ...] | None) -> Source:
        fields, where = self.fields, files.paths[0]
        names, _ = files.names(None if files.channel_names else channel_names)
        channels = channel_indices(names, tuple(fields.in_names), 0, "the model's inputs")
        self._check(where, [files.units[c] for c in channels], files.latitude, files.longitude)
        reader = FrameReader(files, channels, range(len(fields.latitude)), len(fields.longitude))
        frames = [(file, t) for file, steps in enumerate(files.steps) for t in range(steps)]
        times = [None if (known := files.times[file]) is None else int(known[t]) for file, t in frames]
        return Source(where, times, lambda i: reader.read_frame(*frames[i]), lambda i: files.date(*frames[i]))

    def _archive(self, settings: Outlook) -> Source:
        fields, where = self.fields, settings.initial[0]
        named = {text.partition("=")[0]: text for text in settings.channels or ()}
        for name in named:
            if name not in fields.in_names:
                raise ValueError(f"channels names {name!r}, and the model reads {', '.join(fields.in_names)}")
        clear = {name: meant(name, fields.in_names + fields.out_names) for name in fields.in_names}
        wanted = [named.get(name, name if name == clear[name] else f"{name}={clear[name]}") for name in fields.in_names]
        archive = Archive.open(list(settings.initial), wanted, any_times=True)
        # Rows and columns in the model's order, which may begin in the south, or at -180.
        rows = np.abs(archive.latitude[None] - fields.latitude[:, None]).argmin(axis=1)
        away = (archive.longitude[None] - fields.longitude[:, None] + 180) % 360 - 180
        columns = np.abs(away).argmin(axis=1)
        longitude = fields.longitude + np.take_along_axis(away, columns[:, None], axis=1)[:, 0]
        self._check(where, [channel.units for channel in archive.channels], archive.latitude[rows], longitude)

        def read(i: int) -> np.ndarray:
            state = np.empty((len(wanted), len(rows), len(columns)), np.float32)
            for c, values in archive.read(i, i + 1):
                state[c] = values[0][np.ix_(rows, columns)]
            return state

        return Source(where, archive.times.tolist(), read, str)

    def _check(self, path: str, units: list[str], latitude: np.ndarray, longitude: np.ndarray) -> None:
        """Raise ValueError where a file has other units or another grid than the model."""
        fields = self.fields
        for name, here, there in zip(fields.in_names, units, fields.in_units):
            if here and there and cf_units(here) != cf_units(there):
                raise ValueError(
                    f"{path} has {name} in {here}, and the model reads {there}: bring it to that unit first"
                )
        for axis, values, wanted in (
            ("latitude", latitude, fields.latitude),
            ("longitude", longitude, fields.longitude),
        ):
            if len(values) < len(wanted) or not np.allclose(values[: len(wanted)], wanted, atol=1e-3):
                raise ValueError(
                    f"{path} has {len(values)} values of {axis} from {values[0]:g} to {values[-1]:g}, and the model "
                    f"{len(wanted)} from {wanted[0]:g} to {wanted[-1]:g}: bring it to the model's grid first"
                )

    def _choose(self, dates: list[str]) -> list[tuple[Source, int]]:
        """Return the states of these dates. Raises ValueError for a date that is not there, or is none."""
        known = [(source, i) for source in self.sources for i in range(len(source.times))]
        if not known:
            raise ValueError(f"{self.origin} holds no state: give another --initial")
        if all(source.times[i] is not None for source, i in known):
            known.sort(key=lambda one: one[0].times[one[1]])
            times = [source.times[i] for source, i in known]
            for one, after in zip(times, times[1:]):
                if one == after:
                    raise ValueError(f"{self.origin} holds two states of {date_of(one)}: leave one of the files out")
        if dates in (["last"], ["all"]):
            return known[-1:] if dates == ["last"] else known
        at = {source.times[i]: (source, i) for source, i in known}
        if None in at:
            raise ValueError(f"{self.origin} stores no time: give --dates last, or all")
        chosen = {}
        for text in dates:
            try:
                date = datetime.fromisoformat(text)
            except ValueError:
                raise ValueError(f"dates names {text!r}: it takes last, all, or dates such as 2026-02-09T18") from None
            seconds = round(date.replace(tzinfo=date.tzinfo or UTC).timestamp())
            if seconds not in at:
                raise ValueError(
                    f"{self.origin} has no state of {text}: it holds {len(at)}, from {date_of(min(at))} to "
                    f"{date_of(max(at))}"
                )
            chosen[seconds] = at[seconds]
        return [chosen[seconds] for seconds in sorted(chosen)]
