"""Lines that say how far a run is, where no terminal draws a bar."""

import logging
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers import run_here, tiny_flags
from utils.config.settings import Config
from utils.record.progress import Progress, in_words


def test_a_log_says_how_far_the_training_and_its_validations_are(tiny):
    argv = tiny_flags(tiny, "--num_iters", "8", "--global_batch_size", "2", "--ema_decay", "0.9")
    with mock.patch("utils.record.progress.SAID_EVERY", 0):
        log = (run_here(argv) / "out.log").read_text()
    lines = re.findall(r"iteration (\d) of 8(, loss \S+)?, \S+ samples/s, \d+ s left", log)
    validated = re.findall(r"validation: (\d+) of (\d+) batches", log)
    assert [number for number, _ in lines] == [str(n) for n in range(2, 9)]  # the first has none before it
    (total,) = {int(of) for _, of in validated}
    assert [int(n) for n, _ in validated] == list(range(1, total + 1))  # of both weights
    with mock.patch("utils.record.progress.SAID_EVERY", 0), mock.patch.object(sys.stderr, "isatty", lambda: True):
        log = (run_here(argv) / "out.log").read_text()
    assert "samples/s," not in log and "validation: " not in log


def test_ten_seconds_pass_between_lines_and_the_time_left_is_that_of_the_last_stretch(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    caplog.set_level(logging.INFO)
    progress, config = Progress(), Config(num_iters=600, global_batch_size=16, rollout_steps=[4], rollout_from=[450])
    progress.begin(SimpleNamespace(job=SimpleNamespace(config=config, data=SimpleNamespace(valid_loader=range(9)))))

    def steps(numbers, seconds):
        for iteration in numbers:
            progress.before_step(0)
            now[0] += seconds
            progress.after_step(iteration, 0)

    steps(range(1, 2), 60)  # it was compiled
    steps(range(2, 7), 2)
    progress.step_is_known({"loss": 0.31416})
    steps(range(7, 31), 0.5)
    progress.after_validation_batch(30)
    now[0] += 100
    progress.after_validation_batch(30)
    progress.after_epoch(None, ())
    steps(range(31, 42), 1)
    assert caplog.messages == [
        "iteration 6 of 600, 8 samples/s, 35 min left",  # the last 150 are of four steps
        "iteration 26 of 600, loss 0.3142, 32 samples/s, 9 min left",
        "validation: 2 of 9 batches",
        "iteration 40 of 600, loss 0.3142, 16 samples/s, 17 min left",
    ]


@pytest.mark.parametrize("seconds, words", [(0, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (9000, "2.5 h")])
def test_a_time_is_said_in_its_largest_unit(seconds, words):
    assert in_words(seconds) == words
