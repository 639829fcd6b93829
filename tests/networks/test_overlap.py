"""Windows that overlap, kept means and forecasts of several steps: against their definitions, written out slowly."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from networks.overlap import (
    blending_weights,
    mirror_at_poles,
    overlap_add,
    part_slices,
    repeat_at_poles,
    windows,
    windows_linear,
)
from networks.vit import ViT
from tests.networks.test_vit import BASE, vit

SIZES = [(4, 1, 4, 6), (4, 2, 3, 5), (8, 4, 2, 3), (8, 3, 1, 4), (4, 2, 2, 1)]  # P, overlap, R, K
DEMO = dict(img_size=(64, 128), patch_size=8, in_chans=8, out_chans=8, embed_dim=128, depth=4, num_heads=8)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def added(tokens, K, P, o):
    """What windows [B, R K, C S S] write, as an image."""
    whole = tokens.unflatten(-1, (-1, P + 2 * o, P + 2 * o))
    parts = [whole[..., rows, columns].flatten(2) for rows, columns in part_slices(P, o)]
    return mirror_at_poles(overlap_add(parts, K, P, o), o)


@pytest.mark.parametrize("P, o, R, K", SIZES)
def test_a_token_reads_its_window(P, o, R, K):
    image = torch.randn(2, 3, R * P, K * P)
    found = windows(repeat_at_poles(image, o), P, o)
    wide = np.pad(np.pad(image.numpy(), [(0, 0)] * 2 + [(o, o), (0, 0)], "edge"), [(0, 0)] * 3 + [(o, o)], "wrap")
    S = P + 2 * o
    for n in range(R * K):
        y, x = n // K * P, n % K * P
        assert np.array_equal(found[:, n].numpy(), wide[:, :, y : y + S, x : x + S].reshape(2, -1))


@pytest.mark.parametrize("P, o, R, K", SIZES)
def test_windows_are_added_where_they_lie(P, o, R, K):
    S, H, W = P + 2 * o, R * P, K * P
    tokens = torch.randn(2, R * K, 3 * S * S)
    found = added(tokens, K, P, o).numpy()
    expected = np.zeros((2, 3, H, W))
    for n in range(R * K):
        for i in range(S):
            for j in range(S):
                y, x = n // K * P + i - o, (n % K * P + j - o) % W
                y = -1 - y if y < 0 else 2 * H - 1 - y if y >= H else y  # beyond a pole: as in a mirror
                expected[:, :, y, x] += tokens[:, n].view(2, 3, S, S)[:, :, i, j].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("P, o, R, K", SIZES)
def test_what_a_compiler_makes_of_adding(P, o, R, K):
    """It does without operations in place: what it puts for them is to be the same."""
    S = P + 2 * o
    tokens = torch.randn(2, R * K, 3 * S * S, requires_grad=True)
    image = torch.randn(2, 3, R * P, K * P)
    (added(tokens, K, P, o) * image).sum().backward()
    expected, tokens.grad = tokens.grad, None
    compiled = torch.compile(added, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, K, P, o), added(tokens, K, P, o))
    (compiled(tokens, K, P, o) * image).sum().backward()
    torch.testing.assert_close(tokens.grad, expected)


@pytest.mark.parametrize("P, o, R, K", SIZES)
def test_weights_add_up_to_one_everywhere(P, o, R, K):
    weights = blending_weights(P, o).flatten().expand(1, R * K, -1)
    everywhere = added(weights, K, P, o)
    torch.testing.assert_close(everywhere, torch.ones(1, 1, R * P, K * P), rtol=1e-14, atol=1e-14)
    edge = blending_weights(P, o).sum(0)[: 2 * o] / P
    torch.testing.assert_close(edge, torch.sin((torch.arange(2 * o) + 0.5) * torch.pi / (4 * o)) ** 2)


@pytest.mark.parametrize("amp", [False, True])
def test_windows_that_are_cut_once_more_have_the_gradients_of_those_that_are_kept(amp):
    torch.set_default_dtype(torch.float32)
    layer, image, weights = torch.nn.Linear(3 * 64, 5), torch.randn(2, 3, 12, 8), torch.randn(2, 4, 5)

    def cut(x):
        return windows(x, 4, 2)

    found = []
    for function in (lambda x: layer(cut(x)), lambda x: windows_linear(x, layer, cut)):
        leaf = image.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = function(leaf)
        grads = torch.autograd.grad((y.float() * weights).sum(), [leaf, layer.weight, layer.bias])
        found.append([y, *grads])
    for a, b in zip(*found):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2 if amp else 1e-5, atol=1e-2 if amp else 1e-5)
    with torch.no_grad():
        assert torch.equal(windows_linear(image, layer, cut), layer(cut(image)))


def test_there_is_no_seam_in_longitude():
    """Turned by a patch, the input gives the same forecast, turned: across the date line as everywhere."""
    model, x = vit(overlap=2), torch.randn(1, 3, 16, 24)
    torch.nn.init.zeros_(model.pos_embed)
    torch.testing.assert_close(model(x.roll(4, -1)), model(x).roll(4, -1), rtol=1e-10, atol=1e-12)
    y, moved = model(x), x.clone()
    moved[..., 0] += 1  # the first column is in the last window, too
    with torch.no_grad():
        tokens = [model.patch_embed(model.with_margins(state)) for state in (x, moved)]
    changed = (tokens[0] != tokens[1]).any(-1).view(4, 6).any(0)
    assert changed.tolist() == [True, False, False, False, False, True] and y.shape == (1, 2, 16, 24)


@pytest.mark.parametrize("sizes, largest", [(BASE, 1.06), (DEMO, 1.39)])
def test_what_overlap_costs(sizes, largest):
    with torch.device("meta"):
        plain, model = ViT(**sizes, attention="math"), ViT(**sizes, overlap=4, attention="math")
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, sizes["in_chans"], *sizes["img_size"]))
    assert model.flops() == counter.get_total_flops() and plain.flops() < model.flops() < largest * plain.flops()


@pytest.mark.parametrize("overlap", [-1, 3])
def test_an_overlap_that_is_too_large_is_refused(overlap):
    with pytest.raises(ValueError, match=f"patch_overlap is {overlap}: it takes 0 to 2, half of patch_size 4"):
        vit(overlap=overlap)


@pytest.mark.parametrize("residual", [None, [2, 0]])
def test_a_forecast_keeps_the_means_that_it_is_told_to_keep(residual):
    area = torch.rand(16, 24)
    area /= area.sum()
    free, model = vit(residual=residual), vit(residual=residual, conserve=[(1, 0)], area=area)
    x = torch.randn(2, 3, 16, 24)
    y, plain = model(x), free(x)
    mean = (x[:, 0] * area).sum((1, 2))
    torch.testing.assert_close((y[:, 1] * area).sum((1, 2)), mean)
    assert not torch.allclose((plain[:, 1] * area).sum((1, 2)), mean)
    change = (y - plain)[:, 1]
    torch.testing.assert_close(change, change[:, :1, :1].expand_as(change))  # a shift
    assert torch.equal(y[:, 0], plain[:, 0])


def rollout(model, x, forced):
    """Several steps by hand, of a model that forecasts channels 2 and 0 and reads 0, 1 and 2: 1 is forced."""
    found = []
    for k in range(3):
        found.append(model(x))
        if k < 2:
            x = torch.stack([found[-1][:, 1], forced[k, :, 0], found[-1][:, 0]], dim=1)
    return torch.stack(found)


@pytest.mark.parametrize("activation_checkpoint", ["none", "step", "block"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_several_steps_are_the_model_on_its_own_forecasts(activation_checkpoint, overlap):
    given = dict(residual=[2, 0], feedback=[1, 2, 0], overlap=overlap, drop_path=0.5)
    models = [vit(**given), vit(**given, activation_checkpoint=activation_checkpoint)]
    x, forced, weights = torch.randn(2, 3, 16, 24), torch.randn(2, 2, 1, 16, 24), torch.randn(3, 2, 2, 16, 24)
    for model in models:
        model.draw_paths(x)
        for block, other in zip(model.blocks, models[0].blocks):  # a branch that is dropped is so in all steps
            for path in ("drop_path1", "drop_path2"):
                getattr(block, path).draws = getattr(getattr(other, path), "draws", None)
        model.draw_paths = lambda x: None
    found = rollout(models[0], x, forced), models[1](x, forced)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    for y in found:
        (y * weights).sum().backward()
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-13)


def test_a_forecast_recomputed_step_by_step_keeps_one_input_a_step():
    """The model reads what it forecasts: there is nothing forced, and only the shape tells the steps."""
    kept, forced = {}, torch.empty(3, 2, 0, 16, 24)
    for what in ("none", "step"):
        model, held = vit(in_chans=2, activation_checkpoint=what), {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, held=held: held.update({x.untyped_storage().data_ptr(): x.nbytes}) or x, lambda x: x
        ):
            y = model(torch.randn(2, 2, 16, 24), forced)
        assert y.shape == (4, 2, 2, 16, 24)
        kept[what] = sum(held.values())
    assert kept["step"] <= 4 * 2 * 2 * 16 * 24 * 8 < kept["none"] / 10
