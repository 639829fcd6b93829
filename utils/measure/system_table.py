"""What a run takes of the machine, as tables: over its epochs, of each rank and its GPU, and of the nodes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

# How the figures of ranks become one for the run, how one for their node, and what they say.
SYSTEM: dict[str, tuple[str, str, str]] = {
    "cores": ("added", "added", "CPU cores in use, all ranks"),
    "memory_gb": ("largest", "added", "GiB resident, the largest rank"),
    "node_memory": ("largest", "largest", "of a node's memory in use"),
    "read_gb": ("added", "added", "GiB read from storage"),
    "written_gb": ("added", "added", "GiB written to storage"),
    "disk_used": ("largest", "largest", "of the run's file system in use"),
    "disk_free_gb": ("least", "least", "GiB free there"),
    "sent_gb": ("added over nodes", "largest", "GiB sent by the nodes"),
    "received_gb": ("added over nodes", "largest", "GiB received by the nodes"),
    "gpu_use": ("mean", "mean", "of the time a kernel ran"),
    "gpu_memory_gb": ("largest", "largest", "GiB in use on the fullest GPU"),
    "joules": ("added", "added", "J, all GPUs"),
    "joules_per_sample": ("of all", "of all", "J a training sample, validation included"),
}
OF_A_RANK = ("cores", "memory_gb", "read_gb", "written_gb", "gpu_use", "gpu_memory_gb", "joules")
SHOWN = 8  # ranks in the log; system_ranks.csv has all
Figures = dict[str, float]


def together(ranks: Sequence[Figures], nodes: Sequence[str]) -> Figures:
    """Return the figures of all ranks, each on one of `nodes`; not those that a rank does not know."""
    one_each = list({node: rank for node, rank in zip(nodes, ranks)}.values())
    ways = {
        "added": (sum, ranks), "added over nodes": (sum, one_each), "largest": (max, ranks), "least": (min, ranks),
        "mean": (fmean, ranks),
    }  # fmt: skip
    return _combined(ranks, {name: ways[way] for name, (way, _, _) in SYSTEM.items() if way in ways})


def _combined(ranks: Sequence[Figures], ways: dict[str, tuple[Callable, Iterable[Figures]]]) -> Figures:
    known = [name for name in ways if all(name in rank for rank in ranks)]
    return {name: ways[name][0](rank[name] for rank in ways[name][1]) for name in known}


def rank_rows(records: Sequence[Sequence[Figures]], nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each rank: means over the records, each the figures of all ranks."""
    rows = []
    for rank, node in enumerate(nodes):
        mine = [record[rank] for record in records]
        known = [name for name in SYSTEM if all(name in one for one in mine)]
        rows.append({"rank": rank, "node": node} | {name: fmean(one[name] for one in mine) for name in known})
    return rows


def node_rows(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each node, of rows for its ranks."""
    ways = {"added": sum, "largest": max, "least": min, "mean": fmean}
    rows = []
    for node in dict.fromkeys(row["node"] for row in ranks):
        mine = [row for row in ranks if row["node"] == node]
        combine = {name: (ways[way], mine) for name, (_, way, _) in SYSTEM.items() if way in ways}
        rows.append({"node": node, "ranks": len(mine)} | _combined(mine, combine))
    return rows


def lines(epochs: Sequence[Figures], ranks: Sequence[dict[str, Any]], warm: slice, on_gpu: bool) -> Iterator[str]:
    """Yield what a run took of the machine: over its warm `epochs`, and means over these of ranks and of nodes."""
    yield f"The machine, over {len(epochs)} epoch(s)" + (" after the first:" if warm.start else ":")
    yield f"  {'':18} {'mean':>9} {'least':>9} {'most':>9}"
    for name, (_, _, meaning) in SYSTEM.items():
        values = [epoch[name] for epoch in epochs if name in epoch]
        if values:
            yield f"  {name:18} {fmean(values):9.3f} {min(values):9.3f} {max(values):9.3f}  {meaning}"
    if on_gpu and not any("gpu_use" in epoch for epoch in epochs):
        yield "  The GPU does not tell its use; where nvidia-ml-py (on AMD amdsmi) is missing, pip install it"
    if len(ranks) > 1:
        yield from _rank_lines(ranks)
    nodes = node_rows(ranks)
    if len(nodes) > 1:
        yield f"Of {len(nodes)} nodes, each with its ranks together:"
        yield f"  {'':18} {'mean':>9} {'least':>9} {'most':>9}"
        for name in SYSTEM:
            values = [node[name] for node in nodes if name in node]
            if values:
                yield f"  {name:18} {fmean(values):9.3f} {min(values):9.3f} {max(values):9.3f}"


def _rank_lines(ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each rank, or those that work least and most."""
    columns = [name for name in OF_A_RANK if any(name in row for row in ranks)]
    key = "gpu_use" if "gpu_use" in columns else "cores"
    shown, which = list(ranks), "Each rank" + " and its GPU" * ("gpu_use" in columns)
    if len(ranks) > SHOWN:
        by_use = sorted(ranks, key=lambda row: row.get(key, 0.0))
        shown = by_use[: SHOWN // 2] + by_use[-(SHOWN // 2) :]
        which = f"The ranks with least and most {key} of {len(ranks)} (all: system_ranks.csv)"
    yield f"{which}, means of an epoch:"
    yield f"  {'rank':>6} {'node':12} " + " ".join(f"{name:>13}" for name in columns)
    for row in shown:
        values = (f"{row[name]:13.3f}" if name in row else f"{'':13}" for name in columns)
        yield f"  {row['rank']:6} {row['node'][:12]:12} " + " ".join(values)
