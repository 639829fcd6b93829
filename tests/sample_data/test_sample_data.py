"""Built-in data: the layout of the files, their statistics, the same bytes again, and refusals."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray

from utils.data.unfinished import hidden
from utils.sample_data.qg import CHANNELS, SphericalHarmonics, TwoLayerQG
from utils.sample_data.write import main, one_thread, write_qg, write_shape

ROOT = Path(__file__).resolve().parents[2]
TINY = dict(trajectories=3, samples=4, spinup_days=1, height=16, width=32)


@pytest.fixture(autouse=True)
def single_thread():
    """Small transforms, and other work on the machine: more threads only make these tests slower."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "data"
    write_qg(out, **TINY)
    return out


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- the files --------------------------------------------------------------------------------------------------------


def test_layout_of_the_files(tiny):
    assert sorted(everything(tiny)) == [
        "stats/channels.txt",
        *(f"stats/{name}.npy" for name in ("global_means", "global_stds", "time_diff_stds", "time_means")),
        "train/2001.h5",
        "train/2002.h5",
        "valid/2003.h5",
    ]
    with h5py.File(tiny / "train" / "2002.h5") as file:
        fields = file["fields"]
        assert fields.shape == (4, 8, 16, 32) and fields.dtype == np.float32 and fields.chunks is None
        names = ["u_upper", "v_upper", "vor_upper", "psi_upper", "u_lower", "v_lower", "vor_lower", "psi_lower"]
        assert list(fields.attrs["channel_names"]) == names
        assert list(fields.attrs["units"]) == ["m s-1", "m s-1", "s-1", "m2 s-1"] * 2
        assert file["time"].dtype == np.int64 and file["time"].attrs["units"] == "seconds since 1970-01-01"
        assert np.array_equal(file["time"], np.datetime64("2002-01-01", "s").astype(int) + 21600 * np.arange(4))
        assert file["latitude"].dtype == file["longitude"].dtype == np.float32
        assert np.allclose(file["latitude"], 90 - 11.25 * (np.arange(16) + 0.5))
        assert np.allclose(file["longitude"], 11.25 * np.arange(32))


def test_xarray_finds_the_axes(tiny):
    """By the dimension scales of HDF5: a training file opens as any NetCDF file does."""
    with (
        xarray.open_dataset(tiny / "train/2001.h5", engine="netcdf4") as data,
        h5py.File(tiny / "train/2001.h5") as file,
    ):
        assert data.fields.dims == ("time", "channel", "latitude", "longitude")
        assert [dim[0].name for dim in file["fields"].dims] == [f"/{name}" for name in data.fields.dims]
        assert data.channel.values.tolist() == list(file["fields"].attrs["channel_names"])
        assert np.array_equal(data.time.values.astype("datetime64[s]").astype(int), file["time"])
        wanted = file["fields"][2, CHANNELS.index("v_upper"), :, 3]
        np.testing.assert_array_equal(data.fields.sel(channel="v_upper").isel(time=2, longitude=3), wanted)
        assert data.latitude.units == "degrees_north" and np.array_equal(data.latitude, file["latitude"])


def test_samples_are_six_hours_apart_and_rows_run_north_to_south(tiny):
    model = TwoLayerQG()
    q = model.initial_state(3, seed=0)
    for _ in range(5 * 8):  # the spin-up of a day, and one sample on
        q = model.step(q)
    latitude = 90 - 180 * (np.arange(16) + 0.5) / 16
    # A grid of 16 x 32 carries waves up to 15.
    maps = model.fields(q, SphericalHarmonics(np.sin(np.radians(latitude)), 32, 15, torch.float32))
    for trajectory, name in enumerate(("train/2001.h5", "train/2002.h5", "valid/2003.h5")):
        with h5py.File(tiny / name) as file:
            assert torch.equal(torch.from_numpy(file["fields"][0]), maps[trajectory])


def test_trajectories_differ(tiny):
    with h5py.File(tiny / "train/2001.h5") as a, h5py.File(tiny / "valid/2003.h5") as b:
        v = CHANNELS.index("v_upper")
        assert np.corrcoef(a["fields"][0, v].ravel(), b["fields"][0, v].ravel())[0, 1] < 0.5


@pytest.mark.parametrize("kind", ["qg", "shape"])
def test_statistics_are_those_of_the_training_files(kind, tiny, tmp_path):
    out = tiny
    if kind == "shape":
        out = tmp_path / "data"
        write_shape(out, (3, 9, 16), trajectories=3, samples=5)
    x = np.stack([h5py.File(path)["fields"][:] for path in sorted((out / "train").iterdir())]).astype(np.float64)
    stats = {path.stem: np.load(path) for path in (out / "stats").glob("*.npy")}
    c, h, w = x.shape[2:]
    assert {name: (s.shape, s.dtype) for name, s in stats.items()} == {
        "global_means": ((1, c, 1, 1), np.float32),
        "global_stds": ((1, c, 1, 1), np.float32),
        "time_diff_stds": ((1, c, 1, 1), np.float32),
        "time_means": ((1, c, h, w), np.float32),
    }
    stds = x.std((0, 1, 3, 4))
    assert np.allclose(stats["global_stds"].ravel(), stds, rtol=1e-6)
    assert (np.abs(stats["global_means"].ravel() - x.mean((0, 1, 3, 4))) < 1e-6 * stds).all()
    assert (np.abs(stats["time_means"][0] - x.mean((0, 1))) < 1e-5 * stds[:, None, None]).all()
    assert np.allclose(stats["time_diff_stds"].ravel(), np.diff(x, axis=1).std((0, 1, 3, 4)), rtol=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "chunked", "gzip"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_shape(layout, dtype, tmp_path):
    out = tmp_path / "data"
    write_shape(out, (3, 9, 16), samples=12, dtype=dtype, layout=layout)
    assert sorted(p.name for p in out.rglob("*.h5")) == ["2001.h5", "2002.h5"]
    with h5py.File(out / "train/2001.h5") as file:
        fields = file["fields"]
        assert fields.shape == (12, 3, 9, 16) and fields.dtype == dtype
        assert fields.chunks == (None if layout == "contiguous" else (1, 1, 9, 16))
        assert fields.compression == ("gzip" if layout == "gzip" else None)
        assert list(fields.attrs["channel_names"]) == ["ch0", "ch1", "ch2"] and list(fields.attrs["units"]) == ["1"] * 3
        assert file["latitude"][0] == 90 and file["latitude"][-1] == -90
        x = fields[:].astype(np.float64)
    assert np.isfinite(x).all() and (np.abs(x[1:] - x[:-1]).max((2, 3)) > 0.05).all(), "every channel moves, always"
    for c in (0, 2):
        assert np.abs(x[1, c] - np.roll(x[0, c], c + 1, axis=-1)).max() > 0.05, "no mere drift"
    # Without the standing part (at t = 0 and half a period on), channel c has moved east by c + 1 columns a step.
    for c in (0, 2):
        half = (8 + c) // 2
        assert np.allclose(x[half, c], np.roll(x[0, c], half * (c + 1), axis=-1), atol=2e-2)


def test_an_even_number_of_rows_lacks_the_south_pole(tmp_path):
    write_shape(tmp_path / "data", (1, 8, 16), samples=2)
    with h5py.File(tmp_path / "data/valid/2002.h5") as file:
        assert np.array_equal(file["latitude"], 90 - 22.5 * np.arange(8))


@pytest.mark.parametrize(
    "write", [lambda out, **k: write_qg(out, **TINY, **k), lambda out, **k: write_shape(out, (2, 9, 16), **k)]
)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(write, tmp_path):
    threads = torch.get_num_threads()
    write(tmp_path / "a", seed=4)
    torch.set_num_threads(2)  # must not matter, and must be as before afterwards
    write(tmp_path / "b", seed=4)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    write(tmp_path / "c", seed=5)
    a, b, c = (everything(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a if name != "stats/channels.txt")


def test_another_process_gives_the_same_bytes(tiny, tmp_path):
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    command = [sys.executable, "-m", "utils.sample_data", f"--out={tmp_path / 'data'}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and done.stderr == "", "no progress bar where there is no terminal"
    assert done.stdout.startswith("Wrote 12 samples of 8 x 16 x 32 float32 to") and done.stdout.count("\n") == 1
    assert everything(tmp_path / "data") == everything(tiny)


def test_the_last_line_names_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([f"--{name}={value}" for name, value in TINY.items()]) == 0
    assert capsys.readouterr().out.endswith("Next: python train.py --config=demo\n")
    assert (tmp_path / "data/demo/valid/2003.h5").exists()
    assert main(["--shape", "2", "9", "16"]) == 0
    assert capsys.readouterr().out.startswith("Wrote 32 samples of 2 x 9 x 16 float32 to data/2x9x16 (16 in train, 16 ")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--trajectories 1", "--trajectories is 1"),
        ("--samples 1", "--samples is 1"),
        ("--spinup_days -1", "--spinup_days is -1"),
        ("--height 17", "even number"),
        ("--height 4", "--height is 4"),
        ("--width 4", "--width is 4"),
        ("--seed -1", "--seed is -1"),
        ("--dtype float16", "no meaning without --shape"),
        ("--shape 2 8 16 --height 8", "no meaning with --shape"),
        ("--shape 2 1 16", "--shape is 2 1 16"),
        ("--shape 2 8 16 --samples 1", "--samples is 1"),
        ("--shape 20 72100 144000 --samples 1000000", "GB free"),
    ],
)
def test_wrong_input_is_one_line(flags, words, tmp_path, capsys):
    assert main(["--out", str(tmp_path / "data"), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "data")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot write" in err and "--out" in err


def test_an_existing_folder_is_kept_unless_overwritten(tiny, tmp_path):
    out = tmp_path / "data"
    write_shape(out, (2, 9, 16), samples=2)
    before = everything(out)
    with pytest.raises(ValueError, match="exists already.*--overwrite"):
        write_qg(out, **TINY)
    assert everything(out) == before
    write_qg(out, **TINY, overwrite=True)
    assert everything(out) == everything(tiny)
    assert list(tmp_path.iterdir()) == [out], "nothing temporary is left"


def test_overwrite_spares_what_is_no_data_set(tmp_path):
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(ValueError, match="thesis.tex.*another --out"):
        write_qg(out, **TINY, overwrite=True)
    assert (out / "thesis.tex").exists()


def test_a_failure_leaves_nothing_new_and_the_old_as_it_was(tiny, tmp_path, monkeypatch):
    out = tmp_path / "data"
    write_shape(out, (2, 9, 16), samples=2)
    before = everything(out)
    monkeypatch.setattr(TwoLayerQG, "fields", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    for target in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            write_qg(target, **TINY, overwrite=True)
    assert everything(out) == before and list(tmp_path.iterdir()) == [out]


def test_the_folder_is_not_there_before_it_is_complete_and_is_open_to_others(tmp_path):
    with hidden(tmp_path / "data", overwrite=False, size=0, remedy="less") as unfinished:
        (unfinished.new / "x").touch()
        assert not (tmp_path / "data").exists()
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "data").stat().st_mode == (tmp_path / "usual").stat().st_mode
