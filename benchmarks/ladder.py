"""The tutorial's optimisations, one after another and each alone: what does each bring on this machine?

    python benchmarks/ladder.py --config=demo                                 all that this machine can do
    python benchmarks/ladder.py --config=base --depth=2 --rungs bf16 compile  some of it; flags of train.py go along
    python benchmarks/ladder.py --config=base --nproc 4                       on up to 4 ranks: torchrun, in a job srun

Each rung is a run in a process of its own: two epochs, of which the second counts. All rungs run once, then all once
more, `--repeats` times: a machine that slows down meanwhile slows all of them. A gain is the median of the ratios to
the rung below, each within one round. It is noise where these ratios lie on both sides of 1, or where it is less than
twice its standard error, which rungs that are one and the same command tell. What the machine cannot do is skipped,
with the reason.

Writes what it found to `--json`, and beside it as .md (tables), .png (bars) and .html (all in one page). Interrupted,
the same command goes on where it stopped, and tries again what failed: .runs.jsonl has what was done.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import ladder_report  # noqa: E402
from benchmarks.harness.call import all_devices, call, check_place, end_on_signals, launch, reason, stay_on  # noqa: E402
from benchmarks.harness.command import errors_in_one_line, parser_of  # noqa: E402
from benchmarks.harness.record import commit_of_code, device_name  # noqa: E402
from benchmarks.rungs.rungs import AGAIN, DATA_PARALLEL, Rung, all_rungs, chosen, lacks  # noqa: E402
from benchmarks.rungs.runs import Runs, evaluate, standard_error, why_not  # noqa: E402
from utils.config.reader import load_config  # noqa: E402
from utils.config.settings import Config  # noqa: E402
from utils.data.dataset import WeatherData  # noqa: E402
from utils.device import cores_in_reach  # noqa: E402
from utils.files import read_events  # noqa: E402

PAGE = ROOT / "docs/ladder.md"
EPOCHS = 2
LEAST = 5  # iterations of an epoch: the first of them waits for the reader to start


def run(rung: Rung, flags: list[str], iterations: int, samples: int, folder: Path, limit: float) -> dict[str, Any]:
    """Train, and return what the run recorded.

    {"skipped": reason} where machine, data or model cannot do it, {"failed": reason} where the run broke off.

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
    command, env = launch(rung.script, rung.ranks)
    env |= dict(text.split("=", 1) for text in rung.env)
    epoch = [f"--limit_nsamples={iterations * rung.batch}", f"--limit_nsamples_val={rung.batch}"]
    size = ["--local_batch_size=None", f"--global_batch_size={rung.batch}", f"--num_iters={EPOCHS * iterations}"]
    more = ["--checkpoint_every=None", "--time_limit=None", "--resume=none", "--tracker=none", "--profile=none"]
    try:
        code, _, errors = call([*command, *flags, *rung.flags, *size, *epoch, *more, f"--expdir={folder}"], env, limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit / 60:g} minutes"}
    if code:
        why = reason(errors)
        return {"skipped" if ".py: error: " in why else "failed": why}
    found = list(folder.glob("*/*/*/metrics.jsonl"))
    if not found:
        return {"failed": f"the run is over, and no metrics.jsonl is in {folder}"}
    events = read_events(found[0])
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


def describe(config: Config, flags: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return all that two runs must have in common to be compared."""
    return {
        "flags": flags,
        "iterations": args.iterations,
        "nproc": args.nproc,
        "rungs": args.rungs or "all",
        "device": device_name(),
        "cores": len(cores_in_reach()),
        "torch": torch.__version__,
        "commit": commit_of_code(),
        "configuration": json.loads(json.dumps(dataclasses.asdict(config))),  # as it comes back from a file
    }


def main(argv: list[str]) -> None:
    parser = parser_of(__doc__, "train.py")
    parser.add_argument("--rungs", nargs="+", help="words of the rungs to run, such as bf16 compile; default: all")
    parser.add_argument("--nproc", type=int, help="ranks, at the most; default: one a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20, help=f"of an epoch: {LEAST} or more")
    parser.add_argument("--minutes", type=float, default=20, help="a run that takes longer is skipped")
    parser.add_argument("--json", type=Path, help="file to write; default: runs/ladder_<section>.json")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of an interrupted ladder")
    parser.add_argument("--update_readme", action="store_true", help="rewrite docs/ladder.md, and its record")
    args, flags = parser.parse_known_args(argv)
    check_place()
    if not any(flag.split("=")[0] == "--config" for flag in flags):
        flags = ["--config=demo", *flags]  # the built-in data
    config = load_config(flags)[0].with_batches(1)
    stay_on(config.device)
    args.nproc = all_devices() if args.nproc is None else args.nproc
    for name, least in (("nproc", 1), ("repeats", 1), ("iterations", LEAST)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}: it takes {least} or more")
    folder = "benchmarks/results" if args.update_readme else "runs"
    record = args.json or ROOT / folder / f"ladder_{config.config}.json"
    rungs = chosen(all_rungs(args.nproc, config.global_batch_size, config.patch_size), args.rungs)
    if args.update_readme:
        ladder_report.check_place(PAGE, record)
    samples = len(WeatherData(replace(config, stage_dir=None, data_loader_config="pytorch")).train_pairs)
    setup = describe(config, flags, args)
    path = record.with_suffix(".runs.jsonl")
    if args.fresh:
        path.unlink(missing_ok=True)
    runs = Runs(path, setup)
    in_turn = sorted(rungs, key=lambda rung: rung.key == AGAIN)  # which comes last: a machine drifts
    for number in range(args.repeats):
        for rung in in_turn:
            if (rung.key, number) in runs.done:
                continue
            if runs.of(rung) and why_not(runs.of(rung)):  # it will not do better in the next round
                continue
            result = run(rung, flags, args.iterations, samples, record.with_suffix(".runs"), 60 * args.minutes)
            runs.add(rung, number, result)
            if rung is rungs[0] and "losses" not in result:
                raise ValueError(f"the baseline has no figures ({why_not([result])}): give flags with which it runs")
            told = why_not([result]) or f"{result['samples_per_sec']:.2f} samples/s"
            print(f"{number + 1}/{args.repeats}  {rung.key:50} {told}", flush=True)
    rows = evaluate(rungs, runs)
    about = {name: value for name, value in setup.items() if name != "configuration"}
    about |= {"repeats": args.repeats, "config": config.config, "standard_error": standard_error(rungs, runs)}
    ladder_report.write(record, rows, about)
    print(record.with_suffix(".md").read_text())
    if args.update_readme:
        subprocess.run([sys.executable, ROOT / "docs/make.py"], check=True)


if __name__ == "__main__":
    end_on_signals()
    with errors_in_one_line():
        main(sys.argv[1:])
