"""What must not end in silence: numbers that are not finite, ranks that hang, die, or wait."""

import contextlib
import math
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from tests.helpers import ROOT, clean_environment, losses, norms, records, run_folder, run_here, run_ranks, tiny_flags
from tests.proofs.injections import At, Send
from tests.proofs.interruptions import FLAGS, Grid, Ranks, in_dtype, undisturbed
from utils.checkpoint import store as checkpoint
from utils.config.reader import load_config
from utils.run import nonfinite
from utils.run.nonfinite import NonfiniteGuard
from utils.run.run import Run


def spoil(folder, sample: int) -> None:
    """Put a NaN into a frame of the training data."""
    with h5py.File(folder / "train/2001.h5", "r+") as file:
        file["fields"][sample, 1, 3, 5] = math.nan


SKIP = ("--num_iters=10", "--global_batch_size=4", "--on_nonfinite=skip", "--checkpoint_every=None")


def test_a_step_that_is_not_finite_is_skipped(tiny):
    """Two batches hold the broken frame, as input and as target: they change nothing, and are named."""
    clean = run_here(tiny_flags(tiny, *SKIP, "--run_num", "clean"))
    spoil(tiny, 9)
    folder = run_here(tiny_flags(tiny, *SKIP))
    bad = [i for i, loss in enumerate(losses(folder), 1) if loss is None]
    assert len(bad) == 4 and [i for i, norm in enumerate(norms(folder), 1) if norm is None] == bad  # in two epochs
    until = bad[0] - 1
    assert losses(folder)[:until] == losses(clean)[:until] and losses(folder)[until + 1] != losses(clean)[until + 1]
    log = (folder / "out.log").read_text()
    assert log.count("Step skipped: iteration ") == 4 and f"Step skipped: iteration {bad[0]} has loss nan and " in log
    assert log.count("2001.h5") >= 4 and "ch1" in log
    told = [e["train_loss"] for e in records(folder, "epoch")]
    assert told[0] == pytest.approx(np.mean([x for x in losses(folder)[:5] if x is not None]))


def test_a_skipped_step_leaves_weights_and_moments(tiny, monkeypatch):
    """With and without the steps that are skipped: the same weights."""
    import train

    kept = []
    original = train.update_weights

    def update(optimizer, scaler, config, lr, **options):
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        before += [x.clone() for p in optimizer.state.values() for x in p.values()]
        norm = original(optimizer, scaler, config, lr, **options)
        after = list(optimizer.param_groups[0]["params"]) + [x for p in optimizer.state.values() for x in p.values()]
        kept.append((bool(norm.isfinite()), all(torch.equal(a, b) for a, b in zip(before, after)), scaler.get_scale()))
        return norm

    spoil(tiny, 9)
    monkeypatch.setattr(train, "update_weights", update)
    for more in ([], ["--enable_fused"], ["--amp_mode=bf16"]):
        kept.clear()
        run_here(tiny_flags(tiny, *SKIP, *more))
        assert [same for _, same, _ in kept] == [not finite for finite, _, _ in kept]
        assert [finite for finite, _, _ in kept].count(False) == 4 and {scale for *_, scale in kept} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(2), Grid(1, 2, 2)])
def test_all_ranks_skip_the_same_steps(tiny, grid):
    spoil(tiny, 9)
    logs = []
    for where, name in ((Grid(1), "one"), (grid, "many")):
        argv, log = tiny_flags(tiny, *SKIP, "--run_num", name), tiny / f"{name}.log"
        assert Ranks(where, argv, log, (in_dtype(torch.float64),)).wait() == [0] * where.ranks, log.read_text()
        logs.append(run_folder(argv, where.folder))
    one, many = ([x if x is not None else -1 for x in losses(folder)] for folder in logs)
    assert one.count(-1) == 4
    np.testing.assert_allclose(many, one, rtol=1e-12)


def test_skipping_ends_where_nothing_else_happens(tiny):
    for sample in range(14):
        spoil(tiny, sample)
    flags = ["--num_iters=50", "--on_nonfinite=skip", "--limit_nsamples=12", "--global_batch_size=1"]
    with pytest.raises(ValueError, match=r"31 steps in a row were skipped, and .* 31 .*2001.h5.* mend or remove"):
        run_here(tiny_flags(tiny, *flags))


def test_skips_add_up_only_in_a_row(monkeypatch):
    class Loader(list):
        def find_nonfinite(self, epoch, step):
            return None

    monkeypatch.setattr(nonfinite, "first_message", lambda message: message)
    config, lines = load_config(["--config=demo", "--on_nonfinite=skip"])[0], []
    guard = NonfiniteGuard(config, SimpleNamespace(train_loader=Loader("a")), lambda *line: lines.append(line))
    for i in range(1, 100):
        guard.step_is_known({"iteration": i, "loss": 1.0, "grad_norm": math.nan if i % 31 else 1.0})
    assert len(lines) == 96
    with pytest.raises(ValueError, match="31 steps in a row were skipped, and iteration .* diverged"):
        for i in range(100, 200):
            guard.step_is_known({"iteration": i, "loss": 1.0, "grad_norm": math.nan})


def hang(_) -> None:
    time.sleep(1000)


@pytest.mark.slow
def test_a_rank_that_waits_too_long_says_where(tiny):
    argv, log = tiny_flags(tiny, *FLAGS, "--comm_timeout=8s"), tiny / "log"
    codes = Ranks(Grid(2), argv, log, (At(hang, rank=1),)).wait()
    told = log.read_text()
    assert codes == [1, 1], told
    assert (
        "train.py: error: rank 0: a collective failed, perhaps because another rank is gone (Timed out waiting 8000ms"
        in told
    ), told
    assert "rank 1: rank 0 is gone, and this one ends too; it was at tests/run/test_guards.py:" in told
    assert "time.sleep(1000)" in told and "Traceback" not in told


@pytest.mark.slow
def test_a_group_is_waited_for_as_long_as_a_collective():
    """NCCL's ranks exchange an address through the store of all ranks before their first collective."""
    code = (
        "import datetime, types, torch.distributed as dist; from utils.ranks.start import start\n"
        "wait = lambda world, argv: dist.distributed_c10d._get_default_store().get('an address that nobody gives')\n"
        "start(wait, [], lambda argv: [types.SimpleNamespace(longest_wait=datetime.timedelta(seconds=8))])"
    )
    results = run_ranks(2, ["-c", code], timeout=120)
    told = "".join(done.stderr for done in results)
    assert [done.returncode for done in results] == [1, 1] and "8000ms" in told, told


@pytest.mark.parametrize("grid", [Grid(2), Grid(1, 2, 2)])
def test_a_rank_that_dies_ends_the_others_at_once(tiny, grid):
    argv, log = tiny_flags(tiny, *FLAGS), tiny / "log"
    codes = Ranks(grid, argv, log, (At(Send(signal.SIGKILL), rank=1),)).wait()
    assert codes[1] == -9 and set(codes) <= {1, -9}
    assert "Traceback" not in log.read_text()


def test_a_rank_that_dies_where_the_others_leave_is_told_in_one_line():
    code = (
        "import os, time, torch.distributed as dist; from utils.ranks import watchdog, start\n"
        "watchdog.end_now = lambda *_: None  # which may be faster\n"
        "def main(world, argv):\n"
        "    dist.barrier()  # a rank that was never connected is waited for\n"
        "    if world.rank == 0: time.sleep(1), os.kill(os.getpid(), 9)\n"
        "start.start(main, [])"
    )
    dead, other = run_ranks(2, ["-c", code], timeout=120)
    assert (dead.returncode, other.returncode) == (-9, 1)
    assert " is gone" in other.stderr and "Traceback" not in other.stderr, other.stderr


@pytest.mark.parametrize(
    "error, code, stderr",
    [("Refused", 2, "2>/dev/full"), ("ReadError", 2, "2>/dev/full"), ("WriteError", 74, "2> >(true)")],
)
def test_a_process_ends_where_nobody_can_read_its_last_words(error, code, stderr):
    program = (
        "import time; from utils import errors; from utils.ranks.start import start\n"
        "def main(world, argv):\n"
        "    time.sleep(0.5)  # who read is gone\n"
        f"    raise errors.{error}('of a test')\n"
        "start(main, [])"
    )
    command = ["bash", "-c", f'exec "$@" {stderr}', "bash", sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=60).returncode == code


def test_last_words_go_into_no_file_that_has_the_number_of_stderr(tmp_path):
    program = (
        "import os, sys; file = open(sys.argv[1], 'w'); assert file.fileno() == 2\n"
        "from utils import errors; from utils.ranks.start import start\n"
        "def main(world, argv): raise errors.ReadError('of a test')\n"
        "start(main, [])"
    )
    command = ["bash", "-c", 'exec "$@" 2>&-', "bash", sys.executable, "-c", program, tmp_path / "file"]
    assert subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=60).returncode == 2
    assert (tmp_path / "file").read_text() == ""


def test_a_run_without_stderr_trains(tiny):
    argv = ["bash", "-c", 'exec "$@" 2>&-', "bash", sys.executable, "train.py", *tiny_flags(tiny, "--num_iters=2")]
    assert subprocess.run(argv, cwd=ROOT, timeout=120, env=clean_environment()).returncode == 0


def fail(_) -> None:
    raise ZeroDivisionError("of nobody's making")


def test_an_error_of_one_rank_is_told_and_ends_the_others(tiny):
    argv, log = tiny_flags(tiny, *FLAGS), tiny / "log"
    assert Ranks(Grid(2), argv, log, (At(fail, rank=1),)).wait() == [1, 1]
    told = log.read_text()
    assert (
        "ZeroDivisionError: of nobody's making" in told and "train.py: error: rank 1: ZeroDivisionError (tests/" in told
    )


def test_ctrl_c_twice_ends_at_once(tiny):
    argv, log = tiny_flags(tiny, *FLAGS), tiny / "log"
    twice = (At(Send(signal.SIGINT)), At(Send(signal.SIGINT)))
    assert Ranks(Grid(1), argv, log, twice).wait() != [75]
    folder = run_folder(argv)
    assert "KeyboardInterrupt" in log.read_text()
    assert checkpoint.find(folder / "checkpoints")[0].name == "00000005-validated"


def test_the_log_of_a_run_tells_what_ended_it(tiny):
    spoil(tiny, 9)
    with pytest.raises(ValueError):
        run_here(tiny_flags(tiny, "--num_iters=10"))
    last = (run_folder(tiny_flags(tiny)) / "out.log").read_text().splitlines()[-1]
    assert " ERROR Refused: iteration " in last and "2001.h5" in last


@pytest.mark.slow
def test_a_full_disk_ends_nothing(tiny):
    """Neither checkpoints nor records can be written for the rest of a run. With room again, it goes on."""
    disk = tiny / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs a disk of its own: {mounted.stderr.strip()}")
    try:
        argv, log = [*tiny_flags(tiny, *FLAGS), "--expdir", str(disk)], tiny / "log"
        assert Ranks(Grid(2), argv, log, (At(fill),)).wait() == [74, 74], log.read_text()
        told = log.read_text()
        assert "was not written (" in told and "No space left on device" in told and "Traceback" not in told
        assert "The last checkpoint was not written: make room" in told
        folder = run_folder(argv, "2GPU")
        (folder / "filling").unlink()
        assert Ranks(Grid(2), [*argv, "--resume", "auto"], log).wait() == [0, 0], log.read_text()
        whole = undisturbed(Grid(2), tiny, "whole")
        assert [line["iteration"] for line in records(folder, "resume")] == [5]
        assert losses(folder) == losses(whole) and len(losses(folder)) == 14
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(this: Run) -> None:
    """Fill the disk of a run to the last byte."""
    if this.logger:
        with (this.folder / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1000))
