"""The scaling study: the best of all layouts, what a whole run costs, what would help; from the command line too."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import scaling, scaling_report
from benchmarks.planner import strategies
from benchmarks.planner.layouts import Layout, is_taken, models, shards_of
from benchmarks.planner.machine import load_machine
from benchmarks.planner.outlook import Outlook
from benchmarks.planner.ranking import bytes_of_sample, outlook_of, outlooks
from benchmarks.planner.study import MENDS, Job, best, parameters_of, without_files
from benchmarks.planner.whole_run import whole_run
from tests.helpers import ROOT, clean_environment, tiny_flags
from utils.config.reader import load_config

A100 = load_machine("perlmutter")
NOTHING = frozenset()
GB, BILLION = 1e9, 10**9


def config_of(folder, *flags):
    return load_config(tiny_flags(folder, "--embed_dim=64", "--depth=3", "--num_heads=4", *flags), chapter=2)[0]


def outlook(layout=Layout(4), seconds=1.0, samples=64, **memory):
    held = {"weights": 4 * GB, "gradients": 4 * GB, "optimiser": 8 * GB, "activations": 6 * GB}
    held |= {"batch": 0.0, "working": 0.0, **memory}
    parts = {"product": 0.5 * seconds, "tp": 0.25 * seconds, "reading": 0.25 * seconds}
    return Outlook(layout, samples, seconds, parts, "products", 0.0, held, {})


def test_a_save_has_each_tensor_once(tmp_path):
    """12 bytes a parameter, 16 with an average, however they lie on the ranks; each copies what it holds."""
    parameters = parameters_of(config_of(tmp_path))
    assert parameters == outlook_of(config_of(tmp_path, "--local_batch_size=4"), A100, 1).memory["weights"] / 4
    for flags, each, held in (
        ([], 12, 1), (["--shard=weights"], 12, 1 / 4), (["--ema_decay=0.9"], 16, 1),
        (["--tensor_parallel=2", "--context_parallel=2", "--shard=gradients"], 12, 1 / 4),
    ):  # fmt: skip
        found = outlook_of(config_of(tmp_path, "--local_batch_size=4", *flags), A100, 4)
        cost = whole_run(found, A100, parameters, 1)
        assert cost.saved == each * parameters, flags
        # What tensor parallel ranks all hold, positions and norms, is little of a large model.
        assert cost.stall == pytest.approx(held * each * parameters / A100.copy, rel=0.2 if len(flags) > 1 else 1e-3)


def test_what_a_whole_run_costs():
    machine = replace(A100, per_node=4, copy=6 * GB, storage=3 * GB, filesystem=None, failures=1 / 3600, restart=9.0)
    found = whole_run(outlook(), machine, BILLION, steps=3600)
    assert found.saved == 12 * GB and found.stall == 2.0 and found.written == 4.0
    assert found.between_failures == 3600 * 3600 / 4
    assert found.interval == pytest.approx(math.sqrt(2 * 2.0 * 3600 * 900))
    assert found.hours == pytest.approx(1 / (1 - found.lost))
    never_lost = whole_run(outlook(), replace(machine, failures=None), BILLION, 3600)
    assert never_lost.lost == 0 and never_lost.hours == 1 and math.isinf(never_lost.interval)
    hopeless = whole_run(outlook(), replace(machine, failures=1.0, restart=1e4), BILLION, 3600)
    assert hopeless.lost == 1 and math.isinf(hopeless.hours)
    slow = whole_run(outlook(), replace(machine, storage=0.001 * GB), BILLION, 3600)
    assert slow.interval == slow.written == 12000  # not before the last one is there
    on_host = whole_run(outlook(), replace(machine, device="cpu", copy=None), BILLION, 1)
    assert on_host.stall == pytest.approx(2 * 12 * GB / machine.moving[""][-1][1])


def replayed(machine, stall, written, interval, restart, between, hours):
    """Run a job through failures of chance, save by save; return the share of the time that is lost."""
    draw = np.random.default_rng(1)
    clock = done = kept = next_save = 0.0
    pending = None  # when what is being written counts, and what it holds
    failure = draw.exponential(between)
    while done < hours * 3600:
        events = [(clock + next_save + interval - done, "save"), (failure, "failure")]
        events += [(pending[0], "written")] if pending else []
        at, what = min(events)
        if what == "failure":
            done, pending = kept, None
            clock, failure, next_save = at + restart, at + restart + draw.exponential(between), kept
            continue
        done += at - clock
        clock = at
        if what == "written":
            kept, pending = pending[1], None
        else:
            clock, next_save = clock + stall, done
            pending = (clock + written, done)
    return 1 - done / clock


def test_what_failures_cost_is_what_a_replay_loses():
    """And the interval is the best one: a quarter of it, and four times of it, lose more."""
    machine = replace(A100, copy=6 * GB, storage=3 * GB, filesystem=None, failures=1 / 4, restart=60.0)
    found = whole_run(outlook(), machine, BILLION, 3600)
    args = {"stall": found.stall, "written": found.written, "restart": 60.0, "between": found.between_failures}
    lost = {x: replayed(machine, interval=x * found.interval, hours=3000, **args) for x in (0.25, 1, 4)}
    assert found.lost == pytest.approx(lost[1], rel=0.1)
    assert lost[1] < min(lost[0.25], lost[4])
    slow = whole_run(outlook(seconds=500.0), machine, BILLION, 3600)
    assert slow.interval == 500 > found.interval  # a save comes after a step


def test_nodes_share_a_file_system(tmp_path):
    """However many nodes there are, together they read no faster than it gives."""
    assert replace(A100, storage=2.0, filesystem=5.0).stored(2) == 4
    assert replace(A100, storage=2.0, filesystem=5.0).stored(3) == 5
    assert replace(A100, storage=2.0, filesystem=None).stored(3) == 6
    assert math.isinf(replace(A100, storage=None, filesystem=None).stored(3))
    config = config_of(tmp_path, "--local_batch_size=4")  # nobody reads ahead
    one, two = (outlook_of(config, replace(A100, storage=1e6, filesystem=1e6), n).parts["reading"] for n in (4, 8))
    assert two == pytest.approx(2 * one)


@pytest.mark.nightly
def test_the_best_of_each_job_is_that_of_the_plan(tmp_path):
    """Though all models are sketched once for all jobs; None where none fits or takes the batch."""
    job = Job(config_of(tmp_path, "--global_batch_size=8"), A100, 2)
    theirs = outlooks(job.config, NOTHING, A100, 2)
    most = theirs[0].bytes
    small, none = (replace(A100, memory=A100.beside + x) for x in (0.8 * most, 1.0))
    jobs = [job, replace(job, machine=small), replace(job, ranks=1).of_batch(3), replace(job, machine=none)]
    found = best(jobs)
    assert found[0] == theirs[0]
    assert found[1] == next(x for x in theirs if x.bytes <= small.memory - small.beside) != found[0]
    assert found[2].samples == 3 and found[3] is None


def test_a_small_batch_on_many_ranks_takes_larger_models(tmp_path):
    """Of at most 64 ranks, or as many as there are for each sample."""
    few = config_of(tmp_path, "--global_batch_size=2")
    assert max(tp * cp for tp, cp in models(few, NOTHING, 64)) == 64
    assert max(tp * cp for tp, cp in models(few, NOTHING, 512)) == 256
    assert max(tp * cp for tp, cp in models(config_of(tmp_path, "--local_batch_size=2"), NOTHING, 512)) == 64


def test_each_mend_changes_what_it_says(tmp_path):
    """In files of datasheets, and where collectives were measured."""
    curves = {"all_reduce 2": [(10.0, 2.0), (20.0, 3.0)]}
    measured = replace(A100, links={"node": replace(A100.links["node"], collectives=curves)})
    job = Job(config_of(tmp_path, "--global_batch_size=8", "--no_enable_jit"), measured, 2)
    changed = [change(job) for change in MENDS.values()]
    there, storage, links, latency, products, attention, memory, jit, host, noise = (x.machine for x in changed)
    assert math.isinf(there.stored(9)) and storage.stored(1) == 2 * A100.stored(1)
    assert storage.filesystem == 2 * A100.filesystem and changed[7].config.enable_jit and jit == measured
    assert links.links["node"].bandwidth == 2 * A100.links["node"].bandwidth
    assert links.links["node"].collectives == {"all_reduce 2": [(10.0, 1.0), (20.0, 1.5)]}
    assert latency.links["node"].collectives["all_reduce 2"][1] == (20.0, 1.0) and latency.links["node"].alpha < 1e-9
    (_, rate), (_, faster) = (x.attention["float16"]["backward 64"][0] for x in (measured, attention))
    assert faster == 2 * rate
    assert products.products["float16"][0][1] == 2 * A100.products["float16"][0][1]
    assert memory.moving[""][0][1] == 2 * A100.moving[""][0][1]
    assert host.host < 1e-9 and noise.noise < 1e-9


@pytest.mark.nightly
def test_mends_come_in_the_order_of_their_gain(tmp_path):
    """For a job that waits for files: with the same change for the job that it is compared with."""
    job = Job(config_of(tmp_path, "--num_data_workers=2", "--global_batch_size=4"), A100, 2)
    slow = replace(job, machine=replace(A100, storage=1e6, filesystem=1e6))
    found = scaling.mends(slow, without_files(replace(slow, ranks=1).of_batch(2)))
    assert "--stage_dir" in found[0]["mend"] and "16 bits" in found[1]["mend"]
    assert found[1]["speed"] == pytest.approx(2, rel=0.05)
    assert found[-1]["mend"] == "as it is" and found[-1]["speed"] == 1
    assert found[0]["efficiency"] > found[1]["efficiency"] > found[-1]["efficiency"]


def test_what_other_strategies_could_bring():
    """By hand, from the parts of a step and of the memory."""
    best = outlook()  # 22 GB
    one, two = (outlook(Layout(1, accumulation_steps=n), seconds=0.3 * n + 0.6) for n in (1, 2))
    piped = strategies.pipeline(best, one, two, parts=6, stages=3)
    assert piped.time == pytest.approx((0.3 * 8 + 0.6) / 3) and piped.memory == pytest.approx((16 / 3 + 6) / 22)
    few = strategies.pipeline(best, one, two, parts=2, stages=4)
    assert few.time == pytest.approx((0.3 * 5 + 0.6) / 4) and few.memory == pytest.approx((4 + 6 * 2 / 4) / 22)
    moved = strategies.offload(best, replace(A100, copy=4 * GB))
    assert moved.time == pytest.approx(2) and moved.memory == pytest.approx(10 / 22)
    assert strategies.smaller_moments(best, 0.25).memory == pytest.approx(16 / 22)
    assert strategies.eight_bit_products(best).time == 0.75
    overlapped = strategies.overlapped(best, outlook(Layout(1, 4), seconds=2.0, weights=0.0))
    assert overlapped.time == pytest.approx(2 - 0.5 * 0.75) and overlapped.memory == pytest.approx(18 / 22)


@pytest.mark.nightly
def test_strategies_are_judged_where_they_can_be(tmp_path, monkeypatch):
    """Not where nothing fits, nor tensor parallelism where heads do not divide."""

    def as_it_says(jobs):
        found = outlook_of(jobs[0].config, jobs[0].machine, jobs[0].ranks)
        return [found if found.bytes <= jobs[0].room else None]

    monkeypatch.setattr(scaling, "best", as_it_says)
    job = Job(config_of(tmp_path, "--global_batch_size=8"), A100, 4)
    found = scaling.judged(job)
    assert len(found) == 6 and all(x["time"] > 0 < x["memory"] for x in found.values())
    assert found["moments of 8 bits"]["memory"] < 1 < found["moments on the host"]["time"]
    odd = replace(job, config=config_of(tmp_path, "--global_batch_size=8", "--embed_dim=48", "--num_heads=3"))
    assert "tp 4, sent while it computes" not in scaling.judged(odd)
    assert scaling.judged(replace(job, machine=replace(A100, memory=A100.beside + 1))) == {}
    assert (
        scaling_report.judged_table({"a": found, "b": {}}).count("\n") == 7
        and scaling_report.judged_table({}).count("\n") == 1
    )


def study(folder, *flags):
    command = [sys.executable, "benchmarks/scaling.py", "--json", str(folder / "scaling.json"), *flags]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
def test_a_study_from_end_to_end(tmp_path):
    done = study(tmp_path, "--sections", "demo", "--machine", "perlmutter", "--ranks", "1", "2", "--rollout_steps=1")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "scaling.json").read_text())
    kinds = record["study"]["demo"]["perlmutter"]
    weak, strong = kinds["weak"], kinds["strong"]
    assert [x["samples"] for x in weak] == [16, 32] and [x["samples"] for x in strong] == [64, 64]
    for rows in (weak, strong):
        assert [x["ranks"] for x in rows] == [1, 2]
        assert 1 >= rows[0]["efficiency"] >= rows[1]["efficiency"] > 0
        speeds = [x["samples"] / x["seconds"] for x in rows]
        assert rows[1]["efficiency"] / rows[0]["efficiency"] == pytest.approx(speeds[1] / 2 / speeds[0])
        useful = scaling.STEPS * rows[1]["seconds"] / 3600
        assert rows[1]["cost"]["hours"] == pytest.approx(useful / (1 - rows[1]["cost"]["lost"]))
    # A sample has two frames of 8 x 64 x 128 numbers.
    computing = weak[1]["seconds"] - weak[1]["parts"]["reading"]
    assert weak[1]["read"] == pytest.approx(32 * 2 * 8 * 64 * 128 * 4 / computing)
    assert scaling_report.section_tables(record["study"]["demo"]) in done.stdout
    assert scaling_report.summary_table(record["study"], "weak").count("\n") == 2
    assert record["figures"]["demo, weak, 2 of perlmutter: efficiency"] == weak[1]["efficiency"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_what_cannot_be_studied_is_said(tmp_path):
    """In one line, before anything is computed, of whatever section; and nothing is written."""
    for flags, told in (
        (["--ranks", "4", "2"], "take counts that grow"), (["--ranks", "0"], "1 or more"),
        (["--machine", "moon"], "cannot read the machine moon"), (["--sections", "demo", "none_such"], "none_such"),
        (["--machine", "perlmutter", "--ranks", "4", "6", "--sections", "demo"], "fill nodes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            scaling.main(["--json", str(tmp_path / "scaling.json"), *flags])
    done = study(tmp_path, "--ranks", "4", "2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "counts that grow" in done.stderr
    assert not (tmp_path / "scaling.json").exists()


def test_hours_are_told_of_runs_that_there_can_be():
    """Not of one that failures never let end, nor of a batch that is larger than the data."""
    row = {"ranks": 4, "title": "t", "seconds": 1.0, "samples": 4, "efficiency": 0.5, "limit": "links", "bytes": 1.0}
    row |= {"read": 1.0, "cost": {"saved": 1.0, "stall": 0.1, "interval": None, "lost": 1.0, "hours": None}}
    assert "| never | never |" in scaling_report.detail_table([row])
    huge = row | {"samples": scaling_report.SAMPLES + 1, "cost": row["cost"] | {"hours": 1.0}}
    assert scaling_report.detail_table([huge]).endswith("| – | – |")
    assert "| 1 | 4 |" in scaling_report.detail_table([huge | {"samples": 4}])


def test_a_model_that_fits_on_no_first_job_is_said(tmp_path):
    job = Job(config_of(tmp_path, "--global_batch_size=8"), replace(A100, memory=A100.beside + 1), 1)
    with pytest.raises(ValueError, match="demo does not fit on 1 rank"):
        scaling.study("demo", {("perlmutter", "weak", 1): job})


def test_layouts_that_read_nothing_on_a_rank(tmp_path):
    """DALI refuses them, and PyTorch's loader does not. A row of patches that two ranks share is read by both."""
    layout = Layout(1, context_parallel=8)
    config = config_of(tmp_path, "--img_size", "24", "8", "--patch_size=4", "--patch_overlap=0")  # six rows of 2 tokens
    assert is_taken(layout, replace(config, data_loader_config="pytorch"))
    assert not is_taken(layout, replace(config, data_loader_config="dali"))
    wide = config_of(tmp_path, "--img_size", "8", "24", "--patch_size=4", "--patch_overlap=0")  # two rows of 6 tokens
    rows = sum(len(shard.rows) for shard in shards_of(Layout(1, context_parallel=4), wide))
    assert rows == 4 * 4  # 3 tokens each, of one row of patches of 4 points
    four = replace(wide, global_batch_size=None, local_batch_size=3, context_parallel=4, num_data_workers=0)
    found = outlook_of(four, replace(A100, storage=1e6, filesystem=None), 4)
    assert found.parts["reading"] == pytest.approx(2 * 3 * bytes_of_sample(four) / 1e6)


def test_a_frame_is_read_by_each_node_that_needs_it(tmp_path):
    """And counts bytes of the files alone: what a model knows by itself, such as positions, is not read."""
    config = config_of(tmp_path, "--local_batch_size=4", "--tensor_parallel=2", "--no_sequence_parallel")
    slow = replace(A100, storage=1e6, filesystem=1e6)
    orders = (replace(config, parallel_order=order) for order in ("tp-cp-dp", "dp-cp-tp"))
    near, far = (outlook_of(ours, slow, 8).parts["reading"] for ours in orders)
    assert far == pytest.approx(2 * near)
    assert bytes_of_sample(config) == bytes_of_sample(config_of(tmp_path, "--forcings=position"))
