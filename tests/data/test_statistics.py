"""Statistics of other channels than the files, statistics that are not there, and names that nobody gave."""

import dataclasses
import json

import h5py
import numpy as np
import pytest
import torch

import evaluate
from tests.forecast.evaluations import evaluated, flags
from tests.helpers import call_here, fields, losses, records, run_here, tiny_flags, write_data, write_file
from utils.config.reader import load_config
from utils.data.fields import Fields, unlike
from utils.data.files import ERA5_CHANNELS, Files
from utils.errors import Ended, ReadError
from utils.forecast.trained import Trained


def opened(folder, *argv):
    config = load_config(tiny_flags(folder, *argv))[0]
    return Fields.open(config, Files.open(config.train_data_path))


def widen(folder, count, places, names=None):
    """Make the statistics those of `count` channels, with the data's at these places and 7 elsewhere."""
    for path in (folder / "stats").glob("*.npy"):
        narrow = np.load(path)
        wide = np.full((1, count, *narrow.shape[2:]), 7, narrow.dtype)
        wide[:, places] = narrow
        np.save(path, wide)
    if names:
        (folder / "stats/channels.txt").write_text("\n".join(names) + "\n")


@pytest.mark.parametrize(
    "names, count, places, beside, how",
    [
        (["t2m", "z500", "u10m"], 20, [2, 14, 0], None, "name"),  # the tutorial's order
        (None, 20, [0, 1, 2], None, "their places"),
        (None, 5, [0, 1, 2], ["a", "b", "c", "d", "e"], "their places"),  # names, and nobody to ask for them
        (["a", "b", "c"], 5, [4, 0, 2], ["b", "x", "c", "y", "a"], "name"),
        (["a", "b", "c"], 3, [2, 1, 0], ["c", "b", "a"], "name"),
        (["a", "b", "c"], 3, [0, 1, 2], ["k", "l", "m"], "their places: other names stand in"),
        (["a", "b", "c"], 3, [0, 1, 2], ["of", "another"], None),  # names of other statistics
    ],
)
def test_of_more_channels_than_the_files(tmp_path, names, count, places, beside, how):
    write_data(tmp_path, names=names)
    expected = opened(tmp_path)
    widen(tmp_path, count, places, beside)
    found = opened(tmp_path)
    for kind in ("means", "stds", "time_means"):
        np.testing.assert_array_equal(getattr(found, kind), getattr(expected, kind))
    said = [remark for remark in found.remarks if "are taken by" in remark]
    assert len(said) == (how is not None)
    if how:
        assert f"of {count} channels, the files of 3: the 3 in use are taken by {how}" in said[0]


@pytest.mark.parametrize("dtype", [">f4", ">f8", "f2", "i1"])
def test_numbers_of_any_kind(tmp_path, dtype):
    """Axes in the file, and statistics: what is computed of them is not of their precision, nor in their byte order."""
    write_data(tmp_path)
    latitude = (80 - 10 * np.arange(17)).astype(dtype)
    for path in tmp_path.glob("*/*.h5"):
        with h5py.File(path, "r+") as file:
            file["latitude"] = latitude
    for path in (tmp_path / "stats").glob("*.npy"):
        np.save(path, np.round(np.load(path)).clip(1, 9).astype(dtype))
    found = opened(tmp_path)
    for x in (found.latitude, found.means, found.stds, found.time_means):
        torch.from_numpy(x)
    expected = np.cos(np.deg2rad(np.float64(latitude[:16])))
    np.testing.assert_allclose(found.area, np.tile(expected[:, None] / expected.sum() / 32, 32), rtol=1e-12)


def test_of_what_is_used_they_need_no_more(tmp_path):
    """The section reads two of three channels: statistics of two will do, of one they will not."""
    write_data(tmp_path)
    argv = ["--n_in_channels=2", "--n_out_channels=2"]
    expected = opened(tmp_path, *argv)
    for path in (tmp_path / "stats").glob("*.npy"):
        np.save(path, np.load(path)[:, :2])
    np.testing.assert_array_equal(opened(tmp_path, *argv).stds[:2], expected.stds[:2])
    with pytest.raises(ValueError, match=r"global_means.npy has the shape \[1, 2, 1, 1\].* must be \[1, 3, 1, 1\]"):
        opened(tmp_path)


@pytest.mark.parametrize("names, beside", [(["t2m", "z500", "q"], None), (["a", "b", "c"], ["of", "another"])])
def test_of_more_channels_whose_names_nobody_knows(tmp_path, names, beside):
    write_data(tmp_path, names=names)
    widen(tmp_path, 20, [0, 1, 2], beside)
    with pytest.raises(ValueError, match=f"is of 20 channels, and which of them are {', '.join(names)} nobody says"):
        opened(tmp_path)


@pytest.mark.parametrize("beside", [["a", "b", "k", "l"], ["b", "a", "k"]])
def test_by_name_a_channel_may_be_missing(tmp_path, beside):
    """Where some names are the same the places tell nothing."""
    write_data(tmp_path, names=["a", "b", "c"])
    widen(tmp_path, len(beside), [0, 1, 2], beside)
    with pytest.raises(ValueError, match=f"holds no 'c', but {', '.join(beside)} .*channels.txt.*prepare_data stats"):
        opened(tmp_path)


def test_constants_with_a_name_that_no_line_can_show(tmp_path):
    write_data(tmp_path)
    write_file(tmp_path / "stats/constants.h5", fields(1, 1, 17, 32), names=["a\nERROR forged"])
    with pytest.raises(ValueError, match="a channel has the name"):
        opened(tmp_path, "--constants", "a\nERROR forged")


def test_a_name_that_stands_twice(tmp_path):
    write_data(tmp_path, names=["a", "b", "c"])
    widen(tmp_path, 4, [1, 2, 3], ["a", "a", "b", "c"])
    with pytest.raises(ValueError, match="channels.txt a a b c names one twice: name each once"):
        opened(tmp_path)


def test_without_time_means_there_is_no_acc_and_one_line_says_so(tmp_path, capsys):
    write_data(tmp_path)
    argv = tiny_flags(tmp_path)
    expected, events = losses(run_here(argv)), records(tmp_path / "runs/tiny/1GPU/00", "epoch")
    (tmp_path / "stats/time_means.npy").unlink()
    folder = run_here(argv)
    assert losses(folder) == expected
    (line,) = (line for line in (folder / "out.log").read_text().splitlines() if "time means" in line)
    assert "stats/time_means.npy): validation tells no ACC" in line
    for with_means, without in zip(events, records(folder, "epoch")):
        assert without["valid_acc_timemean"] is None
        assert without["valid_rmse"] == with_means["valid_rmse"] and without["valid_loss"] == with_means["valid_loss"]
    again = load_config([*argv, "--time_means_path=None"])[0]
    assert Fields.open(again, Files.open(again.train_data_path)).time_means is None


def test_an_evaluation_without_climatology(tmp_path):
    """All that needs none is as with one; and an exported model carries what there is."""
    write_data(tmp_path, names=["u", "v", "t"])
    folder = run_here(tiny_flags(tmp_path))
    full = evaluated(tmp_path, tmp_path / "full")
    (tmp_path / "stats/time_means.npy").unlink()
    found = evaluated(tmp_path, tmp_path / "out", "--plot_channels", "u")
    assert found["climatology"] is None and list(found["scores"]) == ["persistence", "model"]
    assert set(full["scores"]["model"]) - set(found["scores"]["model"]) == {
        "acc", "acc_pooled", "activity", "truth_activity",
    }  # fmt: skip
    for source, scores in found["scores"].items():
        assert all(values == full["scores"][source][score] for score, values in scores.items())
    assert found["spectra"] == full["spectra"]
    table = (tmp_path / "out/skill.csv").read_text()
    assert "climatology" not in table and "activity" not in table and "rmse_over_persistence" in table
    assert (tmp_path / "out/pictures/skill_u.png").exists()
    exported = tmp_path / "exported"
    Trained.open(folder).write(exported)
    assert not (exported / "statistics/time_means.npy").exists()
    assert "correlation" not in (exported / "README.md").read_text()
    assert Trained.open(exported).config.time_means_path is None


def test_an_evaluation_without_climatology_finds_what_is_not_finite(tmp_path):
    write_data(tmp_path, names=["u", "v", "t"])
    run_here(tiny_flags(tmp_path))
    (tmp_path / "stats/time_means.npy").unlink()
    with h5py.File(tmp_path / "valid/2003.h5", "r+") as file:
        file["fields"][5, 1, 2, 3] = np.nan
    with pytest.raises(ReadError, match="frame 5, channel 'v', row 2, column 3 is nan"):
        call_here(evaluate.main, flags(tmp_path, "--out", str(tmp_path / "out")))


def test_an_exported_model_has_the_statistics_of_its_channels(tmp_path):
    write_data(tmp_path, names=["t2m", "z500", "u10m"])
    expected = opened(tmp_path)
    widen(tmp_path, 20, [2, 14, 0])
    folder = run_here(tiny_flags(tmp_path))
    Trained.open(folder).write(tmp_path / "exported")
    found = Trained.open(tmp_path / "exported").fields
    for kind in ("means", "stds"):
        np.testing.assert_array_equal(getattr(found, kind), getattr(expected, kind))
    assert np.load(tmp_path / "exported/statistics/time_means.npy").shape == (1, 3, 17, 32)


@pytest.mark.parametrize("channels, shown, headline", [(20, "t2m", "u10m"), (3, "ch0", "ch0")])
def test_names_and_pictures_of_files_that_name_nothing(tmp_path, channels, shown, headline):
    write_data(tmp_path, channels=channels)
    flags_ = [f"--n_in_channels={channels}", f"--n_out_channels={channels}", "--plot_channels=None"]
    folder = run_here(tiny_flags(tmp_path, *flags_))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "logs"))
    board.Reload()
    assert board.Tags()["images"] == [f"Visualization, {shown}"]
    assert f"RMSE({headline})/valid" in board.Tags()["scalars"]
    assert list(records(folder, "epoch")[0]["valid_rmse"])[0] == headline
    named = write_data(tmp_path / "named", channels=20, names=list(ERA5_CHANNELS))
    assert [opened(named).out_names[c] for c in opened(named).plot_channels] == []  # the section asks for none


def test_a_validation_before_the_first_step(tmp_path):
    write_data(tmp_path)
    argv = tiny_flags(tmp_path, "--ema_decay=0.9", "--num_iters=3")
    plain = run_here(argv)
    expected, epochs = losses(plain), records(plain, "epoch")
    folder = run_here([*argv, "--validate_first"])
    assert losses(folder) == expected
    first, *others = records(folder, "epoch")
    assert (first["epoch"], first["iteration"], first["train_loss"]) == (0, 0, None)
    assert first["valid_loss"] == first["valid_loss_ema"] and first["valid_loss"] > others[0]["valid_loss"]
    assert [e["valid_loss"] for e in others] == [e["valid_loss"] for e in epochs]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted(
        path.name for path in (plain / "checkpoints").iterdir()
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "logs"))
    board.Reload()
    assert [e.step for e in board.Scalars("RMSE(ch0)/valid")][0] == 0
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["epoch"] == 0
    (half,) = (folder / "checkpoints").glob("00000002*")
    run_here([*argv, "--validate_first", "--resume", str(half)])  # not once more when it goes on
    assert [e["epoch"] for e in records(folder, "epoch")] == [0, 1, 2] and losses(folder) == expected


def test_a_stop_in_the_first_validation_leaves_nothing_to_go_on_from(tmp_path, monkeypatch):
    write_data(tmp_path)
    argv = tiny_flags(tmp_path, "--validate_first", "--resume=auto")
    with monkeypatch.context() as stopped, pytest.raises(Ended):
        stopped.setattr("utils.ranks.stop.StopRequests.agree", lambda *_: (True, False))
        run_here(argv)
    folder = tmp_path / "runs/tiny/1GPU/00"
    assert not list(folder.glob("checkpoints/0*"))
    assert "Stopped before the first step: there is nothing to go on from" in (folder / "out.log").read_text()
    assert [e["epoch"] for e in records(run_here(argv), "epoch")] == [0, 1, 2]


def test_what_one_of_two_descriptions_does_not_know_is_no_difference(tmp_path):
    """A later version may know more of its data."""
    write_data(tmp_path)
    found = opened(tmp_path)
    assert unlike(found, found.description | {"season": "winter", "units": None}) is None
    assert unlike(found, found.description | {"latitudes": [0, 1]}) == "latitudes"


def test_inputs_in_other_units_are_a_difference(tmp_path):
    """Also of channels that are read and not forecast."""
    write_data(tmp_path, names=["a", "b", "c"])
    found = opened(tmp_path)
    assert any(found.in_units) and any(found.units)
    other = dataclasses.replace(found, in_units=[*found.in_units[:-1], "degC"])
    assert unlike(other, found.description) == "units of the inputs"
