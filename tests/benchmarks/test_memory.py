"""The anatomy of a model's memory: formulas beside the simulation, and the table."""

import json

import pytest

from benchmarks.memory import anatomy, anatomy_table, off, simulated, table
from tests.helpers import ROOT
from utils.config.reader import load_config

BOUND = 0.05


@pytest.mark.parametrize(
    ("mode", "batch", "more"),
    [
        ("none", 1, ["--config=base", "--depth=2"]),
        ("fp16", 3, ["--config=base", "--depth=2"]),
        ("bf16", 16, ["--config=base", "--depth=1", "--n_in_channels=7", "--n_out_channels=5"]),
        ("fp16", 1, ["--config=mp", "--depth=2", "--img_size", "64", "128"]),  # gradients are more than activations
    ],
)
def test_formulas_are_near_the_simulation(mode, batch, more):
    flags = [*more, f"--amp_mode={mode}", f"--local_batch_size={batch}"]
    found = simulated(flags)
    errors = off(anatomy(load_config(flags)[0], found["parameters"], batch), found)
    assert max(map(abs, errors.values())) < BOUND, errors


def test_the_record_holds_the_bound_and_makes_the_tables():
    record = json.loads((ROOT / "benchmarks/results/memory.json").read_text())
    cases = record["cases"]
    assert record["figures"]["worst formula"] < BOUND and len(cases) == 18
    assert table(cases).splitlines()[0] == "| samples | fp32 | fp16 | bf16 |"
    measured = {name: case | {"measured": None if case["batch"] == 32 else 1.23e1} for name, case in cases.items()}
    assert table(measured).splitlines()[-1].count("| - |") == 3 and "| 12.3 |" in table(measured)
    assert anatomy_table(cases).splitlines()[2].startswith("| weights | 4 P | 95 (8%) |")
