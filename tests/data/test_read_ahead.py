"""Reading ahead: the same batches in the same order, whatever reads them; and what happens when reading fails."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_data_loader import read, weather
from tests.helpers import (
    ROOT,
    clean_environment,
    is_running,
    records,
    run_here,
    run_ranks,
    tiny_flags,
    wait_until,
    write_data,
)
from utils.data.frames import FrameReader
from utils.data.read_ahead import Read, ReadAhead
from utils.data.read_worker import ReaderProcess
from utils.errors import ReadError


@pytest.fixture
def processes(monkeypatch):
    """The reader processes that are started."""
    started = []

    class Kept(ReaderProcess):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self.process)

    monkeypatch.setattr("utils.data.batches.ReaderProcess", Kept)
    return started


LAYOUTS = {"threads": {}, "processes": {"compression": "gzip"}}


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path):
    """A data set whose files threads can read, and one that needs processes."""
    return write_data(tmp_path, **LAYOUTS[request.param])


@pytest.mark.parametrize("flags", [["1"], ["3"], ["2", "--read_depth", "7"], ["1", "--global_batch_size", "1"]])
def test_the_same_batches_in_the_same_order(folder, flags):
    more = flags[1:]
    plain, ahead = weather(folder, *more), weather(folder, "--num_data_workers", *flags)
    for loader, other in ((plain.train_loader, ahead.train_loader), (plain.valid_loader, ahead.valid_loader)):
        for epoch in (0, 1, 3):  # it goes on by itself from 0 to 1, and not from 1 to 3
            for a, b in zip(loader.epoch(epoch), other.epoch(epoch), strict=True):
                assert torch.equal(a.inp, b.inp) and torch.equal(a.target, b.target)
                assert torch.equal(a.counts, b.counts)
    (rest,) = read(ahead.train_loader, 1, len(ahead.train_loader) - 1)
    assert torch.equal(rest.inp, read(plain.train_loader, 1)[-1].inp)


def test_an_epoch_that_is_left_early_does_no_harm(folder):
    data, plain = weather(folder, "--num_data_workers", "2"), weather(folder)
    for _ in range(3):
        first = next(data.train_loader.epoch(0)).inp.clone()
        assert torch.equal(first, next(plain.train_loader.epoch(0)).inp)


def test_the_next_epoch_is_read_while_the_loop_does_something_else(tiny, monkeypatch):
    """16 frames a batch, two batches an epoch, three slots: the two free ones get the batches of the next epoch."""
    seen, original = [], FrameReader.read
    monkeypatch.setattr(FrameReader, "read", lambda self, *job: seen.append(job[:2]) or original(self, *job))
    data = weather(tiny, "--num_data_workers", "1")
    assert len(read(data.train_loader, 0)) == 2
    wait_until(lambda: len(seen) == 64)
    assert len(read(data.train_loader, 1)) == 2
    samples = np.concatenate([data.train_loader.order.epoch(epoch).ravel() for epoch in (0, 1)])
    expected = [(file, t + part) for file, t in data.train_pairs[samples] for part in (0, 1)]
    assert seen[:64] == expected  # nothing twice


def test_validation_goes_on_with_what_was_read_ahead(tiny):
    loader = weather(tiny, "--num_data_workers", "1").valid_loader
    read(loader)
    stream = loader.stream
    read(loader)
    assert loader.stream is stream


def test_no_batch_is_overwritten_while_it_is_in_use(tiny):
    data = weather(tiny, "--num_data_workers", "4", "--global_batch_size", "2")
    pairs = read(weather(tiny, "--global_batch_size", "2").train_loader)
    for batch, expected in zip(data.train_loader.epoch(), pairs, strict=True):
        time.sleep(0.01)
        assert torch.equal(batch.inp, expected.inp)


def test_as_many_reads_as_asked_are_under_way():
    """Eight readers, and batches of two frames: each read waits until eight are under way."""
    together = threading.Barrier(8, timeout=120)
    plan = lambda slot: [Read(slot, part, 0, 0, 0, None) for part in (0, 1)]  # noqa: E731
    with ReadAhead(6, [lambda job: together.wait()] * 8, plan) as ahead:
        for _ in range(12):
            ahead.release(ahead.take())
        together.abort()


def test_the_end_waits_for_a_read_that_is_under_way():
    """What it writes to may be taken away after the end."""
    under_way, after_the_end, late = threading.Event(), threading.Event(), []

    def slow(job):
        under_way.set()
        late.append(after_the_end.wait(0.5))

    with ReadAhead(1, [slow], lambda slot: [Read(slot, 0, 0, 0, 0, None)]):
        assert under_way.wait(120)
    after_the_end.set()
    assert late == [False]


def test_a_reader_can_be_the_one_to_end_it():
    """The garbage collector runs in any thread, also in one that reads: it must not wait for itself."""
    plan = lambda slot: [Read(slot, 0, 0, 0, 0, None)]  # noqa: E731
    made = queue.Queue()
    ahead = ReadAhead(2, [lambda job: made.get().__exit__()] * 2, plan)
    made.put(ahead)
    made.put(ahead)
    wait_until(lambda: not any(thread.is_alive() for thread in ahead.threads))
    assert ahead.error is None


def test_enough_slots_for_the_depth(tiny):
    for batch, depth, slots in (("8", "4", 3), ("1", "2", 3), ("1", "7", 6)):
        flags = ["--num_data_workers", "1", "--global_batch_size", batch, "--read_depth", depth]
        loader = weather(tiny, *flags).train_loader
        assert len(loader.reader.batches) == slots
        assert loader.depth == int(depth)


def test_a_loader_that_is_dropped_leaves_nothing_running(folder, processes):
    threads = set(threading.enumerate())
    data = weather(folder, "--num_data_workers", "2")
    next(data.train_loader.epoch())
    assert len(set(threading.enumerate()) - threads) == 2 and all(process.poll() is None for process in processes)
    del data
    assert set(threading.enumerate()) <= threads and all(process.poll() is not None for process in processes)


def test_a_file_that_vanishes_in_mid_epoch(folder):
    data = weather(folder, "--num_data_workers", "2", "--global_batch_size", "2")
    batches = data.train_loader.epoch()
    next(batches)
    for path in (folder / "train").glob("*.h5"):
        os.truncate(path, 2500)
    with pytest.raises(ReadError, match="200[12].h5: frame .* cannot be read"):
        list(batches)


@pytest.mark.parametrize("which", ["SIGKILL", "SIGSEGV"])
def test_a_reader_process_that_dies(tmp_path, which, processes):
    data = weather(write_data(tmp_path, compression="gzip"), "--num_data_workers", "2", "--global_batch_size", "1")
    batches = data.train_loader.epoch()
    next(batches)
    victim = processes[1]
    os.kill(victim.pid, getattr(signal, which))
    with pytest.raises(ReadError, match=rf"reader process {victim.pid} was killed by {which}: out of memory"):
        list(batches)


def test_a_signal_before_a_reader_process_is_ready(tmp_path, monkeypatch):
    """It has not begun to ignore signals; those of a scheduler may come then, too."""
    original = ReaderProcess._start

    def signalled(child, fd):
        process = original(child, fd)
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            os.kill(process.pid, getattr(signal, name))
        return process

    monkeypatch.setattr(ReaderProcess, "_start", staticmethod(signalled))
    data = weather(write_data(tmp_path, compression="gzip"), "--num_data_workers", "2")
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert len(list(data.train_loader.epoch())) == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == held == set()


def test_reader_processes_end_with_their_parent_and_not_by_a_signal(tmp_path):
    """The signals of Ctrl-C and schedulers reach all processes of a job; SIGKILL reaches the parent alone."""
    write_data(tmp_path, compression="gzip")
    code = (
        "from tests.data.test_data_loader import weather; import pathlib, sys, time\n"
        "data = weather(pathlib.Path(sys.argv[1]), '--num_data_workers', '2'); next(data.train_loader.epoch())\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert parent.stdout.readline() == "ready\n"
    pids = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        for pid in pids:
            os.kill(pid, getattr(signal, name))
    time.sleep(0.3)
    assert len(pids) == 2 and all(is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.slow
def test_a_full_dev_shm_is_no_hindrance(tmp_path):
    """Containers often have 64 MB there. Nothing is kept in it."""
    write_data(tmp_path, compression="gzip")
    command = f"mount -t tmpfs -o size=4k none /dev/shm && exec {sys.executable} train.py " + " ".join(
        tiny_flags(tmp_path, "--num_data_workers", "2", "--num_iters", "2")
    )
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*alone, "mount -t tmpfs none /dev/shm"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small /dev/shm")
    done = subprocess.run(
        [*alone, command], cwd=ROOT, capture_output=True, text=True, env=clean_environment(), timeout=300
    )
    assert done.returncode == 0 and "DONE ---- rank 0" in done.stderr + done.stdout, done.stderr


def test_a_system_without_linux_calls_reads_the_same(folder, monkeypatch):
    expected = read(weather(folder, "--num_data_workers", "2").train_loader)
    for name in ("preadv", "memfd_create", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    data = weather(folder, "--num_data_workers", "2")
    assert not data.train_loader.is_direct
    for a, b in zip(read(data.train_loader), expected, strict=True):
        assert torch.equal(a.inp, b.inp) and torch.equal(a.target, b.target)


def test_buffers_that_do_not_fit_are_refused(tiny, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    with pytest.raises(OSError, match="1 batches of .* GB do not fit into memory.*lower --local_batch_size"):
        weather(tiny)


def test_more_than_the_memory_there_is_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("utils.data.ring.available", lambda: 1000)
    with pytest.raises(OSError, match="do not fit into memory .Cannot allocate memory"):
        weather(tiny)


def test_reader_processes_find_the_project_wherever_the_run_starts(tmp_path, monkeypatch):
    """A folder of the user's may have a package `utils` of its own, and data paths may be relative to it."""
    write_data(tmp_path / "data", compression="gzip")
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/__init__.py").write_text("raise RuntimeError('not this one')")
    expected = read(weather(tmp_path / "data").train_loader)
    monkeypatch.chdir(tmp_path)
    for a, b in zip(weather(Path("data"), "--num_data_workers", "1").train_loader.epoch(), expected, strict=True):
        assert torch.equal(a.inp, b.inp)


def test_after_an_error_an_epoch_can_be_read_again(folder):
    data = weather(folder, "--num_data_workers", "2")
    (folder / "train/2001.h5").rename(folder / "away")
    with pytest.raises(ReadError):
        list(data.train_loader.epoch())
    (folder / "away").rename(folder / "train/2001.h5")
    assert len(read(data.train_loader)) == 2


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_whose_file_breaks_ends_with_one_line(folder, workers):
    """The second epoch finds a file that is shorter than at the start."""
    code = (
        "import sys, os, glob, train; from utils.ranks.start import start; from utils.observers import Observer\n"
        "class Cut(Observer):\n    def after_epoch(self, *_):\n"
        f"        [os.truncate(path, 2500) for path in glob.glob({str(folder)!r} + '/train/*')]\n"
        "start(lambda *args: train.main(*args, [Cut()]), sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *tiny_flags(folder, "--num_data_workers", workers, "--num_iters", "40")],
        cwd=ROOT, capture_output=True, text=True, env=clean_environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"-c: error: rank 0: {folder}/train/200")
    assert "Traceback" not in done.stderr


def test_a_file_that_breaks_on_one_rank_ends_all(tiny):
    """The rank that meets it says so; the others end, too, and do not wait for it."""
    code = (
        "import os, sys, train; from utils.ranks.start import start; from utils.data.frames import FrameReader\n"
        "from utils.observers import Observer\n"
        "def gone(*_): raise OSError('gone')\n"
        "class Cut(Observer):\n    def after_epoch(self, *_):\n"
        "        if os.environ['RANK'] == '1': FrameReader._read_direct = gone\n"
        "sys.argv[0] = 'train.py'; start(lambda *args: train.main(*args, [Cut()]), sys.argv[1:])"
    )
    first, second = run_ranks(2, ["-c", code, *tiny_flags(tiny, "--num_data_workers", "1", "--num_iters", "40")])
    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert second.stderr.splitlines()[-1].startswith(f"train.py: error: rank 1: {tiny}/train/200")
    assert first.returncode != 0


def test_the_wait_for_data_is_recorded(tiny):
    argv = tiny_flags(tiny, "--num_data_workers", "1", "--num_iters", "4")
    waits = [line["data_wait_frac"] for line in records(run_here(argv), "epoch")]
    assert len(waits) == 2 and all(0 <= wait < 1 for wait in waits)
    assert np.isfinite(waits).all()


def test_the_folder_that_one_stands_in_runs_nothing(tmp_path, monkeypatch):
    """Where it has a file named as a module of Python is."""
    folder = write_data(tmp_path / "data", compression="gzip")
    for name in ("signal", "h5py", "utils"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert read(weather(folder, "--num_data_workers", "1").train_loader)
    assert not (tmp_path / "ran").exists()
