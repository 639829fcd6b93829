"""What the checkers of the exercises say: of the empty file, of a wrong answer that people give, of the solution.

python docs/example_logs/checkers.py       writes exercises.md beside this file
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from exercises import check  # noqa: E402
from tests.exercises.mistakes import MISTAKES  # noqa: E402

HEAD = """# What the checkers say

For each exercise: what `python exercises/check.py` says of the empty file, of a wrong answer that people give, and of
the solution. To compare yours with, and for teachers. Made by `python docs/example_logs/checkers.py`.
"""


def said(path: Path) -> str:
    """Return what the checker prints for a file."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        check.main([str(path)])
    return told.getvalue().rstrip()


def sections(folder: Path) -> list[str]:
    parts = [HEAD]
    for name in check.EXERCISES:
        solution = ROOT / f"exercises/solutions/{name}.py"
        right, wrong, _ = MISTAKES[name][0]
        size = min(getattr(check.checks_of(name), "SIZES", (1,)))
        mistaken = folder / f"{name}.py"
        mistaken.write_text(solution.read_text().replace(right, wrong.replace("{size}", str(size))))
        parts.append(f"## {name}\n")
        for title, path in (
            ("The empty file", ROOT / f"exercises/{name}.py"), ("A wrong answer", mistaken), ("The solution", solution),
        ):  # fmt: skip
            parts.append(f"{title}:\n\n```\n{said(path)}\n```\n")
    return parts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        (Path(__file__).parent / "exercises.md").write_text("\n".join(sections(Path(name))))
