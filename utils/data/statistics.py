"""The statistics of a data set, taken by the names of channels or by their places.

The files may be of more channels than the data: the tutorial's are of 20, and a model may use two of them.

Shapes:  C channels of the data files   Cs channels of a file of statistics   H W rows, columns
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.config.settings import Config
from utils.data.files import ERA5_CHANNELS, check_each_once
from utils.reading import check_kind, read_text

MOST_CHANNELS = 2**16
NAMES = "channels.txt"  # beside the statistics, by our own tools: the name of each channel, in their order


@dataclass(frozen=True)
class Statistics:
    """Reads files of statistics for the channels in use.

    Attributes:
        names: of all channels of the data files, C of them.
        used: which of them a model reads or forecasts.
        are_named: by the files or by the user; else the names are assumed.
        remarks: what was said of the files read so far, each once.
    """

    names: tuple[str, ...]
    used: tuple[int, ...]
    are_named: bool
    remarks: list[str] = field(default_factory=list)

    def load(self, path: str, key: str, tails: Iterable[tuple[int, ...]] = ((1, 1),)) -> np.ndarray:
        """Return the values of a file [1, Cs, *tail] at the places of the data's channels, [C, *tail].

        Channels that are not used and not there get 0. Where names are known on both sides they decide, else the
        place does.

        Args:
            key: of the configuration, for errors.
            tails: the shapes that may follow the channels.

        Raises ValueError for a file that cannot be read, another shape, values that are not finite, for less channels
        than are used, and for more than the data's, where those have names and the statistics none that are known.
        """
        check_kind(Path(path))
        try:
            array = np.asarray(np.load(path, mmap_mode="r"))  # not read yet; an archive of several has no shape
            dtype = array.dtype.newbyteorder("=")
        except Exception as error:  # a made-up header can raise anything
            raise ValueError(f"cannot read {path!r} ({type(error).__name__}): check --{key}") from None
        C = len(self.names)
        shapes = [(1, C, *tail) for tail in tails]
        has_channels = array.ndim > 1 and array.shape[1] <= MOST_CHANNELS
        if not has_channels or array.shape[:1] + array.shape[2:] not in [(1, *tail) for _, _, *tail in shapes]:
            raise _shape_error(path, array, key, shapes)
        if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8 or not np.isfinite(array).all():
            raise ValueError(f"{path} holds values that are not finite: compute {key} anew")
        places, how = self._places(Path(path), array.shape[1])
        if max(places) >= array.shape[1]:
            raise _shape_error(path, array, key, shapes)
        if how is None and array.shape[1] == C:
            return array[0].astype(dtype)
        taken = np.zeros((C, *array.shape[2:]), dtype)
        taken[list(self.used)] = array[0, places]
        remark = (
            f"The statistics in {Path(path).parent} are of {array.shape[1]} channels, the files of {C}: the "
            f"{len(places)} in use are taken by {how or 'their places'}"
        )
        if remark not in self.remarks:
            self.remarks.append(remark)
        return taken

    def moments(self, config: Config) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each channel, [C]. Raises ValueError as `load`, and for one of 0."""
        means = self.load(config.global_means_path, "global_means_path")[:, 0, 0]
        stds = self.load(config.global_stds_path, "global_stds_path")[:, 0, 0]
        for c in self.used:
            if not stds[c] > 0:
                raise ValueError(
                    f"{config.global_stds_path} gives channel {self.names[c]!r} a standard deviation of {stds[c]}: "
                    f"it must be above 0; leave a constant channel out"
                )
        return means, stds

    def time_means(self, config: Config, stored: tuple[int, int]) -> np.ndarray | None:
        """Return the mean of each grid point, of the grid as `stored` or cropped; None where there is none."""
        path = config.time_means_path
        if path is not None and Path(path).exists():
            return self.load(path, "time_means_path", (stored, config.img_size))
        self.remarks.append(
            f"No time means (time_means_path: {path}): validation tells no ACC, and an evaluation knows no "
            f"climatology; `python -m utils.prepare_data stats` makes them"
        )
        return None

    def _places(self, path: Path, count: int) -> tuple[list[int], str | None]:
        """Return where the used channels stand in a file of so many, and how that is known where not by place."""
        names = self._names_of(path, count)
        wanted = [self.names[c] for c in self.used]
        if self.are_named and names is None and count > len(self.names):
            raise ValueError(
                f"{path} is of {count} channels, and which of them are {', '.join(wanted)} nobody says: name them all "
                f"in {path.with_name(NAMES)}, a line each, or make statistics with `python -m utils.prepare_data stats`"
            )
        if not self.are_named or names is None:
            return list(self.used), None
        if count == len(self.names) and not set(wanted) & set(names):
            return list(self.used), f"their places: other names stand in {path.with_name(NAMES)}"
        for name in wanted:
            if name not in names:
                raise ValueError(
                    f"{path} holds no {name!r}, but {', '.join(names)} ({path.with_name(NAMES)}): make statistics of "
                    f"these data with `python -m utils.prepare_data stats`"
                )
        places = [names.index(name) for name in wanted]
        return places, None if places == list(self.used) and count == len(self.names) else "name"

    def _names_of(self, path: Path, count: int) -> tuple[str, ...] | None:
        """Return the names of the channels of statistics; None where nobody knows."""
        try:
            names = tuple(read_text(path.with_name(NAMES)).splitlines())
        except (OSError, UnicodeDecodeError):
            names = ()
        if len(names) == count:
            check_each_once(names, str(path.with_name(NAMES)))
            return names
        if count == len(ERA5_CHANNELS) != len(self.names) and {self.names[c] for c in self.used} <= set(ERA5_CHANNELS):
            return tuple(ERA5_CHANNELS)
        return None


def _shape_error(path: str, array: np.ndarray, key: str, shapes: list[tuple[int, ...]]) -> ValueError:
    legal = " or ".join(str(list(shape)) for shape in shapes)
    return ValueError(f"{path} has the shape {list(array.shape)}: {key} must be {legal}")
