"""A browser that runs without a screen: for the pictures of TensorBoard, and for the tests that look at pages.

It needs Playwright (requirements-tools.txt), which is imported where a browser starts: tests of GPUs do without.
"""

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Return the path of a browser."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def started_browser() -> Iterator["Browser"]:
    """Give a browser; it ends after. Raises FileNotFoundError where this machine has none."""
    found = find_browser()
    if found is None:
        raise FileNotFoundError("no Chromium or Chrome here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
