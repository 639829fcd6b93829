"""Put faults into a copy of the code, one at a time: what the proofs and the tests are worth."""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def try_faults(faults: Iterable[tuple[str, str, str, str]], look: Callable[[Path, str], str | None]) -> int:
    """Try each fault, print what saw it, and return the exit code: 1 where one was not seen.

    Args:
        faults: the file, the line as it stands, the line with the fault, and a text.
        look: called with the folder of the changed code and the text; returns a line that shows that it saw the
            fault, or None.
    """
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "code")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "data", ".*_cache"))
        for name, old, new, text in faults:
            file = copy / name
            original = file.read_text()
            assert old in original, f"{name} does not hold {old!r}"
            file.write_text(original.replace(old, new))
            line = look(copy, text)
            file.write_text(original)
            change = f"{' '.join(old.split())}  ->  {' '.join(new.split()) or 'nothing'}"
            print(f"{'seen' if line else 'NOT SEEN'}: {name}: {change}\n    {text}: {line or 'no error'}", flush=True)
            seen.append(line is not None)
    print(f"{sum(seen)} of {len(seen)} faults were seen")
    return 0 if all(seen) else 1
