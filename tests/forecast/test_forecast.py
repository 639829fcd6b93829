"""Forecasts of the future: from one state, of files and archives, by an exported model; files that others read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import h5py
import netCDF4
import numpy as np
import pytest
import torch
import xarray
from safetensors.torch import load_file

import evaluate
import forecast
from tests.forecast.evaluations import NAMES, flags, truth, write_climatology
from tests.helpers import (
    ROOT,
    call_here,
    change_info,
    clean_environment,
    fields,
    run_here,
    run_ranks,
    tiny_flags,
    write_file,
)
from tests.prepare_data.grib import write_messages
from utils.checkpoint import store as checkpoint
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.checkpoint.info import read_info
from utils.checkpoint.weights import choose, read_weights
from utils.data.variables import variable
from utils.errors import ReadError, Refused
from utils.forecast.trained import Trained
from utils.prepare_data.archive import Archive, _default_name, find


@pytest.mark.parametrize("usual, told", [(None, "the mean over time"), ("usual.nc", "the climatology usual.nc")])
def test_the_exported_folder_says_of_what_its_anomalies_are(trained, tmp_path, usual, told):
    shutil.copytree(trained / "runs", tmp_path / "runs")
    argv = ["--checkpoint", str(tmp_path / "runs/tiny/1GPU/00"), *flags(trained)[2:]]
    if usual:
        write_climatology(trained, tmp_path / usual)
        argv += ["--climatology", str(tmp_path / usual)]
    call_here(evaluate.main, argv)
    assert checkpoint_main(["export", str(tmp_path / "runs/tiny/1GPU/00"), str(tmp_path / "exported")]) == 0
    assert f"correlation of anomalies from {told}, at " in (tmp_path / "exported/README.md").read_text()


@pytest.fixture(scope="module")
def exported(trained) -> Path:
    folder = trained / "exported"
    assert checkpoint_main(["export", str(trained / "runs/tiny/1GPU/00"), str(folder), "--torch_export"]) == 0
    return folder


def made(source: Path, initial: Path, out: Path, *more: str) -> Path:
    """Forecast in this process, 24 hours from the last state, and return the folder of the files."""
    argv = ["--checkpoint", str(source), "--initial", str(initial), "--out", str(out), "--lead_hours", "24", *more]
    call_here(forecast.main, argv)
    return out / "forecasts"


def refused(*argv: object) -> str:
    """Return the line that forecast.py ends with."""
    with pytest.raises(Refused) as found:
        call_here(forecast.main, list(map(str, argv)))
    (line,) = str(found.value).splitlines()
    return line


@pytest.fixture(scope="module")
def judged(trained) -> xarray.Dataset:
    """The forecasts of evaluate.py, one at a time as forecast.py makes them."""
    out = trained / "judged"
    more = ["--out", str(out), "--forecasts", "zarr", "--local_batch_size", "1", "--weights", "raw"]
    call_here(evaluate.main, flags(trained, *more))
    return xarray.open_zarr(out / "forecasts/model.zarr").load()


def same(found: xarray.Dataset, expected: xarray.Dataset) -> None:
    """Assert that forecasts are equal, bit for bit."""
    assert set(found.data_vars) == set(expected.data_vars)
    for name in expected.data_vars:
        np.testing.assert_array_equal(found[name].values, expected[name].values)


@pytest.mark.slow
def test_from_one_state_it_is_the_forecast_that_an_evaluation_makes(trained, exported, judged, tmp_path):
    """Bit for bit: of a run and of the exported folder; from a file that holds nothing after that state."""
    start = judged.time[3]
    with_truth = fields(20, 3, 17, 32, seed=10)
    write_file(tmp_path / "today.h5", with_truth[:4], names=NAMES)
    for i, source in enumerate((trained / "runs/tiny/1GPU/00", exported)):
        (path,) = (made(source, tmp_path / "today.h5", tmp_path / f"out{i}") / "model").glob("*.nc")
        found = xarray.load_dataset(path)
        assert found.time.values == start.values and list(found.prediction_timedelta.values) == [6, 12, 18, 24]
        same(found, judged.sel(time=[start.values]))


@pytest.mark.slow
def test_of_every_state_in_a_zarr(trained, exported, judged, tmp_path):
    folder = made(exported, trained / "valid", tmp_path / "out", "--dates", "all", "--forecasts", "zarr")
    found = xarray.open_zarr(folder / "model.zarr").load()
    assert len(found.time) == 27
    same(found.sel(time=judged.time), judged)
    valid = found.valid_time.values
    assert (valid == found.time.values[:, None] + np.arange(6, 25, 6) * np.timedelta64(1, "h")).all()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_share_the_states(trained, exported, judged, tmp_path, ranks):
    argv = [
        str(ROOT / "forecast.py"),
        "--checkpoint",
        str(exported),
        "--initial",
        str(trained / "valid"),
        "--out",
        str(tmp_path),
    ]
    more = ["--dates", "1970-01-01T06", "1970-01-02", "1970-01-01T12:00", "--lead_hours", "24", "--plot_channels", "t"]
    for done in run_ranks(ranks, [*argv, *more]):
        assert done.returncode == 0, done.stderr
    times = ["1970-01-01T0600", "1970-01-01T1200", "1970-01-02T0000"]
    paths = sorted((tmp_path / "forecasts/model").glob("*.nc"))
    assert [path.stem for path in paths] == times
    for path in paths:
        found = xarray.load_dataset(path)
        xarray.testing.assert_allclose(found[NAMES], judged[NAMES].sel(time=found.time), rtol=1e-6)  # one thread each
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"maps_t.png", "forecast_t.gif"}


def test_the_folder_alone_forecasts_in_a_fresh_process(trained, exported, judged, tmp_path):
    """Neither the run nor its data are there any more; only the code is."""
    moved = shutil.copytree(exported, tmp_path / "carried home")
    code = f"""
import numpy as np
from forecast import load
model = load({str(moved)!r})
assert model.in_names == {NAMES} and model.out_units == ["m s-1"] * 3 and model.step_hours == 6
state = np.load("state.npy")
np.save("after.npy", np.stack(list(model.rollout(state, 4))))
"""
    happened = truth(trained)
    start = judged.time[5]
    np.save(tmp_path / "state.npy", happened.sel(time=start).values.astype(np.float32))
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    after = np.load(tmp_path / "after.npy")
    expected = judged[NAMES].sel(time=start).to_dataarray("channel").transpose("prediction_timedelta", "channel", ...)
    np.testing.assert_allclose(after[:, :, ::-1], expected.values, rtol=1e-6, atol=1e-6)  # other threads, maybe


def test_an_exported_program_needs_torch_alone(trained, exported):
    model = forecast.load(str(exported))
    program = torch.export.load(exported / "model.pt2").module()
    states = torch.from_numpy(fields(5, 3, 16, 32))
    for batch in (states, states[:1]):
        scale = model.in_units_of.std.float()
        assert ((program(batch) - model.step(batch)) / scale).abs().max() < 1e-6


def test_a_model_takes_numpy_and_torch_one_state_and_several(exported):
    model = forecast.load(str(exported))
    states = fields(2, 3, 16, 32)
    after = model.step(states)
    assert isinstance(after, np.ndarray) and after.shape == (2, 3, 16, 32) and after.dtype == np.float32
    turned = np.asfortranarray(states[:, ::-1, ::-1].astype(">f4"))[:, ::-1, ::-1]
    np.testing.assert_array_equal(model.step(turned), after)
    torch.manual_seed(1)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    forecast.load(str(exported))
    assert torch.rand(1) == drawn
    given = torch.from_numpy(states[1].copy())
    one = model.step(given)
    assert np.array_equal(given, states[1])  # it is the caller's
    assert isinstance(one, torch.Tensor) and one.shape == (3, 16, 32)
    np.testing.assert_allclose(one, after[1], rtol=1e-5, atol=1e-5)
    again = model.step(model.step(states))
    *_, rolled = model.rollout(states, 2)
    np.testing.assert_allclose(again, rolled, rtol=1e-5, atol=1e-5)  # units between the steps
    with pytest.raises(ValueError, match=r"a state of shape \[3, 16, 31\]: it takes \[3, 16, 32\] \(u, v, t on"):
        model.step(states[0, :, :, 1:])
    states[1, 2, 3, 4] = np.nan
    with pytest.raises(ValueError, match=r"the state is nan at \[1, 2, 3, 4\] \(channel t\): fill it"):
        model.step(states)
    states[1, 2, 3, 4] = 9.97e36  # what NetCDF fills with
    with pytest.raises(ValueError, match=r"the state is 9.97e\+36 at"):
        model.step(states)
    assert len(model.latitude) == 16 and model.latitude[0] == 90


def test_the_exported_folder_says_what_it_is(trained, exported, tmp_path, capsys):
    run = trained / "runs/tiny/1GPU/00"
    about = json.loads((exported / "model.json").read_text())
    assert [x["name"] for x in about["inputs"]] == NAMES and about["iteration"] == 20 and about["step_hours"] == 6
    assert [x["standard_name"] for x in about["forecasts"]] == [None, None, None]  # u is no name of a level
    weights = read_weights(choose(run, best=False)[0])
    for name, x in load_file(exported / "weights.safetensors").items():
        assert torch.equal(x, weights[name])
    assert len(weights) == len(load_file(exported / "weights.safetensors"))
    card = (exported / "README.md").read_text()
    assert "20 of 20 iterations of 8 samples, seed 0" in card and "| u |" in card and "was not evaluated" in card
    assert str(trained) not in card + (exported / "config.yaml").read_text() + json.dumps(about)
    assert checkpoint_main(["export", str(run), str(exported)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert checkpoint_main(["export", str(run), str(tmp_path / "w.pt"), "--torch_export"]) == 2
    assert "give a folder" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_scores_of_the_evaluation_go_along(trained, tmp_path):
    run = shutil.copytree(trained / "runs/tiny/1GPU/00", tmp_path / "runs/tiny/1GPU/00")
    argv = ["--checkpoint", str(run), "--inf_data_path", str(trained / "valid"), "--lead_hours", "24"]
    call_here(evaluate.main, argv)
    skill = json.loads((run / "evaluation/skill.json").read_text())
    for more, source in ((), "model"), (("--ema",), "ema"):
        folder = tmp_path / source
        assert checkpoint_main(["export", str(run), str(folder), *more]) == 0
        about = json.loads((folder / "model.json").read_text())
        assert about["scores"]["rmse"]["t"] == [skill["scores"][source]["rmse"]["cos"]["t"][3][0]]
        assert (folder / "scores.csv").read_text() == (run / "evaluation/skill.csv").read_text()
        assert f"{about['scores']['rmse']['t'][0]:.3g}" in (folder / "README.md").read_text()
        again = tmp_path / f"{source} again"
        assert checkpoint_main(["export", str(folder), str(again)]) == 0
        for name in ("scores.csv", "README.md", "model.json"):
            assert (again / name).read_text() == (folder / name).read_text()
    both = [load_file(tmp_path / source / "weights.safetensors") for source in ("model", "ema")]
    assert not any(torch.equal(x, both[1][name]) for name, x in both[0].items())


def test_an_exported_folder_is_judged_and_trained_on(trained, exported, judged, tmp_path):
    argv = ["--checkpoint", str(exported), "--inf_data_path", str(trained / "valid"), "--lead_hours", "24"]
    call_here(evaluate.main, [*argv, "--out", str(tmp_path / "out"), "--forecasts", "zarr"])
    same(xarray.open_zarr(tmp_path / "out/forecasts/model.zarr").load(), judged)
    run = run_here(
        tiny_flags(trained, "--init_from", str(exported), "--lr", "0", "--num_iters", "1", "--run_num", "on")
    )
    weights = read_weights(choose(run, best=False)[0])
    for name, x in load_file(exported / "weights.safetensors").items():
        assert torch.equal(x, weights[name])
    with pytest.raises(Refused, match="is one thing: leave --best out"):
        call_here(evaluate.main, [*argv, "--best"])
    with pytest.raises(Refused, match="holds no moving average"):
        call_here(evaluate.main, [*argv, "--weights", "ema"])


def archive(path: Path, **rename: str) -> np.ndarray:
    """Write one state as an archive, rows from the south, and return it."""
    state = fields(1, 3, 17, 32, seed=10)
    axes = {"time": [np.datetime64("2026-02-09T18", "ns")], "latitude": 90 - 180 * np.arange(17) / 16}
    axes["longitude"] = np.arange(32) * 11.25
    names = [rename.get(name, name) for name in NAMES]
    values = {
        name: (("time", "latitude", "longitude"), state[:, c], {"units": "m s-1"}) for c, name in enumerate(names)
    }
    xarray.Dataset(values, axes).isel(latitude=slice(None, None, -1)).to_netcdf(path)
    return state[0, :, :16]


def test_from_an_archive_of_one_time(exported, tmp_path):
    state = archive(tmp_path / "now.nc", t="temp")
    out = made(exported, tmp_path / "now.nc", tmp_path / "out", "--channels", "t=temp")
    found = xarray.load_dataset(out / "model/2026-02-09T1800.nc")
    *_, last = forecast.load(str(exported)).rollout(state, 4)
    np.testing.assert_array_equal(found.t.values[0, 3], last[2, ::-1])
    line = refused("--checkpoint", exported, "--initial", tmp_path / "now.nc")
    assert "nothing in the files for channel 't'" in line


@pytest.mark.slow
def test_maps_of_a_forecast_from_grib(exported, tmp_path):
    """The libraries of maps and of GRIB abort a process that loads GRIB's first."""
    pytest.importorskip("cartopy", reason="needs pip install -r requirements-maps.txt")
    state = fields(1, 3, 17, 32, seed=10)
    messages = [(field, {"shortName": name}) for field, name in zip(state[0], ("10u", "10v", "10si"))]
    write_messages(tmp_path / "now.grib", messages, "regular_ll_sfc_grib2")
    argv = ["--checkpoint", exported, "--initial", tmp_path / "now.grib", "--out", tmp_path / "out"]
    more = [
        "--channels",
        "u=u10",
        "v=v10",
        "t=si10",
        "--lead_hours",
        "6",
        "--projection",
        "Robinson",
        "--plot_channels",
        "u",
    ]
    command = [sys.executable, ROOT / "forecast.py", *argv, *more]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out/forecasts/model").glob("*.nc")
    expected = forecast.load(str(exported)).step(state[0, :, :16])[2, ::-1]
    np.testing.assert_allclose(xarray.load_dataset(path).t.values[0, 0], expected, atol=1e-4)
    assert (tmp_path / "out/pictures/maps_u.png").exists()


def test_an_archive_in_any_order_of_rows_and_columns_and_a_damaged_one(exported, tmp_path):
    """Longitudes from -180, or a column too many; a file that is cut is one line."""
    state = archive(tmp_path / "now.nc")
    data = xarray.load_dataset(tmp_path / "now.nc")
    west = data.assign_coords(longitude=(data.longitude + 180) % 360 - 180).sortby("longitude")
    west.to_netcdf(tmp_path / "west.nc")
    out = made(exported, tmp_path / "west.nc", tmp_path / "out", "--lead_hours", "6")
    found = xarray.load_dataset(out / "model/2026-02-09T1800.nc")
    np.testing.assert_array_equal(found.t.values[0, 0], forecast.load(str(exported)).step(state)[2, ::-1])
    copy = shutil.copytree(exported, tmp_path / "from the south")
    about = json.loads((copy / "model.json").read_text())
    (copy / "model.json").write_text(json.dumps(about | {"latitude": about["latitude"][::-1]}))
    out = made(copy, tmp_path / "now.nc", tmp_path / "south", "--lead_hours", "6")
    found = xarray.load_dataset(out / "model/2026-02-09T1800.nc")
    np.testing.assert_array_equal(found.t.values[0, 0], forecast.load(str(copy)).step(state[:, ::-1])[2])
    argv = ["--checkpoint", str(exported), "--initial", str(tmp_path / "now.nc"), "--out", str(tmp_path / "cut")]
    fault = mock.patch(
        "utils.prepare_data.archive_file.Piece.read", side_effect=ValueError("now.nc cannot be read: copy")
    )
    with fault, pytest.raises(ReadError, match="now.nc cannot be read"):
        call_here(forecast.main, argv)


def test_a_level_is_no_height_above_the_ground():
    """`u` at 100 hPa is not the wind at 100 m, whatever an archive holds besides."""
    assert _default_name(("u", 100.0)) == "u100hPa" and _default_name(("vo", 850.0)) == "vo850"
    both = [("u_component_of_wind", 100.0), ("100m_u_component_of_wind", None), ("z", None), ("geopotential", 500.0)]
    assert find("u100hPa", both) == ("u100hPa", both[0]) and find("u100", both) == ("u100", both[1])
    assert find("z500", both) == ("z500", both[3])  # and not z, which has no level
    assert find("10m_u_component_of_wind", [("u10", None)])[1] == ("u10", None)
    assert find("z0.5", [("z", 0.5), ("z", 1.0)])[1] == ("z", 0.5)
    assert variable("u100hPa").level == 100 and variable("u100").level is None


def test_a_time_that_is_the_valid_time_is_not_shifted(tmp_path):
    archive(tmp_path / "now.nc")
    data = xarray.load_dataset(tmp_path / "now.nc")
    lead = xarray.DataArray(6, attrs={"units": "hours"})
    start = np.datetime64("2026-02-09T12", "ns")
    data.assign_coords(forecast_period=lead, forecast_reference_time=start).to_netcdf(tmp_path / "valid.nc")
    data.assign_coords(forecast_period=lead).to_netcdf(tmp_path / "start.nc")
    times = [Archive.open([str(tmp_path / name)], any_times=True).times for name in ("valid.nc", "start.nc")]
    assert (
        times[1][0] - times[0][0] == 6 * 3600 and times[0][0] == data.time.values.astype("datetime64[s]").astype(int)[0]
    )


def test_files_are_read_by_their_own_names(trained, exported, tmp_path):
    """Where the training named the channels, too: another order of the files is another order."""
    copy = shutil.copytree(exported, tmp_path / "model")
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("channel_names: null", "channel_names: [u, v, t]"))
    data = fields(2, 3, 17, 32)
    write_file(tmp_path / "turned.h5", data[:, [2, 0, 1]], names=["t", "u", "v"])
    out = made(copy, tmp_path / "turned.h5", tmp_path / "out", "--lead_hours", "6")
    (path,) = (out / "model").glob("*.nc")
    expected = forecast.load(str(exported)).step(data[1, :, :16])
    np.testing.assert_array_equal(xarray.load_dataset(path).u.values[0, 0], expected[0, ::-1])


def test_what_a_user_can_get_wrong(trained, exported, tmp_path):
    argv = ["--checkpoint", exported, "--out", tmp_path / "out", "--initial"]
    assert "initial is None" in refused("--checkpoint", exported)
    assert "no /" in refused("--checkpoint", tmp_path / "none", "--initial", trained)
    assert "leave --best out" in refused(*argv, trained, "--best")
    assert "do not ask for the ema" in refused(*argv, trained, "--weights", "ema")
    assert "channels says where an archive has them" in refused(*argv, trained / "valid", "--channels", "u=x")
    mixed = refused(*argv, trained / "valid", tmp_path / "none.nc")
    assert "none.nc holds no training files, and other paths of initial do: give one kind" in mixed
    twice = refused(*argv, trained, "--dates", "all")  # its training files have the same dates
    assert "holds two states of 1970-01-01 00:00: leave one of the files out" in twice
    assert "no file" in refused(*argv, tmp_path / "none.nc")
    assert "take a multiple" in refused(*argv, trained, "--lead_hours", "15")
    assert "has no state of 2030-01-01: it holds" in refused(*argv, trained / "valid", "--dates", "2030-01-01")
    assert "takes last, all, or dates" in refused(*argv, trained / "valid", "--dates", "yesterday")
    assert "hold names 't', and the model reads and does not forecast nothing" in refused(*argv, trained, "--hold", "t")
    assert "did you mean '--initial'" in refused("--checkpoint", exported, "--initials", "x")
    write_file(tmp_path / "grid.h5", fields(2, 3, 17, 24), names=NAMES)
    assert "24 values of longitude" in refused(*argv, tmp_path / "grid.h5")
    write_file(tmp_path / "west.h5", fields(2, 3, 17, 32), names=NAMES)
    with h5py.File(tmp_path / "west.h5", "a") as file:
        file["longitude"] = np.arange(32) * 11.25 - 180
    assert "32 values of longitude from -180 to 168.75" in refused(*argv, tmp_path / "west.h5")
    write_file(tmp_path / "names.h5", fields(2, 3, 17, 32), names=["u", "v", "q"])
    assert "unknown channel 't' in the model's inputs" in refused(*argv, tmp_path / "names.h5")
    write_file(tmp_path / "undated.h5", fields(2, 3, 17, 32), names=NAMES, start=None)
    assert "needs dates" in refused(*argv, tmp_path / "undated.h5")
    assert "stores no time" in refused(*argv, tmp_path / "undated.h5", "--dates", "2030-01-01")
    assert not (tmp_path / "out").exists()
    made(exported, tmp_path / "undated.h5", tmp_path / "out", "--forecasts", "none")
    assert "undated.h5, step 1, 24 h" in (tmp_path / "out/out.log").read_text()


def test_damaged_exports_are_one_line(exported, tmp_path):
    for name, content in (("model.json", "{"), ("weights.safetensors", "x"), ("config.yaml", "model: 1")):
        copy = shutil.copytree(exported, tmp_path / name)
        (copy / name).write_text(content)
        with pytest.raises(ValueError, match=name if name != "config.yaml" else "named sections") as found:
            forecast.load(str(copy))
        assert len(str(found.value).splitlines()) == 1
    about = json.loads((exported / "model.json").read_text())
    for i, change in enumerate(({"inputs": None}, {"step_hours": 0}, {"plot_channels": [9]}, {"latitude": [0, 1]})):
        copy = shutil.copytree(exported, tmp_path / str(i))
        (copy / "model.json").write_text(json.dumps(about | change))
        with pytest.raises(ValueError, match="model.json .*: copy the folder again"):
            forecast.load(str(copy))
    copy = shutil.copytree(exported, tmp_path / "stds")
    np.save(copy / "statistics/global_stds.npy", 0 * np.load(copy / "statistics/global_stds.npy"))
    with pytest.raises(ValueError, match="does not fit the statistics"):
        forecast.load(str(copy))


@pytest.mark.parametrize("value", [np.inf, 9.96921e36])  # with which NetCDF fills
def test_a_value_that_is_not_finite_ends_it_with_its_place(exported, tmp_path, value):
    data = fields(3, 3, 17, 32)
    data[2, 1, 4, 5] = value
    write_file(tmp_path / "bad.h5", data, names=NAMES)
    argv = ["--checkpoint", str(exported), "--initial", str(tmp_path / "bad.h5"), "--out", str(tmp_path / "out")]
    done = run_ranks(1, [str(ROOT / "forecast.py"), *argv])[0]
    (line,) = done.stderr.splitlines()[-1:]
    assert done.returncode == 2 and f"channel 'v', row 4, column 5 is {np.float32(value)}: fill it" in line


def test_what_is_read_and_not_forecast_is_held(trained, tmp_path):
    more = ["--num_iters", "1", "--in_channels", "t", "v", "u", "--out_channels", "u", "v", "--run_num", "held"]
    run = run_here(tiny_flags(trained, *more))
    argv = ["--checkpoint", run, "--initial", trained / "valid"]
    assert "the model reads t and does not forecast them" not in refused(*argv, "--lead_hours", "15")
    assert "the model reads t and does not forecast them" in refused(*argv, "--lead_hours", "12")
    out = made(run, trained / "valid", tmp_path / "out", "--hold", "t")
    (path,) = (out / "model").glob("*.nc")
    model = forecast.load(str(run))
    state = truth(trained).isel(time=-1).values.astype(np.float32)[[2, 1, 0]]
    *_, last = model.rollout(state, 4, forced=np.stack([state[:1]] * 3))
    np.testing.assert_array_equal(xarray.load_dataset(path).u.values[0, 3], last[0, ::-1])
    with pytest.raises(ValueError, match="give `forced`"):
        list(model.rollout(state, 2))


def test_the_same_command_goes_on_and_another_begins_anew(trained, exported, tmp_path):
    argv = ["--dates", "all"]
    made(exported, trained / "valid", tmp_path / "out", *argv)
    kept = sorted((tmp_path / "out/kept").iterdir())
    kept[3].unlink()
    (tmp_path / "out/forecasts/model/1970-01-01T1800.nc").unlink()
    made(exported, trained / "valid", tmp_path / "out", *argv)
    assert "(26 forecasts are there already)" in (tmp_path / "out/out.log").read_text()
    assert len(list((tmp_path / "out/forecasts/model").glob("*.nc"))) == 27 and not (tmp_path / "out.1").exists()
    made(exported, trained / "valid", tmp_path / "out")
    assert len(list((tmp_path / "out/forecasts/model").glob("*.nc"))) == 1 and (tmp_path / "out.1").exists()


def test_a_run_whose_data_are_gone_says_what_to_give(trained, tmp_path):
    run = shutil.copytree(trained / "runs/tiny/1GPU/00", tmp_path / "run")
    for path in checkpoint.find(run / "checkpoints"):
        gone = {"train_data_path": "/gone/train", "data_dir": None}
        change_info(path, config=read_info(path)["config"] | gone)
    with pytest.raises(ValueError, match="no data folder '/gone/train': .* give --data_dir"):
        Trained.open(run)
    assert Trained.open(run, data_dir=str(trained)).fields.in_names == NAMES


def test_the_wrapper_for_earth2studio_is_a_model_of_its_kind(exported):
    """The page's code, without earth2studio: axes in, axes out, one step after the other."""
    text = (ROOT / "docs/forecasts.md").read_text().partition("<!-- earth2studio -->")[2]
    found: dict = {}
    exec(text.split("```")[1].removeprefix("python\n"), found)
    model, inner = found["Prognostic"](str(exported)), forecast.load(str(exported))
    coords = dict(model.input_coords(), time=np.array(["2001-02-03", "2001-02-04"], "datetime64[ns]"))
    assert list(coords) == ["batch", "time", "lead_time", "variable", "lat", "lon"]
    assert coords["variable"].tolist() == NAMES and len(coords["lat"]) == 16 and len(coords["lon"]) == 32
    states = torch.from_numpy(fields(4, 3, 16, 32)).view(2, 2, 1, 3, 16, 32)
    steps = model.to("cpu").create_iterator(states, coords)
    assert next(steps)[0] is states
    for hours in (6, 12):
        states, coords = next(steps)
        assert coords["lead_time"] == np.timedelta64(hours, "h") and states.shape == (2, 2, 1, 3, 16, 32)
    *_, expected = inner.rollout(fields(4, 3, 16, 32), 2)
    np.testing.assert_allclose(states.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


# What other tools read


def check_cf(path: Path, allowed: tuple[str, ...] = ()) -> None:
    """Run the IOOS compliance checker on a file, and assert that it finds no error but those allowed."""
    from compliance_checker.runner import CheckSuite, ComplianceChecker

    CheckSuite.load_all_available_checkers()
    out = path.with_suffix(".json")
    ComplianceChecker.run_checker(str(path), ["cf:1.8"], 0, "normal", output_filename=str(out), output_format="json")
    (found,) = json.loads(out.read_text()).values()
    errors = {msg for one in found["high_priorities"] for msg in one["msgs"]}
    assert found["all_priorities"] and not {x for x in errors if not x.startswith(allowed)}, errors


REFERENCE = "Coordinate variable 'time' should have standard_name='time', found: 'forecast_reference_time'"


def test_files_follow_the_cf_conventions(trained, exported, tmp_path):
    (path,) = (made(exported, trained / "valid", tmp_path / "out") / "model").glob("*.nc")
    check_cf(path, allowed=(REFERENCE,))
    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        assert file.Conventions == "CF-1.8" and file.title and file.history and file.source
        for name in ("time", "prediction_timedelta", "valid_time", "latitude", "longitude"):
            axis = file[name]
            assert axis.dtype in (np.int32, np.float64) and axis.standard_name and axis.long_name and axis.units
            assert not {"_FillValue", "dtype"} & set(axis.ncattrs())
        axes = {name: getattr(file[name], "axis", None) for name in ("time", "latitude", "longitude")}
        assert axes == {"time": "T", "latitude": "Y", "longitude": "X"}
        assert file["prediction_timedelta"].standard_name == "forecast_period"
        assert file["u"].units == "m s-1" and file["u"].coordinates == "valid_time"


def test_beside_u100m_is_u100_a_level(tmp_path, trained):
    """In what is written, and where an initial state is looked for."""
    names, data = ["u100", "u100m", "z500"], tmp_path / "data"
    for kind, steps in (("train", 12), ("valid", 4)):
        write_file(data / kind / "2001.h5", fields(steps, 3, 17, 32), names=names)
    shutil.copytree(trained / "stats", data / "stats")
    run = run_here(tiny_flags(data, "--num_iters", "1"))
    own, theirs = (
        made(run, data / "valid", tmp_path / kind, "--names", kind, "--forecasts", "netcdf", "--lead_hours", "6")
        for kind in ("own", "wb2")
    )
    plain, named = (xarray.load_dataset(next((folder / "model").glob("*.nc"))) for folder in (own, theirs))
    wind = named.u_component_of_wind
    assert set(named.data_vars) == {"u_component_of_wind", "100m_u_component_of_wind", "geopotential"}
    np.testing.assert_array_equal(wind.sel(level=100), plain.u100)
    np.testing.assert_array_equal(named["100m_u_component_of_wind"], plain.u100m)
    assert plain.u100.long_name == "wind from the west at 100 hPa"
    again = made(run, next((theirs / "model").glob("*.nc")), tmp_path / "again", "--lead_hours", "6")
    expected = forecast.load(str(run)).step(np.stack([plain[name].values[0, 0, ::-1] for name in names]))
    found = xarray.load_dataset(next((again / "model").glob("*.nc")))
    np.testing.assert_array_equal(found.u100.values[0, 0], expected[0, ::-1])


def test_names_of_weatherbench_have_levels(tmp_path, trained):
    """Channels of an ERA5 archive under its own names, written under WeatherBench's, and read again as these."""
    names = ["z500", "t2m", "z850"]
    data = tmp_path / "data"
    for kind, steps in (("train", 12), ("valid", 4)):
        write_file(data / kind / "2001.h5", fields(steps, 3, 17, 32), names=names)
        with h5py.File(data / kind / "2001.h5", "a") as file:
            file["fields"].attrs["units"] = ["m**2 s**-2", "K", "m2 s-2"]
    shutil.copytree(trained / "stats", data / "stats")
    run = run_here(tiny_flags(data, "--num_iters", "1"))
    own, theirs = (
        made(run, data / "valid", tmp_path / name, "--names", name, "--forecasts", kind)
        for name, kind in (("own", "netcdf"), ("wb2", "netcdf"))
    )
    (first,), (second,) = ((folder / "model").glob("*.nc") for folder in (own, theirs))
    check_cf(second, allowed=(REFERENCE,))
    plain, named = xarray.load_dataset(first), xarray.load_dataset(second)
    assert set(named.data_vars) == {"geopotential", "2m_temperature"}
    assert named.geopotential.dims == ("time", "prediction_timedelta", "level", "latitude", "longitude")
    assert named.level.values.tolist() == [500, 850] and named.level.units == "hPa"
    np.testing.assert_array_equal(named.geopotential.sel(level=500), plain.z500)
    np.testing.assert_array_equal(named.geopotential.sel(level=850), plain.z850)
    np.testing.assert_array_equal(named["2m_temperature"], plain.t2m)
    assert plain.z500.standard_name == "geopotential" and plain.z500.long_name == "geopotential at 500 hPa"
    named.isel(prediction_timedelta=[0]).to_netcdf(tmp_path / "step.nc")
    again = made(run, tmp_path / "step.nc", tmp_path / "again", "--lead_hours", "6")
    (path,) = (again / "model").glob("*.nc")
    assert path.stem == "1970-01-02T0000"  # six hours after the last state, 1970-01-01 18:00
    *_, last = forecast.load(str(run)).rollout(np.stack([plain[n].values[0, 0, ::-1] for n in names]), 1)
    np.testing.assert_array_equal(xarray.load_dataset(path).z500.values[0, 0], last[0, ::-1])
