"""Which rank am I? On any launcher: alone, torchrun, Slurm's srun, mpirun, or plain environment variables."""

import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from utils.errors import Refused


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


def _port(job: str, step: int = 0) -> int:
    """Return a port that all ranks of a job's step agree on; below 32768, where Linux hands out ports itself."""
    return 10000 + ((int(job) if job.isdigit() else zlib.crc32(job.encode())) + 1009 * step) % 20000


def find_world(env: Mapping[str, str]) -> World:
    """Read this process's place from the environment variables of its launcher.

    `RANK` wins (torchrun, or set by hand), then Open MPI, then Slurm, and Slurm only inside an `srun` step: a batch
    script's own shell carries SLURM_PROCID too.

    Raises Refused, a ValueError that names the missing or wrong variable where the environment is set by half, or that
    of another start.
    """

    def read(name: str, kind: type = int):
        try:
            return kind(env[name])
        except KeyError:
            raise Refused(f"{name} is not set, but {launcher} is: set {needs}, or unset all for one process") from None
        except ValueError:
            raise Refused(f"{name} is {env[name]!r}: it takes a whole number") from None

    plain = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    needs = ", ".join(plain)
    on_mpi = "OMPI_COMM_WORLD_SIZE" in env or "OMPI_COMM_WORLD_RANK" in env
    in_step = "SLURM_STEP_NUM_TASKS" in env
    launcher = next((name for name in plain[:3] if name in env), None)
    if "RANK" in env or (launcher and not on_mpi and not in_step):
        ranks = (read(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        world = World(*ranks, read("MASTER_ADDR", str), read("MASTER_PORT"))
        tasks = read("SLURM_STEP_NUM_TASKS") if in_step and "TORCHELASTIC_RUN_ID" not in env else 0
        if world.size < tasks:
            raise Refused(
                f"WORLD_SIZE is {world.size}, but srun started {tasks} tasks: RANK and WORLD_SIZE are left from before "
                f"(unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT), or source export_DDP_vars.sh in each task"
            )
    elif on_mpi:
        launcher = "OMPI_COMM_WORLD_RANK" if "OMPI_COMM_WORLD_RANK" in env else "OMPI_COMM_WORLD_SIZE"
        needs = "OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and, on several nodes, MASTER_ADDR"
        rank, size, local = (read(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK"))
        one_node = size == int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0))
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else read("MASTER_ADDR", str))
        job = env.get("SLURM_JOB_ID") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "0")
        world = World(rank, size, local, address, read("MASTER_PORT") if "MASTER_PORT" in env else _port(job))
    elif in_step:
        launcher = "SLURM_STEP_NUM_TASKS"
        needs = "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID (srun does)"
        suffix = env.get("MASTER_ADDR_SUFFIX", "")  # see export_DDP_vars.sh
        address = env.get("MASTER_ADDR") or _first_host(read("SLURM_STEP_NODELIST", str)) + suffix
        step = read("SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
        port = read("MASTER_PORT") if "MASTER_PORT" in env else _port(read("SLURM_JOB_ID", str), step)
        ranks = (read(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
        world = World(*ranks, address, port)
    else:
        world = World()
    if not 0 <= world.rank < world.size:
        raise Refused(f"rank {world.rank} is not below the number of ranks {world.size}: check the environment")
    return world
