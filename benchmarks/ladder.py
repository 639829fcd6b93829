"""The tutorial's optimisations, one after another and each alone: what does each bring on this machine?

    python benchmarks/ladder.py --config=demo                                 all that this machine can do
    python benchmarks/ladder.py --config=base --depth=2 --rungs bf16 compile  some of it; flags of train.py go along
    python benchmarks/ladder.py --config=base --nproc 4                       on up to 4 ranks: torchrun, in a job srun

Each rung is a run in a process of its own: two epochs, of which the second counts. All rungs run once, then all once
more, `--repeats` times: a machine that slows down meanwhile slows all of them. A gain is the median of the ratios to
the rung below, each within one round. It is noise where these ratios lie on both sides of 1, or where rungs that are
one and the same command differ by as much. What the machine cannot do is skipped, with the reason.

Writes what it found to `--json`, and beside it as .md (tables), .png (bars) and .html (all in one page). Interrupted,
the same command goes on where it stopped, and tries again what failed: .runs.jsonl has what was done.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import ladder_report  # noqa: E402
from benchmarks.call import call, reason  # noqa: E402
from benchmarks.record import device_name  # noqa: E402
from utils.config import Config  # noqa: E402
from utils.config_reader import load_config  # noqa: E402
from utils.weather_data import WeatherData  # noqa: E402

EPOCHS = 2
LEAST = 5  # iterations of an epoch: the first of them waits for the reader to start


@dataclass(frozen=True)
class Rung:
    """A run, and the one below it: what it is compared with.

    Args:
        table: where it stands in the report.
        flags: on top of the configuration's.
        batch: samples of a step, over all ranks.
        needs: of the machine, a key of MISSING.
    """

    table: str
    name: str
    flags: tuple[str, ...]
    batch: int
    below: str | None = None
    script: str = "train.py"
    ranks: int = 1
    needs: str | None = None

    @property
    def key(self) -> str:
        return f"{self.table}: {self.name}"


# The baseline has none of what the rungs switch on.
PLAIN = (
    "--num_data_workers=0", "--read_depth=None", "--data_loader_config=pytorch", "--no_tf32", "--amp_mode=none",
    "--no_enable_fused", "--no_enable_jit", "--attention=math", "--activation_checkpoint=none", "--mlp_chunks=1",
    "--accumulation_steps=1",
)  # fmt: skip
WORKERS = ("--num_data_workers=4",)
STEPS = {  # in the order of the tutorial
    "workers": WORKERS,
    "prefetch": (*WORKERS, "--read_depth=16"),
    "TF32": ("--tf32",),
    "attention": ("--attention=auto",),
    "fused": ("--enable_fused",),
    "bf16": ("--amp_mode=bf16",),
    "compile": ("--enable_jit",),
}
ALONE = {
    **STEPS,
    "DALI": (*WORKERS, "--data_loader_config=dali"),
    "fp16": ("--amp_mode=fp16",),
    "checkpoint blocks": ("--activation_checkpoint=block",),
    "checkpoint MLPs": ("--activation_checkpoint=mlp",),
    "chunks": ("--mlp_chunks=4",),
}
NEEDS = {"TF32": "TF32", "fp16": "fp16"}
DATA_PARALLEL = "benchmarks/data_parallel.py"
GRAPHS = ("--graph_warmup=4",)
MISSING = {
    "a GPU": "no GPU here",
    "2 GPUs": "needs two GPUs or more",
    "TF32": "needs an NVIDIA GPU with tensor cores (Ampere or later)",
    "fp16": "a CPU only imitates fp16, many times slower",
}


def lacks(needs: str | None, ranks: int = 1) -> str | None:
    """Return what the machine has not, in words; None where it has it."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < ranks and "SLURM_JOB_ID" not in os.environ:
        return f"needs {ranks} GPUs, and here are {gpus}"
    has_tf32 = gpus > 0 and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0)
    there = {None: True, "a GPU": gpus > 0, "2 GPUs": gpus > 1, "TF32": has_tf32, "fp16": gpus > 0}
    return None if there[needs] else MISSING[needs]


def all_rungs(nproc: int, batch: int) -> list[Rung]:
    """Return all rungs, each after the one below it; `batch` is that of a step on one rank."""
    rungs = [Rung("steps", "baseline", PLAIN, batch), Rung("steps", "the same again", PLAIN, batch, "steps: baseline")]
    flags, below = PLAIN, "steps: baseline"
    for name, more in STEPS.items():
        flags = (*flags, *more)
        rungs.append(Rung("steps", f"+ {name}", flags, batch, below, needs=NEEDS.get(name)))
        below = rungs[-1].key
    rungs.append(Rung("steps", "+ graphs", (*flags, *GRAPHS), batch, below, "train_mp_graphs.py", needs="a GPU"))
    for name, more in ALONE.items():
        rungs.append(Rung("alone", name, (*PLAIN, *more), batch, "steps: baseline", needs=NEEDS.get(name)))
    if nproc == 1:
        return rungs

    counts = [2**i for i in range(nproc.bit_length()) if 2**i < nproc] + [nproc]
    for table, grows in (("weak scaling", True), ("strong scaling", False)):
        for n in counts:
            first = f"{table}: 1 rank" if n > 1 else None
            name = "1 rank" if n == 1 else f"{n} ranks"
            rungs.append(Rung(table, name, flags, batch * n if grows else batch, first, ranks=n))
    ddp = f"weak scaling: {nproc} ranks"
    for name, more in {
        "one bucket": ("--bucket_cap_mb=1048576",),  # gradients leave when the backward pass is over
        "buckets of 1 MiB": ("--bucket_cap_mb=1",),
        "no broadcast of buffers": ("--disable_broadcast_buffers",),
        "no gradients sent": ("--noddp",),
    }.items():
        rungs.append(Rung("data parallel", name, (*flags, *more), batch * nproc, ddp, ranks=nproc))
    # DataParallel copies the model in each step, which cannot be compiled, and its threads know no bf16.
    plain = (*flags, "--no_enable_jit", "--amp_mode=none")
    rungs.append(Rung("data parallel", "not compiled", plain, batch * nproc, ddp, ranks=nproc, needs="2 GPUs"))
    script, below = DATA_PARALLEL, rungs[-1].key
    rungs.append(Rung("data parallel", "DataParallel", plain, batch * nproc, below, script, needs="2 GPUs"))

    tp, cp = f"--tensor_parallel={nproc}", f"--context_parallel={nproc}"
    grids = {
        "1 rank": (),
        f"tp {nproc}": (tp,),
        f"tp {nproc}, no sequence parallelism": (tp, "--no_sequence_parallel"),
        f"cp {nproc}": (cp,),
        f"cp {nproc}, Ulysses": (cp, "--cp_attention=ulysses"),
    }
    if nproc % 4 == 0:
        both = ("--tensor_parallel=2", f"--context_parallel={nproc // 2}")
        grids |= {
            f"tp 2 x cp {nproc // 2}, {order}": (*both, f"--parallel_order={order}")
            for order in ("tp-cp-dp", "cp-tp-dp")
        }
    for name, more in grids.items():
        one = "model parallel: 1 rank" if more else None
        ranks = nproc if more else 1
        rungs.append(Rung("model parallel", name, (*flags, *more), batch, one, "train_mp.py", ranks))
    return rungs


def launch(rung: Rung) -> tuple[list[str], dict[str, str]]:
    """Return the command of a rung and its environment: torchrun here, srun inside a job."""
    script, cpus = [sys.executable, rung.script], len(os.sched_getaffinity(0)) // rung.ranks
    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        there = int(os.environ.get("SLURM_NNODES", 1))
        nodes = min(-(-rung.ranks // (torch.cuda.device_count() or 1)), there)
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", cpus)) // -(-rung.ranks // nodes)
        share = [f"--nodes={nodes}", f"--ntasks={rung.ranks}", f"--cpus-per-task={max(cpus, 1)}"]
        command = ["srun", "--export=ALL", "--overlap", *share, *script]
    elif rung.ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={rung.ranks}"]
        command = [sys.executable, *torchrun, rung.script]
    else:
        command = script
    return command, {"OMP_NUM_THREADS": str(max(cpus, 1))} | dict(os.environ)


def run(rung: Rung, flags: list[str], iterations: int, samples: int, folder: Path, limit: float) -> dict[str, Any]:
    """Train, and return what the run recorded.

    {"skipped": reason} where machine or data cannot do it, {"failed": reason} where the run did not come to its end.

    Args:
        iterations: of an epoch, at the most.
        samples: there are for training.
        folder: for the run's files.
        limit: seconds that it may take.
    """
    if missing := lacks(rung.needs, rung.ranks):
        return {"skipped": missing}
    iterations = min(iterations, samples // rung.batch)
    if iterations < LEAST:
        return {"skipped": f"{samples} samples are less than {LEAST} batches of {rung.batch}"}
    shutil.rmtree(folder, ignore_errors=True)
    command, env = launch(rung)
    epoch = [f"--limit_nsamples={iterations * rung.batch}", f"--limit_nsamples_val={rung.batch}"]
    size = ["--local_batch_size=None", f"--global_batch_size={rung.batch}", f"--num_iters={EPOCHS * iterations}"]
    more = ["--checkpoint_every=None", "--resume=none", f"--expdir={folder}"]
    try:
        code, _, errors = call([*command, *flags, *rung.flags, *size, *epoch, *more], env, limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit / 60:g} minutes"}
    if code:
        return {"failed": reason(errors)}
    (path,) = folder.glob("*/*/*/metrics.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = [event for event in events if event["event"] == "epoch"]
    shutil.rmtree(folder)
    seconds = rung.batch / last["samples_per_sec"]
    return {
        "samples_per_sec": last["samples_per_sec"],
        "memory_gb": last["peak_memory_gb"],
        "mfu": None if rung.script == DATA_PARALLEL else last["mfu"],  # which counts one device
        "data_wait_frac": last["data_wait_frac"],
        "first_iteration_sec": first["first_iteration_sec"],
        "iteration_sec": seconds,
        "losses": [event["loss"] for event in events if event["event"] == "step"],
    }


class Runs:
    """The runs of a ladder, each on the disk when it is done.

    Raises ValueError where the file holds those of another ladder.
    """

    def __init__(self, path: Path, setup: dict[str, Any]):
        self.path, self.done = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found, *runs = [json.loads(line) for line in lines if line.endswith("\n")] or [setup]
        if found != setup:
            changed = ", ".join(name for name in setup if found.get(name) != setup[name])
            raise ValueError(f"{path} is of another ladder ({changed} changed): give another --json, or --fresh")
        runs = [run for run in runs if "failed" not in run]
        self.done = {(run["rung"], run["round"]): run for run in runs}
        # Anew, because the last line may be half a line.
        path.write_text("".join(json.dumps(line) + "\n" for line in (setup, *runs)))

    def add(self, rung: Rung, number: int, result: dict[str, Any]) -> None:
        line = {"rung": rung.key, "round": number, **result}
        self.done[rung.key, number] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, rung: Rung) -> list[dict[str, Any]]:
        """Return those of a rung, round by round."""
        return [line for (key, _), line in sorted(self.done.items(), key=lambda item: item[0][1]) if key == rung.key]


def why_not(results: list[dict[str, Any]]) -> str | None:
    """Return why a rung has no figures, if it has none."""
    if not results:
        return "not run"
    return next((f"{word}: {r[word]}" for r in results for word in ("skipped", "failed") if word in r), None)


def noise(rungs: list[Rung], runs: Runs) -> float | None:
    """Return how far rungs that are one and the same command lie apart: the logarithm of their ratio, at the most."""
    apart = []
    for one, other in itertools.combinations(rungs, 2):
        same = all(getattr(one, name) == getattr(other, name) for name in ("script", "flags", "batch", "ranks"))
        if same and (ratios := gains(runs, one, other)):
            apart.append(abs(math.log(statistics.median(ratios))))
    return max(apart, default=None)


def gains(runs: Runs, rung: Rung, below: Rung) -> list[float]:
    """Return the ratios of speed to the rung below, round by round."""
    pairs = zip(runs.of(rung), runs.of(below))
    return [a["samples_per_sec"] / b["samples_per_sec"] for a, b in pairs if "losses" in a and "losses" in b]


def loss_change(runs: Runs, rung: Rung, baseline: Rung) -> float | None:
    """Return the largest relative difference of a loss from the baseline's, where both see the same batches."""
    if rung.batch != baseline.batch:
        return None
    a, b = runs.of(rung)[0]["losses"], runs.of(baseline)[0]["losses"]
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def evaluate(rungs: list[Rung], runs: Runs) -> list[dict[str, Any]]:
    """Return what the report tells of each rung: medians, and ranges over the rounds."""
    by_key = {rung.key: rung for rung in rungs}

    def below(rung: Rung) -> Rung | None:
        """The next rung below that this machine could do."""
        under = by_key.get(rung.below)
        return below(under) if under and why_not(runs.of(under)) else under

    baseline, apart = by_key["steps: baseline"], noise(rungs, runs)
    rows = []
    for rung in rungs:
        results = runs.of(rung)
        row = {"table": rung.table, "name": rung.name, "ranks": rung.ranks, "batch": rung.batch, "script": rung.script}
        row["flags"] = " ".join(rung.flags)
        if reason_why := why_not(results):
            rows.append(row | {"without": reason_why})
            continue
        speeds = [result["samples_per_sec"] for result in results]
        row |= {"samples_per_sec": statistics.median(speeds), "range": [min(speeds), max(speeds)]}
        for name in ("memory_gb", "mfu", "data_wait_frac"):
            values = [result[name] for result in results if result[name] is not None]
            row[name] = statistics.median(values) if values else None
        # What compiles does so in the first iteration.
        compiling = statistics.median(r["first_iteration_sec"] - r["iteration_sec"] for r in results)
        row["compile_sec"] = max(compiling, 0.0)
        if not why_not(runs.of(baseline)):
            row["loss_change"] = loss_change(runs, rung, baseline)
        if (under := below(rung)) and (ratios := gains(runs, rung, under)):
            low, gain, high = min(ratios), statistics.median(ratios), max(ratios)
            row |= {"below": under.name, "gain": gain, "gain_range": [low, high]}
            row["is_noise"] = low <= 1 <= high or (apart is not None and abs(math.log(gain)) <= apart)
        rows.append(row)
    return rows


def chosen(rungs: list[Rung], names: list[str] | None) -> list[Rung]:
    """Return the baseline, the rungs that have one of the names in theirs, and those that they are compared with.

    Raises ValueError for a name that no rung has.
    """
    if names is None:
        return rungs
    for name in names:
        if not any(name.lower() in rung.key.lower() for rung in rungs):
            raise ValueError(f"no rung is called {name!r}: take words of {', '.join(rung.key for rung in rungs)}")
    by_key = {rung.key: rung for rung in rungs}
    keep = {rung.key for rung in rungs[:2]}  # the baseline, and its noise
    for rung in rungs:
        if any(name.lower() in rung.key.lower() for name in names):
            keep.add(rung.key)
            while rung.below:  # down to one that this machine can do
                rung = by_key[rung.below]
                keep.add(rung.key)
                if not lacks(rung.needs, rung.ranks):
                    break
    return [rung for rung in rungs if rung.key in keep]


def commit() -> str:
    """Return the commit in use, and whether the code differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        code = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py", "config"]).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + " and changes" * bool(code)


def describe(config: Config, flags: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return all that two runs must have in common to be compared."""
    return {
        "flags": flags,
        "iterations": args.iterations,
        "nproc": args.nproc,
        "rungs": args.rungs or "all",
        "device": device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "commit": commit(),
        "configuration": json.loads(json.dumps(dataclasses.asdict(config))),  # as it comes back from a file
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rungs", nargs="+", help="words of the rungs to run, such as bf16 compile; default: all")
    parser.add_argument("--nproc", type=int, default=max(torch.cuda.device_count(), 1), help="ranks, at the most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20, help="of an epoch")
    parser.add_argument("--minutes", type=float, default=20, help="a run that takes longer is skipped")
    parser.add_argument("--json", type=Path, help="file to write; default: runs/ladder_<section>.json")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of an interrupted ladder")
    parser.add_argument("--update_readme", action="store_true", help="rewrite the table in README.md, and its record")
    args, flags = parser.parse_known_args(argv)
    config = load_config(flags)[0].with_batches(1)
    folder = "benchmarks/results" if args.update_readme else "runs"
    record = args.json or ROOT / folder / f"ladder_{config.config}.json"
    rungs = chosen(all_rungs(args.nproc, config.global_batch_size), args.rungs)
    samples = len(WeatherData(replace(config, stage_dir=None, data_loader_config="pytorch")).train_pairs)
    setup = describe(config, flags, args)
    path = record.with_suffix(".runs.jsonl")
    if args.fresh:
        path.unlink(missing_ok=True)
    runs = Runs(path, setup)
    if all((rung.key, number) in runs.done or runs.of(rung) for rung in rungs for number in range(args.repeats)):
        print(f"All of it was measured: {path} has the runs, and --fresh measures anew.")
    for number in range(args.repeats):
        for rung in rungs:
            if (rung.key, number) in runs.done:
                continue
            if runs.of(rung) and why_not(runs.of(rung)):  # it will not do better in the next round
                continue
            result = run(rung, flags, args.iterations, samples, record.with_suffix(".runs"), 60 * args.minutes)
            runs.add(rung, number, result)
            told = why_not([result]) or f"{result['samples_per_sec']:.2f} samples/s"
            print(f"{number + 1}/{args.repeats}  {rung.key:50} {told}", flush=True)
    rows = evaluate(rungs, runs)
    about = {name: value for name, value in setup.items() if name != "configuration"}
    ladder_report.write(record, rows, about | {"repeats": args.repeats, "config": config.config})
    print(record.with_suffix(".md").read_text())
    if args.update_readme:
        ladder_report.update(ROOT / "README.md", record)
    if failed := why_not(runs.of(rungs[0])):
        raise ValueError(f"the baseline has no figures ({failed}): give flags with which it runs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"ladder.py: error: {error}")
