"""How the devices of a node are connected: a table that the vendor's tool prints, and a picture of it (doctor.py)."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

NODES = Path("/sys/devices/system/node")
# Each with the variables that choose from what it prints (CUDA's programming guide; ROCm, GPU isolation techniques).
TOOLS = {
    ("nvidia-smi", "topo", "-m"): [["CUDA_VISIBLE_DEVICES"]],
    ("rocm-smi", "--showtopotype"): [["ROCR_VISIBLE_DEVICES"], ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]],
}
# Words of both vendors' tables, from near to far. (NVIDIA's legend: `nvidia-smi topo -m`.)
LINKS = {
    "NV": "NVLink; the number counts the links",
    "XGMI": "Infinity Fabric",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "a PCIe bridge of the CPU",
    "NODE": "bridges of one NUMA node",
    "PCIE": "PCIe",
    "SYS": "from one NUMA node to another",
}


class Topology(NamedTuple):
    """Names of n devices, and what connects each two of them, [n, n] words; `text` is what the tool printed."""

    names: list[str]
    links: list[list[str]]
    text: str
    are_ranks: bool = False  # whether the i-th is the GPU of the node's i-th rank


def find_topology(device_type: str) -> Topology | None:
    """Return that of the GPUs, for a CPU or without GPUs that of the NUMA nodes; None where there are less than two."""
    for tool, variables in TOOLS.items():
        if device_type == "cuda" and shutil.which(tool[0]):
            text = subprocess.run(tool, capture_output=True, text=True).stdout.rstrip()
            if found := read_table(text):
                return of_ranks(found, variables)
    return numa_nodes(NODES)


def of_ranks(topology: Topology, variables: Sequence[Sequence[str]]) -> Topology:
    """Return the part that a process sees. The tools print all GPUs of a node, or all that the job has.

    Args:
        variables: of the environment: lists of numbers, each among those that the one before it left. Of several in one
            place the first counts that is set. Where one has names instead (UUIDs), all is returned, and nobody knows
            which rank has which GPU.
    """
    seen = list(range(len(topology.names)))
    for alternatives in variables:
        listed = next((os.environ[name] for name in alternatives if name in os.environ), None)
        if listed is not None:
            words = listed.replace(" ", "").split(",")
            if not all(word.isdigit() and int(word) < len(seen) for word in words):
                return topology
            seen = [seen[int(word)] for word in words]
    links = [[topology.links[i][j] for j in seen] for i in seen]
    return Topology([topology.names[i] for i in seen], links, topology.text, are_ranks=True)


def read_table(text: str) -> Topology | None:
    """Return what a table of `nvidia-smi topo -m` or `rocm-smi --showtopotype` says of the GPUs, two at least."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # underlined headings
    lines = [line.split() for line in text.splitlines()]
    heading = next((words for words in lines if words[:2] == ["GPU0", "GPU1"]), None)
    if heading is None:
        return None
    names = [word for word in heading if re.fullmatch(r"GPU\d+", word)]
    rows = {words[0]: words[1 : len(names) + 1] for words in lines if words[0:1] and words[0] in names}
    rows = {name: row for name, row in rows.items() if len(row) == len(names)}
    return Topology(names, [rows[name] for name in names], text) if rows.keys() == set(names) else None


def numa_nodes(folder: Path) -> Topology | None:
    """Return the distances of a node's parts of the memory, as the kernel tells them: 10 is near."""
    nodes = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    rows = [(node / "distance").read_text().split() for node in nodes]
    if len(rows) < 2:
        return None
    names = [node.name for node in nodes]
    lines = (f"{name:6} {' '.join(row)}" for name, row in zip(names, rows))
    return Topology(names, rows, "\n".join(("distances of NUMA nodes", *lines)))


def farness(word: str) -> float | None:
    """Return how far a link reaches, from 0 to 1; None for a device and itself, and for words that nobody knows."""
    if word.isdigit():  # of NUMA nodes; rocm-smi writes 0 for a device and itself
        return (int(word) - 10) / 30 if int(word) > 10 else None
    kind = re.sub(r"\d+$", "", word)
    return list(LINKS).index(kind) / (len(LINKS) - 1) if kind in LINKS else None


def picture(topology: Topology, groups: Sequence[Sequence[int]]) -> Figure:
    """Return a matrix of the devices, the darker the nearer; frames are around two GPUs that are in one group."""
    n = len(topology.names)
    groups = [ranks for ranks in groups if len(ranks) > 1] if topology.are_ranks else []
    colours = LinearSegmentedColormap.from_list("near to far", ["#1b6b93", "#9fc9d9", "#f2e3c6"])
    figure = Figure(figsize=(2.5 + 0.75 * n, 2.2 + 0.6 * n), layout="constrained")
    axes = figure.add_subplot()
    values = np.array([[np.nan if (far := farness(word)) is None else far for word in row] for row in topology.links])
    axes.imshow(values, cmap=colours, vmin=0, vmax=1)
    for i, row in enumerate(topology.links):
        for j, word in enumerate(row):
            dark = values[i, j] < 0.3
            axes.text(j, i, "" if i == j else word, ha="center", va="center", color="white" if dark else "black")
            if i != j and any({i, j} <= set(group) for group in groups):
                frame = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor="#c0392b", linewidth=2)
                axes.add_patch(frame)
    axes.set_xticks(range(n), topology.names)
    axes.set_yticks(range(n), topology.names)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_title("How the devices of this node are connected")
    kinds = {re.sub(r"\d+$", "", word) for row in topology.links for word in row}
    legend = [f"{word}: {text}" for word, text in LINKS.items() if word in kinds]
    legend += ["framed: a tensor parallel group"] if groups else []
    axes.set_xlabel("\n".join(legend), loc="left")
    return figure
