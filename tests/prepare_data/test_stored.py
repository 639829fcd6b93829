"""Archives of strangers (NetCDF, Zarr, GRIB): they have what they claim, and nothing in them runs code."""

import contextlib
import gzip
import json
import os
import pickle
from pathlib import Path

import h5py
import netCDF4
import numpy as np
import pytest
import xarray
import zarr

from tests.helpers import Evil, fields, write_file
from tests.prepare_data.grib import write_messages
from utils.prepare_data import stored
from utils.prepare_data.archive import Archive
from utils.prepare_data.archive_file import open_archive, pieces_in
from utils.prepare_data.prepare import main as prepare


def test_a_zarr_folder_runs_nothing(tmp_path):
    """numcodecs has a codec that unpickles, and refuses to: older versions did not, so requirements name this one."""
    axes = {"latitude": np.linspace(90, -90, 8), "longitude": np.arange(16.0)}
    dataset = xarray.Dataset({"t": (tuple(axes), np.zeros((8, 16), "f4"))}, axes)
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=2, consolidated=False)
    folder = tmp_path / "a.zarr/latitude"
    described = json.loads((folder / ".zarray").read_text())
    evil = {"filters": [{"id": "vlen-utf8"}], "compressor": {"id": "pickle", "protocol": 4}}
    (folder / ".zarray").write_text(json.dumps(described | evil | {"dtype": "|O", "fill_value": ""}))
    (folder / "0").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(ValueError, match="cannot read .* as NetCDF, Zarr or GRIB .*unpickling"):
        open_archive(str(tmp_path / "a.zarr"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["h5", "zarr", "nc"])
def test_an_axis_that_no_archive_has(tmp_path, monkeypatch, kind):
    """xarray would load it when it opens the file."""
    path = tmp_path / f"a.{kind}"
    if kind == "h5":
        with h5py.File(path, "w") as file:
            file["time"] = np.zeros((11, 2))
            file["group/long"] = np.zeros(12)  # which nobody reads
    elif kind == "nc":
        with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
            file.createDimension("time", 11)
            file.createVariable("time", "f8", ("time",))
    else:
        zarr.create_array(path / "time", shape=(11,), dtype="f8")
        zarr.open_group(path, mode="a")
    with monkeypatch.context() as change:
        change.setattr(stored, "LARGEST_AXIS", 10)
        with pytest.raises(ValueError, match="has .*time with 11 values: an axis has at most 10"):
            open_archive(str(path))
        change.setattr(stored, "LARGEST_AXIS", 11)
        stored.check_archive(str(path))
    if kind != "h5":
        monkeypatch.setattr(stored, "LARGEST_AXES", 80)
        with pytest.raises(ValueError, match=r"has axes of 0\.0 GB: all together have at most"):
            open_archive(str(path))


def globe(steps: int = 10) -> xarray.Dataset:
    """Days of one variable of ones."""
    axes = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(steps) * np.timedelta64(24, "h"),
        "latitude": np.linspace(90, -90, 9),
        "longitude": np.arange(16) * 22.5,
    }
    return xarray.Dataset({"t2m": (tuple(axes), np.ones((steps, 9, 16), "f4"))}, axes)


def write_grib(path: Path, messages: int = 3, edition: int = 2, **keys: int) -> None:
    """Write days of one variable of random values, with other keys in the last message."""
    days = [{"shortName": "2t", "dataDate": 20000100 + day} for day in range(1, messages + 1)]
    days[-1] |= keys
    values = (np.random.default_rng(day).random((9, 16)) for day in range(1, messages + 1))
    write_messages(path, zip(values, days), f"regular_ll_sfc_grib{edition}")


def test_the_index_of_a_grib_file_runs_nothing(tmp_path):
    """cfgrib keeps a pickle beside a file, and loads it."""
    path = tmp_path / "a.grib"
    write_grib(path)
    assert [*open_archive(str(path))[0].t2m.shape] == [3, 9, 16]
    assert [*tmp_path.iterdir()] == [path]
    import cfgrib

    cfgrib.open_datasets(str(path))
    indices = [*tmp_path.glob("*.idx")]
    for index in indices:
        index.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    assert indices and [*open_archive(str(path))[0].t2m.shape] == [3, 9, 16]
    assert not (tmp_path / "ran").exists()
    with contextlib.suppress(Exception):  # what is loaded is no index
        cfgrib.open_datasets(str(path))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_grib_file_that_ends_within_a_message(tmp_path, cut, edition):
    """cfgrib would leave that message out."""
    write_grib(tmp_path / "a.grib", edition=edition)
    values = open_archive(str(tmp_path / "a.grib"))[0].t2m.values
    expected = np.stack([np.random.default_rng(day).random((9, 16)) for day in (1, 2, 3)])
    np.testing.assert_allclose(values, expected, atol=1e-4)
    os.truncate(tmp_path / "a.grib", os.path.getsize(tmp_path / "a.grib") - cut)
    with pytest.raises(ValueError, match=r"a\.grib ends within a message: copy it again"):
        open_archive(str(tmp_path / "a.grib"))


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("message", [0, 1, 2])
@pytest.mark.parametrize("padding", [0, 8])
def test_a_message_whose_mark_is_damaged(tmp_path, message, edition, padding):
    """cfgrib would leave it out, and a forecast from the last date would start a day before."""
    path = tmp_path / "a.grib"
    write_grib(path, edition=edition)
    content = path.read_bytes().split(b"7777GRIB")
    content = (b"7777" + bytes(padding) + b"GRIB").join(content) + bytes(padding)
    path.write_bytes(content)
    assert [*open_archive(str(path))[0].t2m.shape] == [3, 9, 16]
    at = -1
    for _ in range(message + 1):
        at = content.index(b"GRIB", at + 1)
    path.write_bytes(content[:at] + b"GRIC" + content[at + 4 :])
    with pytest.raises(ValueError, match=r"a\.grib has a message whose beginning is damaged, at byte [\d,]+: copy it"):
        open_archive(str(path))


@pytest.mark.parametrize("kind", ["classic", "GRIB"])
def test_a_file_of_two_formats(tmp_path, monkeypatch, kind):
    """It is looked at by the format in which it is read: HDF5 may begin after what is something else."""
    if kind == "classic":
        path = tmp_path / "a.nc"
        write_classic(path, CLASSIC[0], False, "f4")
        path.write_bytes(path.read_bytes()[:-8])
    else:
        path = tmp_path / "a.grib"
        write_grib(path)
        os.truncate(path, os.path.getsize(path) - 8)
    start = 512
    while start < os.path.getsize(path):
        start *= 2
    with path.open("ab") as file:
        file.write(bytes(start - os.path.getsize(path)))
    (tmp_path / "empty").touch()
    with h5py.File(tmp_path / "b.h5", "w", userblock_size=start):
        pass
    with path.open("ab") as file:
        file.write((tmp_path / "b.h5").read_bytes()[start:])
    assert h5py.is_hdf5(path)
    monkeypatch.setattr(stored, "check_links", lambda file: pytest.fail("it was looked at as HDF5"))
    try:
        open_archive(str(path))
    except ValueError as error:
        assert path.name in str(error)


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "i4", "f4"])
def test_steps_that_other_variables_have(tmp_path, kind):
    """NetCDF gives out its own fill value for them: of whole numbers a value like any other."""
    path = str(tmp_path / "a.nc")
    globe().to_netcdf(path, unlimited_dims=["time"])
    with netCDF4.Dataset(path, "a") as file:
        packed = file.createVariable("x", kind, file["t2m"].dimensions, chunksizes=(1, 9, 16))
        packed.setncatts({"scale_factor": 0.01, "add_offset": 280.0})
        packed.set_auto_maskandscale(False)
        packed[:8] = np.ones((8, 9, 16), kind)
    assert Archive.open([path], ["t2m"]).channels
    with pytest.raises(ValueError, match=r"a\.nc holds \[8, 9, 16\] of \[10, 9, 16\] values of x: copy it again"):
        Archive.open([path], ["x"])


def test_levels_that_change_from_place_to_place(tmp_path):
    """As heights do, where the ground is a level. Nobody asks for all of them before it is said."""
    data = globe()
    data["level"] = data.t2m.dims, np.ones(data.t2m.shape)
    data.set_coords("level").to_netcdf(tmp_path / "a.nc")
    with pytest.raises(ValueError, match="t2m has levels that change along time, latitude, longitude: bring them to"):
        Archive.open([str(tmp_path / "a.nc")])


@pytest.mark.parametrize(
    "units, named", [("millibars", "z@500"), ("Pa", "z@5"), (None, "z@500"), ("m", ""), ("level", "")]
)
def test_levels_that_are_no_pressures(tmp_path, units, named):
    """Depths, and levels of a model: `vo5` would be the vorticity at 5 hPa."""
    data = globe().rename(t2m="z").expand_dims(lev=[500.0])
    if units:
        data.lev.attrs["units"] = units
    data.to_netcdf(tmp_path / "a.nc")
    if named:
        assert [f"{name}@{level:g}" for name, level in Archive.open([str(tmp_path / "a.nc")]).keys] == [named]
        return
    with pytest.raises(
        ValueError, match=f"z has levels in '{units}', and channels are named after pressures in hPa: se"
    ):
        Archive.open([str(tmp_path / "a.nc")])
    data.isel(lev=0, drop=True).to_netcdf(tmp_path / "a.nc")
    assert Archive.open([str(tmp_path / "a.nc")], ["z"]).channels


def test_a_variable_named_level(tmp_path):
    """Beside levels, which are renamed to that."""
    axes = globe().t2m.dims
    data = globe().expand_dims(plev=[500.0])
    data["level"] = axes, np.full(data.t2m.shape[1:], 2, "f4")
    data.to_netcdf(tmp_path / "a.nc")
    found = Archive.open([str(tmp_path / "a.nc")], ["level"])
    assert next(found.read(0, 10))[1].min() == 2


@pytest.mark.parametrize("text", ["u\x1b[2J", "u\nOK: no faults"])
def test_names_and_units_that_write_to_a_terminal(tmp_path, capsys, text):
    data = globe()
    data.t2m.attrs["units"] = text
    data.to_netcdf(tmp_path / "a.nc")
    assert prepare([str(tmp_path / "a.nc"), "--out", str(tmp_path / "out")]) == 2
    write_file(tmp_path / "train/2000.h5", fields(4, 2, 9, 16), names=[text, "v"])
    assert prepare(["check", str(tmp_path / "train")]) == 2
    said = capsys.readouterr()
    assert "OK: no faults" not in said.out.splitlines() and "\x1b" not in said.out + said.err
    assert len(said.err.splitlines()) == 2


def test_fields_too_large_for_any_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "LARGEST_FIELD", 1000)
    write_grib(tmp_path / "a.grib", numberOfDataPoints=1001)
    with pytest.raises(ValueError, match=r"a\.grib has a field of 1,001 points: one has at most 1,000$"):
        open_archive(str(tmp_path / "a.grib"))
    globe().to_netcdf(tmp_path / "a.nc")
    monkeypatch.setattr("utils.prepare_data.archive_file.LARGEST_FIELD", 143)
    with pytest.raises(ValueError, match="t2m has .* points: a field has at most 143"):
        Archive.open([str(tmp_path / "a.nc")])


@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_chunks_of_an_archive_too_large_to_be_read(tmp_path, monkeypatch, kind):
    path = tmp_path / f"a.{kind}"
    chunks = {"t2m": {"chunksizes" if kind == "nc" else "chunks": (10, 9, 16)}}
    globe().to_netcdf(path, encoding=chunks) if kind == "nc" else globe().to_zarr(path, encoding=chunks)
    monkeypatch.setattr(stored, "LARGEST_CHUNK", 10 * 9 * 16 * 4)
    open_archive(str(path))
    monkeypatch.setattr(stored, "LARGEST_CHUNK", 10 * 9 * 16 * 4 - 1)
    with pytest.raises(ValueError, match=r"has /?t2m in chunks of 0\.0 GB, .*: store it in chunks of a field"):
        open_archive(str(path))


CLASSIC = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]


def write_classic(path: Path, format: str, grows: bool, *types: str) -> None:
    """Write variables [5, 3] of these types, with a text; the first axis may be one that grows."""
    with netCDF4.Dataset(path, "w", format=format) as file:
        file.createDimension("time", None if grows else 5)
        file.createDimension("x", 3)
        file.source = "a text"
        for i, kind in enumerate(types):
            variable = file.createVariable(f"v{i}", kind, ("time", "x"))
            variable.note = np.arange(3, dtype="i1")
            variable[:] = np.ones((5, 3))


@pytest.mark.parametrize("types", [("i1",), ("f4",), ("i2", "i1"), ("f8", "i1", "f4")])
@pytest.mark.parametrize("format", CLASSIC)
@pytest.mark.parametrize("grows", [False, True])
def test_a_classic_file_that_was_cut_off(tmp_path, format, grows, types):
    """The library gives out zeros beyond its end. Records of one variable are not padded, but those of several."""
    path = tmp_path / "a.nc"
    write_classic(path, format, grows, *types)
    open_archive(str(path))
    whole = os.path.getsize(path)
    last = np.dtype(types[-1]).itemsize * (3 if grows else 15)
    padding = 0 if grows and len(types) == 1 else -last % 4
    os.truncate(path, whole - padding)
    open_archive(str(path))
    os.truncate(path, whole - padding - 1)
    needs = f"{whole - padding:,}"
    with pytest.raises(ValueError, match=rf"a\.nc has [\d,]+ bytes of {needs}: copy it again"):
        open_archive(str(path))


def test_a_compressed_classic_file(tmp_path):
    """xarray would unfold it in memory, where SciPy is there: nobody looked at it."""
    write_classic(tmp_path / "a.nc", CLASSIC[0], True, "f4")
    path = tmp_path / "a.nc.gz"
    path.write_bytes(gzip.compress((tmp_path / "a.nc").read_bytes()))
    assert xarray.open_dataset(path).sizes
    with pytest.raises(ValueError, match=r"cannot read .*a\.nc\.gz as NetCDF, Zarr or GRIB"):
        open_archive(str(path))


@pytest.mark.parametrize("format", CLASSIC)
def test_a_classic_file_that_is_still_written(tmp_path, format):
    """Its number of records is that of a stream: the library takes it for one."""
    write_classic(tmp_path / "a.nc", format, True, "f4")
    with (tmp_path / "a.nc").open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (8 if format == CLASSIC[2] else 4))
    with pytest.raises(ValueError, match=r"a\.nc does not say how many records it has: let what writes it close it"):
        open_archive(str(tmp_path / "a.nc"))


def test_a_variable_named_like_an_axis_that_it_does_not_use(tmp_path):
    """NetCDF keeps it by another name; by its own it keeps the axis, of which nobody wrote values."""
    path = str(tmp_path / "a.nc")
    globe().to_netcdf(path)
    with netCDF4.Dataset(path, "a") as file:
        file.createDimension("u10", 2)
        file.createVariable("u10", "f4", file["t2m"].dimensions, chunksizes=(1, 9, 16))[:7] = np.ones((7, 9, 16))
    with pytest.raises(ValueError, match=r"a\.nc holds 7 of 10 chunks of .*u10: copy it again, or finish it"):
        Archive.open([path], ["u10"])
    with netCDF4.Dataset(path, "a") as file:
        file["u10"][7:] = np.ones((3, 9, 16))
    assert next(Archive.open([path], ["u10"]).read(0, 10))[1].all()


def test_chunks_of_an_archive_that_nobody_wrote(tmp_path):
    """Only where they would be read: other variables may be empty."""
    path = tmp_path / "a.nc"
    globe().to_netcdf(path, encoding={"t2m": {"chunksizes": (1, 9, 16)}})
    with h5py.File(path, "a") as file:
        kept = {name: file["t2m"].attrs[name] for name in ("units",) if name in file["t2m"].attrs}
        scales = [file[name] for name in ("time", "latitude", "longitude")]
        some = file.create_dataset("some", (10, 9, 16), "f4", chunks=(1, 9, 16))
        some[:7] = 1
        for axis, scale in zip(some.dims, scales):
            axis.attach_scale(scale)
        some.attrs.update(kept)
    assert [channel.name for channel in Archive.open([str(path)], ["t2m"]).channels] == ["t2m"]
    with pytest.raises(ValueError, match=r"a\.nc holds 7 of 10 chunks of some: copy it again, or finish it"):
        Archive.open([str(path)], ["some"])
    with h5py.File(path, "a") as file:
        file["some"].attrs["_FillValue"] = np.zeros(1, "f4")  # they are missing, and told where they are taken
    assert np.isnan(next(Archive.open([str(path)], ["some"]).read(9, 10))[1]).all()


@pytest.mark.parametrize("what", ["a name without end", "a type of no number", "groups without end", "a pattern"])
def test_an_archive_that_cannot_be_looked_through(tmp_path, monkeypatch, what):
    """It is refused: what stops the one who looks would else hide all that follows."""
    globe().to_netcdf(tmp_path / "a.nc")
    with h5py.File(tmp_path / "a.nc", "a") as file:
        if what == "a name without end":
            file.create_dataset("a", (4,), "f4", external=[(f"/{'x' * 5000}", 0, 16)])
        elif what == "a type of no number":
            space = h5py.h5s.create_simple((4,))
            h5py.h5d.create(file.id, b"a", h5py.h5t.UNIX_D32LE, space)
        elif what == "groups without end":
            file.create_group("a/" * 2000)
        else:
            source, properties = h5py.VirtualSource("x%b.h5", "a", (1,)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            there = h5py.h5s.create_simple((4,), (h5py.h5s.UNLIMITED,))
            there.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (1,), (1,))
            properties.set_virtual(there, b"x%b.h5", b"a", source.sel.id)
            h5py.h5d.create(file.id, b"a", h5py.h5t.IEEE_F32LE, there, properties)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a\.nc") as error:
        open_archive("./a.nc")
    assert "\n" not in str(error.value)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_a_zarr_folder_whose_parts_lie_elsewhere(tmp_path, what):
    axes = {"latitude": np.linspace(90, -90, 8), "longitude": np.arange(16.0)}
    xarray.Dataset({"t": (tuple(axes), np.zeros((8, 16), "f4"))}, axes).to_zarr(tmp_path / "a.zarr", zarr_format=2)
    chunk = tmp_path / "a.zarr/t/0.0"
    chunk.rename(tmp_path / "secret")
    chunk.symlink_to(tmp_path / "secret") if what == "link" else os.mkfifo(chunk)
    with pytest.raises(ValueError, match="t/0.0 is (a link to .*, out of its folder|no file, but a pipe)"):
        open_archive(str(tmp_path / "a.zarr"))


@pytest.mark.parametrize("what", ["no latitudes", "a lead time without end", "levels that are texts"])
def test_odd_axes_of_an_archive_name_the_file(tmp_path, what):
    axes = {
        "time": np.array(["2000-01-01"], "M8[ns]"),
        "latitude": np.linspace(90, -90, 8),
        "longitude": np.arange(16.0),
    }
    dataset = xarray.Dataset({"t": (tuple(axes), np.zeros((1, 8, 16), "f4"))}, axes)
    if what == "no latitudes":
        dataset = dataset.isel(latitude=slice(0))
    elif what == "levels that are texts":
        dataset = dataset.assign_coords(level="low")
    else:
        dataset = dataset.assign_coords(step=((), np.inf, {"units": "h"}))
    dataset.to_netcdf(tmp_path / "a.nc")
    if what == "no latitudes":
        assert list(pieces_in(str(tmp_path / "a.nc"), {})) == []
        return
    with pytest.raises(ValueError, match=r"a\.nc") as error:
        list(pieces_in(str(tmp_path / "a.nc"), {}))
    assert "\n" not in str(error.value)
