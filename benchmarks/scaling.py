"""How far does it scale, and what would it cost? Weak and strong scaling of four models, from 4 to 16,384 GPUs.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Nothing is run: each point is the fastest layout that the planner finds. Weak: 16 samples a GPU. Strong: 64 samples.
A job's efficiency is its speed for each GPU, over that of the first job if it waited for no file.

    python benchmarks/scaling.py --machine machine.json --sections demo --ranks 1 2 --amp_mode none --json mine.json

Other machines, sections of config/ViT.yaml, and counts of ranks; flags of train_mp.py go along.
"""

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.command import errors_in_one_line, parser_of
from benchmarks.harness.record import write_record
from benchmarks.plan import title
from benchmarks.planner import strategies
from benchmarks.planner.layouts import KEYS
from benchmarks.planner.machine import known, load_machine
from benchmarks.planner.outlook import Outlook
from benchmarks.planner.ranking import best_of, bytes_of_sample, outlooks, outlooks_of, sketches
from benchmarks.planner.study import MENDS, Job, best, checked, parameters_of, without_files
from benchmarks.planner.whole_run import whole_run
from benchmarks.scaling_report import GOALS, all_mends, draw, judged_table, section_tables
from utils.config.reader import load_config

SECTIONS = ["bs64_opt", "mp", "mp_patch4", "hires"]
MACHINES = ["perlmutter", "h100-ndr"]
RANKS = [4, 16, 64, 256, 1024, 4096, 16384]
WEAK, STRONG = 16, 64  # samples of a rank, and of all
STEPS = 30_000
MENDED = [("bs64_opt", "weak"), ("mp", "weak"), ("mp", "strong")]  # where it is asked what would help
JUDGED = 64  # ranks on which other strategies are judged
STAGES = 4


def row_of(job: Job, outlook: Outlook, ideal: Outlook, parameters: int) -> dict[str, Any]:
    """Return what a job takes, holds, reads and costs.

    Args:
        ideal: the first job, if it waited for no file.
        parameters: of the model.
    """
    cost, nodes = whole_run(outlook, job.machine, parameters, STEPS), job.machine.nodes(job.ranks)
    computing = outlook.seconds - outlook.parts["reading"]
    return {
        "ranks": job.ranks, "title": title(outlook.layout, job.config), "seconds": outlook.seconds,
        "efficiency": ideal.pace * ideal.layout.ranks / (outlook.pace * job.ranks), "samples": outlook.samples,
        "limit": outlook.limit, "bytes": outlook.bytes, "parts": outlook.parts, "cost": dataclasses.asdict(cost),
        "read": outlook.samples * bytes_of_sample(job.config) / computing / nodes,
    }  # fmt: skip


def mends(job: Job, first: Job) -> list[dict[str, Any]]:
    """Return what would make a job faster, the best first: the speed, and the efficiency with the same for the first.

    Args:
        first: the job that `job` is compared with. It waits for no file.
    """
    now, ideal, *changed = best([job, first, *(change(x) for change in MENDS.values() for x in (job, first))])
    rows = [("as it is", now, ideal), *zip(MENDS, changed[::2], changed[1::2])]
    found = [
        {"mend": name, "speed": now.pace / x.pace, "efficiency": of.pace * first.ranks / (x.pace * job.ranks)}
        for name, x, of in rows
    ]
    return sorted((x for x in found if x["speed"] > 1.005 or x is found[0]), key=lambda x: -x["speed"])


def judged(job: Job) -> dict[str, dict[str, float]]:
    """Return what other strategies would bring a job at their best; nothing where it fits in no way."""
    job = without_files(job)
    ours, with_tp = best([job])[0], _with_tp(job)
    found = {}
    if ours is not None:
        piped = (strategies.pipeline(ours, *x) for x in _pipelines(job))
        if fitting := [x for x in piped if x.memory * ours.bytes <= job.room]:
            found |= {f"pipelines of {STAGES} stages": min(fitting, key=lambda x: x.time)}
        found |= {"moments on the host": strategies.offload(ours, job.machine)}
        found |= {"moments of 8 bits": strategies.smaller_moments(ours, strategies.EIGHT_BITS)}
        found |= {"factored moments": strategies.smaller_moments(ours, strategies.FACTORED)}
        if with_tp is not None:
            found |= {"tp 4, sent while it computes": strategies.overlapped(ours, with_tp)}
        found |= {"products of 8 bits": strategies.eight_bit_products(ours)}
    return {name: dataclasses.asdict(x) for name, x in found.items()}


def _with_tp(job: Job) -> Outlook | None:
    config = dataclasses.replace(job.config, tensor_parallel=4, context_parallel=1)
    given = frozenset({"tensor_parallel", "context_parallel"})
    with contextlib.suppress(ValueError):  # there is none
        return best_of(outlooks(config, given, job.machine, job.ranks), job.room)
    return None


def _pipelines(job: Job) -> Iterator[tuple[Outlook, Outlook, int, int]]:
    """Yield pipelines as `strategies.pipeline` takes them, with parts of each size, saving memory in each way."""
    samples = job.config.global_batch_size * STAGES // job.ranks
    sizes = [n for n in range(1, samples + 1) if samples % n == 0]
    alone = dataclasses.replace(checked(job).config, tensor_parallel=1, context_parallel=1)
    for saver in ("none", "mlp", "block"):
        config = dataclasses.replace(alone, activation_checkpoint=saver)
        (sketched,) = sketches(config, KEYS, (1, 1))
        for size in sizes:
            of_parts = [dataclasses.replace(config, global_batch_size=n * size, accumulation_steps=n) for n in (1, 2)]
            one, two = (next(outlooks_of(sketched, ours, KEYS, job.machine, 1)) for ours in of_parts)
            yield one, two, samples // size, STAGES


def jobs_of(section: str, flags: list[str], machines: list[str], counts: list[int]) -> dict[tuple[str, str, int], Job]:
    """Return all jobs of a section, by machine, kind of scaling and ranks. Raises ValueError for what is none."""
    config = load_config([f"--config={section}", *flags], chapter=2)[0]
    config = dataclasses.replace(config, local_batch_size=None)
    found = {}
    for machine, kind, ranks in itertools.product(machines, GOALS, counts):
        batch = WEAK * ranks if kind == "weak" else STRONG
        found[machine, kind, ranks] = Job(config, load_machine(machine), ranks).of_batch(batch)
        checked(found[machine, kind, ranks])
    return found


def study(section: str, jobs: dict[tuple[str, str, int], Job]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what all jobs of a section take, by machine and kind of scaling. Raises ValueError if a first fits not."""
    first = min(ranks for *_, ranks in jobs)
    start = {(machine, kind): without_files(job) for (machine, kind, ranks), job in jobs.items() if ranks == first}
    found = best([*start.values(), *jobs.values()])
    ideal = dict(zip(start, found))
    if unfit := [machine for (machine, _), outlook in ideal.items() if outlook is None]:
        raise ValueError(f"{section} does not fit on {first} rank(s) of {unfit[0]}: take more for the first job")
    parameters = parameters_of(next(iter(jobs.values())).config)
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for ((machine, kind, _), job), outlook in zip(jobs.items(), found[len(start) :]):
        of_kind = rows.setdefault(machine, {}).setdefault(kind, [])
        if outlook is not None:
            of_kind.append(row_of(job, outlook, ideal[machine, kind], parameters))
    return rows


def missed(rows: list[dict[str, Any]], kind: str) -> int | None:
    """Return on how many ranks a goal is missed first: in weak scaling on JUDGED or more."""
    reached = [row for row in rows if kind == "strong" or row["ranks"] >= JUDGED]
    return next((row["ranks"] for row in reached if row["efficiency"] < GOALS[kind]), None)


def parsed(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, "train_mp.py")
    parser.add_argument("--json", type=Path, required=True, help="file to write, with a picture beside it")
    parser.add_argument("--machine", nargs="+", default=MACHINES, help=f"files of make doctor, or of {known()}")
    parser.add_argument("--sections", nargs="+", default=SECTIONS, help="of config/ViT.yaml")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="of jobs, the smallest first")
    args, flags = parser.parse_known_args(argv)
    if args.ranks[0] < 1 or args.ranks != sorted({*args.ranks}):
        raise ValueError(f"--ranks {' '.join(map(str, args.ranks))}: take counts that grow, the first 1 or more")
    return args, flags


def main(argv: list[str]) -> None:
    args, flags = parsed(argv)
    jobs = {section: jobs_of(section, flags, args.machine, args.ranks) for section in args.sections}
    studied = {}
    for section, of_section in jobs.items():
        studied[section] = study(section, of_section)
        print(f"\n# {section}\n\n{section_tables(studied[section])}", flush=True)
    helped, cases = {}, {}
    for (section, kind), machine in itertools.product(MENDED, args.machine):
        if section in studied and (ranks := missed(studied[section][machine][kind], kind)):
            of_section, name = jobs[section], f"{section}, {kind} scaling, {ranks} ranks of {machine}"
            first = without_files(of_section[machine, kind, args.ranks[0]])
            helped[name] = mends(of_section[machine, kind, ranks], first)
    newest = args.machine[-1]
    for section, kind in itertools.product(("mp", "hires"), GOALS):
        if job := jobs.get(section, {}).get((newest, kind, JUDGED)):
            cases[f"{section}, batch {job.config.global_batch_size:,}"] = judged(job)
    print(f"\n{all_mends(helped)}")
    if cases:
        print(f"\n{JUDGED} ranks of {newest}\n\n{judged_table(cases)}")
    write_record(args.json, figures_of(studied), {}, study=studied, mends=helped, judged=cases, judged_on=newest)
    draw(studied, args.json.with_suffix(".png"))


def figures_of(studied: dict[str, Any]) -> dict[str, float]:
    """Return the figures that a page may name."""
    found = {}
    for (section, by_machine), kind in itertools.product(studied.items(), GOALS):
        for machine, kinds in by_machine.items():
            for row in kinds[kind]:
                name, hours = f"{section}, {kind}, {row['ranks']} of {machine}", row["cost"]["hours"]
                found |= {f"{name}: efficiency": row["efficiency"], f"{name}: GB/s to read": row["read"] / 1e9}
                found |= {f"{name}: hours": hours, f"{name}: GPU hours": hours * row["ranks"]}
                found |= {f"{name}: lost": row["cost"]["lost"], f"{name}: stall, ms": 1e3 * row["cost"]["stall"]}
    return found


if __name__ == "__main__":
    with errors_in_one_line():
        main(sys.argv[1:])
