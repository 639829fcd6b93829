"""Peaks, MFU's parts, the run folder, the picture."""

import numpy as np
import pytest
import torch

from utils.device import known_device, peak_flops, peak_memory_gb
from utils.plots import forecast_figure, render


@pytest.mark.parametrize(
    "name, row",
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("AMD Instinct MI250X", None),
    ],
)
def test_devices_by_the_drivers_name(name, row):
    assert known_device(name) == row


@pytest.mark.parametrize(
    "name, flags, peak, source",
    [
        ("NVIDIA A100-SXM4-40GB", ("none", False), 19.5, "A100"),
        ("NVIDIA A100-SXM4-40GB", ("none", True), 156, "A100"),
        ("NVIDIA A100-SXM4-40GB", ("bf16", True, True), 312, "A100"),
        ("NVIDIA H100 80GB HBM3", ("bf16", True), 989, "H100"),
        ("NVIDIA H100 80GB HBM3", ("bf16", True, True), 1979, "H100, FP8"),
    ],
)
def test_a_known_device_has_the_datasheets_peak(monkeypatch, name, flags, peak, source):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), *flags) == (peak * 1e12, f"datasheet, {source}")


def test_an_unknown_device_uses_a_measured_peak():
    peak, source = peak_flops(torch.device("cpu"), "none", tf32=True)
    assert 1e9 < peak < 1e15 and source == "measured matmul, float32"
    assert peak_flops(torch.device("cpu"), "bf16", tf32=True)[1] == "measured matmul, bfloat16"
    _, source = peak_flops(torch.device("cpu"), "bf16", tf32=True, fp8=True)
    assert source == "measured matmul, bfloat16; those of 8 bits may pass it"
    assert 0.05 < peak_memory_gb(torch.device("cpu")) < 1000


def test_picture():
    H, W = 12, 24
    lat, lon = np.linspace(82.5, -82.5, H), np.arange(W) * 15.0
    target = np.outer(np.cos(np.deg2rad(lat)), np.sin(np.deg2rad(lon)))
    fields = {"input": target, "target": target, "forecast": target + 0.1}
    figure = forecast_figure(fields, lat, lon, "t2m", "K", "2020-01-01 + 6 h")
    maps, bars = figure.axes[:4], figure.axes[4:]
    assert [a.get_title() for a in maps] == ["input", "target", "forecast", "error (forecast - target)"]
    assert {bar.get_ylabel() for bar in bars} == {"t2m [K]"} and len(bars) == 4
    assert maps[2].get_xlabel() == "longitude [degrees east]" and maps[0].get_ylabel() == "latitude [degrees north]"
    drawn = [a.collections[0].get_array().reshape(H, W) for a in maps]
    for got, expected in zip(drawn, (target, target, target + 0.1, np.full((H, W), 0.1))):
        np.testing.assert_allclose(got, expected)
    assert maps[0].collections[0].get_clim() == maps[2].collections[0].get_clim()  # comparable colours
    assert maps[0].get_xlim() == (-7.5, 352.5) and maps[0].get_ylim() == (-90, 90)  # north is up
    pixels = render(figure)
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3 and pixels.std() > 10


def test_picture_without_an_input_channel_or_units():
    field = np.random.default_rng(0).random((4, 8))
    fields = {"input": None, "target": field, "forecast": field}
    figure = forecast_figure(fields, np.linspace(80, -80, 4), np.arange(8) * 45.0, "tcwv", "", "")
    assert len(figure.axes) == 7 and figure.axes[4].get_ylabel() == "tcwv"
    render(figure)
