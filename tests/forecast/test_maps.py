"""What stands over the maps."""

from types import SimpleNamespace

import numpy as np
import pytest

from utils.forecast.maps import Maps


@pytest.mark.parametrize("is_known", [True, False])
def test_titles_say_what_a_map_is(is_known):
    fields = SimpleNamespace(
        latitude=np.linspace(80, -80, 5), longitude=np.arange(8) * 45.0, out_names=["t"], label=lambda c: "t [K]"
    )
    data = SimpleNamespace(
        fields=fields, map_stride=1, lead_hours=[6.0, 12.0], date=lambda n, k=0: f"2001-01-01 {6 * k:02d}:00"
    )
    states = np.random.default_rng(0).standard_normal((2, 5, 8))
    figure = Maps(data).figure(0, [1], states, states + 1 if is_known else None, "model")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    after = "model after 12 h"
    known = [after, "truth, 2001-01-01 12:00", "error (forecast - truth)"]
    assert titles == (known if is_known else [f"{after}, 2001-01-01 12:00"])
