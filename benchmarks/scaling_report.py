"""What benchmarks/scaling.py found: tables and a picture. `make docs` copies the tables to docs/scaling.md."""

import itertools
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from utils.measure.tables import markdown

GOALS = {"weak": 0.90, "strong": 0.70}
SAMPLES = 58_000  # of forty years, every six hours: more are no batch


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
            f"{ranks:,}", row["title"], _digits(1e3 * row["seconds"], 4), _digits(row["samples"] / row["seconds"], 4),
            f"{row['efficiency']:.2f}", row["limit"], f"{row['bytes'] / 2**30:.3g}", f"{row['read'] / 1e9:.2g}",
            f"{cost['saved'] / 1e9:.3g}", _digits(1e3 * cost["stall"], 2), _duration(cost["interval"]),
            f"{cost['lost']:.2%}", *_hours(row),
        ])  # fmt: skip
    return markdown(head.split(", "), lines)


def _hours(row: dict[str, Any]) -> list[str]:
    """Return the hours and GPU hours of a run; a dash for a batch that is larger than the data."""
    hours = row["cost"]["hours"]
    if row["samples"] > SAMPLES:
        return ["–", "–"]
    return ["never", "never"] if hours in (None, math.inf) else [_digits(hours, 3), _digits(hours * row["ranks"], 3)]


def _digits(x: float, n: int) -> str:
    """Return a number with n digits or, where it has more before the point, all of these."""
    return f"{x:,.0f}" if abs(x) >= 10 ** (n - 1) else f"{x:.{n}g}"


def _duration(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return ""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def mends_table(rows: list[dict[str, Any]]) -> str:
    """Return what would make a job faster, the best first."""
    return markdown(
        ["", "times as fast", "efficiency"], ([x["mend"], f"{x['speed']:.2f}", f"{x['efficiency']:.2f}"] for x in rows)
    )


def all_mends(cases: dict[str, list[dict[str, Any]]]) -> str:
    """Return what would make each of some jobs faster, with its name."""
    return "\n\n".join(f"**{name}**\n\n{mends_table(rows)}" for name, rows in cases.items())


def section_tables(by_machine: dict[str, Any]) -> str:
    """Return all that a section's jobs take, hold and cost."""
    return "\n\n".join(
        f"**{kind} scaling, {machine}**\n\n{detail_table(rows)}"
        for machine, kinds in by_machine.items()
        for kind, rows in kinds.items()
    )


def judged_table(cases: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return what other strategies would bring: time and memory, over those of the fastest layout."""
    names = dict.fromkeys(name for of_case in cases.values() for name in of_case)
    rows = []
    for name in names:
        found = (of_case.get(name) for of_case in cases.values())
        rows.append([name, *(f"{x['time']:.2f} / {x['memory']:.2f}" if x else "" for x in found)])
    return markdown(["time / memory, at best", *cases], rows)


def draw(studied: dict[str, Any], path: Path) -> None:
    """Draw efficiency over GPUs: a row of panels for each kind, one for each machine."""
    machines = list(next(iter(studied.values())))
    figure = Figure(figsize=(5 * len(machines), 7), layout="constrained")
    panels = figure.subplots(len(GOALS), len(machines), squeeze=False, sharex=True, sharey=True)
    for (kind, goal), row in zip(GOALS.items(), panels):
        for machine, axes in zip(machines, row):
            for marker, (section, found) in zip(itertools.cycle("os^Dv*"), studied.items()):
                rows = found[machine][kind]
                axes.plot([x["ranks"] for x in rows], [x["efficiency"] for x in rows], marker=marker, label=section)
            axes.set(xscale="log", title=f"{kind} scaling, {machine}")
            axes.set_ylim(bottom=0)
            axes.axhline(goal, color="grey", lw=1, ls="--")
            axes.text(0, goal, f" goal {goal:.2f}", fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
            axes.set_xticks([x["ranks"] for x in rows], [f"{x['ranks']:,}" for x in rows], fontsize=8)
            axes.minorticks_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("efficiency")
    for axes in panels[-1]:
        axes.set_xlabel("ranks, one a GPU")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
