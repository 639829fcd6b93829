"""How a run ends: what it says, and with which exit code. No torch: a process that only reads imports this."""

import contextlib
import logging
from collections.abc import Iterator

# Exit codes, as in sysexits.h.
STOPPED = 75  # "try again later": saved, and can go on
NOT_SAVED = 74  # "input/output error": the last checkpoint, or a result, could not be written
LONGEST = 2000  # characters of a line that says what is wrong


class Ended(Exception):
    """The run ends here, as it should, on all ranks: args[0] is the exit code."""


class Refused(ValueError):
    """What a user can mend, known to every rank: the run ends with this one line."""


class ReadError(OSError):
    """A file that cannot be read (any more). The message names it, and says what to do."""


class WriteError(OSError):
    """A result cannot be written: this rank ends with this one line, and by that the others."""


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line; its kind where it says nothing."""
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])


def one_line(text: str) -> str:
    """Return a text as a line that a terminal only shows: a file's words may stand in it, however long and strange."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return shown if len(text) <= LONGEST else f"{shown[:LONGEST]} ..."


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Let training go on where something that only looks on fails."""
    try:
        yield
    except Exception as error:
        logging.warning("%s failed (%s): training goes on", what, first_line(error))
