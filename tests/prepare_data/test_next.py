"""What follows on a data set that was made: the command, a section for a laptop, and statistics that were missing."""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

import train
from tests.helpers import ROOT, call_here, losses, write_data
from utils.prepare_data.next_step import pick_patch
from utils.prepare_data.prepare import main

pytest.importorskip("xarray", reason="xarray is not installed: pip install -r requirements-prepare.txt")
from tests.prepare_data.test_prepare_data import dataset, masks, write  # noqa: E402

GRID = {"latitude": np.linspace(90, -90, 17), "longitude": np.arange(32) * 11.25}


def command_of(said: str) -> list[str]:
    """Return the arguments of the command that `Next:` names."""
    (line,) = (line for line in said.splitlines() if line.startswith("Next: "))
    command, _, _ = line.removeprefix("Next: ").partition(";")
    python, script, *argv = shlex.split(command)
    assert (python, script) == ("python", "train.py")
    return argv


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("section", [False, True])
def test_the_next_command_trains(tmp_path, monkeypatch, capsys, section, constants):
    monkeypatch.chdir(tmp_path)
    inputs = [write(tmp_path / "raw", dataset(**GRID))]
    more = ["--section", "mine"] if section else []
    if constants:
        inputs.append(write(tmp_path / "raw", masks(**GRID), "masks.nc"))
        more += ["--constants", "lsm"]
    assert main([*inputs, "--out", "my data", "--valid_from", "2001-01-01", *more]) == 0
    argv = command_of(capsys.readouterr().out)
    if not section:  # the tree's own YAML file, from where the command is given
        argv += ["--yaml_config", str(ROOT / "config/ViT.yaml"), "--depth=1"]
    call_here(train.main, [*argv, "--num_iters=2"])
    (folder,) = Path("runs").glob("*/1GPU/00")
    assert len(losses(folder)) == 2
    used = yaml.safe_load((folder / "config.yaml").read_text())["mine" if section else "base"]
    assert used["img_size"] == [16, 32] and used["n_out_channels"] == 3 and used["global_batch_size"] == 16
    assert used["constants"] == (["lsm"] if constants else None)
    assert used["inf_data_path"] == ("my data/valid" if section else "my data/test")


def test_a_part_of_the_globe_has_edges(tmp_path, monkeypatch, capsys):
    """Windows that overlap would join its east to its west."""
    monkeypatch.chdir(tmp_path)
    part = GRID | {"longitude": np.arange(32) * 2.5}
    command = [write(tmp_path / "raw", dataset(**part)), "--valid_from", "2001-01-01", "--section", "mine", "--out"]
    assert main([*command, "part"]) == 0
    assert "patch_overlap" not in Path("part/mine.yaml").read_text()
    argv = command_of(capsys.readouterr().out)
    with pytest.raises(
        ValueError, match="patch_overlap goes round the globe, and its 32 columns lie from 2.5 to 282.5"
    ):
        call_here(train.main, [*argv, "--num_iters=2", "--patch_overlap=1"])
    assert main([write(tmp_path / "raw", dataset(**GRID)), *command[1:], "whole"]) == 0
    assert "patch_overlap" in Path("whole/mine.yaml").read_text()


def test_the_batch_is_no_larger_than_the_data(tmp_path, capsys):
    """17 steps of training in two files, one of them with a gap, are 14 samples."""
    path = write(tmp_path / "raw", dataset("2000-12-30", **GRID).drop_isel(time=3))
    argv = [
        path,
        "--out",
        str(tmp_path / "out"),
        "--valid_from",
        "2001-01-03T12:00",
        "--allow_gaps",
        "--section",
        "mine",
    ]
    assert main(argv) == 0 and "17 in train" in (said := capsys.readouterr().out)
    argv = command_of(said)
    call_here(train.main, [*argv, "--num_iters=1", "--expdir", str(tmp_path / "runs")])
    (folder,) = (tmp_path / "runs").glob("*/1GPU/00")
    used = yaml.safe_load((folder / "config.yaml").read_text())["mine"]
    assert used["global_batch_size"] == 8
    assert "Data: 14 training" in (folder / "out.log").read_text()


def test_without_a_validation_set_the_next_thing_is_one(tmp_path, capsys):
    path = write(tmp_path / "raw", dataset())
    assert main([path, "--out", str(tmp_path / "out")]) == 0
    assert "Next: a validation set, without which there is no training: " in capsys.readouterr().out
    assert main([path, "--out", str(tmp_path / "other"), "--section", "mine"]) == 2
    assert "give --valid_from DATE, too" in capsys.readouterr().err and not (tmp_path / "other").exists()
    argv = [path, "--out", str(tmp_path / "other"), "--valid_from=2001-01-01", "--section", "../mine"]
    assert main(argv) == 2 and "it takes a name of letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    "H, W, tokens, patch",
    [
        (721, 1440, 4096, 16),
        (721, 1440, 1024, 36),
        (73, 144, 999, 4),
        (361, 720, 4096, 8),
        (53, 97, 900, 4),
        (3, 5, 9, 1),
    ],
)
def test_a_patch_that_divides(H, W, tokens, patch):
    assert pick_patch(H, W, tokens) == patch
    assert patch == 1 or (H // patch) * (W // patch) <= tokens


def test_statistics_of_files_that_are_there(tmp_path, capsys):
    """Those that are missing are made, as the writer of data sets makes them; the others stay, unless asked."""
    write_data(tmp_path, names=["a", "b", "c"])
    stats, folder = tmp_path / "stats", tmp_path / "mine"
    expected = {path.name: np.load(path) for path in stats.glob("*.npy")}
    (stats / "time_means.npy").unlink()
    np.save(stats / "global_means.npy", np.zeros((1, 3, 1, 1)))
    assert main(["stats", str(tmp_path), "--out", str(folder)]) == 0
    assert sorted(path.name for path in stats.iterdir()) == ["global_means.npy", "global_stds.npy"]
    for name, values in expected.items():
        np.testing.assert_allclose(np.load(folder / name), values, rtol=1e-6)
    assert (folder / "channels.txt").read_text() == "a\nb\nc\n"
    assert main(["stats", str(tmp_path)]) == 0
    assert "left as they were: global_means, global_stds" in capsys.readouterr().out
    np.testing.assert_allclose(np.load(stats / "time_means.npy"), expected["time_means.npy"], rtol=1e-6)
    assert not np.load(stats / "global_means.npy").any()
    assert not (stats / "channels.txt").exists()  # of those that were there nobody knows the order
    (folder / "time_means.npy").unlink()
    write_data(tmp_path / "other", names=["b", "a", "c"])
    assert main(["stats", str(tmp_path / "other"), "--out", str(folder)]) == 2
    assert "are of other channels or in another order" in capsys.readouterr().err
    assert (folder / "channels.txt").read_text() == "a\nb\nc\n" and not (folder / "time_means.npy").exists()
    (folder / "channels.txt").unlink()
    os.mkfifo(folder / "channels.txt")
    assert main(["stats", str(tmp_path), "--out", str(folder)]) == 2
    assert "channels.txt is no file, but a pipe" in capsys.readouterr().err
    assert main(["stats", str(tmp_path)]) == 2 and "--overwrite makes them anew" in capsys.readouterr().err
    assert main(["stats", str(tmp_path), "--overwrite"]) == 0
    np.testing.assert_allclose(np.load(stats / "global_means.npy"), expected["global_means.npy"], rtol=1e-6)
    assert main(["check", str(tmp_path)]) == 0


def test_statistics_as_the_writer_makes_them(tmp_path):
    path = write(tmp_path / "raw", dataset(steps=50).drop_isel(time=[7, 20]))
    assert main([path, "--out", str(tmp_path / "out"), "--valid_from", "2001-01-03", "--allow_gaps"]) == 0
    assert main(["stats", str(tmp_path / "out/train"), "--out", str(tmp_path / "again")]) == 0
    for path in (tmp_path / "out/stats").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_statistics_that_cannot_be_made(tmp_path, capsys):
    write_data(tmp_path)
    assert main(["stats", str(tmp_path / "train")]) == 2 and "give --out" in capsys.readouterr().err
    assert main(["stats", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x")]) == 2
    assert "no data folder" in capsys.readouterr().err
    (tmp_path / "train/2001.h5").write_bytes((tmp_path / "train/2001.h5").read_bytes()[:-5000])
    assert main(["stats", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "2001.h5" in error and "goes on after" not in error and not (tmp_path / "x").exists()
