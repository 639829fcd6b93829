"""The weighted loss: its weights by hand, the rule `auto`, and that weights of 1 change no bit."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers import run_here, tiny_flags, write_data
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.data.files import ERA5_CHANNELS
from utils.data.loss_weights import distance, loss_weights
from utils.data.token_shard import TokenShard
from utils.data.variables import meant, variable
from utils.files import read_events
from utils.loss import relative_l2


def weighted(*flags: str, names: list[str] | None = None) -> tuple:
    """Return a configuration with these flags, and its fields."""
    names = names or ["u", "t850", "z500"]
    config = load_config(
        ["--config=base", "--img_size", "16", "32", "--patch_size=4", "--loss=weighted", *flags]
    )[0]  # fmt: skip
    config = replace(config, in_channels=tuple(names), out_channels=tuple(names))
    return config, Fields.blank(config)


def test_the_rule_of_swin_v2_weather_on_the_20_channels():
    found = loss_weights(*weighted("--loss_channels", "auto", names=list(ERA5_CHANNELS)))[:, 0, 0]
    expected = {
        "u10m": 0.1, "v10m": 0.1, "t2m": 1, "sp": 0.1, "msl": 0.1, "t850": 0.85, "u1000": 1, "v1000": 1, "z1000": 1,
        "u850": 0.85, "v850": 0.85, "z850": 0.85, "u500": 0.5, "v500": 0.5, "z500": 0.5, "t500": 0.5, "z50": 0.05,
        "r500": 0.5, "r850": 0.85, "tcwv": 0.1,
    }  # fmt: skip
    values = np.array([expected[name] for name in ERA5_CHANNELS])
    np.testing.assert_allclose(found, values / values.mean(), rtol=1e-12)
    (other, _) = loss_weights(*weighted("--loss_channels", "auto", names=["q2m", "z1000"]))[:, 0, 0]
    assert other == pytest.approx(0.01 / 0.505)


def test_beside_u100m_is_u100_a_level():
    """As in the data of Makani."""
    names = ["u100m", "u100", "v100"]
    assert [variable(meant(name, names)).level for name in names] == [None, 100, None]
    assert variable("u100m").wb2 == variable("u100").wb2 == "100m_u_component_of_wind"
    found = loss_weights(*weighted("--loss_channels", "auto", "--loss_levels=pressure", names=["u10m", "u10", "z500"]))
    np.testing.assert_allclose(found[:, 0, 0], np.array([0.1, 0.01 * 0.01, 0.5 * 0.5]) / np.mean([0.1, 1e-4, 0.25]))


def test_the_rule_knows_a_variable_by_any_of_its_names():
    names = [
        "10m_u_component_of_wind",
        "2m_temperature",
        "mean_sea_level_pressure",
        "geopotential500",
        "w850",
        "tp",
        "x",
    ]
    found = loss_weights(*weighted("--loss_channels", "auto", names=names))[:, 0, 0]
    expected = np.array([0.1, 1, 0.1, 0.5, 0.85, 0.01, 0.01])
    np.testing.assert_allclose(found, expected / expected.mean(), rtol=1e-12)


def test_weights_by_hand():
    config, fields = weighted("--loss_channels", "u=3", "z500=0.5", "--loss_levels=pressure", "--loss_latitude")
    rows = np.cos(np.deg2rad(fields.latitude))
    channels = np.array([3, 1 * 0.85, 0.5 * 0.5])
    w = (channels / channels.mean())[:, None, None] * (rows / rows.mean())[:, None]
    np.testing.assert_allclose(loss_weights(config, fields), w, rtol=1e-12)
    f, t = torch.randn(2, 5, 3, 16, 32, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        found = distance(config, fields, TokenShard((16, 32), 4), torch.device("cpu"))(f, t)
    finally:
        torch.set_default_dtype(torch.float32)
    w = torch.from_numpy(w)
    expected = ((w * (f - t) ** 2).sum((1, 2, 3)) / (w * t**2).sum((1, 2, 3))).sqrt()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_shards_of_an_image_add_up():
    config, fields = weighted("--loss_channels", "u=3", "--loss_latitude")
    f, t = torch.randn(2, 5, 3, 16, 32)
    shards = [TokenShard((16, 32), 4, 3, index) for index in range(3)]
    whole = distance(config, fields, TokenShard((16, 32), 4), torch.device("cpu"))(f, t)
    parts = []

    def keep(sums):
        parts.append(sums)
        return sums

    for shard in shards:
        rows = slice(shard.rows.start, shard.rows.stop)
        mine = (shard.cut(x[..., rows, :]) for x in (f, t))
        distance(config, fields, shard, torch.device("cpu"))(*mine, total=keep)
    error, size = sum(parts)
    torch.testing.assert_close((error / size).sqrt(), whole, rtol=1e-5, atol=0)


def test_weights_of_one_change_no_bit(tmp_path):
    folder = write_data(tmp_path, names=["u", "v", "t"])
    losses = []
    for name, flags in (("plain", []), ("ones", ["--loss=weighted", "--loss_channels", "u=1"])):
        run = run_here(tiny_flags(folder, "--run_num", name, *flags))
        losses.append([event for event in read_events(run / "metrics.jsonl") if event["event"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    run = run_here(tiny_flags(folder, "--run_num", "other", "--loss=weighted", "--loss_channels", "u=2"))
    assert read_events(run / "metrics.jsonl")[0]["loss"] != losses[0][0]["loss"]


def test_half_precision_keeps_its_wide_sums():
    f, t = torch.randn(2, 4, 3, 16, 32)
    root = torch.rand(3, 16, 1)
    assert partial(relative_l2, root=root)(f.bfloat16(), t).dtype == torch.float32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss_channels", "q=1"], "names 'q', and the forecast channels are u, t850, z500"),
        (["--loss_channels", "u"], "takes auto, or NAME=WEIGHT"),
        (["--loss_channels", "u=-1"], "a weight of 0 or more"),
        (["--loss_channels", "u=0", "t850=0", "z500=0"], "nothing to learn"),
    ],
)
def test_what_a_user_can_get_wrong(flags, message):
    with pytest.raises(ValueError, match=message):
        loss_weights(*weighted(*flags))


def test_weights_without_the_loss_are_said_to_do_nothing():
    _, remarks = load_config(["--config=base", "--loss_latitude"])
    assert "loss_latitude changes nothing without --loss weighted" in remarks
