"""TensorBoard in a real browser: chapter 5's pictures of it, from the run of `make demo` and docs/example_logs.

    python docs/figures/tensorboard.py

Needs Chromium or Chrome, and nobody to look on.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = "127.0.0.1"
TAGS = "Loss|RMSE.*upper|Learning"


@contextlib.contextmanager
def tensorboard(*arguments: str) -> Iterator[str]:
    """Run TensorBoard in the root of the clone, and give its address.

    It takes a free port, and answers when it has read all. Raises RuntimeError where it ends before that.
    """
    command = [sys.executable, "-m", "tensorboard.main", "--host", HERE, "--port", "0", *arguments]
    command += ["--load_fast=false", "--reload_task=blocking", "--reload_interval=0"]  # all is read before it answers
    with tempfile.NamedTemporaryFile("w") as told:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=told)
        try:
            while not (found := re.search(r"TensorBoard .* at (http://\S+)/ ", Path(told.name).read_text())):
                if process.poll() is not None:
                    raise RuntimeError(f"TensorBoard did not start: {' '.join(command)}\n{Path(told.name).read_text()}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()
            process.wait()


def shown(browser: "Browser", address: str) -> "Page":
    """Open one of its pages in a browser of Playwright, and give it when all is drawn."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(address, wait_until="networkidle")
    page.wait_for_timeout(3000)  # what is loaded is drawn after
    return page


def main() -> None:
    sys.path[0] = str(ROOT)  # not this folder, whose tensorboard.py would hide the package
    from docs.browser import started_browser

    with (
        tensorboard("--logdir_spec", "mine:runs/demo/1GPU/00/logs,example:docs/example_logs") as address,
        started_browser() as browser,
    ):
        for name, place in {"scalars": f"scalars&tagFilter={TAGS}", "images": "images"}.items():
            page = shown(browser, f"{address}/#{place}")
            page.screenshot(path=ROOT / f"docs/figures/tensorboard_{name}.png")


if __name__ == "__main__":
    try:
        main()
    except FileNotFoundError as error:
        sys.exit(f"tensorboard.py: error: {error}")
