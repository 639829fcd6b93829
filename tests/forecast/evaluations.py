"""What the tests of evaluate.py share."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

import evaluate
from tests.helpers import ROOT, call_here
from utils.errors import Refused

NAMES = ["u", "v", "t"]


def flags(folder: Path, *more: str) -> list[str]:
    """Return the command line of an evaluation of the run in `folder`: 24 hours from each time."""
    run = ["--checkpoint", str(folder / "runs/tiny/1GPU/00"), "--inf_data_path", str(folder / "valid")]
    return [*run, "--lead_hours", "24", *more]


def evaluated(folder: Path, out: Path, *more: str) -> dict:
    """Evaluate in this process, and return skill.json."""
    call_here(evaluate.main, flags(folder, "--out", str(out), *more))
    return json.loads((out / "skill.json").read_text())


def disturbed(fault: str, argv: list[str]) -> list[str]:
    """Return the command of an evaluation in a process that runs some code first."""
    code = f"import os, runpy, signal, sys\nsys.argv = sys.argv[1:]\n{fault}\n"
    return ["-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')", str(ROOT / "evaluate.py"), *argv]


def refused(argv: list[str]) -> str:
    """Return the line that an evaluation ends with in this process."""
    with pytest.raises(Refused) as found:
        call_here(evaluate.main, argv)
    (line,) = str(found.value).splitlines()
    return line


def truth(folder: Path, rows: int = 16) -> xarray.DataArray:
    """Read what happened, [time, channel, latitude, longitude] in float64, with h5py and xarray alone."""
    files = []
    for path in sorted((folder / "valid").glob("*.h5")):
        with h5py.File(path) as file:
            values = file["fields"][:, :, :rows].astype(np.float64)
            times = file["time"][:].astype("datetime64[s]").astype("datetime64[ns]")
        coordinates = {"time": times, "channel": NAMES, "latitude": 90 - 180 * np.arange(rows) / 16}
        coordinates["longitude"] = np.arange(32) * 11.25
        files.append(xarray.DataArray(values, coordinates, ("time", "channel", "latitude", "longitude")))
    return xarray.concat(files, "time")


def row_weights(latitude: xarray.DataArray, weighting: str) -> xarray.DataArray:
    if weighting == "cos":
        return np.cos(np.deg2rad(latitude))
    latitude = latitude.sortby("latitude")
    middles = np.deg2rad((latitude.values[1:] + latitude.values[:-1]) / 2)
    edges = np.concatenate([[-np.pi / 2], middles, [np.pi / 2]])  # from the south
    return latitude.copy(data=np.diff(np.sin(edges)))


def write_climatology(trained: Path, path: Path, days: int = 366, rows: int = 16, **rename: str) -> xarray.Dataset:
    happened = truth(trained, rows)[0].drop_vars("time")
    day = xarray.DataArray(np.arange(1, days + 1), dims="dayofyear", name="dayofyear")
    hour = xarray.DataArray([0, 6, 12, 18], dims="hour", name="hour")
    usual = (happened + 0.01 * day + 0.1 * hour).assign_coords(dayofyear=day, hour=hour)
    dataset = usual.to_dataset("channel").rename(rename)
    dataset.to_netcdf(path)
    return dataset
