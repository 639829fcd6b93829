"""Which run is found again: none is lost from sight, taken by another job, or begun anew beside itself."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import train
import train_mp
from tests.helpers import ROOT, clean_environment, losses, records, run_here, run_ranks, tiny_flags
from utils import files
from utils.checkpoint import info, storage
from utils.checkpoint import store as checkpoint
from utils.checkpoint.__main__ import inspect
from utils.checkpoint.weights import choose
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.errors import ReadError, Refused
from utils.observers import Observer
from utils.run import folder as folders
from utils.run.folder import RunFolder, make_run_folder, open_run_folder
from utils.run.run import Run

FLAGS = ("--num_iters=6", "--checkpoint_every=1", "--keep_checkpoints=9")


def found_by(argv: list[str], name: str = "1GPU") -> RunFolder:
    """Return the folder that a process opens which never comes to train."""
    found, lock = open_run_folder(load_config(argv)[0], name)
    lock.close()
    return found


def as_job(monkeypatch, number: int, life: int = 0) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", str(number))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(life))


@pytest.mark.parametrize("when", ["before the lock", "with the lock"])
def test_a_folder_that_another_one_renames_while_it_is_locked(tmp_path, monkeypatch, when):
    """Two processes of one name that start together never work in one folder."""
    config, take = Config(config="x", expdir=str(tmp_path), resume="none"), folders.lock

    def late(path: Path, *args: bool):
        monkeypatch.setattr(folders, "lock", take)
        held = take(path, *args) if when == "with the lock" else None
        code = "import sys; from utils.config.settings import Config; from utils.run.folder import make_run_folder\n"
        code += "make_run_folder(Config(config='x', expdir=sys.argv[1]), '1GPU')"
        command = [sys.executable, "-c", code, tmp_path]
        other = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
        assert other.returncode == (when == "with the lock"), other.stderr
        if held is None:
            held = (path.parent.with_name("00.1") / "lock").open("a+")  # it was opened before
        return held

    monkeypatch.setattr(folders, "lock", late)
    if when == "with the lock":  # the other one is refused
        found, lock = open_run_folder(config, "1GPU")
        assert os.path.samestat(os.fstat(lock.fileno()), (found.path / "lock").stat())
        lock.close()
    else:
        with pytest.raises(ValueError, match="1GPU/00 changed while it was opened: start again"):
            open_run_folder(config, "1GPU")


def test_an_old_run_is_held_until_it_has_its_new_name(tmp_path, monkeypatch):
    config = Config(config="x", expdir=str(tmp_path))
    path = make_run_folder(config, "1GPU").path
    code = "import sys, pathlib; from utils.run.folder import lock_run; lock_run(pathlib.Path(sys.argv[1]))"
    rename, told = folders.rename_aside, []

    def renamed(old: Path) -> Path:
        command = [sys.executable, "-c", code, old]
        told.append(subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True).stderr)
        return rename(old)

    monkeypatch.setattr(folders, "rename_aside", renamed)
    make_run_folder(config, "1GPU")
    assert f"{path} is in use by" in told[0]


def test_whoever_looked_at_a_run_does_not_take_it_from_its_job(tiny, monkeypatch):
    argv = tiny_flags(tiny, *FLAGS)
    as_job(monkeypatch, 7)
    path = run_here(argv)
    as_job(monkeypatch, 9)
    found_by([*argv, "--resume=auto"])
    monkeypatch.delenv("SLURM_JOB_ID")
    found_by([*argv, "--resume=auto"])
    as_job(monkeypatch, 9, life=1)  # it did not train
    assert not found_by([*argv, "--resume=none"]).checkpoints
    as_job(monkeypatch, 7, life=1)
    found = found_by([*argv, "--resume=none"])
    assert found.path == path.with_name("00.1") and found.newest["iteration"] == 6


def test_a_job_that_went_back_goes_back_again(tiny, monkeypatch):
    """Its earlier life ended before it had set aside what it went back behind."""
    argv = tiny_flags(tiny, *FLAGS)
    older = run_here(argv) / "checkpoints/00000001"
    as_job(monkeypatch, 7)
    assert found_by([*argv, f"--resume={older}"]).newest["iteration"] == 1
    as_job(monkeypatch, 7, life=1)
    assert found_by([*argv, f"--resume={older}"]).newest["iteration"] == 1


def test_a_job_of_several_grids_goes_on_with_each(tiny, monkeypatch):
    argv = tiny_flags(tiny, *FLAGS)
    as_job(monkeypatch, 7)
    one = run_here(argv)
    two = one.parent.with_name("2GPU") / "00"
    shutil.copytree(one, two)
    os.utime(two / "checkpoints/00000006-validated")
    as_job(monkeypatch, 7, life=1)
    assert found_by(argv, "1GPU").path == one and found_by(argv, "2GPU").path == two
    assert found_by(argv, "4GPU").path in (one, two)


def test_a_job_finds_what_was_renamed_twice_or_under_a_name_it_was_given(tiny, monkeypatch):
    argv = tiny_flags(tiny, *FLAGS)
    as_job(monkeypatch, 7)
    path = run_here(argv)
    path.rename(path.with_name("00.1.1"))
    as_job(monkeypatch, 7, life=1)
    assert found_by(argv).path == path.with_name("00.1.1")
    path.with_name("00.1.1").rename(path.with_name("b.1"))
    assert found_by([*argv, f"--resume={path.with_name('b')}"]).path == path.with_name("b.1")


def test_the_newest_run_is_the_one_written_last(tiny):
    """Not the one whose files were touched last, nor one without a complete checkpoint, nor somebody's copy."""
    argv = tiny_flags(tiny, *FLAGS, "--resume=auto")
    path = run_here(argv)
    grids = path.parent.parent
    older, copy = (shutil.copytree(path, grids / name / "00") for name in ("2GPU", "copy"))
    shutil.rmtree(path / "checkpoints/00000005")
    for one in checkpoint.find(older / "checkpoints")[:3]:
        shutil.rmtree(one)
    for one in (*checkpoint.find(older / "checkpoints"), *checkpoint.find(copy / "checkpoints")):
        os.utime(one)
    assert found_by(argv, "4GPU").path == path
    for one in checkpoint.find(path / "checkpoints"):
        (one / "info.json").unlink()
        os.utime(one, (2**32, 2**32))
    assert found_by(argv, "4GPU").path == older


@pytest.mark.parametrize("link", ["checkpoints", "1GPU"])
def test_a_link_to_what_is_not_there_now(tiny, link, monkeypatch):
    argv = tiny_flags(tiny, *FLAGS, "--resume=auto")
    path = run_here(argv)
    place = path / link if link == "checkpoints" else path.parent
    kept = place.rename(tiny / "kept")
    place.symlink_to(tiny / "scratch")
    for name in ("1GPU", "2GPU"):
        with pytest.raises(ReadError, match=f"{link} is a link to what is not there: mend that, or wait for its stor"):
            found_by(argv, name)
    kept.rename(tiny / "scratch")
    if link == "checkpoints":
        with pytest.raises(ValueError, match=f"{place} is a link to .*, out of its folder: .* set LINKED_FILES=1"):
            found_by(argv)
        monkeypatch.setenv("LINKED_FILES", "1")
    assert found_by(argv).newest["iteration"] == 6


@dataclass
class After(Observer):
    """Calls something with the run after an iteration."""

    iteration: int
    do: object

    def begin(self, run: Run) -> None:
        self.run = run

    def after_step(self, iteration: int, left: int) -> None:
        if iteration == self.iteration:
            self.do(self.run)


def trained(argv: list[str], observer: Observer) -> None:
    train.start(lambda world, argv: train.main(world, argv, observers=[observer]), argv, train.load_config)


def rename_run(run: Run) -> None:
    """Give the folder of a run another name, while nothing is written."""
    from utils.run.saving import Saving

    (saving,) = (observer for observer in run.observers if isinstance(observer, Saving))
    saving.checkpointer.wait()
    run.folder.rename(run.folder.with_name("kept"))


def test_a_run_whose_folder_is_renamed_says_so(tiny):
    """No second folder appears, with checkpoints that belong to no run."""
    argv = tiny_flags(tiny, *FLAGS, "--run_num=a")
    (done,) = run_ranks(1, trained, argv, After(3, rename_run))
    assert done.returncode == 74 and "a/checkpoints/00000006-validated was not written (" in done.stderr, done.stderr
    place = tiny / "runs/tiny/1GPU"
    assert not (place / "a/checkpoints").exists()
    assert len(losses(place / "kept")) == 6
    assert checkpoint.find(place / "kept/checkpoints")[0].name[:8] in ("00000002", "00000003")


def unseen(argv: list[str]) -> None:
    """Be a rank whose folder the first one does not see."""
    import torch.distributed as dist

    original = storage.Writer.write_data

    def lost(self, *args):
        written = original(self, *args)
        if dist.get_rank():
            for place in written.wait():
                (Path(self.path) / place.storage_data.relative_path).unlink(missing_ok=True)
        return written

    storage.Writer.write_data = lost
    storage.time.sleep = lambda _: None
    train_mp.start(train_mp.main, argv, partial(train_mp.load_config, chapter=3))


def test_a_checkpoint_that_lacks_the_files_of_a_rank_is_none(tiny):
    argv = tiny_flags(tiny, "--num_iters=2", "--shard=weights")
    done = run_ranks(2, unseen, argv)
    told = done[0].stderr
    assert {one.returncode for one in done} == {74} and "Traceback" not in told
    assert "rank 0 does not see " in told and "__1_0.distcp, which another wrote: all need the same --expdir" in told
    assert checkpoint.find(tiny / "runs/tiny/1MP/00/checkpoints") == []


@pytest.mark.parametrize("read", ["read_data", "read_metadata"])
def test_an_error_of_the_storage_costs_no_checkpoint(tiny, monkeypatch, read):
    """It is read again, twice; then nobody knows whether it is whole, and the one before would take its place."""
    path = run_here(tiny_flags(tiny, *FLAGS))
    shutil.rmtree(path / "checkpoints/00000006-validated")
    original, pauses, left = getattr(storage.Reader, read), [], [None] * 3

    def failing(self, *args):
        if self.path.name == "00000005" and left:
            left.pop()
            raise OSError(errno.ESTALE, "Stale file handle")
        return original(self, *args)

    monkeypatch.setattr(storage.Reader, read, failing)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    before = sorted((path / "checkpoints").iterdir())
    with pytest.raises(Refused) as found:
        run_here(tiny_flags(tiny, *FLAGS, "--resume=auto"))
    older = path / "checkpoints/00000004-validated"
    line = f"Stale file handle: wait for its storage, and start again; or go on from the one before: --resume {older}"
    assert str(found.value).endswith(line) and sorted((path / "checkpoints").iterdir()) == before
    assert [pause for pause in pauses if pause in (0.5, 2)] == [0.5, 2] and not left
    left += [None, None]
    run_here(tiny_flags(tiny, *FLAGS, "--resume=auto"))
    assert Path(records(path, "resume")[0]["checkpoint"]).name == "00000005"


def test_a_checkpoint_whose_storage_fails_is_no_reason_to_begin_anew(tiny, monkeypatch):
    """Nor to take the one before, or another run; and an evaluation takes no other model."""
    path = run_here(tiny_flags(tiny, *FLAGS))
    original = info.read_json

    def failing(file):
        if file.parent.name == "00000006-validated":
            raise OSError(errno.EIO, "Input/output error", str(file))
        return original(file)

    monkeypatch.setattr(info, "read_json", failing)
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    told = "00000006-validated/info.json: Input/output error"
    with pytest.raises(Refused, match=f"{told}: mend that, or wait for its storage"):
        run_here(tiny_flags(tiny, *FLAGS, "--resume=auto"))
    with pytest.raises(info.Unreadable, match=told):
        choose(path, best=False)
    assert "00000006-validated  out of reach: " in inspect(path).splitlines()[0]
    (path / "checkpoints/00000006-validated/info.json").unlink()
    monkeypatch.setattr(info, "read_json", original)
    assert choose(path, best=False)[0].name == "00000005"  # that one is no checkpoint


def cut_off(argv: list[str]) -> None:
    """Be a rank; the second one is cut off from the storage of checkpoints."""
    import torch.distributed as dist

    original = storage.Reader.read_metadata

    def failing(self, *args):
        if dist.get_rank():
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return original(self, *args)

    storage.Reader.read_metadata = failing
    files.time.sleep = lambda _: None
    train.start(train.main, argv, train.load_config)


def test_a_rank_that_is_cut_off_from_the_checkpoints(tiny):
    argv = tiny_flags(tiny, *FLAGS)
    path = run_here(argv)
    shutil.rmtree(path / "checkpoints/00000006-validated")
    done = run_ranks(2, cut_off, [*argv, "--resume=auto"])
    assert [one.returncode for one in done] == [2, 2], done[0].stderr
    assert "rank 1: " in done[0].stderr and "is not connected: wait for its storage" in done[0].stderr
    assert (path / "checkpoints/00000005").exists()


def test_a_resume_without_room_leaves_the_configuration(tiny, monkeypatch):
    """That of the run so far stays whole."""
    argv = tiny_flags(tiny, *FLAGS)
    path = run_here(argv)
    shutil.rmtree(path / "checkpoints/00000006-validated")
    before = sorted(path.iterdir()), (path / "config.yaml").read_text()

    def half(self, text, *args, **options):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(ValueError, match=f"cannot write to {path} .No space left"):
        full.setattr(Path, "write_text", half)
        run_here([*argv, "--resume=auto"])
    assert (sorted(path.iterdir()), (path / "config.yaml").read_text()) == before


def test_records_that_were_lost_are_told(tiny, capsys):
    argv = tiny_flags(tiny, *FLAGS)
    path = run_here(argv)
    shutil.rmtree(path / "checkpoints/00000006-validated")
    (path / "metrics.jsonl").unlink()
    run_here([*argv, "--resume=auto"])
    assert f"{path}/metrics.jsonl is not there: what it told up to iteration 5 is lost" in capsys.readouterr().err


def full(run: Run) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), run.logger.records.fileno())


def test_records_that_a_full_disk_does_not_take_are_told(tiny, capsys):
    """Also where no checkpoint waits for them."""
    argv = tiny_flags(tiny, *FLAGS, "--checkpoint_every=None")
    path = run_here(argv, lambda world, argv: train.main(world, argv, observers=[After(2, full)]))
    assert f"{path}/metrics.jsonl: the disk did not take the last " in capsys.readouterr().err
