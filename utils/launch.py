"""Start a run on any launcher: alone, torchrun, Slurm's srun, mpirun, or plain environment variables.

A process alone is a group of one: nothing else in the code asks whether it is distributed.
"""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from utils.errors import NOT_SAVED, Ended, ReadError, Refused, WriteError
from utils.watch import Watch, end_now, place

JOINING = timedelta(minutes=10)  # the processes of a large job may start minutes apart


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    started: float = field(default_factory=time.monotonic, compare=False)


def _first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `nid[001-003,7]` begins with `nid001`."""
    match = re.match(r"([^\[,]*)(?:\[([^\]\-,]+)[^\]]*\]([^\[,]*))?", nodelist)
    return "".join(part or "" for part in match.groups())


def _port(job: str) -> int:
    """Return a port that all ranks of a job agree on; below 32768, where Linux begins to hand out ports itself."""
    return 10000 + (int(job) if job.isdigit() else zlib.crc32(job.encode())) % 20000


def find_world(env: Mapping[str, str]) -> World:
    """Read this process's place from the environment variables of its launcher.

    `RANK` wins (torchrun, or set by hand), then Open MPI, then Slurm, and Slurm only inside an `srun` step: a batch
    script's own shell carries SLURM_PROCID too.

    Raises Refused, a ValueError that names the missing or wrong variable where the environment is set by half.
    """

    def read(name: str, kind: type = int):
        try:
            return kind(env[name])
        except KeyError:
            raise Refused(
                f"{name} is not set, but {launcher} is: set {needs}, or unset them all to run one process"
            ) from None
        except ValueError:
            raise Refused(f"{name} is {env[name]!r}: it takes a whole number") from None

    plain = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    needs = ", ".join(plain)
    on_mpi = "OMPI_COMM_WORLD_SIZE" in env or "OMPI_COMM_WORLD_RANK" in env
    in_step = "SLURM_STEP_NUM_TASKS" in env
    launcher = next((name for name in plain[:3] if name in env), None)
    if "RANK" in env or (launcher and not on_mpi and not in_step):
        world = World(*(read(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), read("MASTER_ADDR", str))
        world = World(world.rank, world.size, world.local_rank, world.address, read("MASTER_PORT"))
    elif on_mpi:
        launcher = "OMPI_COMM_WORLD_RANK" if "OMPI_COMM_WORLD_RANK" in env else "OMPI_COMM_WORLD_SIZE"
        needs = (
            "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK and, on several nodes, MASTER_ADDR"
        )
        rank, size, local = (read(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK"))
        one_node = size == int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0))
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else read("MASTER_ADDR", str))
        job = env.get("SLURM_JOB_ID") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "0")
        world = World(rank, size, local, address, read("MASTER_PORT") if "MASTER_PORT" in env else _port(job))
    elif in_step:
        launcher = "SLURM_STEP_NUM_TASKS"
        needs = "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID (srun does)"
        address = env.get("MASTER_ADDR") or _first_host(read("SLURM_STEP_NODELIST", str))
        port = read("MASTER_PORT") if "MASTER_PORT" in env else _port(read("SLURM_JOB_ID", str))
        ranks = (read(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
        world = World(*ranks, address, port)
    else:
        world = World()
    if not 0 <= world.rank < world.size:
        raise Refused(
            f"rank {world.rank} is not below the number of ranks, {world.size}: check the launcher's variables"
        )
    return world


def first_message(message: str | None) -> str | None:
    """Return the first message that any rank has, on all ranks: all call this at the same point."""
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    found = [(rank, text) for rank, text in enumerate(messages) if text]
    if not found or len(found) == len(messages):
        return messages[0]
    rank, text = found[0]
    return f"rank {rank}: {text}"


def share_error(error: str | None) -> None:
    """End the run on every rank if any rank found an `error`: all ranks call this at the same point.

    Raises Refused with the first rank's message, on all ranks.
    """
    error = first_message(error)
    if error:
        raise Refused(error)


@contextlib.contextmanager
def all_ranks_agree() -> Iterator[None]:
    """Turn what a user can mend, on any rank, into the same error on every rank: none waits for one that left.

    Nothing inside the block may communicate. Raises Refused.
    """
    error = None
    try:
        yield
    except (ValueError, OSError) as found:
        error = str(found) or repr(found)
    share_error(error)


def start(main: Callable[[World, list[str]], None], argv: list[str], load: Callable | None = None) -> None:
    """Join the other ranks, run `main(world, argv)`, and leave together.

    `load(argv)` returns the configuration, and what else: its `comm_timeout` is how long ranks wait for one another.

    The exit code is 0 at the end, 75 for a run that saved its state and can go on, 74 where the last checkpoint or a
    result could not be written, and 2 for what a user can mend, told in one line. What nobody foresaw ends this rank
    with 1, and by that the others.
    """
    world, watch = World(), None
    threading.excepthook = partial(_told_by_the_next_call, others=threading.excepthook)
    try:
        world = find_world(os.environ)
        join(world, _longest_wait(load, argv))
        watch = Watch()
        main(world, argv)
        code = 0
    except Ended as ended:
        (code,) = ended.args
    except Refused as error:
        if world.rank == 0:
            print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr, flush=True)
        error.__traceback__ = None  # it holds main's variables, and NCCL waits for recorded graphs to be gone
        code = 2
    except ReadError as error:
        end_now(f"rank {world.rank}: {error}", 2)
    except WriteError as error:
        end_now(f"rank {world.rank}: {error}", NOT_SAVED)
    except Exception as error:
        if world.size == 1:
            raise
        _end_all(world, error)
    if watch:
        dist.barrier()  # launchers end a job at the first exit: no rank leaves before rank 0 has printed
        watch.close()
        dist.destroy_process_group()
    if code:
        sys.exit(code)


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
    stack = traceback.extract_tb(error.__traceback__)
    if isinstance(error, dist.DistError) or "gloo" in str(error):  # a collective that failed, or waited too long
        end_now(f"rank {world.rank}: {str(error).splitlines()[0].rpartition('] ')[2]} ({place(stack)})")
    traceback.print_exc()
    end_now(f"rank {world.rank}: {type(error).__name__} ({place(stack)})")


def join(world: World, wait: timedelta = JOINING) -> None:
    """Create the group of all ranks: NCCL (RCCL) moves GPU tensors, gloo CPU tensors.

    When all are here, they wait for one another as long as `wait`: in collectives, and where they set up other groups.
    A process that does not find the others ends here: they cannot be told.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        # Ranks that share cores and spin on two threads each made steps up to 30 times slower.
        torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=world.address, MASTER_PORT=str(world.port))
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=JOINING))
        if store.add("here", 1) == world.size:
            store.set("all are here", "")
        store.wait(["all are here"], JOINING)
        store.set_timeout(wait)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=wait)
    except dist.DistError as error:
        end_now(
            f"rank {world.rank} of {world.size} could not join the others at {world.address}, port {world.port} "
            f"({str(error).splitlines()[0]}): start all ranks, with the name of rank 0's host as MASTER_ADDR and a "
            f"free port as MASTER_PORT",
            code=2,
        )
