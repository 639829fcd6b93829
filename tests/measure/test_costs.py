"""What a run costs: the profile of a step, the machine, the summary of the model, and the files of a report."""

import csv
import gzip
import json
import re
import time

import pytest
import torch
from torch.profiler import ProfilerActivity

import train
from benchmarks.harness.bench import Bench
from benchmarks.harness.data import PLAIN
from tests.helpers import losses, records, run_here, tiny_flags
from utils.config.reader import load_config
from utils.data.dataset import WeatherData
from utils.files import cut_records
from utils.measure import costs, rates
from utils.measure.layers import summarise, summary_table
from utils.measure.machine import SystemWatch
from utils.measure.memory_timeline import memory_blocks, memory_moments, most_of_parts, parts_at_peak, timeline
from utils.measure.module_times import name_modules
from utils.measure.step_profile import EMPTY, EMPTY_CALLS, StepProfiler, activities, covered, own_times, read_trace
from utils.measure.tables import speed_means
from utils.spans import span

SMALL = [*PLAIN, "--img_size", "32", "64", "--embed_dim=96", "--depth=2", "--num_heads=3", "--residual"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A step of a small model, and its profile."""
    bench = Bench([*SMALL, "--local_batch_size=2"])
    bench.run_step()

    def known():
        gradients = [p.grad for p in bench.model.parameters()]  # of the step before: they go in this one
        return {"weights": list(bench.model.parameters()), "gradients": gradients, "optimizer": moments(bench)}

    profiler = StepProfiler(bench.device, known, tmp_path_factory.mktemp("trace") / "step.json")
    profiler.start()
    bench.model.zero_grad(set_to_none=True)
    with span("forward"):
        forecast = bench.model(bench.batch[0])
    with span("backward"):
        forecast.square().sum().backward()
    del forecast
    with span("optimizer"):
        bench.update(1e-3)
    return bench, profiler.stop()


def moments(bench):
    return [x for state in bench.optimizer.state.values() for x in state.values()]


def size(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def test_memory_by_part_is_that_of_the_tensors(profiled):
    """LiveMemory counts the same in another way: it looks at what each operation returns."""
    bench, step = profiled
    parts, counted = parts_at_peak(step.blocks), bench.memory()
    assert parts["weights"] == counted["weights"] == size(bench.model.parameters())
    assert parts["optimizer"] == size(moments(bench))
    at_the_end = {part: sizes[-1] for part, sizes in timeline(step.blocks)[1].items()}
    assert at_the_end["gradients"] == counted["gradients"]
    assert max(timeline(step.blocks)[1]["activations"]) == pytest.approx(counted["activations"], rel=0.05)
    peak = counted["peak"] - size(bench.batch)  # which came before the profile
    assert sum(parts.values()) == pytest.approx(peak, rel=0.05)


def test_operators_of_a_step(profiled):
    bench, step = profiled
    linears = 2 + 4 * len(bench.model.blocks)  # embedding and head, and those of the blocks
    assert step.calls["aten::addmm"] + step.calls["aten::mm"] == 3 * linears - 1  # the input needs no gradient
    assert 0 < step.working < sum(step.seconds.values())
    assert step.allocated["aten::gelu"] == len(bench.model.blocks) * 2 * 32 * 4 * 96 * 4
    assert not any(name.startswith("aten::empty") for name in step.allocated)


def call(name, ts, dur, tid=1):
    return {"name": name, "ts": ts, "dur": dur, "tid": tid}


def test_time_of_a_call_is_its_own():
    calls = [call("a", 0, 10), call("b", 1, 4), call("c", 2, 1), call("d", 6, 3), call("e", 20, 5), call("f", 1, 9, 2)]
    calls.sort(key=lambda e: e["ts"])
    assert {e["name"]: own for e, own in own_times(calls)} == {"a": 3, "b": 3, "c": 1, "d": 3, "e": 5, "f": 9}


def test_work_is_without_what_a_call_costs_and_a_wait_is_not_counted_twice():
    operators = [call("aten::view", 4 * i, 3) for i in range(EMPTY_CALLS)]
    operators += [call("aten::mm", 300, 10), call("aten::view", 320, 2), call("aten::mm", 330, 50, tid=2)]
    operators += [call("c10d::allreduce_", 400, 40), call("c10d::allreduce_", 501, 8)]
    spans = [call(EMPTY, 0, 250), call("communication", 500, 10)]
    events = [{**event, "ph": "X", "cat": "cpu_op"} for event in operators]
    events += [{**event, "ph": "X", "cat": "user_annotation"} for event in spans]
    step = read_trace(events, "cpu", {})
    assert step.working == pytest.approx(7e-6) and step.waiting == pytest.approx(40e-6)
    assert step.calls == {"aten::mm": 2, "aten::view": 1, "c10d::allreduce_": 2}
    assert step.seconds == pytest.approx({"aten::mm": 60e-6, "aten::view": 2e-6, "c10d::allreduce_": 48e-6})


def test_time_that_kernels_cover():
    assert covered([call("a", 0, 2), call("b", 1, 2), call("c", 1, 1), call("d", 5, 2)]) == 5


def moment(ts, address, size, kind=0):
    return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": size, "Device Type": kind, "Ev Idx": ts}}


def test_what_memory_is_for():
    spans = [call("forward", 10, 10), call("backward", 30, 10), call("optimizer", 50, 10)]
    events = [
        moment(12, 100, 8), moment(13, 101, 4), moment(15, 101, -4),  # an activation, and what passes
        moment(13, 900, 77, kind=1),  # on another device
        moment(31, 102, 2), moment(35, 100, -8), moment(36, 103, 16), moment(37, 103, -16),  # a gradient
        moment(51, 104, 32), moment(55, 1, -64), moment(61, 100, 1),
    ]  # fmt: skip
    blocks = memory_blocks(memory_moments(events, "cpu"), spans, {1: ("weights", 64), 2: ("weights", 128)})
    assert [(block.part, block.size) for block in blocks] == [
        ("weights", 64), ("weights", 128), ("activations", 8), ("temporary", 4), ("gradients", 2), ("temporary", 16),
        ("optimizer", 32), ("temporary", 1),
    ]  # fmt: skip
    peak = {"weights": 192, "optimizer": 32, "gradients": 2, "activations": 0, "temporary": 0}
    assert parts_at_peak(blocks) == peak and list(parts_at_peak(blocks))[:3] == list(peak)[:3]
    assert most_of_parts(blocks) == peak | {"activations": 8, "temporary": 16}
    moments, parts = timeline(blocks)
    assert moments[:2] == [0, 0.001] and parts["weights"][0] == 192 and parts["activations"][0] == 8
    assert parts["weights"][-1] == 128 and parts["temporary"][-1] == 1


def test_what_goes_without_a_word():
    """On a GPU what was there before and is in no list; on a CPU what another thread gave back."""
    events = [moment(1, 7, -30, kind=1), moment(2, 8, 5, kind=1), moment(3, 8, 6, kind=1)]
    blocks = memory_blocks(memory_moments(events, "cuda"), [call("forward", 0, 9)], {0: ("other", 100)})
    _, parts = timeline(blocks)
    assert parts == {"other": [70, 70, 70], "temporary": [0, 5, 0], "activations": [0, 0, 6]}
    assert [(block.size, block.end) for block in blocks if block.part == "other"] == [(100, 1), (70, float("inf"))]


def test_what_a_process_takes_of_the_machine(tmp_path):
    watch = SystemWatch(torch.device("cpu"))

    def take() -> tuple[float, float, dict[str, float], float]:
        """Return what was used, and around it: when, the CPU seconds until then, and when again."""
        return time.perf_counter(), time.process_time(), watch.take(), time.perf_counter()

    try:
        before, idle, first, begin = take()
        held = bytearray(256 * 2**20)
        (tmp_path / "file").write_bytes(held[: 64 * 2**20])
        seen = first["memory_gb"] + 0.2  # until the thread has looked while that is held
        while time.process_time() < idle + 1 or max(watch.samples["memory_gb"], default=0) < seen:
            sum(range(1000))
        del held
        end, busy, used, after = take()
        time.sleep(0.2)
        end_of_rest, _, rest, after_rest = take()
    finally:
        watch.close()
    assert end - begin <= used["seconds"] <= after - before
    assert end_of_rest - after <= rest["seconds"] <= after_rest - end
    assert used["cores"] * used["seconds"] == pytest.approx(busy - idle, abs=0.3)
    assert used["memory_gb"] >= rest["memory_gb"] + 0.2 and 0 < used["node_memory"] < 1
    assert used["written_gb"] >= 0.06 and not watch.thread.is_alive()


def test_the_summary_of_a_model(tiny):
    config = load_config(tiny_flags(tiny))[0].with_batches(1)
    data, before = WeatherData(config), torch.random.get_rng_state()
    layers = summarise(train.build_model, config, data.fields)
    assert torch.equal(torch.random.get_rng_state(), before)  # the run's random numbers do not notice
    model = train.build_model(config, data.fields)
    in_attention = 4 * 32**2 * 32 * len(model.blocks)  # of 32 tokens of width 32, between the linear layers
    linear = sum(layer.flops for layer in layers if layer.kind == "Linear")
    assert layers[0].flops == model.flops() == linear + in_attention
    assert layers[0].parameters == sum(p.numel() for p in model.parameters())
    assert [layer.name for layer in layers[1:]] == [name for name, _ in model.named_modules()][1:]
    shapes = {layer.name: layer.shape for layer in layers}
    assert shapes["ViT"] == (1, 3, 16, 32) and shapes["blocks.1.attn.qkv"] == (1, 32, 96)
    table = "\n".join(summary_table(layers))
    assert "blocks.0.mlp.fc1" in table and "blocks.1.mlp" not in table and "blocks.1 " in table


def test_the_files_of_a_report(tiny):
    argv = tiny_flags(tiny, "--report", "--num_iters", "6")
    folder = run_here(argv)
    plain = run_here([*argv, "--no_report", "--run_num", "plain"])
    assert losses(folder) == losses(plain)
    report = json.loads((folder / "report/report.json").read_text())
    tables = (
        "speed",
        "rates",
        "time",
        "modules",
        "observers",
        "system",
        "system_ranks",
        "system_nodes",
        "model",
        "memory",
        "operators",
    )
    for name in tables:
        with (folder / f"report/{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(report[name]) > 0, name
    *epochs, _, later = report["speed"]  # and means
    assert later["epoch"] == "later" and min(r["samples_per_sec"] for r in epochs) < later["samples_per_sec"]
    for row, event in zip(epochs, records(folder, "epoch"), strict=True):
        assert row["samples_per_sec"] == event["samples_per_sec"] > 0
        assert row["valid_samples_per_sec"] > 0 and row["loader_samples_per_sec"] > 0
    assert [row["epoch"] for row in report["system"]] == [1, 2, 3]
    assert all(row["cores"] > 0 and row["memory_gb"] > 0.1 and 0 < row["disk_used"] < 1 for row in report["system"])
    assert {path.stem for path in (folder / "report").glob("*.csv")} == {*tables}
    memory = {row["part"]: row["bytes"] for row in report["memory"]}
    rest = {memory.pop(part) for part in ("sum", "process")}
    assert set(memory) >= {"weights", "gradients", "optimizer", "activations"} and min(rest) == sum(
        memory.values()
    ) < max(rest)
    assert json.loads((folder / "report/step_trace.json").read_text())["traceEvents"]
    log = (folder / "out.log").read_text()
    for words in (
        "Model, for one sample",
        "Speed, samples/s",
        "Time of",
        "The machine",
        "Memory when",
        "Operators of one step",
        "Verdict",
    ):
        assert log.count(words) == 1, words
    (line,) = re.findall(r"under the profiler the step took (\S+) ms; without, (\S+) ms \(median\)", log)
    assert float(line[0]) > 0 and 0 < float(line[1]) < 1000


WORDS = {
    "time": "Time of", "speed": "Speed, samples/s", "memory": "Memory when", "operators": "Operators of one step",
    "system": "The machine", "model": "Model, for one sample",
}  # fmt: skip


@pytest.mark.parametrize("wanted", [("speed",), ("time", "model"), ("memory",), ("operators", "system")])
def test_a_report_of_some_tables(tiny, wanted):
    """What is not asked for is not measured, either."""
    folder = run_here(tiny_flags(tiny, f"--report={','.join(wanted)}", "--num_iters", "6"))
    report, log = json.loads((folder / "report/report.json").read_text()), (folder / "out.log").read_text()
    assert {name for name, words in WORDS.items() if words in log} == {*wanted}
    assert (
        {*report} & {*WORDS} == {*wanted}
        and ("modules" in report) == ("time" in wanted)
        and ("verdict" in report) == ("Verdict" in log) == ("time" in wanted)
    )
    kinds = {event["event"] for event in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    of_tables = {"speed": "rate", "time": "time", "system": "system"}
    assert kinds & {*of_tables.values()} == {of_tables[name] for name in wanted if name in of_tables}
    assert (folder / "report/step_trace.json").exists() == bool({*wanted} & {"time", "memory", "operators"})


def test_a_resumed_run_keeps_the_tables_that_it_was_asked_for_before(tiny):
    argv = tiny_flags(tiny, "--num_iters", "4", "--checkpoint_every", "2", "--keep_checkpoints", "9")
    folder = run_here([*argv, "--report", "memory", "speed"])
    before = json.loads((folder / "report/report.json").read_text())
    run_here([*argv, "--report", "speed", "--resume", str(folder / "checkpoints/00000002-validated")])
    after = json.loads((folder / "report/report.json").read_text())
    assert after.keys() == before.keys() and after["memory"] == before["memory"] and after["speed"] != before["speed"]
    assert all((folder / f"report/{name}.csv").exists() for name in after)


def test_rates_of_a_validation_that_is_done_again_are_void(tmp_path):
    path = tmp_path / "metrics.jsonl"
    event = {"event": "rate", "iteration": 5, "epoch": 1}
    path.write_text("".join(json.dumps(event | {name: 1.0}) + "\n" for name in ("training_rate", "validation_rate")))
    kept, void = cut_records(path, 5, 0)
    assert [[*event][-1] for event in kept] == ["training_rate"] and len(void) == 1
    assert cut_records(path, 5, 1)[1] == []


@pytest.mark.parametrize("flags", [("--patch_overlap=2",), ("--activation_checkpoint=block",)])
def test_modules_and_observers_take_time(tiny, flags):
    """Forward and backward; of a module those inside it, too. Recomputation is a forward pass once more."""
    folder = run_here(tiny_flags(tiny, "--report=time", "--num_iters", "6", *flags))
    report, log = json.loads((folder / "report/report.json").read_text()), (folder / "out.log").read_text()
    rows = {row["module"]: row for row in report["modules"]}
    assert next(iter(rows)) == "model" and rows["model"]["calls"] == 1
    assert rows["model.blocks.*.attn.qkv"]["calls"] == (4 if "block" in flags[0] else 2)
    block, attn, mlp = (rows[f"model.blocks.*{name}"] for name in ("", ".attn", ".mlp"))
    for part in ("forward", "backward"):
        assert rows["model"][part] > block[part] > attn[part] + mlp[part] > max(attn[part], mlp[part]) > 0
        assert rows["model.patch_embed"][part] > 0
    assert "Modules of one step, each with those inside it, ms:" in log
    names = {row["observer"]: row for row in report["observers"]}
    assert names["RunLogger.after_epoch"]["calls"] == 3 and names["Profiles.after_step"]["calls"] == 6
    assert names["RunLogger.after_epoch"]["seconds"] > 0 and "x  RunLogger.after_epoch" in log


def test_compiled_modules_are_not_looked_into():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    model[0].forward = torch.nn.Sequential.forward.__get__(model[0])  # as a compiled one, its own
    handles = name_modules(model)
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert hooked == ["", "0", "1"]
    for handle in handles:
        handle.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_rates_are_series_within_epochs(tiny, monkeypatch):
    monkeypatch.setattr(rates, "STEPS", 2)
    folder = run_here(tiny_flags(tiny, "--report=speed", "--num_iters=10", "--global_batch_size=4", "--ema_decay=0.9"))
    found = records(folder, "rate")  # 5 steps an epoch, and 2 batches of validation
    training = [(event["epoch"], event["iteration"]) for event in found if "training_rate" in event]
    assert training == [(1, 2), (1, 4), (1, 5), (2, 7), (2, 9), (2, 10)]
    validation = [event for event in found if "validation_rate" in event]
    assert all(event["validation_rate"] * event["seconds"] == pytest.approx(3) for event in validation)  # 7 are 4 and 3
    per_epoch = len(validation) // 4  # of the weights, and of their average
    at = [(event["epoch"], event["iteration"]) for event in validation]
    assert per_epoch and at == [(1, 5)] * 2 * per_epoch + [(2, 10)] * 2 * per_epoch
    assert all(event.get("training_rate", 1) > 0 and event["seconds"] > 0 for event in found)
    (epoch, _) = records(folder, "epoch")
    seconds = sum(event["seconds"] for event in found if "training_rate" in event and event["epoch"] == 1)
    assert seconds <= 20 / epoch["samples_per_sec"] * 1.05


def test_a_step_that_was_much_faster_than_others_is_doubted(tiny, monkeypatch):
    """Something else used the cores: what the others waited for nobody can tell."""
    monkeypatch.setattr(costs, "QUICK", 1e6)  # of the others: so this one was
    report = (run_here(tiny_flags(tiny, "--report=time", "--num_iters", "6")) / "out.log").read_text()
    assert "bound by launching or computing" in report and "(The profiled step took" in report


def test_mean_speeds_are_samples_over_seconds():
    """10 samples at 10/s and 30 at 60/s took 1.5 s; an epoch without a speed has none to tell."""
    others = {"loader_samples_per_sec": None, "mfu": 0.5}
    rows = [
        {"iteration": 10, "samples_per_sec": 10.0, "valid_samples_per_sec": 4.0} | others,
        {"iteration": 40, "samples_per_sec": 60.0, "valid_samples_per_sec": 12.0} | others,
    ]
    whole, later = speed_means(rows)
    assert whole["samples_per_sec"] == pytest.approx(40 / 1.5) and later["samples_per_sec"] == 60
    assert whole["valid_samples_per_sec"] == 6  # each had the same samples
    assert whole["mfu"] == pytest.approx(0.5) and whole["loader_samples_per_sec"] is None
    assert speed_means([]) == []
    (only,) = speed_means([rows[0] | {"samples_per_sec": None}])
    assert only["samples_per_sec"] is None


@pytest.mark.slow
def test_a_trace_with_stacks_says_where_calls_come_from(tiny):
    argv = tiny_flags(tiny, "--profile=torch", "--profile_steps", "1", "1", "1", "--profile_stacks", "--num_iters=4")
    (path,) = (run_here(argv) / "profile").glob("rank0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e.get("cat") == "python_function"}
    assert any(name.startswith("networks/vit.py") and name.endswith("norm_mlp") for name in names), sorted(names)[:20]


def test_a_trace_of_some_steps(tiny):
    argv = tiny_flags(tiny, "--profile", "torch", "--profile_steps", "1", "1", "2", "--num_iters", "6")
    folder = run_here(argv)
    plain = run_here([*argv, "--profile", "none", "--run_num", "plain"])
    assert losses(folder) == losses(plain) and not (plain / "profile").exists()
    (path,) = (folder / "profile").glob("rank0.*.pt.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert trace["distributedInfo"]["rank"] == 0  # Holistic Trace Analysis asks for it
    events = trace["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
    for name in ("data copy in 2", "forward", "backward", "optimizer"):
        assert name in names
    assert any(e["args"].get("Input Dims") for e in events if e.get("name") == "aten::addmm")
    with (folder / "profile/rank0_memory.csv").open() as file:
        rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    assert set(rows[0]) == {"ms", "weights", "gradients", "optimizer", "activations", "temporary"}
    assert max(row["activations"] for row in rows) > 0 and rows[-1]["ms"] > rows[0]["ms"] == 0
    assert 0 < max(row["gradients"] for row in rows) <= rows[0]["weights"]  # once, in each of two steps
    assert (folder / "profile/rank0_memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_shorter_than_its_trace_says_so(tiny):
    with pytest.raises(ValueError, match="needs 15 steps, and num_iters is 4"):
        run_here(tiny_flags(tiny, "--profile", "torch"))


def test_nsight_systems_has_the_gpus_counters_for_itself(monkeypatch):
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    gpu, both = torch.device("cuda"), {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    assert set(activities(gpu)) == both and activities(torch.device("cpu")) == [ProfilerActivity.CPU]
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert activities(gpu) == [ProfilerActivity.CPU]
