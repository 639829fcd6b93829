"""The house: which way imports run, scripts that lint, a notebook that opens, files that the README names."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

OURS = {"networks", "utils", "distributed", "tests", "benchmarks", "train", "train_mp", "train_mp_graphs", "evaluate"}
MAY_IMPORT = {
    "networks": {"networks"},
    "utils": {"utils"},
    "distributed": {"distributed", "networks", "utils"},
    ".": {"distributed", "networks", "utils", "train", "train_mp"},
}


def imports(source: str) -> set[str]:
    """The top names of all modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module if node.level == 0 else "." * node.level)
    return {name.split(".")[0] if not name.startswith(".") else name for name in names}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    for path in (ROOT / folder).glob("*.py"):
        allowed = MAY_IMPORT[folder] - ({path.stem} if folder == "." else set())
        found = imports(path.read_text())
        assert not {name for name in found if name.startswith(".")}, f"{path}: relative import"
        assert found & OURS <= allowed, f"{path} imports {found & OURS - allowed}"


def test_the_import_test_sees_every_form():
    text = (
        "import utils.a\nfrom distributed.b import c\ndef f():\n    from networks import d\nfrom . import e\nimport os"
    )
    assert imports(text) == {"utils", "distributed", "networks", ".", "os"}


def test_imports_change_nothing():
    """What a process shares - its environment, hooks, signals, log, torch's settings - is as it was."""
    code = """
import importlib, logging, os, signal, sys, threading, torch

def shared():
    signals = [signal.getsignal(number) for number in signal.valid_signals()]
    numbers = torch.get_num_threads(), torch.initial_seed(), torch.get_float32_matmul_precision()
    log = logging.root.level, list(logging.root.handlers)
    return dict(os.environ), sys.excepthook, threading.excepthook, signals, log, torch.get_default_dtype(), numbers

before = shared()
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert shared() == before, name
"""
    files = [path.relative_to(ROOT) for room in MAY_IMPORT for path in sorted((ROOT / room).glob("*.py"))]
    names = [".".join(file.with_suffix("").parts) for file in files if file.stem != "__init__"]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "utils.launch" in names, done.stderr


def test_the_code_is_valid_on_python_310():
    paths = [p for pattern in ("*.py", "*/*.py", "*/*/*.py") for p in ROOT.glob(pattern) if ".venv" not in p.parts]
    assert ROOT / "train.py" in paths
    for path in paths:
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_the_chapter_is_one_page():
    assert len((ROOT / "train_mp.py").read_text().splitlines()) <= 90
    assert len((ROOT / "train_mp_graphs.py").read_text().splitlines()) <= 80
    assert len((ROOT / "evaluate.py").read_text().splitlines()) <= 80
    assert len((ROOT / "train.py").read_text().splitlines()) <= 200


def test_shell_scripts_are_clean():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*ROOT.glob("*.sh"), *ROOT.glob("sites/*.sh"), *ROOT.glob("tests/**/*.sh"), ROOT / ".ci/run"]
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, cwd=ROOT)
    assert len(scripts) > 6 and done.returncode == 0, done.stdout


def test_requirements_are_pinned_with_torch_first():
    lines = [x for x in (ROOT / "requirements.txt").read_text().splitlines() if not x.startswith("#")]
    assert lines[0] == "torch==2.13.0" and all(re.fullmatch(r"[a-z0-9]+==[0-9.]+", line) for line in lines)


def test_the_notebook_opens_and_its_code_is_valid():
    notebook = json.loads((ROOT / "start_tensorboard.ipynb").read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.M))
            assert cell["outputs"] == []


def test_the_notebook_of_the_grid_runs(tmp_path):
    """Cell by cell; what a cell shows is its last expression."""
    cells = json.loads((ROOT / "utils/check_rank_generator.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    program = (
        "\n".join(sources).replace("%matplotlib inline\n", "").replace("\ngrid_figure(", "\nfigure = grid_figure(")
    )
    save = f"\nfigure.savefig({str(tmp_path / 'grid.png')!r})"
    command = [sys.executable, "-c", program + save]
    done = subprocess.run(command, cwd=ROOT / "utils", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tp     [[0, 1, 2, 3], [4, 5, 6, 7]]" in done.stdout and "take tensor_parallel" in done.stdout
    assert (tmp_path / "grid.png").stat().st_size > 10000


def test_links_inside_the_readme_arrive():
    text = (ROOT / "README.md").read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    places = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    places |= set(re.findall(r'<a id="([^"]+)">', text))
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert len(links) > 20 and not set(links) - places


def test_the_readme_has_the_figures_of_the_records():
    from benchmarks import ladder_report, loader, step
    from benchmarks.simulate import table

    text, results = (ROOT / "README.md").read_text(), ROOT / "benchmarks/results"
    words = " ".join(text.split())
    ladders = re.findall("<!-- (ladder_.*) -->", text)
    assert ladders[:2] == ["ladder_demo", "ladder_base"]
    for name in ladders:
        ladder = json.loads((results / f"{name}.json").read_text())
        assert f"<!-- {name} -->\n{ladder_report.markdown(name, ladder)}\n<!-- end -->" in text
    example = json.loads((ROOT / "docs/example_logs/float32/report/report.json").read_text())
    assert f"<!-- verdict -->\n> {example['verdict']}\n<!-- end -->" in text
    watched = json.loads((results / "observers.json").read_text())["figures"]
    overhead = watched["report_overhead"]
    half = [100 * watched[f"report_overhead_{part}_quartile"] for part in ("lower", "upper")]
    assert f"costs {100 * overhead:.1f}% of a step's time" in words and overhead < 0.02
    assert "without: {:.1f}% to {:.1f}%".format(*half) in words
    record = json.loads((results / "step.json").read_text())
    figures, spread = record["figures"], record["spread"]
    assert step.table(figures, spread, list(step.CASES)) in text and step.savers_table(figures, spread) in text
    assert figures["fp32_fraction_of_matmul"] >= 0.58 and figures["bf16_fraction_of_matmul"] >= 0.17
    assert figures["loop_overhead"] <= 0.03
    loading = json.loads((results / "loader.json").read_text())
    figures, spread = loading["figures"], loading["spread"]
    assert loader.table(figures, spread) in text
    assert f"({figures['native_over_preadv']:.2f} of it), and {figures['native_over_stock']:.1f} times" in words
    cold = {depth: depth * figures[f"cold, read_depth {depth}, of what it allows"] for depth in loader.DEPTHS}
    assert f"at once bring {cold[16]:.1f} times" in words
    assert figures["native_over_preadv"] >= 0.85 and figures["native_over_stock"] >= 5
    assert all(speed >= 0.8 * depth for depth, speed in cold.items())
    assert figures["data_wait_frac"] < 0.02 and figures["of a loop bound by a step of 20 ms"] >= 0.95
    saving = json.loads((results / "checkpoint.json").read_text())["figures"]
    assert f"{saving['save_over_raw_write']:.1f} times as long as writing the same bytes" in words
    assert f"waits {saving['stall, s']:.2f} s for it, {100 * saving['stall_over_save']:.1f}% of that" in words
    assert saving["stall_over_save"] < 0.1
    simulated = json.loads((results / "simulate.json").read_text())
    assert table(simulated["grids"]) in text
    assert simulated["figures"]["activations_tp4_over_tp1"] < 0.36
    from docs.figures import roofline

    assert roofline.table() in text
    certified = json.loads((results / "certificate.json").read_text())["figures"]
    assert f"trains {certified['grids']} grids" in text and f"is {certified['worst_float64']:.1e};" in words
    assert certified["worst_float64"] < 1e-12 and certified["worst_float32"] < 2e-6


def test_what_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (ROOT / target).exists(), f"README.md links to {target}"
    from utils.config_reader import AGAIN, EVALUATION, FIELDS

    for script, names in ((r"train\.py|submit_pm\w*\.sh", FIELDS), (r"evaluate\.py", {**EVALUATION, **AGAIN})):
        # One job script starts both.
        page = text if names is not FIELDS else re.sub(r"TRAIN_SCRIPT=evaluate\.py.*", "", text)
        commands = re.findall(rf"(?:{script})( [^`\n]*(?:\\\n[^`\n]*)*)", page)
        flags = set(re.findall(r"--([a-z_0-9]+)", " ".join(commands)))
        known = set(names) | {f"no_{name}" for name in names} | {"yaml_config", "help"}
        assert flags and flags <= known, flags - known


def test_the_readme_explains_every_flag():
    from utils.config_reader import ALL

    text = (ROOT / "README.md").read_text() + (ROOT / "docs/configuration.md").read_text()
    assert not [name for name in ALL if not re.search(rf"(`|--){name}\b", text)]


def test_every_section_that_is_named_exists():
    from utils.config_reader import load_config

    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.sh"), ROOT / "train.py", ROOT / "Makefile"]
    named = {name for page in pages for name in re.findall(r"--config[= ]([a-z]\w*)", page.read_text())}
    assert {"demo", "short", "bs256_opt"} <= named
    for name in named:
        assert load_config(["--config", name])[0].config == name


def test_make_with_the_systems_python_installs_nothing():
    """`VENV=system` is for the Python of a module or a container: nothing of it is replaced."""
    plan = {}
    # `make test` itself sets these for what it calls.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV") and not k.startswith("MAKE")}
    for venv in ("VENV=system", "VENV=new_environment"):
        for target in ("demo", "test"):
            done = subprocess.run(["make", "-n", target, venv], cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            plan[venv, target] = done.stdout
    assert not any("pip" in plan["VENV=system", target] for target in ("demo", "test"))
    assert all("pip install" in plan["VENV=new_environment", target] for target in ("demo", "test"))
    assert "python3 train.py --config=demo" in plan["VENV=system", "demo"]
