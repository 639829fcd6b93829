"""Change a copy of the code for the worse, one line at a time: what the proofs and the tests are worth."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def try_mutations(mutations: Iterable[tuple[str, str, str, str]], look: Callable[[Path, str], str | None]) -> int:
    """Try each mutation, print what saw it, and return the exit code: 1 where one was not seen.

    Args:
        mutations: the file, the line as it stands, the line as it is changed to, and a text.
        look: called with the folder of the changed code and the text; returns a line that shows that it saw the
            change, or None.
    """
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "code")
        shutil.copytree(ROOT, copy, ignore=lambda at, _: {".git", ".venv", "runs", "data"} if at == str(ROOT) else {})
        for name, old, new, text in mutations:
            file = copy / name
            original = file.read_text()
            assert old in original, f"{name} does not hold {old!r}"
            file.write_text(original.replace(old, new))
            line = look(copy, text)
            file.write_text(original)
            change = f"{' '.join(old.split())}  ->  {' '.join(new.split()) or 'nothing'}"
            print(f"{'seen' if line else 'NOT SEEN'}: {name}: {change}\n    {text}: {line or 'no error'}", flush=True)
            seen.append(line is not None)
    print(f"{sum(seen)} of {len(seen)} mutations were seen")
    return 0 if all(seen) else 1


def main(mutations: Iterable[tuple[str, str, str, str]]) -> int:
    """Try those in the files or rooms that the command line names (`verdict`, `data`), by default all."""
    names = sys.argv[1:]
    return try_mutations(
        [m for m in mutations if not names or {*names} & {*Path(m[0]).with_suffix("").parts}], run_tests
    )


def run_tests(copy: Path, tests: str) -> str | None:
    """Run tests on the changed code: `interruptions -k SIGTERM` means tests/proofs/test_interruptions.py."""
    file, *options = shlex.split(tests)
    name, _, test = file.partition(".py")
    (file,) = (f"{path}{test}" for path in (copy / "tests").rglob(f"test_{name}.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--show-capture=no", file]
    try:
        done = subprocess.run([*command, *options], cwd=copy, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "the tests hang"
    if done.returncode > 1:
        raise RuntimeError(f"{tests}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    crashed = "the process crashes" if done.returncode < 0 else None
    return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), crashed)
