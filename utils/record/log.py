"""Log lines, on rank 0: to the terminal and to the run's out.log."""

import contextlib
import logging
from pathlib import Path

from tqdm import tqdm

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _AboveTheBar(logging.StreamHandler):
    """Prints above a progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _LogFile(logging.FileHandler):
    """Loses the lines that a full disk does not take; they are on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def open_log(path: Path) -> list[logging.Handler]:
    """Log to the terminal (stderr) and to `path`; return the handlers, for `close_log`."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    handlers = [_AboveTheBar(), _LogFile(path)]
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(handler)
    return handlers


def close_log(handlers: list[logging.Handler]) -> None:
    """Undo `open_log`."""
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
