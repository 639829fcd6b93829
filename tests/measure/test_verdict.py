"""The verdict: what bounds a run, on runs that are made to be bound by it."""

import dataclasses
import json
import platform
import re

import pytest
import torch

from networks.vit import ViT
from tests.helpers import run_folder, run_here, run_ranks, tiny_flags
from tests.marks import at_night
from tests.measure.slowed import run_slowed
from utils.config.settings import Config
from utils.device import has_bf16
from utils.measure.advice import CONDITIONS, table, tables
from utils.measure.time_table import PARTS
from utils.measure.verdict import BOUNDS, Measured, advice, memory_advice, verdict

LIGHT = ["--num_iters", "6", "--report", "--checkpoint_every", "None"]
SLOWEST = "waiting for the slowest rank"
HEAVY = [*LIGHT, "--embed_dim", "256", "--patch_size", "2", "--num_heads", "4"]
TP, NO_SP = "--tensor_parallel=2", "--no_sequence_parallel"


@pytest.mark.parametrize(
    "case, ranks, script, flags, bound, words",
    [
        ("slow disk", 1, "train.py", LIGHT, "reading", "--num_data_workers"),
        at_night("slow copies", 1, "train.py", LIGHT, "copying", "--enable_jit"),
        ("slow launches", 1, "train.py", LIGHT, "launching", "--enable_jit"),
        ("nothing", 1, "train.py", HEAVY, "computing", "bf16" if has_bf16(torch.device("cpu")) else "--enable_jit"),
        ("slow rank", 2, "train.py", LIGHT, SLOWEST, f"rank 1, on {platform.node()}, "),
        at_night("slow disk of rank 1", 2, "train.py", LIGHT, SLOWEST, "'data wait'"),
        at_night("slow collectives", 2, "train_mp.py", [*LIGHT, TP], "communicating", "--tensor_parallel"),
        at_night("slow all-reduce", 2, "train_mp.py", [*LIGHT, TP, NO_SP], "communicating", "a smaller"),
        at_night("slow gradients", 2, "train.py", LIGHT, "communicating", "--accumulation_steps"),
        # Where rank 0 waits nothing but the profile can see.
        at_night("slow copies of rank 1", 2, "train_mp.py", [*LIGHT, "--enable_jit", TP], SLOWEST, "'data copy'"),
    ],
)
def test_what_bounds_a_run(tiny, case, ranks, script, flags, bound, words):
    argv = tiny_flags(tiny, *flags)
    for _ in range(3):
        results = run_ranks(ranks, run_slowed, case, script, argv)
        assert [done.returncode for done in results] == [0] * ranks, results[0].stderr
        folder = run_folder(argv, f"{ranks}MP" if script == "train_mp.py" else f"{ranks}GPU")
        text = json.loads((folder / "report/report.json").read_text())["verdict"]
        if "something else used the cores" not in text:  # other tests may
            break
    assert text.startswith(f"This run is bound by {bound}: ") and words in text, text
    assert f"Verdict: {text}" in (folder / "out.log").read_text()
    share = int(re.search(r"for (\d+)% of the training time", text)[1])
    assert share > 50, text


def measured(parts: dict[str, list[float]], steps: list | None = None, **more) -> Measured:
    """What was measured on some ranks in two iterations; the other parts took no time."""
    (ranks,) = {len(seconds) for seconds in parts.values()}
    how = {"on_gpu": False, "is_recorded": False, "is_blind": False, "is_direct": True, "has_bf16": False, "cores": 8}
    how |= {"nodes": [f"node{rank}" for rank in range(ranks)]} | more
    seconds = {part: parts.get(part, [0.0] * ranks) for part in PARTS}
    return Measured(seconds, steps or [(99.0, 0.0)] * ranks, 2, **how)


PARTS_OF_TWO = {
    "data wait": [1, 1], "data copy": [0, 4], "forward": [3, 3], "backward": [4, 4], "communication": [7, 3],
    "other": [1, 1],
}  # fmt: skip


def test_the_shares_add_up():
    found = measured(PARTS_OF_TWO, [(3, 0), (3, 0)])
    shares = {
        "reading": 1 / 16,
        "copying": 0 / 16,
        "launching": 2 / 16,
        "computing": 6 / 16,
        "communicating": 3 / 16,
        SLOWEST: 4 / 16,
    }
    assert found.bounds() == shares and found.slowest_rank() == (1, "data copy")
    mirrored = measured({part: seconds[::-1] for part, seconds in PARTS_OF_TWO.items()}, [(3, 0), (3, 0)])
    assert mirrored.bounds() == shares and mirrored.slowest_rank() == (0, "data copy")
    together = {"launching or computing": shares.pop("launching") + shares.pop("computing")}
    for unknown in (None, (None, 0.0)):
        assert measured(PARTS_OF_TWO, [unknown, (3, 0)]).bounds() == shares | together
    assert {*found.bounds(), *together} == set(BOUNDS)


def test_waits_inside_compiled_and_recorded_code_count():
    """On a CPU the profile has only those; on a GPU all, also those that the timeline saw."""
    for on_gpu in (False, True):
        spoken = 2 if on_gpu else 0
        found = measured(
            {"step": [10, 10], "communication": [2 * spoken, 2 * spoken]},
            [(1, 4 + spoken), (3, 1 + spoken)], on_gpu=on_gpu, is_blind=on_gpu,
        )  # fmt: skip
        total = 10 + 2 * spoken
        assert found.bounds() == {
            "reading": 0, "copying": 0, "launching": 0, "computing": 2 / total,
            "communicating": (2 + 2 * spoken) / total, SLOWEST: 6 / total,
        }  # fmt: skip
        assert found.slowest_rank()[0] == 1
    # Where the timeline sees all, NCCL beside gaps between kernels is no wait.
    found = measured({"backward": [10.0, 10.0]}, [(1, 4), (1, 4)], on_gpu=True)
    assert found.bounds()["launching"] == 0.8 and found.bounds()["communicating"] == 0


def test_a_verdict_in_words():
    found = measured({"forward": [3.0], "data wait": [2.0], "validation": [4.0]}, mfu=0.5)
    assert verdict(found, Config(enable_jit=True, enable_fused=True)) == (
        "This run is bound by computing: for 60% of the training time operators worked. They reached 50% of the "
        "device's peak. Next comes reading, with 40%. To try: more ranks: this one is busy with what it has to do. "
        "44% of the run was no training, but validation."
    )


def test_a_run_of_one_step_has_no_verdict():
    found = dataclasses.replace(measured({"other": [1.0]}), iterations=0)
    assert verdict(found, Config()).startswith("No step but the first one of this process was done")


def test_what_is_tried_first_where_operators_work():
    found, plain = measured({"forward": [1.0]}, has_bf16=True), Config(attention="math", enable_fused=True)
    first = [text.split()[0].rstrip(",") for text in advice("computing", found, plain)]
    assert first == ["--amp_mode", "--attention", "--enable_jit", "more"]


def test_what_takes_less_memory():
    config = Config(global_batch_size=8, attention="math", context_parallel=2).with_batches(1)
    assert list(memory_advice(2.0, 1.0, config)) == [
        "--attention auto", "--local_batch_size 4 --accumulation_steps 2", "--activation_checkpoint block",
        "--context_parallel 4 of train_mp.py", "--cp_regather of train_mp.py",
    ]  # fmt: skip
    small = Config(global_batch_size=1, activation_checkpoint="block").with_batches(1)
    assert list(memory_advice(2.0, 1.0, small)) == ["--context_parallel 2 of train_mp.py"]
    assert list(memory_advice(1.0, 2.0, small)) == ["--tensor_parallel 2 of train_mp.py"]
    shards = {
        "none": ["--shard gradients of train_mp.py"],
        "gradients": ["--shard weights of train_mp.py"],
        "weights": [],
    }
    for shard, first in shards.items():
        several = Config(global_batch_size=4, shard=shard).with_batches(4)
        assert list(memory_advice(1.0, 2.0, several)) == [*first, "--tensor_parallel 2 of train_mp.py"]


def test_who_runs_out_of_memory_learns_what_filled_it(tiny, monkeypatch):
    forward, steps = ViT.forward, []

    def full(self, *tensors):
        steps.append(1)
        if len(steps) > 3:  # in the second epoch
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return forward(self, *tensors)

    monkeypatch.setattr(ViT, "forward", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_here(tiny_flags(tiny))
    (told,) = caught.value.__notes__
    assert re.fullmatch(
        r"Out of memory on rank 0, with GiB of weights 0\.00, gradients 0\.00, optimizer 0\.00, activations [\d.]+\. "
        r"To try: --local_batch_size 4 --accumulation_steps 2, then --activation_checkpoint block, then .*",
        told,
    )
    assert told in (run_folder(tiny_flags(tiny)) / "out.log").read_text()


def test_the_page_of_symptoms_says_what_the_program_says():
    slow, memory, doctor = map(table, ("slow", "memory", "doctor"))
    asked = {r["when"] for part in ("slow", "memory") for row in tables()[part] for r in row["try"] if "when" in r}
    assert asked == set(CONDITIONS)
    plain = re.sub(r"\[(.*?)\]\(\S*\)", r"\1", slow + memory).replace("`", "")
    config = Config(num_data_workers=4, tensor_parallel=2, context_parallel=2)
    for direct in (True, False):
        found = measured({"communication": [1.0, 2.0]}, has_bf16=True, is_direct=direct)
        for text in (text for bound in BOUNDS if bound != SLOWEST for text in advice(bound, found, config)):
            assert text in plain
    assert all(text in plain for text in memory_advice(2.0, 1.0, Config(global_batch_size=8).with_batches(1)))
    assert "a smaller `--tensor_parallel`, or its ranks in one node" in doctor and "{" not in slow + memory + doctor
    for text in (slow, memory, doctor):
        assert len({line.count(" | ") for line in text.splitlines()[2:]}) == 1
        for flag in set(re.findall(r"--(?:no_)?(\w+)", text)):
            assert flag in Config.__dataclass_fields__, flag


def test_a_fused_optimiser_is_advised_where_there_is_one():
    for name, is_advised in (("Adam", True), ("AdamW", True), ("Adafactor", False), ("Adam8bit", False)):
        assert CONDITIONS["optimiser not fused"](None, Config(optimizer=name)) == is_advised


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_advice_to_do_what_is_done(bound):
    """Whoever follows all advice gets another one in the end, and never the same twice."""
    parts = {"communication": [1.0, 2.0], "forward": [1.0, 1.0]}
    plain, done = Config(activation_checkpoint="block", tensor_parallel=2, context_parallel=2), Config(
        num_data_workers=8, read_depth=64, stage_dir="/tmp", enable_jit=True, enable_fused=True, amp_mode="bf16",
        data_loader_config="dali", cp_attention="ulysses",
    )  # fmt: skip
    for on_gpu in (True, False):
        found = measured(parts, on_gpu=on_gpu)
        before, after = list(advice(bound, found, plain)), list(advice(bound, found, done))
        assert after and len(set(before)) == len(before)
        for flag in ("--enable_jit", "--enable_fused", "--amp_mode", "--num_data_workers", "--cp_attention"):
            assert not any(text.startswith(flag) for text in after)
        assert bound == SLOWEST or len(before) > len(after)
