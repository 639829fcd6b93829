"""Copying the data to the node: complete, once, by several ranks, and with a clear word where it cannot be."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import h5py
import pytest

from tests.data.test_data_loader import weather
from tests.helpers import ROOT, losses, run_folder, run_here, run_ranks, tiny_flags, wait_until
from utils.data import staging


def test_a_run_from_copies(tiny, tmp_path, capsys):
    plain = run_here(tiny_flags(tiny))
    staged = run_here(tiny_flags(tiny, "--stage_dir", str(tmp_path / "node"), "--run_num", "staged"))
    assert losses(staged) == losses(plain)
    assert "Staging: 0.00 of 0.00 GB in" in capsys.readouterr().err
    for kind, year in (("train", 2001), ("train", 2002), ("valid", 2003)):
        copy = (tmp_path / "node").joinpath(*(tiny / kind / f"{year}.h5").parts[1:])
        assert copy.read_bytes() == (tiny / kind / f"{year}.h5").read_bytes()


def test_the_progress_is_printed(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(staging, "REPORT_EVERY", 0)
    monkeypatch.setattr(staging, "PIECE", 5 * 4096)
    with (tiny / "train/2001.h5").open("ab") as file:
        file.truncate(20_000_000)  # HDF5 does not mind what follows its own bytes
    weather(tiny, "--stage_dir", str(tmp_path / "node"))
    lines = [line.split() for line in capsys.readouterr().err.splitlines() if " of 0.02 GB in " in line]
    copied = [words[1] for words in lines]
    assert copied == sorted(copied) and {"0.00", "0.01", "0.02"} == set(copied)


def test_only_the_files_in_use_are_copied_and_only_once(tiny, tmp_path, monkeypatch):
    copied, original = [], staging._copy
    monkeypatch.setattr(staging, "_copy", lambda a, *more: copied.append(a.name) or original(a, *more))
    flags = ["--stage_dir", str(tmp_path / "node"), "--limit_nsamples", "13"]
    data = weather(tiny, *flags)
    assert copied == ["2001.h5", "2003.h5"]
    assert data.train_files.paths[0].startswith(str(tmp_path / "node"))
    assert data.train_files.paths[1] == str(tiny / "train/2002.h5")
    weather(tiny, *flags)
    assert len(copied) == 2
    os.utime(tiny / "train/2001.h5", (1, 1))  # another date than that of the copy
    weather(tiny, *flags)
    assert copied[2:] == ["2001.h5"]


def test_four_ranks_share_the_copying(tiny, tmp_path):
    flags = tiny_flags(tiny, "--stage_dir", str(tmp_path / "node"), "--num_iters", "2")
    for done in run_ranks(4, [str(ROOT / "train.py"), *flags]):
        assert done.returncode == 0, done.stderr
    left = {path.name for path in (tmp_path / "node").rglob("*.*") if path.is_file()}
    assert left == {f"{year}.h5{more}" for year in (2001, 2002, 2003) for more in ("", ".lock", ".checksum")}
    assert losses(run_folder(flags, "4GPU")) == pytest.approx(
        losses(run_here(tiny_flags(tiny, "--num_iters", "2"))), 2e-6
    )


def test_a_file_that_another_process_copies_is_waited_for(tiny, tmp_path, monkeypatch):
    copied, original = [], staging._copy
    monkeypatch.setattr(staging, "_copy", lambda a, *more: copied.append(a.name) or original(a, *more))
    second = (tmp_path / "node").joinpath(*(tiny / "train/2002.h5").parts[1:])
    second.parent.mkdir(parents=True)
    hold = "import sys, pathlib; from utils.files import lock; held = lock(pathlib.Path(sys.argv[1])); print(); input()"
    command, pipe = [sys.executable, "-uc", hold, f"{second}.lock"], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        other.stdout.readline()
        here = threading.Thread(target=weather, args=(tiny, "--stage_dir", str(tmp_path / "node")))
        here.start()
        wait_until(lambda: copied)
        time.sleep(0.3)
        assert copied == ["2001.h5"]
        other.communicate("\n")
    here.join()
    assert copied == ["2001.h5", "2002.h5", "2003.h5"]


def test_a_copy_that_fails_leaves_nothing_and_is_repeated(tiny, tmp_path, monkeypatch):
    flags = ["--stage_dir", str(tmp_path / "node")]

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copystat", full)
        with pytest.raises(ValueError, match="cannot copy the data to stage_dir .*No space left on device"):
            weather(tiny, *flags)
    assert not [path for path in (tmp_path / "node").rglob("*.h5*") if path.suffix not in (".lock", ".checksum")]
    data = weather(tiny, *flags)
    with h5py.File(data.train_files.paths[1]) as file:
        assert len(file["fields"]) == 9


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_original_that_is_replaced_after_its_head_was_read(tiny, tmp_path, monkeypatch, when):
    """Its values may begin elsewhere; and half of each is no file at all."""
    original = tiny / "train/2001.h5"
    size = original.stat().st_size

    def replace(*_: object) -> None:
        (tiny / "new").write_bytes(bytes(size))
        (tiny / "new").rename(original)

    hook = {"before": (staging._Progress, "check_space"), "while": (staging, "checksum")}[when]
    called = getattr(*hook)
    monkeypatch.setattr(*hook, lambda *args: replace() or called(*args))
    with pytest.raises(ValueError, match=r"2001\.h5 is another file than at the start"):
        weather(tiny, "--stage_dir", str(tmp_path / "node"))
    copies = list((tmp_path / "node").rglob("2001.h5"))
    assert not copies or copies[0].read_bytes() == bytes(size)


def test_a_bit_that_flips_while_a_file_is_copied(tiny, tmp_path, monkeypatch):
    original = staging.checksum

    def flipped(path: Path) -> int:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
        return original(path)

    monkeypatch.setattr(staging, "checksum", flipped)
    with pytest.raises(ValueError, match=r"200\d\.h5: it reads otherwise than it was written\): give another folder"):
        weather(tiny, "--stage_dir", str(tmp_path / "node"))
    assert not list((tmp_path / "node").rglob("*.h5"))


def test_a_flipped_bit_in_a_copy_is_found_by_the_next_job(tiny, tmp_path, monkeypatch, capsys):
    """And the file copied again; those that are whole are read once, by one rank."""
    flags, read, original = ["--stage_dir", str(tmp_path / "node")], [], staging.checksum
    monkeypatch.setattr(staging, "checksum", lambda path: read.append(path.name) or original(path))
    path = weather(tiny, *flags).train_files.paths[0]
    assert read == ["2001.h5.part", "2002.h5.part", "2003.h5.part"]
    read.clear()
    before, status = (tiny / "train/2001.h5").read_bytes(), os.stat(path)
    damaged = bytearray(before)
    damaged[len(before) // 2] ^= 4
    with open(path, "r+b") as file:
        file.write(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    weather(tiny, *flags)  # another rank of the same job
    assert not read
    monkeypatch.setattr(staging, "STARTED", time.time())
    weather(tiny, *flags)
    assert read == ["2001.h5", "2001.h5.part", "2002.h5", "2003.h5"]
    assert f"Staging: {path} has changed since it was copied: copied again" in capsys.readouterr().err
    with open(path, "rb") as file:
        assert file.read() == before
    weather(tiny, *flags)
    assert len(read) == 4


def test_too_little_room(tiny, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10))
    with pytest.raises(ValueError, match="has 0.0 GB free, and the data need 0.0 GB.*--limit_nsamples"):
        weather(tiny, "--stage_dir", str(tmp_path / "node"))


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot copy the data to stage_dir .*/file/below.*Not a directory"):
        weather(tiny, "--stage_dir", str(tmp_path / "file/below"))
