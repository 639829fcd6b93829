"""The package flash_attn: its interface, by a stand-in of the same shapes and names (Dao 2023); and where it is not."""

import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from networks.attention import attention, pick_attention
from tests.helpers import losses, run_here, tiny_flags

CPU = torch.device("cpu")


@pytest.fixture
def package(monkeypatch):
    """Tensors are [B, N, h, d], and what it was called with is kept."""
    module, calls = types.ModuleType("flash_attn"), []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        calls.append((q.shape, k.shape, dropout_p))
        assert softmax_scale is None and not causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).transpose(1, 2)

    module.flash_attn_func = flash_attn_func
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


def test_it_is_the_same_attention(package):
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    found = []
    for kernel in ("math", "flash_attn"):
        out = attention(q, k, v, kernel, 0.0)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert package == [((2, 5, 3, 8), (2, 7, 3, 8), 0.0)]
    attention(q, k, v, "flash_attn", 0.25)
    assert package[-1][-1] == 0.25


def test_a_training_takes_it(tiny, package):
    plain = losses(run_here(tiny_flags(tiny, "--attention=math")))
    found = losses(run_here(tiny_flags(tiny, "--attention=flash_attn", "--run_num", "b")))
    assert found == pytest.approx(plain, rel=1e-5) and len(package) > 8


def test_where_it_is_not_installed_it_is_refused():
    if "flash_attn" in sys.modules:
        pytest.skip("flash_attn is installed")
    with pytest.raises(ValueError, match="needs the package flash-attn, which is not installed"):
        pick_attention("flash_attn", 16, 8, CPU, torch.bfloat16, 0.0)


def test_a_build_for_another_pytorch_is_refused(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\nand more')")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"flash-attn, which cannot be loaded \(undefined symbol: _ZN3c10\): `pip"):
        pick_attention("flash_attn", 16, 8, CPU, torch.bfloat16, 0.0)


def test_what_it_does_not_take_is_refused(package, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", refuse)
    with pytest.raises(ValueError, match="attention 'flash_attn' does not run on cpu with torch.float32"):
        pick_attention("flash_attn", 16, 8, CPU, None, 0.0)
