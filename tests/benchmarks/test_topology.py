"""How the devices of a node are connected: the vendors' tables, the kernel's, and the picture."""

import pytest

from benchmarks.node import machine, topology
from benchmarks.node.topology import TOOLS, farness, numa_nodes, of_ranks, picture, read_table
from utils.config.reader import load_config

NVIDIA = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t32-63\t1\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t64-95\t2\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t96-127\t3\t\tN/A
NIC0\tPXB\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
AMD = """\
============================ ROCm System Management Interface ============================
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
================================== End of ROCm SMI Log ===================================
"""


def test_tables_of_the_vendors():
    found = read_table(NVIDIA)
    assert found.names == ["GPU0", "GPU1", "GPU2", "GPU3"] and "\x1b" not in found.text
    assert found.links[0] == ["X", "NV12", "SYS", "SYS"] and found.links[3][2] == "NV12"
    assert read_table(AMD)[:2] == (["GPU0", "GPU1"], [["0", "XGMI"], ["XGMI", "0"]])
    for text in ("", "No devices were found", "GPU0\n X", NVIDIA.replace("GPU3\tSYS", "GPUx\tSYS")):
        assert read_table(text) is None


def test_near_and_far():
    assert farness("NV18") < farness("PIX") < farness("PHB") < farness("SYS") == 1.0
    assert farness("X") is farness("0") is farness("10") is farness("???") is None
    assert 0 < farness("12") < farness("32")


def test_numa_nodes_where_there_is_no_gpu(tmp_path):
    assert numa_nodes(tmp_path / "none") is None
    for number, row in enumerate(("10 21", "21 10")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "distance").write_text(row + "\n")
        assert (numa_nodes(tmp_path) is None) == (number == 0)
    assert numa_nodes(tmp_path)[:2] == (["node0", "node1"], [["10", "21"], ["21", "10"]])
    picture(numa_nodes(tmp_path), [[0, 1]]).savefig(tmp_path / "a.png")


def test_the_picture_frames_tensor_parallel_groups():
    axes = picture(of_ranks(read_table(NVIDIA), []), [[0, 1], [2, 3]]).axes[0]
    assert {(round(box.get_x() + 0.46), round(box.get_y() + 0.46)) for box in axes.patches} == {
        (0, 1),
        (1, 0),
        (2, 3),
        (3, 2),
    }
    assert {text.get_text() for text in axes.texts} == {"", "NV12", "SYS"}
    assert "NVLink" in axes.get_xlabel() and "framed" in axes.get_xlabel() and "PCIe switch" not in axes.get_xlabel()
    axes = picture(of_ranks(read_table(AMD), []), [[0], [1]]).axes[0]
    assert not axes.patches and "Infinity Fabric" in axes.get_xlabel() and "framed" not in axes.get_xlabel()


def test_the_doctor_draws_beside_its_record(tmp_path, monkeypatch):
    config = load_config(["--tensor_parallel=2"], chapter=2)[0]
    monkeypatch.setattr(machine, "find_topology", lambda device_type: None)
    assert not list(machine.connections(config, 2, 4, tmp_path / "a.json"))
    monkeypatch.setattr(machine, "find_topology", lambda device_type: read_table(NVIDIA))
    assert [line.found[:22] for line in machine.connections(config, 2, 4, None)] == ["how they are connected"]
    _, drawn = machine.connections(config, 2, 4, tmp_path / "new" / "a.json")
    path = tmp_path / "new" / "a.png"
    assert drawn.found == f"drawn in {path}" and path.stat().st_size > 5000


@pytest.mark.parametrize(
    "tool, variables, names",
    [
        ("nvidia-smi", {}, "0 1 2 3"),
        ("nvidia-smi", {"CUDA_VISIBLE_DEVICES": "3, 1", "ROCR_VISIBLE_DEVICES": "0"}, "3 1"),
        ("nvidia-smi", {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c"}, None),
        ("nvidia-smi", {"CUDA_VISIBLE_DEVICES": "2,4"}, None),
        ("rocm-smi", {"ROCR_VISIBLE_DEVICES": "1,2,3", "HIP_VISIBLE_DEVICES": "2,0"}, "3 1"),
        ("rocm-smi", {"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}, "0"),
    ],
)
def test_the_gpus_that_a_process_sees(monkeypatch, tool, variables, names):
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    whole = read_table(NVIDIA)
    found = of_ranks(whole, next(names for words, names in TOOLS.items() if words[0] == tool))
    if names is None:
        assert found == whole and not picture(found, [[0, 1]]).axes[0].patches
    else:
        numbers = [int(word) for word in names.split()]
        assert found.are_ranks and found.names == [f"GPU{i}" for i in numbers]
        assert found.links == [[whole.links[i][j] for j in numbers] for i in numbers]


@pytest.mark.parametrize("tool, text", [("nvidia-smi", NVIDIA), ("rocm-smi", AMD), (None, None)])
def test_the_tool_that_is_there_is_asked(tmp_path, monkeypatch, tool, text):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(topology, "NODES", tmp_path)
    if tool:
        (tmp_path / "table").write_text(text)
        (tmp_path / tool).write_text(
            f"#!/bin/sh\nwhile read -r line; do printf '%s\\n' \"$line\"; done < {tmp_path}/table\n"
        )
        (tmp_path / tool).chmod(0o755)
    found = topology.find_topology("cuda")
    assert (found and found[:2]) == (text and read_table(text)[:2])
    assert topology.find_topology("cpu") is None
