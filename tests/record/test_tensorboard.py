"""TensorBoard, as a reader opens it: every curve over its own interface, and in a real browser."""

import gzip
import html
import json
import urllib.parse
import urllib.request
from collections import Counter

import matplotlib.image
import numpy as np
import pytest

from docs.browser import BROWSERS, find_browser, started_browser
from docs.figures.tensorboard import shown, tensorboard
from tests.helpers import ROOT, losses, records, run_here, tiny_flags, write_data
from tests.packages import install

pytestmark = pytest.mark.slow

RUNS = {"tiny/1GPU/00/logs": [], "wide/1GPU/00/logs": ["--config", "wide"]}
SCALARS = {
    "Loss/step", "Loss/train", "Loss/valid", "Learning Rate", "Gradient norm", "Avg iters per sec",
    "Avg samples per sec", "MFU", "Speed/validation", "Speed/readers",
    "Memory/weights [GiB]", "Memory/peak [GiB]", "RMSE(ch0)/valid", "RMSE(ch1)/valid", "RMSE(ch2)/valid",
    "ACC_timemean(ch0)/valid", "ACC_timemean(ch1)/valid", "ACC_timemean(ch2)/valid",
}  # fmt: skip


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Two runs, of two sections, and TensorBoard on the folder that holds them."""
    folder = write_data(tmp_path_factory.mktemp("board"))
    flags = tiny_flags(folder, "--num_iters", "6", "--report", "--plot_channels", "ch0")
    with (folder / "tiny.yaml").open("a") as file:
        file.write("wide:\n  <<: *tiny\n  embed_dim: 64\n")
    runs = {name: run_here([*flags, *more]) for name, more in RUNS.items()}
    with tensorboard("--logdir", str(folder / "runs")) as address:
        yield address, runs


def ask(address: str, what: str, **query: str):
    with urllib.request.urlopen(f"{address}/data/plugin/{what}?{urllib.parse.urlencode(query)}") as answer:
        return json.load(answer)


def test_every_curve_is_there_with_its_numbers(board):
    address, runs = board
    tags = ask(address, "scalars/tags")
    assert set(tags) == set(RUNS)
    for name, folder in runs.items():
        assert set(tags[name]) >= SCALARS
        assert {tag for tag in tags[name] if tag.startswith("Time/")} >= {"Time/forward [s]", "Time/validation [s]"}
        assert {"System/cores", "System/memory_gb"} <= set(tags[name])
        for tag in tags[name]:
            points = ask(address, "scalars/scalars", run=name, tag=tag)
            iterations = [step for _, step, _ in points]
            assert iterations == (
                [1, 2, 3, 4, 5, 6] if tag in ("Loss/step", "Gradient norm", "Learning Rate") else [2, 4, 6]
            )
            assert np.isfinite([value for _, _, value in points]).all(), tag
        shown = [value for _, _, value in ask(address, "scalars/scalars", run=name, tag="Loss/step")]
        np.testing.assert_allclose(shown, losses(folder), rtol=1e-6)
        shown = [value for _, _, value in ask(address, "scalars/scalars", run=name, tag="RMSE(ch1)/valid")]
        np.testing.assert_allclose(shown, [e["valid_rmse"]["ch1"] for e in records(folder, "epoch")], rtol=1e-6)


def test_the_report_is_there_as_text(board):
    address, runs = board
    tags = ask(address, "text/tags")
    for name, folder in runs.items():
        assert tags[name] == ["Report/text_summary"]
        (event,) = ask(address, "text/text", run=name, tag="Report/text_summary")
        verdict = json.loads((folder / "report/report.json").read_text())["verdict"]
        assert event["step"] == 6 and verdict in html.unescape(event["text"])


def test_every_forecast_is_there(board, tmp_path):
    address, runs = board
    tags = ask(address, "images/tags")
    for name, folder in runs.items():
        assert set(tags[name]) == {"Visualization, ch0"}
        pictures = ask(address, "images/images", run=name, tag="Visualization, ch0", sample="0")
        assert [picture["step"] for picture in pictures] == [2, 4, 6]
        with urllib.request.urlopen(f"{address}/data/plugin/images/individualImage?{pictures[-1]['query']}") as answer:
            (tmp_path / "last.png").write_bytes(answer.read())
        shown, kept = (matplotlib.image.imread(path) for path in (tmp_path / "last.png", folder / "pictures/ch0.png"))
        np.testing.assert_array_equal(shown[..., :3], kept[..., :3])


def test_the_examples_open_beside_a_readers_run(board):
    _, runs = board
    (mine, *_) = runs.values()
    with tensorboard("--logdir_spec", f"mine:{mine},example:docs/example_logs") as address:
        tags = ask(address, "scalars/tags")
        pictures = ask(address, "images/tags")
    assert set(tags) == {"mine/logs", "example/float32/logs", "example/bf16/logs"}
    assert {"Loss/train", "RMSE(vor_upper)/valid", "Time/forward [s]"} <= set(tags["example/bf16/logs"])
    assert set(pictures["example/float32/logs"]) == {"Visualization, vor_upper"}
    trace = json.loads(gzip.decompress((ROOT / "docs/example_logs/trace/rank0.pt.trace.json.gz").read_bytes()))
    assert any(event.get("name") == "backward" for event in trace["traceEvents"])


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="Playwright is not installed: pip install -r requirements-tools.txt")
    reason = None if find_browser() else install(BROWSERS[:1], "chromium")
    if reason:
        pytest.skip(reason)
    with started_browser() as browser:
        yield browser


@pytest.mark.nightly
def test_a_browser_shows_both_runs(board, browser, tmp_path):
    address, runs = board
    page = shown(browser, f"{address}/#timeseries")
    for word in (*RUNS, "Avg samples per sec", "Visualization, ch0"):
        assert word in page.content(), word
    for place in ("scalars&tagFilter=Loss", "images"):
        shown(browser, f"{address}/#{place}").screenshot(path=tmp_path / "page.png")
        pixels = (255 * matplotlib.image.imread(tmp_path / "page.png")[..., :3]).astype(np.uint8)
        colours = Counter(map(bytes, pixels[200:, 400:].reshape(-1, 3)))  # where curves and pictures are
        assert len(colours) > 100, place
