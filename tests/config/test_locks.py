"""locks/ pins what the requirements name, and all that it needs, each with its hashes."""

import re

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

LICENCE = r"^\| ([\w.-]+) +\| [\w.+!]+ +\| (.*?) *\|$"
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==([\w.+]+)", re.M)


def pins(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in PIN.findall(text):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def named(path: str) -> str:
    """Return a file of requirements, with those that it names."""
    text = (ROOT / path).read_text()
    return text + "".join(named(other) for other in re.findall(r"^-r (\S+)", text, re.M))


REQUIREMENTS = sorted(path.stem for path in ROOT.glob("requirements*.txt"))


def test_each_file_of_requirements_has_its_lock():
    assert sorted(path.stem for path in (ROOT / "locks").glob("*.txt")) == REQUIREMENTS


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_the_locks_are_those_of_the_requirements(name):
    lock = (ROOT / f"locks/{name}.txt").read_text()
    wanted, there = pins(named(f"{name}.txt")), pins(lock)
    old = {one: (versions, there.get(one)) for one, versions in wanted.items() if there.get(one) != versions}
    assert not old, f"make locks: {old}"
    entries = re.split(r"\n(?=\S)", lock.strip())
    assert len(entries) >= len(wanted) and all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in lock  # no place to take them from


def test_the_locks_have_one_version_of_each_package():
    """Who installs an extra after the rest gets no other version of what is there."""
    whole = pins((ROOT / "locks/requirements-dev.txt").read_text())
    for name in REQUIREMENTS:
        for one, versions in pins((ROOT / f"locks/{name}.txt").read_text()).items():
            assert versions <= whole.get(one, versions), (name, one)


def test_every_licence_is_listed():
    """Of all that the locks put on the kind of machine that the list was made on."""
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.11.9"}
    text = (ROOT / "locks/licences.md").read_text()
    listed = {re.sub(r"[-_.]+", "-", name).lower(): licence for name, licence in re.findall(LICENCE, text, re.M)}
    for entry in re.split(r"\n(?=\S)", (ROOT / "locks/requirements-dev.txt").read_text().strip()):
        one = Requirement(entry.split("\n")[0].rstrip(" \\"))
        if one.marker is None or one.marker.evaluate(machine):
            assert re.sub(r"[-_.]+", "-", one.name).lower() in listed, one
    remarks = text.rsplit("|\n")[-1]
    assert all(name in remarks for name, licence in listed.items() if licence == "UNKNOWN")
