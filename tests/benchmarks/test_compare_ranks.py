"""Ranks side by side, from their traces: of a CPU as if its operators were kernels, and of a GPU as they are."""

import gzip
import json
import subprocess
import sys

import pytest

from benchmarks.compare_ranks import COMPUTE, SEND, as_gpu, is_late, kernels, picture, read_traces, table
from tests.helpers import ROOT


def event(name, begin, duration, cat="cpu_op", tid=1):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": float(begin),
        "dur": float(duration),
        "pid": 1,
        "tid": tid,
        "args": {},
    }


def step(compute, wait):
    """A step of 100 us: an operator that starts another, then a collective for which the thread waits."""
    return [
        event("ProfilerStep#1", 0, 100, "user_annotation"),
        event("aten::linear", 10, compute, tid=1),
        event("aten::addmm", 11, compute - 1, tid=1),
        event("c10d::allreduce_", 10 + compute, 1, tid=1),
        event("gloo:all_reduce", 10 + compute, wait, "user_annotation", tid=2),
        event("aten::add", 98, 2, tid=1),
    ]


def write(folder, rank, events):
    text = json.dumps({"distributedInfo": {"rank": rank, "world_size": 3}, "traceEvents": events})
    (folder / f"rank{rank}.1.pt.trace.json.gz").write_bytes(gzip.compress(text.encode()))


def test_what_a_cpu_computes_and_sends():
    found = sorted(kernels(step(40, 30)), key=lambda kernel: kernel[2])
    assert [kernel[:2] for kernel in found] == [
        ("aten::addmm", COMPUTE), ("ncclDevKernel_all_reduce", SEND), ("aten::add", COMPUTE)
    ]  # fmt: skip
    made = as_gpu(step(40, 30))
    assert sum(e["cat"] == "kernel" for e in made) == sum(e["cat"] == "cuda_runtime" for e in made) == 3
    assert as_gpu(made) is made  # a GPU's kernels are left alone


def test_three_ranks_of_which_one_is_late(tmp_path):
    """Rank 1 computes for longer, and the others wait for it: 20, 70 and 30 of 90 us from the first kernel."""
    pytest.importorskip("hta", reason="needs pip install HolisticTraceAnalysis")
    for rank, compute, wait in ((0, 20, 60), (1, 70, 10), (2, 30, 50)):
        write(tmp_path, rank, step(compute, wait))
    command = [sys.executable, "benchmarks/compare_ranks.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert ["late" in line for line in lines[1:4]] == [False, True, False]
    head, *rows = (tmp_path / "ranks.csv").read_text().splitlines()
    assert head == "rank,computing,only sending,idle,of sending hidden,late"
    shares = [[float(x) for x in row.split(",")[1:5]] for row in rows]
    for (computing, sending, idle, hidden), compute, wait in zip(shares, (20, 70, 30), (60, 10, 50)):
        assert computing == pytest.approx((compute + 1) / 89, abs=0.03)
        assert sending == pytest.approx(wait / 89, abs=0.03)
        assert hidden == 0 and computing + sending + idle == pytest.approx(1, abs=0.001)
    assert (tmp_path / "ranks.png").stat().st_size > 5000


def test_nobody_is_late_where_all_wait_alike():
    rows = [{"rank": i, "computing": 0.5, "only sending": x, "idle": 0.1} for i, x in enumerate((0.3, 0.35, 0.28, 0.4))]
    assert not any(is_late(row, rows) for row in rows)
    rows[2]["only sending"] = 0.1
    assert [is_late(row, rows) for row in rows] == [False, False, True, False]
    rows = [row | {"of sending hidden": 0.0, "late": is_late(row, rows)} for row in rows]
    assert "late" in list(table(rows))[3] and len(picture({"a": rows, "b": rows}).axes) == 2


def test_what_is_no_trace_of_ranks(tmp_path):
    with pytest.raises(ValueError, match="has the traces of 0 rank.*--profile_ranks all"):
        read_traces(tmp_path / "none")
    write(tmp_path, 0, step(1, 1))
    (tmp_path / "rank1.1.pt.trace.json.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="cannot be read"):
        read_traces(tmp_path)
