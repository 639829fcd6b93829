"""The report's times add up to the whole; skill is what its definitions say."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils import spans
from utils.forecast import skill
from utils.spans import Timeline

PARTS = st.sampled_from(["data wait", "forward", "backward", "optimizer", "validation", "setup", "logging", "step"])
EVENTS = st.lists(st.one_of(PARTS, st.just(None), st.just("gradient"), st.just("model"), st.just("take")), max_size=40)


@given(events=EVENTS, seconds=st.lists(st.floats(1e-3, 10), min_size=200, max_size=200))
def test_the_parts_of_time_add_up(events, seconds):
    """Whatever begins and ends in whatever order: no moment is lost, none counted twice."""
    ticks = iter(np.cumsum(seconds).tolist())
    now = []

    def clock() -> float:
        now.append(next(ticks))
        return now[-1]

    with mock.patch.object(spans.time, "perf_counter", clock):
        line, depth, total = Timeline(torch.device("cpu")), 0, {}
        begin = now[-1]
        for event in [*events, "take"]:
            if event == "take":
                for part, taken in line.take().items():
                    total[part] = total.get(part, 0) + taken
            elif event == "gradient":
                line.gradient_is_there()
            elif event == "model":
                line.model_begins()
            elif event is not None:
                line.enter(event)
                depth += 1
            elif depth:
                line.leave()
                depth -= 1
    assert sum(total.values()) == pytest.approx(now[-1] - begin)
    assert all(taken >= 0 for taken in total.values())


@given(
    rows=st.integers(2, 5), columns=st.integers(2, 6), forecasts=st.integers(1, 5), seed=st.integers(0, 999),
    scale=st.sampled_from([1e-6, 1.0, 1e5]),
)  # fmt: skip
def test_skill_is_what_its_definitions_say(rows, columns, forecasts, seed, scale):
    """Against sums in plain Python: RMSE, bias, and anomaly correlation, weighted by the cosine of the latitude."""
    rng = np.random.default_rng(seed)
    f, t, c = scale * rng.standard_normal((3, forecasts, rows, columns)) + scale * 3
    latitude = np.linspace(80, -70, rows)
    weights = skill.row_weights(latitude)
    kept = [
        skill.moments(*(torch.tensor(x[n])[None] for x in (f, t, c)), weights).numpy()[None, None]
        for n in range(forecasts)
    ]
    found = skill.summarise([np.concatenate([k, k], axis=1) for k in kept], forecasts, 1)
    cos = np.cos(np.deg2rad(latitude))
    cos = cos / cos.sum()
    squares = errors = correlation = 0.0
    for n in range(forecasts):
        ab = aa = bb = 0.0
        for i in range(rows):
            for j in range(columns):
                w = cos[i] / columns / forecasts
                squares += w * (f[n, i, j] - t[n, i, j]) ** 2
                errors += w * (f[n, i, j] - t[n, i, j])
                a, b = f[n, i, j] - c[n, i, j], t[n, i, j] - c[n, i, j]
                ab, aa, bb = ab + cos[i] * a * b, aa + cos[i] * a * a, bb + cos[i] * b * b
        correlation += ab / np.sqrt(aa * bb) / forecasts
    for name, expected in (("rmse", np.sqrt(squares)), ("bias", errors), ("acc", correlation)):
        assert found[name][0, 0, 0, 0, 0] == pytest.approx(expected, rel=1e-9, abs=1e-12 * scale), name
    assert found["rmse_over_persistence"][0, 0, 1, 0, 0] == pytest.approx(1)


@given(rows=st.integers(2, 4), columns=st.integers(1, 9), seed=st.integers(0, 999))
def test_a_spectrum_adds_up_to_the_mean_square(rows, columns, seed):
    field = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)))
    weights = torch.full((rows,), 1 / rows, dtype=torch.float64)
    assert skill.zonal_spectrum(field, weights).sum().item() == pytest.approx(field.square().mean().item())
