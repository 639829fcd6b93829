"""Where do the ranks of a run spend a step, what of their sending is hidden, and who is late? From their traces.

    torchrun --nproc_per_node=4 train_mp.py --config=demo --tensor_parallel=2 --profile torch --profile_ranks all
    python benchmarks/compare_ranks.py runs/demo/2MP/00

It asks Holistic Trace Analysis (HTA), which knows kernels of GPUs. A CPU has none: there, operators that start no
others are taken for kernels that compute, and gloo's collectives, which have threads of their own, for those that send.
Prints a table, and writes it with a picture, ranks.csv and ranks.png, to the run's profile/.
"""

import argparse
import csv
import gzip
import json
import logging
import math
import re
import statistics
import sys
import tempfile
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.figure import Figure

from benchmarks.harness.command import errors_in_one_line
from utils.reading import check_own, is_count

COMPUTE, SEND = 7, 20  # streams, as HTA calls them
NCCL = "ncclDevKernel"  # how the names of NCCL's kernels begin, by which HTA knows them
LATE = 0.6  # of what the others wait: who waits less is late,
MATTERS = 0.05  # where that is as much of a step
MOST_RANKS = 2**20
TOGETHER = 600  # seconds: ranks of one run write their traces within
COLUMNS = ("computing", "only sending", "idle")  # shares of a step
COLOURS = ("#1b6b93", "#e08e45", "#e5e5e5")
Event = dict[str, Any]


def newest_traces(folder: Path) -> dict[int, Path]:
    """Return the file of each rank of the run that recorded last. Raises ValueError where one is missing."""
    paths: dict[int, Path] = {}
    for path in sorted(folder.glob("rank*.pt.trace.json.gz"), key=lambda path: path.stat().st_mtime):
        if match := re.match(r"rank(\d+)\.", path.name):
            paths.pop(int(match[1]), None)
            paths[int(match[1])] = path
    advice = "train on several with --profile torch --profile_ranks all, and give the run's folder"
    if not paths:
        found = f"{folder} has no traces" if folder.is_dir() else f"there is no folder {folder}"
        raise ValueError(f"{found}: {advice}")
    about = read_trace([*paths.values()][-1]).get("distributedInfo")
    size = about.get("world_size", 1) if isinstance(about, dict) else 1
    if not is_count(size) or size > MOST_RANKS:
        raise ValueError(f"the newest trace in {folder} is of {str(size)[:20]} ranks, which no run has: {advice}")
    missing = [rank for rank in range(size) if rank not in paths]
    if missing or size < 2:
        lacks = f"rank {missing[0]} has none in {folder}" if missing else "two are needed"
        raise ValueError(f"the newest trace is of a run of {size} rank(s), and {lacks}: {advice}")
    found = {rank: paths[rank] for rank in range(size)}
    times = [path.stat().st_mtime for path in found.values()]
    if max(times) - min(times) > TOGETHER:
        early = min(found, key=lambda rank: found[rank].stat().st_mtime)
        raise ValueError(f"{found[early].name} was written long before the others, by another run: record all anew")
    return found


def read_trace(path: Path) -> dict[str, Any]:
    """Return what torch.profiler wrote. Raises ValueError where it is no trace."""
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        events = trace.get("traceEvents") if isinstance(trace, dict) else None
        if isinstance(events, list) and all(isinstance(event, dict) for event in events):
            return trace
        why = "no traceEvents"
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        why = str(error)
    raise ValueError(f"{path} cannot be read as a trace ({why}): record it anew")


def kernels(events: Iterable[Event]) -> Iterator[tuple[str, int, float, float]]:
    """Yield what a CPU computes and sends: name, stream, begin and duration in us."""
    threads = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op" and event.get("dur", 0) > 0:
            threads[event["tid"]].append(event)
        elif event.get("ph") == "X" and event["name"].startswith("gloo:"):
            yield f"{NCCL}_{event['name'].removeprefix('gloo:')}", SEND, event["ts"], event["dur"]
    for found in threads.values():
        found.sort(key=lambda event: (event["ts"], -event["dur"]))
        for event, after in zip(found, [*found[1:], None]):
            starts_none = after is None or after["ts"] >= event["ts"] + event["dur"]
            if starts_none and event["name"].startswith("aten::"):
                yield event["name"], COMPUTE, event["ts"], event["dur"]


def as_gpu(events: list[Event]) -> list[Event]:
    """Return the events of a trace, such that HTA finds kernels in it."""
    if any(event.get("cat") == "kernel" for event in events):
        return events
    made, first = [], 1 + max((event.get("args", {}).get("External id", 0) for event in events), default=0)
    for number, (name, stream, begin, duration) in enumerate(kernels(events), first):
        args = {"stream": stream, "correlation": number, "device": 0}
        made.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": duration})
        made[-1]["args"] = args
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": begin}
        made.append(launch | {"dur": 0.001, "args": {"correlation": number}})
    return events + made


def compare(paths: dict[int, Path]) -> list[dict[str, Any]]:
    """Return a row for each rank: shares of a step, of its sending what is hidden, and whether it is late.

    A collective ends when the last rank has come to it, so a rank that is late waits for nobody: it is taken for late
    where it only sends for less than LATE of the others' median. (HTA's own search looks at one collective, and on two
    cores it named others than the one that we had made late.)

    Raises ValueError where a trace is none or has no kernels, or HTA is not installed.
    """
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        raise ValueError(
            "Holistic Trace Analysis is not installed: `pip install --no-deps HolisticTraceAnalysis==0.5.0` and "
            "`pip install 'pandas<3' plotly`"
        ) from None
    logging.disable(logging.WARNING)  # it tells of each file
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it divides by the time of sending, which may be none
        for rank, path in paths.items():
            trace = read_trace(path)
            trace["traceEvents"] = as_gpu(trace["traceEvents"])
            if not any(event.get("cat") == "kernel" for event in trace["traceEvents"]):
                raise ValueError(f"{path} has nothing that computes or sends: record a step, with --profile torch")
            Path(folder, f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
        analysis = TraceAnalysis(trace_dir=folder)
        shares = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
        hidden = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    kinds = dict(zip(COLUMNS, ("compute_time_pctg", "non_compute_time_pctg", "idle_time_pctg")))
    rows = [
        {"rank": rank}
        | {kind: float(shares.loc[rank, name]) / 100 for kind, name in kinds.items()}
        | {"of sending hidden": None if math.isnan(hidden[rank]) else float(hidden[rank]) / 100}
        for rank in paths
    ]
    return [row | {"late": is_late(row, rows)} for row in rows]


def is_late(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether the others wait for this rank, and long enough to matter."""
    others = statistics.median(other["only sending"] for other in rows if other is not row)
    return row["only sending"] < min(LATE * others, others - MATTERS)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines: shares of the time from the first kernel to the last, and what of the sending is hidden."""
    heads = [name for name in rows[0] if name != "late"]
    yield "  ".join(heads)
    for row in rows:
        cells = [str(row["rank"]), *("-" if row[name] is None else f"{row[name]:.0%}" for name in heads[1:])]
        told = "  ".join(cell.rjust(len(head)) for cell, head in zip(cells, heads))
        yield told + "   late, if it is so again: the others wait for it" * row["late"]


def draw(axes, rows: list[dict[str, Any]], title: str) -> None:
    """Draw a bar for each rank: the shares of a step; a rank that is late has a mark."""
    names = [f"rank {row['rank']}" + " *" * row["late"] for row in rows]
    left = [0.0] * len(rows)
    for kind, colour in zip(COLUMNS, COLOURS):
        values = [row[kind] for row in rows]
        bars = axes.barh(names, values, left=left, color=colour, label=kind)
        axes.bar_label(bars, [f"{x:.0%}" if x >= 0.06 else "" for x in values], label_type="center", fontsize=8)
        left = [a + b for a, b in zip(left, values)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontsize=10)


def picture(parts: dict[str, list[dict[str, Any]]]) -> Figure:
    """Return a picture of the ranks of one or more runs, by title."""
    figure = Figure(figsize=(8, 0.7 + 2.0 * len(parts)), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(len(parts), 1, squeeze=False).flat, parts.items()):
        draw(axes, rows, title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, frameon=False)
    return figure


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a run's folder")
    args = parser.parse_args(argv)
    if args.run.is_dir():
        check_own(args.run)
    folder = args.run / "profile" if (args.run / "profile").is_dir() else args.run
    rows = compare(newest_traces(folder))
    print("\n".join(table(rows)))
    with (folder / "ranks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    title = "Shares of a step (*: late, if it is so again: the others wait for it)"
    picture({title: rows}).savefig(folder / "ranks.png", dpi=120)
    print(f"Written: {folder / 'ranks.csv'}, {folder / 'ranks.png'}")


if __name__ == "__main__":
    with errors_in_one_line():
        main(sys.argv[1:])
