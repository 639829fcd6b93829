"""How far does it scale, and what would it cost? Weak and strong scaling of four models, from 4 to 16,384 GPUs.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Nothing is run: each point is the best layout that the planner finds. Weak: 16 samples a GPU. Strong: 64 samples in all.
A job's efficiency is its speed for each GPU, over that of 4 GPUs that never wait for files.

--machine takes other machines than those two, --sections other sections of config/ViT.yaml, --ranks other counts.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.figure import Figure

from benchmarks.harness.command import errors_in_one_line
from benchmarks.harness.record import write_record
from benchmarks.plan import title
from benchmarks.planner import strategies
from benchmarks.planner.machine import known, load_machine
from benchmarks.planner.outlook import Outlook
from benchmarks.planner.ranking import best_of, bytes_of_sample, outlook_of, outlooks
from benchmarks.planner.study import MENDS, Job, best, parameters_of, without_files
from benchmarks.planner.whole_run import whole_run
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.measure.tables import markdown

SECTIONS = {"base": "bs64_opt", "mp": "mp", "mp_patch4": "mp_patch4", "hires": "hires"}
MACHINES = ["perlmutter", "h100-ndr"]
RANKS = [4, 16, 64, 256, 1024, 4096, 16384]
BATCH = 64  # of the first job
STEPS = 30_000
GOALS = {"weak": 0.90, "strong": 0.70}
JUDGED = 64  # ranks on which other strategies are judged


def batch_of(kind: str, ranks: int, first: int) -> int:
    """Return the samples of a step, where the job on `first` ranks has BATCH."""
    return BATCH * ranks // first if kind == "weak" else BATCH


def row_of(job: Job, outlook: Outlook, ideal: Outlook, first: int) -> dict[str, Any]:
    """Return what a job takes, holds, reads and costs.

    Args:
        ideal: of the job on `first` ranks that waits for no file.
    """
    cost = whole_run(outlook, job.machine, parameters_of(job.config), STEPS)
    nodes = -(-job.ranks // job.machine.per_node)
    computing = outlook.seconds - outlook.parts["reading"]
    return {
        "ranks": job.ranks, "title": title(outlook.layout), "seconds": outlook.seconds, "samples": outlook.samples,
        "efficiency": ideal.pace * first / (outlook.pace * job.ranks), "limit": outlook.limit,
        "bytes": outlook.bytes, "parts": outlook.parts,
        "read": outlook.samples * bytes_of_sample(job.config) / computing / nodes, "cost": dataclasses.asdict(cost),
    }  # fmt: skip


def failing(rows: list[dict[str, Any]], goal: float) -> dict[str, Any] | None:
    """Return the first job that misses a goal, if one does."""
    return next((row for row in rows if row["efficiency"] < goal), None)


def mends(job: Job, first: Job) -> list[dict[str, Any]]:
    """Return what would make a job faster, the best first: the speed, and the efficiency with the same for the first.

    Args:
        first: the job that `job` is compared with. It waits for no file.
    """
    jobs = [change(x) for change in MENDS.values() for x in (job, first)]
    now, ideal, *mended = best([job, first, *jobs])
    found = [{"mend": "as it is", "speed": 1.0, "efficiency": ideal.pace * first.ranks / (now.pace * job.ranks)}]
    for name, x, ideal in zip(MENDS, mended[::2], mended[1::2]):
        speed = now.pace / x.pace
        if speed > 1.005:
            efficiency = ideal.pace * first.ranks / (x.pace * job.ranks)
            found.append({"mend": name, "speed": speed, "efficiency": efficiency})
    return sorted(found, key=lambda x: x["speed"])[::-1]


def _alone(job: Job, stages: int) -> Iterator[Config]:
    """Yield the configurations of one rank that passes all samples of a pipeline, in parts of each size."""
    samples = job.config.global_batch_size * stages // job.ranks
    for parts in (n for n in range(1, samples + 1) if samples % n == 0):
        yield dataclasses.replace(job.config, global_batch_size=samples, accumulation_steps=parts)


def judged(job: Job) -> dict[str, dict[str, float]]:
    """Return what other strategies would bring a job at most."""
    machine, stages = job.machine, 4
    ours = best([job])[0]
    with_tp = dataclasses.replace(job.config, tensor_parallel=4)
    tp4 = best_of(outlooks(with_tp, frozenset({"tensor_parallel", "context_parallel"}), machine, job.ranks), job.room)
    pipelines = [strategies.pipeline(ours, outlook_of(config, machine, 1), stages) for config in _alone(job, stages)]
    found = {
        "pipelines of 4 stages": min(pipelines, key=lambda x: x.time),
        "the optimiser on the host": strategies.offload(ours, machine),
        "moments of 8 bits": strategies.smaller_moments(ours, strategies.EIGHT_BITS),
        "factored moments": strategies.smaller_moments(ours, strategies.FACTORED),
        "tp 4, sent while it computes": strategies.overlapped(ours, tp4),
        "products of 8 bits": strategies.eight_bit_products(ours),
    }
    return {name: dataclasses.asdict(x) for name, x in found.items()}


def study(sections: dict[str, str], machines: list[str], counts: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each section what all its jobs take, by machine and kind of scaling."""
    first = counts[0]
    for name, section in sections.items():
        config = load_config([f"--config={section}"], chapter=2)[0]
        config = dataclasses.replace(config, local_batch_size=None)
        jobs = {
            (machine, kind, ranks): Job(config, load_machine(machine), ranks).of_batch(batch_of(kind, ranks, first))
            for machine in machines
            for kind in GOALS
            for ranks in counts
        }
        ideals = [without_files(jobs[machine, "weak", first]) for machine in machines]
        found = best([*ideals, *jobs.values()])
        ideal = dict(zip(machines, found))
        rows: dict[str, Any] = {machine: {kind: [] for kind in GOALS} for machine in machines}
        for ((machine, kind, _), job), outlook in zip(jobs.items(), found[len(machines) :]):
            if ideal[machine] is None:
                raise ValueError(f"{name} does not fit on {first} ranks of {machine}: take more for the first job")
            if outlook is not None:
                rows[machine][kind].append(row_of(job, outlook, ideal[machine], first))
        yield name, rows


def mended(rows: dict[str, Any], sections: dict[str, str], counts: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Return what would help where a goal is missed: base from files on 64 GPUs, and mp with a batch of 64."""
    found, first = {}, counts[0]
    for section, kind in (("base", "weak"), ("mp", "strong")):
        for machine, of_machine in rows.get(section, {}).items():
            reached = [row for row in of_machine[kind] if kind == "strong" or row["ranks"] == JUDGED]
            if missed := failing(reached, GOALS[kind]):
                config = load_config([f"--config={sections[section]}", "--local_batch_size=None"], chapter=2)[0]
                job = Job(config, load_machine(machine), missed["ranks"]).of_batch(missed["samples"])
                start = without_files(dataclasses.replace(job, ranks=first).of_batch(BATCH))
                found[f"{section}, {kind}, {missed['ranks']} ranks of {machine}"] = mends(job, start)
    return found


def summary_table(studied: dict[str, Any], kind: str) -> str:
    """Return the efficiencies of all jobs of a kind, and what limits each."""
    counts = sorted({row["ranks"] for x in studied.values() for y in x.values() for row in y[kind]})
    lines = []
    for section, by_machine in studied.items():
        for machine, kinds in by_machine.items():
            told = {row["ranks"]: f"{row['efficiency']:.2f} {row['limit']}" for row in kinds[kind]}
            lines.append([section, machine, *(told.get(n, "") for n in counts)])
    return markdown(["section", "machine", *(f"{n:,}" for n in counts)], lines)


def detail_table(rows: list[dict[str, Any]]) -> str:
    """Return what each of some jobs takes, holds, reads, saves and loses."""
    head = (
        "GPUs, layout, ms a step, samples/s, efficiency, limit, GiB a GPU, GB/s a node to read, "
        "a save: GB, its stall in ms, every, lost to failures, hours, GPU hours"
    )
    lines = []
    for row in rows:
        cost, ranks = row["cost"], row["ranks"]
        lines.append([
            f"{ranks:,}", row["title"], f"{1e3 * row['seconds']:.4g}", f"{row['samples'] / row['seconds']:,.4g}",
            f"{row['efficiency']:.2f}", row["limit"], f"{row['bytes'] / 2**30:.3g}", f"{row['read'] / 1e9:.2g}",
            f"{cost['saved'] / 1e9:.3g}", f"{1e3 * cost['stall']:.2g}", _duration(cost["interval"]),
            f"{cost['lost']:.2%}", *(_figure(hours) for hours in (cost["hours"], (cost["hours"] or math.inf) * ranks)),
        ])  # fmt: skip
    return markdown(head.split(", "), lines)


def _figure(x: float | None) -> str:
    return "never" if x is None or math.isinf(x) else f"{x:,.3g}"


def _duration(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return ""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def mends_table(rows: list[dict[str, Any]]) -> str:
    """Return what would make a job faster, the best first."""
    return markdown(
        ["", "times as fast", "efficiency"], ([x["mend"], f"{x['speed']:.2f}", f"{x['efficiency']:.2f}"] for x in rows)
    )


def judged_table(cases: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return what other strategies would bring: time and memory, over those of the best layout."""
    names = next(iter(cases.values()))
    rows = ([name, *(f"{of[name]['time']:.2f} / {of[name]['memory']:.2f}" for of in cases.values())] for name in names)
    return markdown(["time / memory, at best", *cases], rows)


def draw(studied: dict[str, Any], path: Path) -> None:
    """Draw efficiency over GPUs: a row of panels for each kind, one for each machine."""
    machines = list(next(iter(studied.values())))
    figure = Figure(figsize=(5 * len(machines), 7), layout="constrained")
    panels = figure.subplots(len(GOALS), len(machines), squeeze=False, sharex=True, sharey=True)
    for (kind, goal), row in zip(GOALS.items(), panels):
        for machine, axes in zip(machines, row):
            for marker, (section, found) in zip("os^Dv*", studied.items()):
                rows = found[machine][kind]
                axes.plot([x["ranks"] for x in rows], [x["efficiency"] for x in rows], marker=marker, label=section)
            axes.axhline(goal, color="grey", lw=1, ls="--")
            axes.text(axes.get_xlim()[0], goal, f" goal {goal:.2f}", fontsize=8, va="bottom")
            axes.set(xscale="log", title=f"{kind} scaling, {machine}", ylim=(0, 1.1))
            axes.set_xticks([x["ranks"] for x in rows], [f"{x['ranks']:,}" for x in rows], fontsize=8)
            axes.minorticks_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("efficiency")
    for axes in panels[-1]:
        axes.set_xlabel("GPUs")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, required=True, help="file to write, with a picture beside it")
    parser.add_argument("--machine", nargs="+", default=MACHINES, help=f"files of make doctor, or of {known()}")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), help="of config/ViT.yaml")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="GPUs, the least first")
    args = parser.parse_args(argv)
    if args.ranks[0] < 1 or args.ranks != sorted({*args.ranks}):
        raise ValueError(f"--ranks {' '.join(map(str, args.ranks))}: take counts that grow, the first 1 or more")
    return args


def main(argv: list[str]) -> None:
    args = parsed(argv)
    sections = {name: SECTIONS.get(name, name) for name in args.sections}
    studied = {}
    for name, rows in study(sections, args.machine, args.ranks):
        studied[name] = rows
        for machine, kinds in rows.items():
            for kind, found in kinds.items():
                print(f"\n{name}, {kind} scaling, {machine}\n\n{detail_table(found)}", flush=True)
    helped = mended(studied, sections, args.ranks)
    for name, rows in helped.items():
        print(f"\n{name}\n\n{mends_table(rows)}", flush=True)
    cases = {}
    for name, batch in (("mp", BATCH), ("mp", BATCH * JUDGED // RANKS[0]), ("hires", BATCH)):
        if name in sections:
            config = load_config([f"--config={sections[name]}", "--local_batch_size=None"], chapter=2)[0]
            job = Job(config, load_machine(args.machine[0]), JUDGED).of_batch(batch)
            cases[f"{name}, batch {batch:,}"] = judged(job)
    if cases:
        print(f"\nOther strategies, on {JUDGED} GPUs of {args.machine[0]}\n\n{judged_table(cases)}")
    write_record(args.json, figures_of(studied, cases), {}, study=studied, mends=helped, judged=cases)
    draw(studied, args.json.with_suffix(".png"))


def figures_of(studied: dict[str, Any], cases: dict[str, Any]) -> dict[str, float]:
    """Return the figures that the page names, by name."""
    found = {}
    for section, by_machine in studied.items():
        for machine, kinds in by_machine.items():
            for kind, rows in kinds.items():
                for row in rows:
                    name = f"{section}, {kind}, {row['ranks']} of {machine}"
                    found[f"{name}: efficiency"] = row["efficiency"]
                    found[f"{name}: lost"] = row["cost"]["lost"]
                    found[f"{name}: hours"] = row["cost"]["hours"]
                    found[f"{name}: GPU hours"] = row["cost"]["hours"] * row["ranks"]
                    found[f"{name}: GB/s to read"] = row["read"] / 1e9
    for case, of in cases.items():
        for name, x in of.items():
            found |= {f"{case}, {name}: {key}": value for key, value in x.items()}
    return found


if __name__ == "__main__":
    with errors_in_one_line():
        main(sys.argv[1:])
