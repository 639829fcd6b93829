"""Loss and metrics against plain NumPy."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from utils.loss import relative_l2
from utils.metrics import Scores, latitude_weights, weighted_acc, weighted_rmse


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_relative_l2_is_a_mean_of_ratios():
    f, t = torch.randn(4, 3, 8, 16), torch.randn(4, 3, 8, 16)
    expected = [np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel()) for a, b in zip(f.numpy(), t.numpy())]
    np.testing.assert_allclose(relative_l2(f, t).numpy(), expected, rtol=1e-6)
    assert relative_l2(f.bfloat16(), t).dtype == torch.float32
    assert relative_l2(f.double(), t.double()).dtype == torch.float64


def test_shapes_that_differ_are_not_repeated_to_fit():
    """A model that forecasts one step would be measured against the targets of all."""
    for forecast, target in (((2, 3, 4, 8), (5, 2, 3, 4, 8)), ((2, 1, 4, 8), (2, 3, 4, 8))):
        with pytest.raises(ValueError, match=r"the model forecasts \[2, ., 4, 8\], and the target is \["):
            relative_l2(torch.ones(forecast), torch.ones(target))


def test_latitude_weights():
    weights = latitude_weights(torch.tensor([90.0, 30.0, 0.0, -60.0]))
    cos = np.cos(np.deg2rad([90, 30, 0, -60]))
    np.testing.assert_allclose(weights.numpy(), cos / cos.mean(), atol=1e-7)
    assert weights.min() >= 0


def test_scores_against_numpy(group_of_one):
    rng = np.random.default_rng(0)
    inp, target, forecast = (rng.standard_normal((5, c, 4, 6)).astype(np.float32) for c in (3, 2, 2))
    climatology = rng.standard_normal((2, 4, 6)).astype(np.float32)
    lat = np.array([67.5, 22.5, -22.5, -67.5])
    w = np.cos(np.deg2rad(lat)) / np.cos(np.deg2rad(lat)).mean()
    w = np.broadcast_to(w[:, None], (4, 6))

    weights = latitude_weights(torch.tensor(lat))[:, None].expand(4, 6) / 24
    scores = Scores(weights, torch.tensor(climatology), origins=torch.tensor([2, -1]))
    garbage = torch.full((1, 3, 4, 6), float("nan"))  # padding counts for nothing, whatever it holds
    for part in (slice(0, 3), slice(3, 5)):
        pad = 3 - (part.stop - part.start)
        batch = [
            torch.cat([torch.tensor(a[part]), garbage[:, : a.shape[1]].repeat(pad, 1, 1, 1)])
            for a in (forecast, inp, target)
        ]
        scores.update(*batch, counts=torch.tensor([1.0] * (3 - pad) + [0.0] * pad))
    result = scores.reduce()

    rmse = lambda a, b: np.sqrt(np.average((a - b) ** 2, weights=w))  # noqa: E731
    expected = [[rmse(forecast[i, c], target[i, c]) for c in range(2)] for i in range(5)]
    np.testing.assert_allclose(result["rmse"], np.mean(expected, axis=0), rtol=1e-6)
    np.testing.assert_allclose(
        result["persistence"][0], np.mean([rmse(inp[i, 2], target[i, 0]) for i in range(5)]), rtol=1e-6
    )
    assert result["persistence"][1] is None and result["samples"] == 5
    ratios = [np.linalg.norm(forecast[i] - target[i]) / np.linalg.norm(target[i]) for i in range(5)]
    np.testing.assert_allclose(result["loss"], np.mean(ratios), rtol=1e-6)

    def acc(f, t, m):
        f, t = f - m, t - m
        return (w * f * t).sum() / np.sqrt((w * f * f).sum() * (w * t * t).sum())

    expected = [[acc(forecast[i, c], target[i, c], climatology[c]) for c in range(2)] for i in range(5)]
    np.testing.assert_allclose(result["acc"], np.mean(expected, axis=0), rtol=1e-5)


def test_perfect_forecast():
    x, w = torch.randn(2, 3, 8, 16), latitude_weights(torch.linspace(80, -80, 8))[:, None] / (8 * 16)
    assert weighted_rmse(x, x, w).abs().max() == 0
    torch.testing.assert_close(weighted_acc(x, x, torch.zeros(3, 8, 16), w), torch.ones(2, 3))
