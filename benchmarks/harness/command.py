"""The command line of a benchmark: its own flags, those of a training script, and errors in one line."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from utils.errors import first_line


def parser_of(doc: str, script: str) -> argparse.ArgumentParser:
    """Return a parser for the flags of a benchmark, which passes on those of a training script, `train.py` or another.

    Args:
        doc: of the benchmark's module. Its first line describes it.
    """
    passed_on = f"All flags of {script} go along, such as --config=base --amp_mode bf16: python {script} --help"
    return argparse.ArgumentParser(description=doc.split("\n")[0], epilog=passed_on, allow_abbrev=False)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with one line and code 2, as argparse does, where an error is one that a user can mend."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
