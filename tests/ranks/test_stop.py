"""When a run stops and saves: signals and the clock."""

from datetime import timedelta

from tests.helpers import group_of_one
from utils.ranks import stop


def test_the_clock_asks_for_a_checkpoint_once_an_interval_and_then_for_the_end(monkeypatch):
    """Ten seconds between saves; the end after 35. The answer comes a call later."""
    now = 100.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    with group_of_one():
        requests = stop.StopRequests(135.0, 10.0, timedelta(minutes=1))
        answers = []
        for now in range(100, 138):  # noqa: B007
            answers.append(requests.agree())
        assert [i for i, (_, save) in enumerate(answers) if save] == [12, 24, 36]
        assert [i for i, (end, _) in enumerate(answers) if end] == [37] and requests.reason == "the time limit"
        requests.close()
