"""An evaluation as a user meets it: its folder, after a kill, and what can be wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

import evaluate
from tests.forecast.evaluations import NAMES, disturbed, evaluated, flags, refused, write_climatology
from tests.helpers import (
    ROOT,
    STEP,
    call_here,
    change_info,
    clean_environment,
    fields,
    run_here,
    run_ranks,
    tiny_flags,
    write_file,
)
from tests.marks import at_night
from utils.checkpoint import store as checkpoint
from utils.checkpoint.info import read_info
from utils.checkpoint.weights import export
from utils.config.settings import Config
from utils.data import ring
from utils.data.files import Files
from utils.errors import Ended, ReadError, WriteError
from utils.files import seen
from utils.forecast.data import ForecastData
from utils.forecast.run import share_out
from utils.forecast.settings import Evaluation, load_evaluation
from utils.forecast.store import ForecastStore
from utils.run.folder import lock_run

SIZE = 2 * 4 * 3 * 16 * 32 * 4 / 1e9  # GB of a forecast: models, steps, channels, rows, columns, bytes


def test_the_forecasts_are_shared_out_in_batches_of_one_size():
    left = [0, 1, 2, 4, 5, 6, 8, 9]
    assert share_out(left, rank=0, ranks=3, size=2) == [[0, 4], [8, 8]]
    assert share_out(left, rank=2, ranks=3, size=2) == [[2, 6]]
    assert share_out(left[:2], rank=2, ranks=3, size=8) == [] == share_out([], rank=0, ranks=1, size=8)


def contents(out: Path) -> dict[str, bytes]:
    """Return all files that hold forecasts or scores."""
    paths = [out / "skill.json", out / "skill.csv", *(p for p in (out / "forecasts").rglob("*") if p.is_file())]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zarr", at_night("netcdf")])
def test_an_evaluation_that_was_killed_goes_on_and_writes_the_same_files(trained, tmp_path, kind):
    more = ["--forecasts", kind, "--local_batch_size", "5"]  # what is left when it is killed makes no whole batch
    whole_argv, argv = (flags(trained, "--out", str(tmp_path / name), *more) for name in ("whole", "killed"))
    assert run_ranks(1, [str(ROOT / "evaluate.py"), *whole_argv])[0].returncode == 0
    fault = """
from utils.forecast.store import ForecastStore
keep = ForecastStore.keep
def killed(self, forecast, **arrays):
    keep(self, forecast, **arrays)
    if forecast == 6: os.kill(os.getpid(), signal.SIGKILL)
ForecastStore.keep = killed
"""
    assert run_ranks(1, disturbed(fault, argv))[0].returncode == -signal.SIGKILL
    out = tmp_path / "killed"
    there = {path.name: path.stat().st_mtime_ns for path in (out / "kept").glob("*.npz")}
    assert len(there) == 7 and not (out / "skill.json").exists()
    assert run_ranks(1, [str(ROOT / "evaluate.py"), *argv])[0].returncode == 0
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


@pytest.mark.parametrize(
    "kind, size, full",
    [
        ("zarr", "800k", "meanwhile"), at_night("netcdf", "400k", "meanwhile"), at_night("zarr", "100k", "before"),
        at_night("none", "1000k", "TensorBoard"), at_night("none", "100k", "meanwhile"),
        at_night("none", "400k", "pictures"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_full_disk_is_one_line_and_with_room_it_goes_on(trained, tmp_path, kind, size, full):
    disk, more = tmp_path / "disk", ["--forecasts", kind, "--local_batch_size", "2", "--plot_channels", "u"]
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    mounted = subprocess.run([*mount, f"size={size}", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs a disk of its own: {mounted.stderr.strip()}")
    try:
        argv = flags(trained, "--out", str(disk / "out"), *more)
        done = run_ranks(1, [str(ROOT / "evaluate.py"), *argv])[0]
        told = [line for line in done.stderr.splitlines() if " INFO " not in line]
        assert done.returncode == 74 and len(told) == 1, done.stderr
        assert f"rank 0: cannot write to {disk / 'out'} (" in told[0]
        assert ("is the disk full?" if kind == "netcdf" else "No space left on device") in told[0]
        assert ": make room; the same command goes on" in told[0]
        there = len(list((disk / "out/kept").glob("*.npz")))
        assert {"before": there == 0, "meanwhile": 0 < there < 19}.get(full, there == 19)
        assert (disk / "out/logs").exists() == (full == "TensorBoard")
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        skill = evaluated(trained, disk / "out", *more)
        assert skill["forecasts"] == 19
        log = (disk / "out/out.log").read_text()
        assert not there or f"({there} forecasts are there already)" in log
        if kind != "none":
            assert f"Forecasts to write: {19 - there}, up to {(19 - there) * SIZE:.3g} GB; free: 0.0" in log
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_log_without_a_progress_bar_says_how_far_it_is(trained, tmp_path):
    with mock.patch("utils.record.progress.SAID_EVERY", 0):
        evaluated(trained, tmp_path / "out", "--local_batch_size", "2", "--stride", "4", "--forecasts", "netcdf")
    log = (tmp_path / "out/out.log").read_text()
    assert "1 of 3 batches of forecasts, " in log and " s left\n" in log and "2 of 3" in log
    assert f"Forecasts to write: 5, up to {5 * SIZE:.3g} GB; free: " in log


@pytest.mark.slow
def test_who_comes_second_changes_nothing(tmp_path):
    """Two evaluations of other settings that begin in one folder at once, before and after the first writes."""
    code = "import sys; from pathlib import Path; from utils.forecast.store import ForecastStore\n"
    code += "ForecastStore(Path(sys.argv[1]), 3).open({'stride': 2})"
    new, begun = (ForecastStore(tmp_path / name, 3) for name in ("new", "begun"))
    new.folder.mkdir()
    new.lock = lock_run(new.folder)
    begun.open({"stride": 1})
    for store in (new, begun):
        there = {path: path.stat().st_mtime_ns for path in store.folder.iterdir()}
        command = [sys.executable, "-c", code, store.folder]
        done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True)
        assert b"is in use by " in done.stderr
        assert {path: path.stat().st_mtime_ns for path in store.folder.iterdir()} == there
        store.close()
    text = (begun.folder / "setting.json").read_text()
    begun.open({"stride": 2})
    assert (tmp_path / "begun.1/setting.json").read_text() == text
    begun.close()


def test_a_folder_that_is_gone_is_no_full_disk(tmp_path):
    store = ForecastStore(tmp_path / "run/evaluation", 1)
    store.open({})
    (tmp_path / "run").rename(tmp_path / "run.1")
    with pytest.raises(WriteError, match="No such file.*: see what became of .*run; the same"), store.writing():
        store.keep(0, moments=np.zeros(1))


def test_forecasts_of_two_shapes_are_not_added_up(tmp_path):
    """NumPy would stretch an axis of 1 over one of 3."""
    store = ForecastStore(tmp_path / "evaluation", 3)
    store.open({})
    for n in range(2):
        store.keep(n, moments=np.zeros((3, 2)), lasting=np.zeros(1))
    for other in np.zeros((1, 2)), np.zeros((3, 2), np.complex64):
        store.keep(2, moments=other, lasting=np.zeros(1))
        with pytest.raises(
            ReadError, match=r"moments in .*/000002.npz is .*2\], and float64 \[3, 2\] in 000000.npz: rem"
        ):
            sum(store.all("moments"))
    assert len(list(store.all("lasting"))) == 3


def test_two_evaluations_do_not_share_a_folder(trained, tmp_path):
    evaluated(trained, tmp_path / "out", "--stride", "10")
    lines = []

    def keep(self, numbers, steps):
        argv = flags(trained, "--out", str(tmp_path / "out"), "--stride", "9")
        lines.append(run_ranks(1, [str(ROOT / "evaluate.py"), *argv])[0].stderr)
        raise Ended(0)

    (tmp_path / "out/kept/000000.npz").unlink()  # the same again: it goes on
    with mock.patch("utils.forecast.judge.Judge.keep", keep), pytest.raises(Ended):
        evaluated(trained, tmp_path / "out", "--stride", "10")
    assert "is in use by process" in lines[0] and "choose another folder with --out" in lines[0]


def test_a_signal_stops_all_ranks_and_the_same_command_goes_on(trained, tmp_path):
    """Both ranks leave with 75 after the batch that they are at, as a job script expects that queues the job again."""
    argv = flags(trained, "--out", str(tmp_path / "out"), "--local_batch_size", "1")
    fault = """
from utils.forecast.judge import Judge
keep = Judge.keep
def stop(self, numbers, steps):
    keep(self, numbers, steps)
    if numbers == [4]: os.kill(os.getpid(), signal.SIGUSR1)
Judge.keep = stop
"""
    results = run_ranks(2, disturbed(fault, argv))
    assert [done.returncode for done in results] == [75, 75], results[0].stderr
    there = len(list((tmp_path / "out/kept").glob("*.npz")))
    assert there == 6 and "Stopped by a signal" in results[0].stderr
    results = run_ranks(2, [str(ROOT / "evaluate.py"), *argv])
    assert [done.returncode for done in results] == [0, 0], results[0].stderr
    assert "(6 forecasts are there already)" in results[0].stderr
    assert len(list((tmp_path / "out/kept").glob("*.npz"))) == 19


def test_a_user_reads_one_line(trained, tmp_path):
    for argv in (["--checkpoint", str(tmp_path)], flags(trained, "--lead_hous", "6")):
        done = run_ranks(1, [str(ROOT / "evaluate.py"), *argv])[0]
        assert done.returncode == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("evaluate.py: error: ")


def test_what_a_user_can_get_wrong(trained, tmp_path, monkeypatch):
    run = str(trained / "runs/tiny/1GPU/00")
    assert "no complete checkpoint" in refused(["--checkpoint", str(tmp_path)])
    assert "no /" in refused(["--checkpoint", str(tmp_path / "none")])
    assert "give the folder of a run" in refused([])
    assert "leave --config out" in refused(["--checkpoint", run, "--config", "tiny"])
    assert "did you mean '--lead_hours'" in refused(flags(trained, "--lead_hous", "6"))
    assert "and a step 6 h: take a multiple of it" in refused(flags(trained, "--lead_hours", "15"))
    assert "take a multiple" in refused(flags(trained, "--lead_hours", "0"))
    few = refused(flags(trained, "--lead_hours", "120"))
    assert "no 21 steps in a row" in few and "lower --lead_hours" in few
    valid = f"--inf_data_path (such as {trained / 'valid'}, those of the validation)"
    assert f"inf_data_path is None: give the folder of the files to forecast, {valid}" in refused(["--checkpoint", run])
    elsewhere = refused(["--checkpoint", run, "--inf_data_path", "/nowhere"])
    assert f"no data folder '/nowhere': check --data_dir, or give {valid}" in elsewhere
    first = refused(["--checkpoint", run, "--inf_data_path", "/nowhere", "--projection", "Robins"])
    assert "'Robins' is no map of cartopy.crs" in first  # cartopy comes before any library that opens a file
    assert "ema_decay" in refused(flags(trained, "--weights", "ema", "--checkpoint", str(_plain(trained))))
    monkeypatch.setattr(ring, "available", lambda: 0)
    assert "do not fit into memory" in refused(flags(trained, "--out", str(tmp_path / "out")))


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


def test_other_statistics_than_the_model_was_trained_with(trained, tmp_path):
    shutil.copytree(trained / "stats", tmp_path / "stats")
    stds = np.load(tmp_path / "stats/global_stds.npy")
    np.save(tmp_path / "stats/global_stds.npy", 1.01 * stds)
    argv = flags(trained, "--out", str(tmp_path / "out"), "--data_dir", str(tmp_path))
    assert "not the statistics that the model was trained with: give those" in refused(argv)
    np.savez(tmp_path / "stats/global_stds.npz", stds)
    more = ["--global_stds_path", str(tmp_path / "stats/global_stds.npz")]
    assert "global_stds_path must be" in refused([*argv, *more])


def test_exported_weights_are_asked_one_state_at_a_time_unless_told(trained, tmp_path):
    weights = tmp_path / "weights.pt"
    export(trained / "runs/tiny/1GPU/00", weights)
    argv = ["--checkpoint", str(weights), "--yaml_config", str(trained / "tiny.yaml"), "--config", "tiny"]
    for more, size in (([], 1), (["--data_dir", "None"], 1), (["--local_batch_size", "3"], 3)):
        _, config, info, _ = load_evaluation([*argv, *more])
        assert config.local_batch_size == size and info is None


def test_files_without_time(trained, tmp_path):
    """Their forecasts have no dates, and lie inside a file; with dated files they are refused."""
    write_file(tmp_path / "none/2003.h5", fields(8, 3, 17, 32), start=None, names=NAMES)
    argv = flags(trained, "--inf_data_path", str(tmp_path / "none"))
    skill = evaluated(trained, tmp_path / "out", "--inf_data_path", str(tmp_path / "none"))
    assert skill["forecasts"] == 4 and skill["first"] == "2003.h5, step 0"
    argv_b = [*argv, "--forecasts", "netcdf", "--out", str(tmp_path / "b")]
    assert "the files store no time: take --forecasts none" in refused(argv_b)
    write_file(tmp_path / "none/2004.h5", fields(8, 3, 17, 32), names=NAMES)
    assert "some files in" in refused([*argv, "--out", str(tmp_path / "c")])


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
    assert not {"data_dir", "time_means_path", "local_batch_size", "device"} & setting["configuration"].keys()
    assert {"config", "amp_mode", "compile_mode", "lr"} <= setting["configuration"].keys()


def test_what_an_evaluation_takes_from_the_training(trained, tmp_path):
    (newest, *_) = checkpoint.find(trained / "runs/tiny/1GPU/00/checkpoints")
    copy = shutil.copytree(newest, tmp_path / newest.name)
    info = read_info(copy)
    own = dict(mlp_chunks=2, tf32=False, num_data_workers=3)
    others = dict(device="cuda", enable_jit=True, comm_timeout="1m", tracker="mlflow", init_from="x", report=True)
    change_info(copy, config=info["config"] | own | others)
    config = load_evaluation(["--checkpoint", str(copy)])[1]
    assert {name: getattr(config, name) for name in own} == own
    assert {name: getattr(config, name) for name in others} == {name: getattr(Config, name) for name in others}
    config = load_evaluation(["--checkpoint", str(copy), "--mlp_chunks", "1", "--enable_jit"])[1]
    assert config.mlp_chunks == 1 and config.enable_jit


def test_a_data_dir_that_moves_nothing_is_said_to(trained, tmp_path):
    """A run whose paths have another folder at their front."""
    (newest, *_) = checkpoint.find(trained / "runs/tiny/1GPU/00/checkpoints")
    copy = shutil.copytree(newest, tmp_path / newest.name)
    info = read_info(copy)
    paths = {
        name: "mine/" + Path(path).name for name, path in info["config"].items() if name.endswith("_path") and path
    }
    change_info(copy, config=info["config"] | paths | {"data_dir": None})
    _, config, _, remarks = load_evaluation(["--checkpoint", str(copy), "--data_dir", str(tmp_path)])
    assert remarks == ["data_dir changes nothing: no path of the training begins with /data"]
    assert config.time_means_path == "mine/time_means.npy"
    assert load_evaluation(["--checkpoint", str(copy)])[3] == []
    with pytest.raises(ValueError, match="data_dir '/elsewhere' is not there, and no path of the training"):
        load_evaluation(["--checkpoint", str(copy), "--data_dir", "/elsewhere"])


def test_a_value_that_is_not_finite_ends_it_with_its_place(trained, tmp_path):
    for ranks, frame in ((1, 0), (2, 8)):  # of a state that a forecast begins with only, and of what happened only
        data = fields(9, 3, 17, 32)
        data[frame, 1, 2, 3] = np.nan
        write_file(tmp_path / f"{frame}/2003.h5", data, names=NAMES)
        argv = flags(trained, "--inf_data_path", str(tmp_path / str(frame)), "--out", str(tmp_path / "out"))
        results = run_ranks(ranks, [str(ROOT / "evaluate.py"), *argv])
        codes = {done.returncode for done in results}
        assert 2 in codes and codes <= {1, 2}  # 1 where another rank's end came first
        told = "".join(done.stderr for done in results)
        assert f"2003.h5: frame {frame}, channel 'v', row 2, column 3 is nan" in told and "Traceback" not in told


@pytest.mark.parametrize("frame", [0, 8])
def test_a_value_that_archives_are_filled_with_ends_it_with_its_place(trained, tmp_path, frame):
    """It is finite in the sums, which are of 64 bits."""
    data = fields(9, 3, 17, 32)
    data[frame, 1, 2, 3] = 9.999e20
    write_file(tmp_path / "2003.h5", data, names=NAMES)
    argv = flags(trained, "--inf_data_path", str(tmp_path), "--out", str(tmp_path / "out"))
    with pytest.raises(ReadError, match=rf"2003.h5: frame {frame}, channel 'v', row 2, column 3 is 9.999"):
        call_here(evaluate.main, argv)


def test_a_climatology_that_does_not_fit(trained, tmp_path):
    short, other = tmp_path / "short.nc", tmp_path / "other.nc"
    write_climatology(trained, short, days=90)
    write_climatology(trained, other, u="x")
    assert "holds 90 days of the year" in refused(flags(trained, "--climatology", str(short)))
    assert "has no 'u' of [dayofyear, latitude, longitude]" in refused(flags(trained, "--climatology", str(other)))
    for name, change, remedy in (
        ("units", lambda usual: usual.u.attrs.update(units="knots"), "has u in knots, and the data in m s-1"),
        ("grid", lambda usual: usual.update({"latitude": usual.latitude + 1}), "has another latitude than the data"),
        ("from 0", lambda usual: usual.update({"dayofyear": usual.dayofyear - 1}), "must hold 1 to 365, or 366, each"),
        ("twice", lambda usual: usual.longitude.values.__setitem__(1, 0), "a longitude in no order, or a value twice"),
        ("hours", lambda usual: usual.hour.values.__setitem__(1, 0), "a hour in no order, or a value twice"),
    ):
        usual = write_climatology(trained, tmp_path / "good.nc").copy(deep=True)
        usual = usual.assign_coords({axis: usual[axis].values.copy() for axis in usual.coords})
        change(usual)
        usual.to_netcdf(tmp_path / f"{name}.nc")
        assert remedy in refused(flags(trained, "--climatology", str(tmp_path / f"{name}.nc")))


@pytest.mark.parametrize("hours", [["0", "6", "12", "18"], np.arange(4) * np.timedelta64(6, "h")])
def test_a_climatology_whose_hours_are_no_numbers(trained, tmp_path, hours):
    usual = write_climatology(trained, tmp_path / "good.nc")
    usual.assign_coords(hour=hours).to_netcdf(tmp_path / "odd.nc")
    argv = flags(trained, "--climatology", str(tmp_path / "odd.nc"))
    assert "has an hour that is no number: it takes 0 to 23" in refused(argv)


@pytest.mark.parametrize("hours", [[6, 12, 18, 24], [-6, 0, 6, 12], [0, 600, 1200, 1800]])
def test_a_climatology_whose_hours_are_none_of_a_day(trained, tmp_path, hours):
    usual = write_climatology(trained, tmp_path / "good.nc")
    usual.assign_coords(hour=hours).to_netcdf(tmp_path / "odd.nc")
    found = refused(flags(trained, "--climatology", str(tmp_path / "odd.nc")))
    assert f"has an hour of {max(hours)} or below 0: it takes 0 to 23" in found


def test_a_climatology_that_cannot_be_read_to_its_end(trained, tmp_path):
    usual = write_climatology(trained, tmp_path / "good.nc")
    usual.to_zarr(tmp_path / "broken.zarr", zarr_format=2)
    for path in (tmp_path / "broken.zarr/t").glob("[0-9]*"):
        path.write_bytes(b"x")
    for name, value in (("gaps.nc", np.nan), ("filled.nc", 9.97e36)):
        usual.t[{"dayofyear": 0, "latitude": 3, "longitude": 5}] = value
        usual.to_netcdf(tmp_path / name)
    day = "day 1 of the year, 't', row 3, column 5 is"
    for name, told in (("broken.zarr", "cannot read "), ("gaps.nc", f"{day} nan"), ("filled.nc", f"{day} 9.97e")):
        argv = flags(trained, "--climatology", str(tmp_path / name), "--out", str(tmp_path / "out"))
        with pytest.raises(ReadError, match=told):
            call_here(evaluate.main, argv)


def test_the_nearest_hour_of_a_climatology_goes_round_midnight(trained, tmp_path):
    usual = write_climatology(trained, tmp_path / "usual.nc")
    _, config, info, _ = load_evaluation(flags(trained, "--climatology", str(tmp_path / "usual.nc")))
    settings = Evaluation(lead_hours=24, climatology=str(tmp_path / "usual.nc"))
    data = ForecastData(config, settings, torch.device("cpu"), info)
    for date, day, hour in (("1970-02-01T22:00", 33, 0), ("1970-12-31T23:00", 1, 0), ("1971-01-03T08:00", 3, 6)):
        expected = usual.sel(dayofyear=day, hour=hour).to_dataarray().values
        seconds = int(np.datetime64(date, "s").astype(int))
        np.testing.assert_array_equal(data.climate.at(seconds), expected)
    data.close()


def test_a_change_inside_of_a_folder_is_seen(tmp_path):
    (tmp_path / "usual.zarr/u").mkdir(parents=True)
    chunk = tmp_path / "usual.zarr/u/0.0.0"
    chunk.write_bytes(b"1")
    before = seen(tmp_path / "usual.zarr")
    assert seen(tmp_path / "usual.zarr") == before
    os.utime(chunk, ns=(0, chunk.stat().st_mtime_ns + 2 * 10**9))
    assert seen(tmp_path / "usual.zarr") != before


@pytest.mark.slow
def test_without_intervals_nothing_is_said_of_them(trained, tmp_path):
    evaluated(trained, tmp_path / "out", "--stride", "4", "--block_hours", "100", "--plot_channels", "u")
    log = (tmp_path / "out/out.log").read_text()
    assert (
        "There are no intervals: the forecasts make 1.25 blocks of 96 h of weather" in log
        and "below climatology's up to" in log
    )
    assert "whole interval" not in log


def test_another_look_at_the_same_forecasts(trained, tmp_path):
    """Another block or projection needs no new forecasts."""
    first = evaluated(trained, tmp_path / "out", "--stride", "2")
    dates = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/kept").iterdir()}
    second = evaluated(trained, tmp_path / "out", "--stride", "2", "--block_hours", "12")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/kept").iterdir()} == dates
    assert first["forecasts_drawn_together"] == 2 and second["forecasts_drawn_together"] == 1
    values, others = (np.array(x["scores"]["model"]["rmse"]["cos"]["u"]) for x in (first, second))
    assert (values[:, 0] == others[:, 0]).all() and (values[:, 1] != others[:, 1]).all()


def most_memory(trained: Path, data: Path, out: Path) -> float:
    """Return the most memory of an evaluation with few forecasts at a time, in MB."""
    argv = ["--checkpoint", str(trained / "runs/tiny/1GPU/00"), "--inf_data_path", str(data), "--lead_hours", "24"]
    code = "import resource, runpy; runpy.run_path('evaluate.py', run_name='__main__'); "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)"
    # A forked process: to one that another program starts, Linux counts that program's peak too.
    (done,) = run_ranks(1, ["-c", code, *argv, "--local_batch_size", "2", "--out", str(out)])
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_forecasts(trained, tmp_path):
    for steps in (20, 400):
        write_file(tmp_path / f"{steps}/2003.h5", fields(steps, 3, 17, 32), names=NAMES)
    few, many = (most_memory(trained, tmp_path / str(steps), tmp_path / f"out{steps}") for steps in (20, 400))
    # What 380 more forecasts of this size would take: 4 steps x 4 sources x 3 channels x 16 x 32 numbers each.
    assert many - few < 15 < 380 * 4 * 4 * 3 * 16 * 32 * 4 / 1e6


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
