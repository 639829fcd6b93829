"""A browser that runs without a screen: for the pictures of TensorBoard, and for the tests that look at pages."""

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Return the path of a browser."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """Give a browser; it ends after. Raises FileNotFoundError where this machine has none."""
    found = find_browser()
    if found is None:
        raise FileNotFoundError("no Chromium or Chrome here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
