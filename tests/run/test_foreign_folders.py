"""Folders of strangers, of a run or an exported model: no link leads out of them, and nothing in them is waited for."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate
import forecast
from tests.helpers import Evil, call_here, change_info, records, run_folder, run_here, tiny_flags, write_data
from utils import files
from utils.checkpoint import store as checkpoint
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.checkpoint.info import Unreadable, read_info
from utils.config.settings import Config
from utils.reading import LARGEST_NUMBER, read_json
from utils.run.folder import make_run_folder

METRICS = "metrics.jsonl"
FLAGS = ("--num_iters=6", "--checkpoint_every=2", "--keep_checkpoints=9")
OUT = "is a link to .*, out of its folder: put there what it leads to, or, if you trust the folder, set LINKED_FILES=1"
PIPE = "is no file, but a pipe, a socket or a device"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with data, a run, and its exported model."""
    folder = write_data(tmp_path_factory.mktemp("data"))
    run_here(tiny_flags(folder, *FLAGS))
    run = run_folder(tiny_flags(folder))
    shutil.rmtree(run / "checkpoints/00000006-validated")
    assert checkpoint_main(["export", str(run), str(folder / "exported")]) == 0
    return folder


@pytest.fixture
def foreign(data, tmp_path) -> Path:
    """A run of somebody else, of four of six iterations."""
    return shutil.copytree(run_folder(tiny_flags(data)), tmp_path / "foreign")


@pytest.fixture
def exported(data, tmp_path) -> Path:
    return shutil.copytree(data / "exported", tmp_path / "exported")


def resume(data: Path, run: Path) -> Path:
    return run_here([*tiny_flags(data, *FLAGS), "--resume", str(run)])


def put(path: Path, there: Path) -> None:
    """Put a link in the place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(there)


NAMES = (
    "config.yaml metrics.jsonl metrics.jsonl.part owner owner.part out.log lock logs pictures evaluation checkpoints"
)


@pytest.mark.parametrize("name", [*NAMES.split(), "checkpoints/00000006.part", "evaluation/skill.json"])
def test_a_link_in_a_run(data, foreign, tmp_path, name):
    """A process would write where it leads, by a name that it knows: to ~/.bashrc, say."""
    victim = tmp_path / "victim"
    if name in ("logs", "pictures", "evaluation", "checkpoints") or name.startswith("checkpoints/"):
        source = foreign / name
        shutil.copytree(source, victim) if source.is_dir() else victim.mkdir()
        (victim / "file").write_text("mine")
    else:
        victim.write_text("mine")
    put(foreign / name, victim)
    before = sorted(victim.rglob("*"))
    with pytest.raises(ValueError, match=f"foreign/{name} {OUT}") as error:
        resume(data, foreign)
    assert "\n" not in str(error.value) and sorted(victim.rglob("*")) == before
    assert (victim / "file" if victim.is_dir() else victim).read_text() == "mine"


def test_no_checkpoint_is_looked_at_elsewhere(foreign, tmp_path, capsys):
    (foreign / "checkpoints").rename(tmp_path / "scratch")
    put(foreign / "checkpoints", tmp_path / "scratch")
    for source in foreign, foreign / "checkpoints/00000004-validated":
        assert checkpoint_main(["inspect", str(source)]) == 2
        assert re.search(OUT, capsys.readouterr().err)


def test_a_link_that_stays_in_the_folder_and_one_that_is_trusted(data, foreign, tmp_path, monkeypatch):
    (foreign / "newest").symlink_to("checkpoints")
    shutil.copytree(foreign, tmp_path / "other")
    resume(data, foreign)
    (tmp_path / "other/checkpoints").rename(tmp_path / "scratch")
    (tmp_path / "other/checkpoints").symlink_to(tmp_path / "scratch")
    monkeypatch.setenv("LINKED_FILES", "1")
    resume(data, tmp_path / "other")
    assert checkpoint.find(tmp_path / "scratch")[0].name == "00000006-validated"


@pytest.mark.parametrize("what", ["evaluate", "export", "exported"])
def test_a_link_in_what_is_evaluated_or_exported(foreign, exported, tmp_path, what, capsys):
    (tmp_path / "victim").write_text("mine")
    if what == "exported":
        put(exported / "statistics/channels.txt", tmp_path / "victim")
        with pytest.raises(ValueError, match=OUT):
            forecast.load(str(exported))
        return
    put(foreign / ("evaluation/skill.json" if what == "evaluate" else "metrics.jsonl"), tmp_path / "victim")
    assert checkpoint_main(["export", str(foreign), str(tmp_path / "out")]) == 2
    assert "out of its folder" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_written_aside_follows_no_link(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    put(tmp_path / "file.part", victim)
    files.write_text(path, "ours")
    assert (victim.read_text(), path.read_text()) == ("mine", "ours") and not path.is_symlink()


def test_a_lock_follows_no_link(tmp_path):
    """That of an earlier run, which is renamed aside, is taken before."""
    path = make_run_folder(Config(config="x", expdir=str(tmp_path)), "1GPU").path
    (path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match="cannot write .*Too many levels of symbolic links"):
        make_run_folder(Config(config="x", expdir=str(tmp_path)), "1GPU")
    assert not (tmp_path / "victim").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["owner", "metrics.jsonl", "lock", "evaluation/skill.json", "checkpoints/x"])
def test_a_pipe_in_a_run(data, foreign, name):
    (foreign / name).parent.mkdir(exist_ok=True)
    (foreign / name).unlink(missing_ok=True)
    os.mkfifo(foreign / name)
    with pytest.raises(ValueError, match=f"{name} {PIPE}"):
        resume(data, foreign)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.yaml", "model.json", "statistics/channels.txt"])
def test_a_pipe_in_an_exported_model(exported, name):
    (exported / name).unlink(missing_ok=True)
    os.mkfifo(exported / name)
    with pytest.raises(ValueError, match=f"{name} {PIPE}"):
        forecast.load(str(exported))


def test_lines_that_are_no_records(data, foreign):
    """They are left out, and named."""
    lines = [files.to_line({"event": "step"}).strip(), "5", "{}", '{"event": "step", "iteration": "x"}', "[" * 10**5]
    with (foreign / "metrics.jsonl").open("a") as file:
        file.writelines(files.to_line({"event": "epoch", "iteration": 2}))  # it does not say of which
        file.write("\n".join([*lines, ""]))
    count = (foreign / "metrics.jsonl").read_text().count("\n")
    resume(data, foreign)
    log = (foreign / "out.log").read_text()
    assert all(f"line {count - i} is damaged, and left out" in log for i in range(len(lines)))
    assert [event["iteration"] for event in records(foreign, "epoch")] == [2, 4, 6]


def test_a_validation_that_is_done_again_in_a_run_whose_steps_are_lost(data, foreign):
    """The curves begin at the last step that counts; where there is none they begin where they can."""
    newest, *_ = checkpoint.find(foreign / "checkpoints")
    told = read_info(newest)["epochs"]
    line = {"event": "epoch", "iteration": int(newest.name[:8]), "epoch": told + 1}
    no_step = {"event": "step", "iteration": 1, "loss": "x"}
    (foreign / "metrics.jsonl").write_text(files.to_line(line) + files.to_line(no_step))
    resume(data, foreign)


HUGE = 10**400


@pytest.mark.parametrize("change", [{"epoch_losses": [HUGE]}, {"stacked": 5}, {"iteration": 2**63}, {"nested": 990}])
def test_an_info_of_numbers_without_end(foreign, change):
    path = checkpoint.find(foreign / "checkpoints")[0]
    if depth := change.get("nested"):
        info = (path / "info.json").read_text().rstrip()
        (path / "info.json").write_text(f'{info[:-1]}, "x": {"[" * depth}{"]" * depth}}}')
    else:
        change_info(path, **change)
    with pytest.raises(Unreadable, match=r"info\.json"):
        read_info(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change",
    [
        {"channels_of_files": 10**12}, {"channels_of_files": 3 * 10**8}, {"step_hours": 1e-9}, {"step_hours": HUGE},
        {"residual_scale": "a"}, {"residual_scale": [1.0]}, {"plot_channels": [0.5]}, {"plot_channels": [0, 0]},
        {"data": []}, {"latitude": [HUGE] * 16}, {"latitude": [float("nan")] * 16}, {"format": "a\nb"},
        {"iteration": None}, {"inputs": [{"name": "u"}]},
    ],
)  # fmt: skip
def test_a_model_json_that_no_export_writes(exported, change):
    about = json.loads((exported / "model.json").read_text())
    (exported / "model.json").write_text(json.dumps(about | change))
    with pytest.raises(ValueError, match=r"model\.json|has the format 'a\\nb'") as error:
        forecast.load(str(exported))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"valid_loss": None}, {"valid_loss": 10**400}, {"valid_rmse": "x"}, {"valid_rmse": {}},
        {"valid_rmse": {"u": None}}, {"persistence_rmse": []}, {"persistence_rmse": {"u": "x"}},
    ],
)  # fmt: skip
def test_a_validation_that_is_none(data, tmp_path, change):
    """Of a run that broke down, or of a stranger: the card does not tell of it."""
    run = shutil.copytree(run_folder(tiny_flags(data)), tmp_path / "run")
    assert checkpoint_main(["export", str(run), str(tmp_path / "before")]) == 0
    assert "One step ahead" in (tmp_path / "before/README.md").read_text()
    lines = [event | change if event["event"] == "epoch" else event for event in files.read_events(run / METRICS)]
    (run / METRICS).write_text("".join(map(files.to_line, lines)))
    assert checkpoint_main(["export", str(run), str(tmp_path / "after")]) == 0
    assert "One step ahead" not in (tmp_path / "after/README.md").read_text()


def test_records_larger_than_any_run_writes(data, foreign, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_RECORDS", 10**6)
    os.truncate(foreign / METRICS, 10**6 + 1)
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 1,000,001 bytes: no such file has more than 1,000,000"):
        resume(data, foreign)


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "a\n2026-01-01 INFO forged", "x" * 200, "\x1b[2J", "", "..", "a ", r"$\foo$", "time"]
)
def test_names_that_name_no_file(exported, name):
    """Pictures have the names of channels, and so have variables, and lines of the log."""
    about = json.loads((exported / "model.json").read_text())
    for channels in (about["inputs"], about["forecasts"]):
        channels[0]["name"] = name
    (exported / "model.json").write_text(json.dumps(about))
    told = "a channel has the name .*: take letters, digits and _|a channel is called time, as an axis of forecasts is"
    with pytest.raises(ValueError, match=told) as error:
        forecast.load(str(exported))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("units", [r"$\foo$", "m\n", "x" * 200])
def test_units_that_no_line_can_show(exported, units):
    """To Matplotlib a $ begins a formula."""
    about = json.loads((exported / "model.json").read_text())
    about["inputs"][0]["units"] = units
    (exported / "model.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="a channel has the units .*: they take one short line"):
        forecast.load(str(exported))


def test_entries_that_no_export_has(data, exported, tmp_path, capsys):
    """Those of a checkpoint count nowhere; those of the card are missed where another one is written."""
    about = json.loads((exported / "model.json").read_text())
    (exported / "model.json").write_text(json.dumps(about | {"config": 5}))
    argv = ["--checkpoint", str(exported), "--inf_data_path", str(data / "valid"), "--lead_hours", "12"]
    call_here(evaluate.main, [*argv, "--out", str(tmp_path / "out")])
    assert (tmp_path / "out/skill.json").exists()
    for entry in ("scores", "beside_the_state"):
        (exported / "model.json").write_text(json.dumps({name: x for name, x in about.items() if name != entry}))
        capsys.readouterr()
        assert checkpoint_main(["export", str(exported), str(tmp_path / "again")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"model.json lacks something ('{entry}'): copy the folder again" in line
        assert not (tmp_path / "again").exists()


def test_an_evaluation_with_a_huge_setting(data, exported, tmp_path, monkeypatch):
    argv = ["--checkpoint", str(exported), "--inf_data_path", str(data / "valid"), "--lead_hours", "12"]
    argv += ["--out", str(tmp_path / "out")]
    call_here(evaluate.main, argv)
    os.truncate(tmp_path / "out/setting.json", 2**26 + 1)
    with pytest.raises(ValueError, match=r"setting\.json has 67,108,865 bytes: no such file has more than 67,108,864"):
        call_here(evaluate.main, argv)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change, told",
    [
        (("embed_dim: 32", "embed_dim: 40000"), "is .32, 4, 4., and|and in this model"),
        (("depth: 2", "depth: 1000000000"), "depth is 1000000000: it takes 10000 or less"),
        (("depth: 2", "depth: 3"), "is not there, and in this model"),
    ],
)
def test_a_model_that_its_weights_do_not_fill(data, exported, tmp_path, change, told):
    """Told before memory is taken, by forecast.py and evaluate.py."""
    text = (exported / "config.yaml").read_text()
    assert change[0] in text
    (exported / "config.yaml").write_text(text.replace(*change))
    with pytest.raises(ValueError, match=told):
        forecast.load(str(exported))
    argv = ["--checkpoint", exported, "--inf_data_path", data / "valid", "--lead_hours", "6", "--out", tmp_path / "out"]
    with pytest.raises(ValueError, match=told):
        call_here(evaluate.main, list(map(str, argv)))


@pytest.mark.parametrize("kind", ["a pickle", "an archive of torch", "an array of objects"])
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "statistics/global_means.npy"])
def test_nothing_in_an_exported_model_runs(data, exported, tmp_path, name, kind):
    """Loaded by forecast.py or evaluated: one line, and no command of the one who made it."""
    path, evil = exported / name, Evil(tmp_path / "ran")
    assert path.exists() or name == "weights.pt"
    if kind == "a pickle":
        path.write_bytes(pickle.dumps(evil))
    elif kind == "an archive of torch":
        torch.save({"w": evil}, path)
    else:
        with path.open("wb") as file:
            np.save(file, np.array([evil], object))
    if name == "weights.pt":  # of an older export, and in the place of the other
        (exported / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape(name.split("/")[-1] if name != "weights.pt" else "exported")):
        forecast.load(str(exported))
    argv = ["--checkpoint", exported, "--inf_data_path", data / "valid", "--lead_hours", "6", "--out", tmp_path / "out"]
    with pytest.raises(ValueError) as error:
        call_here(evaluate.main, list(map(str, argv)))
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def test_statistics_that_claim_more_than_they_hold(exported):
    path = exported / "statistics/global_means.npy"
    good, whole = path.read_bytes(), np.load(path)
    headers = [f"'shape': {shape}" for shape in ("(1, 1000000000000, 1, 1)", "True", f"({HUGE},)", "(" * 5000)]
    for header in headers:
        shape = f"'shape': {whole.shape}"
        start = good.index(b"{")
        text = good[start : good.index(b"\n")].decode().rstrip().replace(shape, header)
        path.write_bytes(
            b"\x93NUMPY\x02\x00" + (len(text) + 1).to_bytes(4, "little") + text.encode() + b"\n" + bytes(99)
        )
        with pytest.raises(ValueError, match=r"cannot read .*global_means\.npy"):
            forecast.load(str(exported))
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"cannot read .*global_means\.npy"):
        forecast.load(str(exported))
    np.save(path, whole.astype(np.longdouble))
    with pytest.raises(ValueError, match="values that are not finite"):
        forecast.load(str(exported))


def test_numbers_and_texts_of_json(tmp_path):
    path = tmp_path / "x.json"
    for text, told in ((f"[{LARGEST_NUMBER}]", "19 digits"), (f"[{HUGE}]", "401 digits"), ("[" * 10**5, "too deeply")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"x\.json (has a number of|is nested) {told}"):
            read_json(path)
    path.write_text(f"[{LARGEST_NUMBER - 1}, -5, 0.5]")
    assert read_json(path) == [LARGEST_NUMBER - 1, -5, 0.5]
