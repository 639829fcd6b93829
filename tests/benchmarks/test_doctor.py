"""The doctor: what it says of machines, data and sections that are not well."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import torch

from benchmarks import doctor
from benchmarks.doctor import memory, read_speed, storage, values
from benchmarks.node import machine
from benchmarks.node.machine import Line, cores, cpu_list, libraries, limits, sizes, versions
from tests.helpers import ROOT, clean_environment, tiny_flags
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.data.dataset import WeatherData

GIB = 2**30


def changes(lines):
    return [str(line) for line in lines if line.change]


def weather(folder, *flags):
    return WeatherData(load_config(tiny_flags(folder, *flags))[0].with_batches(1))


def test_which_kernels_of_attention_there_are(monkeypatch):
    """On a GPU, too; a package that is there is named with its version."""
    (own,) = map(str, libraries())
    assert own == "good    PyTorch's kernels: math, flash (for CPUs)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.nn.attention, "_get_flash_version", lambda: "2.7.4", raising=False)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name == "flash_attn")
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: {"flash-attn": "2.8.3"}[name])
    own, package = map(str, libraries())
    assert "math, efficient, flash 2.7.4, cuDNN's (91002)" in own
    assert package == "good    package flash_attn 2.8.3: --attention flash_attn"


@pytest.mark.slow
def test_a_machine_from_end_to_end(tiny):
    """Two ranks; and one finding of each kind is there."""
    command = [sys.executable, "benchmarks/doctor.py", "--nproc", "2", *tiny_flags(tiny), "--tensor_parallel=2"]
    command += ["--json", str(tiny / "doctor.json")]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if line and not line.startswith((" ", "("))]
    sections = [
        "Versions",
        "Devices",
        "Cores",
        "Sizes",
        "Memory",
        "Limits",
        "Data",
        "Storage",
        "Communication",
    ]
    assert titles[:-1] == sections
    assert titles[-1] == "All is well." or titles[-1].endswith("thing(s) to change")
    for words in (
        "tp of 2 ranks: each sends ",
        " ms for what a step sends over it, which computes about ",
        "21 samples of 3 channels, 16 x 32",
        "a rank needs",
        "GB/s) with 16",
        "is taken to reach",
    ):
        assert words in done.stdout, words
    told = [line[2:] for line in done.stdout.splitlines() if line.startswith(" ")]
    assert all(line.startswith(("good  ", "change  ")) for line in told)
    record = json.loads((tiny / "doctor.json").read_text())
    assert [str(Line(**line)) for lines in record["lines"].values() for line in lines] == told
    assert record["figures"]["changes"] == sum(line.startswith("change") for line in told)


def test_what_a_user_gets_wrong_is_one_line(tiny):
    for flags, words in (
        (["--nproc", "3", "--tensor_parallel=2"], "nproc 3 does not divide"),
        (["--lr", "-1"], "lr"),
        (["--seconds", "-1"], "seconds -1 are not"),
    ):
        with pytest.raises(ValueError, match=words):
            doctor.main([*tiny_flags(tiny), *flags])


def test_a_short_look_at_what_the_machine_can_do(tiny, monkeypatch, capsys):
    def refused(device, ranks, storage, seconds):
        raise ValueError(f"asked for {seconds} s")

    monkeypatch.setattr(doctor, "measure", refused)
    for flags, told in (([], "asked for 45 s"), (["--seconds", "7"], "asked for 7.0 s")):
        doctor.main([*tiny_flags(tiny), "--nproc", "1", "--machine", str(tiny / "machine.json"), *flags])
        assert told in capsys.readouterr().out and not (tiny / "machine.json").exists()


def test_versions_that_differ(monkeypatch):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    installed = dict(line.split("==") for line in lines if "==" in line)
    monkeypatch.setattr(machine.importlib.metadata, "version", installed.__getitem__)
    assert not changes(versions())
    installed |= {"torch": installed["torch"] + "+cpu", "numpy": "0.1"}
    (line,) = changes(versions())
    assert line.startswith("change  numpy 0.1: requirements.txt was tested with ")


def test_cores_threads_and_numa_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "cores_in_reach", lambda: {0, 1, 8, 9})
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    for node, text in (("node0", "0-7"), ("node1", "8-11,13\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    monkeypatch.setattr(machine, "NODES", tmp_path)
    assert not changes(cores(Config(), 1))
    two = changes(cores(Config(num_data_workers=5), 2))
    assert len(two) == 2 and "lower --num_data_workers to 4" in two[0] and "2 NUMA node(s): bind" in two[1]
    eight = changes(cores(Config(), 8))
    assert "8 ranks need a core each" in eight[0] and "export OMP_NUM_THREADS=1" in eight[1]


def test_sizes_that_matrix_units_do_not_like():
    def look(*flags):
        (line,) = sizes(load_config(["--config=base", *flags], chapter=2)[0])
        return line

    assert look().change is None and "64" not in look().found.partition(";")[2]
    assert look("--tensor_parallel=4").found.endswith("; the first is no multiple of 64")
    assert "multiples of 8: embed_dim over num_heads" in look("--embed_dim=96").change
    odd = look("--n_out_channels=3", "--patch_size=3")
    assert odd.change.endswith("a window's numbers, read, and forecast") and "read 180, and forecast 27" in odd.found


def test_lists_of_cores():
    assert cpu_list("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8} and cpu_list("\n") == set()


def test_few_open_files(tiny, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    assert not changes(limits(weather(tiny), 256))
    assert "the hard limit (ulimit -Hn) to 1027" in changes(limits(weather(tiny), 257))[0]


def test_data_and_statistics_that_do_not_fit(tiny):
    assert not changes(values(weather(tiny)))
    stds = tiny / "stats/global_stds.npy"
    np.save(stds, np.load(stds) * np.float32([1, 10, 1])[None, :, None, None])
    (line,) = changes(values(weather(tiny)))
    assert "ch1 has mean" in line and "make them anew" in line
    for path in (tiny / "train").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["fields"][:, 2, 3, 4] = np.nan
    assert "ch2 lacks values: they are not finite, or huge" in changes(values(weather(tiny)))[1]


def test_storage_that_is_too_slow(tiny, monkeypatch):
    data, speeds = weather(tiny, "--num_data_workers", "2"), {1: 10.0, 16: 100.0}
    monkeypatch.setattr(doctor, "read_speed", lambda reader, depth: speeds[depth])
    assert not changes(storage(data, 15))
    (line,) = changes(storage(data, 90))
    assert line.endswith("this node computes about 90.0: --num_data_workers 4 --read_depth 16")
    assert "--stage_dir" in changes(storage(data, 1000))[0]
    speeds[16] = 12.0  # reads at once do not help here
    assert "--stage_dir" in changes(storage(data, 15))[0]
    monkeypatch.setattr(data.train_loader, "is_direct", False)
    assert "each decodes a frame" in changes(storage(data, 1000))[0]


def test_reads_are_counted_once(tiny, monkeypatch):
    reader = weather(tiny).train_loader.reader
    seconds, read = iter((0.0, 2.0)), []
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(reader, "read", read.append)
    assert read_speed(reader, 3) == 24 / 2  # 3 batches of 8
    assert len(read) == 2 * 24 and len({(job.file, job.t) for job in read if job.part == 0}) == 21  # all there are


def test_memory_that_is_not_there(monkeypatch):
    found = {"parameters": GIB, "peak": 20 * GIB, "after_forward": {"Optstate": 8 * GIB, "Activation": 8 * GIB}}
    found["after_forward"]["Parameter"] = 4 * GIB
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    config = Config(global_batch_size=10**6 * 2).with_batches(10**6)
    (line,) = changes(memory(config, 10**6, found))
    assert "a rank needs 20.00 GiB for tensors: weights 4.00, optimiser 8.00, gradients 4.00, activations 8.00" in line
    assert line.endswith("try --shard gradients of train_mp.py, then --tensor_parallel 2 of train_mp.py")
    found["after_forward"]["Activation"] = 16 * GIB
    (line,) = changes(memory(config, 10**6, found))
    flags = ("--local_batch_size 1 --accumulation_steps 2", "--activation_checkpoint block", "--context_parallel 2 of")
    assert f"try {', then '.join(flags)}" in line
    assert not changes(memory(config, 1, found | {"peak": GIB}))
    (line,) = changes(memory(dataclasses.replace(config, ema_decay=0.999), 10**6, found))
    assert "a rank needs 20.00 GiB" in line and "activations 16.00, average 4.00" in line


@pytest.mark.parametrize(
    "ours, folder, name",
    [
        ("0::/job_7/step_0\n", "", "memory.max"),
        ("5:cpu,memory:/job_7/step_0\n1:cpuset:/\n", "memory", "memory.limit_in_bytes"),
    ],
)
def test_a_job_has_no_more_memory_than_it_was_given(monkeypatch, tmp_path, ours, folder, name):
    (tmp_path / "ours").write_text(ours)
    monkeypatch.setattr(machine, "OUR_CGROUPS", tmp_path / "ours")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    assert machine.host_memory() == psutil.virtual_memory().total  # no such folders
    step = tmp_path / folder / "job_7/step_0"
    step.mkdir(parents=True)
    (step / name).write_text("max\n")
    (step.parent / name).write_text("1000\n")
    assert machine.host_memory() == 1000


def speeds(**groups):
    """What collectives.py tells: GB/s in each group, of 4 ranks; an all_gather is half as fast."""
    kinds = {"all_reduce": 1.0, "all_gather": 0.5}
    found = {
        f"{group.replace('_', '-')} {kind}": {"ranks": 4, "gb_per_sec": speed * share}
        for group, speed in groups.items() for kind, share in kinds.items()
    }  # fmt: skip
    return {"groups": found, "cores": [[0, 1], [0, 1], [2], [3]], "networks": []}


def test_a_step_is_one_of_the_longest_forecasts():
    """Whose messages are counted: K passes take K times as long."""
    config = load_config(
        ["--config=base", "--global_batch_size=8", "--rollout_steps", "2", "4", "--rollout_from", "5", "9"]
    )
    (one, _), (several, _) = load_config(["--config=base", "--global_batch_size=8"]), config
    seconds = [doctor.step_seconds(config, peak=1e12, flops=10**9, ranks=2) for config in (one, several)]
    assert seconds == pytest.approx([8 * 3e9 / (doctor.MFU * 2e12), 4 * 8 * 3e9 / (doctor.MFU * 2e12)])


def test_a_network_too_slow_for_what_a_step_sends(monkeypatch):
    found = speeds(tp=4.0, dp_cp=1.5)
    monkeypatch.setattr(doctor, "measure_collectives", lambda *args, **env: found)
    sent = {"tp": 1e9, "dp-cp": 1.5e9}
    lines = list(doctor.communication([], 4, sent, step=3.0))
    assert not changes(lines) and str(lines[0]) == "good    ranks share their cores, 4 on this node"
    (line,) = changes(doctor.communication([], 4, sent, step=1.5))
    assert "dp-cp of 4 ranks: each sends 1.50 GB/s in an all_reduce, 0.75 GB/s in an all_gather; 1000.0 ms for" in line
    assert "which computes about 1500.0 ms" in line and "--accumulation_steps" in line
    tp, _ = changes(doctor.communication([], 4, sent, step=0.9))
    assert "500.0 ms" in tp and tp.endswith(
        "a smaller --tensor_parallel, or its ranks in one node (--parallel_order tp-cp-dp)"
    )
    assert list(doctor.communication([], 1, sent, step=1.0)) == []


def test_gradients_go_over_the_one_group_that_there_is(monkeypatch):
    for group in ("cp", "dp"):
        monkeypatch.setattr(doctor, "measure_collectives", lambda *args, group=group, **env: speeds(**{group: 1.0}))
        (line,) = changes(doctor.communication([], 4, {"dp-cp": 1e9}, step=1.0))
        assert line.startswith(f"change  {group} of 4 ranks") and "a larger batch, in several" in line


def test_sockets_between_nodes(monkeypatch):
    """What NCCL writes when it starts, and on how many nodes."""
    told = "n1:7:7 [0] NCCL INFO NET/Plugin: none\nn1:7:7 [0] NCCL INFO Using network Socket\n"

    def call(command, env, limit):
        Path(env["NCCL_DEBUG_FILE"]).with_name("n1.7").write_text(told)
        return 0, json.dumps({k: x for k, x in speeds(tp=2.0).items() if k != "networks"}), ""

    monkeypatch.setattr(doctor, "call", call)
    for nodes, expected in ((1, []), (2, ["Socket: the machine's plugin for NCCL"])):
        monkeypatch.setattr(doctor, "spread", lambda ranks, nodes=nodes: (nodes, ranks // nodes))
        found = changes(doctor.communication([], 4, {}, step=1.0))
        assert len(found) == len(expected) and all(text in line for text, line in zip(expected, found))


@pytest.mark.parametrize("noise, drift, is_quiet", [(0.01, 0.02, True), (0.06, 0.02, False), (0.01, 0.06, False)])
def test_a_machine_that_others_use(monkeypatch, tmp_path, noise, drift, is_quiet):
    """Steps that vary, or change over the minute of a measurement, make a machine's file that is not to be trusted."""
    found = {"products": {"float32": [[1, 1e12]]}, "host": 5e-6, "noise": noise, "drift": drift}
    monkeypatch.setattr(doctor, "measure", lambda *_: found)
    told = changes(doctor.planning(tmp_path / "machine.json", torch.device("cpu"), 2, None))
    assert is_quiet is not any("measure again when it is quiet" in line for line in told)


def test_peer_to_peer_that_is_slower(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(doctor, "measure_collectives", lambda *args, **env: speeds(tp=2.0 if env else 1.0))
    (line,) = changes(doctor.communication([], 4, {}, step=1.0))
    assert "0.5 x as much as without peer-to-peer: export NCCL_P2P_DISABLE=1" in line


@pytest.mark.parametrize("change", [None, "do this"])
def test_a_line(change):
    assert str(Line("found", change)) == ("change  found: do this" if change else "good    found")
