"""The runs of a ladder on the disk, and what they say: gains, and what of them is noise (for ladder.py)."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.rungs.rungs import Rung
from utils.files import read_events, write_text
from utils.reading import holds


class Runs:
    """The runs of a ladder, each on the disk when it is done.

    Raises ValueError where the file holds those of another ladder.
    """

    def __init__(self, path: Path, setup: dict[str, Any]):
        self.path, self.done = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        found, *runs = (read_events(path, holds()) if path.exists() else []) or [setup]
        if found != setup:
            changed = ", ".join(name for name in setup if found.get(name) != setup[name])
            raise ValueError(f"{path} is of another ladder ({changed} changed): give another --json, or --fresh")
        runs = [run for run in runs if "losses" in run]  # the others are tried again
        self.done = {(run["rung"], run["round"]): run for run in runs}
        # Anew, because the last line may be half a line.
        write_text(path, "".join(json.dumps(line) + "\n" for line in (setup, *runs)))

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


def standard_error(rungs: list[Rung], runs: Runs) -> float | None:
    """Return the standard error of a gain's logarithm, as rungs tell that are one and the same command.

    Their logarithms should be 0. That of a median of n is 1.25 times the one of a mean (Kenney & Keeping 1962).
    """
    logarithms, rounds = [], 0
    for one, other in itertools.combinations(rungs, 2):
        if all(getattr(one, name) == getattr(other, name) for name in ("script", "flags", "env", "batch", "ranks")):
            ratios = gains(runs, one, other)
            logarithms += map(math.log, ratios)
            rounds = max(rounds, len(ratios))
    if not logarithms:
        return None
    return 1.25 * math.sqrt(statistics.fmean(x**2 for x in logarithms) / rounds)


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

    baseline, error = by_key["steps: baseline"], standard_error(rungs, runs)
    rows = []
    for rung in rungs:
        results = runs.of(rung)
        row = {"table": rung.table, "name": rung.name, "ranks": rung.ranks, "batch": rung.batch}
        row |= {"script": " ".join((*rung.env, rung.script)), "flags": " ".join(rung.flags)}
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
            row["is_noise"] = low <= 1 <= high or (error is not None and abs(math.log(gain)) <= 2 * error)
        rows.append(row)
    return rows
