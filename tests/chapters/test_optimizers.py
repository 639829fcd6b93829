"""The optimisers: what they keep, a run that goes on, and what is refused."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.helpers import ROOT, resume_here, tiny_flags, write_data
from tests.marks import at_night
from utils.compiler import check_compiler
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.optimizers import build_optimizer, check_optimizer, check_slices, init_moments, kept_of

KEPT = {"Adam": 8.0, "AdamW": 8.0, "Adafactor": 0.04, "Adam8bit": 2.04}  # bytes a weight, of a matrix of 256 x 256
LOW = ["Adafactor", "Adam8bit"]


def asked(*flags: str):
    return load_config(["--config=base", *flags])[0]


@pytest.mark.parametrize("name", KEPT)
def test_what_an_optimiser_keeps(name):
    """Bytes a weight; and that it begins with zeros, without a step."""
    layer = nn.Linear(256, 256, bias=False)
    before = layer.weight.detach().clone()
    pinned = f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "requirements.txt").read_text().split()
    if name == "Adam8bit" and not pinned:
        pytest.skip("torchao is made for one torch, which this is not")
    optimizer = build_optimizer(layer, asked(f"--optimizer={name}"))
    init_moments(optimizer)
    kept = kept_of(optimizer, layer.weight)
    size = sum(x.nbytes for key, x in kept.items() if not key.endswith("qmap"))  # a table that all have in common
    assert size / 256**2 == pytest.approx(KEPT[name], abs=0.01)
    assert torch.equal(layer.weight, before) and optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    moments = [x for state in optimizer.state.values() for x in state.values()]
    assert all(not (x.dequantize() if hasattr(x, "dequantize") else x).any() for x in moments)


def test_adamw_shrinks_weights():
    weights = {}
    for flags in (
        (),
        ("--optimizer=AdamW", "--weight_decay=0.1", "--lr=0.5"),
        ("--optimizer=AdamW", "--weight_decay=0"),
    ):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        optimizer = build_optimizer(layer, asked(*flags))
        for p in layer.parameters():
            p.grad = torch.zeros_like(p) if "--lr=0.5" in flags else torch.ones_like(p)
        before = layer.weight.detach().clone()
        optimizer.step()
        weights[flags] = before, layer.weight.detach()
    (_, adam), (drawn, shrunk), (_, same) = weights.values()
    assert torch.equal(adam, same)
    torch.testing.assert_close(shrunk, drawn * (1 - 0.5 * 0.1))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adafactor", at_night("Adam8bit")])
def test_a_run_that_goes_on_is_the_same_run(tmp_path, name):
    """To the bit, from a checkpoint in its middle; an average of weights and skipped steps are kept, too."""
    folder = write_data(tmp_path)
    flags = [f"--optimizer={name}", "--num_iters=6", "--embed_dim=64", "--ema_decay=0.9"]
    whole, again = resume_here(tiny_flags(folder, *flags), 3)
    assert whole == again and len(whole) > 2


@pytest.mark.parametrize("name", LOW)
def test_what_it_cannot_is_refused(name, monkeypatch):
    for flag in ("enable_fused", "graph_optimizer"):
        config = load_config(["--config=base", f"--optimizer={name}", f"--{flag}"], chapter=3)[0]
        with pytest.raises(ValueError, match=f"{flag} is for optimizer Adam and AdamW, not {name}: add --no_{flag}"):
            check_optimizer(config)
    check_slices(asked("--optimizer=AdamW"), 2)
    check_slices(asked(f"--optimizer={name}"), 1)
    with pytest.raises(ValueError, match=f"optimizer {name} looks at whole weights, and tensor_parallel 2 slices them"):
        check_slices(asked(f"--optimizer={name}"), 2)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    if name == "Adam8bit":
        with pytest.raises(ValueError, match="needs torchao, which is not installed: .pip install -r requirements-tor"):
            check_optimizer(asked(f"--optimizer={name}"))


def test_what_is_compiled_needs_a_compiler(monkeypatch):
    config = replace(Config(), optimizer="Adam8bit")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    check_compiler(Config(), torch.device("cpu"))
    with pytest.raises(ValueError, match="optimizer Adam8bit, which is compiled, needs .* take --optimizer Adam$"):
        check_compiler(config, torch.device("cpu"))


def test_a_decay_that_nobody_uses_is_said():
    (remark,) = load_config(["--config=base", "--weight_decay=0.1"])[1][-1:]
    assert remark == "weight_decay changes nothing without --optimizer AdamW"
