"""The report's times add up to the whole; skill is what its definitions say."""

import itertools
import re
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils import spans
from utils.forecast import skill
from utils.forecast.ensemble import ensemble_moments, rank_histogram, summarise_ensemble
from utils.measure import time_table
from utils.spans import Timeline

PARTS = st.sampled_from(["data wait", "forward", "backward", "optimizer", "validation", "setup", "logging", "step"])
PARTS_SHOWN = tuple(time_table.PARTS)
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


SECONDS = st.tuples(*[st.floats(0.001, 50)] * len(PARTS_SHOWN))


@given(epochs=st.lists(st.tuples(st.integers(0, 5), SECONDS), min_size=1, max_size=5), is_set_up=st.booleans())
def test_the_table_of_times_adds_up(epochs, is_set_up):
    """The lines of the parts, as they are printed, make up the line of their sum, and that the whole."""
    clock, takes = [0.0], [dict(zip(PARTS_SHOWN, seconds)) for _, seconds in epochs]

    class Clock:
        enter = leave = lambda *_: None

        def take(self) -> dict[str, float]:
            found = takes.pop(0)
            clock[0] += sum(found.values())
            return found

    everyone = mock.patch.object(time_table.dist, "all_gather_object", lambda out, mine: out.__setitem__(0, mine))
    with (
        everyone, mock.patch.object(time_table.dist, "get_world_size", lambda: 1),
        mock.patch.object(time_table.time, "perf_counter", lambda: clock[0]),
    ):  # fmt: skip
        report = time_table.TimeReport(None, torch.device("cpu"), 0, None)
        report.clock, report.is_set_up, iteration = Clock(), is_set_up, 0
        for number, (iterations, _) in enumerate(epochs):
            iteration += iterations
            report.record(number, iteration)
    head, _, _, *lines = report.table()
    numbers = {words[:13].strip(): float(words[13:].split()[0]) for words in (text.strip().ljust(30) for text in lines)}
    shares = [float(re.search(r"([\d.]+)%", text)[1]) for text in lines]
    total = numbers.pop("sum")
    assert set(numbers) == set(PARTS_SHOWN)
    assert total == pytest.approx(sum(numbers.values()), abs=1e-3 * len(numbers))
    assert total == pytest.approx(float(re.search(r": ([\d.]+) s, mean", head)[1]), abs=0.006)
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.05 * len(shares)) and shares[-1] == pytest.approx(100, abs=0.06)


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


@given(
    members=st.integers(2, 5), rows=st.integers(2, 4), columns=st.integers(1, 4), forecasts=st.integers(1, 4),
    seed=st.integers(0, 999), ties=st.booleans(),
)  # fmt: skip
def test_an_ensemble_is_what_its_definitions_say(members, rows, columns, forecasts, seed, ties):
    """Against sums in plain Python: variance, fair CRPS over all pairs, spread over skill, the truth's rank."""
    rng = np.random.default_rng(seed)
    x, y = (
        rng.standard_normal((forecasts, members, 1, rows, columns)),
        rng.standard_normal((forecasts, 1, rows, columns)),
    )
    if ties:
        x, y = np.round(x), np.round(y)
    cos = np.cos(np.deg2rad(np.linspace(80, -70, rows)))
    cos = cos / cos.sum()
    weights = torch.tensor(cos)
    kept, squares, total = [], [], {"variance": 0.0, "crps": 0.0, "squares": 0.0}
    for n in range(forecasts):
        a, b = torch.tensor(x[n]), torch.tensor(y[n])
        kept.append(ensemble_moments(a, b, weights[:, None]).numpy())
        squares.append([[[((a.mean(0) - b) ** 2).mean(-1)[0] @ weights]]])
        counts = [0.0] * (members + 1)
        for i, j in itertools.product(range(rows), range(columns)):
            own, truth, w = x[n, :, 0, i, j], y[n, 0, i, j], cos[i] / columns
            mean = sum(own) / members
            total["variance"] += w * sum((one - mean) ** 2 for one in own) / (members - 1) / forecasts
            apart = sum(abs(one - other) for one, other in itertools.permutations(own, 2)) / (members * (members - 1))
            total["crps"] += w * (sum(abs(one - truth) for one in own) / members - apart / 2) / forecasts
            total["squares"] += w * (mean - truth) ** 2 / forecasts
            counts[sum(one < truth for one in own)] += w
        assert rank_histogram(a, b, weights)[0].tolist() == pytest.approx(counts)
    kept, squares = np.array(kept)[:, None], np.array(squares)[:, 0]
    found = summarise_ensemble(kept, squares, members, 1)
    ratio = np.sqrt((members + 1) / members * total["variance"] / total["squares"]) if total["squares"] else None
    for name, expected in (("spread", np.sqrt(total["variance"])), ("crps", total["crps"]), ("spread_skill", ratio)):
        if expected is not None:
            assert found[name][0, 0, 0, 0] == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@given(rows=st.integers(2, 4), columns=st.integers(1, 9), seed=st.integers(0, 999))
def test_a_spectrum_adds_up_to_the_mean_square(rows, columns, seed):
    field = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)))
    weights = torch.full((rows,), 1 / rows, dtype=torch.float64)
    assert skill.zonal_spectrum(field, weights).sum().item() == pytest.approx(field.square().mean().item())
