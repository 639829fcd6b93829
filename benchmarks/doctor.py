"""Is this machine ready to train? Each line says good, or what to change.

    python benchmarks/doctor.py --config=demo                                  one rank
    python benchmarks/doctor.py --config=mp --tensor_parallel=4 --nproc 8      ranks; any flag of train_mp.py goes along

In a job's script this looks at the first of its nodes: versions, devices, cores and threads, limits, storage, the data,
and the memory that the chosen section needs; what ranks send to each other it measures over all nodes. Takes a minute
or two, and changes nothing. --json FILE keeps it all, and draws beside it how the devices are connected. --machine FILE
measures what the machine can do, for benchmarks/plan.py: a minute more, or two; --seconds 10 has a shorter look, and
knows less of a machine that others use, too. Without GPUs on two ranks or more.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import train  # noqa: E402
from benchmarks.harness.call import all_devices, call, check_place, end_on_signals, launch, reason, spread, stay_on  # noqa: E402
from benchmarks.harness.command import errors_in_one_line, parser_of  # noqa: E402
from benchmarks.harness.record import write_record  # noqa: E402
from benchmarks.node.machine import Line, connections, cores, devices, host_memory, libraries, limits, sizes, versions  # noqa: E402
from benchmarks.planner.machine import write_machine  # noqa: E402
from benchmarks.planner.measure import SECONDS, measure  # noqa: E402
from benchmarks.simulate import simulate  # noqa: E402
from utils.config.reader import load_config  # noqa: E402
from utils.config.settings import Config  # noqa: E402
from utils.data.batches import BatchReader  # noqa: E402
from utils.data.dataset import WeatherData  # noqa: E402
from utils.data.variables import missing  # noqa: E402
from utils.device import cores_in_reach, peak_flops  # noqa: E402
from utils.measure.advice import finding  # noqa: E402
from utils.measure.verdict import memory_advice  # noqa: E402

MFU = 0.4  # what a step reaches of the peak, more or less


def communication(flags: list[str], nproc: int, sent: dict[str, float], step: float) -> Iterator[Line]:
    """Measure collectives in each group of the grid, on GPUs with peer-to-peer copies and without.

    Args:
        sent: bytes that a rank sends in a step, by group.
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
    for network in measured["networks"] if spread(nproc)[0] > 1 else ():
        slow = network == "Socket"
        yield Line(f"NCCL's network between nodes: {network}", finding("network") if slow else None)
    yield Line(f"ranks {'have cores of their own' if own else 'share their cores'}, {len(together)} on this node")
    for group in dict.fromkeys(name.split()[0] for name in found):
        speeds = {kind: found[f"{group} {kind}"]["gb_per_sec"] for kind in ("all_reduce", "all_gather")}
        told = f"{group} of {found[f'{group} all_reduce']['ranks']} ranks: each sends "
        told += ", ".join(f"{speed:.2f} GB/s in an {kind}" for kind, speed in speeds.items())
        remedy = None
        if without:
            ratio = speeds["all_reduce"] / without[f"{group} all_reduce"]["gb_per_sec"]
            told += f", {ratio:.1f} x as much as without peer-to-peer"
            remedy = finding("peer") if ratio < 0.9 else None
        # Gradients go over dp-cp, which is dp or cp alone where the other one is 1.
        has_gradients = group in ("dp", "cp") and "dp-cp all_reduce" not in found
        size = sent.get(group, 0.0) + (sent.get("dp-cp", 0.0) if has_gradients else 0.0)
        if size:
            # Gradients are added up, tokens are gathered.
            seconds = size / speeds["all_reduce" if "dp" in group else "all_gather"] / 1e9
            told += f"; {1e3 * seconds:.1f} ms for what a step sends over it, which computes about {1e3 * step:.1f} ms"
            most = "dp-cp" if has_gradients and sent.get("dp-cp", 0.0) > sent.get(group, 0.0) else group
            remedy = finding(most) if seconds > step / 2 else remedy
        yield Line(told, remedy)


def measure_collectives(flags: list[str], nproc: int, **env: str) -> dict[str, Any]:
    """Return what the ranks reach: the JSON of collectives.py, and the networks that NCCL took on this node."""
    command, here = launch(str(ROOT / "benchmarks/collectives.py"), nproc)
    with tempfile.TemporaryDirectory() as folder:
        told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        try:
            code, found, errors = call([*command, *flags], {**here, **told, **env}, limit=300)
        except subprocess.TimeoutExpired:
            raise ValueError(f"collectives of {nproc} ranks took over 5 minutes: can they reach each other?") from None
        if code:
            raise ValueError(reason(errors))
        lines = "".join(path.read_text() for path in Path(folder).iterdir())
    measured = json.loads(next(line for line in reversed(found.splitlines()) if line.startswith("{")))
    return {**measured, "networks": sorted(set(re.findall(r"Using network (.+)", lines)))}


def storage(data: WeatherData, needed: float, found: dict | None = None) -> Iterator[Line]:
    """Read samples as training does, one read at a time and sixteen, from files that the system holds no copy of.

    Args:
        needed: samples per second that this node's ranks compute.
        found: gets `storage`, the bytes per second that were read.
    """
    reader, folder = data.train_loader.reader, data.config.train_data_path
    speeds = {}
    for depth in (1, 16) if data.train_loader.is_direct else (1,):
        for path in data.train_files.paths:
            # The system shall forget its copy; a file system may not listen.
            with open(path, "rb") as file, contextlib.suppress(AttributeError, OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        speeds[depth] = read_speed(reader, depth)
    size = sum(frames[0].nbytes for frames in reader.ring.frames[0][:2]) / 1e9  # GB of an input and its target
    if found is not None:
        found["storage"] = 1e9 * size * max(speeds.values())
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
        yield Line(told, finding("gzip"))
    elif speeds[best] >= needed:
        yield Line(told, finding("depth", best=best))
    else:
        yield Line(told, finding("storage"))


def samples_needed(config: Config, peak: float, flops: int) -> float:
    """Return the samples of two frames that a rank computes in a second; one of K steps has K passes, K + 1 frames."""
    steps = config.mean_steps(range(config.num_iters))
    return MFU * peak / (3 * flops * steps) * (1 + steps) / 2


def step_seconds(config: Config, peak: float, flops: int, ranks: int) -> float:
    """Return what a step of the longest forecasts computes, as `simulate` counts what it sends."""
    return config.global_batch_size * 3 * flops * config.longest_rollout / (MFU * peak * ranks)


def read_speed(reader: BatchReader, depth: int) -> float:
    """Return the samples per second of `depth` reads at once, in an order of chance."""
    order = np.random.default_rng(depth).permutation(len(reader.pairs))
    batches = np.resize(order, (-(-8 * depth // reader.read_size), len(reader.batches[0].counts)))
    jobs = [job for samples in batches for job in reader.jobs(0, samples, 1)]
    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(reader.read, jobs))
    return batches.size / (time.perf_counter() - start)


def values(data: WeatherData) -> Iterator[Line]:
    """Look at some samples: are they finite, and do the statistics fit?"""
    reader, f = data.train_loader.reader, data.fields
    samples = np.linspace(0, len(reader.pairs) - 1, 8).astype(int)
    frames = []
    for file, t in reader.pairs[samples]:
        frames.append(reader.readers[0].read_frame(int(file), int(t)).astype(np.float64))
    values = (np.stack(frames) - f.means[f.inputs, None, None]) / f.stds[f.inputs, None, None]
    yield Line(f"{len(reader.pairs)} samples of {len(f.in_names)} channels, {values.shape[2]} x {values.shape[3]}")
    for name, channel in zip(f.in_names, values.swapaxes(0, 1)):
        if missing(channel).any():
            yield Line(f"{name} lacks values: they are not finite, or huge", finding("finite"))
            continue
        mean, std = channel.mean(), channel.std()
        if abs(mean) > 1 or not 0.3 < std < 3:
            found = f"{name} has mean {mean:.2f} and standard deviation {std:.2f} once it is normalised"
            yield Line(found, finding("statistics"))
    if np.isfinite(values).all():
        yield Line(f"normalised values lie between {values.min():.1f} and {values.max():.1f}")


def memory(config: Config, here: int, found: dict) -> Iterator[Line]:
    """Compare the memory that a rank of this section needs with what there is for each of the `here` on this node."""
    held = found["after_forward"]
    owned = held["Optstate"] // 2  # of two moments each: of all weights, or of those that a rank owns
    parts = {"weights": held["Parameter"], "optimiser": held["Optstate"], "gradients": owned}
    parts |= {"activations": held["Activation"]} | ({} if config.ema_decay is None else {"average": owned})
    needed = found["peak"] / 2**30
    told = f"a rank needs {needed:.2f} GiB for tensors: "
    told += ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    if torch.cuda.is_available():
        there = torch.cuda.mem_get_info()[1] / 2**30
    else:
        there = host_memory() / 2**30 / here
    told += f"; it has {there:.1f} GiB"
    remedies = memory_advice(parts["activations"], parts["weights"] + parts["optimiser"], config)
    yield Line(told, None if needed < 0.9 * there else "try " + ", then ".join(remedies))


def planning(
    path: Path, device: torch.device, nproc: int, storage: float | None, seconds: float = SECONDS
) -> Iterator[Line]:
    """Measure what the machine can do, and keep it in a file."""
    found = measure(device.type, nproc, storage, seconds)
    write_machine(path, found)
    best = {dtype: max(rate for _, rate in curve) for dtype, curve in found["products"].items()}
    told = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in best.items())
    yield Line(f"matrix products of steps reach {told} on each of {nproc} rank(s) at once")
    noise, drift = found["noise"], found["drift"]
    busy = "others compute here: measure again when it is quiet" if max(noise, drift) > 0.05 else None
    yield Line(
        f"an operation takes the host {1e6 * found['host']:.1f} us; the time of a step varies by {noise:.1%}, "
        f"and by {drift:.1%} from round to round",
        busy,
    )
    yield Line(f"kept in {path}: python benchmarks/plan.py --machine {path} --ranks {nproc}, with these flags")


def parsed(argv: list[str]) -> tuple[argparse.Namespace, list[str], Config, int]:
    """Return the doctor's own flags, the others, their configuration, and how many copies of the model there are."""
    parser = parser_of(__doc__, "train_mp.py")
    parser.add_argument("--nproc", type=int, help="ranks; default: one a GPU")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--machine", type=Path, help="file to write for benchmarks/plan.py")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of taking steps for it; default: %(default)s")
    args, flags = parser.parse_known_args(argv)
    check_place()
    config, _ = load_config(flags, chapter=2)
    stay_on(config.device)
    args.nproc = all_devices() if args.nproc is None else args.nproc
    if not 0 <= args.seconds <= 3600:
        raise ValueError(f"seconds {args.seconds:g} are not from 0 to 3600")
    dp, rest = divmod(args.nproc, config.tensor_parallel * config.context_parallel)
    if rest or not dp:
        raise ValueError(f"nproc {args.nproc} does not divide over tensor_parallel x context_parallel: take a multiple")
    return args, flags, config, dp


def main(argv: list[str]) -> None:
    args, flags, config, dp = parsed(argv)
    config = config.with_batches(dp)
    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    shown: dict[str, list[Line]] = {}

    def show(title: str, lines: Iterator[Line]) -> None:
        print(f"\n{title}")
        shown[title] = []
        try:
            for line in lines:
                shown[title].append(line)
                print(f"  {line}", flush=True)
        except (ValueError, OSError) as error:  # what a run would say, too
            shown[title].append(Line("it cannot be known", str(error)))
            print(f"  {shown[title][-1]}", flush=True)

    show("Versions", versions())
    _, here = spread(args.nproc)
    show("Devices", itertools.chain(devices(here), connections(config, dp, here, args.json), libraries()))
    show("Cores", cores(config, here))
    show("Sizes", sizes(config))
    found: dict = {}

    def simulated() -> Iterator[Line]:
        found.update(simulate(dp, flags))
        yield from memory(config, here, found)

    show("Memory", simulated())
    try:
        data = WeatherData(dataclasses.replace(config, stage_dir=None), num_shards=dp)  # copies no files
    except (ValueError, OSError) as error:
        data = None
        show("Data", iter([Line(str(error), "the rest needs them")]))
    show("Limits", limits(data, args.nproc))
    if data:
        # A step computes three times the forward pass's operations.
        with torch.device("meta"):
            flops = train.build_model(dataclasses.replace(config, init_from=None), data.fields).flops()
        peak, source = peak_flops(device, config.amp_mode, config.tf32, config.in_8_bits)
        needed = args.nproc * samples_needed(config, peak, flops)
        print(f"\n(A step is taken to reach {MFU:.0%} of {peak / 1e12:.3g} TFLOP/s a rank: {source})")
        show("Data", values(data))
        show("Storage", storage(data, needed * here / args.nproc, found))
        step = step_seconds(config, peak, flops, args.nproc)
        show("Communication", communication(flags, args.nproc, found.get("sent", {}), step))
    if args.machine:
        ranks = max(args.nproc, 1 if device.type == "cuda" else min(len(cores_in_reach()), 2))
        show("For the planner", planning(args.machine, device, ranks, found.get("storage"), args.seconds))
    changes = sum(line.change is not None for lines in shown.values() for line in lines)
    print(f"\n{changes} thing(s) to change" if changes else "\nAll is well.")
    if args.json:
        write_record(args.json, {"changes": changes}, {}, lines={k: [x._asdict() for x in v] for k, v in shown.items()})


if __name__ == "__main__":
    end_on_signals()
    with errors_in_one_line():
        main(sys.argv[1:])
