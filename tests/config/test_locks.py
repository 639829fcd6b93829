"""locks/ pins what the requirements name, and all that it needs, each with its hashes."""

import re

import pytest

from tests.helpers import ROOT

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


@pytest.mark.parametrize("name", ["requirements", "requirements-dev"])
def test_the_locks_are_those_of_the_requirements(name):
    lock = (ROOT / f"locks/{name}.txt").read_text()
    wanted, there = pins(named(f"{name}.txt")), pins(lock)
    old = {one: (versions, there.get(one)) for one, versions in wanted.items() if there.get(one) != versions}
    assert not old, f"make locks: {old}"
    entries = re.split(r"\n(?=\S)", lock.strip())
    assert len(entries) > len(wanted) and all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in lock  # no place to take them from


def test_every_licence_is_listed():
    listed = (ROOT / "locks/licences.md").read_text()
    for name in pins(named("requirements.txt")):
        assert re.search(rf"^\| {re.escape(name)} ", listed, re.M | re.I), name
