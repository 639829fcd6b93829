"""Files of GRIB, which tests of archives read."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest


def write_messages(path: Path, messages: Iterable[tuple[np.ndarray, dict]], sample: str) -> None:
    """Write messages of a field of the whole globe, [latitude, longitude], each changed by its keys after that.

    `sample` is the one of eccodes that they begin as. Skips the test where eccodes is not installed.
    """
    eccodes = pytest.importorskip("eccodes", reason="eccodes is not installed: pip install -r requirements-prepare.txt")
    with path.open("wb") as file:
        for values, keys in messages:
            rows, columns = values.shape
            grid = {
                "Ni": columns, "Nj": rows, "bitsPerValue": 24,
                "latitudeOfFirstGridPointInDegrees": 90, "latitudeOfLastGridPointInDegrees": -90,
                "longitudeOfFirstGridPointInDegrees": 0, "longitudeOfLastGridPointInDegrees": 360 - 360 / columns,
                "iDirectionIncrementInDegrees": 360 / columns, "jDirectionIncrementInDegrees": 180 / (rows - 1),
            }  # fmt: skip
            message = eccodes.codes_grib_new_from_samples(sample)
            for key, value in grid.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, values.astype(float).ravel())
            for key, value in keys.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_write(message, file)
            eccodes.codes_release(message)
