"""TensorBoard in a real browser: the README's pictures of it, from the runs in runs/ and docs/example_logs.

    python docs/figures/tensorboard.py

Needs Chromium or Chrome, and nobody to look on.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
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
    """Run TensorBoard, and give its address. Raises RuntimeError where it does not answer within a minute."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--host", HERE, "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    address, end = f"http://{HERE}:{port}", time.monotonic() + 60
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/data/logdir"):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("TensorBoard did not start: " + " ".join(command))
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def look(browser: str, address: str, *, picture: Path | None = None, seconds: int = 20, size: str = "1400,900") -> str:
    """Open a page, wait for what it loads, take a picture if asked, and return the page's document."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            f"--user-data-dir={profile}", f"--window-size={size}", f"--virtual-time-budget={1000 * seconds}",
        ]  # fmt: skip
        env = os.environ | {"HOME": profile}
        if picture:
            shoot = [*command, f"--screenshot={picture}", address]
            subprocess.run(shoot, env=env, check=True, capture_output=True, timeout=180)
        found = subprocess.run([*command, "--dump-dom", address], env=env, check=True, capture_output=True, timeout=180)
    return found.stdout.decode()


def main() -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("tensorboard.py: error: no Chromium or Chrome here: apt-get install chromium")
    figures = ROOT / "docs/figures"
    with tensorboard("--logdir_spec", f"mine:{ROOT}/runs,example:{ROOT}/docs/example_logs") as address:
        look(browser, f"{address}/#scalars&tagFilter={TAGS}", picture=figures / "tensorboard_scalars.png")
        look(browser, f"{address}/#images", picture=figures / "tensorboard_images.png")


if __name__ == "__main__":
    main()
