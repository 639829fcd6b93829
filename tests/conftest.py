import os

# As many tests as cores run at a time, and threads that find no core wait by spinning: a seventh of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib  # noqa: E402
import sqlite3  # noqa: E402, F401  (before eccodes, which brings an old library of that name: MLflow refuses it)

with contextlib.suppress(ImportError):
    import cartopy.crs  # noqa: F401  (before eccodes, too: see utils/forecast/projections.py)

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.helpers import run_here, tiny_flags, write_data  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--none-skipped", action="store_true", help="a test that is skipped is one that failed")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """A proof that did not run has proved nothing."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")  # of the session that starts others
    skipped = [report for report in reporter.stats.get("skipped", []) if report.when != "collect"] if reporter else []
    if session.config.getoption("none_skipped") and skipped:
        print(f"\n{len(skipped)} skipped, and none may be: {skipped[0].longrepr[-1]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items):
    """GPU tests run where there is a GPU, unchanged; elsewhere they are skipped with the reason."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords hold names of folders, too
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def tiny(tmp_path):
    """A small data set: 3 channels of 17 x 32, 21 training and 7 validation samples."""
    return write_data(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with data and `runs/tiny/1GPU/00`, trained with a moving average: read it only."""
    folder = write_data(tmp_path_factory.mktemp("evaluate"), valid={"2003": 20, "2004": 7}, names=["u", "v", "t"])
    run_here(tiny_flags(folder, "--num_iters", "20", "--ema_decay", "0.9"))
    return folder
