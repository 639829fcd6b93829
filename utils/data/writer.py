"""Write a data set in the layout that the loaders read: files and statistics.

    FOLDER/train/*.h5, valid/*.h5, test/*.h5      `fields` [time, channel, latitude, longitude], and these axes
    FOLDER/stats/global_means.npy, global_stds.npy [1, C, 1, 1], time_means.npy [1, C, H, W], from the training files
    FOLDER/stats/constants.h5            as the files, of one frame and without `time`: what does not change
    FOLDER/stats/time_diff_stds.npy      [1, C, 1, 1], std of the change in one stored step, from the training files
    FOLDER/stats/channels.txt            the names of the channels, a line each: by them statistics are taken

Shapes: T time steps, C channels, H latitudes, W longitudes.
"""

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from torch import Tensor

from utils.data.files import EPOCH
from utils.data.statistics_sums import StatisticsSums
from utils.files import to_disk

# The axes of `fields`, with their units.
AXES = {"time": EPOCH, "channel": "", "latitude": "degrees_north", "longitude": "degrees_east"}
# A chunk is one channel of one frame. gzip is at its fastest level and after shuffling bytes, as archives have it.
LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": True},
    "gzip": {"chunks": True, "compression": "gzip", "compression_opts": 1, "shuffle": True},
}


@dataclass(eq=False)
class DatasetWriter:
    """Files and statistics of one data set. `with` it: `add_file`, then `write` every frame of every file once.

    Leaving the block closes the files, and writes the statistics unless it failed. Training needs two steps or more.
    `folder` exists and is empty. `latitude` [H] and `longitude` [W] are in degrees, `dtype` is float32 or float16,
    `layout` a key of LAYOUTS. Statistics are gathered on the way, in float64, from the values as stored.
    """

    folder: Path
    channels: list[str]
    units: list[str]
    latitude: np.ndarray
    longitude: np.ndarray
    dtype: str = "float32"
    layout: str = "contiguous"

    def __post_init__(self):
        self.shape = (len(self.channels), len(self.latitude), len(self.longitude))
        self.storage = {"dtype": self.dtype, **LAYOUTS[self.layout]}
        if "chunks" in self.storage:
            self.storage["chunks"] = (1, 1, *self.shape[1:])
        self.fields: dict[str, h5py.Dataset] = {}
        self.previous: dict[str, Tensor] = {}  # the last frame of each training file, for the differences
        self.sums = StatisticsSums(self.shape)

    def add_file(self, name: str, time: np.ndarray | None) -> None:
        """Create FOLDER/`name`.h5 (say train/2001) for the times [T], in seconds since 1970-01-01.

        Without them for a single frame of what does not change.
        """
        path = self.folder / f"{name}.h5"
        path.parent.mkdir(exist_ok=True)
        file = h5py.File(path, "w")
        # track_times would store the moment of writing: the same data must give the same bytes.
        steps = 1 if time is None else len(time)
        fields = file.create_dataset("fields", (steps, *self.shape), track_times=False, **self.storage)
        fields.attrs["channel_names"] = np.array(self.channels, dtype=h5py.string_dtype())
        fields.attrs["units"] = np.array(self.units, dtype=h5py.string_dtype())
        axes = {
            "time": None if time is None else time.astype(np.int64),
            "channel": np.array(self.channels, dtype=h5py.string_dtype()),
            "latitude": self.latitude.astype(np.float32),
            "longitude": self.longitude.astype(np.float32),
        }
        for i, (axis, units) in enumerate(AXES.items()):
            if axes[axis] is None:
                continue
            file.create_dataset(axis, data=axes[axis], track_times=False).make_scale(axis)
            fields.dims[i].attach_scale(file[axis])  # netCDF and xarray find the axes by these
            if units:
                file[axis].attrs["units"] = units
        self.fields[name] = fields

    def write(self, name: str, t: int, frame: Tensor, gap: bool = False) -> None:
        """Store step `t` of a file: a CPU tensor [C, H, W] of the stored dtype. Within a file t counts up from 0.

        With `gap` more than a step of time lies between this frame and the last: their difference does not count.
        """
        self.fields[name][t] = frame.numpy()
        if not name.startswith("train/"):
            return
        self.sums.add(frame, None if t == 0 or gap else self.previous[name])
        if t == len(self.fields[name]) - 1:
            self.previous.pop(name, None)
        elif t == 0:
            self.previous[name] = frame.clone()
        else:
            self.previous[name].copy_(frame)

    def close(self, name: str) -> None:
        """Close a file that is complete."""
        self.fields.pop(name).file.close()
        to_disk(self.folder / f"{name}.h5")

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        for fields in self.fields.values():
            fields.file.close()
        if error_type is None:
            self.sums.write(self.folder / "stats", self.channels)
