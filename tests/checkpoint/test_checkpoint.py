"""Checkpoints: what is written, kept, found again and refused; weights that leave a run and begin another one."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import train
import train_mp
from tests.data.test_forcings import write_constants
from tests.helpers import ROOT, change_info, losses, records, resume_here, run_folder, run_here, tiny_flags
from tests.proofs.injections import At, InValidation, Send
from utils.checkpoint import store as checkpoint
from utils.checkpoint import weights
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.checkpoint.info import CHECKSUM, INFO, _checksum, read_info
from utils.checkpoint.state import host_memory
from utils.config.reader import load_config
from utils.errors import Ended, Refused
from utils.run.folder import lock_run, open_run_folder

FLAGS = ("--num_iters", "6", "--checkpoint_every", "2")  # two iterations an epoch


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.find(folder / "checkpoints")]


@pytest.mark.slow
def test_the_scale_of_fp16_goes_on(tiny, monkeypatch):
    """It begins far too large, and each step that overflows halves it: the resumed run begins with what it came to."""
    monkeypatch.setattr(train, "build_scaler", lambda *_: torch.amp.GradScaler("cpu", init_scale=2.0**36))
    argv = tiny_flags(tiny, "--num_iters=30", "--amp_mode=fp16", "--device=cpu")
    whole, resumed = resume_here(argv, 24)
    assert resumed == whole and None not in [step["grad_norm"] for step in records(run_folder(argv), "step")[24:]]


def test_a_library_that_leaves_the_description_as_it_was_given_writes_checkpoints(tiny, monkeypatch):
    """That of torch 2.11 fills a copy in."""
    filled = checkpoint.dcp.FileSystemWriter.finish
    as_of_2_11 = lambda self, metadata, results: filled(self, replace(metadata), results)  # noqa: E731
    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "finish", as_of_2_11)
    folder = run_here(tiny_flags(tiny, *FLAGS))
    assert names(folder) == ["00000006-validated", "00000004-validated"]


@pytest.fixture
def soon_best(tiny, monkeypatch):
    """A run whose first validation is the best: then the learning rate destroys what was learnt."""
    monkeypatch.setattr(train, "learning_rate", lambda i, config: 1e-3 if i < 2 else 3.0)
    folder = run_here(tiny_flags(tiny, *FLAGS))
    monkeypatch.undo()
    return folder


def test_the_newest_checkpoints_are_kept_and_the_best(soon_best, tiny):
    folder = soon_best
    shutil.rmtree(folder / "checkpoints/00000006-validated")
    run_here(tiny_flags(tiny, *FLAGS, "--resume", "auto"))  # knows which one is the best
    assert names(folder) == ["00000006-validated", "00000004-validated", "00000002-validated"]
    told = [e["valid_loss"] for e in records(folder, "epoch")]
    info = read_info(folder / "checkpoints/00000006-validated")
    assert min(told) == told[0] == info["best"]["loss"] and info["best"]["name"] == "00000002-validated"
    folder = run_here(tiny_flags(tiny, *FLAGS, "--run_num", "one", "--keep_checkpoints", "1"))
    assert names(folder) == ["00000006-validated"]  # the best, too


def test_a_process_that_is_killed_while_it_removes_leaves_no_half_checkpoint(tiny, monkeypatch):
    """What is to be removed no longer looks like a checkpoint."""
    monkeypatch.setattr(checkpoint, "remove", lambda folders: None)  # as if it had only begun
    folder = run_here(tiny_flags(tiny, *FLAGS, "--checkpoint_every", "1", "--keep_checkpoints", "1"))
    assert names(folder) == ["00000006-validated"]  # the best, too
    assert len(list((folder / "checkpoints").glob("*.void"))) >= 5


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_cannot_be_listed_after_a_save_ends_no_thread(tiny, monkeypatch):
    """What is to be removed stays there until the next save."""
    original = Path.glob

    def glob(self, pattern, *args, **options):
        if pattern == "*.void":
            raise OSError("Stale file handle")
        return original(self, pattern, *args, **options)

    monkeypatch.setattr(Path, "glob", glob)
    run_here(tiny_flags(tiny, *FLAGS))


def test_a_best_checkpoint_that_is_gone_is_not_the_best(soon_best, tiny):
    for name in ("00000002-validated", "00000006-validated"):
        shutil.rmtree(soon_best / "checkpoints" / name)
    run_here(tiny_flags(tiny, *FLAGS, "--resume", "auto"))
    last = records(soon_best, "epoch")[-1]["valid_loss"]
    best = read_info(soon_best / "checkpoints/00000006-validated")["best"]
    assert best == {"loss": last, "name": "00000006-validated"}


def test_a_checkpoint_says_where_it_stands(tiny):
    folder = run_here(tiny_flags(tiny, "--num_iters", "6", "--checkpoint_every", "3", "--keep_checkpoints", "9"))
    info = read_info(folder / "checkpoints/00000003")
    assert (info["iteration"], info["epochs"], info["samples"], info["is_finished"]) == (3, 1, 24, False)
    assert info["epoch_losses"] == losses(folder)[2:3] and info["train_samples"] == 21
    assert info["config"]["num_iters"] == 6 and info["versions"]["torch"] == torch.__version__
    assert read_info(folder / "checkpoints/00000006-validated")["is_finished"]
    assert not list((folder / "checkpoints").glob("*.part"))


def test_checkpoints_of_another_format_are_refused(tiny):
    argv = tiny_flags(tiny, *FLAGS, "--keep_checkpoints=1")
    file = run_here(argv) / "checkpoints/00000006-validated/info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 4}))
    with pytest.raises(ValueError, match="no checkpoint of .* can be read"):
        run_here([*argv, "--resume", "auto"])
    assert "has format 4, and this code reads 3" in (run_folder(argv) / "out.log").read_text()


def test_no_checkpoints_if_none_are_asked_for(tiny):
    folder = run_here(tiny_flags(tiny, "--checkpoint_every", "None"))
    assert not (folder / "checkpoints").exists()


def test_time_makes_checkpoints_too(tiny):
    flags = "--num_iters 10 --global_batch_size 2 --checkpoint_every 0.001s --keep_checkpoints 99".split()
    assert len(names(run_here(tiny_flags(tiny, *flags)))) > 3  # one after the only validation


def test_a_time_limit_saves_and_stops(tiny):
    argv = tiny_flags(tiny, "--num_iters", "500", "--time_limit", "1s")
    with pytest.raises(Ended) as ended:
        run_here(argv)
    folder = run_folder(argv)
    assert ended.value.args == (75,) and "iterations: the time limit" in (folder / "out.log").read_text()
    done = read_info(folder / "checkpoints" / names(folder)[0])["iteration"]
    assert 1 < done < 500 and len(losses(folder)) == done


def test_a_finished_run_is_left_alone(tiny):
    argv = tiny_flags(tiny, *FLAGS)
    folder = run_here(argv)
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(Ended) as ended:
        run_here([*argv, "--resume", "auto"])
    assert ended.value.args == (0,) and (folder / "metrics.jsonl").read_text() == before
    with pytest.raises(Ended):
        run_here([*argv, "--resume", str(folder / "checkpoints")])
    assert f"{folder} is finished: all 6 iterations are done" in (folder / "out.log").read_text()


def test_auto_begins_where_there_is_nothing_to_go_on_with(tiny):
    assert len(losses(run_here(tiny_flags(tiny, "--resume", "auto")))) == 4


def test_a_run_goes_back_to_an_older_checkpoint(tiny):
    argv = tiny_flags(tiny, *FLAGS, "--keep_checkpoints", "9")
    folder = run_here(argv)
    whole = losses(folder)
    (folder / "checkpoints/00000003.part").mkdir()  # of a process that was killed
    run_here([*argv, "--resume", str(folder / "checkpoints/00000002-validated")])
    assert losses(folder) == whole and [r["iteration"] for r in records(folder, "resume")] == [2]
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {f"0000000{i}-validated" for i in (2, 4, 6)}  # nothing of the first time


@pytest.mark.parametrize(
    "more, found",
    [
        (["--lr", "1"], r"was trained with lr 0.001, and now it is 1.0: a resumed run keeps it; .* --init_from"),
        (["--global_batch_size", "4"], "was trained with global_batch_size 8, and now it is 4"),
        (["--limit_nsamples", "16"], "was trained with limit_nsamples None, and now it is 16"),
    ],
)
def test_what_decides_training_may_not_change(tiny, more, found):
    run_here(tiny_flags(tiny, *FLAGS))
    with pytest.raises(ValueError, match=found):
        run_here(tiny_flags(tiny, *FLAGS, *more, "--resume", "auto"))


def test_other_data_are_refused(tiny):
    argv = tiny_flags(tiny, *FLAGS)
    folder = run_here(argv)
    shutil.rmtree(folder / "checkpoints/00000006-validated")
    (tiny / "train/2002.h5").unlink()
    with pytest.raises(ValueError, match="was trained on 21 samples, and now there are 13: give the same data"):
        run_here([*argv, "--resume", "auto"])


@pytest.mark.parametrize(
    "other, what", [("statistics", "statistics"), ("names", "statistics"), ("constants", "channels beside")]
)
def test_data_of_another_meaning_are_refused(tiny, other, what):
    """As many samples of the same shape, and yet what the weights learnt of them would no longer be true."""
    argv = tiny_flags(tiny, *FLAGS, "--in_channels", "a", "b", "--out_channels", "a", "--channel_names", "a", "b", "c")
    constants = write_constants(tiny)
    argv += ["--constants", "lsm"] if other == "constants" else []
    folder = run_here(argv)
    shutil.rmtree(folder / "checkpoints/00000006-validated")
    if other == "statistics":
        np.save(tiny / "stats/global_means.npy", np.load(tiny / "stats/global_means.npy") + 1)
    elif other == "constants":
        write_constants(tiny, constants + 1)
    else:
        argv[-3:] = ["b", "a", "c"]
    with pytest.raises(ValueError, match=f"was trained with other {what}.* than these data have: give those, or begin"):
        run_here([*argv, "--resume", "auto"])


def test_another_validation_has_its_own_best(tiny, caplog):
    """A loss on other samples is no record to beat."""
    argv = tiny_flags(tiny, *FLAGS)
    folder = run_here(argv)
    last = folder / "checkpoints/00000006-validated"
    for more, valid in ([], 7), (["--limit_nsamples_val=3"], 3):
        shutil.rmtree(last)
        before = checkpoint.find(folder / "checkpoints")[0]
        change_info(before, best={"loss": 1e-9, "name": before.name})
        run_here([*argv, *more, "--resume", "auto"])
        found = read_info(last)
        assert found["valid_samples"] == valid and (found["best"]["name"] == last.name) == (valid == 3)
    assert "Validation had 7 samples, and has 3: which checkpoint is best is found anew" in caplog.text


@pytest.mark.parametrize("format, absent", [(1, ("written", "stacked", "valid_samples")), (2, ("valid_samples",))])
def test_what_earlier_versions_did_not_say(tiny, format, absent):
    argv = tiny_flags(tiny, *FLAGS)
    folder = run_here(argv)
    whole, last = losses(folder), folder / "checkpoints/00000006-validated"
    shutil.rmtree(last)
    file = checkpoint.find(folder / "checkpoints")[0] / INFO
    told = {name: x for name, x in read_info(file.parent).items() if name not in absent} | {"format": format}
    file.write_text(json.dumps({**told, CHECKSUM: _checksum(told)}))
    run_here([*argv, "--resume", "auto"])
    assert losses(folder) == whole and read_info(last)["valid_samples"] == 7


def test_a_path_without_a_checkpoint_is_refused(tiny):
    for path, found in ((tiny / "nowhere", "is not there"), (tiny, "holds no checkpoint")):
        with pytest.raises(ValueError, match=f"which {found}: give the folder of a run, or one of its checkpoints"):
            run_here(tiny_flags(tiny, "--resume", str(path)))


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_a_job_goes_on_with_its_own_run(tiny, monkeypatch, resume):
    """Although another job has taken its name, and finished, on the same grid and on another."""
    argv = tiny_flags(tiny, *FLAGS)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    own = run_here(argv)
    shutil.rmtree(own / "checkpoints/00000006-validated")
    whole = losses(own)
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    run_here(argv)  # renames it aside
    own = own.with_name("00.1")
    with pytest.raises(Ended):  # the one of that name
        run_here([*argv, "--resume", "auto"])
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_here([*argv, *resume])
    assert losses(own) == whole and [r["iteration"] for r in records(own, "resume")] == [4]
    with pytest.raises(Ended):  # whatever it said at first, and even if that is gone
        run_here([*argv, "--resume", str(own / "checkpoints/00000001")])


def test_a_job_that_was_started_again_before_it_had_a_run_begins_one(tiny, monkeypatch):
    argv = tiny_flags(tiny, *FLAGS)
    other = run_here(argv)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_here(argv)
    assert (other.with_name("00.1") / "metrics.jsonl").exists() and not records(other, "resume")


@pytest.mark.parametrize("first", [[], ["--validate_first"]])
def test_a_job_that_gets_nowhere_does_not_begin_again_for_ever(tiny, monkeypatch, first):
    """Its time is up in a validation, each time, which begins anew; without --validate_first after an epoch."""
    argv = tiny_flags(tiny, "--global_batch_size=4", "--num_iters=6", *first)
    main = partial(train.main, observers=(InValidation(Send(signal.SIGUSR1), iteration=0 if first else 5),))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for life, code in enumerate([75, 75, 2] if first else [75, 75, 75, 2]):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(life))
        with pytest.raises(Refused if code == 2 else Ended) as ended:
            run_here(argv, main)
        assert code == 2 or ended.value.args == (code,)
    assert str(ended.value).startswith(
        "3 lives of this job in a row came to no step and no validation that was saved: "
    )
    assert str(ended.value).endswith("/1GPU/00") != bool(first)  # where to go on, if there is something
    run_here(argv)  # all that it had is there


def test_who_stops_a_run_by_hand_may_do_so_often(tiny):
    argv = tiny_flags(tiny, "--global_batch_size=4", "--num_iters=6", "--resume=auto")
    for _ in range(5):
        with pytest.raises(Ended) as ended:
            run_here(argv, partial(train.main, observers=(InValidation(Send(signal.SIGUSR1)),)))
        assert ended.value.args == (75,)


def test_a_job_that_gets_on_at_last_goes_on(tiny, monkeypatch):
    """Three lives from the same place, of which the third does a step."""
    argv = tiny_flags(tiny, "--global_batch_size=4", "--num_iters=20")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    stop = Send(signal.SIGUSR1)
    for life, when in enumerate([*[InValidation(stop)] * 3, At(stop, iteration=7)]):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(life))
        with pytest.raises(Ended) as ended:
            run_here(argv, partial(train.main, observers=(when,)))
        assert ended.value.args == (75,)
    assert [line["iteration"] for line in records(run_folder(argv), "resume")] == [5, 5, 5]


def test_a_job_that_gets_on_may_begin_often(tiny, monkeypatch):
    argv = tiny_flags(tiny, "--global_batch_size=4", "--num_iters=20")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for life in range(4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(life))
        with pytest.raises(Ended) as ended:
            run_here(argv, partial(train.main, observers=(At(Send(signal.SIGUSR1), iteration=3 * life + 1),)))
        assert ended.value.args == (75,)


def test_a_job_that_is_refused_does_not_take_a_run_from_its_owner(tiny, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    folder = run_here(tiny_flags(tiny, *FLAGS))
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(ValueError, match="was trained with lr"):
        run_here(tiny_flags(tiny, *FLAGS, "--lr=1", "--resume=auto"))
    assert (folder / "owner").read_text().startswith("job 12, process ")


def test_the_best_that_was_not_written_is_not_the_best(tiny, monkeypatch):
    """The second validation is better than the first, and its checkpoint is lost; the others are bad."""
    monkeypatch.setattr(train, "learning_rate", lambda i, config: 1e-3 if i < 4 else 3.0)
    original, calls = checkpoint.dcp.save, []

    def save(*args, **options):
        calls.append(None)
        if len(calls) == 2:
            raise OSError("no room")
        original(*args, **options)

    monkeypatch.setattr(checkpoint.dcp, "save", save)
    folder = run_here(tiny_flags(tiny, "--num_iters=8", "--checkpoint_every=2", "--keep_checkpoints=1"))
    told = [e["valid_loss"] for e in records(folder, "epoch")]
    assert told[1] == min(told) and names(folder) == ["00000008-validated", "00000002-validated"]
    best = read_info(folder / "checkpoints/00000008-validated")["best"]
    assert best == {"loss": told[0], "name": "00000002-validated"}


@pytest.mark.parametrize("before, after", [([], ["--on_nonfinite", "skip"]), (["--on_nonfinite", "skip"], [])])
def test_the_guard_may_change(tiny, before, after):
    argv = tiny_flags(tiny, *FLAGS)
    folder = run_here([*argv, *before])
    whole = losses(folder)
    run_here([*argv, *after, "--resume", str(folder / "checkpoints/00000004-validated")])
    assert losses(folder) == whole


@pytest.mark.parametrize("damage", ["info", "all"])
def test_without_a_readable_checkpoint_nothing_begins(tiny, damage):
    argv = tiny_flags(tiny, *FLAGS)
    folder = run_here(argv)
    for path in checkpoint.find(folder / "checkpoints"):
        if damage == "info":
            (path / "info.json").write_text("{")
        else:  # of the right size
            change_info(path, is_finished=False)
            file = path / "__0_0.distcp"
            file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be read \(out.log says why\): start anew"):
        run_here([*argv, "--resume", "auto"])
    log = (folder / "out.log").read_text()
    assert log.count("Checkpoint left out: ") == len(names(folder)) and "Traceback" not in log
    assert len(losses(folder)) == 6  # nothing of the run is lost


def test_a_folder_in_use_is_refused(tiny):
    """Two jobs that go on with one run would write over each other's checkpoints."""
    folder = run_here(tiny_flags(tiny, *FLAGS))
    hold = "import sys; from utils.config.reader import load_config; from utils.run.folder import open_run_folder\n"
    hold += "f = open_run_folder(load_config(sys.argv[1:])[0], ''); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, *tiny_flags(tiny, *FLAGS, "--resume=auto")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        for more in (["--resume", "auto"], []):
            with pytest.raises(ValueError, match=f"00 is in use by process {other.pid} on .*: wait for its end, or"):
                run_here(tiny_flags(tiny, *FLAGS, *more))
        other.stdin.close()
    lock_run(folder).close()


def test_a_job_that_goes_on_holds_its_folder(tiny, monkeypatch):
    """A lock is lost when its process closes the file once more: nothing may open it to read it."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    folder = run_here(tiny_flags(tiny, *FLAGS))
    config = load_config(tiny_flags(tiny, *FLAGS, "--resume", "auto"))[0].with_batches(1)
    with open_run_folder(config, "1GPU")[1]:
        take = "import sys, pathlib, utils.run.folder as f; f.lock_run(pathlib.Path(sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", take, str(folder)], capture_output=True, text=True, cwd=ROOT)
        assert "is in use by job 12, process" in done.stderr


@pytest.mark.parametrize("script, name", [(train, "1GPU"), (train_mp, "1MP")])
def test_weights_leave_a_run_and_begin_another(tiny, script, name):
    argv = tiny_flags(tiny, *FLAGS)
    folder, out = run_here(argv, script.main, name), tiny / "weights.pt"
    told = weights.export(folder, out)
    config = load_config(argv)[0].with_batches(1)
    model = train.build_model(config, train.WeatherData(config).fields)
    model.load_state_dict(torch.load(out, weights_only=True))
    info = folder / "checkpoints/00000006-validated/info.json"
    told_before = {name: x for name, x in json.loads(info.read_text()).items() if name != "stacked"}
    info.write_text(json.dumps({**told_before, "format": 1}))  # as older checkpoints are
    assert weights.read_weights(info.parent).keys() == model.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in weights.read_weights(info.parent).items())
    count = sum(p.numel() for p in model.parameters())
    assert told == f"{folder}/checkpoints/00000006-validated: wrote {count:,} weights after 6 iterations to {out}"
    # The new run begins where the other one ended: its validation, with a learning rate of 0, is that one's.
    again = run_here(tiny_flags(tiny, "--init_from", str(out), "--lr", "0", "--num_iters", "1", "--run_num", "b"))
    assert records(again, "epoch")[0]["valid_loss"] == pytest.approx(records(folder, "epoch")[-1]["valid_loss"], 1e-6)


def test_the_best_weights(soon_best, tiny, capsys):
    folder = soon_best
    assert checkpoint_main(["export", str(folder), str(tiny / "w.pt"), "--best"]) == 0
    assert "00000002-validated: wrote" in capsys.readouterr().out
    (folder / "checkpoints/00000004-validated/__0_0.distcp").unlink()
    assert checkpoint_main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names(folder) and lines[0].endswith("; finished")
    assert "damaged: " in lines[1] and "the best, with a validation loss of " in lines[2]
    assert checkpoint_main(["inspect", str(folder / "checkpoints/00000002-validated")]) == 0
    assert "model.blocks.0.attn.qkv.weight " in (out := capsys.readouterr().out) and "[3, 32, 32]" in out
    assert checkpoint_main(["export", str(tiny), str(tiny / "w.pt")]) == 2
    assert "has no complete checkpoint: give the folder" in capsys.readouterr().err
    assert checkpoint_main(["export", str(folder), str(tiny / "no/w.pt")]) == 2
    assert "give another file" in capsys.readouterr().err


def test_a_checkpoint_is_not_the_best_of_its_run_because_one_asks(soon_best, tiny, capsys):
    one = soon_best / "checkpoints/00000004-validated"
    for out in ("w.pt", "folder"):
        assert checkpoint_main(["export", str(one), str(tiny / out), "--best"]) == 2
        assert "is one thing: leave --best out" in capsys.readouterr().err and not (tiny / out).exists()


def test_a_run_that_is_called_like_a_checkpoint(tiny, capsys):
    """Such as a date, or the number of a job."""
    folder = run_here(tiny_flags(tiny, *FLAGS, "--run_num", "20260115"))
    for command in (["inspect", folder], ["export", folder, tiny / "w.pt", "--best"], ["export", folder, tiny / "out"]):
        assert checkpoint_main([*map(str, command)]) == 0, capsys.readouterr().err
    with pytest.raises(ValueError, match="run_num is 'checkpoints': it names"):  # that of a run's checkpoints
        run_here(tiny_flags(tiny, *FLAGS, "--run_num", "checkpoints"))


def test_one_checkpoint_of_a_run_is_the_best(tiny, capsys):
    """Each of these was when it was written."""
    folder = run_here(tiny_flags(tiny, *FLAGS))
    found = checkpoint.find(folder / "checkpoints")
    assert [read_info(path)["best"]["name"] for path in found] == [path.name for path in found]
    assert checkpoint_main(["inspect", str(folder)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert "; the best, with a validation loss of " in first and others and "best" not in "".join(others)
    assert checkpoint_main(["inspect", str(found[-1])]) == 0
    assert "; the best so far, with a validation loss of " in capsys.readouterr().out


def test_inspecting_what_is_damaged_or_not_there(tiny, capsys):
    folder = run_here(tiny_flags(tiny, *FLAGS)) / "checkpoints"
    (folder / "00000004-validated/__0_0.distcp").unlink()
    capsys.readouterr()
    for name in ("00000004-validated", "00000005"):
        assert checkpoint_main(["inspect", str(folder / name)]) == 2
        told = capsys.readouterr()
        assert not told.out and re.fullmatch(rf"error: .*{name}.*: .*No such file.*\n", told.err), told


@pytest.mark.parametrize("content", ["nothing", "text", "pickle", "another model"])
def test_other_files_are_no_weights(tiny, content):
    path = tiny / "w.pt"
    if content == "text":
        path.write_text("weights")
    elif content == "pickle":
        torch.save({"model": Path("x")}, path)  # an object: never loaded
    elif content == "another model":
        torch.save({"pos_embed": torch.zeros(1)}, path)
    found = {"nothing": "No such file", "another model": r"pos_embed in .* is \(1,\), and in this model \(1, 32, 32\)"}
    with pytest.raises(ValueError, match=found.get(content, "holds no weights .*utils.checkpoint export")):
        run_here(tiny_flags(tiny, "--init_from", str(path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and its memory can be pinned")
def test_a_copy_does_without_pinned_memory_where_there_is_none():
    assert host_memory(torch.ones(3), pin=True).shape == (3,)
