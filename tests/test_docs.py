"""The pages: figures are those of the records, links arrive, what is named exists, questions have answers."""

import re
from functools import cache

import pytest
import torch

from docs import ages, make
from docs.figures import vit
from tests.helpers import ROOT
from tests.readme_commands import PAGES as CHAPTERS
from tests.readme_commands import ROWS
from utils.config.reader import load_config
from utils.config.settings import FIELDS
from utils.forecast.settings import Evaluation, Outlook, flags

IN_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


def name(page):
    return str(page.relative_to(ROOT))


@cache
def places(page):
    """Return what a link to a page may end in: its titles, as GitHub writes them, and its named places."""
    text = page.read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return anchors | set(re.findall(r'<a id="([^"]+)">', text))


def missing_links(page):
    """Yield the links of a page that do not arrive."""
    for link in re.findall(r"\]\(([^)\s]+)\)", IN_CODE.sub("`code`", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in places(target))):
            yield link


@pytest.mark.parametrize("page", make.PAGES, ids=name)
def test_links_arrive(page):
    assert not list(missing_links(page))


def test_links_that_do_not_arrive_are_seen(tmp_path):
    (tmp_path / "other.md").write_text("# It is: `here`\n")
    links = ["other.md", "other.md#it-is-here", "#a", "https://b.c", "gone.md", "other.md#there", "#b"]
    (page := tmp_path / "page.md").write_text("# A\n" + " ".join(f"[`x`]({link})" for link in links))
    assert list(missing_links(page)) == ["gone.md", "other.md#there", "#b"]


@pytest.mark.parametrize("page", make.PAGES, ids=name)
def test_figures_are_those_of_the_records(page):
    """`make docs` mends what differs."""
    text = page.read_text()
    assert make.rewritten(text) == text
    assert not re.search(r"^<!-- figure", text, re.M)  # it would end the paragraph


def test_no_figure_is_untied():
    """Each table has its place, and the sentences that have figures of records still have their marks."""
    marks = [mark for page in make.PAGES for mark in make.MARKED.findall(page.read_text())]
    tables = [name for kind, name, _ in marks if kind == "from"]
    assert sorted(tables) == sorted([*make.TABLES, "ladder_demo", "ladder_base"])
    assert sum(kind == "figure" for kind, *_ in marks) >= 32


def test_what_a_record_says_is_written():
    page = "a <!-- figure: certificate; grids; g -->1<!-- end -->, <!-- from: verdict -->\nold\n<!-- end -->"
    grids = make.record("certificate")["figures"]["grids"]
    assert make.rewritten(page) == page.replace(">1<", f">{grids}<").replace("old", make.verdict())
    with pytest.raises(KeyError):
        make.rewritten("<!-- from: of.nothing --><!-- end -->")


def test_records_that_are_older_than_the_code(tmp_path):
    """By the commits of the files; each record is known."""
    names = {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert names == set(ages.MEASURES)
    for code in ages.MEASURES.values():
        assert all((ROOT / path).exists() for path in code)

    def commit(path, text):
        (tmp_path / path).write_text(text)
        ages.git(tmp_path, "add", path)
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        ages.git(tmp_path, *who, "commit", "-m", "x", "--", path)

    ages.git(tmp_path, "init")
    commit("code.py", "1")
    commit("record.json", "1")
    assert ages.changed_since(tmp_path, "record.json", ("code.py",))[1] == []
    commit("other.py", "1")
    commit("code.py", "2")
    assert ages.changed_since(tmp_path, "record.json", ("code.py",))[1] == ["code.py"]
    assert ages.changed_since(tmp_path, "nothing.json", ("code.py",)) is None


def test_the_records_are_good_enough():
    bounds = {  # at least, at most
        "certificate": {"worst_float64": (0, 1e-12), "worst_float32": (0, 2e-6)},
        "checkpoint": {"stall_over_save": (0, 0.1)},
        "loader": {
            "native_over_preadv": (0.85, 9), "native_over_stock": (5, 99), "data_wait_frac": (0, 0.02),
            "of a loop bound by a step of 20 ms": (0.95, 9),
            **{f"cold, read_depth {depth}, of what it allows": (0.8, 9) for depth in make.loader.DEPTHS},
        },
        "observers": {"report_overhead": (-1, 0.02)},
        "simulate": {"activations_tp4_over_tp1": (0, 0.36), "activations_regathered": (0, 0.5)},
        "step": {
            "fp32_fraction_of_matmul": (0.58, 1), "bf16_fraction_of_matmul": (0.17, 1), "loop_overhead": (-1, 0.03)
        },
    }  # fmt: skip
    for source, figures in bounds.items():
        for figure, (least, most) in figures.items():
            assert least <= make.record(source)["figures"][figure] <= most, (source, figure)


def test_the_version_is_the_same_everywhere():
    """CONTRIBUTING.md says where."""
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == version
    releases = re.findall(r"^## (\d\S*), \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == version


def test_the_readme_is_short_and_chapter_1_is_about_one_device():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    assert not re.search(r"\b(tp|cp)\b", CHAPTERS[1].read_text())
    assert [page.name[:2] for page in CHAPTERS[1:]] == [f"{chapter}-" for chapter in range(1, 7)]
    assert sorted(sum(ROWS, [])) == [*range(len(CHAPTERS))]  # the commands of each page run once


def test_every_question_has_an_answer():
    """A question is a paragraph, or an entry of a list, in italics; in numbered ones its title is."""
    asked = 0
    for page in CHAPTERS:
        text = re.sub(r"```.*?```\n", "", page.read_text(), flags=re.S)
        text = re.sub(r"^ *<details>.*?</details>\n", "ANSWER\n", text, flags=re.S | re.M)
        parts = re.split(r"\n(?=- |\d\. |ANSWER)|\n\n+", text)
        for part, after in zip(parts, parts[1:]):
            if re.match(r"(- )?\*[^*]*\?[^*]*\*$|\d\. \*[^?]*\?|\*Question:", part.strip()):
                asked += 1
                assert after.startswith("ANSWER"), f"{page}: {part}"
    assert asked == sum(page.read_text().count("<details>") for page in CHAPTERS) == 38


def test_flags_that_are_named_exist():
    text = "".join(page.read_text() for page in CHAPTERS)
    evaluate, forecast = flags(Evaluation), flags(Outlook)
    for script, names in (
        (r"train\.py|submit_pm\w*\.sh", FIELDS), (r"evaluate\.py", evaluate), (r"forecast\.py", forecast)
    ):  # fmt: skip
        # One job script starts both.
        page = text if names is not FIELDS else re.sub(r"TRAIN_SCRIPT=evaluate\.py.*", "", text)
        commands = re.findall(rf"(?:{script})( [^`\n]*(?:\\\n[^`\n]*)*)", page)
        given = set(re.findall(r"--([a-z_0-9]+)", " ".join(commands)))
        known = set(names) | {f"no_{name}" for name in names} | {"yaml_config", "help"}
        assert given and given <= known, given - known


def test_every_flag_is_explained():
    pages = [*CHAPTERS, ROOT / "docs/configuration.md"]
    text = "".join(page.read_text() for page in pages)
    assert not [name for name in FIELDS | flags(Evaluation) | flags(Outlook) if not re.search(rf"(`|--){name}\b", text)]


def of_ours(text: str) -> str:
    """Return the lines that name no YAML file of the reader's own."""
    return "\n".join(line for line in text.splitlines() if "--yaml_config" not in line)


def test_every_section_that_is_named_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.sh"), ROOT / "train.py", ROOT / "Makefile"]
    named = {name for page in pages for name in re.findall(r"--config[= ]([a-z]\w*)", of_ours(page.read_text()))}
    assert {"demo", "short", "bs256_opt"} <= named
    for name in named:
        assert load_config(["--config", name])[0].config == name


def test_the_model_is_drawn():
    """Of sections with and without windows and residual, with their own shapes; another section is one line."""
    drawn = {}
    for section in ("base", "demo"):
        axes = vit.figure_of([f"--config={section}"]).axes[0]
        drawn[section] = [text.get_text() for text in axes.texts]
    assert {"4,050 tokens of 384", "8 x 8: 1280 -> 384", "8 heads of 48"} <= set(drawn["base"])
    assert any("windows" in text for text in drawn["demo"]) != any("windows" in text for text in drawn["base"])
    with pytest.raises(ValueError, match="unknown section"):
        vit.figure_of(["--config=nothing"])


def test_data_parallel_does_nothing_on_a_cpu():
    """As chapter 1 and docs/founding-documents.md say."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = torch.nn.Linear(2, 2)
    wrapped = torch.nn.DataParallel(model)
    assert wrapped.device_ids == [] and torch.equal(wrapped(x := torch.randn(4, 2)), model(x))
