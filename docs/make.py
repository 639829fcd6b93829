"""Rewrite what README.md and the pages beside this file take from records, and say which are old: `make docs`.

    <!-- from: step.table -->                        until <!-- end -->: what TABLES has under this name
    <!-- figure: checkpoint; load, s; .1f -->        a figure of benchmarks/results/checkpoint.json, in this format
    <!-- figure: ensembles; A // B; .2f -->          the quotient of two
    <!-- figure: roofline; formula over flash; .0f --> computed from datasheets (docs/figures/roofline.py)

Where a figure's mark began a line, Markdown would end the paragraph there.
"""

import csv
import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    certificate,
    combinations,
    derivatives,
    ensembles,
    gpu_report,
    ladder_report,
    loader,
    memory,
    optimizers,
    plan,
    scaling,
    scaling_report,
    simulate,
    skill,
    step,
)
from docs.ages import ages  # noqa: E402
from docs.figures import roofline  # noqa: E402
from exercises import check as exercises  # noqa: E402
from tests.proofs import nightly  # noqa: E402
from utils.measure import advice  # noqa: E402
from utils.measure.tables import markdown  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"<!-- (from|figure): (.+?) -->(.*?)<!-- end -->", re.S)


@cache
def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def measured(name: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    return record(name)["figures"], record(name)["spread"]


def figure_of(source: str, name: str) -> float:
    """Return a figure of a record, or `A // B`, the quotient of two. Raises KeyError for what it has not."""
    figures = roofline.figures() if source == "roofline" else record(source)["figures"]
    over, _, under = name.partition(" // ")
    return figures[over] / figures[under] if under else figures[name]


def checkpoint_table() -> str:
    """Return what a save takes, each figure with its range."""
    figures, spread = measured("checkpoint")
    lines = ["| | median | range |", "|---|---|---|"]
    for told, name, form, unit in (
        ("a save where nothing else happens", "save alone, s", ".1f", " s"),
        ("its time, over that of writing the same bytes to one file", "save_over_raw_write", ".1f", " times"),
        ("a save while the model trains on the same two cores", "save while training, s", ".1f", " s"),
        ("the loop waits for such a save", "stall, s", ".2f", " s"),
        ("the same, as a share of the save", "stall_over_save", ".1%", ""),
        ("the loop waits for the first one, which allocates the memory", "first stall, s", ".1f", " s"),
        (
            "lost to slower steps beside it, as a share of the save",
            "steps slower while it saves, over the save",
            ".0%",
            "",
        ),
        ("what checksums add to the fastest save", "checksums, over a save", ".1%", ""),
        ("loading", "load, s", ".1f", " s"),
    ):
        low, high = (format(bound, form) for bound in spread[name])
        between = f"{low} to {high}" if low != high else ""
        lines.append(f"| {told} | {figures[name]:{form}}{unit} | {between} |")
    return "\n".join(lines)


def era5_skill() -> str:
    """Return chapter 6's table of real weather: RMSE by lead time, the model's with its interval."""
    with (ROOT / "docs/era5_djf/skill.csv").open() as file:
        found = {
            (row["source"], row["channel"], int(float(row["lead_hours"])), row["score"]): row
            for row in csv.DictReader(file)
            if row["weighting"] == "cos"
        }
    channels = {"msl": ("pressure [Pa]", 1, ".0f"), "vo850": ("vorticity [1e-6 s-1]", 1e6, ".1f")}
    head = ["hours"]
    for title, *_ in channels.values():
        head += [f"{title}: persistence", "model", "ratio", "climatology"]
    rows = []
    for hours in (6, 24, 48, 72, 96, 120):
        rows.append([str(hours)])
        for channel, (_, scale, form) in channels.items():
            for source, score in (
                ("persistence", "rmse"), ("model", "rmse"), ("model", "rmse_over_persistence"), ("climatology", "rmse"),
            ):  # fmt: skip
                row = found[source, channel, hours, score]
                factor, kind = (scale, form) if score == "rmse" else (1, ".2f")
                value, low, high = (format(factor * float(row[name]), kind) for name in ("value", "low", "high"))
                rows[-1].append(f"{value} ({low} to {high})" if source == "model" else value)
    return markdown(head, rows)


def fault_table() -> str:
    """Return what each fault left on each grid."""
    rows = record("faults")["faults"]
    return markdown(["fault", *next(iter(rows.values()))], ([fault, *row.values()] for fault, row in rows.items()))


def grid_table() -> str:
    """Return how far a run that moved to another grid is from one process."""
    rows = record("faults")["grids"]
    return markdown(["grid", "float64", "float32"], ([grid, *(f"{x:.1e}" for x in row)] for grid, row in rows.items()))


def layout_table() -> str:
    """Return how far runs that went on with another layout are from one process."""
    rows = record("faults")["layouts"]
    return markdown(["begun on", *rows], ([begun, *(f"{x:.1e}" for x in row.values())] for begun, row in rows.items()))


def storage_table() -> str:
    """Return how a run ended whose storage failed, by the error."""
    rows = record("storage")["storage"]
    return markdown(["", *next(iter(rows.values()))], ([row, *codes.values()] for row, codes in rows.items()))


def verdict() -> str:
    """Return how docs/example_logs/make.py's first run ended."""
    return "> " + json.loads((ROOT / "docs/example_logs/float32/report/report.json").read_text())["verdict"]


def section_tables(section: str) -> str:
    """Return what all jobs of a section take, hold and cost."""
    return scaling_report.section_tables(record("scaling")["study"][section])


def exercise_table() -> str:
    """Return what there is to do, after which part of a chapter."""
    rows = []
    for name in exercises.EXERCISES:
        checks = exercises.checks_of(name)
        page = checks.AFTER.partition("-")[0]
        after = f"[chapter {page}]({checks.AFTER})"
        rows.append([f"[{name}](../exercises/{name}.py)", exercises.title_of(name), after, str(checks.MINUTES)])
    return markdown(["file", "what to do", "after", "minutes"], rows)


def exercise_hints() -> str:
    """Return the hints of all exercises, each folded into the one before it."""
    lines = []
    for name in exercises.EXERCISES:
        lines += [f"### {name}", ""]
        hints = exercises.hints_of(name)
        for i, hint in enumerate(hints, 1):
            lines += [f"<details><summary>Hint {i} of {len(hints)}</summary>", "", hint, ""]
        lines += ["</details>"] * len(hints) + [""]
    return "\n".join(lines)


TABLES = {
    "advice.doctor": lambda: advice.table("doctor"),
    "advice.memory": lambda: advice.table("memory"),
    "advice.slow": lambda: advice.table("slow"),
    "certificate.grids": lambda: certificate.table(record("certificate")["grids"]),
    "certificate.modes": lambda: certificate.table(record("certificate")["modes"]),
    "certificate.summary": lambda: record("certificate")["summary"] + ".",
    "checkpoint.table": checkpoint_table,
    "era5.skill": era5_skill,
    "exercises.hints": exercise_hints,
    "exercises.table": exercise_table,
    "faults.faults": fault_table,
    "faults.grids": grid_table,
    "faults.layouts": layout_table,
    "combinations.bounds": lambda: ", ".join(f"{x:.0e} ({amp})" for amp, (x, _) in combinations.BOUNDS.items()) + ".",
    "combinations.table": lambda: combinations.table(measured("combinations")[0]),
    "gpu.attention": lambda: gpu_report.attention_table(*measured("gpu")),
    "gpu.graphs": lambda: gpu_report.graphs_table(*measured("gpu")),
    "gpu.kernels": lambda: gpu_report.kernels_table(record("gpu")["kernels"]),
    "gpu.loader": lambda: gpu_report.loader_table(*measured("gpu_loader")),
    "gpu.memory": lambda: gpu_report.memory_table(measured("gpu")[0], record("memory")["cases"]),
    "gpu.steps": lambda: gpu_report.steps_table(*measured("gpu")),
    "loader.table": lambda: loader.table(*measured("loader")),
    "roofline.table": roofline.table,
    "derivatives": lambda: derivatives.table(record("derivatives")["cases"]),
    "memory.anatomy": lambda: memory.anatomy_table(record("memory")["cases"]),
    "memory.table": lambda: memory.table(record("memory")["cases"]),
    "optimizers.table": lambda: optimizers.table(*measured("optimizers")),
    "plan.front": lambda: plan.table(record("plan_mp")["front"]),
    "plan.others": lambda: plan.others_table(record("plan_mp")["others"]),
    "scaling.judged": lambda: scaling_report.judged_table(record("scaling")["judged"]),
    "scaling.mends": lambda: scaling_report.all_mends(record("scaling")["mends"]),
    "scaling.strong": lambda: scaling_report.summary_table(record("scaling")["study"], "strong"),
    "scaling.weak": lambda: scaling_report.summary_table(record("scaling")["study"], "weak"),
    "skill.demo": lambda: skill.table(record("skill_demo")["cases"], "demo"),
    "ensembles": lambda: ensembles.table(record("ensembles")["cases"]),
    "skill.era5_djf": lambda: skill.table(record("skill_era5_djf")["cases"], "era5_djf"),
    "simulate.table": lambda: simulate.table(record("simulate")["grids"]),
    "step.savers": lambda: step.savers_table(*measured("step")),
    "step.table": lambda: step.table(*measured("step"), list(step.CASES)),
    "nightly.table": lambda: nightly.table(record("nightly")["steps"]),
    "storage.table": storage_table,
    "verdict": verdict,
} | {f"scaling.{section}": partial(section_tables, section) for section in scaling.SECTIONS}


def rewritten(page: str) -> str:
    """Return a page with what its records say now. Raises KeyError for what no record has."""

    def filled(found: re.Match) -> str:
        kind, name, _ = found.groups()
        if kind == "figure":
            source, figure, form = name.split("; ")
            text = format(figure_of(source, figure), form)
        else:
            is_ladder = name.startswith("ladder_")
            text = f"\n{ladder_report.markdown(name, record(name)) if is_ladder else TABLES[name]()}\n"
        return f"<!-- {kind}: {name} -->{text}<!-- end -->"

    return MARKED.sub(filled, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewritten(path.read_text()))
    print(*ages(), sep="\n")
