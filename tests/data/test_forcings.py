"""What is read beside the state: the sun, the clock, the place and constants, each at the time of the state."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

import evaluate
import forecast
import train_mp
from tests.data.test_data_loader import weather
from tests.forecast.evaluations import flags
from tests.helpers import (
    ROOT,
    STEP,
    call_here,
    fields,
    losses,
    resume_here,
    run_here,
    tiny_flags,
    write_data,
    write_file,
)
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.data.dataset import WeatherData
from utils.data.forcings import SOLAR_CONSTANT, SOLAR_MEAN, SOLAR_STD, ForcingFields, Forcings
from utils.data.token_shard import TokenShard
from utils.errors import Refused

pvlib = pytest.importorskip("pvlib", reason="pvlib is not installed: pip install -r requirements-dev.txt")

KINDS = ["position", "day", "year", "solar"]
BESIDE = ["--constants", "zs", "lsm", "--forcings", *KINDS]
LATITUDE, LONGITUDE = 90 - 180 * np.arange(16) / 16, np.arange(32) * 11.25
DAY = 86400


def write_constants(folder: Path, values: np.ndarray | None = None, name: str = "stats/constants.h5") -> np.ndarray:
    """Write a file of constants, [C, H, W], on the grid of the tests' files, which have one row more."""
    values = fields(1, 3, 17, 32, seed=7)[0] * 50 + 20 if values is None else values
    write_file(folder / name, values[None], names=["lsm", "sst", "zs"])
    with h5py.File(folder / name, "r+") as file:
        del file["time"]
    return values


def by_hand(seconds: float, constants: np.ndarray | None = None) -> np.ndarray:
    """Return the channels beside the state at a time, [C, 16, 32], from the angles themselves."""
    phi, lam = np.meshgrid(np.deg2rad(LATITUDE), np.deg2rad(LONGITUDE), indexing="ij")
    clock = 2 * np.pi * (seconds % DAY) / DAY + lam
    year = np.full_like(phi, 2 * np.pi * seconds / (365.2425 * DAY))
    times = pd.DatetimeIndex([pd.Timestamp(seconds, unit="s", tz="UTC")])
    zenith = [
        pvlib.solarposition.get_solarposition(times, y, x)["zenith"].iloc[0] for y, x in ((0, 0), (0, 90), (90, 0))
    ]
    x, y, z = np.cos(np.deg2rad(zenith))  # the sun's direction
    sun = x * np.cos(phi) * np.cos(lam) + y * np.cos(phi) * np.sin(lam) + z * np.sin(phi)
    distance = pvlib.solarposition.nrel_earthsun_distance(times).iloc[0]
    solar = SOLAR_CONSTANT / distance**2 * np.clip(sun, 0, None)
    found = [np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi), np.sin(clock), np.cos(clock)]
    found += [np.sin(year), np.cos(year), (solar - SOLAR_MEAN) / SOLAR_STD]
    if constants is not None:
        used = constants[[2, 0], :16].astype(np.float64)
        normal = (used - used.mean((1, 2), keepdims=True)) / used.std((1, 2), keepdims=True)
        found = [*normal, *found]
    return np.stack(found)


def test_the_sun_is_where_pvlib_has_it():
    """To 1e-3 of the solar constant, from 1950 to 2050: every day's time, every season, all latitudes."""
    rng = np.random.default_rng(0)
    times = pd.to_datetime(np.sort(rng.integers(-631_152_000, 2_524_608_000, 200)), unit="s", utc=True)
    latitude, longitude = np.linspace(90, -90, 13), np.arange(0, 360, 60.0)
    solar = ForcingFields(Forcings(latitude, longitude, ("solar",)))
    found = solar(torch.tensor(times.tz_localize(None).values.astype("datetime64[s]").astype(float)))
    found = found[:, 0].double().numpy() * SOLAR_STD + SOLAR_MEAN  # W m-2
    distance = pvlib.solarposition.nrel_earthsun_distance(times).values
    for i, y in enumerate(latitude):
        for j, x in enumerate(longitude):
            zenith = pvlib.solarposition.get_solarposition(times, y, x)["zenith"].values
            expected = SOLAR_CONSTANT / distance**2 * np.clip(np.cos(np.deg2rad(zenith)), 0, None)
            assert np.abs(found[:, i, j] - expected).max() < 1e-3 * SOLAR_CONSTANT
    assert found.max() > 1380 and abs(found.min()) < 1e-4  # the sun is nearer in January; at night there is none


def test_its_mean_and_spread_over_the_globe_are_those_it_is_normalised_with():
    latitude, longitude = np.arange(-89.5, 90), np.arange(0, 360, 2.0)
    april = torch.tensor([986_385_600.0], dtype=torch.float64)  # 2001-04-04: the sun is at its mean distance
    field = ForcingFields(Forcings(latitude, longitude, ("solar",)))(april)[0, 0].double()
    area = torch.from_numpy(np.cos(np.deg2rad(latitude)))[:, None].expand_as(field)
    mean = (field * area).sum() / area.sum()
    assert abs(mean) < 0.002 and abs((field.square() * area).sum() / area.sum() - 1) < 0.005


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip", "chunks": (1, 3, 17, 32)}], ids=["plain", "gzip"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_batch_has_them_at_the_time_of_each_state(tmp_path, layout, workers):
    write_data(tmp_path, **layout)
    constants = write_constants(tmp_path)
    more = ["--rollout_steps", "3", "--in_channels", "ch2", "ch0", "ch1", "--n_out_channels", "2"]
    data = weather(tmp_path, *BESIDE, *more, "--global_batch_size", "4", "--num_data_workers", workers)
    plain = weather(tmp_path, *more, "--global_batch_size", "4")
    assert data.fields.sizes == (3 + 2 + 8, 2, 1 + 2 + 8)
    seen = 0
    for batch, same, chosen in zip(
        data.train_loader.epoch(1), plain.train_loader.epoch(1), data.train_loader.order.epoch(1)
    ):
        inp, target, forced = data.to_device(batch)
        inp0, target0, forced0 = plain.to_device(same)
        assert torch.equal(inp[:, :3], inp0) and torch.equal(target, target0) and torch.equal(forced[:, :, :1], forced0)
        for b, sample in enumerate(chosen):
            file, t = data.train_pairs[sample]
            start = int(data.train_files.times[file][t])
            np.testing.assert_allclose(inp[b, 3:], by_hand(start, constants), atol=2e-3)
            for k in (1, 2):
                np.testing.assert_allclose(forced[k - 1, b, 1:], by_hand(start + k * STEP, constants), atol=2e-3)
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize("overlap", ["0", "2"])
def test_each_shard_has_its_part(tmp_path, overlap):
    """The same numbers, bit for bit, as a cut of the whole image's."""
    write_data(tmp_path)
    write_constants(tmp_path)
    more = [*BESIDE, "--rollout_steps", "2", "--patch_overlap", overlap]
    whole = weather(tmp_path, *more)
    inp, _, forced = whole.to_device(next(iter(whole.train_loader.epoch())))
    for index in range(9):  # the last has no token
        tokens = TokenShard((16, 32), 4, 9, index, overlap=int(overlap))
        part = WeatherData(whole.config, tokens=tokens)
        found, _, later = part.to_device(next(iter(part.train_loader.epoch())))
        rows = slice(tokens.input_rows.start, tokens.input_rows.stop)
        assert torch.equal(found, tokens.cut_input(inp[..., rows, :]))
        assert torch.equal(later, tokens.cut_input(forced[..., rows, :])) and later.shape[:3] == (1, 8, 10)


def test_a_forecast_of_several_steps_reads_them_at_its_own_times(tmp_path):
    """As a loop by hand does, which puts each input together from the files' formulas."""
    write_data(tmp_path)
    constants = write_constants(tmp_path)
    folder = run_here(tiny_flags(tmp_path, *BESIDE, "--rollout_steps", "2", "--out_channels", "ch0", "ch1"))
    model = forecast.load(str(folder))
    state, start = fields(1, 3, 16, 32, seed=3)[0], np.datetime64("2011-03-04T18:00")
    forced = [fields(1, 1, 16, 32, seed=4 + k)[0] for k in range(3)]
    found = list(model.rollout(state, 4, forced, time=start))
    mean, std = (np.load(tmp_path / f"stats/global_{name}.npy")[0] for name in ("means", "stds"))
    x = (state - mean) / std
    for k in range(4):
        seconds = int(start.astype("datetime64[s]").astype(int)) + k * STEP
        beside = by_hand(seconds, constants)
        with torch.no_grad():
            inp = torch.from_numpy(np.concatenate([x, beside])[None]).float()
            after = model.net(inp)[0].numpy()
        np.testing.assert_allclose((found[k] - mean[:2]) / std[:2], after, atol=5e-3)
        if k < 3:
            x = np.concatenate([after, (forced[k] - mean[2:]) / std[2:]])
    other = list(model.rollout(state, 4, forced, time=start + np.timedelta64(12, "h")))
    assert all(np.abs(a - b).max() > 0.01 for a, b in zip(found, other))  # the time matters


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that reads them, on files of 12 and 15 steps, with its evaluation and its exported folder."""
    folder = tmp_path_factory.mktemp("beside")
    write_data(folder, names=["u", "v", "t"])
    write_constants(folder)
    write_file(folder / "valid/2004.h5", fields(12, 3, 17, 32, seed=5), start=STEP * 1460, names=["u", "v", "t"])
    run = run_here(tiny_flags(folder, *BESIDE, "--ema_decay", "0.9"))
    more = ["--out", str(folder / "judged"), "--forecasts", "zarr", "--local_batch_size", "1", "--weights", "raw"]
    call_here(evaluate.main, flags(folder, *more))
    assert checkpoint_main(["export", str(run), str(folder / "exported"), "--torch_export"]) == 0
    return folder


def test_forecast_and_evaluation_are_the_same(trained, tmp_path):
    """Bit for bit, of the run and of the exported folder, without `--hold`: nobody needs to know the future."""
    xarray = pytest.importorskip("xarray")
    judged = xarray.open_zarr(trained / "judged/forecasts/model.zarr").load()
    write_file(tmp_path / "today.h5", fields(12, 3, 17, 32, seed=5)[:3], start=STEP * 1460, names=["u", "v", "t"])
    for i, source in enumerate((trained / "runs/tiny/1GPU/00", trained / "exported")):
        argv = ["--checkpoint", str(source), "--initial", str(tmp_path / "today.h5"), "--lead_hours", "24"]
        call_here(forecast.main, [*argv, "--out", str(tmp_path / f"out{i}")])
        (path,) = (tmp_path / f"out{i}/forecasts/model").glob("*.nc")
        found = xarray.load_dataset(path)
        expected = judged.sel(time=found.time)
        for name in ("u", "v", "t"):
            np.testing.assert_array_equal(found[name].values, expected[name].values)


def test_the_exported_folder_says_what_it_reads(trained):
    card = (trained / "exported/README.md").read_text()
    assert "Beside the state it reads zs, lsm, position_x," in card and "model.step(state, time)" in card
    assert (trained / "exported/statistics/constants.h5").exists()


def test_the_exported_program_takes_the_time(trained):
    model = forecast.load(str(trained / "exported"))
    program = torch.export.load(trained / "exported/model.pt2").module()
    states, times = (
        torch.from_numpy(fields(3, 3, 16, 32)),
        np.datetime64("1999-12-31T18") + np.arange(3) * np.timedelta64(6, "h"),
    )
    seconds = torch.tensor(times.astype("datetime64[s]").astype(float))
    expected = model.step(states, times)
    assert ((program(states, seconds) - expected) / model.in_units_of.std.float()).abs().max() < 1e-6
    for b in range(3):
        one = model.step(states[b], str(times[b]))
        assert torch.allclose(one, expected[b], atol=1e-4)
    with pytest.raises(ValueError, match="give the `time` of the state"):
        model.step(states)
    for wrong in ("yesterday", times[:2], "NaT"):
        with pytest.raises(ValueError, match="it takes a date such as"):
            model.step(states, wrong)


def test_the_wrapper_for_earth2studio_says_the_time(trained):
    text = (ROOT / "docs/forecasts.md").read_text().partition("<!-- earth2studio -->")[2]
    found: dict = {}
    exec(text.split("```")[1].removeprefix("python\n"), found)
    model, inner = found["Prognostic"](str(trained / "exported")), forecast.load(str(trained / "exported"))
    dates = np.array(["2001-02-03", "2001-08-09"], "datetime64[ns]")
    coords = dict(model.input_coords(), time=dates, lead_time=np.array([0, 6], "timedelta64[h]"))
    states = torch.from_numpy(fields(8, 3, 16, 32)).view(2, 2, 2, 3, 16, 32)  # batch, time, lead time
    after, _ = model(states, coords)
    for b, t, k in np.ndindex(2, 2, 2):
        expected = inner.step(states[b, t, k], dates[t] + np.timedelta64(6 * k, "h"))
        assert torch.allclose(after[b, t, k], expected, atol=1e-4)


def test_chapter_2_and_a_resumed_run_have_the_same_losses(trained, tmp_path):
    more = [*BESIDE, "--rollout_steps", "2", "--residual", "--run_num"]
    plain = losses(run_here(tiny_flags(trained, *more, "a")))
    assert plain != losses(run_here(tiny_flags(trained, "--rollout_steps", "2", "--residual", "--run_num", "b")))
    assert losses(run_here(tiny_flags(trained, *more, "c"), train_mp.main, "1MP")) == pytest.approx(plain, rel=1e-6)
    whole, resumed = resume_here(tiny_flags(trained, *more, "d", "--num_iters", "6"), 3)
    assert whole == resumed


def spoiled(folder: Path, what: str) -> list[str]:
    """Spoil the constants, or ask for what is not there; return the flags."""
    values = fields(1, 3, 17, 32, seed=7)[0]
    match what:
        case "missing":
            return ["--constants", "lsm"]
        case "other":
            write_constants(folder)
            return ["--constants", "orography"]
        case "twice":
            return ["--constants", "lsm", "lsm"]
        case "even":
            values[0] = 1
        case "nan":
            values[0, 3, 4] = np.nan
        case "grid":
            write_constants(folder, values[:, :, ::2].copy())
            return ["--constants", "lsm"]
        case "no time" | "no time in validation":
            for path in folder.glob("*/*.h5" if what == "no time" else "valid/*.h5"):
                with h5py.File(path, "r+") as file:
                    del file["time"]
            return ["--forcings", "solar"]
    write_constants(folder, values)
    return ["--constants", "zs", "lsm"]


@pytest.mark.parametrize(
    "what, said",
    [
        ("missing", "make it .prepare_data --constants., or give --constants_path"),
        ("other", "unknown channel 'orography' in constants"),
        ("even", "lsm is the same everywhere"),
        ("nan", "lsm holds values that are not finite"),
        ("grid", "make it of files on the same grid"),
        ("no time", "stores none: take only position"),
        ("no time in validation", "stores none: take only position"),
        ("twice", "constants lsm lsm names one twice"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, what, said):
    write_data(tmp_path)
    flags = spoiled(tmp_path, what)
    with pytest.raises(Refused, match=said) as found:
        run_here(tiny_flags(tmp_path, *flags))
    assert len(str(found.value).splitlines()) == 1
    if what == "no time":  # where a place is enough, no time is needed
        run_here(tiny_flags(tmp_path, "--forcings", "position"))


def test_other_constants_than_those_of_the_training_are_refused(trained, tmp_path):
    write_constants(tmp_path, fields(1, 3, 17, 32, seed=8)[0], "other.h5")
    with pytest.raises(Refused, match="channels beside the state"):
        call_here(evaluate.main, flags(trained, "--out", str(tmp_path), "--constants_path", str(tmp_path / "other.h5")))
    moved = shutil.copytree(trained / "exported", tmp_path / "exported")
    shutil.copyfile(tmp_path / "other.h5", moved / "statistics/constants.h5")
    with pytest.raises(ValueError, match="holds other channels beside the state"):
        forecast.load(str(moved))
    for part in ("train", "stats"):
        shutil.copytree(trained / part, tmp_path / part)
    shutil.copyfile(tmp_path / "other.h5", tmp_path / "stats/constants.h5")
    with pytest.raises(ValueError, match="holds other channels beside the state"):
        forecast.load(str(trained / "runs/tiny/1GPU/00"), data_dir=str(tmp_path))


def test_states_without_a_time_are_refused(trained, tmp_path):
    for i, name in enumerate(("2001.h5", "2002.h5")):
        write_file(tmp_path / name, fields(2, 3, 17, 32), start=STEP * 10 * i, names=["u", "v", "t"])
    with h5py.File(tmp_path / "2002.h5", "r+") as file:
        del file["time"]
    argv = ["--checkpoint", str(trained / "exported"), "--initial", str(tmp_path), "--dates", "all"]
    argv += ["--lead_hours", "6"]
    with pytest.raises(Refused, match="stores no time: give states that do"):
        call_here(forecast.main, [*argv, "--out", str(tmp_path / "out")])
