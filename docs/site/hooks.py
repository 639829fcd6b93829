"""The pages of the site, made of those of this clone: MkDocs calls what begins with on_.

The pages are written for code hosts. What MkDocs reads otherwise is changed on the way, and no file is: marks of
records, lists (Python-Markdown wants four spaces where code hosts take two or three), folded answers. Pages link to
files beside docs/; the site has these as pages of their own, so it needs no code host.
"""

import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
MARK = re.compile(r"<!-- (?:(?:from|figure): .+?|end) -->")
LIST = re.compile(r"(?:[-*+]|\d+[.)]) +")
SUMMARY = re.compile(r"<details><summary>(.*?)</summary>")
FENCE = re.compile(r"`{3,}|~{3,}")
PICTURES = (".png", ".gif", ".svg", ".jpg")
# Chapters come first in what a search finds; the titles of api.md are names, and weigh a thousand times as other words.
SEARCH = {"api.md": 0.001} | {path.name: 2 for path in ROOT.glob("docs/[1-9]-*.md")}
SOURCE = "source"  # the folder of files that pages name


def deeper(markdown: str) -> str:
    """Return Markdown of code hosts as Python-Markdown takes it: lists four spaces deep, folded parts as `??? note`.

    What is in an item of a list stands, on code hosts, under the first letter of its text.
    """
    lines: list[str] = []
    around: list[tuple[str, int]] = []  # what a line stands in: items of lists and folded parts, with their columns
    fence = ""
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        column = len(line) - len(text)
        if not text:
            lines.append("")
            continue
        while not fence and around and around[-1][0] == "item" and column < around[-1][1]:
            around.pop()
        if text.startswith("</details>") and not fence:
            while around.pop()[0] != "folded":
                pass
            lines.append("")
            continue
        indent = " " * (4 * len(around) + max(column - (around[-1][1] if around else 0), 0))
        mark = FENCE.match(text)
        if mark and (not fence or text.startswith(fence)):
            fence = "" if fence else mark[0]
        elif fence:
            pass
        elif folded := SUMMARY.match(text):
            lines += ["", f'{indent}??? note "{folded[1]}"', ""]
            around.append(("folded", column))
            text = text[folded.end() :].strip()
            if text:
                lines.append(f"{' ' * 4 * len(around)}{text}")
            continue
        elif item := LIST.match(text):
            if lines and lines[-1] and not around and not lines[-1].startswith(" ") and not LIST.match(lines[-1]):
                lines.append("")
            around.append(("item", column + item.end()))
        lines.append(indent + text)
    return "\n".join(lines) + "\n"


class Site:
    """The files of a site, of which pages name more than there are in docs/."""

    def __init__(self, files: Files, config: MkDocsConfig):
        self.files, self.config = files, config

    def place(self, target: Path) -> str | None:
        """Return where a file of the clone, or a folder, stands in the site; None where it is none of the clone."""
        docs = Path(self.config.docs_dir)
        if not target.is_relative_to(ROOT) or not target.exists():
            return None
        if target == ROOT / "README.md":
            return "index.md"
        if (target / "README.md").is_file():
            target = target / "README.md"
        if target.is_relative_to(docs):
            name = target.relative_to(docs).as_posix()
            file = self.files.get_file_from_path(name)
            if file and not file.inclusion.is_excluded():
                return name
        name = target.relative_to(ROOT).as_posix()
        if target.suffix in PICTURES:
            self.add(name, path=target)
            return name
        name = f"{SOURCE}/{name}/index.md" if target.is_dir() else f"{SOURCE}/{name}.md"
        if not self.files.get_file_from_path(name):
            self.add(name, content="")  # before what it names, which may name it
            self.add(name, content=self.listing(target) if target.is_dir() else self.text(target, name))
        return name

    def add(self, name: str, content: str | None = None, path: Path | None = None) -> None:
        if old := self.files.get_file_from_path(name):
            self.files.remove(old)
        file = File.generated(self.config, name, content=content, abs_src_path=str(path) if path else None)
        file.inclusion = InclusionLevel.NOT_IN_NAV
        self.files.append(file)

    def listing(self, folder: Path) -> str:
        """Return a page with the files of a folder."""
        name = folder.relative_to(ROOT).as_posix()
        found = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        own = f"{SOURCE}/{name}/index.md"
        lines = [f"- [{path.name}]({relative(self.place(path), own)})" for path in found if is_text(path)]
        return f"---\nsearch:\n  exclude: true\n---\n# {name}/\n\n" + "\n".join(lines) + "\n"

    def text(self, path: Path, own: str) -> str:
        """Return a page with the text of a file; of a notebook its cells."""
        return deeper(self.linked(notebook_of(path), path, own)) if path.suffix == ".ipynb" else listing_of(path)

    def linked(self, markdown: str, source: Path, own: str) -> str:
        """Return a page's text with its links as they are in the site: of the file `source`, which stands at `own`."""

        def arriving(found: re.Match) -> str:
            before, link, after = found.groups()
            path, _, anchor = link.partition("#")
            if not path or re.match(r"[a-z]+:", path):
                return found[0]
            place = self.place(Path(os.path.normpath(source.parent / path)))
            return (
                found[0] if place is None else before + relative(place, own) + (f"#{anchor}" if anchor else "") + after
            )

        return LINK.sub(arriving, markdown)


def relative(place: str, own: str) -> str:
    return posixpath.relpath(place, posixpath.dirname(own) or ".")


def is_text(path: Path) -> bool:
    return path.suffix in {".py", ".yaml", ".yml", ".sh", ".md", ".txt", ".toml", ".log"}


def notebook_of(path: Path) -> str:
    """Return the cells of a notebook, one after another."""
    cells = json.loads(path.read_text())["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(f"``` python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"


def listing_of(path: Path) -> str:
    """Return a page with the text of a file."""
    text = path.read_text(errors="replace")
    fence = "`" * (max((len(x) for x in re.findall("`+", text)), default=2) + 1)
    fence = max(fence, "```", key=len)
    kind = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json"}.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n"
    return f'{head}{fence} {{ .{kind} linenums="1" }}\n{text.rstrip()}\n{fence}\n'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and all that pages name."""
    global _site
    _site = Site(files, config)
    _site.add("index.md", content=(ROOT / "README.md").read_text())
    for file in [*files.documentation_pages()]:
        source = ROOT / "README.md" if file.src_uri == "index.md" else Path(config.docs_dir, file.src_uri)
        _site.linked(source.read_text(), source, file.src_uri)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page as MkDocs takes it."""
    own = page.file.src_uri
    if own in SEARCH:
        page.meta["search"] = {"boost": SEARCH[own]}
    if own.startswith(f"{SOURCE}/"):
        return markdown
    source = ROOT / "README.md" if own == "index.md" else Path(config.docs_dir, own)
    return deeper(MARK.sub("", _site.linked(markdown, source, own)))
