"""The lists of mutations fit the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.proofs import mutate


@pytest.mark.parametrize("name", mutate.LISTS)
def test_mutations_change_one_place_each(name):
    for mutation in mutate.read(name):
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1 and mutation.new != mutation.old, mutation


@pytest.mark.parametrize("name", sorted(mutate.LISTS.keys() - {"certificate"}))
def test_one_file_has_the_tests_of_each(name):
    for mutation in mutate.read(name):
        mutate.arguments(ROOT, mutation.tests)


def test_a_test_has_the_words_of_each():
    """One that was renamed sees nothing, and an hour passes before a run of the lists says so."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "tests"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = {test.partition("::")[0] for test in collected}
    for name in sorted(mutate.LISTS.keys() - {"certificate"}):
        for mutation in mutate.read(name):
            place, *options = mutate.arguments(ROOT, mutation.tests)
            words = options[options.index("-k") + 1] if "-k" in options else ""
            start = str(Path(place).relative_to(ROOT))
            is_left_out = start.partition("::")[0] not in files  # a library of it is not installed
            assert is_left_out or any(test.startswith(start) and has(test, words) for test in collected), mutation


def has(test: str, words: str) -> bool:
    """Return whether `pytest -k` with these words takes a test."""
    found = re.sub(r"\b(?!(and|or|not)\b)[\w.]+", lambda word: str(word[0].lower() in test.lower()), words)
    return not words or eval(found)


def test_tests_that_fail_on_the_code_as_it_is_have_seen_nothing(monkeypatch, tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "place.py").write_text("one = 1\n")
    test = tmp_path / "tests/test_one.py"
    (tmp_path / "one.txt").write_text("# one\n\n@ place.py: one -k one\n-one = 1\n+one = 2\n")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "LISTS", {"one": tmp_path / "one.txt"})
    for expected, code, told in ((1, 0, "1 of 1 mutations were seen"), (3, 1, "one -k '(one)': FAILED tests/test_one")):
        test.write_text(f"import place\n\n\ndef test_one():\n    assert place.one == {expected}\n")
        assert mutate.main([]) == code
        assert told in capsys.readouterr().out


@pytest.mark.parametrize("unchanged, told", [((0, None, ""), mutate.HANG), ((-1, mutate.HANG, ""), None)])
def test_tests_that_take_as_long_without_the_change_have_seen_nothing(monkeypatch, tmp_path, unchanged, told):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").touch()
    (tmp_path / "place.py").write_text("one = 1\n")
    ends = {"one = 1\n": unchanged, "one = 2\n": (-1, mutate.HANG, "")}
    monkeypatch.setattr(mutate, "pytest", lambda copy, *_: ends[(copy / "place.py").read_text()])
    copies = mutate.SimpleQueue()
    copies.put(tmp_path)
    assert mutate.changed(copies, False, mutate.Mutation("place.py", "one = 1", "one = 2", "one")) == told


def test_tests_of_a_file_are_run_together():
    tests = ["a -k x", "b -k 'x and y'", "a -k 'y or z' --timeout 9", "b.py::test_x -k z", "a -k x"]
    assert mutate.unions_of(tests) == ["a -k '(x) or (y or z)'", "b"]
