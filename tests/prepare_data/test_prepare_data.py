"""From archives to training files: the same numbers, in bounded memory, all or nothing; and the check of a folder."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.helpers import ERA5, ROOT, clean_environment, fields, losses, run_here, write_data, write_file
from tests.prepare_data.grib import write_messages
from utils.prepare_data import prepare as prepare_data
from utils.prepare_data.archive import Archive, Piece, find
from utils.prepare_data.archive_file import _times
from utils.prepare_data.prepare import main

xarray = pytest.importorskip("xarray", reason="xarray is not installed: pip install -r requirements-prepare.txt")

LATITUDE, LONGITUDE = np.linspace(90, -90, 9), np.arange(16) * 22.5
HOUR = np.timedelta64(1, "h")


def dataset(
    start="2000-12-25", steps=40, step=6, latitude=LATITUDE, longitude=LONGITUDE, levels=(500.0, 850.0), seed=0
):
    """An archive's data set: `t2m`, and `z` at two levels."""
    times = np.datetime64(start, "ns") + np.arange(steps) * step * HOUR
    grid = {"latitude": latitude, "longitude": longitude}
    data = fields(steps, 3, len(latitude), len(longitude), seed)
    axes = ("time", "latitude", "longitude")
    return xarray.Dataset(
        {
            "t2m": (axes, data[:, 0], {"units": "K"}),
            "z": (("time", "level", *axes[1:]), data[:, 1:], {"units": "m**2 s**-2"}),
        },
        {"time": times, "level": ("level", list(levels), {"units": "hPa"}), **grid},
    )


def write(folder, data, name="a.nc"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    data.to_zarr(path, consolidated=False) if path.suffix == ".zarr" else data.to_netcdf(path)
    return str(path)


def read(folder):
    """All arrays of a data set, by file."""
    found = {}
    for path in sorted(folder.rglob("*.*")):
        if path.suffix == ".npy":
            found[path.name] = np.load(path)
        elif path.suffix == ".txt":
            found[path.name] = path.read_text().split()
        else:
            with h5py.File(path) as file:
                found[f"{path.parent.name}/{path.name}"] = {
                    **{name: file[name][:] for name in file},
                    **{name: list(value) for name, value in file["fields"].attrs.items() if name != "DIMENSION_LIST"},
                    "axes": [dim[0].name if len(dim) else "" for dim in file["fields"].dims],
                }
    return found


def same(a, b):
    np.testing.assert_equal(a, b)
    return True


@pytest.mark.skipif(not ERA5.exists(), reason=f"the ERA5 sample is not at {ERA5}")
def test_real_archive_files_give_the_real_training_file(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*(str(path) for path in sorted((ERA5 / "raw").glob("*.nc"))), "--out", str(out)]) == 0
    assert "124 time steps of 2 x 73 x 144 float32" in capsys.readouterr().out
    made = read(out)
    with h5py.File(ERA5 / "train/2025.h5") as file:
        expected = file["fields"][:]
        for name in ("fields", "time", "latitude", "longitude"):
            assert np.array_equal(made["train/2025.h5"][name], file[name][:])
            assert made["train/2025.h5"][name].dtype == file[name].dtype
        for name in ("channel_names", "units"):
            assert made["train/2025.h5"][name] == list(file["fields"].attrs[name])
    wide = expected.astype(np.float64)
    change = np.diff(wide, axis=0)
    for name, value in (
        ("global_means", wide.mean((0, 2, 3))[:, None, None]),
        ("global_stds", wide.std((0, 2, 3))[:, None, None]),
        ("time_means", wide.mean(0)),
        ("time_diff_stds", change.std((0, 2, 3))[:, None, None]),
    ):
        np.testing.assert_allclose(made[f"{name}.npy"], value[None], rtol=2e-6, atol=1e-12)
        assert made[f"{name}.npy"].dtype == np.float32


def test_what_was_made_trains(tmp_path):
    path = write(tmp_path / "raw", dataset(latitude=np.linspace(90, -90, 17), longitude=np.arange(32) * 11.25))
    assert main([path, "--out", str(tmp_path / "data"), "--valid_from", "2001-01-01"]) == 0
    from tests.helpers import tiny_flags

    (tmp_path / "data/tiny.yaml").unlink(missing_ok=True)
    values = losses(run_here(tiny_flags(tmp_path / "data", "--num_iters", "4")))
    assert len(values) == 4 and np.isfinite(values).all()


def test_years_kinds_names_and_units(tmp_path):
    raw = dataset(steps=80)
    path = write(tmp_path / "raw", raw)
    out = tmp_path / "out"
    assert main([path, "--out", str(out), "--valid_from", "2001-01-05", "--test_from", "2001-01-10T12:00"]) == 0
    made = read(out)
    counts = {name: len(file["time"]) for name, file in made.items() if name.endswith(".h5")}
    assert counts == {"train/2000.h5": 28, "train/2001.h5": 16, "valid/2001.h5": 22, "test/2001.h5": 14}
    first = made["train/2000.h5"]
    assert first["channel_names"] == ["t2m", "z500", "z850"] and first["units"] == ["K", "m2 s-2", "m2 s-2"]
    in_time = ("train/2000.h5", "train/2001.h5", "valid/2001.h5", "test/2001.h5")
    everything = np.concatenate([made[name]["fields"] for name in in_time])
    assert np.array_equal(everything[:, 0], raw.t2m.values) and np.array_equal(everything[:, 1:], raw.z.values)
    wide = everything[:44].astype(np.float64)
    np.testing.assert_allclose(made["global_stds.npy"][0, :, 0, 0], wide.std((0, 2, 3)), rtol=1e-6)
    change = np.concatenate([np.diff(wide[:28], axis=0), np.diff(wide[28:], axis=0)])  # none from file to file
    np.testing.assert_allclose(made["time_diff_stds.npy"][0, :, 0, 0], change.std((0, 2, 3)), rtol=1e-6)


def test_any_division_into_files_any_engine_any_orientation_any_block(tmp_path):
    raw = dataset()
    whole = tmp_path / "whole"
    assert main([write(tmp_path / "raw", raw), "--out", str(whole)]) == 0
    expected = read(whole)
    parts = [
        write(tmp_path / "parts", raw[["t2m"]].isel(time=slice(None, 7)).rename(time="valid_time"), "1.nc"),
        write(tmp_path / "parts", raw[["t2m"]].isel(time=slice(7, None)), "2.nc"),
        write(tmp_path / "parts", raw[["z"]].isel(level=1), "3.nc"),
        write(tmp_path / "parts", raw[["z"]].isel(level=slice(0, 1), time=slice(20, None)), "4.zarr"),
        write(tmp_path / "parts", raw[["z"]].isel(level=slice(0, 1), time=slice(None, 20)), "5.nc"),
    ]
    turned = raw.isel(latitude=slice(None, None, -1)).roll(longitude=8, roll_coords=True)
    turned = turned.assign_coords(longitude=(turned.longitude + 180) % 360 - 180).rename(
        latitude="lat", longitude="lon"
    )
    pascal = turned.assign_coords(level=("level", [50000.0, 85000.0], {"units": "Pa"})).rename(level="plev")
    names = ["t2m", "z500", "z850"]
    for name, inputs, more in (
        ("divided", parts, ["--channels", *names]),
        ("turned", [write(tmp_path / "raw", turned, "turned.nc")], []),
        ("pascal", [write(tmp_path / "raw", pascal.transpose("lon", "plev", "time", "lat"), "pascal.nc")], []),
        ("small blocks", [write(tmp_path / "raw", raw, "b.zarr")], ["--memory_gb", "2e-6"]),
    ):
        assert main([*inputs, "--out", str(tmp_path / name), *more]) == 0
        assert same(read(tmp_path / name), expected), name


def test_memory_is_bounded(tmp_path, monkeypatch):
    seen, original = [], Piece.read
    monkeypatch.setattr(Piece, "read", lambda self, a, b, levels: seen.append(b - a) or original(self, a, b, levels))
    frame = 3 * 9 * 16 * 4
    path = write(tmp_path / "raw", dataset())
    assert main([path, "--out", str(tmp_path / "out"), "--memory_gb", str(10 * frame / 1e9)]) == 0
    assert max(seen) == 10 and sum(seen) == 2 * 40  # each value once, both levels together


def test_nothing_is_read_before_it_is_needed(tmp_path):
    """Also where a file holds a single time, or stores longitude first."""
    raw = dataset()
    paths = [write(tmp_path / "raw", raw.isel(time=i).transpose("longitude", ...), f"{i}.nc") for i in range(5)]
    archive = Archive.open(paths)
    pieces = [piece for channel in archive.channels for piece in channel.pieces]
    assert len(pieces) == 15 and not any(piece.values.variable._in_memory for piece in pieces)
    got = dict(archive.read(1, 4))
    np.testing.assert_array_equal(got[0], raw.t2m.values[1:4])
    np.testing.assert_array_equal(got[2], raw.z.values[1:4, 1])
    assert not any(piece.values.variable._in_memory for piece in pieces)


def test_blocks_are_whole_chunks_of_the_archive(tmp_path, monkeypatch, capsys):
    seen, original = [], Piece.read
    monkeypatch.setattr(Piece, "read", lambda self, a, b, levels: seen.append((a, b)) or original(self, a, b, levels))
    path = str(tmp_path / "a.zarr")
    chunks = {"t2m": {"chunks": (12, 9, 16)}, "z": {"chunks": (12, 2, 9, 16)}}
    dataset().to_zarr(path, consolidated=False, encoding=chunks)
    frame = 3 * 9 * 16 * 4
    command = [path, "--channels", "t2m", "z500", "z850", "--out"]
    assert main([*command, str(tmp_path / "out"), "--memory_gb", str(30 * frame / 1e9)]) == 0
    assert seen[::2] == [(0, 24), (24, 28), (28, 40)]  # 28 steps are left of the year 2000
    assert main([*command, str(tmp_path / "small"), "--memory_gb", str(5 * frame / 1e9)]) == 0
    assert "stores up to 12 time steps in one piece" in capsys.readouterr().out


def test_grib(tmp_path):
    """One message a field, as archives have it."""
    raw = dataset(steps=6)
    messages = []
    for i, time in enumerate(raw.time.values):
        when = {"dataDate": int(str(time)[:10].replace("-", "")), "dataTime": 100 * int(str(time)[11:13])}
        for name, level, field in (("2t", 0, raw.t2m[i]), ("z", 500, raw.z[i, 0]), ("z", 850, raw.z[i, 1])):
            kind = {"typeOfLevel": "isobaricInhPa", "level": level} if level else {}
            messages.append((field.values, {**kind, "shortName": name, **when}))
    write_messages(tmp_path / "a.grib", messages, "regular_ll_sfc_grib2")
    command = [str(tmp_path / "a.grib"), "--out", str(tmp_path / "out"), "--channels", "t2m", "z500", "z850"]
    assert main(command) == 0
    made = read(tmp_path / "out")["train/2000.h5"]
    expected = np.concatenate([raw.t2m.values[:, None], raw.z.values], axis=1)
    np.testing.assert_allclose(made["fields"], expected, atol=1e-4)
    assert np.array_equal(made["latitude"], LATITUDE) and made["units"][0] == "K"


def test_channels_by_name_and_level():
    known = [("t2m", None), ("u10", None), ("z", 500.0), ("z", 850.0), ("vo", 850.0)]
    for text, expected in (
        ("t2m", ("t2m", ("t2m", None))),
        ("z500", ("z500", ("z", 500.0))),
        ("z@850", ("z850", ("z", 850.0))),
        ("height=z@500", ("height", ("z", 500.0))),
        ("vo", ("vo", ("vo", 850.0))),
        ("u10m", ("u10m", ("u10", None))),
        ("wind=u10", ("wind", ("u10", None))),
    ):
        assert find(text, known) == expected
    for text, words in (("t850", "they hold"), ("z", "z@500, z@850"), ("z@low", "takes a number"), ("z700", "z@500")):
        with pytest.raises(ValueError, match=words):
            find(text, known)


@pytest.fixture
def interrupted(tmp_path):
    """An archive of three years, and the command that prepares it."""
    path = write(tmp_path / "raw", dataset(start="2000-12-30", steps=1500))
    return [path, "--out", str(tmp_path / "out"), "--memory_gb", "1e-4"]


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGKILL"])
def test_an_interrupted_run_goes_on(tmp_path, interrupted, monkeypatch, capsys, how):
    assert main([*interrupted[:2], str(tmp_path / "plain"), *interrupted[3:]]) == 0
    original, seen = prepare_data.Archive.read, []

    def stop(archive, first, *args):
        if first >= 1000:  # in the second of two years and a bit
            raise KeyboardInterrupt if how == "Ctrl-C" else AssertionError
        return original(archive, first, *args)

    if how == "Ctrl-C":
        monkeypatch.setattr(prepare_data.Archive, "read", stop)
        assert main(interrupted) == 130
        assert "the same command goes on" in capsys.readouterr().err
    else:
        code = (
            "import os, sys; from utils.prepare_data import prepare as prepare_data; read = prepare_data.Archive.read\n"
            "prepare_data.Archive.read = lambda a, i, j: os.kill(os.getpid(), 9) if i >= 1000 else read(a, i, j)\n"
            "prepare_data.main(sys.argv[1:])"
        )
        command = [sys.executable, "-c", code, *interrupted]
        assert subprocess.run(command, cwd=ROOT, env=clean_environment()).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(prepare_data.Archive, "read", lambda a, i, *more: seen.append(i) or original(a, i, *more))
    assert main(interrupted) == 0
    assert "1 file(s) are complete" in capsys.readouterr().out and min(seen) == 8
    assert same(read(tmp_path / "out"), read(tmp_path / "plain"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain", "raw"]


def test_an_unfinished_run_of_other_data_is_left_behind(tmp_path, interrupted, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Archive, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(interrupted) == 130
    with monkeypatch.context() as patch:
        original = prepare_data.Archive.read
        calls = []
        patch.setattr(
            prepare_data.Archive, "read", lambda *a: original(*a) if len(calls) < 9 and not calls.append(0) else stop()
        )

        def stop():
            raise KeyboardInterrupt

        assert main(interrupted) == 130
    assert main([*interrupted, "--channels", "z850"]) == 0
    assert "starting afresh" in capsys.readouterr().out
    assert read(tmp_path / "out")["train/2001.h5"]["channel_names"] == ["z850"]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_unfinished_run_of_an_archive_that_was_corrected_is_left_behind(tmp_path, monkeypatch, capsys, zarr_format):
    """One chunk of a Zarr folder is written again; in format 3 it lies some folders below its array."""
    path = tmp_path / "a.zarr"
    data = dataset(start="2000-12-31", steps=8).drop_vars("z")
    data.to_zarr(path, zarr_format=zarr_format, consolidated=False, encoding={"t2m": {"chunks": (1, 9, 16)}})
    command, original = [str(path), "--out", str(tmp_path / "out")], prepare_data.Archive.read
    for changes in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Archive, "read", lambda *a: original(*a) if a[1] < 4 else interrupt())
            assert main(command) == 130
        if changes:
            import zarr

            zarr.open_group(path, mode="r+")["t2m"][1] = 99.0
        assert main(command) == 0
        told = "starting afresh" if changes else "1 file(s) are complete"
        assert told in capsys.readouterr().out
        assert (read(tmp_path / "out")["train/2000.h5"]["fields"][1] == 99).all() == changes
        shutil.rmtree(tmp_path / "out")


def interrupt() -> None:
    raise KeyboardInterrupt


def test_missing_values_are_counted_across_an_interruption(tmp_path, monkeypatch, capsys):
    raw, original = dataset(steps=1500), prepare_data.Archive.read
    raw.t2m[[3, 1400], 2, 5] = np.nan
    command = [write(tmp_path / "raw", raw), "--out", str(tmp_path / "out"), "--fill", "t2m=271.5"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Archive, "read", lambda a, i, *more: original(a, i, *more) if i < 1000 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main([*command, "--memory_gb", "1e-4"])
    assert main([*command, "--memory_gb", "1e-4"]) == 0
    assert "missing values: 2 of t2m, filled" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["disk", "memory", "storage"])
def test_what_is_no_fault_of_the_data_keeps_what_is_done(tmp_path, interrupted, monkeypatch, capsys, fault):
    original, isel = prepare_data.Archive.read, xarray.DataArray.isel

    def fail(archive, first, *args):
        if first >= 1000 and fault != "storage":
            raise OSError(28, "No space left on device") if fault == "disk" else MemoryError
        return original(archive, first, *args)

    class Stale:
        @property
        def values(self):
            raise OSError(errno.ESTALE, "Stale file handle")

    def slow(values, at):
        return Stale() if fault == "storage" and at["time"].start >= 1000 else isel(values, at)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Archive, "read", fail)
        patch.setattr(xarray.DataArray, "isel", slow)
        patch.setattr("utils.files.time.sleep", lambda seconds: None)
        assert main(interrupted) == 2
    error = capsys.readouterr().err
    assert "the same command goes on" in error and error.count("\n") == 1
    told = {"memory": "lower --memory_gb", "disk": "No space left", "storage": "Stale file handle): see to its storage"}
    assert told[fault] in error
    assert main(interrupted) == 0 and "1 file(s) are complete" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["a file that is gone", "damaged sums", "a note of another kind", "a pipe"])
@pytest.mark.timeout(120)
def test_what_is_gone_or_damaged_is_made_anew(tmp_path, interrupted, monkeypatch, capsys, what):
    original = prepare_data.Archive.read
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Archive, "read", lambda a, i, *more: stop() if i >= 1000 else original(a, i, *more))

        def stop():
            raise KeyboardInterrupt

        assert main(interrupted) == 130
    unfinished = tmp_path / ".out-unfinished"
    if what == "a file that is gone":
        (unfinished / "new/train/2000.h5").unlink()
    elif what == "a note of another kind":
        (unfinished / "state.json").write_text("[]")
    elif what == "a pipe":
        (unfinished / "state.json").unlink()
        os.mkfifo(unfinished / "state.json")
    else:
        (sums,) = unfinished.glob("sums-*.npz")
        content = bytearray(sums.read_bytes())
        content[len(content) // 3] ^= 1
        sums.write_bytes(content)
    assert main(interrupted) == 0
    assert "is damaged" in capsys.readouterr().out and len(list((tmp_path / "out/train").iterdir())) == 3


def test_two_runs_do_not_write_the_same_folder(tmp_path, interrupted, capsys):
    (tmp_path / ".out-unfinished").mkdir()
    hold = "import sys, pathlib, utils.files as f\nheld = f.lock(pathlib.Path(sys.argv[1]))\nprint(flush=True), input()"
    command = [sys.executable, "-c", hold, str(tmp_path / ".out-unfinished/lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        other.stdout.readline()
        assert main(interrupted) == 2
        other.communicate(b"\n")
    assert "another run is writing" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(interrupted) == 0


def test_a_replacement_that_was_stopped_between_its_renames_loses_nothing(tmp_path, interrupted):
    assert main(interrupted) == 0
    before = read(tmp_path / "out")
    (tmp_path / ".out-unfinished").mkdir()
    (tmp_path / "out").rename(tmp_path / ".out-unfinished/old")
    assert main([*interrupted, "--overwrite", "--channels", "nonsense"]) == 2
    assert not (tmp_path / "out").exists()  # nothing was begun
    assert main(interrupted) == 2  # it is there again, and stays
    assert same(read(tmp_path / "out"), before)
    assert main([*interrupted, "--overwrite", "--channels", "z850"]) == 0
    assert read(tmp_path / "out")["train/2001.h5"]["channel_names"] == ["z850"]


def test_nothing_of_others_is_replaced(tmp_path, monkeypatch, capsys):
    """A folder that appears meanwhile stays; so does the old one where the new one cannot take its place."""
    path, out, original = write(tmp_path / "raw", dataset()), tmp_path / "out", prepare_data.Archive.read

    def read_and_make(*args):
        (out / "precious").mkdir(parents=True, exist_ok=True)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Archive, "read", read_and_make)
        assert main([path, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err and (out / "precious").exists()
    shutil.rmtree(out)
    assert main([path, "--out", str(out)]) == 0
    before, rename = read(out), Path.rename

    def fail(self, target):
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        assert main([path, "--out", str(out), "--channels", "t2m", "--overwrite"]) == 2
    assert same(read(out), before)


def test_forecasts_have_the_time_that_they_are_valid_at(tmp_path):
    lead = np.timedelta64(6, "h").astype("timedelta64[ns]")
    raw = dataset(steps=10)[["t2m"]]
    for name, data in (
        ("scalar", raw.assign_coords(step=lead)),
        ("axis", raw.expand_dims(prediction_timedelta=[lead])),
        ("valid", raw.assign_coords(valid_time=("time", raw.time.values + lead), step=lead)),
    ):
        archive = Archive.open([write(tmp_path / "raw", data, f"{name}.nc")])
        assert archive.times[0] == np.datetime64("2000-12-25T06").astype("datetime64[s]").astype(int), name


@pytest.mark.parametrize("unit", ["D", "s", "ns"])
@pytest.mark.parametrize("lead", [None, "s", "ns"])
def test_times_after_2262(unit, lead):
    """Zarr stores them in any unit. In ns, which other libraries count, the year 2300 is 1715."""
    first = np.datetime64("2260-01-01" if unit == "ns" else "2300-01-01")
    raw = dataset(steps=3)[["t2m"]]
    raw = raw.assign_coords(time=(first + np.arange(3)).astype(f"datetime64[{unit}]"))
    if lead:
        raw = raw.assign_coords(step=np.timedelta64(6, "h").astype(f"timedelta64[{lead}]"))
    times, _ = _times("x.zarr", raw.t2m)
    assert times[0] == first.astype("datetime64[s]").astype(int) + 6 * 3600 * bool(lead)
    assert set(np.diff(times)) == {86400}


def test_names_that_look_like_a_request(tmp_path):
    raw = dataset(steps=2)[["t2m"]].rename(t2m="t2m=msl")
    raw["msl"] = raw["t2m=msl"] + 1
    archive = Archive.open([write(tmp_path, raw, "x.nc")])
    (first, second), names = [values for _, values in archive.read(0, 2)], [c.name for c in archive.channels]
    assert names == ["msl", "t2m=msl"]
    np.testing.assert_array_equal(first, second + 1)


def test_angles_in_radians(tmp_path):
    raw = dataset(steps=2)[["t2m"]]
    raw = raw.assign_coords(latitude=("latitude", np.deg2rad(raw.latitude.values), {"units": "radians"}))
    with pytest.raises(ValueError, match="has latitude in radians: convert it to degrees first"):
        Archive.open([write(tmp_path, raw, "x.nc")])


@pytest.mark.timeout(20)
def test_a_name_that_is_a_very_long_number():
    with pytest.raises(ValueError, match="nothing in the files for channel"):
        find("1" * 10**5 + "x", [])


def test_longitudes_are_rolled_only_round_the_globe(tmp_path):
    fine = dataset(steps=2, longitude=np.arange(-180, 180, 0.1), latitude=[10.0, 0.0])
    archive = Archive.open([write(tmp_path / "raw", fine, "fine.nc")])
    np.testing.assert_allclose(archive.longitude, np.arange(3600) / 10, atol=1e-4)
    np.testing.assert_array_equal(dict(archive.read(0, 2))[0], np.roll(fine.t2m.values, -1800, axis=-1))
    part = dataset(steps=2, longitude=np.array([-10.0, 0, 10, 20]))
    archive = Archive.open([write(tmp_path / "raw", part, "part.nc")])
    assert archive.longitude.tolist() == [-10, 0, 10, 20]
    np.testing.assert_array_equal(dict(archive.read(0, 2))[0], part.t2m.values)


@pytest.mark.parametrize(
    "given, rising",
    [
        ([350.0, 355, 0, 5], [-10, -5, 0, 5]), ([170.0, 175, -180, -175], [170, 175, 180, 185]),
        ([340.0, 350, 360], [340, 350, 360]), ([350.0, 0, 10], [-10, 0, 10]),
    ],
)  # fmt: skip
def test_the_columns_of_a_region_rise(tmp_path, given, rising):
    raw = dataset(steps=2, longitude=np.array(given))
    archive = Archive.open([write(tmp_path / "raw", raw)])
    assert archive.longitude.tolist() == rising
    np.testing.assert_array_equal(dict(archive.read(0, 2))[0], raw.t2m.values)


@pytest.mark.parametrize(
    "given",
    [
        np.arange(-180, 180, 1 / 3), np.arange(-180, 180, 0.703125), np.arange(-180, 180, 1.2, dtype="f4"),
        np.append(np.arange(180.0), np.arange(-180.0, 0.0)), np.arange(-180, 180, 1 / 3) - 1e-5,
    ],
)  # fmt: skip
def test_columns_are_in_order_from_0_east_on_any_grid(tmp_path, given):
    raw = dataset(steps=2, longitude=given, latitude=[10.0, 0.0])
    archive = Archive.open([write(tmp_path / "raw", raw)])
    np.testing.assert_allclose(archive.longitude, np.arange(len(given)) * 360 / len(given), atol=2e-3)
    first = int(abs(given).argmin())
    np.testing.assert_array_equal(dict(archive.read(0, 2))[0], np.roll(raw.t2m.values, -first, axis=-1))


def test_files_in_either_order_of_rows_go_together(tmp_path):
    raw = dataset()
    north = write(tmp_path / "raw", raw.isel(time=slice(None, 20)), "north.nc")
    south = write(tmp_path / "raw", raw.isel(time=slice(20, None), latitude=slice(None, None, -1)), "south.nc")
    got = dict(Archive.open([south, north]).read(0, 40))
    np.testing.assert_array_equal(got[1], raw.z.values[:, 0])


def test_bounds_and_variables_that_nobody_asked_for_are_no_hindrance(tmp_path):
    raw = dataset().assign(
        time_bnds=(("time", "bnds"), np.zeros((40, 2))), mask=(("latitude", "longitude"), np.ones((9, 16)))
    )
    raw.time.attrs["bounds"] = "time_bnds"
    assert [channel.name for channel in Archive.open([write(tmp_path / "raw", raw)]).channels] == [
        "t2m",
        "z500",
        "z850",
    ]
    raw["spread"] = raw.t2m.expand_dims(member=3)
    path = write(tmp_path / "raw", raw, "b.nc")
    assert len(Archive.open([path], ["t2m", "z500"]).channels) == 2
    with pytest.raises(ValueError, match="3 values along 'member'"):
        Archive.open([path], ["spread"])


def test_missing_values_are_refused_or_filled_and_counted(tmp_path, capsys):
    raw = dataset()
    raw.t2m[3, 2, 5] = np.nan
    raw.t2m[9, 2, 5] = np.inf
    path = write(tmp_path / "raw", raw)
    out = ["--out", str(tmp_path / "out")]
    assert main([path, *out]) == 2
    error = capsys.readouterr().err
    assert "t2m has 2 missing or infinite values" in error and "2000-12-25T18:00, 45N 112.5E" in error
    assert "--fill t2m=VALUE" in error and not (tmp_path / "out").exists()
    assert main([path, *out, "--fill", "t2m=271.5"]) == 0
    assert "missing values: 2 of t2m, filled" in capsys.readouterr().out
    assert (read(tmp_path / "out")["train/2000.h5"]["fields"][[3, 9], 0, 2, 5] == 271.5).all()


@pytest.mark.parametrize("value", [1e15, 9.999e20, -9.96921e36])
def test_values_that_archives_fill_with_are_missing(tmp_path, capsys, value):
    """Also where no attribute says so."""
    raw = dataset()
    raw.t2m[3, 2, 5] = value
    path = write(tmp_path / "raw", raw.drop_encoding())
    assert main([path, "--out", str(tmp_path / "out")]) == 2
    assert f"t2m has 1 missing or infinite values in a block of 28 steps, the first, {value:g}, at" in (
        capsys.readouterr().err
    )
    write_data(tmp_path / "made", names=["a", "b", "c"])
    with h5py.File(tmp_path / "made/train/2002.h5", "r+") as file:
        file["fields"][3, 1, 2, 5] = value
    assert main(["check", str(tmp_path / "made")]) == 1
    assert "2002.h5, fields[3, 1, 2, 5] (b) is " in capsys.readouterr().out
    assert main(["stats", str(tmp_path / "made"), "--overwrite"]) == 2
    assert "2002.h5: frame 3 lacks values, or has huge ones: mend the file first" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_float16_has_no_room_for_what_archives_fill_with(tmp_path, capsys):
    """The look for it warns of nothing."""
    write_data(tmp_path, names=["a", "b", "c"], dtype="f2")
    assert main(["check", str(tmp_path)]) == 0 and "No fault found" in capsys.readouterr().out


def test_gaps_are_refused_or_allowed(tmp_path, capsys):
    raw = dataset().isel(time=[*range(5), *range(8, 20)])
    path = write(tmp_path / "raw", raw)
    assert main([path, "--out", str(tmp_path / "out")]) == 2
    assert "time has 1 gap(s), the first from 2000-12-26T00:00 to 2000-12-27T00:00" in capsys.readouterr().err
    assert main([path, "--out", str(tmp_path / "out"), "--allow_gaps"]) == 0
    made = read(tmp_path / "out")
    wide = made["train/2000.h5"]["fields"].astype(np.float64)
    change = np.delete(np.diff(wide, axis=0), 4, axis=0)
    np.testing.assert_allclose(made["time_diff_stds.npy"][0, :, 0, 0], change.std((0, 2, 3)), rtol=1e-6)


def bad_inputs():
    """Name, what to do to the raw data, more flags, words of the error."""
    swap = lambda raw: raw.isel(time=[0, 2, 1, *range(3, 40)])  # noqa: E731
    shifted = lambda raw: raw.assign_coords(time=raw.time + np.where(np.arange(40) == 7, HOUR, 0 * HOUR))  # noqa: E731
    return [
        ("time goes back", swap, [], ["2000-12-25T12:00 is followed by 2000-12-25T06:00", "time must rise"]),
        ("irregular time", shifted, [], ["time is irregular", "2000-12-26T19:00"]),
        ("one time", lambda raw: raw.isel(time=[0]), [], ["give two or more"]),
        ("no time", lambda raw: raw.isel(time=0, drop=True), [], ["hold no channel"]),
        ("missing variable", lambda raw: raw[["z"]], ["--channels", "t2m"], ["'t2m': they hold z@500, z@850"]),
        ("missing level", lambda raw: raw, ["--channels", "z700"], ["'z700'", "z@500"]),
        ("twice", lambda raw: raw, ["--channels", "z500", "z500"], ["named twice"]),
        ("members", lambda raw: raw.expand_dims(member=3), [], ["3 values along 'member': select one"]),
        ("no grid", lambda raw: raw.rename(latitude="y").drop_vars("y"), [], ["no latitude and longitude", "regrid"]),
        ("levels without values", lambda raw: raw.drop_vars("level"), [], ["2 values along 'level': select"]),
        ("noleap", lambda raw: raw.convert_calendar("noleap"), [], ["calendar noleap", "convert_calendar"]),
        ("huge fill value", lambda raw: raw.where(raw.t2m < 5, 9.97e36), [], ["missing or infinite", "--fill t2m"]),
        ("beyond float32", lambda raw: raw.astype(float) * 1e38, [], ["missing or infinite"]),
        ("float16 zeros", lambda raw: raw * 1e-9, ["--dtype", "float16"], ["below 6e-8", "--dtype float32"]),
        ("wind", lambda raw: raw.rename(z="u").assign_coords(level=[10.0, 100.0]), ["--channels", "u10"], ["u@10"]),
        ("half a globe twice", lambda raw: raw.assign_coords(longitude=np.arange(16) * 45.0), [], ["no globe"]),
        ("float16", lambda raw: raw * 1e5, ["--dtype", "float16"], ["float16 ends at 65504", "--dtype float32"]),
        ("a date", lambda raw: raw, ["--valid_from", "soon"], ["--valid_from is 'soon'", "2018-01-01"]),
        ("dates", lambda raw: raw, ["--valid_from", "2001-01-02", "--test_from", "2001-01-01"], ["comes after"]),
        (
            "all for validation",
            lambda raw: raw,
            ["--valid_from", "2000-01-01"],
            ["0 time step(s) are left for training"],
        ),
        (
            "none for validation",
            lambda raw: raw,
            ["--valid_from", "2030-01-01"],
            ["0 time step(s) are left for validation, of 2000-12-25", "take an earlier --valid_from\n"],
        ),
        (
            "none between the dates",
            lambda raw: raw,
            ["--valid_from", "2001-01-02", "--test_from", "2001-01-02"],
            ["0 time step(s) are left for validation", "take an earlier --valid_from, or a later --test_from\n"],
        ),
        (
            "none for tests",
            lambda raw: raw,
            ["--valid_from", "2000-12-28", "--test_from", "2030-01-01"],
            ["left for tests", "an earlier --test_from\n"],
        ),
        ("fill", lambda raw: raw, ["--fill", "sst=1"], ["--fill names 'sst'", "t2m, z500, z850"]),
        ("fill value", lambda raw: raw, ["--fill", "t2m=cold"], ["NAME=VALUE"]),
        ("fill with nothing", lambda raw: raw, ["--fill", "t2m=nan"], ["NAME=VALUE"]),
        ("memory", lambda raw: raw, ["--memory_gb", "0"], ["more than 0"]),
        (
            "a time step beyond the memory",
            lambda raw: raw,
            ["--memory_gb", "1e-6"],
            ["one time step of 3 x 9 x 16 takes 1.7e-06 GB, and --memory_gb is 1e-06: raise it, or take fewer"],
        ),
    ]


@pytest.mark.parametrize("name, change, flags, words", bad_inputs(), ids=[case[0] for case in bad_inputs()])
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, name, change, flags, words):
    path = write(tmp_path / "raw", change(dataset()))
    assert main([path, "--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_files_that_do_not_fit_together(tmp_path, capsys):
    a = write(tmp_path / "raw", dataset()[["t2m"]], "a.nc")
    coarse = write(tmp_path / "raw", dataset(latitude=np.linspace(90, -90, 5))[["z"]], "coarse.nc")
    moved = write(tmp_path / "raw", dataset(longitude=LONGITUDE + 1)[["z"]], "moved.nc")
    later = write(tmp_path / "raw", dataset(start="2000-12-26")[["z"]], "later.nc")
    celsius = dataset(start="2001-01-04")
    celsius.t2m.attrs["units"] = "degC"
    celsius = write(tmp_path / "raw", celsius, "celsius.nc")
    ones = [
        write(
            tmp_path / "raw", dataset(start=start, levels=level).isel(level=0, drop=True).expand_dims(p=level[:1]), name
        )
        for start, level, name in (("2000-12-25", (500, 850), "p500.nc"), ("2001-01-04", (850, 500), "p850.nc"))
    ]
    twice = write(tmp_path / "raw", dataset().isel(time=[0, 1, 1, 2]), "twice.nc")
    text = tmp_path / "raw/text.nc"
    text.write_text("no data")
    for inputs, words in (
        (
            [a, coarse],
            ["coarse.nc has the latitude 90 to -90 (5)", "(9): bring them to one regular grid first", "regrid"],
        ),
        ([a, moved], ["moved.nc has the longitude 1 to 338.5"]),
        ([a, later], ["has 2000-12-25T00:00, and z500 has not: give all channels"]),
        ([a, a], ["is followed by", "a.nc): time must rise", "leave out what is there twice"]),
        ([twice], ["06:00 is followed by 2000-12-25T06:00", "time must rise"]),
        ([a, celsius], ["t2m is in K in", "and in degC in", "to one unit"]),
        (ones, ["stands for {'p': 500} in", "for {'p': 850}", "files of one kind"]),
        ([str(text)], ["cannot read", "text.nc as NetCDF, Zarr or GRIB"]),
        (["nowhere.nc"], ["no file 'nowhere.nc'"]),
    ):
        assert main([*inputs, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words), error
        assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_an_output_that_exists_or_cannot_be_written(tmp_path, capsys, monkeypatch):
    path, out = write(tmp_path / "raw", dataset()), tmp_path / "out"
    assert main([path, "--out", str(out)]) == 0
    before = read(out)
    assert main([path, "--out", str(out), "--channels", "t2m"]) == 2
    assert "exists already; add --overwrite" in capsys.readouterr().err and same(read(out), before)
    assert main([path, "--out", str(out), "--channels", "t2m", "--overwrite"]) == 0
    assert read(out)["train/2000.h5"]["channel_names"] == ["t2m"]
    (out / "notes.yaml").write_text("mine: {}\n")
    assert main([path, "--out", str(out), "--overwrite"]) == 2 and "notes.yaml" in capsys.readouterr().err
    (out / "notes.yaml").unlink()
    again = [path, "--out", str(out), "--overwrite", "--valid_from=2001-01-02"]
    assert main([*again, "--section=mine"]) == 0 and (out / "mine.yaml").exists()
    assert main(again) == 0 and not (out / "mine.yaml").exists()
    (tmp_path / "file").write_text("")
    assert main([path, "--out", str(tmp_path / "file/below")]) == 2
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 10))
    assert main([path, "--out", str(tmp_path / "new")]) == 2
    assert "fewer files or channels, or another --out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "raw"]


def test_without_xarray_the_remedy_is_named(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "raw", dataset())
    monkeypatch.setitem(sys.modules, "xarray", None)
    assert main([path, "--out", str(tmp_path / "out")]) == 2
    assert "pip install -r requirements-prepare.txt" in capsys.readouterr().err


def test_check_tells_what_is_there(tmp_path, capsys):
    write_data(tmp_path, names=["a", "b", "c"])
    with h5py.File(tmp_path / "train/2001.h5", "r+") as file:
        file["time"][5:] += 6 * 3600
    made = read(tmp_path / "train")
    low = min(file["fields"][:, 1].min() for file in made.values())
    assert main(["check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "train: 2 file(s), 23 time steps of 3 x 17 x 32 float32" in out and "No fault found." in out
    assert "gap from 1970-01-02 00:00 to 1970-01-02 12:00" in out and "a step is 6 h" in out
    assert "b          m s-1" in out and f"{low:12.5g}" in out
    assert "valid: 1 file(s), 8 time steps" in out


@pytest.mark.parametrize("fault", ["nan", "short", "statistics", "means", "time", "constant", "channels", "no valid"])
def test_check_finds_faults(tmp_path, capsys, fault):
    write_data(tmp_path, names=["a", "b", "c"])
    if fault == "nan":
        with h5py.File(tmp_path / "train/2002.h5", "r+") as file:
            file["fields"][3, 1, 2, 5] = np.nan
        word = "2002.h5, fields[3, 1, 2, 5] (b) is nan"
    elif fault == "short":
        os.truncate(tmp_path / "valid/2003.h5", 30_000)
        word = "2003.h5"
    elif fault == "statistics":
        np.save(tmp_path / "stats/global_means.npy", np.zeros((1, 2, 1, 1)))
        word = "global_means.npy has the shape [1, 2, 1, 1]: global_means_path must be [1, 3, 1, 1]"
    elif fault == "means":
        np.save(tmp_path / "stats/global_means.npy", np.full((1, 3, 1, 1), 9))
        word = "global_means.npy has 9 for channel 0"
    elif fault == "time":
        with h5py.File(tmp_path / "train/2002.h5", "r+") as file:
            file["time"][5] = file["time"][2]
        word = "2002.h5 has times that do not rise at step 5: put its time steps in order"
    elif fault == "constant":
        with h5py.File(tmp_path / "valid/2003.h5", "r+") as file:
            file["fields"][:, 1] = 4
        word = "b is 4 everywhere"
    elif fault == "no valid":
        shutil.rmtree(tmp_path / "valid")
        word = "has no valid/, and training validates: make it anew with --valid_from DATE, or"
    else:
        write_file(tmp_path / "valid/2003.h5", fields(8, 3, 17, 32), names=["a", "b", "d"])
        word = "the parts of a data set must agree"
    code = main(["check", str(tmp_path)])
    printed = capsys.readouterr()
    assert code in (1, 2) and word in printed.out + printed.err
    assert main(["check", str(tmp_path / "train")]) == {"nan": 1, "time": 2}.get(fault, 0)


def masks(time: bool = False, **grid) -> "xarray.Dataset":
    """A land-sea mask without a time, and the ground's height on one level or, with `time`, of two dates."""
    data = dataset(steps=2, **grid)
    lsm = data.t2m.isel(time=0, drop=True).rename("lsm")
    zs = data.z.isel(level=0, drop=True)
    return xarray.Dataset({"lsm": lsm, "zs": zs if time else zs.isel(time=0, drop=True)})


@pytest.mark.parametrize(
    "time, names", [(False, ["height=zs", "lsm"]), (True, ["height=zs", "lsm"]), (True, ["zs", "lsm"])]
)
def test_constants_go_to_a_file_of_their_own(tmp_path, time, names):
    """Without a time; of what has several the first counts, and it is no channel then. The rest is as without them."""
    inputs = [write(tmp_path / "raw", dataset(), "a.nc"), write(tmp_path / "raw", masks(time), "masks.nc")]
    plain, out = tmp_path / "plain", tmp_path / "out"
    assert main([inputs[0], "--out", str(plain)]) == 0
    assert main([*inputs, "--out", str(out), "--constants", *names]) == 0
    found, expected, stored = read(out), read(plain), masks(time)
    constants = found.pop("stats/constants.h5")
    assert same(found, expected)
    assert constants["channel_names"] == [name.partition("=")[0] for name in names] and "time" not in constants
    zs = stored.zs.isel(time=0) if time else stored.zs
    np.testing.assert_array_equal(constants["fields"], np.stack([zs.values, stored.lsm.values])[None])
    np.testing.assert_array_equal(constants["latitude"], LATITUDE.astype(np.float32))


def test_constants_that_are_wrong_are_refused(tmp_path, capsys):
    raw = tmp_path / "raw"
    state = write(raw, dataset(), "a.nc")

    def refused(data, *more: str) -> str:
        path = write(raw, data, f"{len(list(raw.iterdir()))}.nc")
        assert main([state, path, "--out", str(tmp_path / "out"), "--constants", "lsm", *more]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    holes = masks()
    holes.lsm[3, 4] = np.nan
    assert "lsm has 1 missing or infinite values in all, the first, nan, at 22.5N 90E" in refused(holes)
    assert "lie on different grids" in refused(masks(latitude=np.linspace(80, -80, 9)))
    assert "nothing in the files for channel 'lsm'" in refused(masks().drop_vars("lsm"))
    path = write(raw, holes, "holes.nc")
    assert main([state, path, "--out", str(tmp_path / "out"), "--constants", "lsm", "--fill", "lsm=0.5"]) == 0
    assert "1 of lsm, filled" in (said := capsys.readouterr().out) and "constants: lsm" in said
    with h5py.File(tmp_path / "out/stats/constants.h5") as file:
        assert file["fields"][0, 0, 3, 4] == 0.5
