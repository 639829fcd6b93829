"""Forecasts and their scores: against an independent computation, from several ranks and grids."""

import csv
import json
import shutil
from pathlib import Path
from unittest import mock

import h5py
import matplotlib.image
import numpy as np
import pytest
import scores
import torch
import xarray
import xskillscore
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import evaluate
from networks.vit import ViT
from tests.forecast.evaluations import NAMES, evaluated, flags, row_weights, truth, write_climatology
from tests.helpers import ROOT, STEP, call_here, fields, run_here, run_ranks, tiny_flags, write_data, write_file
from tests.marks import at_night
from utils.checkpoint import store as checkpoint
from utils.checkpoint.weights import choose, export, read_weights
from utils.errors import Refused

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(trained) -> tuple[Path, dict]:
    """The results of an evaluation with its forecasts, and skill.json."""
    out = trained / "result"
    return out, evaluated(trained, out, "--forecasts", "zarr", "--plot_channels", "u", "t")


@pytest.mark.parametrize("weighting", ["cos", "area"])
@pytest.mark.parametrize("source", ["model", "ema", "persistence", "climatology"])
def test_scores_equal_those_of_xarray(trained, result, source, weighting):
    out, skill = result
    path = out / "forecasts" / f"{'ema' if source == 'ema' else 'model'}.zarr"
    stored = xarray.open_zarr(path, decode_timedelta=True).load()
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
        expected["acc_pooled"] = mean(a * b).mean("time") / np.sqrt(mean(a**2).mean("time") * mean(b**2).mean("time"))
    for score, values in expected.items():
        for name in NAMES:
            got = [value for value, _, _ in skill["scores"][source][score][weighting][name]]
            np.testing.assert_allclose(got, values.sel(channel=name), rtol=1e-9, atol=1e-12, err_msg=score)
    if source == "climatology":
        assert skill["scores"][source]["acc"][weighting]["u"][0] == [None] * 3


@pytest.mark.parametrize("source", ["model", "persistence"])
def test_scores_equal_those_of_scores_and_xskillscore(trained, result, source):
    """Programs of others, in float64: to 1e-12."""
    out, skill = result
    forecast = xarray.open_zarr(out / "forecasts/model.zarr", decode_timedelta=True)[NAMES].load().astype(np.float64)
    happened = truth(trained).to_dataset("channel")
    valid = happened.sel(time=forecast.time + forecast.prediction_timedelta)
    if source == "persistence":
        forecast = happened.sel(time=forecast.time) + 0 * forecast
    plane = np.cos(np.deg2rad(forecast.latitude)) + 0 * forecast.longitude
    weights = plane + 0 * forecast.time.astype(float)
    space, every = ["latitude", "longitude"], ["time", "latitude", "longitude"]
    means = np.load(trained / "stats/time_means.npy")[0, :, :16].astype(np.float64)
    axes = {axis: happened[axis] for axis in space}
    usual = xarray.Dataset({name: (space, mean) for name, mean in zip(NAMES, means)}, axes)
    valid, usual = (x.reindex(latitude=forecast.latitude) for x in (valid, usual))
    a, b = forecast - usual, valid - usual
    zero, alike = 0 * a, {"dim": every, "weights": weights}
    aa, bb, ee = (xskillscore.mse(*pair, **alike) for pair in ((a, zero), (b, zero), (a, b)))
    expected = {
        "rmse": [scores.continuous.rmse(forecast, valid, reduce_dims=every, weights=weights), np.sqrt(ee)],
        "mean_rmse": [xskillscore.rmse(forecast, valid, dim=space, weights=plane).mean("time")],
        "bias": [scores.continuous.additive_bias(forecast, valid, reduce_dims=every, weights=weights)],
        "acc_pooled": [(aa + bb - ee) / (2 * np.sqrt(aa * bb))],  # since 2 a b = a a + b b - (a - b)^2
    }
    for score, others in expected.items():
        for name in NAMES:
            got = [value for value, _, _ in skill["scores"][source][score]["cos"][name]]
            for other in others:
                np.testing.assert_allclose(got, other[name], rtol=1e-12, atol=1e-12, err_msg=f"{score} {name}")


def test_a_rollout_is_the_model_on_its_own_forecasts(trained, result):
    """Against the serial model in float64."""
    out, _ = result
    folder, info = choose(trained / "runs/tiny/1GPU/00", best=False)
    happened = truth(trained)
    stats = [np.load(trained / f"stats/global_{x}.npy").astype(np.float64).reshape(3, 1, 1) for x in ("means", "stds")]
    mean, std = map(torch.from_numpy, stats)
    for kind in ("model", "ema"):
        model = ViT((16, 32), 4, 3, 3, 32, 2, 4).double().eval()
        model.load_state_dict(read_weights(folder, kind))
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


@pytest.mark.parametrize("ranks", [2, at_night(4)])
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
                for weighting in ("cos", "area"):
                    both = [np.array(x[weighting][name]) for x in (found["scores"][source][score], by_weighting)]
                    np.testing.assert_allclose(*both, rtol=1e-6, err_msg=f"{source} {score} {name}")
    for model in ("model", "ema"):
        both = (xarray.open_zarr(folder / f"forecasts/{model}.zarr") for folder in (out, result[0]))
        xarray.testing.assert_allclose(*both, rtol=1e-5, atol=1e-5)


def test_checkpoints_of_three_grids_forecast_the_same(trained, result, tmp_path):
    """The same weights, saved by three grids."""
    _, skill = result
    weights = tmp_path / "weights.pt"
    export(trained / "runs/tiny/1GPU/00", weights)
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
    # The exported weights, with the configuration of a run of chapter 2.
    saved = tmp_path / "runs/tiny/4MP/00/config.yaml"
    argv = ["--checkpoint", str(weights), "--yaml_config", str(saved), "--config", "tiny"]
    argv += ["--inf_data_path", str(trained / "valid"), "--lead_hours", "24"]
    call_here(evaluate.main, argv)
    found = json.loads((tmp_path / "weights_evaluation/skill.json").read_text())
    assert found["scores"]["model"] == skill["scores"]["model"] and "ema" not in found["scores"]


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


def test_the_log_says_how_far_forecasts_are_of_use(result):
    out, skill = result
    log = (out / "out.log").read_text()
    at_24 = [skill["scores"][name]["rmse"]["cos"]["u"][3][0] for name in ("persistence", "model")]
    value, low, high = skill["scores"]["model"]["rmse_over_persistence"]["cos"]["u"][3]
    line = next(line for line in log.splitlines() if "          24 h " in line)  # of u, which comes first
    assert f"{at_24[0]:.4g}" in line and f"{at_24[1]:.4g}  {value:5.2f} ({low:.2f} to {high:.2f})" in line
    assert "The intervals are rough, and rather too narrow: the forecasts make 4.75 blocks of 24 h of weather" in log
    ratios = [
        x / y for (x, *_), (y, *_) in zip(*(skill["scores"][s]["rmse"]["cos"]["u"] for s in ("model", "climatology")))
    ]
    last = max([0, *(6 * k for k in range(1, 5) if max(ratios[:k]) < 1)])
    highs = [high for _, _, high in skill["scores"]["model"]["rmse_over_persistence"]["cos"]["u"]]
    use = max([0, *(6 * k for k in range(1, 5) if max(highs[:k]) < 1)])
    told = f"model, u: its RMSE is below climatology's up to {last} h, and the whole interval below persistence's up to"
    assert f"{told} {use} h" in log


def test_maps_in_a_projection(trained, tmp_path):
    pytest.importorskip("cartopy", reason="needs pip install -r requirements-maps.txt")
    for kind, projection in (("plain", "plain"), ("round", "Robinson")):
        evaluated(trained, tmp_path / kind, "--stride", "10", "--projection", projection, "--plot_channels", "u")
    plain, globe = (matplotlib.image.imread(tmp_path / kind / "pictures/maps_u.png") for kind in ("plain", "round"))
    assert plain.shape == globe.shape and globe[46:60, 440:470].min() == 1  # a corner, outside of the globe's outline
    assert plain[46:60, 460:500].min() < 0.95 and globe[150, 460:840, :3].std() > 0.1
    with Image.open(tmp_path / "round/pictures/forecast_u.gif") as film:
        first = np.asarray(film.convert("RGB"), float)
        film.seek(4)
        assert np.abs(np.asarray(film.convert("RGB"), float) - first).mean() > 1  # it moves


def test_a_climatology_of_each_day(trained, result, tmp_path):
    path = tmp_path / "usual.nc"
    usual = write_climatology(trained, path)
    skill = evaluated(trained, tmp_path / "out", "--climatology", str(path))
    assert skill["climatology"] == "usual.nc"
    stored = xarray.open_zarr(result[0] / "forecasts/model.zarr", decode_timedelta=True).astype(np.float64)
    happened = truth(trained).to_dataset("channel")
    valid = stored.time + stored.prediction_timedelta
    a, b = (x - usual.sel(dayofyear=valid.dt.dayofyear, hour=valid.dt.hour) for x in (stored, happened.sel(time=valid)))
    weights = row_weights(a.latitude, "cos")
    mean = [x.weighted(weights).mean(("latitude", "longitude")) for x in (a * b, a * a, b * b)]
    acc = (mean[0] / np.sqrt(mean[1] * mean[2])).mean("time")
    for name in NAMES:
        got = [value for value, _, _ in skill["scores"]["model"]["acc"]["cos"][name]]
        np.testing.assert_allclose(got, acc[name], rtol=1e-9)


def test_a_forecast_that_breaks_down_is_said_to(trained, tmp_path):
    """A rollout that overflows has no scores from there on, and the log says so."""
    weights = tmp_path / "weights.pt"
    export(trained / "runs/tiny/1GPU/00", weights)
    wild = {name: x * 1e38 if name.startswith("head") else x for name, x in torch.load(weights).items()}
    torch.save(wild, weights)
    argv = ["--checkpoint", str(weights), "--yaml_config", str(trained / "tiny.yaml"), "--config", "tiny"]
    argv += ["--data_dir", str(trained), "--lead_hours", "120"]
    write_file(tmp_path / "long/2003.h5", fields(24, 3, 17, 32), names=NAMES)
    call_here(evaluate.main, [*argv, "--inf_data_path", str(tmp_path / "long")])
    skill = json.loads((tmp_path / "weights_evaluation/skill.json").read_text())
    assert skill["scores"]["model"]["rmse"]["cos"]["u"][-1] == [None] * 3
    assert "model: 4 of 4 forecasts are not finite" in (tmp_path / "weights_evaluation/out.log").read_text()


def rmse(skill: dict) -> np.ndarray:
    """Return the model's, [channels, lead times]."""
    return np.array([skill["scores"]["model"]["rmse"]["cos"][name] for name in NAMES])[..., 0]


def test_a_model_is_asked_in_half_precision(trained, tmp_path, result):
    half = rmse(evaluated(trained, tmp_path / "half", "--amp_mode", "bf16"))
    difference = np.abs(half / rmse(result[1]) - 1).max()
    assert 1e-5 < difference < 0.02


def test_a_model_is_compiled(trained, tmp_path, result):
    with mock.patch("evaluate.compile_modules", wraps=evaluate.compile_modules) as compiling:
        compiled = rmse(evaluated(trained, tmp_path / "compiled", "--enable_jit"))
    assert compiling.call_count == 2  # the model, and its average
    np.testing.assert_allclose(compiled, rmse(result[1]), rtol=1e-5)


def test_the_best_checkpoint_and_one_kind_of_weights(trained, tmp_path, result):
    run = trained / "runs/tiny/1GPU/00"
    best = choose(run, best=True)[1]["iteration"]
    for kind, name in (("raw", "model"), ("ema", "ema")):
        skill = evaluated(trained, tmp_path / kind, "--best", "--weights", kind)
        assert set(skill["scores"]) == {"persistence", name, "climatology"} and skill["iteration"] == best
    (newest, *_) = checkpoint.find(run / "checkpoints")
    if json.loads((newest / "info.json").read_text())["iteration"] == best:
        assert skill["scores"]["ema"] == result[1]["scores"]["ema"]


def test_large_maps_are_thinned(trained, result, tmp_path):
    with mock.patch("utils.forecast.data.LARGEST_MAP", 16):
        evaluated(trained, tmp_path, "--stride", "10", "--plot_channels", "u")
    thin, whole = (np.load(path / "kept/000000.npz")["maps"] for path in (tmp_path, result[0]))
    np.testing.assert_array_equal(thin[:, :, 0], whole[:, :, 0, ::2, ::2])
    assert (tmp_path / "pictures/maps_u.png").exists()


def test_what_is_read_and_not_forecast_comes_from_the_files(trained, tmp_path):
    """The model reads t, and forecasts u and v: t is that of the files at each time, and of no earlier or later one."""
    flags = ["--num_iters", "1", "--in_channels", "t", "v", "u", "--out_channels", "u", "v", "--run_num", "fewer"]
    run = run_here(tiny_flags(trained, *flags))
    argv = ["--checkpoint", str(run), "--inf_data_path", str(trained / "valid"), "--out", str(tmp_path / "out")]
    call_here(evaluate.main, [*argv, "--lead_hours", "18", "--forecasts", "zarr"])
    happened, stored = truth(trained), xarray.open_zarr(tmp_path / "out/forecasts/model.zarr")
    stats = [np.load(trained / f"stats/global_{x}.npy").astype(np.float64).reshape(3, 1, 1) for x in ("means", "stds")]
    mean, std = map(torch.from_numpy, stats)
    model = ViT((16, 32), 4, 3, 2, 32, 2, 4).double().eval()
    model.load_state_dict(read_weights(choose(run, best=False)[0]))
    normal = [(torch.from_numpy(happened.sel(time=stored.time[5 + k]).values) - mean) / std for k in range(4)]
    state = normal[0][[2, 1, 0]]
    for k in range(3):
        with torch.no_grad():
            u, v = model(state[None])[0]
        for name, forecast, c in (("u", u, 0), ("v", v, 1)):
            expected = (forecast * std[c] + mean[c]).numpy()[::-1]
            np.testing.assert_allclose(stored[name][5, k], expected, rtol=2e-5, atol=2e-5, err_msg=f"{k} {name}")
        state = torch.stack([normal[k + 1][2], v, u])
    log = (tmp_path / "out/out.log").read_text()
    assert "Not forecast, but read from the files at each time: t\n" in log


def test_who_reads_changes_nothing(trained, tmp_path):
    """Reads at once, and processes that decompress; batches follow each other, and the last one is filled up."""
    for path in (trained / "valid").glob("*.h5"):
        with h5py.File(path) as file:
            start, values = int(file["time"][0]), file["fields"][:]
        write_file(tmp_path / f"gzip/{path.name}", values, start, NAMES, compression="gzip", chunks=(1, 1, 17, 32))
    more = ["--local_batch_size", "4", "--num_data_workers", "3"]
    found = evaluated(trained, tmp_path / "a", "--local_batch_size", "4")["scores"]
    assert evaluated(trained, tmp_path / "b", *more, "--read_depth", "5")["scores"] == found
    assert evaluated(trained, tmp_path / "c", *more, "--inf_data_path", str(tmp_path / "gzip"))["scores"] == found


def test_rows_from_the_south_are_judged_as_those_from_the_north(tmp_path):
    """The weights of rows follow the latitudes of the file. The model itself learns something else."""
    north = write_data(tmp_path / "north", rows=16, names=NAMES)
    south = shutil.copytree(north, tmp_path / "south")
    for path in south.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            file["fields"][:] = file["fields"][:][:, :, ::-1]
            file["latitude"] = 180 * np.arange(1, 17) / 16 - 90
    means = south / "stats/time_means.npy"
    np.save(means, np.load(means)[:, :, ::-1])
    judged = []
    for folder in (north, south):
        run_here(tiny_flags(folder, "--num_iters", "1"))
        judged.append(evaluated(folder, folder / "out")["scores"])
    for source in ("persistence", "climatology"):
        for weighting in ("cos", "area"):
            of_both = ([of[source]["rmse"][weighting][name] for name in NAMES] for of in judged)
            expected, found = (np.array(one, float)[..., 0] for one in of_both)  # without the intervals
            np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=f"{source} {weighting}")
    with pytest.raises(Refused, match=r"latitudes \[-78.75, 90.0\], and the model was trained on \[90.0, -78.75\]"):
        call_here(evaluate.main, flags(north, "--out", str(tmp_path / "out"), "--inf_data_path", str(south / "valid")))
