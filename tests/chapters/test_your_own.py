"""The model of docs/your-own.md in the place of the ViT: as it stands on the page."""

import re
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import evaluate
import forecast
import train
from tests.helpers import (
    ROOT,
    call_here,
    fields,
    losses,
    resume_here,
    run_folder,
    run_here,
    run_ranks,
    tiny_flags,
    write_data,
)
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.data.fields import Fields
from utils.errors import Refused

PAGE = (ROOT / "docs/your-own.md").read_text()


def of_the_page() -> tuple[type[nn.Module], object]:
    """Return the class and the function of the page."""
    network, build = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    mine = sys.modules["networks.mine"] = ModuleType("networks.mine")
    exec(network, vars(mine))
    exec(build, everything := {**vars(train)})
    return mine.ConvNet, everything["build_model"]


@pytest.fixture
def own(monkeypatch):
    network, build = of_the_page()
    for script in (train, evaluate, forecast):
        monkeypatch.setattr(script, "build_model", build)
    return network


def trains(argv: list[str]) -> None:
    """Be a rank that trains this model."""
    _, train.build_model = of_the_page()
    train.start(train.main, argv, train.load_config)


@pytest.mark.parametrize("forced", [False, True])
def test_it_trains_resumes_and_is_exported(tmp_path, own, forced):
    """With forecasts of several steps, also where a channel is read and not forecast."""
    write_data(tmp_path, names=["u", "v", "t"])
    more = ["--out_channels", "t", "u", "--n_out_channels", "2"] if forced else []
    argv = tiny_flags(tmp_path, "--num_iters", "10", "--rollout_steps", "2", "--embed_dim", "8", *more)
    whole, resumed = resume_here(argv, 6)
    assert resumed == whole and len(whole) == 4
    run, folder = run_folder(argv), tmp_path / "exported"
    assert "attention kernel: none" in (run / "out.log").read_text()
    assert checkpoint_main(["export", str(run), str(folder)]) == 0
    weights = load_file(folder / "weights.safetensors")
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.GroupNorm(4, 8), nn.GELU(), nn.Conv2d(8, 3 - forced, 5, padding=2)
    )
    layers.load_state_dict({name.removeprefix("layers."): x for name, x in weights.items()})
    means, stds = (torch.tensor(np.load(tmp_path / f"stats/global_{x}.npy")) for x in ("means", "stds"))
    state, taken = torch.from_numpy(fields(3, 3, 16, 32)), [2, 0] if forced else [0, 1, 2]
    with torch.no_grad():
        expected = layers((state - means) / stds) * stds[:, taken] + means[:, taken]
    torch.testing.assert_close(forecast.load(str(folder)).step(state), expected, rtol=1e-5, atol=1e-5)
    if not forced:
        more = ["--inf_data_path", str(tmp_path / "valid"), "--lead_hours", "24", "--out", str(tmp_path / "out")]
        call_here(evaluate.main, ["--checkpoint", str(folder), *more])
        assert (tmp_path / "out/skill.json").exists()


@pytest.mark.slow
def test_two_ranks_and_a_compiler_change_nothing(tiny, own):
    flags = ["--num_iters", "6", "--embed_dim", "8", "--enable_fused"]
    plain = losses(run_here(tiny_flags(tiny, *flags, "--run_num", "plain")))
    compiled = losses(run_here(tiny_flags(tiny, *flags, "--enable_jit", "--compile_modules", "ConvNet")))
    np.testing.assert_allclose(compiled, plain, rtol=1e-5)
    argv = tiny_flags(tiny, *flags, "--run_num", "two")
    done = run_ranks(2, trains, argv)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    np.testing.assert_allclose(losses(run_folder(argv, "2GPU")), plain, rtol=1e-5)


def test_a_model_that_keeps_more_than_parameters_is_refused(tiny, monkeypatch):
    network, _ = of_the_page()

    def build(config, fields, device=None):
        model = network(fields, 8)
        model.layers[1] = nn.BatchNorm2d(8)
        return model

    monkeypatch.setattr(train, "build_model", build)
    with pytest.raises(Refused, match=r"the model keeps layers\.1\.running_mean, a buffer, and checkpoints hold param"):
        run_here(tiny_flags(tiny))
    assert not list(run_folder(tiny_flags(tiny)).glob("checkpoints/*"))


def test_a_model_that_forecasts_one_step_of_several_is_told(tiny, own, monkeypatch):
    monkeypatch.setattr(own, "forward", lambda self, x, forced=None: self.layers(x))
    monkeypatch.setattr(train, "build_model", lambda config, fields, device=None: own(fields, 8))
    with pytest.raises(ValueError, match=r"the model forecasts \[8, 3, 16, 32\], and the target is \[2, 8, 3, 16"):
        run_here(tiny_flags(tiny, "--rollout_steps", "2"))


def test_what_it_says_of_its_keys_and_its_operations(tiny, own):
    with pytest.raises(Refused, match="ConvNet forecasts the state itself: leave residual"):
        run_here(tiny_flags(tiny, "--residual"))
    net = own(Fields.blank(train.load_config(tiny_flags(tiny))[0]), 8)
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 16, 32))
    assert net.flops() == counter.get_total_flops()
