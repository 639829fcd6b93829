"""Every launcher's environment, and what a half-set one is told."""

import contextlib
import fcntl
import os
import pty
import resource
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ROOT, clean_environment, free_port, run_ranks, tiny_flags
from utils.device import pick_device
from utils.ranks.start import JOINING, join, share_cores, why_a_collective_failed
from utils.ranks.watchdog import Watch
from utils.ranks.world import World, _first_host, find_world

PLAIN = dict(RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="node7", MASTER_PORT="1234")
MPI = dict(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK="1")
BATCH = dict(SLURM_JOB_ID="77", SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_LOCALID="0", SLURM_JOB_NODELIST="nid[7-8]")
STEP = dict(
    SLURM_JOB_ID="70077",
    SLURM_PROCID="5",
    SLURM_LOCALID="1",
    SLURM_STEP_NUM_TASKS="8",
    SLURM_STEP_NODELIST="nid[001234-001240,001300]",
)


def test_alone():
    assert find_world({}) == World(rank=0, size=1, local_rank=0)
    assert find_world(BATCH) == World()  # a batch script's own shell is one process
    assert find_world({"MASTER_ADDR": "x", "MASTER_PORT": "1"}) == World()


def test_plain_variables_win():
    assert find_world({**PLAIN, **MPI, **STEP}) == World(3, 8, 1, "node7", 1234)


def test_open_mpi():
    world = find_world({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prte-x-1@1", **STEP})
    assert (world.rank, world.size, world.local_rank, world.address) == (1, 2, 1, "127.0.0.1")
    assert world.port == 10000 + 70077 % 20000
    assert find_world({**MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "99"}) == World(1, 2, 1, "n1", 99)


def test_slurm_step():
    assert find_world(STEP) == World(5, 8, 1, "nid001234", 10000 + 70077 % 20000)
    assert find_world({**STEP, "MASTER_ADDR": "a", "MASTER_PORT": "5"}) == World(5, 8, 1, "a", 5)
    assert find_world({**STEP, "MASTER_ADDR_SUFFIX": "i"}).address == "nid001234i"


def test_two_steps_of_a_job_have_two_ports():
    assert find_world({**STEP, "SLURM_STEP_ID": "0"}).port == 10000 + 70077 % 20000
    assert find_world({**STEP, "SLURM_STEP_ID": "3"}).port == 10000 + (70077 + 3 * 1009) % 20000


def test_variables_left_from_before_are_none_of_this_step():
    left = {**PLAIN, "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match="^WORLD_SIZE is 1, but srun started 8 tasks: .*unset RANK WORLD_SIZE"):
        find_world({**left, **STEP})
    assert find_world({**left, **STEP, "TORCHELASTIC_RUN_ID": "none"}).size == 1  # torchrun's, in one of the tasks
    assert find_world({**left, **STEP, "SLURM_STEP_NUM_TASKS": "1"}).size == 1


def test_gpus_that_slurm_gave_and_torch_does_not_see_are_missed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    assert pick_device("auto", 0) == torch.device("cpu")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    with pytest.raises(ValueError, match="^Slurm gave this job GPUs, but torch .* sees none: .*--device cpu"):
        pick_device("auto", 0)
    assert pick_device("cpu", 0) == torch.device("cpu")


def test_a_rank_without_a_gpu_shares_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="^rank 2 of this node has no GPU, for there are 2"):
        pick_device("auto", 2)


@pytest.mark.parametrize(
    "nodes, first", [("a", "a"), ("a1,a2", "a1"), ("n[03-05]", "n03"), ("n[7,9]-ib", "n7-ib"), ("x[1-2],y3", "x1")]
)
def test_first_host_of_a_node_list(nodes, first):
    assert _first_host(nodes) == first


@pytest.mark.parametrize(
    "env, missing",
    [({k: v for k, v in PLAIN.items() if k != name}, name) for name in PLAIN]
    + [({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR")]
    + [({k: v for k, v in MPI.items() if k != name}, name) for name in MPI]
    + [({k: v for k, v in STEP.items() if k != name}, name) for name in STEP if name != "SLURM_STEP_NUM_TASKS"],
)
def test_a_half_set_environment_names_the_missing_variable(env, missing):
    if missing == "OMPI_COMM_WORLD_LOCAL_RANK":
        env = {**env, "MASTER_ADDR": "x"}
    with pytest.raises(ValueError, match=f"^{missing} is not set"):
        find_world(env)


def test_wrong_values():
    with pytest.raises(ValueError, match="RANK is 'x': it takes a whole number"):
        find_world({**PLAIN, "RANK": "x"})
    with pytest.raises(ValueError, match="rank 8 is not below the number of ranks 8"):
        find_world({**PLAIN, "RANK": "8"})


def test_a_half_set_environment_ends_the_script_in_one_line():
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=ROOT,
        env=clean_environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "error: RANK is not set" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_finds_nobody_says_where(rank):
    code = "from utils.ranks import start; start.JOINING = start.timedelta(seconds=2); start.start(None, [])"
    place = dict(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean_environment(**place),
        capture_output=True,
        text=True,
        timeout=300,
    )
    last = done.stderr.splitlines()[-1]  # PyTorch may tell more, above
    assert done.returncode == 2 and f"error: rank {rank} of 2 could not join the others at 127.0.0.1, port" in last
    assert last.endswith("and a free port as MASTER_PORT; submit_pm.sh takes both from the job: submit it again")


@pytest.mark.slow
def test_ranks_wait_for_a_late_one_longer_than_for_a_collective():
    """Until all have joined `comm_timeout` does not count."""
    code = (
        "import datetime, os, time, types, torch, torch.distributed as dist; from utils.ranks.start import start\n"
        "time.sleep(9 * (os.environ['RANK'] == '2'))\n"
        "start(lambda world, argv: dist.barrier(), [], lambda argv: [types.SimpleNamespace("
        "longest_wait=datetime.timedelta(seconds=5))])"
    )
    assert [(done.returncode, done.stderr) for done in run_ranks(3, ["-c", code])] == [(0, "")] * 3


@pytest.mark.slow
def test_torchrun_trains_and_an_error_is_printed_once(tiny):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"]
    options = dict(cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    good = subprocess.run([*torchrun, *tiny_flags(tiny)], **options)
    assert good.returncode == 0, good.stderr
    assert (tiny / "runs/tiny/2GPU/00/metrics.jsonl").exists() and good.stderr.count("DONE ---- rank 0") == 1
    bad = subprocess.run([*torchrun, *tiny_flags(tiny, "--dt", "99")], **options)
    assert bad.returncode != 0 and bad.stderr.count("train.py: error:") == 1
    *_, last = (line for line in bad.stderr.splitlines() if "traceback : " in line)  # torchrun's own last words
    assert last.partition("traceback : ")[2] in bad.stderr.partition("train.py: error: ")[2].splitlines()[0]
    assert "gives 0 samples at dt 99" in last


def test_ranks_share_the_cores_of_their_node(monkeypatch):
    """Unless OMP_NUM_THREADS says otherwise; and no more than a container may take."""
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    for cores, quota, ranks, task in (
        (64, 64, 4, ""), (16, 64, 1, "64"), (64, 64, 100, ""), (64, 4, 2, ""), (64, 64, 2, "3")
    ):  # fmt: skip
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", task)
        monkeypatch.setattr("utils.ranks.start.cores_in_reach", lambda cores=cores: set(range(cores)))
        monkeypatch.setattr("utils.ranks.start.cores_by_quota", lambda quota=quota: quota)
        share_cores(ranks)
    assert given == [16, 16, 1, 2, 3]
    for task in ("16", "4"):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", task)
        share_cores(1, at_most=8)
    assert given[5:] == [8, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    share_cores(1)
    assert len(given) == 7


def test_the_default_site_leaves_it_to_the_ranks_how_many_threads_they_have():
    told = "IN_JOB=1; . sites/local.sh; echo ${OMP_NUM_THREADS-unset}"
    env = {name: value for name, value in clean_environment().items() if name != "OMP_NUM_THREADS"}
    assert subprocess.run(["bash", "-c", told], cwd=ROOT, env=env, capture_output=True, text=True).stdout == "unset\n"


@pytest.mark.parametrize("own", [False, True])
def test_ranks_find_out_who_shares_their_cores(own):
    """Three of eight cores, say, may be one rank's own or all ranks' together: they tell each other."""
    code = (
        "import os, torch, utils.ranks.start as s\n"
        "rank = int(os.environ['RANK'])\n"
        f"s.cores_in_reach = lambda: {{10 * rank * {own} + i for i in range(6)}}\n"
        "s.cores_by_quota = lambda: 99\n"
        "os.environ.pop('OMP_NUM_THREADS')\n"
        "s.start(lambda world, argv: print(torch.get_num_threads()), [])"
    )
    assert [done.stdout.strip() for done in run_ranks(2, ["-c", code])] == ["6" if own else "3"] * 2


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all(tiny):
    """A rank that alone cannot read its data says so through rank 0, and no rank waits for it."""
    code = (
        "import sys, os; from utils.ranks.agree import *; from utils.ranks.start import *\n"
        "def main(world, argv):\n"
        "    with all_ranks_agree():\n"
        "        if world.rank == 1: raise OSError('no such disk')\n"
        "start(main, [])"
    )
    first, second = run_ranks(2, ["-c", code])
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.splitlines()[-1].endswith("error: rank 1: no such disk") and "disk" not in second.stderr


@pytest.mark.slow
def test_a_progress_bar_on_a_terminal_only(tiny):
    command = [sys.executable, "train.py", *tiny_flags(tiny, "--num_iters", "2")]
    piped = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert piped.returncode == 0 and "epoch 1:" not in piped.stderr and "Avg val loss" in piped.stderr

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # rows, columns
    shown = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal's output
        while part := os.read(ours, 4096):
            text += part
    assert shown.wait() == 0 and b"epoch 1:" in text and b"Avg val loss" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here (apt-get install openmpi-bin)")
def test_mpirun_trains(tiny):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # containers run tests as root
    command = ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "train.py", *tiny_flags(tiny)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(**root), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tiny / "runs/tiny/2GPU/00/metrics.jsonl").exists() and done.stderr.count("DONE ---- rank 0") == 1


def count_sockets(folder: Path):
    """Join, with a limit of 60 open files that may grow; write how many sockets a run of these ranks holds."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, most))
    world = find_world(os.environ)
    join(world)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
    watch, groups = Watch(JOINING), [dist.new_group(backend="gloo") for _ in range(3)]
    for group in (None, *groups):
        dist.all_reduce(torch.ones(1000), group=group)
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    (folder / str(world.rank)).write_text(str(sum(link.startswith("socket") for link in links)))
    watch.close()
    dist.destroy_process_group()


def say_no_word(how: Callable):
    """Rank 1 of three is here, and dies, or hangs, before it says a word to its neighbour."""
    world = find_world(os.environ)
    join(world)
    if world.rank == 1:
        Watch._greet = lambda self: how(9)
    Watch(timedelta(seconds=5))
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize("how", [os._exit, time.sleep])
def test_a_rank_that_never_says_a_word_ends_the_others(how):
    first, second, third = run_ranks(3, say_no_word, how, timeout=60)
    assert [first.returncode, second.returncode, third.returncode] == [1, 9 if how is os._exit else 1, 1]
    late = "rank 2: no word from rank 1 in 0:00:05, and this one ends too"
    assert late in third.stderr or how is os._exit and "rank 2: rank 1 is gone" in third.stderr
    assert "rank 0: rank 2 is gone" in first.stderr


def test_connections_do_not_grow_with_the_number_of_ranks(tmp_path):
    """As many groups as a run has. Each rank connected to all others, it would be 5 connections a rank and rank."""
    most = []
    for ranks in (4, 12):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert not any(done.returncode for done in run_ranks(ranks, count_sockets, folder))
        most.append(max(int((folder / str(rank)).read_text()) for rank in range(1, ranks)))
    assert most[1] <= most[0] + 8


@pytest.mark.parametrize(
    "told, why",
    [
        (
            "[/torch/gloo/transport/tcp/pair.cc:553] Read error [127.0.0.1]:6: Connection reset by peer. This is "
            "typically caused by a remote worker hanging. Check the logs.",
            "Read error [127.0.0.1]:6: Connection reset by peer",
        ),
        ("[enforce fail at gloo/pair.cc:1] op.length <= op.nbytes. 64 vs 32", "op.length <= op.nbytes. 64 vs 32"),
    ],
)
def test_a_collective_that_fails_says_why_in_one_line(told, why):
    assert why_a_collective_failed(RuntimeError(told)).endswith(f"gone ({why})")


def test_nccl_says_why_itself():
    told = (
        "NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
        "details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 41000"
    )
    why = why_a_collective_failed(dist.DistBackendError(told))
    assert why == "a collective failed: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 41000"


def test_another_error_is_none_of_a_collective():
    assert why_a_collective_failed(RuntimeError("shape mismatch")) is None
