"""The folder of an evaluation: what is kept of each forecast, so that an evaluation that was ended goes on.

    evaluation/  setting.json     what is evaluated; an evaluation of another setting renames it aside
                 kept/000012.npz  of each forecast: its moments, its spectra, and of the first its maps
                 skill.json  skill.csv  pictures/  logs/  forecasts/  out.log  lock  owner

Each forecast has a file of its own, written aside and renamed: ranks do not disturb each other, and what is there is
whole.
"""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from utils.errors import ReadError, WriteError, first_line
from utils.files import whole, write_text
from utils.reading import check_own, read_text
from utils.run.folder import lock_run, rename_aside, sign

BEGUN = {"lock", "setting.json.part"}  # what may be there before there is a setting


class ForecastStore:
    """What is kept of `forecasts` forecasts, in the folder of an evaluation."""

    def __init__(self, folder: Path, forecasts: int):
        self.folder, self.kept, self.forecasts = folder, folder / "kept", forecasts
        self.lock: TextIO | None = None

    def open(self, setting: dict[str, Any]) -> None:
        """Make the folder, or find it again with what an evaluation of the same setting left there; on one rank.

        Raises ValueError where it cannot be written, holds something else, or another evaluation is at work in it.
        """
        text, path = json.dumps(setting, indent=1) + "\n", self.folder / "setting.json"
        if self.folder.exists():
            check_own(self.folder)
        try:
            if not path.exists() and self.folder.exists() and {x.name for x in self.folder.iterdir()} - BEGUN:
                raise ValueError(f"{self.folder} holds other files than an evaluation's: choose another with --out")
            self._take()
            if path.exists() and read_text(path) != text:
                rename_aside(self.folder)
                self.close()
                self._take()
            if not path.exists():
                write_text(path, text)
            elif read_text(path) != text:
                raise ValueError(f"{self.folder} was begun by another evaluation just now: choose another with --out")
            self.kept.mkdir(exist_ok=True)
            sign(self.folder)
        except OSError as error:
            raise ValueError(f"cannot write to {self.folder} ({error.strerror}): choose another with --out") from None

    def _take(self) -> None:
        """Make the folder where it is not there, and lock it; once: who closes a file loses all locks on it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_run(self.folder, "choose another folder with --out")

    def close(self) -> None:
        """Leave the folder to others."""
        if self.lock:
            self.lock.close()
            self.lock = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what a full disk does, or one that fails, into one line. Raises WriteError."""
        try:
            yield
        except ReadError:
            raise
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            remedy = "make room" if is_full else f"see what became of {self.folder.parent}"
            raise WriteError(
                f"cannot write to {self.folder} ({error.strerror or error}): {remedy}; the same command goes on"
            ) from None

    def missing(self) -> list[int]:
        """Return the forecasts that are not there."""
        there = {path.name for path in self.kept.iterdir()}
        return [n for n in range(self.forecasts) if self._path(n).name not in there]

    def keep(self, forecast: int, **arrays: np.ndarray) -> None:
        """Keep what is left of a forecast."""
        with whole(self._path(forecast)) as part, part.open("wb") as file:
            np.savez(file, **arrays)

    def read(self, forecast: int, name: str) -> np.ndarray:
        """Return one of its arrays."""
        path = self._path(forecast)
        try:
            with np.load(path) as arrays:
                return arrays[name]
        except Exception as error:  # a made-up file can raise anything
            raise ReadError(
                f"cannot read {path} ({first_line(error)}): remove it, and the same command makes it"
            ) from None

    def all(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array of each forecast, one after another. Raises ReadError where one has not the first's shape."""
        kind = None
        for n in range(self.forecasts):
            found = self.read(n, name)
            kind = kind or (found.shape, found.dtype)
            if (found.shape, found.dtype) != kind:
                raise ReadError(
                    f"{name} in {self._path(n)} is {found.dtype} {list(found.shape)}, and {kind[1]} {list(kind[0])} in "
                    f"{self._path(0).name}: remove what is not of this evaluation, and the same command makes it"
                )
            yield found

    def _path(self, forecast: int) -> Path:
        return self.kept / f"{forecast:06d}.npz"
