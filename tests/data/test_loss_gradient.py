"""Horizontal gradients in the loss: their order of error on a spherical harmonic, the loss by hand, what is refused."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

import train
import train_mp
from tests.helpers import run_folder, run_here, tiny_flags, write_data
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.data.loss_weights import distance
from utils.data.token_shard import TokenShard
from utils.files import read_events
from utils.sphere import HorizontalGradient, check_round

CPU = torch.device("cpu")


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def errors(rows: int, kind: str) -> tuple[float, float, float]:
    """Return the largest errors of the gradient of cos(p)^2 sin(p) cos(2 l), degree 3 and order 2.

    Both components inside; north in the first row, and in the last.
    """
    edges = {"cells": 90 - 180 * (np.arange(rows) + 0.5) / rows, "cropped": 90 - 180 * np.arange(rows) / rows}
    even = np.linspace(90, -90, rows)
    edges |= {"poles": even, "northward": even[::-1].copy(), "uneven": even + 20 * np.sin(np.deg2rad(2 * even)) / 3}
    p, columns = np.deg2rad(edges[kind])[:, None], 2 * rows
    l = 2 * np.pi * np.arange(columns) / columns  # noqa: E741
    f = np.cos(p) ** 2 * np.sin(p) * np.cos(2 * l)
    east = -2 * np.cos(p) * np.sin(p) * np.sin(2 * l)
    north = (np.cos(p) ** 3 - 2 * np.cos(p) * np.sin(p) ** 2) * np.cos(2 * l)
    gradient = HorizontalGradient(edges[kind], columns, range(rows), CPU)
    found = gradient(torch.from_numpy(f)[None])
    wrong = (found - torch.from_numpy(np.stack([east, north]))).abs()
    return max(wrong[0].max(), wrong[1, 1:-1].max()).item(), wrong[1, 0].max().item(), wrong[1, -1].max().item()


@pytest.mark.parametrize("kind", ["cells", "cropped", "poles", "northward", "uneven"])
def test_the_gradient_of_a_spherical_harmonic_to_its_order(float64, kind):
    """Half the spacing: a quarter of the error inside, half of it or less where only one neighbour is."""
    coarse, fine, finer = (errors(rows, kind) for rows in (32, 64, 128))
    for a, b in ((coarse, fine), (fine, finer)):
        assert a[0] / b[0] == pytest.approx(4, rel=0.15)
        assert a[1] / b[1] > 1.85 and a[2] / b[2] > 1.85
    assert finer[0] < 4e-3 and max(finer[1:]) < 0.1


def test_north_is_exact_for_polynomials(float64):
    """Of the first degree in every row, of the second where a row has two neighbours, also of uneven rows."""
    latitude = 80 - 160 * (np.arange(9) / 8) ** 1.3
    p = torch.from_numpy(np.deg2rad(latitude))[None, :, None].expand(1, 9, 4)
    gradient = HorizontalGradient(latitude, 4, range(9), CPU)
    torch.testing.assert_close(gradient(3 * p + 2)[1], torch.full((9, 4), 3.0))
    torch.testing.assert_close(gradient(p**2)[1, 1:-1], 2 * p[0, 1:-1])


@pytest.mark.parametrize("rows", [range(0, 6), range(0, 4), range(2, 5), range(3, 6), range(0)])
def test_its_own_backward_is_the_transpose(float64, rows):
    """Also of rows amid the image, and of none."""
    gradient = HorizontalGradient(90 - 180 * np.arange(6) ** 1.1 / 6, 5, rows, CPU, np.arange(1.0, 7))
    x = torch.randn(2, 3, len(rows), 5, requires_grad=True)
    assert gradient(x).shape == (2, 6, len(rows), 5)
    torch.autograd.gradcheck(gradient, x)


def asked(*flags: str) -> tuple:
    config = load_config(["--config=base", "--img_size", "16", "32", "--patch_size=4", *flags])[0]
    config = replace(config, in_channels=("u", "t850", "z500"), out_channels=("u", "t850", "z500"))
    return config, Fields.blank(config), TokenShard((16, 32), 4), CPU


@pytest.mark.parametrize("weighted", [(), ("--loss=weighted", "--loss_channels", "u=3", "--loss_latitude")])
def test_the_loss_by_hand(float64, weighted):
    config, fields, *rest = asked("--loss_gradient=0.5", *weighted)
    f, t = torch.randn(2, 5, 3, 16, 32)
    p, spacing = np.deg2rad(fields.latitude), 2 * np.pi / 32
    cos = torch.from_numpy(np.cos(p))[:, None]

    def slopes(x: torch.Tensor) -> list[torch.Tensor]:
        east = torch.zeros_like(x)
        for j in range(32):
            east[..., j] = (x[..., (j + 1) % 32] - x[..., j - 1]) / (2 * spacing)
        east[..., 1:, :] /= cos[1:]
        east[..., 0, :] = 0  # the pole
        north = torch.zeros_like(x)
        for i in range(16):
            a, b = max(i - 1, 0), min(i + 1, 15)
            north[..., i, :] = (x[..., b, :] - x[..., a, :]) / (p[b] - p[a])
        return [east, north]

    channels = torch.tensor([3.0, 1, 1] if weighted else [1.0, 1, 1])[:, None, None]
    rows = cos if weighted else torch.ones(16, 1)
    error = (channels * rows * (f - t) ** 2).sum((1, 2, 3)) / (channels * rows * t**2).sum((1, 2, 3))
    parts = [sum((channels * cos * x**2).sum((1, 2, 3)) for x in slopes(y)) for y in (f - t, t)]
    expected = error.sqrt() + 0.5 * (parts[0] / parts[1]).sqrt()
    found = distance(config, fields, *rest)
    torch.testing.assert_close(found(f, t), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found(f[None], t[None]), expected[None], rtol=1e-12, atol=0)  # [K, B, C, H, W]
    assert found(f.to(torch.bfloat16), t).dtype == torch.float64  # forecasts may be in half precision


def test_a_perfect_forecast_has_a_finite_gradient():
    config, fields, *rest = asked("--loss_gradient=1")
    t = torch.randn(1, 3, 16, 32)
    f = t.clone().requires_grad_()
    distance(config, fields, *rest)(f, t).sum().backward()
    assert torch.isfinite(f.grad).all()


def test_columns_that_do_not_go_round_are_refused():
    check_round(np.arange(144) * 2.5, "loss_gradient")
    check_round(-np.arange(7) * 51.43, "loss_gradient")  # westward, and rounded
    check_round((355 + 10 * np.arange(36)) % 360, "loss_gradient")
    check_round((5 - 10 * np.arange(36, dtype=np.float32)) % 360, "loss_gradient")
    with pytest.raises(ValueError, match="its 40 columns lie from 2.5 to 262.5 degrees apart, not 9"):
        check_round(np.arange(40) * 2.5, "loss_gradient")
    uneven = np.sort(np.append([0, 11.25], np.random.default_rng(1).uniform(12, 348, 30)))
    one = np.arange(36) * 10 + 3 * (np.arange(36) == 5)
    for columns in (uneven, one, np.arange(36) * 10 % 180, np.zeros(36)):
        with pytest.raises(ValueError, match=f"its {len(columns)} columns lie from .* degrees apart, not 1"):
            check_round(columns, "loss_gradient")
    with pytest.raises(ValueError, match="3 columns or more"):
        check_round(np.arange(2) * 180.0, "loss_gradient")
    config, fields, *rest = asked("--loss_gradient=1")
    with pytest.raises(ValueError, match="its 32 columns lie from 2.5 to 282.5 degrees apart, not 11.25"):
        distance(config, replace(fields, longitude=np.arange(32) * 2.5), *rest)


def test_it_is_refused_before_there_is_a_run(tiny):
    for path in tiny.rglob("*.h5"):
        with h5py.File(path, "a") as file:
            file["longitude"] = np.arange(32) * 0.25
    flags = tiny_flags(tiny, "--loss_gradient=0.1", "--run_num", "refused")
    for chapter, name in ((train, "1GPU"), (train_mp, "1MP")):
        with pytest.raises(ValueError, match="loss_gradient goes round the globe"):
            run_here(flags, chapter.main, name)
        assert not run_folder(flags, name).exists()


def test_a_training_with_gradients_has_another_loss(tmp_path):
    folder, losses = write_data(tmp_path), {}
    for weight in ("0", "0.5"):
        run = run_here(tiny_flags(folder, f"--loss_gradient={weight}", "--run_num", f"w{weight}"))
        events = read_events(run / "metrics.jsonl")
        losses[weight] = [event["loss"] for event in events if event["event"] == "step"]
        valid = [event["valid_loss"] for event in events if event["event"] == "epoch"]
    assert losses["0.5"][0] > 1.3 * losses["0"][0] > 1.3 * 0.9 * valid[-1]  # validation is of the fields alone
