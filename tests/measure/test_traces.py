"""Traces of `--profile torch`, in the tools that read them: TensorBoard's plugin, and Holistic Trace Analysis."""

import gzip
import json
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest

from docs.figures.tensorboard import tensorboard
from tests.helpers import ROOT, run_folder, run_here, run_ranks, tiny_flags, wait_until, write_data

TRACED = ["--profile", "torch", "--profile_steps", "1", "1", "2", "--num_iters", "6"]


# Read in a process of its own: Holistic Trace Analysis forks, which a process with threads, as the tests', must not.
NAMES_IN_TRACES = """
import json, sys
from hta.trace_analysis import TraceAnalysis

found = TraceAnalysis(trace_dir=sys.argv[1]).t
table = found.symbol_table.get_sym_table()
traces = found.get_all_traces().items()
print(json.dumps({rank: [table[i] for i in trace["name"].unique()] for rank, trace in traces}))
"""


def ask(address: str, what: str, **query: str):
    with urllib.request.urlopen(
        f"{address}/data/plugin/pytorch_profiler/{what}?{urllib.parse.urlencode(query)}"
    ) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_tensorboards_plugin_reads_a_trace(tiny):
    pytest.importorskip("torch_tb_profiler", reason="needs pip install torch-tb-profiler")
    folder = run_here(tiny_flags(tiny, *TRACED))
    with tensorboard("--logdir", str(folder)) as address:
        wait_until(lambda: ask(address, "runs")["runs"] and not ask(address, "runs")["loading"])
        (run,) = ask(address, "runs")["runs"]
        assert {"Overview", "Operator", "Trace", "Memory"} <= set(ask(address, "views", run=run))
        (worker,) = ask(address, "workers", run=run, view="Operator")
        spans = ask(address, "spans", run=run, worker=worker)
        table = ask(address, "operation/table", run=run, worker=worker, span=spans[0], group_by="Operation")
        calls = {row["name"]: row["calls"] for row in table["data"]}
        assert calls["aten::addmm"] > 0 and calls["aten::sqrt"] > 0


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The folder with the traces of two ranks."""
    folder = write_data(tmp_path_factory.mktemp("traces"))
    argv = tiny_flags(folder, *TRACED, "--profile_ranks", "all", "--checkpoint_every", "None")
    results = run_ranks(2, [str(ROOT / "train.py"), *argv])
    assert [done.returncode for done in results] == [0, 0], results[0].stderr
    return run_folder(argv, "2GPU") / "profile"


def test_each_rank_writes_its_own(traces):
    for rank in (0, 1):
        (path,) = traces.glob(f"rank{rank}.*.pt.trace.json.gz")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank and trace["distributedInfo"]["world_size"] == 2
        assert any("allreduce" in event["name"] for event in trace["traceEvents"])
        assert (traces / f"rank{rank}_memory.csv").stat().st_size > 100


def test_holistic_trace_analysis_compares_the_ranks(traces):
    pytest.importorskip("hta", reason="needs pip install HolisticTraceAnalysis")
    done = subprocess.run(
        [sys.executable, "-c", NAMES_IN_TRACES, str(traces)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout)
    assert sorted(names) == ["0", "1"]
    for rank in names:
        assert {"step 2", "forward", "backward", "optimizer", "aten::addmm"} <= set(names[rank]), rank
