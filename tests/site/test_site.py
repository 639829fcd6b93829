"""The site: Markdown of code hosts becomes what MkDocs reads, links arrive, the search finds, nothing complains."""

import contextlib
import functools
import html.parser
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse

import pytest

from docs.browser import find_browser, started_browser
from tests.helpers import ROOT, clean_environment

pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install -r requirements-site.txt")

from docs.site.hooks import deeper  # noqa: E402

pytestmark = pytest.mark.slow

PAGES = ("", "1-one-device/", "exercises/", "scaling/", "api/")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site; every warning of MkDocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=clean_environment() | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    return folder


class Links(html.parser.HTMLParser):
    """What a page links to, and the places that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.places |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def test_links_arrive(site):
    """Those to files of this clone, too: the site has them."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = urllib.parse.unquote(link).partition("#")
            there = path if not target else (path.parent / target).resolve()
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), f"{path.relative_to(site)} links to {link}"
            if anchor and there in pages and not anchor.startswith("__"):
                assert anchor in pages[there].places, f"{path.relative_to(site)} links to {link}"


def test_what_pages_name_is_in_the_site(site):
    assert "def forward_backward" in re.sub("<[^>]+>", "", (site / "source/train.py/index.html").read_text())
    assert (site / "benchmarks/results/plan.png").is_file()
    api = (site / "api/index.html").read_text()
    for name in ("distributed.mappings.all_gather", "distributed.layers.ColumnParallelLinear", "networks.vit.ViT"):
        assert f'id="{name}"' in api, name


def test_answers_are_folded_and_lists_are_deep(site):
    page = (site / "2-model-parallel/index.html").read_text()
    answers = (ROOT / "docs/2-model-parallel.md").read_text().count("<summary>Answer</summary>")
    assert len(re.findall(r"<summary>Answer</summary>", page)) == answers
    assert "<!-- " not in re.sub(r"<!-- [A-Z].*?-->", "", page.split("<article")[1].split("</article")[0])
    assert len(re.findall(r"<li>\s*<p><em>Why not cut the first matrix", page)) == 1  # with its answer inside
    assert "??? note" not in "".join(path.read_text() for path in site.rglob("*.html"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    """Serve a folder; give its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="Playwright is not installed: pip install -r requirements-tools.txt")
    if find_browser() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(site):
    with served(site) as address:
        yield address


def opened(browser, address, width=1400):
    """A page in a window so wide, and what it complains of."""
    page = browser.new_page(viewport={"width": width, "height": 1000})
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"{request.url}: {request.failure}"))
    page.goto(address, wait_until="networkidle")
    return page, complaints


def test_five_pages_in_a_browser(address, browser, tmp_path):
    """On a wide and on a narrow window; the console stays empty. SITE_PICTURES is where to keep what it looks like."""
    folder = tmp_path if "SITE_PICTURES" not in os.environ else ROOT / os.environ["SITE_PICTURES"]
    folder.mkdir(exist_ok=True)
    for name in PAGES:
        for width in (1400, 420):
            page, complaints = opened(browser, f"{address}/{name}", width)
            picture = folder / f"{name.strip('/') or 'index'}_{width}.png"
            page.screenshot(path=picture)
            assert not complaints and picture.stat().st_size > 20_000, (name, complaints)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than its window"
            page.close()


def test_a_search_finds(address, browser):
    """As a reader searches: the chapter comes first, and a click arrives at it."""
    page, complaints = opened(browser, f"{address}/")
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.insert_text("all-reduce")  # at once: of a word that ends in `-` the search complains
    page.keyboard.press("End")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    assert "Chapter 2" in first.inner_text()
    first.click()
    page.wait_for_url("**/2-model-parallel/**")
    assert not complaints


def test_the_search_knows_the_chapters_and_no_listings(site):
    """What it searches: sections of pages, and not the listings of source files."""
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in found if "all-reduce" in entry["text"]}
    assert "2-model-parallel/#mappings-collectives-with-a-gradient" in places
    assert not [entry["location"] for entry in found if re.match(r"source/.*\.py/", entry["location"])]


def test_lists_and_folded_parts():
    """What is in an item stands four spaces deep; what is folded in it, four more."""
    page = """Some text:
- one
  more of one

  ```bash
  - no list
  ```
- *two?*
  <details><summary>Answer</summary>

  Yes:

  - so

  </details>
1. third
   line

<details><summary>Hint</summary>

text
</details>
"""
    assert (
        deeper(page)
        == """Some text:

- one
    more of one

    ```bash
    - no list
    ```
- *two?*

    ??? note "Answer"


        Yes:

        - so


1. third
    line


??? note "Hint"


    text

"""
    )
