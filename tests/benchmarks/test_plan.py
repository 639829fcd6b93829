"""The planner: sketches are traces of whole models, predictions follow from them, errors are one line."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import subprocess
import sys
import types
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from benchmarks import plan
from benchmarks.harness.command import errors_in_one_line
from benchmarks.planner import machine as machines
from benchmarks.planner import measure as measuring
from benchmarks.planner.layouts import Layout, groups_of, is_taken, models, orders, parts_of, variants
from benchmarks.planner.machine import Link, at, load_machine, machine_of, seconds_at, write_machine
from benchmarks.planner.measure import MODELS, SIZES, Steps
from benchmarks.planner.outlook import Outlook
from benchmarks.planner.predict import Clock, Group, Links, shown, tail
from benchmarks.planner.ranking import bytes_of_sample, check, front, outlook_of, outlooks, sketches
from benchmarks.planner.trace import trace
from tests.helpers import ROOT, clean_environment, run_ranks, tiny_flags
from tests.marks import at_night
from utils.config.reader import load_config
from utils.measure.operations import Operation
from utils.ranks.start import join
from utils.ranks.world import find_world

A100 = load_machine("perlmutter")
NOTHING = frozenset()
LAYOUTS = [  # dp, and flags
    (1, []), (2, ["--shard=none"]), (1, ["--activation_checkpoint=block"]),
    (1, ["--tensor_parallel=2", "--context_parallel=2", "--sp_regather", "--cp_regather"]),
    (2, ["--tensor_parallel=2", "--shard=weights"]), (1, ["--rollout_steps=2", "--rollout_from=0"]),
]  # fmt: skip
MORE_LAYOUTS = [
    (1, ["--mlp_chunks=4"]), (2, ["--tensor_parallel=2"]), (4, ["--shard=gradients"]), (4, ["--shard=weights"]),
    (2, ["--tensor_parallel=2", "--no_sequence_parallel", "--activation_checkpoint=mlp"]),
    (2, ["--context_parallel=2", "--cp_attention=ulysses", "--accumulation_steps=2"]),
    (2, ["--context_parallel=2", "--shard=gradients", "--accumulation_steps=2"]),
]  # fmt: skip


def flags_for(folder, *flags):
    """A model whose weights and activations both count."""
    size = ("--embed_dim=64", "--depth=3", "--num_heads=8", "--img_size", "64", "64", "--patch_size=4")
    return tiny_flags(folder, *size, "--local_batch_size=4", "--enable_fused", *flags)


def given(config):
    """All that a layout says, as a configuration has it; and its tp and cp."""
    return frozenset(f.name for f in dataclasses.fields(Layout)[1:]), (config.tensor_parallel, config.context_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("dp, flags", [*LAYOUTS, *(at_night(*x) for x in MORE_LAYOUTS)])
def test_an_outlook_is_that_of_the_whole_model(tmp_path, dp, flags):
    """From two traces of one block: what one trace of all blocks computes, sends and holds."""
    argv = flags_for(tmp_path, *flags)
    whole, config = trace(dp, argv), load_config(argv, chapter=2)[0]
    ranks = dp * config.tensor_parallel * config.context_parallel
    ((_, sketch, end),) = sketches(config, *given(config))
    found, parts = Counter(), config.accumulation_steps
    for part, operations in sketch.of(4).operations.items():
        for op in operations:
            found[op.phase, op.kind] += parts * (1 if part == "rest" else config.depth) * op.flops
    assert +found == whole.flops()
    assert end.rest + config.depth * end.block == whole.parameters
    ours = outlook_of(
        config, dataclasses.replace(A100, device="cpu"), ranks
    )  # of a GPU's two batches the trace has one
    sent = whole.summary()["sent"]
    for axes in ("tp", "cp", "tp-cp", "dp-cp"):
        # A norm is a number: with shared gradients it goes over dp, too.
        assert ours.sent.get(axes, 0.0) == pytest.approx(sent[axes], rel=0.01, abs=100), axes
    # What records keeps some tensors of a chunk longer than a run does.
    assert ours.bytes == pytest.approx(sum(whole.peak.values()), rel=0.2 if config.mlp_chunks > 1 else 0.1)
    if config.shard != "weights":  # of two gathered blocks the peak may have one
        assert ours.memory["weights"] == pytest.approx(whole.peak["Parameter"], rel=0.1)
    kept = sum(n for part, n in whole.after_forward.items() if part == "Activation")
    assert ours.memory["activations"] == pytest.approx(kept, rel=0.02)


def test_all_layouts_that_train_mp_takes_are_tried(tmp_path):
    """And no other; each once; what a flag says stays."""
    config = load_config(flags_for(tmp_path), chapter=2)[0]
    tried = [x for tp, cp in models(config, NOTHING, 8) for x in variants(config, NOTHING, tp, cp)]
    assert len(set(tried)) == len(tried)
    assert {(x.tensor_parallel, x.context_parallel) for x in tried} == {
        (tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8
    }
    assert any(x.cp_attention == "ulysses" and x.context_parallel == 4 for x in tried)
    assert not any(x.cp_attention == "ulysses" and 8 // x.tensor_parallel % x.context_parallel for x in tried)
    assert not any(x.cp_regather and x.activation_checkpoint == "block" for x in tried)
    config = load_config(flags_for(tmp_path, "--activation_checkpoint=mlp", "--no_sequence_parallel"), chapter=2)[0]
    asked = frozenset({"activation_checkpoint", "sequence_parallel"})
    of_asked = {(x.activation_checkpoint, x.sequence_parallel) for x in variants(config, asked, 2, 2)}
    assert of_asked == {("mlp", False)}


def test_parts_of_a_batch(tmp_path):
    """Those that divide, and what flags say; a pass has at least a sample."""
    config = load_config(["--config=mp"], chapter=2)[0]
    assert list(parts_of(config, NOTHING, 16)) == [(1, 4), (2, 2), (4, 1)]
    assert list(parts_of(config, NOTHING, 3)) == []
    four = load_config(["--config=mp", "--accumulation_steps=4"], chapter=2)[0]
    asked = frozenset({"accumulation_steps"})
    assert list(parts_of(four, asked, 16)) == [(4, 1)] and list(parts_of(four, asked, 64)) == []
    local = load_config(["--config=mp", "--local_batch_size=8", "--accumulation_steps=2"], chapter=2)[0]
    assert list(parts_of(local, NOTHING, 64)) == [(2, 8)]


@pytest.mark.nightly
def test_what_train_mp_refuses_is_not_offered(tmp_path):
    """Whatever else the flags say: sharing out with a model compiled as one, or an optimiser of whole weights."""
    for flags, refused in (
        (["--enable_jit", "--compile_modules=ViT"], True), (["--optimizer=Adafactor"], True), (["--noddp"], True),
        (["--enable_jit"], False),
    ):  # fmt: skip
        config = load_config(flags_for(tmp_path, *flags), chapter=2)[0]
        assert is_taken(Layout(4), config) and is_taken(Layout(4, shard="weights"), config) != refused, flags
    config = load_config(flags_for(tmp_path, "--optimizer=Adafactor"), chapter=2)[0]
    assert {(x.layout.tensor_parallel, x.layout.shard) for x in outlooks(config, NOTHING, A100, 4)} == {(1, "none")}


def test_what_flags_say_is_tried_even_where_it_is_never_the_best(tmp_path):
    flags = ["--activation_checkpoint=mlp", "--mlp_chunks=4", "--tensor_parallel=2", "--context_parallel=128"]
    config = load_config(flags_for(tmp_path, *flags), chapter=2)[0]
    asked = frozenset(flag[2:].split("=")[0] for flag in flags)
    assert list(models(config, asked, 512)) == [(2, 128)]
    assert {(x.activation_checkpoint, x.mlp_chunks) for x in variants(config, asked, 2, 128)} == {("mlp", 4)}


def test_a_layout_in_words_is_one_that_can_be_run():
    layout = Layout(2, 4, 1, "cp-tp-dp", False, cp_attention="ulysses", shard="weights", accumulation_steps=2)
    flags = layout.flags()
    assert flags == [
        "--tensor_parallel=4", "--parallel_order=cp-tp-dp", "--no_sequence_parallel", "--cp_attention=ulysses",
        "--shard=weights", "--accumulation_steps=2",
    ]  # fmt: skip
    config = load_config(["--config=mp", *flags], chapter=2)[0]
    assert all(getattr(config, f.name) == getattr(layout, f.name) for f in dataclasses.fields(Layout)[1:])
    assert layout.on(load_config(["--config=mp"], chapter=2)[0]) == config
    hires = load_config(["--config=hires"], chapter=2)[0]  # which computes blocks again where nobody says otherwise
    assert plan.title(Layout(2, 4), hires) == "dp 2 x tp 4 x cp 1 --activation_checkpoint=none"
    asked = ["--config=mp", "--shard=weights"]
    told = plan.command(layout, A100, load_config(asked, chapter=2)[0], asked)
    assert told == (
        "sbatch -N 2 submit_pm_mp.sh --config=mp --shard=weights --tensor_parallel=4 --parallel_order=cp-tp-dp "
        "--no_sequence_parallel --cp_attention=ulysses --accumulation_steps=2"
    )


def test_a_layout_unlike_its_section_is_said():
    """The section `hires` computes blocks again: a layout that does not, says so."""
    config = load_config(["--config=hires"], chapter=2)[0]
    assert Layout(1).flags(config) == ["--activation_checkpoint=none"]
    assert Layout(1, activation_checkpoint="block").flags(config) == []


def test_where_groups_lie():
    """Of 16 ranks in nodes of 4."""
    near, far = Layout(4, 4, 1), Layout(4, 4, 1, "dp-cp-tp")
    assert groups_of(near, 4)["tp"] == Group(4, 4) and groups_of(near, 4)["dp"] == Group(4, 1)
    assert groups_of(far, 4)["tp"] == Group(4, 1) and groups_of(far, 4)["dp"] == Group(4, 4)
    assert [x.parallel_order for x, _ in orders(near, 4)] == ["tp-cp-dp", "cp-dp-tp"]
    assert len(list(orders(Layout(8, 1, 1), 4))) == 1
    # The first group of 3 lies in a node, the second in two: with one rank of it in one of them.
    assert groups_of(Layout(4, 1, 3), 4)["cp"] == Group(3, 1)
    assert groups_of(Layout(2, 6, 1), 4)["tp"] == Group(6, 2)


def test_curves():
    curve = [[10.0, 1.0], [1000.0, 100.0]]
    assert [at(curve, x) for x in (1, 10, 100, 1000, 5000)] == pytest.approx([1, 1, 10, 100, 100])
    assert [seconds_at(curve, x) for x in (1, 100, 2000)] == pytest.approx([1, 10, 200])


def test_collectives_as_measured_or_by_their_algorithms():
    link = Link(1e-6, 1e9, {"all_reduce 4": [[1e3, 1e-3], [1e6, 2e-3]]})
    machine = dataclasses.replace(A100, links={"node": link, "network": Link(1e-5, 1e8)})
    groups = {"tp": Group(4, 4), "cp": Group(2, 2), "dp": Group(4, 1), "dp-cp": Group(8, 2), "pp": Group(1, 1)}
    links = Links(machine, groups)
    assert links.collective("all_reduce", 1e6, "tp") == 2e-3
    assert links.collective("all_gather", 1e6, "cp") == pytest.approx(1e-6 + 0.5e6 / 1e9)
    assert links.collective("all_gather", 1e6, "dp") == pytest.approx(3e-5 + 0.75e6 / 1e8)
    assert links.collective("all_gather", 1e6, "dp-cp") == pytest.approx(7e-5 + 0.875e6 / 2e8)  # two cards a node
    assert links.collective("all_to_all", 1e6, "cp") == pytest.approx(1e-6 + 0.5e6 / 1e9)
    assert links.collective("all_to_all", 1e6, "dp-cp") == pytest.approx(7e-5 + 0.75e6 / 1e8)  # 6 of 8 parts, one card
    ring, tree = 2 * (7e-5 + 0.875 * 8 / 2e8), 2 * (3e-5 + 8 / 2e8)
    assert links.collective("all_reduce", 8, "dp-cp") == pytest.approx(min(ring, tree)) and tree < ring
    assert links.collective("all_reduce", 1e6, "pp") == 0


def test_what_goes_on_beside():
    """The last message comes when all operations are done; what they cannot hide, is seen."""
    assert shown(10, 1.0, 100.0) == 1 and shown(10, 1.0, 5.0) == pytest.approx(10 - 4.5) and shown(0, 1.0, 1.0) == 0
    assert tail(0.01, 1) == 0 and tail(0.01, 64) == pytest.approx(0.01 * math.sqrt(2 * math.log(64)))


def operation(kind, name, moved=0, flops=0):
    sizes = (1, 1, 1, 1, 64) if kind == "attention" else ()
    return Operation(kind, "forward", "", torch.bfloat16, name, moved, 0, flops, sizes)


def test_compiled_operations_make_one_pass():
    """Those that compute little, between two others, take the time of the largest."""
    machine = dataclasses.replace(A100, moving={"": [[1, 1e9]]}, products={"bfloat16": [[1, 1e9]]})
    small = [operation("memory", "add", 1000), operation("memory", "gelu", 3000), operation("memory", "mul", 2000)]
    chain = [*small, operation("product", "mm", 10, 5000), *small]
    plain, fused = Clock(machine).work(chain), Clock(machine, fuses=True).work(chain)
    assert plain.seconds == pytest.approx({"memory": 12e-6, "product": 5e-6}) and plain.count == 7
    assert fused.seconds == pytest.approx({"memory": 6e-6, "product": 5e-6}) and fused.count == 3


def test_machines_that_come_with_the_project():
    """Each says that it is from datasheets, and where each kind of figure is from."""
    names = [path.stem for path in machines.FOLDER.glob("*.json")]
    assert sorted(names) == ["frontier", "h100-ndr", "h200-ndr", "perlmutter", "perlmutter-80gb"]
    for name in names:
        machine = load_machine(name)
        assert machine.source == "datasheets" and machine.device == "cuda"
        kinds = {"host", "products", "attention", "moving", "links", "copy", "storage", "memory", "beside", "noise"}
        assert kinds <= machine.sources.keys(), name
        assert {"float32", "bfloat16", "float16"} <= machine.products.keys() & machine.attention.keys()


def test_a_machine_without_links_is_for_one_rank(tmp_path):
    config, _ = load_config(["--config=demo", "--yaml_config", str(ROOT / "config/ViT.yaml")], chapter=2)
    alone = dataclasses.replace(A100, links={})
    assert check(config, alone, 1) and check(config, dataclasses.replace(A100, per_node=4), 4)
    with pytest.raises(ValueError, match="has no link of a node, over which 2 ranks would send: measure it"):
        check(config, alone, 2)


def test_a_machine_that_is_none(tmp_path):
    good = dataclasses.asdict(A100)
    assert machine_of(json.loads(json.dumps(good))) == A100
    for change, told in (
        ({"noise": None}, "above 0"), ({"per_node": "4"}, "whole number"), ({"host": float("nan")}, "above 0"),
        ({"device": "tpu"}, "device is 'tpu'"), ({"moving": {"add": [[1, 1]]}}, 'no entry ""'),
        ({"products": {"int8": [[1, 1]]}}, "int8"), ({"products": {"float32": [[2, 1], [1, 1]]}}, "increasing"),
        ({"surprise": 1}, "surprise"), ({"per_node": 4.5}, "whole number"), ({"links": {"moon": {}}}, "moon"),
        ({"per_node": True}, "whole number"), ({"name": {"x": 1}}, "and a line"),
        ({"name": "a\x1b[31m"}, "and a line"),
        ({"attention": {"float32": {"forward 1000000": [[1, 1]]}}}, "attention of float32"),
        ({"attention": {"float32": {"forward": [[1, 1]]}}}, "attention of float32"),
        ({"attention": {"float32": {"forward 64": [[1, 1]]}}}, "attention of float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            machine_of(good | change)
    write_machine(tmp_path / "new" / "good.json", good)
    assert load_machine(str(tmp_path / "new" / "good.json")) == A100
    for name, text, told in (
        ("a.json", None, "No such file"), ("b.json", "{", "not valid JSON"), ("c.json", "{}", "it lacks"),
        ("d.json", "[1]", "is no machine's file"), ("e.json", '{"links": 3}', "is no machine's file"),
        ("f.json", "[" * 10**5, "nested too deeply"), ("g.json", f"[{10**400}]", "a number of 401 digits"),
    ):  # fmt: skip
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=told) as error:
            load_machine(str(tmp_path / name))
        assert "\n" not in str(error.value) and "make doctor" in str(error.value)


def outlook(seconds, size, **layout):
    return Outlook(Layout(1, **layout), 1, seconds, {"product": seconds}, "products", 0.0, {"weights": size}, {})


def test_the_simplest_of_the_fast_ones():
    """Of those that fit and are about as fast as the fastest."""
    found = [outlook(1.0, 9.0), outlook(1.005, 4.0, mlp_chunks=4), outlook(1.01, 5.0), outlook(1.2, 1.0)]
    assert plan.best_of(found, 10.0) is found[0] and plan.best_of(found, 5.0) is found[2]
    assert plan.best_of(found, 1.0) is found[3] and plan.best_of(found, 0.5) is None
    assert front(found) == [found[0], found[1], found[3]]


@pytest.mark.slow
def test_what_a_step_waits_for_bounds_it(tmp_path):
    """Whatever takes longest beside it: files that are read ahead, the host of a GPU. Else it is the longest part."""
    config = load_config(flags_for(tmp_path, "--num_data_workers=2"), chapter=2)[0]
    quiet = dataclasses.replace(A100, host=1e-12, storage=None, filesystem=None)
    slow_files = dataclasses.replace(quiet, storage=0.9 * quiet_rate(config, quiet))
    for machine, told in (
        (quiet, "products"), (slow_files, "storage"), (dataclasses.replace(quiet, host=1e-3), "host"),
        (dataclasses.replace(quiet, device="cpu", host=1e-9), "products"),
    ):  # fmt: skip
        assert outlook_of(config, machine, 1).limit == told
    alone = dataclasses.replace(config, num_data_workers=0)  # reading comes on top, and is not the longest part
    assert outlook_of(alone, dataclasses.replace(slow_files, storage=1e3 * slow_files.storage), 1).limit == "products"


def quiet_rate(config, machine):
    """Bytes per second that a step reads which waits for no file."""
    return config.local_batch_size * bytes_of_sample(config) / outlook_of(config, machine, 1).seconds


def command(folder, *more):
    return [sys.executable, "benchmarks/plan.py", *flags_for(folder), *more]


@pytest.mark.nightly
def test_a_plan_from_end_to_end(tmp_path):
    """On 4 ranks: what it tells, its record, its picture, and that the command it gives is one that a run takes."""
    record = tmp_path / "plan.json"
    done = subprocess.run(
        command(tmp_path, "--machine", "perlmutter", "--ranks", "4", "--json", str(record)),
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 A100 of 40 GB a node, Slingshot 11 (Perlmutter) (datasheets)" in done.stdout
    for told in (
        "To run: dp 4 x tp 1 x cp 1",
        "torchrun --nproc_per_node=4 train_mp.py",
        "limited by host",
        "How far off",
    ):
        assert told in done.stdout, told
    found = json.loads(record.read_text())
    assert found["best"]["layout"]["dp"] == 4 and found["figures"]["layouts"] > 200
    times = [row["seconds"] / row["samples"] for row in found["front"]]
    sizes = [row["bytes"] for row in found["front"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(b > 0.99 * a for a, b in itertools.pairwise(times))
    assert record.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, told",
    [
        (["--machine", "mainframe", "--ranks", "4"], "cannot read the machine mainframe"),
        (["--machine", "perlmutter", "--ranks", "0"], "ranks is 0: take 1 or more"),
        (["--machine", "perlmutter", "--ranks", "4", "--tensor_parallel=3"], "no layout of 4"),
        (["--machine", "perlmutter", "--ranks", "1", "--embed_dim=32768", "--depth=64"], "take more ranks"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, more, told):
    with pytest.raises(SystemExit) as end, errors_in_one_line():
        plan.main([*flags_for(tmp_path), *more])
    shown = capsys.readouterr().err
    assert end.value.code == 2 and told in shown and shown.count("\n") == 1, shown


def test_what_cannot_be_known_is_said(tmp_path):
    config = load_config(flags_for(tmp_path, "--amp_mode=bf16"), chapter=2)[0]
    machine = dataclasses.replace(A100, attention={"float32": A100.attention["float32"]})
    with pytest.raises(ValueError, match="no fused attention of bfloat16"):
        outlook_of(config, machine, 1)
    with pytest.raises(ValueError, match="no matrix products of bfloat16"):
        outlook_of(config, dataclasses.replace(A100, products={"float32": [[1, 1]]}), 1)
    config = load_config(flags_for(tmp_path, "--activation_checkpoint=step"), chapter=2)[0]
    with pytest.raises(ValueError, match="activation_checkpoint step"):
        outlook_of(config, A100, 1)


def on_ranks(folder):
    """Measure a machine, with few and small models."""
    MODELS["cpu"], SIZES["cpu"] = [(16, 2, 16, 16, 1), (32, 2, 16, 32, 2)], (2**10, 2**14)
    world = find_world(os.environ)
    join(world)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        measuring.main(world, ["cpu", "0"])
    if world.rank == 0:
        (folder / "machine.json").write_text(told.getvalue())
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_machine_is_measured_by_its_ranks(tmp_path):
    """Two of them. What is measured is a machine's file, and the planner takes it."""
    for done in run_ranks(2, on_ranks, tmp_path):
        assert done.returncode == 0, done.stderr
    machine = load_machine(str(tmp_path / "machine.json"))
    assert (machine.device, machine.per_node, machine.source) == ("cpu", 2, "measured")
    assert 0 < machine.drift < 1 and "drifted by" in plan.errors(machine) and "drifted" not in plan.errors(A100)
    assert {"add", "native_layer_norm", "gelu", "_fused_adam_", ""} <= machine.moving.keys()
    assert set(machine.links["node"].collectives) == {
        f"{kind} 2" for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    assert 1e8 < max(rate for _, rate in machine.products["float32"]) < 1e13 and 1e-7 <= machine.host < 1e-3
    config = load_config(flags_for(tmp_path, "--tensor_parallel=2"), chapter=2)[0]
    assert 1e-3 < outlook_of(config, machine, 2).seconds < 100
    with pytest.raises(ValueError, match="measured on one"):
        outlook_of(config, machine, 4)
    with pytest.raises(ValueError, match="do not fill nodes of 2"):
        outlook_of(config, machine, 3)


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 2), (70, 3), (1000, 8)])
def test_rounds_of_steps_fill_the_seconds(seconds, rounds, monkeypatch):
    """Of two seconds a model; each model's fastest is taken, and how far its rounds lay apart is told."""
    models, taken = 12, []

    def one_step(bench, share):
        assert share == seconds / 2 / models
        taken.append(bench)
        return Steps(False, [], [], [10.0 - (len(taken) - 1) // models])  # a second faster in each round

    monkeypatch.setattr(measuring, "Bench", lambda flags, local_rank: flags)
    monkeypatch.setattr(measuring, "time_steps", one_step)
    monkeypatch.setattr(measuring, "gathered", lambda values: values)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: 2.0 * len(taken))
    best, drift = measuring.best_steps(torch.device("cpu"), 0, seconds)
    assert len(taken) == rounds * models and [found.step for found in best] == [11.0 - rounds] * models
    assert drift == pytest.approx((rounds - 1) / 2 / (10 - (rounds - 1) / 2))


@pytest.mark.parametrize(("share", "steps"), [(0.0, 1), (0.081, 3), (60.0, 5)])
def test_of_a_slow_model_fewer_steps_are_taken(share, steps, monkeypatch):
    """All ranks take as many as the slowest has time for: a pair, watched and not, takes 10 ms here, 20 ms there."""
    taken, sent = [], []

    def step(bench, watch, watching):
        taken.append(watching)
        return 0.005

    def gathered(values):
        sent.append(values)
        return [*values, *([0.02] if len(sent) == 1 else [])]

    monkeypatch.setattr(measuring, "step_seconds", step)
    monkeypatch.setattr(measuring, "gathered", gathered)
    monkeypatch.setattr(measuring, "allow_tf32", lambda wanted: None)
    bench = types.SimpleNamespace(device="cpu", config=types.SimpleNamespace(tf32=False), is_timed=True)
    found = measuring.time_steps(bench, share)
    watched = [isinstance(x, measuring.Stopwatch) for x in taken]
    assert watched == [False, True] * (1 + steps) and len(found.whole) == steps
    assert sent[0] == [0.01] and found.step == 0.005


def test_a_long_front_is_thinned_by_limits_of_memory(monkeypatch):
    """For each limit the fastest that keeps it: a step down in memory is never passed over for a slower one."""
    monkeypatch.setattr(plan, "SHOWN", 5)
    found = [types.SimpleNamespace(seconds=i, bytes=size) for i, size in enumerate((160, 150, 80, 79, 78, 41, 20, 10))]
    assert [x.bytes for x in plan.thinned(found)] == [160, 80, 20, 10]  # limits: 160, 80, 40, 20, 10
    assert plan.thinned(found[:5]) == found[:5]
