"""Are the proofs worth something? Change a copy of the code for the worse, one place at a time, and see who notices.

    python tests/proofs/mutate.py                            all lists of mutations/: hours on 2 cores
    python tests/proofs/mutate.py resuming measuring         some of them
    python tests/proofs/mutate.py resuming store ranks       of a list those in some files or rooms

Of each change a list has a line `@ FILE: TESTS`, the text as it stands there (`-`) and what takes its place (`+`).
`checkpoint -k newest` means test_checkpoint.py. Two changes at a time, each in a copy of its own. First all that is to
see them runs on the code as it is: tests that fail, or hang, there would see anything. What no test sees ends the run
with code 1.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LISTS = {path.stem: path for path in sorted(Path(__file__).with_name("mutations").glob("*.txt"))}
CERTIFICATE = ["benchmarks/certificate.py", "--ranks", "4", "--images", "10 tokens"]
AT_ONCE, LEFT_OUT = 2, [".git", ".venv*", "runs", "data", "build"]
LIMIT, LIMIT_OF_ALL = 240, 1800  # seconds: for the tests of a change, for all those of a file
HANG = "the tests hang"
MODES = ["--modes", "float64", "overlap, 2 steps", "re-gather", "fp16"]


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str  # that must see it; for the certificate, what it means


def read(name: str) -> list[Mutation]:
    """Return a list of changes."""
    found = []
    for part in LISTS[name].read_text().split("\n@ ")[1:]:
        head, *lines = part.rstrip("\n").split("\n")
        old, new = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
        file, tests = head.split(": ", 1)
        found.append(Mutation(file, old, new, tests))
    return found


def main(argv: list[str]) -> int:
    names = [name for name in argv if name in LISTS] or list(LISTS)
    places = {*argv} - {*LISTS}
    chosen = [(name == "certificate", mutation) for name in names for mutation in read(name)]
    if places:
        chosen = [(kind, x) for kind, x in chosen if places & {*Path(x.file).with_suffix("").parts}]
    seen = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(AT_ONCE):
            copy = Path(folder, str(i), "code")
            shutil.copytree(ROOT, copy, ignore=left_out)
            copies.put(copy)
        tests = [mutation.tests for is_certified, mutation in chosen if not is_certified]
        unions = [*unions_of(tests), *([None] if len(tests) < len(chosen) else [])]
        failed = [line for line in pool.map(lambda one: unchanged(copies, one), unions) if line]
        if failed:
            print("On the code as it is these fail, and would see anything:", *failed, sep="\n")
            return 1
        lines = pool.map(lambda one: changed(copies, *one), chosen)
        for (_, mutation), line in zip(chosen, lines):
            change = f"{' '.join(mutation.old.split())}  ->  {' '.join(mutation.new.split()) or 'nothing'}"
            print(f"{'seen' if line else 'NOT SEEN'}: {mutation.file}: {change}", flush=True)
            print(f"    {mutation.tests}: {line or 'no error'}", flush=True)
            seen.append(line is not None)
    print(f"{sum(seen)} of {len(seen)} mutations were seen")
    return 0 if seen and all(seen) else 1


def left_out(at: str, names: list[str]) -> set[str]:
    """Return what of a folder is not copied."""
    return {name for name in names for pattern in LEFT_OUT if at == str(ROOT) and fnmatch(name, pattern)}


def unions_of(tests: list[str]) -> list[str]:
    """Return tests as a list names them, those of a file together: `a -k x` and `a -k y` are `a -k '(x) or (y)'`."""
    wanted: dict[str, set[str]] = {}
    for name, *options in map(shlex.split, tests):
        file, _, test = name.partition(".py")
        wanted.setdefault(file, set()).add(options[options.index("-k") + 1] if "-k" in options and not test else "")
    words = {file: " or ".join(f"({one})" for one in sorted(chosen)) for file, chosen in wanted.items()}
    return [file if "" in chosen else f"{file} -k {shlex.quote(words[file])}" for file, chosen in wanted.items()]


def unchanged(copies: SimpleQueue[Path], tests: str | None) -> str | None:
    """Run tests, or the certificate, on the code as it is; return a line of what fails, or None."""
    copy = copies.get()
    try:
        code, told, said = certificate(copy) if tests is None else pytest(copy, arguments(copy, tests), LIMIT_OF_ALL)
        return f"{tests or 'certificate'}: {told or said[-1000:]}" if code else None
    finally:
        copies.put(copy)


def changed(copies: SimpleQueue[Path], is_certified: bool, mutation: Mutation) -> str | None:
    """Change a copy that is free, and see who notices; return a line of it, or None."""
    copy = copies.get()
    file = copy / mutation.file
    original = file.read_text()
    try:
        file.write_text(original.replace(mutation.old, mutation.new))
        line = (run_certificate if is_certified else run_tests)(copy, mutation.tests)
        file.write_text(original)
        slow = line == HANG and pytest(copy, arguments(copy, mutation.tests), LIMIT)[1] == HANG
        return None if slow else line  # what takes as long on the code as it is has seen nothing
    finally:
        file.write_text(original)
        copies.put(copy)


def arguments(root: Path, tests: str) -> list[str]:
    """Return pytest's arguments for tests as a list names them: `checkpoint -k newest`. One file has that name."""
    name, *options = shlex.split(tests)
    name, _, test = name.partition(".py")
    (path,) = (root / "tests").rglob(f"test_{name}.py")
    return [f"{path}{test}", *options]


def run_tests(copy: Path, tests: str) -> str | None:
    """Run tests on the changed code; return a line that shows that they saw the change, or None."""
    code, told, said = pytest(copy, arguments(copy, tests), LIMIT)
    if code > 1:  # no such test, or one that cannot be read
        print(f"{tests}: {said[-2000:]}")
        return None
    return told


def pytest(copy: Path, arguments: list[str], limit: float) -> tuple[int, str | None, str]:
    """Return the exit code of a copy's tests, a line of the first one that fails, and all that they say."""
    command = [sys.executable, "-m", "pytest", *"-q -x -p no:cacheprovider --show-capture=no".split()]
    try:
        done = subprocess.run([*command, *arguments], cwd=copy, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return -1, HANG, ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    crashed = ["the process crashes"] * (done.returncode < 0)
    return done.returncode, next(iter(failed + crashed), None), done.stdout + done.stderr


def run_certificate(copy: Path, _: str) -> str | None:
    """Run the certificate on the changed code; a crash is no proof."""
    _, told, said = certificate(copy)
    if not told:
        print(said[-2000:])
    return told


def certificate(copy: Path) -> tuple[int, str | None, str]:
    """Return the exit code of a copy's certificate, the last difference that it tells, and all that it says."""
    command = [sys.executable, *CERTIFICATE, *MODES]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    found = re.findall(r"^certificate: (?!.*ended early).*", done.stderr, re.M)
    return done.returncode, found[-1] if found else None, done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
