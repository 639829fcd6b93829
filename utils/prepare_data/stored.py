"""What a file of an archive claims to hold, against what it has: before xarray, or a library in C, takes memory for it.

A file from anywhere may claim shapes that fill any memory, name other files, or end before its values do. Libraries
notice little of this: the one for NetCDF gives out zeros beyond the end of a file of its classic formats, HDF5 a fill
value, often zero, for chunks that nobody wrote.

Source of the layout of classic files: "The NetCDF Classic Format Specification", NetCDF User's Guide, Unidata.
"""

import contextlib
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.data.hdf5 import LARGEST_CHUNK, check_links, check_whole
from utils.errors import first_line
from utils.reading import check_kind, check_own

GRIB, END_OF_MESSAGE = (".grib", ".grb", ".grib2", ".grb2"), b"7777"
NEAR = 4096  # bytes before a message: what pads files is no longer
LARGEST_AXIS = 2**24  # values
LARGEST_AXES = 2**30  # bytes of all in a file
LARGEST_FIELD = 2**28  # points: a grid of 0.016 degrees
WIDTHS = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)  # bytes of a number of each type of classic NetCDF, from 1 on


def check_archive(path: str) -> None:
    """Raise ValueError for a file that leads out of its folder, has less than it claims, or claims too much at once.

    A file that cannot be opened passes: who reads it says so. One that can, but not be looked through, does not.
    """
    check_kind(Path(path))
    if Path(path).is_dir():
        check_own(Path(path))
    try:
        arrays = _arrays(path)
    except _NotOpened:
        return
    except ImportError as error:
        raise ValueError(f"reading {path} needs {error.name}: `pip install -r requirements-prepare.txt`") from None
    except Exception as error:  # each engine has its own kinds
        told = first_line(error)
        raise ValueError(
            told if Path(path).name in told else f"{path} cannot be looked through ({told}): check the file"
        ) from None
    for name, shape, chunk, size in arrays:
        if max(shape, default=0) > LARGEST_AXIS:
            raise ValueError(f"{path} has {name} with {max(shape):,} values: an axis has at most {LARGEST_AXIS:,}")
        if math.prod(chunk) * size > LARGEST_CHUNK:
            raise ValueError(
                f"{path} has {name} in chunks of {math.prod(chunk) * size / 1e9:.1f} GB, and they are read as a whole: "
                f"store it in chunks of a field"
            )
    total = sum(shape[0] * size for _, shape, _, size in arrays if len(shape) == 1)
    if total > LARGEST_AXES:
        raise ValueError(f"{path} has axes of {total / 1e9:.1f} GB: all together have at most {LARGEST_AXES / 1e9:.1f}")


def check_stored(path: str, name: str) -> None:
    """Raise ValueError where an HDF5 file holds a part of a variable only, and the rest would look like values.

    A variable may lack steps that others have along the same axis: NetCDF gives out a fill value for them. Chunks that
    read as missing pass: who takes them says so. In Zarr a chunk that is not there is one of the fill value, and of
    zeros where there is none: zarr writes no such chunk, so a folder that was copied in part cannot be told from a
    whole one. The other formats have no chunks.
    """
    if _is_hdf5(path):
        import netCDF4

        with netCDF4.Dataset(path) as seen, h5py.File(path, "r", locking=False) as file:
            other = f"_nc4_non_coord_{name}"  # NetCDF's name for a variable that has that of an axis which it lacks
            variable, told = file[other] if other in file else file[name], seen[name].shape
            if variable.shape != told:
                raise ValueError(
                    f"{path} holds {list(variable.shape)} of {list(told)} values of {name}: copy it again, or finish it"
                )
            fill = variable.fillvalue
            said = [x for one in ("_FillValue", "missing_value") for x in np.ravel(variable.attrs.get(one, []))]
            is_missing = variable.dtype.kind in "iuf" and (fill != fill or any(x == fill for x in said))  # or NaN
            if variable.chunks is None or not is_missing:
                check_whole(path, variable)


def _is_hdf5(path: str) -> bool:
    """Is a file read as HDF5? One may begin as another format, by which it is read then, and hold HDF5 further on."""
    if Path(path).is_dir() or path.endswith(GRIB) or _is_classic(path):
        return False
    return h5py.is_hdf5(path)


def _is_classic(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(3) == b"CDF"


class _NotOpened(Exception):
    """It is no such file, or is not there."""


def _opened(opener: Callable, *args: Any, **options: Any) -> Any:
    try:
        return opener(*args, **options)
    except Exception:  # each engine has its own kinds
        raise _NotOpened from None


def _arrays(path: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Return the arrays that a file claims to have, but for those of groups, which are not read.

    Each has a name, its shape, the shape of a chunk (() for none), bytes of a number.
    """
    if Path(path).is_dir():
        import zarr

        found = _opened(zarr.open_group, path, mode="r").arrays()
        return [(name, array.shape, array.chunks, array.dtype.itemsize) for name, array in found]
    if _opened(_is_hdf5, path):
        with _opened(h5py.File, path, "r", locking=False) as file:
            check_links(file)
            arrays = [(name, item) for name, item in file.items() if isinstance(item, h5py.Dataset)]
            return [(name, item.shape or (), item.chunks or (), item.dtype.itemsize) for name, item in arrays]
    if path.endswith(GRIB):
        _check_messages(path)
        return []
    import netCDF4

    if _is_classic(path) and (has := Path(path).stat().st_size) < (needs := _classic_bytes(path)):
        raise ValueError(f"{path} has {has:,} bytes of {needs:,}: copy it again")
    with _opened(netCDF4.Dataset, path) as file:
        return [(name, x.shape, (), np.dtype(x.dtype).itemsize) for name, x in file.variables.items()]


def _check_messages(path: str) -> None:
    """Raise ValueError where a message of a GRIB file has more points than any field, is cut off, or is passed over.

    Readers look for the next `GRIB`, and so pass over a message whose mark is damaged; its end, `7777`, stays.
    """
    import eccodes

    with _opened(open, path, "rb") as file, open(path, "rb") as between:
        end = 0
        try:
            while True:
                message, points = eccodes.codes_grib_new_from_file(file), 0
                start = os.path.getsize(path) if message is None else eccodes.codes_get(message, "offset", int)
                between.seek(max(end, start - NEAR))
                if END_OF_MESSAGE in between.read(min(start - end, NEAR)):
                    raise ValueError(f"{path} has a message whose beginning is damaged, at byte {end:,}: copy it again")
                if message is None:
                    return
                end = start + eccodes.codes_get(message, "totalLength", int)
                with contextlib.suppress(eccodes.KeyValueNotFoundError):  # it has no grid
                    points = eccodes.codes_get(message, "numberOfDataPoints")
                eccodes.codes_release(message)
                if points > LARGEST_FIELD:
                    raise ValueError(f"{path} has a field of {points:,} points: one has at most {LARGEST_FIELD:,}")
        except eccodes.PrematureEndOfFileError:
            raise ValueError(f"{path} ends within a message: copy it again") from None


def _classic_bytes(path: str) -> int:
    """Return how many bytes a file of NetCDF's classic formats must have to hold all its values."""
    with open(path, "rb") as file:
        version = file.read(4)[3]
        count, offset = (">Q" if version == 5 else ">I"), (">I" if version == 1 else ">Q")

        def number(kind: str = count) -> int:
            return struct.unpack(kind, file.read(struct.calcsize(kind)))[0]

        def skip(size: int) -> None:
            if len(file.read(size)) < size:
                raise EOFError(path)
            file.read(-size % 4)

        def length() -> int:
            number(">I")  # what comes: dimensions, attributes, variables, or nothing
            return number()

        def skip_attributes() -> None:
            for _ in range(length()):
                skip(number())
                width = WIDTHS[number(">I")]
                skip(width * number())

        records, sizes, ends, steps = number(), [], [], []
        if records == 2 ** (8 * struct.calcsize(count)) - 1:
            raise ValueError(f"{path} does not say how many records it has: let what writes it close it first")
        for _ in range(length()):
            skip(number())
            sizes.append(number())  # 0 for the one that grows, with each record
        skip_attributes()
        for _ in range(length()):
            skip(number())
            shape = [sizes[number()] for _ in range(number())]
            skip_attributes()
            size = WIDTHS[number(">I")] * math.prod(shape[shape[:1] == [0] :])
            number()  # its padded size, which files beyond 4 GB have no room for
            begin = number(offset)
            ends.append((begin, size, shape[:1] == [0]))
            steps += [size] * (shape[:1] == [0])
    record = steps[0] if len(steps) == 1 else sum(size + -size % 4 for size in steps)
    last = (records - 1) * record
    return max((begin + size + grows * last for begin, size, grows in ends if records or not grows), default=0)
