"""The house: which way imports run, scripts that lint, a notebook that opens."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.figures import rooms
from tests.helpers import ROOT
from utils.data.read_worker import START as READER_START

# A room imports those of lower floors; the chapters stand one upon the other.
FLOORS = [
    "networks utils.checksum utils.comm utils.device utils.errors utils.loss utils.observers utils.reading "
    "utils.shards utils.spans utils.sphere",
    "utils.config utils.ema utils.files utils.metrics utils.plots utils.ranks",
    "utils.backend utils.compiler utils.data utils.optimizers",
    "distributed utils.checkpoint utils.measure utils.prepare_data utils.sample_data",
    "utils.prepare_data.__main__ utils.record utils.sample_data.__main__",
    "utils.run",
    "train utils.forecast",
    "evaluate forecast train_mp",
    "benchmarks train_mp_graphs utils.checkpoint.__main__",
]
# Of more than seven arguments: the model, and records that are made by keyword.
LONG_CALLS = {
    "ViT",
    "Block",
    "Fields",
    "Files",
    "Measured",
    "Operation",
    "Outlook",
    "StepProfile",
    "EpochRecord",
    "Rung",
    "dict",
    "replace",
}


def test_no_import_runs_in_a_circle_or_upwards():
    """utils knows neither the chapters, nor `distributed`, nor `networks`, which knows nothing of ours."""
    files = rooms.arrows(ROOT)
    assert "utils.data.files" in files["utils.data.frames"] and not rooms.circles(files)
    found = rooms.between_rooms(files)
    assert rooms.floors(found) == [level.split() for level in FLOORS]  # raises where there is a circle
    assert not found["networks"]
    for name, wanted in found.items():
        if name.startswith("utils") and not name.endswith("__main__"):  # which is a script
            assert all(other.startswith("utils") for other in wanted), f"{name} imports {wanted}"
    assert found["distributed"] & {"train", "train_mp"} == set()


def sources() -> dict[Path, str]:
    """All files of Python of this checkout."""
    folders = (*rooms.FOLDERS, "docs", "tests")
    return {
        path: path.read_text() for path in (*ROOT.glob("*.py"), *(p for f in folders for p in (ROOT / f).rglob("*.py")))
    }


def test_functions_and_calls_are_small():
    for path, text in sources().items():
        if {"tests", "docs"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}, {node.name}"
            elif isinstance(node, ast.ClassDef):
                assert node.end_lineno - node.lineno < 200, f"{path}, {node.name}"
            elif isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 7:
                name = ast.unparse(node.func).split(".")[-1]
                assert name in LONG_CALLS, f"{path}, line {node.lineno}: {name}"


def test_the_import_test_sees_every_form():
    text = (
        "import utils.a\nfrom distributed.b import c\ndef f():\n    from networks import d\nfrom . import e\nimport os"
    )
    assert rooms.imports(text) == {"utils.a", "distributed.b.c", "networks.d", "..e", "os"}
    assert rooms.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert rooms.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [["c"], ["b"], ["a"]]


def test_rooms_are_entered_through_their_files():
    """An empty __init__.py: a process that reads imports a room's file, and by that no torch. One looks at versions."""
    found = {path: path.read_text() for path in (ROOT / "utils").rglob("__init__.py")}
    assert found.pop(ROOT / "utils/__init__.py") == "from utils.config.versions import check\n\ncheck()\n"
    assert len(found) > 9 and not any(found.values())
    code = "import sys, utils.data.read_worker, utils.errors, utils.files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_only_what_is_started_by_its_path_finds_the_project():
    for path, text in sources().items():
        may = path.relative_to(ROOT).parts[0] in ("benchmarks", "docs", "tests") and "__main__" in text
        assert may or "sys.path" not in text.replace(READER_START, ""), path
        assert not re.search(r"^ *from \.", text, re.M), path


def test_imports_change_nothing():
    """What a process shares - its environment, hooks, signals, log, torch's settings - is as it was."""
    code = """
import importlib, logging, os, signal, sys, threading, torch
import torch.distributed._tools.mem_tracker  # torch's own, which names the compiler's folder

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
    extras = () if importlib.util.find_spec("transformer_engine") else ("__main__", ".transformer_engine")
    names = [name for name in rooms.modules(ROOT) if not name.endswith(("__main__", *extras))]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "utils.ranks.start" in names, done.stderr


def test_the_code_is_valid_on_python_310():
    assert ROOT / "train.py" in sources()
    for text in sources().values():
        ast.parse(text, feature_version=(3, 10))


def test_the_chapter_is_one_page():
    assert len((ROOT / "train_mp.py").read_text().splitlines()) <= 90
    assert len((ROOT / "train_mp_graphs.py").read_text().splitlines()) <= 80
    assert len((ROOT / "evaluate.py").read_text().splitlines()) <= 80
    assert len((ROOT / "forecast.py").read_text().splitlines()) <= 80
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
