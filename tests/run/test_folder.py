"""The folder of a run: an old one of its name is renamed aside, said, and never from under who works in it."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT, clean_environment, run_folder, run_here, tiny_flags
from utils.checkpoint.__main__ import main
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.errors import Ended, ReadError
from utils.run.folder import lock_run, make_run_folder, open_run_folder


def test_an_old_run_is_renamed_aside(tmp_path):
    config = Config(config="x", expdir=str(tmp_path), run_num="b")
    first, *others = (make_run_folder(config, "4GPU") for _ in range(3))
    path = tmp_path / "x/4GPU/b"
    assert sorted(p.name for p in path.parent.iterdir()) == ["b", "b.1", "b.2"]
    assert first.remarks == [] and {run.path for run in (first, *others)} == {path}
    asides = [path.with_name(f"b.{n}") for n in (1, 2)]
    said = [f"Renamed the earlier run to {aside}" for aside in asides]  # they have no checkpoint
    assert [run.remarks for run in others] == [[one] for one in said]
    (path / "file").touch()
    with pytest.raises(ValueError, match="choose another --expdir"):
        make_run_folder(Config(config="file/x", expdir=str(path)), "1GPU")


def test_a_run_is_not_renamed_under_its_evaluation(tmp_path):
    """Nor under a forecast: both hold the lock of their own folder, in the run's."""
    config = Config(config="x", expdir=str(tmp_path))
    path = make_run_folder(config, "1GPU").path
    (path / "evaluation").mkdir()
    lock = lock_run(path / "evaluation")
    code = "import sys; from utils.config.settings import Config; from utils.run.folder import make_run_folder\n"
    code += "make_run_folder(Config(config='x', expdir=sys.argv[1]), '1GPU')"
    command = [sys.executable, "-c", code, tmp_path]
    for held in (True, False):  # the lock is one of processes
        done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
        assert (f"{path}/evaluation is in use by" in done.stderr and "choose another --run_num" in done.stderr) is held
        assert path.with_name("00.1").exists() is not held
        lock.close()


@pytest.mark.parametrize("name", ["1GPU", "2GPU"])
def test_checkpoints_that_a_storage_does_not_show_now(tiny, name, capsys):
    """A run that cannot be looked at is not begun anew, on its own grid or another one."""
    argv = tiny_flags(tiny, "--resume=auto")
    path = run_here(argv)
    (path / "checkpoints").rename(path / "kept")
    (path / "checkpoints").touch()  # for root all can be listed but what is no folder
    config, _ = load_config(argv)
    with pytest.raises(ReadError, match=rf"cannot list {path}/checkpoints \(Not a directory\): mend that, or wait"):
        open_run_folder(config, name)
    assert main(["inspect", str(path)]) == 2
    assert "\nerror: cannot list " in capsys.readouterr().err
    assert [one.name for one in path.parent.parent.glob("*/*")] == [path.name]
    (path / "checkpoints").unlink()
    (path / "kept").rename(path / "checkpoints")
    found, lock = open_run_folder(config, name)
    lock.close()
    assert found.path == path and found.newest


def test_the_log_says_what_was_renamed_and_what_cannot_be_resumed(tiny):
    argv = tiny_flags(tiny, "--num_iters", "500", "--time_limit", "1s")
    folder = run_folder(argv)
    with pytest.raises(Ended):
        run_here(argv)
    assert "Renamed" not in (folder / "out.log").read_text()
    argv = tiny_flags(tiny, "--num_iters", "1")
    for number, is_finished in ((1, False), (2, True)):
        run_here(argv)
        aside = folder.with_name(f"{folder.name}.{number}")
        said = f"Renamed the earlier run to {aside}" + ("" if is_finished else f"; to go on with it: --resume {aside}")
        assert f"{said}\n" in (folder / "out.log").read_text()
    run_here([*argv, "--resume", "auto", "--run_num", "new"])
    said = (folder.with_name("new") / "out.log").read_text()
    assert "Nothing to resume: no run 'new' of 'tiny' has a checkpoint" in said
