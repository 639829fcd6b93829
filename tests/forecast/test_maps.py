"""What stands over the maps, and what a film shows."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from utils.forecast.maps import Maps
from utils.plots import plain_map

STATES = np.random.default_rng(0).standard_normal((2, 5, 8))


@pytest.fixture
def maps():
    fields = SimpleNamespace(
        latitude=np.linspace(80, -80, 5), longitude=np.arange(8) * 45.0, out_names=["t"], label=lambda c: "t [K]",
        step_hours=6.0,
    )  # fmt: skip
    return Maps(
        SimpleNamespace(
            fields=fields, map_stride=1, lead_hours=[6.0, 12.0], steps=2,
            date=lambda n, k=0: f"2001-01-01 {6 * k:02d}:00",
        )
    )  # fmt: skip


@pytest.mark.parametrize("is_known", [True, False])
def test_titles_say_what_a_map_is(maps, is_known):
    figure = maps.figure(0, [1], STATES, STATES + 1 if is_known else None, "model")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    after = "model after 12 h"
    known = [after, "truth, 2001-01-01 12:00", "error (forecast - truth)"]
    assert titles == (known if is_known else [f"{after}, 2001-01-01 12:00"])


@pytest.mark.parametrize("south, east", [(-90, 358), (60, 30)])
def test_a_map_of_a_region_has_ticks_too(south, east):
    axes = Figure().subplots()
    plain_map(axes, np.linspace(90, south, 46), np.linspace(0, east, 90))
    ticks = ((axes.get_xticks(), axes.get_xlim()), (axes.get_yticks(), axes.get_ylim()))
    columns, rows = ([x for x in at if low <= x <= high] for at, (low, high) in ticks)
    assert len(columns) > 3 and len(rows) > 3
    if south == -90:
        assert columns == [0, 60, 120, 180, 240, 300, 360] and rows == [-90, -60, -30, 0, 30, 60, 90]


def test_a_film_shows_each_moment_as_a_film_of_it_alone(maps, tmp_path):
    """What moves is drawn on what stays: nothing of the moment before is left."""
    truths = np.sign(np.stack([STATES[0]] * 2))  # -1 and 1, which give both films the same colours
    maps.animate(tmp_path / "both.gif", 0, STATES, truths, "model")
    maps.animate(tmp_path / "second.gif", 0, STATES[1:], truths[1:], "model")
    with Image.open(tmp_path / "both.gif") as film, Image.open(tmp_path / "second.gif") as alone:
        assert (film.n_frames, alone.n_frames) == (2, 1)
        first = np.asarray(film.convert("RGB"), float)
        film.seek(1)
        second, wanted = (np.asarray(image.convert("RGB"), float) for image in (film, alone))
    assert np.abs(second - wanted).mean() < 1 < np.abs(first - wanted).mean()  # of 255: a GIF has few colours
    for title in np.split(np.abs(np.stack([second, first]) - wanted)[:, :16], 2, axis=2):  # of each map: its hour
        assert title[0].mean() < 0.3 < title[1].mean()
