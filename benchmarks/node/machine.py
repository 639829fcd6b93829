"""What doctor.py looks at on a node: versions, devices, cores, limits, memory."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.nn.attention

from benchmarks.node.topology import find_topology, picture
from utils.comm import rank_groups
from utils.config.settings import Config
from utils.data.dataset import WeatherData
from utils.device import cores_in_reach, has_bf16

ROOT = Path(__file__).resolve().parents[2]
NODES = Path("/sys/devices/system/node")
CGROUPS, OUR_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Line(NamedTuple):
    """What was found; `change` says what to do about it, where something should be done."""

    found: str
    change: str | None = None

    def __str__(self) -> str:
        return f"change  {self.found}: {self.change}" if self.change else f"good    {self.found}"


def is_hidden() -> bool:
    """Whether the GPUs are hidden on purpose: for --device cpu."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def versions() -> Iterator[Line]:
    """Compare what is installed with requirements.txt; CUDA with the driver."""
    yield Line(f"Python {sys.version.split()[0]}", None if sys.version_info >= (3, 11) else "take 3.11 or newer")
    for text in (ROOT / "requirements.txt").read_text().splitlines():
        if match := re.match(r"([\w.-]+)==(\S+)", text):
            name, pinned = match.groups()
            try:
                there = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                yield Line(f"{name} is not installed", "pip install -r requirements.txt")
                continue
            same = there.split("+")[0] == pinned
            known = "requirements.txt was tested with " + pinned
            yield Line(f"{name} {there}", None if same else f"{known}: take that, or watch the tests (make test)")
    if shutil.which("nvidia-smi") and not torch.version.cuda and not is_hidden():
        yield Line("torch without CUDA on a machine with nvidia-smi", "install the build for CUDA")
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        told = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
        remedy = None
        if shutil.which("nvidia-smi"):
            ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            told += ", driver " + subprocess.run(ask, capture_output=True, text=True).stdout.split("\n")[0]
            if not (torch.cuda.is_available() or is_hidden()):
                remedy = "CUDA does not start: take a torch built for this driver, or a newer driver"
        yield Line(told, remedy)


def devices(nproc: int) -> Iterator[Line]:
    """Look at the GPUs: what they are, whether others use them, how they are connected."""
    count = torch.cuda.device_count()
    if not count:
        unseen = shutil.which("nvidia-smi") and not is_hidden()
        remedy = "torch sees none of this node's: CUDA_VISIBLE_DEVICES, driver, or build" if unseen else None
        yield Line("no GPU: training runs on the CPU", remedy)
        return
    share = f"{nproc} ranks share {count} GPU(s)"
    yield Line(f"{count} GPU(s) for {nproc} rank(s)", f"{share}: start one rank a GPU" if nproc > count else None)
    for i in range(count):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(i))
        major, minor = torch.cuda.get_device_capability(i)
        name = f"GPU {i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}, {total:.0f} GiB"
        busy = f"{total - free:.1f} GiB are in use: ask for a node of your own" if free < 0.9 * total else None
        yield Line(name, busy)
        if not has_bf16(torch.device("cuda", i)):
            yield Line(f"GPU {i} has no bf16", "use --amp_mode fp16")


def connections(config: Config, dp: int, here: int, record: Path | None) -> Iterator[Line]:
    """Say how the GPUs are connected, or NUMA nodes; beside a record this is drawn, with tensor parallel groups."""
    topology = find_topology("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    if topology is None:
        return
    yield Line(f"how they are connected:\n{topology.text}")
    if record:
        sizes = {"dp": dp, "tp": config.tensor_parallel, "cp": config.context_parallel, "pp": 1}
        groups = [ranks for ranks in rank_groups(sizes, config.parallel_order, "tp") if max(ranks) < here]
        path = record.with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(topology, groups).savefig(path)
        yield Line(f"drawn in {path}")


def libraries() -> Iterator[Line]:
    """Say which kernels of attention PyTorch has, with versions where it tells them, and which packages there are."""
    flash: list[str] = []
    own = "PyTorch's kernels: math"
    if not torch.cuda.is_available():
        own += ", flash (for CPUs)"
    else:
        flash = getattr(torch.nn.attention, "list_flash_attention_impls", list)()  # newer versions of PyTorch
        has_flash = torch.backends.cuda.is_flash_attention_available()
        version = getattr(torch.nn.attention, "_get_flash_version", lambda: "")()
        own += f", efficient, flash {version}".rstrip() if has_flash else ", efficient; it was built without flash"
        cudnn = torch.backends.cudnn.version()
        own += f", cuDNN's ({cudnn})" if cudnn and not torch.version.hip else ""
    own += f"; flash may be replaced by {', '.join(flash)} (torch.nn.attention)" if flash else ""
    yield Line(own)
    for package, module, what in (
        ("flash-attn", "flash_attn", "--attention flash_attn"),
        ("flash-attn-3", "flash_attn_interface", "FlashAttention-3, for Hopper GPUs; no flag takes it"),
        ("transformer-engine", "transformer_engine", "--model_backend transformer-engine"),
    ):
        if importlib.util.find_spec(module):
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = "of an unknown version"
            yield Line(f"package {module} {version}: {what}")


def cores(config: Config, nproc: int) -> Iterator[Line]:
    """Compare threads and readers with the cores that this process may use."""
    mine = cores_in_reach()
    found = f"{len(mine)} of {os.cpu_count()} cores are ours"
    few = len(mine) < nproc
    yield Line(found, f"{nproc} ranks need a core each: give the job more (-c, --cpus-per-task)" if few else None)
    # Launchers give each of several ranks one thread, unless they are told otherwise.
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # of several numbers the first is the outermost's
    threads = int(given) if given.isdigit() else torch.get_num_threads() if nproc == 1 else 1
    too_many = nproc * threads > len(mine) and threads > 1
    remedy = f"export OMP_NUM_THREADS={max(len(mine) // nproc, 1)}"
    yield Line(f"{nproc} rank(s) x {threads} thread(s)", remedy if too_many else None)
    readers = nproc * config.num_data_workers
    if readers > 2 * len(mine):
        yield Line(f"{readers} readers", f"lower --num_data_workers to {max(2 * len(mine) // nproc, 1)}")
    nodes = [cpu_list(path.read_text()) & mine for path in NODES.glob("node*/cpulist")]
    used = [cpus for cpus in nodes if cpus]
    if used:
        spread = len(used) > 1 and nproc > 1
        bind = "bind each rank to one (srun --cpu-bind=cores, torchrun --numa-binding node)"
        yield Line(f"the cores lie in {len(used)} NUMA node(s)", bind if spread else None)


def cpu_list(text: str) -> set[int]:
    """Return the cores that the kernel writes as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def sizes(config: Config) -> Iterator[Line]:
    """Look at the sizes of matrix products: units for 16 bits take multiples of 8, and those of 64 fill them best."""
    tp, side = config.tensor_parallel, config.patch_size + 2 * config.patch_overlap
    found = {
        "embed_dim over tensor_parallel": config.embed_dim // tp,
        "embed_dim over num_heads": config.embed_dim // config.num_heads,
        "a window's numbers, read": config.n_in_channels * side**2,
        "and forecast": config.n_out_channels * side**2,
    }
    odd = [name for name, size in found.items() if size % 8]
    best = "; the first is no multiple of 64" if not odd and config.embed_dim // tp % 64 else ""
    told = ", ".join(f"{name} {size:,}" for name, size in found.items())
    yield Line(told + best, f"GPUs want multiples of 8: {', '.join(odd)}" if odd else None)


def limits(data: WeatherData | None, ranks: int) -> Iterator[Line]:
    """Compare the limits of this process with what training takes."""
    import resource

    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a run raises the limit as far as it may
    needed = 256 + 3 * ranks  # of rank 0, which all others talk to: benchmarks/startup.py counts them
    is_little = f"let the site raise the hard limit (ulimit -Hn) to {needed}" if 0 <= files < needed else None
    most = "any number of" if files < 0 else files
    yield Line(f"{most} open files are allowed; {ranks} rank(s) take up to {needed}", is_little)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if data and torch.cuda.is_available() and locked != resource.RLIM_INFINITY:
        ring = data.train_loader.reader.ring.nbytes + data.valid_loader.reader.ring.nbytes
        small = f"batches take {ring / 2**30:.2f} GiB: ulimit -l unlimited" if ring > locked else None
        yield Line(f"{locked / 2**30:.2f} GiB of locked memory are allowed", small)


def host_memory() -> int:
    """Return the bytes of memory that are ours: all, or as many as a job or a container may take (cgroups)."""
    found = [psutil.virtual_memory().total]
    for line in OUR_CGROUPS.read_text().splitlines() if OUR_CGROUPS.exists() else []:
        _, controllers, ours = line.split(":", 2)
        if controllers == "":  # version 2
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        for group in (Path(ours), *Path(ours).parents):
            with contextlib.suppress(OSError, ValueError):  # not to be seen from here; `max`
                found.append(int((root / group.relative_to("/") / name).read_text()))
    return min(found)
