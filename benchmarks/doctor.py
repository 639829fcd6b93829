"""Is this machine ready to train? Each line says good, or what to change.

    python benchmarks/doctor.py --config=demo                                  one rank
    python benchmarks/doctor.py --config=mp --tensor_parallel=4 --nproc 8      a node's ranks; any flag of train_mp.py

In a job's script this looks at the first of its nodes: versions, devices, cores and threads, limits, what ranks send to
each other, storage, the data, and the memory that the chosen section needs. Takes a minute or two, and changes nothing.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

import train  # noqa: E402
from benchmarks.call import call, reason  # noqa: E402
from benchmarks.simulate import simulate  # noqa: E402
from utils.config import Config  # noqa: E402
from utils.config_reader import load_config  # noqa: E402
from utils.data_loader import BatchReader  # noqa: E402
from utils.model_summary import summarise  # noqa: E402
from utils.profiling import peak_flops  # noqa: E402
from utils.weather_data import WeatherData  # noqa: E402

MFU = 0.4  # what a step reaches of the peak, more or less
NODES = Path("/sys/devices/system/node")
CGROUPS, OUR_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Line(NamedTuple):
    """What was found; `change` says what to do about it, where something should be done."""

    found: str
    change: str | None = None

    def __str__(self) -> str:
        return f"change  {self.found}: {self.change}" if self.change else f"good    {self.found}"


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
    if shutil.which("nvidia-smi") and not torch.version.cuda:
        yield Line("torch without CUDA on a machine with nvidia-smi", "install the build for CUDA")
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        yield Line(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}")


def devices(nproc: int) -> Iterator[Line]:
    """Look at the GPUs: what they are, whether others use them, how they are connected."""
    count = torch.cuda.device_count()
    if not count:
        blind = shutil.which("nvidia-smi") and "torch sees none of this node's: CUDA_VISIBLE_DEVICES, driver, or build"
        yield Line("no GPU: training runs on the CPU", blind or None)
        return
    share = f"{nproc} ranks share {count} GPU(s)"
    yield Line(f"{count} GPU(s) for {nproc} rank(s)", f"{share}: start one rank a GPU" if nproc > count else None)
    for i in range(count):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(i))
        major, minor = torch.cuda.get_device_capability(i)
        name = f"GPU {i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}, {total:.0f} GiB"
        busy = (
            f"{total - free:.1f} GiB are in use by others: ask for a node of your own" if free < 0.9 * total else None
        )
        yield Line(name, busy)
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            yield Line(f"GPU {i} has no bf16", "use --amp_mode fp16")
    if shutil.which("nvidia-smi"):
        table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout.rstrip()
        yield Line(f"how they are connected:\n{table}")


def cores(config: Config, nproc: int) -> Iterator[Line]:
    """Compare threads and readers with the cores that this process may use."""
    mine = os.sched_getaffinity(0)
    found = f"{len(mine)} of {os.cpu_count()} cores are ours"
    few = len(mine) < nproc
    yield Line(found, f"{nproc} ranks need a core each: give the job more (-c, --cpus-per-task)" if few else None)
    # Launchers give each of several ranks one thread, unless they are told otherwise.
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads() if nproc == 1 else 1))
    too_many = nproc * threads > len(mine)
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


def limits(data: WeatherData | None, nproc: int) -> Iterator[Line]:
    """Compare the limits of this process with what training takes."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Line(f"{files} open files are allowed", "ulimit -n 4096" if 0 <= files < 1024 else None)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if data and torch.cuda.is_available() and locked != resource.RLIM_INFINITY:
        ring = data.train_loader.reader.ring.nbytes + data.valid_loader.reader.ring.nbytes
        small = f"batches take {ring / 2**30:.2f} GiB: ulimit -l unlimited" if ring > locked else None
        yield Line(f"{locked / 2**30:.2f} GiB of locked memory are allowed", small)


def communication(flags: list[str], nproc: int, gradients: int, step: float) -> Iterator[Line]:
    """Measure collectives in each group of the grid, on GPUs with peer-to-peer copies and without.

    Args:
        gradients: bytes of them on a rank.
        step: seconds that a step computes.
    """
    if nproc == 1:
        return
    measured = measure_collectives(flags, nproc)
    found, cores, without = measured["groups"], measured["cores"], {}
    if torch.cuda.device_count() > 1:
        without = measure_collectives(flags, nproc, NCCL_P2P_DISABLE="1")["groups"]
    together = set().union(*cores)
    own = len(together) == sum(map(len, cores))
    yield Line(f"ranks {'have cores of their own' if own else 'share their cores'}: {len(together)} for {nproc}")
    for name, measured in found.items():
        speed = measured["gb_per_sec"]
        told = f"{name} of {measured['ranks']} ranks: each sends {speed:.2f} GB/s"
        if name in without:
            told += f", {speed / without[name]['gb_per_sec']:.1f} x as much as without peer-to-peer"
        yield Line(told)
    if measured := found.get("dp-cp all_reduce") or found.get("dp all_reduce"):
        ranks = measured["ranks"]
        seconds = 2 * (ranks - 1) / ranks * gradients / measured["gb_per_sec"] / 1e9
        told = f"gradients take {1e3 * seconds:.1f} ms to send, and a step computes about {1e3 * step:.1f} ms"
        remedy = "a larger batch, in several --accumulation_steps, or a faster network (NCCL_DEBUG=INFO names it)"
        yield Line(told, remedy if seconds > step / 2 else None)


def measure_collectives(flags: list[str], nproc: int, **env: str) -> dict[str, Any]:
    """Return what ranks of this node reach: the JSON of collectives.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    threads = str(max(len(os.sched_getaffinity(0)) // nproc, 1))
    try:
        code, found, errors = call(
            [*command, str(ROOT / "benchmarks/collectives.py"), *flags],
            {"OMP_NUM_THREADS": threads, **os.environ, **env}, limit=300,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"collectives of {nproc} ranks took over 5 minutes: can they reach each other?") from None
    if code:
        raise ValueError(reason(errors))
    return json.loads(next(line for line in reversed(found.splitlines()) if line.startswith("{")))


def storage(data: WeatherData, needed: float) -> Iterator[Line]:
    """Read samples as training does, one read at a time and sixteen, from files that the system holds no copy of.

    Args:
        needed: samples per second that this node's ranks compute.
    """
    reader, folder = data.train_loader.reader, data.config.train_data_path
    speeds = {}
    for depth in (1, 16) if data.train_loader.is_direct else (1,):
        for path in data.train_files.paths:
            drop_cache(path)
        speeds[depth] = read_speed(reader, depth)
    size = sum(frames[0].nbytes for frames in reader.ring.frames[0]) / 1e9  # GB of a sample
    told = ", ".join(
        f"{speed:.1f} samples/s ({size * speed:.2f} GB/s) with {depth} read(s) at once"
        for depth, speed in speeds.items()
    )
    told = f"{folder} gives {told}; this node computes about {needed:.1f}"
    depth = data.train_loader.depth or 1
    best = max(speeds, key=speeds.get)
    if (speeds[1] if depth == 1 else min(speeds[1] * depth, speeds[best])) >= needed:
        yield Line(told)
    elif not data.train_loader.is_direct:
        yield Line(told, "--num_data_workers: each decodes a frame at a time; or files that are not compressed")
    elif speeds[best] >= needed:
        yield Line(told, f"--num_data_workers 4 --read_depth {best}")
    else:
        yield Line(told, "--stage_dir on the node's own disk, less channels, or float16 files")


def drop_cache(path: str) -> None:
    """Ask the system to forget its copy of a file; a file system may not listen."""
    with open(path, "rb") as file, contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(reader: BatchReader, depth: int) -> float:
    """Return the samples per second of `depth` reads at once, in an order of chance."""
    order = np.random.default_rng(depth).permutation(len(reader.pairs))
    batches = np.resize(order, (-(-8 * depth // reader.read_size), len(reader.batches[0].counts)))
    jobs = [job for samples in batches for job in reader.jobs(0, samples)]
    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(reader.read, jobs))
    return batches.size / (time.perf_counter() - start)


def values(data: WeatherData) -> Iterator[Line]:
    """Look at some samples: are they finite, and do the statistics fit?"""
    reader = data.train_loader.reader
    samples = np.linspace(0, len(reader.pairs) - 1, 8).astype(int)
    frames = []
    for file, t in reader.pairs[samples]:
        frames.append(reader.readers[0].read_frame(int(file), int(t)).astype(np.float64))
    fields = (np.stack(frames) - data.means[data.inputs, None, None]) / data.stds[data.inputs, None, None]
    yield Line(f"{len(reader.pairs)} samples of {len(data.in_names)} channels, {fields.shape[2]} x {fields.shape[3]}")
    for name, channel in zip(data.in_names, fields.swapaxes(0, 1)):
        if not np.isfinite(channel).all():
            yield Line(f"{name} is not finite everywhere", "mend the files: python -m utils.prepare_data check FOLDER")
            continue
        mean, std = channel.mean(), channel.std()
        if abs(mean) > 1 or not 0.3 < std < 3:
            found = f"{name} has mean {mean:.2f} and standard deviation {std:.2f} once it is normalised"
            yield Line(found, "the statistics are of other data: make them anew (docs/data.md)")
    if np.isfinite(fields).all():
        yield Line(f"normalised values lie between {fields.min():.1f} and {fields.max():.1f}")


def memory(config: Config, dp: int, found: dict) -> Iterator[Line]:
    """Compare the memory that a rank of this section needs with what there is."""
    parts = {"weights": 4 * found["parameters"], "optimiser": found["after_forward"]["Optstate"]}
    parts |= {"gradients": parts["weights"], "activations": found["after_forward"]["Activation"]}
    told = f"a rank needs {found['peak'] / 2**30:.2f} GiB for tensors: "
    told += ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    if torch.cuda.is_available():
        there = torch.cuda.mem_get_info()[1] / 2**30
    else:
        ranks = dp * config.tensor_parallel * config.context_parallel
        there = host_memory() / 2**30 / ranks
    told += f"; it has {there:.1f} GiB"
    if found["peak"] / 2**30 < 0.9 * there:
        yield Line(told)
        return
    if parts["activations"] > parts["weights"] + parts["optimiser"]:
        remedies = ["--accumulation_steps 2"] * (config.local_batch_size > 1)
        remedies += ["--activation_checkpoint block"] * (config.activation_checkpoint == "none")
        remedies += ["--context_parallel 2"]
    else:
        remedies = ["--tensor_parallel 2"]
    yield Line(told, "try " + ", then ".join(remedies))


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


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--nproc", type=int, default=max(torch.cuda.device_count(), 1), help="ranks of a node")
    args, flags = parser.parse_known_args(argv)
    config, _ = load_config(flags, chapter=2)
    dp, rest = divmod(args.nproc, config.tensor_parallel * config.context_parallel)
    if rest or not dp:
        raise ValueError(f"nproc {args.nproc} does not divide over tensor_parallel x context_parallel: take a multiple")
    config = config.with_batches(dp)
    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    changes = 0

    def show(title: str, lines: Iterator[Line]) -> None:
        nonlocal changes
        print(f"\n{title}")
        try:
            for line in lines:
                changes += line.change is not None
                print(f"  {line}", flush=True)
        except (ValueError, OSError) as error:  # what a run would say, too
            changes += 1
            print(f"  change  {error}")

    show("Versions", versions())
    show("Devices", devices(args.nproc))
    show("Cores", cores(config, args.nproc))
    found: dict = {}

    def simulated() -> Iterator[Line]:
        found.update(simulate(dp, flags))
        yield from memory(config, dp, found)

    show("Memory", simulated())
    try:
        data = WeatherData(dataclasses.replace(config, stage_dir=None), num_shards=dp)  # copies no files
    except (ValueError, OSError) as error:
        data = None
        show("Data", iter([Line(str(error), "the rest needs them")]))
    show("Limits", limits(data, args.nproc))
    if data:
        # A step computes three times the forward pass's operations.
        layers = summarise(train.build_model, config, data)
        peak, source = peak_flops(device, config.amp_mode, config.tf32)
        needed = MFU * peak * args.nproc / (3 * layers[0].flops)  # samples/s
        print(f"\n(A step is taken to reach {MFU:.0%} of {peak / 1e12:.3g} TFLOP/s a rank: {source})")
        show("Data", values(data))
        show("Storage", storage(data, needed))
        parameters = found.get("parameters", layers[0].parameters)
        show("Communication", communication(flags, args.nproc, 4 * parameters, config.global_batch_size / needed))
    print(f"\n{changes} thing(s) to change" if changes else "\nAll is well.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"doctor.py: error: {error}")
