"""Ranks side by side, from their traces: of a CPU as if its operators were kernels, and of a GPU as they are."""

import gzip
import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks.compare_ranks import COMPUTE, SEND, as_gpu, is_late, kernels, newest_traces, picture, table
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


def write(folder, rank, events, size=3, name="1"):
    text = json.dumps({"distributedInfo": {"rank": rank, "world_size": size}, "traceEvents": events})
    path = folder / f"rank{rank}.{name}.pt.trace.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def compare_ranks(folder):
    """Run it in a process of its own: Holistic Trace Analysis forks."""
    command = [sys.executable, "benchmarks/compare_ranks.py", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


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
    done = compare_ranks(tmp_path)
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
    small = [row | {"only sending": x} for row, x in zip(rows, (0.004, 0.01, 0.01, 0.01))]
    assert not any(is_late(row, small) for row in small)  # nobody waits for long
    rows[2]["only sending"] = 0.1
    assert [is_late(row, rows) for row in rows] == [False, False, True, False]
    rows = [row | {"of sending hidden": 0.0, "late": is_late(row, rows)} for row in rows]
    assert "late" in list(table(rows))[3] and len(picture({"a": rows, "b": rows}).axes) == 2


def test_ranks_that_send_nothing(tmp_path):
    pytest.importorskip("hta", reason="needs pip install HolisticTraceAnalysis")
    for rank in (0, 1):
        write(tmp_path, rank, [e for e in step(40, 30) if not e["name"].startswith(("gloo", "c10d"))], 2)
    done = compare_ranks(tmp_path)
    lines = done.stdout.splitlines()
    assert done.stderr == "" and [line.split()[-1] for line in lines[1:3]] == ["-", "-"]


@pytest.mark.slow
def test_traces_of_many_events(tmp_path):
    """More than 16 bits count."""
    pytest.importorskip("hta", reason="needs pip install HolisticTraceAnalysis")
    many = [event("ProfilerStep#1", 0, 200000, "user_annotation")]
    many += [event("aten::addmm", 10 * i, 5) for i in range(17000)] + [event("gloo:all_reduce", 180000, 9, tid=2)]
    for rank in (0, 1):
        write(tmp_path, rank, many, 2)
    done = compare_ranks(tmp_path)
    assert done.returncode == 0, done.stderr
    assert float((tmp_path / "ranks.csv").read_text().splitlines()[1].split(",")[1]) == pytest.approx(0.5, rel=0.1)


def test_traces_of_the_newest_run(tmp_path):
    """Files of one folder may be of several runs."""
    for number, (rank, size) in enumerate(((2, 3), (0, 3), (1, 2), (0, 2))):
        path = write(tmp_path, rank, step(1, 1), size, str(number))
        os.utime(path, (number, number))
    assert {rank: path.name[:7] for rank, path in newest_traces(tmp_path).items()} == {0: "rank0.3", 1: "rank1.2"}
    os.utime(write(tmp_path, 2, step(1, 1), 3, "4"), (4, 4))
    assert list(newest_traces(tmp_path)) == [0, 1, 2]
    os.utime(write(tmp_path, 2, step(1, 1), 4, "5"), (5, 5))
    with pytest.raises(ValueError, match="of a run of 4 rank.*rank 3 has none.*--profile_ranks all"):
        newest_traces(tmp_path)
    os.utime(write(tmp_path, 0, step(1, 1), 2, "6"), (5000, 5000))
    with pytest.raises(ValueError, match="rank1.2.pt.trace.json.gz was written long before the others"):
        newest_traces(tmp_path)


def test_what_is_no_trace_of_ranks(tmp_path):
    (tmp_path / "rankX.1.pt.trace.json.gz").write_bytes(b"")
    for folder, found in ((tmp_path, "has no traces"), (tmp_path / "none", "there is no folder .*none")):
        with pytest.raises(ValueError, match=f"{found}: .*--profile_ranks all"):
            newest_traces(folder)
    whole = write(tmp_path, 0, step(1, 1), 1)
    with pytest.raises(ValueError, match="of a run of 1 rank.*two are needed"):
        newest_traces(tmp_path)
    body = bytearray(whole.read_bytes())
    body[30:40] = bytes(10)
    for found in (b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[]"), gzip.compress(b"{"), bytes(body)):
        whole.write_bytes(found)
        with pytest.raises(ValueError, match="rank0.* cannot be read as a trace"):
            newest_traces(tmp_path)


@pytest.mark.parametrize("size", [3 * 10**7, "2", 2.0, -1])
def test_a_number_of_ranks_that_no_run_has(tmp_path, size):
    write(tmp_path, 0, step(1, 1), size)
    with pytest.raises(ValueError, match=f"is of {size} ranks, which no run has"):
        newest_traces(tmp_path)


@pytest.mark.parametrize(
    "trace, told",
    [
        ('{"traceEvents": [5]}', "cannot be read as a trace"), ("[" * 10**6, "cannot be read as a trace"),
        ('{"distributedInfo": [], "traceEvents": []}', "two are needed"),
    ],
)  # fmt: skip
def test_a_trace_of_a_stranger(tmp_path, trace, told):
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(gzip.compress(trace.encode()))
    with pytest.raises(ValueError, match=told):
        newest_traces(tmp_path)


def test_a_link_out_of_the_run_is_not_written_through(tmp_path):
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        write(tmp_path / "run", rank, step(1, 1), 2)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run/ranks.csv").symlink_to(tmp_path / "mine")
    done = compare_ranks(tmp_path / "run")
    assert done.returncode == 2 and "ranks.csv is a link to" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_trace_without_operators(tmp_path):
    pytest.importorskip("hta", reason="needs pip install HolisticTraceAnalysis")
    for rank in (0, 1):
        write(tmp_path, rank, step(1, 1)[:1], 2)
    done = compare_ranks(tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch("compare_ranks.py: error: .*rank0.* has nothing that computes or sends: .*\n", done.stderr)
