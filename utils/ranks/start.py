"""Start a run: join the other ranks, run its main, and leave together.

A process alone is a group of one: nothing else in the code asks whether it is distributed.
"""

import contextlib
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from utils.device import cores_by_quota, cores_in_reach
from utils.errors import NOT_SAVED, STOPPED, Ended, ReadError, Refused, WriteError, first_line, one_line
from utils.ranks.watchdog import Watch, end_now, place
from utils.ranks.world import World, find_world

ENDS = {
    STOPPED: "no error: a signal or the clock stopped the run; its log says how to go on",
    NOT_SAVED: "the last checkpoint was not written: the log says why",
}
JOINING = timedelta(minutes=10)  # the processes of a large job may start minutes apart


def start(main: Callable[[World, list[str]], None], argv: list[str], load: Callable | None = None) -> None:
    """Join the other ranks, run `main(world, argv)`, and leave together.

    `load(argv)` returns the configuration, and what else: its `comm_timeout` is how long ranks wait for one another.

    The exit code is 0 at the end, 75 for a run that saved its state and can go on, 74 where the last checkpoint or a
    result could not be written, and 2 for what a user can mend, told in one line. What nobody foresaw ends this rank
    with 1, and by that the others.
    """
    world, watch = World(), None
    sys.stderr = sys.stderr or open(os.devnull, "w")  # closed: 2>&-  # noqa: SIM115
    threading.excepthook = partial(_told_by_the_next_call, others=threading.excepthook)
    try:
        world = find_world(os.environ)
        wait = _longest_wait(load, argv)
        join(world, wait)
        watch = Watch(min(wait, JOINING))  # all are here: they say hello within seconds
        main(world, argv)
        code = 0
    except Ended as ended:
        (code,) = ended.args
        if code in ENDS:
            _tell_torchrun(ENDS[code])
    except Refused as error:
        _tell_torchrun(str(error))
        if world.rank == 0:
            with contextlib.suppress(OSError):  # nobody can read it
                print(f"{os.path.basename(sys.argv[0])}: error: {one_line(str(error))}", file=sys.stderr, flush=True)
        error.__traceback__ = None  # it holds main's variables, and NCCL waits for recorded graphs to be gone
        code = 2
    except ReadError as error:
        _tell_torchrun(str(error))
        end_now(f"rank {world.rank}: {one_line(str(error))}", 2)
    except WriteError as error:
        _tell_torchrun(str(error))
        end_now(f"rank {world.rank}: {one_line(str(error))}", NOT_SAVED)
    except Exception as error:
        if world.size == 1:
            raise
        _end_all(world, error)
    if watch:
        _leave(world, watch)
    if code:
        sys.exit(code)


def _leave(world: World, watch: Watch) -> None:
    """Leave with the other ranks: launchers end a job at the first exit, so none goes before rank 0 has printed."""
    try:
        dist.barrier()
    except Exception as error:
        _end_all(world, error)
    watch.close()
    dist.destroy_process_group()


def _tell_torchrun(line: str) -> None:
    """Let torchrun's last words be ours: it prints what it finds in this file, else only where to read about it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(told, file)


def _told_by_the_next_call(args: threading.ExceptHookArgs, others: Callable) -> None:
    """TensorBoard's thread prints no traceback where the disk is full: the next call of its writer raises OSError."""
    if not (type(args.thread).__module__.startswith("tensorboard") and issubclass(args.exc_type, OSError)):
        others(args)


def _longest_wait(load: Callable | None, argv: list[str]) -> timedelta:
    """Return how long ranks wait for one another. What is wrong with the configuration `main` finds, with all ranks."""
    with contextlib.suppress(Exception):
        config, *_ = load(argv)
        return config.longest_wait
    return JOINING


def _end_all(world: World, error: Exception) -> None:
    """End this process with what happened: the other ranks wait for it, and learn of its end at once."""
    at = place(traceback.extract_tb(error.__traceback__))
    if why := why_a_collective_failed(error):
        _tell_torchrun(f"{why}; it was at {at}")
        end_now(f"rank {world.rank}: {why}; it was at {at}")
    _tell_torchrun(f"{type(error).__name__}: {first_line(error)} ({at})")
    with contextlib.suppress(OSError):
        traceback.print_exc()
    end_now(f"rank {world.rank}: {type(error).__name__} ({at})")


def why_a_collective_failed(error: Exception) -> str | None:
    """Return what an error of torch.distributed says, without its place in torch and its advice; None for others."""
    if not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None
    if from_nccl := str(error).partition("Last error:")[2].strip():
        return f"a collective failed: {from_nccl.splitlines()[0]}"
    why = first_line(error).rpartition("] ")[2].partition(". This is typically")[0]
    return f"a collective failed, perhaps because another rank is gone ({why})"


def allow_open_files() -> None:
    """Let this process open as many files, connections among them, as the system lets it."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every platform, nor every number
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def name_of_cores() -> str:
    """Return what ranks that share the same cores of the same node call them alike."""
    return f"{platform.node()} {sorted(cores_in_reach())}"


def share_cores(ranks: int, at_most: int | None = None) -> None:
    """Give this rank its part of the cores that so many ranks share, unless OMP_NUM_THREADS says how many threads.

    Ranks that share cores and spin on two threads each made steps up to 30 times slower. A Slurm task has no more than
    it asked for, also where it is not bound to them.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    threads = min(len(cores_in_reach()), cores_by_quota()) // ranks
    limits = [at_most or threads, int(task) if task.isdigit() else threads]
    torch.set_num_threads(max(min(threads, *limits), 1))


def join(world: World, wait: timedelta = JOINING) -> None:
    """Create the group of all ranks: NCCL (RCCL) moves GPU tensors, gloo CPU tensors.

    When all are here, they wait for one another as long as `wait`: in collectives, and where they set up other groups.
    A process that does not find the others ends here: they cannot be told.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # A rank connects to another one when they first speak. Otherwise each group would connect each of its ranks to all
    # others, in several groups: at some hundred ranks, more files than a process may open.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    allow_open_files()
    if world.size == 1:
        share_cores(1, torch.get_num_threads())  # which may be less: of two threads of a core torch takes one
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    os.environ.update(MASTER_ADDR=world.address, MASTER_PORT=str(world.port))
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=JOINING))
        store.add(name_of_cores(), 1)
        if store.add("here", 1) == world.size:
            store.set("all are here", "")
        store.wait(["all are here"], JOINING)
        share_cores(store.add(name_of_cores(), 0))
        store.set_timeout(wait)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=wait)
    except dist.DistError as error:
        end_now(
            f"rank {world.rank} of {world.size} could not join the others at {world.address}, port {world.port} "
            f"({first_line(error)}): start all ranks, with the name of rank 0's host as MASTER_ADDR and a "
            f"free port as MASTER_PORT; submit_pm.sh takes both from the job: submit it again",
            code=2,
        )
