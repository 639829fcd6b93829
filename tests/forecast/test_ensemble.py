"""Ensembles: how members begin, and scores that equal those of other programs."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import scores
import torch
import xarray
import xskillscore

import evaluate
import forecast
from tests.forecast.evaluations import NAMES, evaluated, flags, refused, row_weights, truth
from tests.helpers import call_here, fields, run_here, tiny_flags, write_data, write_file
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.config.reader import load_config
from utils.data.files import Files
from utils.data.frames import FrameReader
from utils.errors import ReadError, Refused
from utils.forecast.data import ForecastData
from utils.forecast.ensemble import Perturbations, ensemble_moments, rank_histogram
from utils.forecast.settings import Evaluation

pytestmark = pytest.mark.slow

PERTURBED = ["--perturb", "0.3", "--members", "4"]


@pytest.fixture(scope="module")
def result(trained) -> tuple[Path, dict]:
    out = trained / "ensemble"
    return out, evaluated(trained, out, *PERTURBED, "--forecasts", "zarr", "--plot_channels", "u")


def opened(out: Path, name: str) -> xarray.Dataset:
    """Return the forecasts of this name, in float64."""
    return xarray.open_zarr(out / f"forecasts/{name}.zarr", decode_timedelta=True)[NAMES].load().astype(np.float64)


def together(out: Path, count: int) -> xarray.Dataset:
    return xarray.concat([opened(out, f"member{i + 1:02d}") for i in range(count)], "member")


def values(skill: dict, score: str, name: str, weighting: str = "cos") -> list[float]:
    return [value for value, _, _ in skill["ensemble"]["scores"][score][weighting][name]]


@pytest.mark.parametrize("weighting", ["cos", "area"])
def test_scores_equal_those_of_other_programs(trained, result, weighting):
    """xskillscore, scores and xarray, in float64: to 1e-12."""
    out, skill = result
    members, mean = together(out, 4), opened(out, "mean")
    np.testing.assert_allclose(mean.u, members.u.mean("member"), rtol=1e-6, atol=1e-7)  # written in float32
    valid = truth(trained).to_dataset("channel").sel(time=mean.time + mean.prediction_timedelta)
    valid = valid.reindex(latitude=mean.latitude).drop_vars("time", errors="ignore").assign_coords(time=mean.time)
    weights = row_weights(mean.latitude, weighting) + 0 * mean.longitude + 0 * mean.time.astype(float)
    every = ["time", "latitude", "longitude"]

    def average(x: xarray.Dataset) -> xarray.Dataset:
        return x.weighted(weights).mean(every)

    plain = xskillscore.crps_ensemble(valid, members, dim=[])  # of M members it expects too much: S / (2 M^2) is taken
    distance = np.abs(members - valid).mean("member")
    fair = average(distance - (distance - plain) * 4 / 3)
    also = scores.probability.crps_for_ensemble(members, valid, "member", method="fair", preserve_dims="all")
    variance = average(members.var("member", ddof=1))
    error = np.sqrt(average((mean - valid) ** 2))
    for name in NAMES:
        np.testing.assert_allclose(values(skill, "crps", name, weighting), fair[name], rtol=1e-12)
        np.testing.assert_allclose(values(skill, "crps", name, weighting), average(also)[name], rtol=1e-12)
        np.testing.assert_allclose(values(skill, "spread", name, weighting), np.sqrt(variance[name]), rtol=1e-12)
        ratio = np.sqrt(5 / 4) * np.sqrt(variance[name]) / error[name]
        np.testing.assert_allclose(values(skill, "spread_skill", name, weighting), ratio, rtol=1e-12)
        rmse = [value for value, _, _ in skill["scores"]["mean"]["rmse"][weighting][name]]
        np.testing.assert_allclose(rmse, error[name], rtol=1e-12)


def test_ranks_are_those_of_xskillscore():
    """Of random fields, each grid point as heavy as any other; and weighted rows add up."""
    members, happened = torch.randn(5, 2, 8, 16).double(), torch.randn(2, 8, 16).double()
    found = rank_histogram(members, happened, torch.full((8,), 1 / 8).double())
    axes = ("channel", "latitude", "longitude")
    other = xskillscore.rank_histogram(
        xarray.DataArray(happened.numpy(), dims=axes),
        xarray.DataArray(members.numpy(), dims=("member", *axes)),
        dim=["latitude", "longitude"],
    )
    np.testing.assert_allclose(found, other.values / 128, rtol=1e-12)
    one_row = rank_histogram(members, happened, torch.eye(8)[3].double())
    np.testing.assert_allclose(one_row, rank_histogram(members[:, :, 3:4], happened[:, 3:4], torch.ones(1).double()))
    assert torch.allclose(found.sum(dim=-1), torch.ones(2).double())


def test_members_that_are_drawn_as_the_truth_is_score_as_they_should():
    """Their spread is their mean's error, each rank is as likely, and the CRPS is that of few members as of many."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(21, 1, 200, 500, generator=generator).double()
    weights = torch.full((200, 1), 1 / 200).double()
    for M in (2, 5, 20):
        members, happened = draws[:M], draws[20]
        variance, crps = ensemble_moments(members, happened, weights)[0, 0]
        error = (members.mean(dim=0) - happened).square().mean()
        assert (M + 1) / M * variance / error == pytest.approx(1, rel=0.02)
        assert crps == pytest.approx(1 / np.pi**0.5, rel=0.01)  # of a normal distribution
        ranks = rank_histogram(members, happened, weights[:, 0])
        assert torch.allclose(ranks, torch.full_like(ranks, 1 / (M + 1)), rtol=0.05)


def test_the_histogram_of_an_evaluation_is_that_of_its_members(trained, result):
    out, skill = result
    members = together(out, 4)
    valid = truth(trained).to_dataset("channel").reindex(latitude=members.latitude)
    weights = row_weights(members.latitude, "cos")
    for i, hours in enumerate(skill["ensemble"]["ranks"]["lead_hours"]):
        lead = np.timedelta64(int(hours), "h")
        at = members.sel(prediction_timedelta=lead)
        below = (at < valid.sel(time=at.time + lead).assign_coords(time=at.time)).sum("member")
        for name in NAMES:
            for rank in range(5):
                part = (below[name] == rank).weighted(weights).mean()
                assert skill["ensemble"]["ranks"][name][i][rank] == pytest.approx(float(part), abs=1e-12)


def test_members_begin_in_pairs_around_the_state(trained, result):
    """The control is the forecast without an ensemble; a pair's first steps lie on both sides of it, nearly alike."""
    out, skill = result
    call_here(evaluate.main, flags(trained, "--out", str(trained / "plain"), "--forecasts", "zarr", "--weights", "raw"))
    control, plain = opened(out, "control"), opened(trained / "plain", "model")
    assert control.equals(plain)
    members, first = together(out, 4), {"prediction_timedelta": 0}
    for name in NAMES:
        away = (members - control)[name].isel(first)
        assert float(np.abs(away).mean()) > 0.01
        assert float(np.abs(away[0] + away[1]).mean()) < 0.7 * float(np.abs(away[0]).mean())
        assert float(np.abs(away[0] - away[2]).mean()) > 0.7 * float(np.abs(away[0]).mean())


def test_perturbations_vary_as_the_weather_does_times_their_size(trained):
    files = Files.open(str(trained / "valid"))
    reader = FrameReader(files, [2, 0], range(16), 32)
    found = Perturbations(reader, 0.1, np.array([2.0, 0.0]), torch.device("cpu"))
    shifts = found.at(list(range(40)), 0)
    assert shifts.shape == (40, 2, 16, 32) and not shifts[:, 1].any()  # what is not forecast stays as it is
    stored = np.concatenate([reader.read_frame(*frame)[:1] for frame in found.frames])
    assert float(shifts[:, 0].std()) == pytest.approx(0.1 * stored.std() / 2, rel=0.1)
    assert torch.equal(found.at([7, 3], 1), -torch.stack([shifts[7], shifts[3]]))  # in whatever batch
    assert not torch.allclose(found.at([7], 2), shifts[7]) and not torch.allclose(shifts[7], shifts[8])


def test_channels_that_are_not_forecast_and_the_control_stay_as_they_are(trained):
    argv = tiny_flags(trained, "--inf_data_path", str(trained / "valid"), "--in_channels", *NAMES)
    config = load_config([*argv, "--out_channels", "v", "u", "--forcings", "solar"])[0].with_batches(1)
    data = ForecastData(config, Evaluation(lead_hours=6, perturb=0.5), torch.device("cpu"))
    first = torch.randn(2, 4, 16, 32)
    state = data.begun("member03", first, [0, 5])
    changed = (state != first).flatten(2).any(dim=2)
    assert changed.tolist() == [[True, True, False, False]] * 2
    assert data.begun("control", first, [0, 5]) is first
    data.close()


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """Three trainings of the same data: another seed, and another size; and one on other statistics."""
    folder = tmp_path_factory.mktemp("several")
    write_data(folder, names=NAMES)
    write_file(folder / "valid/2004.h5", fields(9, 3, 17, 32, seed=5), start=10**9 // 21600 * 21600, names=NAMES)
    for name, more in {"00": [], "b": ["--seed", "1"], "c": ["--depth", "1", "--residual"]}.items():
        run_here(tiny_flags(folder, "--run_num", name, *more))
    stds = np.load(folder / "stats/global_stds.npy")
    np.save(folder / "stats/other.npy", 2 * stds)
    run_here(tiny_flags(folder, "--run_num", "other", "--global_stds_path", str(folder / "stats/other.npy")))
    assert checkpoint_main(["export", str(folder / "runs/tiny/1GPU/c"), str(folder / "exported")]) == 0
    return folder


def test_members_may_be_several_models(several, tmp_path):
    """Each is what it is alone, bit for bit: of another seed, and of another size from an exported folder."""
    runs = several / "runs/tiny/1GPU"
    sources = [str(runs / "00"), str(runs / "b"), str(several / "exported")]
    more = ["--inf_data_path", str(several / "valid"), "--lead_hours", "12", "--forecasts", "zarr"]
    call_here(evaluate.main, ["--checkpoint", *sources, *more, "--out", str(tmp_path / "all"), "--plot_channels", "u"])
    skill = json.loads((tmp_path / "all/skill.json").read_text())
    assert list(skill["scores"]) == ["persistence", "member01", "mean", "climatology"]
    assert skill["ensemble"]["members"] == 3 and len(skill["checkpoint"]) == 3
    for i, source in enumerate(sources):
        call_here(
            evaluate.main, ["--checkpoint", source, *more, "--out", str(tmp_path / f"{i}"), "--local_batch_size", "8"]
        )
        assert opened(tmp_path / "all", f"member{i + 1:02d}").equals(opened(tmp_path / f"{i}", "model"))
    table = (tmp_path / "all/skill.csv").read_text()
    assert "ensemble,u,,6.0,spread_skill,cos," in table and "mean,u," in table
    log = (tmp_path / "all/out.log").read_text()
    assert "Ensemble of 3: spread over the error of its mean" in log
    assert (tmp_path / "all/pictures/ensemble_u.png").exists()


def test_an_ensemble_goes_on_where_it_was_and_knows_its_own(several, tmp_path):
    runs, out = several / "runs/tiny/1GPU", tmp_path / "out"
    argv = ["--checkpoint", str(runs / "00"), str(runs / "b"), "--inf_data_path", str(several / "valid")]
    argv += ["--lead_hours", "12", "--out", str(out)]
    call_here(evaluate.main, argv)
    before = (out / "skill.json").read_text()
    (out / "kept/000003.npz").unlink()
    call_here(evaluate.main, argv)
    assert (out / "skill.json").read_text() == before and "forecasts are there already" in (out / "out.log").read_text()
    call_here(evaluate.main, [*argv, "--perturb", "0.1", "--members", "2"])
    first = json.loads((out / "skill.json").read_text())["ensemble"]
    call_here(evaluate.main, [*argv, "--perturb", "0.2", "--members", "2"])
    second = json.loads((out / "skill.json").read_text())["ensemble"]
    assert first["members"] == second["members"] == 4 and first["scores"] != second["scores"]
    assert len(list(tmp_path.iterdir())) == 3  # the others are set aside


def test_an_ensemble_of_averaged_weights_is_another_one(trained, tmp_path):
    more = [*PERTURBED[:2], "--members", "2"]
    raw = evaluated(trained, tmp_path / "out", *more)
    averaged = evaluated(trained, tmp_path / "out", *more, "--weights", "ema")
    assert raw["scores"]["control"] != averaged["scores"]["control"]
    alone = evaluated(trained, tmp_path / "alone", "--weights", "ema")
    assert averaged["scores"]["control"] == alone["scores"]["ema"]


def test_files_in_half_precision_leave_the_mean_as_it_is(several, tmp_path):
    """A truth in float16 does not round what is judged and written."""
    write_file(tmp_path / "valid/2004.h5", fields(5, 3, 17, 32, seed=5).astype(np.float16), names=NAMES)
    runs = [str(several / "runs/tiny/1GPU" / name) for name in ("00", "b")]
    argv = ["--checkpoint", *runs, "--inf_data_path", str(tmp_path / "valid"), "--lead_hours", "6"]
    call_here(evaluate.main, [*argv, "--out", str(tmp_path / "out"), "--forecasts", "zarr"])
    found, members = opened(tmp_path / "out", "mean"), together(tmp_path / "out", 2)
    for name in NAMES:
        np.testing.assert_allclose(found[name], members[name].mean("member"), rtol=1e-6, atol=1e-7)


def test_models_of_other_steps_are_refused_where_nobody_stored_the_time(tmp_path):
    write_data(tmp_path, names=NAMES)
    for path in tmp_path.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            del file["time"]
    for dt in ("1", "2"):
        run_here(tiny_flags(tmp_path, "--run_num", dt, "--dt", dt))
    runs = [str(tmp_path / "runs/tiny/1GPU" / dt) for dt in ("1", "2")]
    assert "forecasts 2 stored steps ahead" in refused(
        ["--checkpoint", *runs, "--inf_data_path", str(tmp_path / "valid")]
    )


def test_a_number_that_is_not_finite_is_found_wherever_it_is_drawn(several, tmp_path):
    """Also in a frame that no forecast looks at; and a member that breaks down has no rank."""
    data = fields(12, 3, 17, 32)
    data[11, 1, 2, 3] = np.nan
    write_file(tmp_path / "valid/2004.h5", data, names=NAMES)
    found = Perturbations(
        FrameReader(Files.open(str(tmp_path / "valid")), [1], range(16), 32), 1, np.ones(1), torch.device("cpu")
    )
    with pytest.raises(ReadError, match="frame 11, input 0, row 2, column 3 is nan"):
        found.at(list(range(30)), 0)
    members = torch.randn(3, 2, 4, 8).double()
    members[1, 0, 0, 0] = torch.inf
    ranks = rank_histogram(members, torch.zeros(2, 4, 8).double(), torch.full((4,), 0.25).double())
    assert ranks[0].isnan().all() and ranks[1].isfinite().all()


@pytest.mark.parametrize(
    "more, said",
    [
        (["--perturb", "0"], "members would be alike"),
        (["--perturb", "0.1", "--members", "3"], "take an even number"),
        (["--perturb", "0.1", "--members", "1"], "it takes 2 or more"),
    ],
)
def test_what_makes_no_ensemble_is_refused(trained, more, said):
    assert said in refused(flags(trained, *more))


def test_models_that_do_not_go_together_are_refused(several, tmp_path):
    runs = several / "runs/tiny/1GPU"
    a, other = str(runs / "00"), str(runs / "other")
    more = ["--inf_data_path", str(several / "valid"), "--lead_hours", "12", "--out", str(tmp_path)]
    assert "was trained with other statistics than" in refused(["--checkpoint", a, other, *more])
    assert "give different models" in refused(["--checkpoint", a, a, *more])
    assert f"no {runs / 'gone'}" in refused(["--checkpoint", a, str(runs / "gone"), *more])
    run_here(tiny_flags(several, "--run_num", "half", "--amp_mode", "bf16"))
    assert "say which (--amp_mode)" in refused(["--checkpoint", a, str(runs / "half"), *more])
    best = ["--checkpoint", a, str(several / "exported"), "--best"]
    assert "exported is one thing: leave --best out" in refused([*best, *more])
    assert checkpoint_main(["export", a, str(tmp_path / "w.pt")]) == 0
    assert "holds weights alone" in refused(["--checkpoint", a, str(tmp_path / "w.pt"), *more])
    with pytest.raises(Refused, match="forecast.py takes one"):
        call_here(forecast.main, ["--checkpoint", a, str(runs / "b"), "--initial", str(several / "valid")])
