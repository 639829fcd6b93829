"""Are the proofs worth something? Change a copy of the code for the worse, one place at a time, and see who notices.

    python tests/proofs/mutate.py                            all lists of mutations/: hours on 2 cores
    python tests/proofs/mutate.py resuming measuring         some of them
    python tests/proofs/mutate.py resuming store ranks       of a list those in some files or rooms

Of each change a list has a line `@ FILE: TESTS`, the text as it stands there (`-`) and what takes its place (`+`).
`checkpoint -k newest` means test_checkpoint.py. Two changes at a time, each in a copy of its own. What no test sees
ends the run with code 1.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LISTS = {path.stem: path for path in sorted(Path(__file__).with_name("mutations").glob("*.txt"))}
CERTIFICATE = ["benchmarks/certificate.py", "--ranks", "4", "--images", "10 tokens"]
AT_ONCE, LEFT_OUT = 2, {".git", ".venv", "runs", "data"}
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
            shutil.copytree(ROOT, copy, ignore=lambda at, _: LEFT_OUT if at == str(ROOT) else {})
            copies.put(copy)
        lines = pool.map(lambda one: changed(copies, *one), chosen)
        for (_, mutation), line in zip(chosen, lines):
            change = f"{' '.join(mutation.old.split())}  ->  {' '.join(mutation.new.split()) or 'nothing'}"
            print(f"{'seen' if line else 'NOT SEEN'}: {mutation.file}: {change}", flush=True)
            print(f"    {mutation.tests}: {line or 'no error'}", flush=True)
            seen.append(line is not None)
    print(f"{sum(seen)} of {len(seen)} mutations were seen")
    return 0 if seen and all(seen) else 1


def changed(copies: SimpleQueue[Path], is_certified: bool, mutation: Mutation) -> str | None:
    """Change a copy that is free, and see who notices; return a line of it, or None."""
    copy = copies.get()
    file = copy / mutation.file
    original = file.read_text()
    file.write_text(original.replace(mutation.old, mutation.new))
    try:
        return (run_certificate if is_certified else run_tests)(copy, mutation.tests)
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
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--show-capture=no"]
    try:
        done = subprocess.run(
            [*command, *arguments(copy, tests)], cwd=copy, capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired:
        return "the tests hang"
    if done.returncode > 1:  # no such test, or one that cannot be read
        print(f"{tests}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        return None
    crashed = "the process crashes" if done.returncode < 0 else None
    return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), crashed)


def run_certificate(copy: Path, _: str) -> str | None:
    """Run the certificate on the changed code; a crash is no proof."""
    command = [sys.executable, *CERTIFICATE, *MODES]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    found = re.findall(r"^certificate: (?!.*ended early).*", done.stderr, re.M)
    if not found:
        print(done.stderr[-2000:])
    return found[-1] if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
