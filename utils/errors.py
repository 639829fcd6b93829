"""How a run ends: what it says, and with which exit code. No torch: a process that only reads imports this."""

import contextlib
import logging
from collections.abc import Iterator

# Exit codes, as in sysexits.h.
STOPPED = 75  # "try again later": saved, and can go on
NOT_SAVED = 74  # "input/output error": the last checkpoint, or a result, could not be written


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
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Let training go on where something that only looks on fails."""
    try:
        yield
    except Exception as error:
        logging.warning("%s failed (%s): training goes on", what, first_line(error))
