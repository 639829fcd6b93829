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


def test_many_ranks_ask_as_often_as_their_number_allows(monkeypatch):
    """Ten seconds apart: of steps of two seconds each fifth, of batches of one each tenth; the first of either asks."""
    now, asked = 100.0, []
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    monkeypatch.setattr(stop, "FEW", 0)
    monkeypatch.setattr(stop, "APART", 10.0)
    with group_of_one():
        requests = stop.StopRequests(177.0, None, timedelta(minutes=1))
        reduce = stop.dist.all_reduce
        monkeypatch.setattr(stop.dist, "all_reduce", lambda *args, **how: (asked.append(now), reduce(*args, **how))[1])
        calls = [("step", 2)] * 13 + [("validation", 1)] * 23 + [("step", 2)] * 30
        answers = []
        for kind, seconds in calls:
            now += seconds
            answers.append(requests.agree(kind)[0])
            if answers[-1]:
                break
        steps = [102, 104, 106, 116, 126]
        batches = [127, 128, 129, 139, 149]
        assert asked == steps + batches + [151, 153, 155, 165, 175, 185, 195] and now == 195
        assert requests.agree_now()
        requests.close()
