"""What is too old or not there is said in one line, before anything else fails."""

import ast
import importlib.util
import os
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

from tests.helpers import ROOT
from utils.config.versions import missing

SCRIPTS = ["train.py", "train_mp.py", "train_mp_graphs.py", "evaluate.py", "forecast.py"]


def stand_in(folder, version: str) -> None:
    """Put a package torch of some version into a folder, which cannot be imported."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise ImportError('the stand-in was imported')\n")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n")


def said_by(script: str, folder, **environment: str) -> str:
    here = {**os.environ, "PYTHONPATH": str(folder), **environment}
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, env=here)
    assert done.returncode == 2 and done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_old_pytorch_is_one_line(tmp_path, script):
    stand_in(tmp_path, "2.5.0a0+872d972e41.nv24.08")  # the tutorial's first image
    said = said_by(script, tmp_path)
    assert said.count("\n") == 1
    assert (
        f"{script}: error: PyTorch 2.5.0a0+872d972e41.nv24.08 is too old, 2.8 or newer is needed: take a newer" in said
    )
    assert said_by(script, tmp_path, RANK="5", LOCAL_RANK="1") == ""  # one line a node
    assert said_by(script, tmp_path, RANK="4", LOCAL_RANK="0") == said


def test_packages_that_are_missing_are_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name in ('h5py', 'yaml') else real(name, *more)\n"
    )
    assert "train.py: error: h5py pyyaml not there: python" in said_by("train.py", tmp_path)
    assert "-m pip install h5py pyyaml (in a container with --user)\n" in said_by("train.py", tmp_path)


@pytest.mark.parametrize(
    "version, is_new", [("2.7.1", False), ("2.8.0", True), ("2.8.0a0+5228986c39.nv25.06", True), ("2.13.0+cpu", True)]
)
def test_versions_as_they_are_written(tmp_path, monkeypatch, version, is_new):
    stand_in(tmp_path, version)
    real = importlib.util.find_spec
    mine = PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr("utils.config.versions.find_spec", lambda name: mine if name == "torch" else real(name))
    assert (missing() is None) == is_new
    assert "Python 3.10.12 is too old, 3.11 or newer is needed" in missing((3, 10, 12))


def test_without_pytorch(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.config.versions.find_spec", lambda name: None)
    assert missing().startswith("PyTorch is not there, 2.8 or newer is needed")


def test_an_old_python_comes_as_far_as_that_line():
    """Whatever is read before the versions are looked at is legal in Python 3.6, and no other package comes earlier."""
    for name in ("utils/__init__.py", "utils/config/versions.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 6))
    for script in SCRIPTS:
        tree = ast.parse((ROOT / script).read_text(), feature_version=(3, 8))
        modules = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        ours = next(i for i, module in enumerate(modules) if module.startswith("utils"))
        assert all(module.split(".")[0] in sys.stdlib_module_names for module in modules[:ours]), script
