"""What scores are made of: weights of rows, intervals, projections of maps."""

import numpy as np
import pytest

from utils.forecast import skill
from utils.forecast.projections import find_projection


def test_area_weights_are_areas():
    """Of rows at the middle of bands: sin of the upper edge less sin of the lower, whichever way the rows run."""
    latitude = np.array([67.5, 22.5, -22.5, -67.5])
    expected = np.array([1 - np.sqrt(0.5), np.sqrt(0.5)])
    expected = np.array([*expected, *expected[::-1]]) / expected.mean()
    np.testing.assert_allclose(skill.area_weights(latitude), expected)
    np.testing.assert_allclose(skill.area_weights(latitude[::-1]), expected)
    fine = np.linspace(90, -90, 721)
    np.testing.assert_allclose(skill.area_weights(fine), skill.row_weights(fine)[:, 0] * 721, atol=1e-4 * 12)


def test_area_weights_of_part_of_the_globe():
    """A last row that was cropped belongs to the pole; the edges of a region lie half a row out."""
    cropped = np.arange(90, -87.6, -2.5)
    assert skill.area_weights(cropped)[-1] * np.sin(np.deg2rad(1.25)) == pytest.approx(
        skill.area_weights(cropped)[36] * (1 - np.sin(np.deg2rad(86.25))) / 2
    )
    region = np.array([55.0, 45.0, 35.0])
    expected = np.sin(np.deg2rad([60, 50, 40])) - np.sin(np.deg2rad([50, 40, 30]))
    np.testing.assert_allclose(skill.area_weights(region), expected / expected.mean())


def test_each_forecast_is_drawn_as_often_as_any_other():
    counts = skill.resampled_counts(forecasts=30, block=4)
    assert counts.shape == (skill.RESAMPLES, 30) and (counts.sum(axis=1) == 30).all()
    np.testing.assert_allclose(counts.mean(axis=0), 1, atol=0.15)
    assert (skill.resampled_counts(forecasts=30, block=30) == 1).all()  # all of them, from one on and round


def intervals(values: np.ndarray, block: int) -> np.ndarray:
    """Return the bias of forecasts whose mean error is `values`, with its interval, [3]."""
    moments = np.zeros((len(values), 1, 2, 1, 1, len(skill.MOMENTS)))  # N K S C A M
    moments[..., skill.MOMENTS.index("e")] = values[:, None, None, None, None]
    moments[..., skill.MOMENTS.index("ee")] = 1
    return skill.summarise(moments, len(values), block)["bias"][:, 0, 0, 0, 0]


def test_an_interval_is_that_of_a_mean():
    values = np.random.default_rng(1).standard_normal(400)
    mean, low, high = intervals(values, block=1)
    assert mean == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(400)
    assert high - mean == pytest.approx(half, rel=0.1) and mean - low == pytest.approx(half, rel=0.1)


def test_neighbours_that_say_the_same_are_drawn_together():
    """Each value stands four times: the interval is that of a quarter as many, but only with blocks."""
    values = np.random.default_rng(2).standard_normal(500).repeat(4)
    wide, narrow = (np.ptp(intervals(values, block)[1:]) for block in (40, 1))
    assert 1.6 < wide / narrow < 2.2


def test_few_blocks_make_no_interval():
    values = np.random.default_rng(4).standard_normal(20)
    assert np.isfinite(intervals(values, block=6)).all()
    value, low, high = intervals(values, block=7)
    assert value == pytest.approx(values.mean()) and np.isnan([low, high]).all()


def test_the_ratio_is_judged_on_the_same_weather():
    """A forecast that is always 10% better is so without doubt, however much the weather varies."""
    size = 1 + np.random.default_rng(3).random(50) * 10
    moments = np.zeros((50, 1, 2, 1, 1, len(skill.MOMENTS)))
    moments[..., 0, :, :, skill.MOMENTS.index("ee")] = (size**2)[:, None, None, None]
    moments[..., 1, :, :, skill.MOMENTS.index("ee")] = (0.81 * size**2)[:, None, None, None]
    found = skill.summarise(moments, 50, 1)
    np.testing.assert_allclose(found["rmse_over_persistence"][:, 0, 1, 0, 0], 0.9)
    assert np.ptp(found["rmse"][:, 0, 1, 0, 0]) > 0.5


def test_projections_are_those_of_cartopy(monkeypatch):
    crs = pytest.importorskip("cartopy.crs", reason="needs pip install -r requirements-maps.txt")
    assert find_projection("plain") == (None, None)
    assert isinstance(find_projection("Robinson")[0], crs.Robinson)
    with pytest.raises(ValueError, match="'Robins' is no map of cartopy.crs: take Robinson"):
        find_projection("Robins")
    monkeypatch.setitem(__import__("sys").modules, "cartopy", None)
    with pytest.raises(ValueError, match="needs cartopy: `pip install -r requirements-maps"):
        find_projection("Robinson")
