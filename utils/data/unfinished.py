"""A data set that is being written: hidden until it is complete, continued where it was interrupted."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from utils.data.writer import DatasetWriter
from utils.files import lock, write_text
from utils.reading import read_json

SECTION = "# A model of "  # a YAML file that was made with a data set begins with it


class Unfinished:
    """A data set on its way to `out`: `new` is the folder in which it grows, `known` what an earlier run noted."""

    def __init__(self, out: Path, folder: Path, request: list | None):
        self.out, self.folder, self.request = out, folder, json.loads(json.dumps(request))
        self.new, self.old, self.state = folder / "new", folder / "old", folder / "state.json"
        self.known = self._known()

    def _known(self) -> dict:
        """Return what an earlier run noted, if the files that it names are there, and its sums can be read."""
        try:
            known = read_json(self.state)
            with np.load(self.folder / known["sums"]) as sums:
                _ = [sums[name] for name in sums.files]  # each has a checksum
            return known if all((self.new / f"{name}.h5").exists() for name in known["done"]) else {}
        except Exception:  # of JSON, of NumPy, of archives: it was not left so
            return {}

    def begin(self, size: int, remedy: str) -> None:
        """Begin afresh, unless the same request was interrupted. Raises ValueError if `size` bytes do not fit."""
        if self.old.exists() and not self.out.exists():  # stopped between the two renames of a replacement
            self.old.rename(self.out)
        if self.request and self.known.get("request") == self.request:
            return
        if self.state.exists():
            print(f"An unfinished {self.out} is damaged, or of other data or with other flags: starting afresh")
        self.known = {}
        shutil.rmtree(self.new, ignore_errors=True)
        self.state.unlink(missing_ok=True)
        self.new.mkdir()
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise ValueError(
                f"{self.out} needs {size / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free; "
                f"give {remedy}, or another --out"
            )

    def resume(self, writer: DatasetWriter, missing: dict[str, int]) -> list[str]:
        """Return the files that an interrupted run left complete; take over its sums and counts."""
        if not self.known:
            return []
        writer.sums.load(self.folder / self.known["sums"])
        missing.update(self.known["missing"])
        print(f"Going on with an unfinished {self.out}: {len(self.known['done'])} file(s) are complete")
        return self.known["done"]

    def save(self, writer: DatasetWriter, done: list[str], missing: dict[str, int]) -> None:
        """Note that the files `done` are complete."""
        # The sums first, under a name of their own, and then the note that names them: both are of one moment.
        sums = self.folder / f"sums-{len(done)}.npz"
        writer.sums.save(sums)
        note = {"request": self.request, "done": done, "missing": missing, "sums": sums.name}
        write_text(self.state, json.dumps(note))
        for old in set(self.folder.glob("sums-*.npz")) - {sums}:
            old.unlink()

    def finish(self) -> None:
        """Put the data set in its place; what stands there stays where that fails."""
        if self.out.exists():
            self.out.rename(self.old)
        try:
            self.new.rename(self.out)
        except OSError:
            if self.old.exists():
                self.old.rename(self.out)
            raise


@contextmanager
def hidden(out: Path, overwrite: bool, size: int, remedy: str, request: list | None = None) -> Iterator[Unfinished]:
    """Yield a data set that takes its place when the body succeeds, and leaves no trace if it fails.

    With a `request`, which says what is written, only a ValueError does away with it: what is wrong with the data will
    be wrong again. After all else, a full disk say, the same request goes on.

    Args:
        size: bytes to come.
        remedy: what makes them less.

    Raises ValueError if `out` exists (unless `overwrite`, and it is a data set), cannot be written, is being written by
    another process, or does not fit on the disk.
    """
    check_new(out, overwrite)
    out = out.resolve()  # a link to a scratch disk stays a link
    folder = out.with_name(f".{out.name}-unfinished")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder / "lock")
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}; give --out a folder that you may write to") from None
    if held is None:
        raise ValueError(f"another run is writing {out}: wait for it, or give another --out")
    with held:
        try:
            unfinished = Unfinished(out, folder, request)
            unfinished.begin(size, remedy)
            yield unfinished
            check_new(out, overwrite)  # nothing has come to stand there
            unfinished.finish()
        except BaseException as error:
            if request is None or isinstance(error, ValueError):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def check_new(out: Path, overwrite: bool) -> None:
    """Raise ValueError if `out` exists, unless `overwrite` and it is a data set, with sections for it or without."""
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"{out} exists already; add --overwrite to replace it, or give another --out")
    parts = {"train", "valid", "test", "stats"}
    strangers = [out.name]
    if out.is_dir():
        strangers = sorted(p.name for p in out.iterdir() if p.name not in parts and not _is_section(p))
    if strangers:
        raise ValueError(
            f"{out} holds {strangers[0]}, which is no part of a data set; --overwrite replaces only folders "
            "with train, valid, test and stats; give another --out"
        )


def _is_section(path: Path) -> bool:
    return path.suffix == ".yaml" and path.is_file() and path.read_bytes().startswith(SECTION.encode())
