"""The night: each proof's end is kept when it ends, whatever became of those before."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.harness import record
from tests.helpers import ROOT
from tests.proofs import nightly


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Return a function that runs the night with these commands, and gives its code and its record."""
    monkeypatch.setattr(nightly, "RECORD", tmp_path / "nightly.json")
    at = nightly.commit_of_code()
    monkeypatch.setattr(nightly, "commit_of_code", lambda: at)  # what follows runs nothing
    pages, made = [], subprocess.CompletedProcess([], 0)

    def make_pages(command: list[str], check: bool = False, **_: Any) -> subprocess.CompletedProcess:
        pages.append(command[-1])
        if check:
            made.check_returncode()
        return made

    monkeypatch.setattr(nightly.subprocess, "run", make_pages)

    def run(steps: dict[str, str], *only: str) -> tuple[int, dict[str, dict[str, str]]]:
        monkeypatch.setattr(nightly, "STEPS", {name: (f"what {name} proves", step) for name, step in steps.items()})
        monkeypatch.setattr(sys, "argv", ["nightly.py", *(["--only", *only] if only else [])])
        code = nightly.main()
        assert pages == ["docs/make.py"] * len(only or steps)  # after each: the next one's tests read the pages
        pages.clear()
        return code, json.loads(nightly.RECORD.read_text())["steps"]

    run.made = made
    return run


def test_a_proof_that_fails_is_told_and_the_next_ones_run(night, capfd):
    code, steps = night({"a": "true", "b": "exit 3", "c": "true"})
    assert code == 1 and [steps[name]["result"] for name in "abc"] == ["passed", "failed, code 3", "passed"]
    assert capfd.readouterr().out.endswith("2 of 3 passed; failed: b\n")


def test_pages_that_cannot_be_made_end_no_night(night, capfd):
    night.made.returncode = 1
    code, steps = night({"a": "true", "b": "true"})
    assert code == 1 and [steps[name]["result"] for name in "ab"] == ["passed", "passed"]
    assert capfd.readouterr().out.endswith("2 of 2 passed; the pages could not be made\n")


def test_what_the_readme_tells_of_a_proof(night, monkeypatch):
    """That it failed; that the code was no commit's."""
    monkeypatch.setattr(nightly, "commit_of_code", lambda: "0123456789ab-dirty")
    night({"a": "true", "b": "exit 3"})
    figures = json.loads(nightly.RECORD.read_text())["figures"]
    assert figures["a"].endswith(", 0123456-dirty") and figures["b"].endswith(", 0123456-dirty, failed")


def test_the_commit_of_a_proof_is_that_of_the_code(tmp_path, monkeypatch):
    """What a proof wrote before is no change of it."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit_of_code() == "unknown"
    for name in ("benchmarks/results/a.json", "docs/a.md", "README.md", "train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    clean = record.commit_of_code()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    for name in ("benchmarks/results/a.json", "docs/a.md", "README.md"):
        (tmp_path / name).write_text("after")
    assert record.commit_of_code() == clean
    (tmp_path / "train.py").write_text("after")
    assert record.commit_of_code() == f"{clean}-dirty"


@pytest.mark.parametrize("flags, code", [([], 0), (["--none-skipped"], 1), (["--none-skipped", "-n", "1"], 1)])
def test_a_proof_that_is_skipped_has_failed(tmp_path, flags, code):
    (tmp_path / "test_it.py").write_text("import pytest\n\n\ndef test_it():\n    pytest.skip('of a test')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *flags, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == code and ("none may be: Skipped: of a test" in done.stdout) == code, done.stdout


def test_what_ran_another_night_is_kept(night, tmp_path):
    """Also by a night that ends early: the record is there before the next proof begins."""
    seen = tmp_path / "seen"
    proofs = {"a": "true", "b": f"cp {tmp_path}/nightly.json {seen}", "c": "false"}
    assert night(proofs, "a")[0] == 0
    code, steps = night(proofs, "b")
    assert code == 0 and set(steps) == {"a", "b"} and set(json.loads(seen.read_text())["steps"]) == {"a"}
    night(proofs, "a", "b")
    rows = nightly.table(steps).splitlines()[2:]
    assert "passed" in rows[0] and "passed" in rows[1] and nightly.NEVER in rows[2]
