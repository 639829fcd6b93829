"""A data set that is being written: hidden until it is complete, continued where it was interrupted."""

import fcntl
import json
import shutil
from pathlib import Path

from utils.dataset_writer import DatasetWriter, cannot_write, check_new, check_space, put_in_place


class Unfinished:
    """The folder in which a data set grows: removed when the data are at fault, kept when all else ends the run."""

    def __init__(self, out: Path, overwrite: bool, request: list, size: int):
        self.out, self.overwrite, self.request = out.resolve(), overwrite, json.loads(json.dumps(request))
        self.folder = self.out.with_name(f".{self.out.name}-unfinished")
        self.new, self.state = self.folder / "new", self.folder / "state.json"
        self.size = size

    def __enter__(self) -> "Unfinished":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise cannot_write(self.out, error) from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another run is writing {self.out}: wait for it, or give another --out") from None
        old = self.folder / "old"
        if old.exists() and not self.out.exists():  # stopped between the two renames of a replacement
            old.rename(self.out)
        self.known = self._known()
        if self.known.get("request") != self.request:
            if self.state.exists():
                print(f"An unfinished {self.out} is damaged, or of other data or with other flags: starting afresh")
            self.known = {}
            shutil.rmtree(self.new, ignore_errors=True)
            self.state.unlink(missing_ok=True)
            self.new.mkdir()
            try:
                check_space(self.out, self.folder, self.size, "fewer files or channels")
            except ValueError:
                shutil.rmtree(self.folder)
                raise
        return self

    def _known(self) -> dict:
        """Return what an earlier run noted, if the files that it names are there."""
        try:
            known = json.loads(self.state.read_text())
            return known if all((self.new / f"{name}.h5").exists() for name in known["done"]) else {}
        except (OSError, ValueError, KeyError):
            return {}

    def resume(self, writer: DatasetWriter, missing: dict[str, int]) -> list[str]:
        """Return the files that an interrupted run left complete; take over its sums and counts."""
        if not self.known:
            return []
        writer.load(self.folder / self.known["sums"])
        missing.update(self.known["missing"])
        print(f"Going on with an unfinished {self.out}: {len(self.known['done'])} file(s) are complete")
        return self.known["done"]

    def save(self, writer: DatasetWriter, done: list[str], missing: dict[str, int]) -> None:
        """Note that the files `done` are complete."""
        # The sums first, under a name of their own, and then the note that names them: both are of one moment.
        sums = self.folder / f"sums-{len(done)}.npz"
        writer.save(sums)
        part = self.state.with_suffix(".part")
        part.write_text(json.dumps({"request": self.request, "done": done, "missing": missing, "sums": sums.name}))
        part.rename(self.state)
        for old in set(self.folder.glob("sums-*.npz")) - {sums}:
            old.unlink()

    def finish(self) -> None:
        """Put the complete data set in its place. Raises ValueError where something new has come to stand there."""
        check_new(self.out, self.overwrite)
        put_in_place(self.new, self.out, self.folder / "old")

    def __exit__(self, kind: type | None, *_: object) -> None:
        # What is wrong with the data will be wrong again. After all else, a full disk say, the same command goes on.
        if kind is None or issubclass(kind, ValueError):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()
