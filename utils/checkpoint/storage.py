"""How the files of a checkpoint are written and read, beneath torch.distributed.checkpoint (dcp).

dcp keeps its description of all tensors as a pickle, `.metadata`, and unpickling runs what a stranger's file names.
Here it makes plain records, and nothing else, whatever the file says; they are checked before memory is taken. And
each slice of a tensor has a checksum in its record (other readers pass over it), which is compared when it is read.
"""

import errno
import io
import math
import os
import pickle
import stat
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.futures import Future

from utils.checkpoint.archives import check_archive, check_operations
from utils.checkpoint.boxes import lie_apart
from utils.checksum import checksum
from utils.files import to_disk

METADATA = ".metadata"
MOST_DIMS = 64  # of a tensor, as PyTorch has it


class Writer(dcp.FileSystemWriter):
    """Writes tensors, and notes the checksum of each slice while it waits for the disk."""

    def __init__(self, folder: Path):
        # Copying ahead is for tensors on a GPU: it would wait for the GPU now and then.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future:
        written = super().write_data(plan, planner)
        places = [result.storage_data for result in written.wait()]
        with ThreadPoolExecutor(1) as pool:
            paths = {Path(self.path, place.relative_path) for place in places}
            on_disk = [pool.submit(to_disk, path) for path in paths]
            for place in places:
                place.digest = checksum(Path(self.path, place.relative_path), place.offset, place.length)
            for future in on_disk:
                future.result()
        return written

    def finish(self, metadata: described.Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        folder, ends = Path(self.path), defaultdict(int)
        for place in (result.storage_data for of_rank in results for result in of_rank):
            ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
        for pause in (1, 3, 0):  # s; what another node wrote may be seen late
            absent = [name for name, end in ends.items() if size_of(folder / name) < end]
            if not absent:
                break
            time.sleep(pause)
        else:
            raise OSError(f"rank 0 does not see {folder / absent[0]}, which another wrote: all need the same --expdir")
        to_disk(Path(self.path, METADATA))


class Reader(dcp.FileSystemReader):
    """Reads tensors whose slices are what their checksums say. Raises ValueError, with the tensor, where one is not.

    Args:
        known: dcp's description of the folder, where it was read before: that of many ranks' slices takes its time.
    """

    def __init__(self, folder: Path, known: described.Metadata | None = None):
        super().__init__(folder)
        self.known = known

    def read_metadata(self, *args: Any, **options: Any) -> described.Metadata:
        path, found = Path(self.path), self.known
        if found is None:
            check_regular(path / METADATA)
            found = checked(unpickled((path / METADATA).read_bytes()), path)
        found.storage_meta = described.StorageMeta(load_id=self.load_id)
        return found

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future:
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            self._check(index.fqn, self.storage_data[index])
        return super().read_data(plan, planner)

    def _check(self, name: str, place: _StorageInfo) -> None:
        path, known = Path(self.path, place.relative_path), getattr(place, "digest", None)
        if known is not None and checksum(path, place.offset, place.length) != known:  # older formats had none
            raise ValueError(f"{name} in {path.name} has another checksum than when it was written")
        with path.open("rb") as file:
            file.seek(place.offset)
            check_archive(io.BytesIO(file.read(place.length)))


def size_of(path: Path) -> int:
    """Return the bytes of a file, -1 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def check_regular(path: Path) -> None:
    """Raise OSError for what is no plain file of its folder: a link leads elsewhere, a pipe waits for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))


class _Record:
    """What a pickle calls an object: its state alone."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


RECORDS = {
    *((described.__name__, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")),
    *((described.__name__, name) for name in ("TensorStorageMetadata", "TensorProperties")),
    (_StorageInfo.__module__, _StorageInfo.__name__),
}
WITHOUT_USE = {"_get_layout", "_MEM_FORMAT_ENCODING", "PosixPath"}  # stand in records, and nobody reads them


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return _few
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in WITHOUT_USE:
            return lambda *_: None
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")


def _few(sizes: Any) -> torch.Size:
    if len(sizes) > MOST_DIMS:
        raise pickle.UnpicklingError(f"it has a tensor of {len(sizes)} dimensions")
    return torch.Size(sizes)


def unpickled(content: bytes) -> Any:
    """Return what a pickle describes, in plain records. Raises pickle.UnpicklingError for any name beside dcp's."""
    check_operations(content)
    return _Unpickler(io.BytesIO(content)).load()


def checked(found: Any, folder: Path) -> described.Metadata:
    """Return dcp's description of the tensors in a folder, from records.

    Raises ValueError, TypeError, KeyError or AttributeError where they describe no tensors, and OSError where files
    are missing: each slice must lie in a file of this folder, and be as long as its numbers.
    """
    state = found.state
    with os.scandir(folder) as entries:
        plain = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in plain}
    tensors = {name: _tensor(name, x.state) for name, x in state["state_dict_metadata"].items()}
    needed = {
        (name, chunk.offsets): math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
    }
    places = {}
    for key, x in state["storage_data"].items():
        index = described.MetadataIndex(key.state["fqn"], _size(key.state["offset"]), _count(key.state["index"]))
        place = places[index] = _place(x.state, sizes)
        if place.length < needed.pop((index.fqn, index.offset)):
            raise ValueError(f"{index.fqn} has only {place.length:,} bytes of {place.relative_path} in a slice")
    if needed:
        raise ValueError(f"nothing says where {next(iter(needed))[0]} lies")
    if sum(place.length for place in places.values()) > sum(sizes.values()):
        raise ValueError("slices lie upon each other")
    found = described.Metadata(tensors, storage_data=places)
    found.version = state.get("version")  # torch 2.8 takes no such argument
    return found


def _count(x: Any) -> int:
    if not isinstance(x, int) or x < 0:
        raise ValueError(f"{x if isinstance(x, int) else type(x).__name__} is no count")
    return x


def _size(x: Any) -> torch.Size:
    if not isinstance(x, torch.Size) or len(x) > MOST_DIMS:
        raise ValueError(f"{type(x).__name__} is no shape of at most {MOST_DIMS} dims")
    return torch.Size(map(_count, x))


def _tensor(name: str, state: dict[str, Any]) -> described.TensorStorageMetadata:
    size, dtype = _size(state["size"]), state["properties"].state[0]
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} of {dtype!r} is no tensor")
    chunks = [
        described.ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in state["chunks"]
    ]
    inside = all(
        len(chunk.sizes) == len(size) and all(a + n <= whole for a, n, whole in zip(chunk.offsets, chunk.sizes, size))
        for chunk in chunks
    )
    if not inside or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size) or not lie_apart(chunks):
        raise ValueError(f"the slices of {name} do not make up {list(size)}")
    return described.TensorStorageMetadata(described.TensorProperties(dtype), size, chunks)


def _place(state: dict[str, Any], sizes: dict[str, int]) -> _StorageInfo:
    path, offset, length = state["relative_path"], _count(state["offset"]), _count(state["length"])
    if state.get("transform_descriptors"):
        raise ValueError(f"slices of {path} are transformed: ours are plain")
    if path not in sizes:
        raise ValueError(f"{path!r} is no file of this folder")
    if offset + length > sizes[path]:
        raise ValueError(f"{path} has {sizes[path]:,} bytes, and a slice ends after {offset + length:,}")
    place = _StorageInfo(path, offset, length)
    place.digest = state.get("digest")
    return place
