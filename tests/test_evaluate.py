"""Forecasts and their scores: against an independent computation, from several ranks and grids, after a kill."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import h5py
import matplotlib.image
import numpy as np
import pytest
import torch
import xarray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import evaluate
from networks.vit import ViT
from tests.helpers import (
    ROOT,
    STEP,
    call_here,
    clean_environment,
    fields,
    run_here,
    run_ranks,
    tiny_flags,
    write_data,
    write_file,
)
from utils import checkpoint
from utils.config_reader import load_evaluation
from utils.era5 import Files
from utils.evaluation import share_out
from utils.launch import Ended

NAMES = ["u", "v", "t"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with data and `runs/tiny/1GPU/00`, trained with a moving average."""
    folder = write_data(tmp_path_factory.mktemp("evaluate"), valid={"2003": 20, "2004": 7}, names=NAMES)
    run_here(tiny_flags(folder, "--num_iters", "20", "--ema_decay", "0.9"))
    return folder


def flags(folder: Path, *more: str) -> list[str]:
    """Return the command line of an evaluation of the run in `folder`: 24 hours from each time."""
    run = ["--checkpoint", str(folder / "runs/tiny/1GPU/00"), "--inf_data_path", str(folder / "valid")]
    return [*run, "--lead_hours", "24", *more]


def evaluated(folder: Path, out: Path, *more: str) -> dict:
    """Evaluate in this process, and return skill.json."""
    call_here(evaluate.main, flags(folder, "--out", str(out), *more))
    return json.loads((out / "skill.json").read_text())


@pytest.fixture(scope="module")
def result(trained) -> tuple[Path, dict]:
    """The results of an evaluation with its forecasts, and skill.json."""
    out = trained / "result"
    return out, evaluated(trained, out, "--forecasts", "zarr", "--plot_channels", "u", "t")


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


@pytest.mark.parametrize("weighting", ["cos", "area"])
@pytest.mark.parametrize("source", ["model", "ema", "persistence", "climatology"])
def test_scores_equal_those_of_xarray(trained, result, source, weighting):
    out, skill = result
    stored = xarray.open_zarr(out / "forecasts" / f"{'ema' if source == 'ema' else 'model'}.zarr")
    forecast = stored.to_dataarray("channel").astype(np.float64)
    assert forecast.dims == ("channel", "time", "prediction_timedelta", "latitude", "longitude")
    assert (np.diff(forecast.latitude) > 0).all()  # WeatherBench 2 wants them to rise
    happened = truth(trained)
    means = np.load(trained / "stats/time_means.npy")[0, :, :16].astype(np.float64)
    usual = xarray.DataArray(means, {k: happened[k] for k in ("channel", "latitude", "longitude")}, happened.dims[1:])
    valid = happened.sel(time=forecast.time + forecast.prediction_timedelta)
    if source == "persistence":
        forecast = happened.sel(time=forecast.time) + 0 * forecast
    if source == "climatology":
        forecast = usual + 0 * forecast
    weights = row_weights(forecast.latitude, weighting)

    def mean(x: xarray.DataArray) -> xarray.DataArray:
        return x.weighted(weights).mean(("latitude", "longitude"))

    square = mean((forecast - valid) ** 2)
    a, b = forecast - usual, valid - usual
    expected = {
        "rmse": np.sqrt(square.mean("time")),
        "mean_rmse": np.sqrt(square).mean("time"),
        "bias": mean(forecast - valid).mean("time"),
        "activity": np.sqrt(mean(a**2) - mean(a) ** 2).mean("time"),
        "truth_activity": np.sqrt(mean(b**2) - mean(b) ** 2).mean("time"),
    }
    if source != "climatology":
        expected["acc"] = (mean(a * b) / np.sqrt(mean(a**2) * mean(b**2))).mean("time")
    for score, values in expected.items():
        for name in NAMES:
            got = [value for value, _, _ in skill["scores"][source][score][weighting][name]]
            np.testing.assert_allclose(got, values.sel(channel=name), rtol=1e-9, atol=1e-12, err_msg=score)
    if source == "climatology":
        assert skill["scores"][source]["acc"][weighting]["u"][0] == [None] * 3


def test_a_rollout_is_the_model_on_its_own_forecasts(trained, result):
    """Against the serial model in float64."""
    out, _ = result
    folder, info = checkpoint.choose(trained / "runs/tiny/1GPU/00", best=False)
    happened = truth(trained)
    stats = [np.load(trained / f"stats/global_{x}.npy").astype(np.float64).reshape(3, 1, 1) for x in ("means", "stds")]
    mean, std = map(torch.from_numpy, stats)
    for kind in ("model", "ema"):
        model = ViT((16, 32), 4, 3, 3, 32, 2, 4).double().eval()
        model.load_state_dict(checkpoint.read_weights(folder, kind))
        stored = xarray.open_zarr(out / f"forecasts/{kind}.zarr")
        state = (torch.from_numpy(happened.sel(time=stored.time[5]).values) - mean) / std
        for k in range(4):
            with torch.no_grad():
                state = model(state[None])[0]
            expected = (state * std + mean).numpy()[:, ::-1]
            for c, name in enumerate(NAMES):
                np.testing.assert_allclose(stored[name][5, k], expected[c], rtol=2e-5, atol=2e-5)


def test_forecasts_begin_where_all_of_their_truth_is(result):
    out, skill = result
    times = xarray.open_zarr(out / "forecasts/model.zarr").time.values.astype("datetime64[s]").astype(int)
    assert times.tolist() == [STEP * t for t in range(16)] + [STEP * (1000 + t) for t in range(3)]
    assert skill["forecasts"] == 19 and skill["lead_hours"] == [6, 12, 18, 24]


def test_spectra_add_up_to_the_mean_square(trained, result):
    _, skill = result
    happened = truth(trained)
    times = [np.datetime64(STEP * t, "s") for t in [*range(1, 17), *range(1001, 1004)]]  # six hours after each start
    square = (happened.sel(time=times) ** 2).weighted(np.cos(np.deg2rad(happened.latitude))).mean()
    total = np.mean([np.sum(skill["spectra"]["truth"][name][0]) for name in NAMES])
    np.testing.assert_allclose(total, square, rtol=1e-9)
    row = happened.sel(time=times, channel="u")
    power = np.abs(np.fft.fft(row, axis=-1) / 32) ** 2
    third = (power[..., 3] + power[..., -3]) @ (w := np.cos(np.deg2rad(happened.latitude.values))) / w.sum()
    np.testing.assert_allclose(skill["spectra"]["truth"]["u"][0][3], third.mean(), rtol=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_forecasts_and_find_the_same(trained, result, tmp_path, ranks):
    _, skill = result
    out = tmp_path / "out"
    more = ["--out", str(out), "--plot_channels", "u", "t", "--forecasts", "zarr", "--local_batch_size", "2"]
    results = run_ranks(ranks, [str(ROOT / "evaluate.py"), *flags(trained, *more)])
    assert [done.returncode for done in results] == [0] * ranks, results[0].stderr
    found = json.loads((out / "skill.json").read_text())
    for source in ("model", "ema", "persistence"):
        for score, by_weighting in skill["scores"][source].items():
            for name in NAMES:
                both = [np.array(x["cos"][name]) for x in (found["scores"][source][score], by_weighting)]
                np.testing.assert_allclose(*both, rtol=1e-6, err_msg=f"{source} {score} {name}")


def test_the_forecasts_are_shared_out_in_batches_of_one_size():
    left = [0, 1, 2, 4, 5, 6, 8, 9]
    assert share_out(left, rank=0, ranks=3, size=2) == [[0, 4], [8, 8]]
    assert share_out(left, rank=2, ranks=3, size=2) == [[2, 6]]
    assert share_out(left[:2], rank=2, ranks=3, size=8) == [] == share_out([], rank=0, ranks=1, size=8)


def test_checkpoints_of_three_grids_forecast_the_same(trained, result, tmp_path):
    """The same weights, saved by three grids."""
    _, skill = result
    weights = tmp_path / "weights.pt"
    checkpoint.export(trained / "runs/tiny/1GPU/00", weights)
    still = ["--init_from", str(weights), "--lr", "0", "--num_iters", "1", "--expdir", str(tmp_path / "runs")]
    grids = {"2MP": ["--tensor_parallel", "2"], "4MP": ["--tensor_parallel", "2", "--context_parallel", "2"]}
    grids["2GPU"] = []
    for name, grid in grids.items():
        script = "train.py" if name == "2GPU" else "train_mp.py"
        ranks = int(name[0])
        results = run_ranks(ranks, [str(ROOT / script), *tiny_flags(trained, *still, *grid)])
        assert results[0].returncode == 0, results[0].stderr
        run = tmp_path / "runs/tiny" / name / "00"
        argv = ["--checkpoint", str(run), "--inf_data_path", str(trained / "valid"), "--lead_hours", "24"]
        call_here(evaluate.main, argv)
        found = json.loads((run / "evaluation/skill.json").read_text())
        assert found["scores"]["model"] == skill["scores"]["model"], name
    argv = ["--checkpoint", str(weights), "--yaml_config", str(trained / "tiny.yaml"), "--config", "tiny"]
    argv += ["--data_dir", str(trained), "--inf_data_path", str(trained / "valid"), "--lead_hours", "24"]
    call_here(evaluate.main, argv)
    found = json.loads((tmp_path / "weights_evaluation/skill.json").read_text())
    assert found["scores"]["model"] == skill["scores"]["model"] and "ema" not in found["scores"]


def contents(out: Path) -> dict[str, bytes]:
    """Return all files that hold forecasts or scores."""
    paths = [out / "skill.json", out / "skill.csv", *(p for p in (out / "forecasts").rglob("*") if p.is_file())]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_an_evaluation_that_was_killed_goes_on_and_writes_the_same_files(trained, tmp_path, kind):
    more = ["--forecasts", kind, "--local_batch_size", "5"]  # what is left when it is killed makes no whole batch
    whole_command, command = (
        [sys.executable, "evaluate.py", *flags(trained, "--out", str(tmp_path / name), *more)]
        for name in ("whole", "killed")
    )
    subprocess.run(whole_command, cwd=ROOT, env=clean_environment(), capture_output=True, check=True)
    out = tmp_path / "killed"
    process = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while len(list((out / "kept").glob("*.npz"))) < 3:
        assert process.poll() is None and time.monotonic() < end
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = {path.name: path.stat().st_mtime_ns for path in (out / "kept").glob("*.npz")}
    assert len(there) < 19 and not (out / "skill.json").exists()
    subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, check=True)
    for name, date in there.items():
        assert (out / "kept" / name).stat().st_mtime_ns == date, "made twice"
    whole, killed = contents(tmp_path / "whole"), contents(out)
    assert not [name for name in killed if name.endswith(".part")]
    assert {n for n in whole if whole[n] != killed.get(n)} == set() and whole.keys() == killed.keys()


def test_another_setting_does_not_go_on(trained, tmp_path):
    out = tmp_path / "out"
    evaluated(trained, out, "--stride", "9")
    evaluated(trained, out, "--stride", "10")
    assert len(list((tmp_path / "out.1/kept").glob("*.npz"))) == 3
    assert len(list((out / "kept").glob("*.npz"))) == 2


def test_a_folder_of_something_else_is_left_alone(trained, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    for out in (tmp_path / "mine", trained / "runs/tiny/1GPU/00"):
        assert "holds other files than an evaluation's: choose another with --out" in refused(
            flags(trained, "--out", str(out))
        )
        assert out.exists()
    (tmp_path / "empty").mkdir()
    evaluated(trained, tmp_path / "empty", "--stride", "10")


def test_two_evaluations_do_not_share_a_folder(trained, tmp_path):
    evaluated(trained, tmp_path / "out", "--stride", "10")
    lines = []

    def keep(self, numbers, steps):
        lines.append(refused(flags(trained, "--out", str(tmp_path / "out"), "--stride", "9")))
        raise Ended(0)

    (tmp_path / "out/kept/000000.npz").unlink()  # the same again: it goes on
    with mock.patch("utils.judge.Judge.keep", keep), pytest.raises(Ended):
        evaluated(trained, tmp_path / "out", "--stride", "10")
    assert "is in use by process" in lines[0] and "choose another folder with --out" in lines[0]


def test_a_signal_stops_all_ranks_and_the_same_command_goes_on(trained, tmp_path):
    """Both ranks leave with 75 after the batch that they are at, as a job script expects that queues the job again."""
    argv = flags(trained, "--out", str(tmp_path / "out"), "--local_batch_size", "1")
    code = "import os, signal, runpy, sys; sys.argv = sys.argv[1:]; from utils.judge import Judge; keep = Judge.keep\n"
    code += "def stop(self, numbers, steps):\n    keep(self, numbers, steps)\n"
    code += "    if numbers == [4]: os.kill(os.getpid(), signal.SIGUSR1)\n"
    code += "Judge.keep = stop; runpy.run_path(sys.argv[0], run_name='__main__')"
    results = run_ranks(2, ["-c", code, str(ROOT / "evaluate.py"), *argv])
    assert [done.returncode for done in results] == [75, 75], results[0].stderr
    there = len(list((tmp_path / "out/kept").glob("*.npz")))
    assert 5 <= there < 19 and "Stopped by a signal" in results[0].stderr
    results = run_ranks(2, [str(ROOT / "evaluate.py"), *argv])
    assert [done.returncode for done in results] == [0, 0], results[0].stderr
    assert f"({there} forecasts are there already)" in results[0].stderr
    assert len(list((tmp_path / "out/kept").glob("*.npz"))) == 19


def test_netcdf_and_zarr_hold_the_same(trained, result, tmp_path):
    out = tmp_path / "out"
    evaluated(trained, out, "--forecasts", "netcdf")
    paths = sorted((out / "forecasts/model").glob("*.nc"))
    assert len(paths) == 19 and paths[1].name == "1970-01-01T0600.nc"
    files = xarray.concat([xarray.load_dataset(path) for path in paths], "time")
    stored = xarray.open_zarr(result[0] / "forecasts/model.zarr")
    xarray.testing.assert_identical(files, stored.load())
    assert stored.u.units == "m s-1" and stored.u.dtype == np.float32
    assert set(stored.u.dims) == {"time", "prediction_timedelta", "latitude", "longitude"}


def test_a_user_finds_tables_pictures_and_curves(result):
    out, skill = result
    rows = list(csv.DictReader((out / "skill.csv").open()))
    wanted = {"source": "model", "channel": "t", "lead_hours": "12.0", "score": "rmse", "weighting": "area"}
    (row,) = (row for row in rows if wanted.items() <= row.items())
    assert [float(row[x]) for x in ("value", "low", "high")] == skill["scores"]["model"]["rmse"]["area"]["t"][1]
    assert float(row["low"]) <= float(row["value"]) <= float(row["high"]) and row["units"] == "m s-1"
    pictures = {path.name for path in (out / "pictures").iterdir()}
    kinds = {f"{kind}_{name}" for kind in ("skill", "maps", "spectra") for name in "ut"}
    assert pictures == {f"{name}.png" for name in kinds | {"scorecard_model", "scorecard_ema"}} | {
        "forecast_u.gif", "forecast_t.gif",
    }  # fmt: skip
    with Image.open(out / "pictures/forecast_u.gif") as film:
        assert film.n_frames == 5  # the initial state, and four steps
    board = EventAccumulator(str(out / "logs/model")).Reload()
    assert [event.step for event in board.Scalars("rmse/u")] == [6, 12, 18, 24]
    values = [event.value for event in board.Scalars("rmse/u")]
    np.testing.assert_allclose(values, [x for x, _, _ in skill["scores"]["model"]["rmse"]["cos"]["u"]], rtol=1e-6)
    assert "skill_u" in EventAccumulator(str(out / "logs/pictures")).Reload().Tags()["images"]
    log = (out / "out.log").read_text()
    assert "19 forecasts" in log and "1970-01-01 00:00" in log


def test_maps_in_a_projection(trained, tmp_path):
    pytest.importorskip("cartopy", reason="needs pip install -r requirements-maps.txt")
    for kind, projection in (("plain", "plain"), ("round", "Robinson")):
        evaluated(trained, tmp_path / kind, "--stride", "10", "--projection", projection)
    plain, globe = (matplotlib.image.imread(tmp_path / kind / "pictures/maps_u.png") for kind in ("plain", "round"))
    assert plain.shape == globe.shape and globe[46:60, 440:470].min() == 1  # a corner, outside of the globe's outline
    assert plain[46:60, 460:500].min() < 0.95 and globe[150, 460:840, :3].std() > 0.1
    with Image.open(tmp_path / "round/pictures/forecast_u.gif") as film:
        first = np.asarray(film.convert("RGB"), float)
        film.seek(4)
        assert np.abs(np.asarray(film.convert("RGB"), float) - first).mean() > 1  # it moves


def test_a_projection_beside_xarrays_engines(trained, tmp_path):
    """In a process that opens a climatology, and by that eccodes, before it draws: it must not crash at its end."""
    pytest.importorskip("cartopy", reason="needs pip install -r requirements-maps.txt")
    usual = tmp_path / "usual.nc"
    write_climatology(trained, usual)
    argv = flags(trained, "--out", str(tmp_path / "out"), "--climatology", str(usual), "--projection", "Robinson")
    command = [sys.executable, "evaluate.py", *argv, "--stride", "10"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write_climatology(trained: Path, path: Path, days: int = 366, rows: int = 16, **rename: str) -> xarray.Dataset:
    happened = truth(trained, rows)[0].drop_vars("time")
    day = xarray.DataArray(np.arange(1, days + 1), dims="dayofyear", name="dayofyear")
    hour = xarray.DataArray([0, 6, 12, 18], dims="hour", name="hour")
    usual = (happened + 0.01 * day + 0.1 * hour).assign_coords(dayofyear=day, hour=hour)
    dataset = usual.to_dataset("channel").rename(rename)
    dataset.to_netcdf(path)
    return dataset


def test_a_climatology_of_each_day(trained, result, tmp_path):
    path = tmp_path / "usual.nc"
    usual = write_climatology(trained, path)
    skill = evaluated(trained, tmp_path / "out", "--climatology", str(path))
    assert skill["climatology"] == "usual.nc"
    stored = xarray.open_zarr(result[0] / "forecasts/model.zarr").astype(np.float64)
    happened = truth(trained).to_dataset("channel")
    valid = stored.time + stored.prediction_timedelta
    a, b = (x - usual.sel(dayofyear=valid.dt.dayofyear, hour=valid.dt.hour) for x in (stored, happened.sel(time=valid)))
    weights = row_weights(a.latitude, "cos")
    mean = [x.weighted(weights).mean(("latitude", "longitude")) for x in (a * b, a * a, b * b)]
    acc = (mean[0] / np.sqrt(mean[1] * mean[2])).mean("time")
    for name in NAMES:
        got = [value for value, _, _ in skill["scores"]["model"]["acc"]["cos"][name]]
        np.testing.assert_allclose(got, acc[name], rtol=1e-9)


def refused(argv: list[str]) -> str:
    """Return the one line that an evaluation ends with."""
    done = run_ranks(1, [str(ROOT / "evaluate.py"), *argv])[0]
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("evaluate.py: error: ")
    return line


def test_what_a_user_can_get_wrong(trained, tmp_path):
    run = str(trained / "runs/tiny/1GPU/00")
    assert "no complete checkpoint" in refused(["--checkpoint", str(tmp_path)])
    assert "no /" in refused(["--checkpoint", str(tmp_path / "none")])
    assert "give the folder of a run" in refused([])
    assert "leave --config out" in refused(["--checkpoint", run, "--config", "tiny"])
    assert "did you mean '--lead_hours'" in refused(flags(trained, "--lead_hour", "6"))
    assert "the model's step is 6 h: take a multiple of it" in refused(flags(trained, "--lead_hours", "15"))
    assert "take a multiple" in refused(flags(trained, "--lead_hours", "0"))
    few = refused(flags(trained, "--lead_hours", "120"))
    assert "no 21 steps in a row" in few and "lower --lead_hours" in few
    assert "inf_data_path is None" in refused(["--checkpoint", run])
    assert "'Robins' is no map of cartopy.crs" in refused(flags(trained, "--projection", "Robins"))
    assert "ema_decay" in refused(flags(trained, "--weights", "ema", "--checkpoint", str(_plain(trained))))


def _plain(trained: Path) -> Path:
    """Return a run without a moving average."""
    return run_here(tiny_flags(trained, "--num_iters", "1", "--run_num", "plain"))


def test_other_channels_than_the_model_was_trained_on(trained, tmp_path):
    for folder, names, hours in (("names", ["u", "v", "q"], 6), ("step", NAMES, 12), ("grid", NAMES, 6)):
        write_file(tmp_path / folder / "2003.h5", fields(9, 3, 17, 32), names=names)
        with h5py.File(tmp_path / folder / "2003.h5", "a") as file:
            file["time"][:] = np.arange(9) * hours * 3600
    argv = ["--checkpoint", str(trained / "runs/tiny/1GPU/00"), "--lead_hours", "24"]
    line = refused([*argv, "--inf_data_path", str(tmp_path / "names")])
    assert "input channels ['u', 'v', 'q']" in line and "trained on ['u', 'v', 't']" in line
    assert "step in hours 12" in refused([*argv, "--inf_data_path", str(tmp_path / "step")])
    with h5py.File(tmp_path / "grid/2003.h5", "a") as file:
        file["longitude"] = np.arange(32) * 11.25 - 180
    assert "longitudes [-180.0, 168.75]" in refused([*argv, "--inf_data_path", str(tmp_path / "grid")])


def test_files_without_time(trained, tmp_path):
    """Their forecasts have no dates, and lie inside a file; with dated files they are refused."""
    write_file(tmp_path / "none/2003.h5", fields(8, 3, 17, 32), start=None, names=NAMES)
    argv = flags(trained, "--inf_data_path", str(tmp_path / "none"))
    skill = evaluated(trained, tmp_path / "out", "--inf_data_path", str(tmp_path / "none"))
    assert skill["forecasts"] == 4 and skill["first"] == "2003.h5, step 0"
    assert "stores no time: leave it out" in refused([*argv, "--forecasts", "netcdf", "--out", str(tmp_path / "b")])
    write_file(tmp_path / "none/2004.h5", fields(8, 3, 17, 32), names=NAMES)
    assert "some files in" in refused([*argv, "--out", str(tmp_path / "c")])


def test_a_forecast_that_breaks_down_is_said_to(trained, tmp_path):
    """A rollout that overflows has no scores from there on, and the log says so."""
    weights = tmp_path / "weights.pt"
    checkpoint.export(trained / "runs/tiny/1GPU/00", weights)
    wild = {name: x * 1e38 if name.startswith("head") else x for name, x in torch.load(weights).items()}
    torch.save(wild, weights)
    argv = ["--checkpoint", str(weights), "--yaml_config", str(trained / "tiny.yaml"), "--config", "tiny"]
    argv += ["--data_dir", str(trained), "--inf_data_path", str(trained / "valid"), "--lead_hours", "120"]
    write_file(tmp_path / "long/2003.h5", fields(24, 3, 17, 32), names=NAMES)
    call_here(evaluate.main, [*argv, "--inf_data_path", str(tmp_path / "long")])
    skill = json.loads((tmp_path / "weights_evaluation/skill.json").read_text())
    assert skill["scores"]["model"]["rmse"]["cos"]["u"][-1] == [None] * 3
    assert "model: 4 of 4 forecasts are not finite" in (tmp_path / "weights_evaluation/out.log").read_text()


def test_options_that_do_nothing_are_refused(trained):
    run = trained / "runs/tiny/1GPU/00"
    (one, *_) = checkpoint.find(run / "checkpoints")
    assert "leave --best out" in refused(["--checkpoint", str(one), "--best"])
    assert "leave --yaml_config out" in refused(["--checkpoint", str(run), "--yaml_config", "x.yaml"])


def test_data_that_has_moved(trained, tmp_path):
    shutil.copytree(trained / "stats", tmp_path / "stats")
    evaluated(trained, tmp_path / "out", "--stride", "10", "--data_dir", str(tmp_path))
    setting = json.loads((tmp_path / "out/setting.json").read_text())
    assert {Path(path).parent for path, *_ in setting["statistics"]} == {tmp_path / "stats"}


def test_a_data_dir_that_moves_nothing_is_said_to(trained, tmp_path):
    """A run whose paths have another folder at their front."""
    (newest, *_) = checkpoint.find(trained / "runs/tiny/1GPU/00/checkpoints")
    copy = shutil.copytree(newest, tmp_path / newest.name)
    info = json.loads((copy / "info.json").read_text())
    paths = {
        name: "mine/" + Path(path).name for name, path in info["config"].items() if name.endswith("_path") and path
    }
    info["config"] |= paths | {"data_dir": None}
    (copy / "info.json").write_text(json.dumps(info))
    _, config, _, remarks = load_evaluation(["--checkpoint", str(copy), "--data_dir", "/elsewhere"])
    assert remarks == ["data_dir changes nothing: no path of the training begins with /data"]
    assert config.time_means_path == "mine/time_means.npy"
    assert load_evaluation(["--checkpoint", str(copy)])[3] == []


def test_a_model_is_asked_in_half_precision_and_compiled(trained, tmp_path, result):
    skill = evaluated(trained, tmp_path / "half", "--amp_mode", "bf16", "--enable_jit")
    for name in NAMES:
        both = [np.array(x["scores"]["model"]["rmse"]["cos"][name])[:, 0] for x in (skill, result[1])]
        np.testing.assert_allclose(*both, rtol=0.02)
        assert not np.array_equal(*both)


def test_a_model_that_does_not_forecast_its_input_takes_one_step(trained, tmp_path):
    run = run_here(tiny_flags(trained, "--num_iters", "1", "--n_out_channels", "2", "--run_num", "fewer"))
    argv = ["--checkpoint", str(run), "--inf_data_path", str(trained / "valid"), "--out", str(tmp_path / "out")]
    line = refused([*argv, "--lead_hours", "24"])
    assert "reads 3 channels and forecasts 2" in line and "--lead_hours 6" in line
    call_here(evaluate.main, [*argv, "--lead_hours", "6"])
    skill = json.loads((tmp_path / "out/skill.json").read_text())
    assert skill["lead_hours"] == [6] and list(skill["channels"]) == ["u", "v"]


def test_a_value_that_is_not_finite_ends_it_with_its_place(trained, tmp_path):
    data = fields(9, 3, 17, 32)
    data[4, 1, 2, 3] = np.nan
    write_file(tmp_path / "bad/2003.h5", data, names=NAMES)
    argv = flags(trained, "--inf_data_path", str(tmp_path / "bad"), "--out", str(tmp_path / "out"))
    for ranks in (1, 2):
        results = run_ranks(ranks, [str(ROOT / "evaluate.py"), *argv])
        assert {done.returncode for done in results} == {2}
        told = "".join(done.stderr for done in results)
        assert "2003.h5: frame 4, channel 'v', row 2, column 3 is nan" in told and "Traceback" not in told


def test_a_climatology_that_does_not_fit(trained, tmp_path):
    short, other = tmp_path / "short.nc", tmp_path / "other.nc"
    write_climatology(trained, short, days=90)
    write_climatology(trained, other, u="x")
    assert "holds 90 days of the year" in refused(flags(trained, "--climatology", str(short)))
    assert "has no 'u' of [dayofyear, latitude, longitude]" in refused(flags(trained, "--climatology", str(other)))


def most_memory(trained: Path, data: Path, out: Path) -> float:
    """Return the most memory of an evaluation with few forecasts at a time, in MB."""
    argv = ["--checkpoint", str(trained / "runs/tiny/1GPU/00"), "--inf_data_path", str(data), "--lead_hours", "24"]
    code = "import resource, runpy, sys; runpy.run_path('evaluate.py', run_name='__main__'); "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)"
    argv += ["--local_batch_size", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, env=clean_environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_memory_does_not_grow_with_the_number_of_forecasts(trained, tmp_path):
    for steps in (20, 400):
        write_file(tmp_path / f"{steps}/2003.h5", fields(steps, 3, 17, 32), names=NAMES)
    few, many = (most_memory(trained, tmp_path / str(steps), tmp_path / f"out{steps}") for steps in (20, 400))
    # What 380 more forecasts of this size would take: 4 steps x 4 sources x 3 channels x 16 x 32 numbers each.
    assert many - few < 10 < 380 * 4 * 4 * 3 * 16 * 32 * 4 / 1e6


def frames(folder: Path, dt: int, steps: int) -> list[list[tuple[int, int]]]:
    return [[tuple(frame) for frame in row] for row in Files.open(str(folder)).stretches(dt, steps).tolist()]


def test_stretches_span_files_and_no_gap(tmp_path):
    for name, start, length in (("2001", 0, 3), ("2002", 3, 2), ("2003", 7, 3)):  # 5 and 6 are missing
        write_file(tmp_path / f"{name}.h5", fields(length, 1, 4, 4), start=start * STEP)
    assert frames(tmp_path, 1, 2) == [
        [(0, 0), (0, 1), (0, 2)], [(0, 1), (0, 2), (1, 0)], [(0, 2), (1, 0), (1, 1)], [(2, 0), (2, 1), (2, 2)],
    ]  # fmt: skip
    assert frames(tmp_path, 3, 1)[0] == [(0, 0), (1, 0)]


def test_without_times_a_stretch_lies_in_one_file(tmp_path):
    for name, length in (("2001", 3), ("2002", 2)):
        write_file(tmp_path / f"{name}.h5", fields(length, 1, 4, 4), start=None)
    assert frames(tmp_path, 1, 1) == [[(0, 0), (0, 1)], [(0, 1), (0, 2)], [(1, 0), (1, 1)]]
    assert frames(tmp_path, 1, 3) == []
