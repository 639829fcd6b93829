"""The tables of a run's report: lines for the log, rows for files; and tables for pages."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from utils.measure.step_profile import StepProfile

TOP = 10  # operators shown
SPEEDS = ("samples_per_sec", "valid_samples_per_sec", "loader_samples_per_sec", "mfu")
MEMORY = {
    "allocator": "its peak in the same step",
    "cached": "held by the allocator beyond the tensors, now",
    "process": "peak so far, libraries included",
}


def speed_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of means over all epochs, and over those after the first: samples over seconds, not mean speeds.

    An epoch has as many samples as iterations; all validations have the same.
    """
    before, found = [0, *(row["iteration"] for row in rows)], []
    counted = [(row["iteration"] - first, row) for row, first in zip(rows, before)]
    for name, part in (("all", counted), ("later", counted[1:])):
        mean: dict[str, Any] = {"epoch": name, "iteration": rows[-1]["iteration"] if rows else 0}
        for key in SPEEDS:
            known = [(1 if key.startswith("valid") else n, row[key]) for n, row in part if row[key] and n]
            mean[key] = sum(n for n, _ in known) / sum(n / x for n, x in known) if known else None
        found += [mean] * bool(part)
    return found


def speed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the speeds of each epoch, and their means."""
    yield "Speed, samples/s over all ranks:"
    yield f"  {'epoch':>7} {'training':>10} {'validation':>11} {'readers':>10}"
    for row in rows:
        told = ("" if row[name] is None else f"{row[name]:.1f}" for name in SPEEDS[:3])
        yield "  {:>7} {:>10} {:>11} {:>10}".format(row["epoch"], *told)


def memory(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the bytes of each part."""
    yield "Memory when a step needs most, GiB, and each part when that is largest:"
    for row in rows:
        most = f"{row['most_bytes'] / 2**30:9.3f}" if "most_bytes" in row else ""
        yield f"  {row['part']:13} {row['bytes'] / 2**30:9.3f} {most:9}  {MEMORY.get(row['part'], '')}".rstrip()


def operators(step: StepProfile, took: float, usual: float | None) -> Iterator[str]:
    """Yield the operators that take most time, and most memory, of a step of `took` seconds; others took `usual`."""
    total = sum(step.seconds.values())
    yield f"Operators of one step, by time ({1e3 * total:.3f} ms in all) and by memory:"
    if usual is not None:
        yield f"  under the profiler the step took {1e3 * took:.4g} ms; without, {1e3 * usual:.4g} ms (median)"
    for ranking, unit in ((step.seconds, "ms"), (step.allocated, "MiB")):
        for name in sorted(ranking, key=ranking.get, reverse=True)[:TOP]:
            value = ranking[name] * 1e3 if unit == "ms" else ranking[name] / 2**20
            yield f"  {value:10.3f} {unit:3} {step.calls[name]:6} x  {name[:80]}"


def modules(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the modules of the model took in one step."""
    yield "Modules of one step, each with those inside it, ms:"
    yield f"  {'forward':>10} {'backward':>10} {'calls':>6}"
    for row in rows[: 2 * TOP]:
        yield f"  {1e3 * row['forward']:10.3f} {1e3 * row['backward']:10.3f} {row['calls']:6}  {row['module']}"


def observers(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the observers of a run took, on rank 0."""
    yield "Observers of the run on rank 0: what they were told, and how long they took"
    for row in rows[:TOP]:
        yield f"  {row['seconds']:10.3f} s {row['calls']:6} x  {row['observer']}"


def time_rows(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of a `time` record."""
    head = {key: event[key] for key in ("epoch", "iteration", "iterations", "wall")}
    for part in event["seconds"]:
        yield head | {"part": part} | {key: event[key][part] for key in ("seconds", "longest", "longest_rank")}


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a table, with the columns of all of them."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "event"))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
