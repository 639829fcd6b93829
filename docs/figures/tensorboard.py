"""TensorBoard in a real browser: chapter 5's pictures of it, from the runs in runs/ and docs/example_logs.

    python docs/figures/tensorboard.py

Needs Chromium or Chrome, and nobody to look on.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = "127.0.0.1"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TAGS = "Loss|RMSE.*upper|Learning"


def find_browser() -> str | None:
    """Return the path of a browser that can run without a screen."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


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


def look(
    browser: str, address: str, picture: Path | None = None, seconds: int = 20, size: tuple[int, int] = (1400, 900)
) -> str:
    """Open a page in a window of so many points, wait for what it loads, and return its document.

    With a picture, take that, and return what the page wrote to the console.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "--enable-logging=stderr",
            f"--virtual-time-budget={1000 * seconds}",
        ]  # fmt: skip
        command += [f"--screenshot={picture}" if picture else "--dump-dom", address]
        env = os.environ | {"HOME": profile}
        done = subprocess.run(command, env=env, check=True, capture_output=True, timeout=180, text=True)
        return "\n".join(x for x in done.stderr.splitlines() if "CONSOLE" in x) if picture else done.stdout


def main() -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("tensorboard.py: error: no Chromium or Chrome here: apt-get install chromium")
    figures = ROOT / "docs/figures"
    with tensorboard("--logdir_spec", "mine:runs,example:docs/example_logs") as address:
        look(browser, f"{address}/#scalars&tagFilter={TAGS}", picture=figures / "tensorboard_scalars.png")
        look(browser, f"{address}/#images", picture=figures / "tensorboard_images.png")


if __name__ == "__main__":
    main()
