"""Some of the 72 combinations of `make combinations`, and the record of them all."""

import json

import pytest

from benchmarks.combinations import AMP, BOUNDS, CHECKPOINT, CHUNKS, FUSED, JIT, data, difference, flags_of, losses
from tests.helpers import ROOT


@pytest.mark.nightly
@pytest.mark.parametrize(
    "combination",
    [("none", True, False, "block", 4), ("bf16", True, True, "mlp", 4)],
)
def test_optimisations_together_change_no_loss(tmp_path, combination):
    amp = combination[0]
    base = data(str(tmp_path))
    plain = losses([*base, *flags_of(amp, False, False, "none", 1), "--run_num", "plain"])
    together = losses([*base, *flags_of(*combination)])
    assert plain[-1] < 0.95 * plain[0]  # there is something to learn
    assert difference(together, plain) < BOUNDS[amp][0]


def test_the_record_has_every_combination_within_its_bounds():
    record = json.loads((ROOT / "benchmarks/results/combinations.json").read_text())["figures"]
    names = {
        " ".join(flags_of(amp, fused, jit, checkpoint, chunks)): amp
        for amp in AMP for fused in FUSED for jit in JIT for checkpoint in CHECKPOINT for chunks in CHUNKS
    }  # fmt: skip
    assert len(names) == 72
    assert all(record[name] <= BOUNDS[amp][0] for name, amp in names.items())
    assert all(record[f"{amp} from float32"] <= BOUNDS[amp][1] for amp in AMP)
