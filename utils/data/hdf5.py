"""HDF5 files from anywhere: what they hold lies in them, or beside them, and is there whole.

An HDF5 file can take values from other files: by external links, as the sources of a virtual dataset, as raw bytes of
any file. Those of its own folder are read. Others are refused, unless the environment says LINKED_FILES=1: what a
stranger's file names should not become training data, or a forecast. Parts that nobody wrote are refused, too: HDF5
gives them out as zeros.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from utils.reading import LINKED_FILES, may_link

LARGEST_CHUNK = 2**30  # bytes: it is decompressed as a whole
MOST_PAIRS = 10**6  # of parts of a virtual dataset that hold the same steps: some ten seconds


def check_links(file: h5py.File) -> None:
    """Raise ValueError where an HDF5 file takes values from a file that is not there, or out of its folder."""
    folder = Path(file.filename).resolve().parent
    for name, source in _sources(file, set()):
        if not os.path.isfile(source):  # also where it may not be asked
            raise ValueError(f"{file.filename}: {name} lies in {source}, which is not there: copy it beside, too")
        if not source.resolve().is_relative_to(folder) and not may_link():
            raise ValueError(
                f"{file.filename}: {name} lies in {source}, out of its folder: copy it beside, or, if you trust the "
                f"file, set {LINKED_FILES}=1"
            )


def is_linked(path: str | Path) -> bool:
    """Does a file take values from others?"""
    with h5py.File(path, "r", locking=False) as file:
        return any(True for _ in _sources(file, set()))


def _sources(file: h5py.File, seen: set[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each object of a file that lies in another one, with that one; and so on, through these.

    What a file names lies where its own name leads: one file has other sources by a link in another folder.
    """
    path, found = Path.cwd() / file.filename, []
    seen.add(path.parent.resolve() / path.name)
    for name, item in items(file):
        if isinstance(item, h5py.ExternalLink):
            found.append((name, item.filename))
        else:
            found += [(name, str(Path.cwd() / other)) for other, _, _ in item.external or ()]
            sources = item.virtual_sources() if item.is_virtual else ()
            for one in sources:
                if "%" in one.file_name or "%" in one.dset_name:  # HDF5 puts numbers in its place
                    raise ValueError(f"{path}: {name} names sources by a pattern, {one.file_name!r}: name each file")
            found += [(name, one.file_name) for one in sources]
    for name, other in found:
        source = path if other == "." else path.parent / other  # `..` behind a link leads on from where that leads
        if source.resolve() != path.resolve():
            yield name, source
        known = source.parent.resolve() / source.name in seen
        if not known and os.path.isfile(source) and h5py.is_hdf5(source):
            with h5py.File(source, "r", locking=False) as another:
                yield from _sources(another, seen)


def items(group: h5py.Group, seen: set[int] | None = None) -> Iterator[tuple[str, h5py.Dataset | h5py.ExternalLink]]:
    """Yield the datasets and external links below a group; a link inside the file leads to one that is found anyway."""
    seen = {h5py.h5o.get_info(group.id).addr} if seen is None else seen
    for name in group:
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            yield f"{group.name.rstrip('/')}/{name}", link
        elif isinstance(link, h5py.HardLink):
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address not in seen:
                seen.add(address)
                if isinstance(item, h5py.Group):
                    yield from items(item, seen)
                elif isinstance(item, h5py.Dataset):
                    yield item.name, item


def check_whole(path: str | Path, dataset: h5py.Dataset) -> None:
    """Raise ValueError where parts of a dataset were never written, or its chunks are too large to be decompressed."""
    name = dataset.name.lstrip("/")
    if not dataset.size:
        return
    if dataset.is_virtual:
        _check_mapped(path, dataset)
        return
    if dataset.external:
        room = sum(min(size, max(os.path.getsize(other) - at, 0)) for other, at, size in dataset.external)
        if room < dataset.nbytes:
            raise ValueError(
                f"{path} has {room:,} of {dataset.nbytes:,} bytes of {name} in other files: copy them again"
            )
        return
    if dataset.chunks is None:
        there, wanted, what = dataset.id.get_storage_size(), dataset.nbytes, "bytes"
    else:
        size = math.prod(dataset.chunks) * dataset.dtype.itemsize
        if size > LARGEST_CHUNK:
            raise ValueError(f"{path} has {name} in chunks of {size / 1e9:.1f} GB: store it in chunks of a frame")
        wanted = math.prod(-(-whole // part) for whole, part in zip(dataset.shape, dataset.chunks))
        there, what = dataset.id.get_num_chunks(), "chunks"
    if there < wanted:
        raise ValueError(f"{path} holds {there:,} of {wanted:,} {what} of {name}: copy it again, or finish it")


def _check_mapped(path: str | Path, dataset: h5py.Dataset) -> None:
    """Raise ValueError where a virtual dataset has parts that lie nowhere, or in datasets that are not whole."""
    sources = dataset.virtual_sources()
    mapped = sum(one.vspace.get_select_npoints() for one in sources)
    if mapped != dataset.size:
        raise ValueError(
            f"{path}: {mapped:,} of {dataset.size:,} values of {dataset.name} lie in some file: map them all"
        )
    if _overlap([_taken(one.vspace) for one in sources]):
        raise ValueError(f"{path}: some values of {dataset.name} lie in two files, and others in none: map each once")
    for file_name, name in {(one.file_name, one.dset_name) for one in sources}:
        other = dataset.file.filename if file_name == "." else Path(dataset.file.filename).parent / file_name
        with h5py.File(other, "r", locking=False) as file:
            if name not in file or file[name].is_virtual:
                raise ValueError(f"{path}: {dataset.name} lies in {other}, {name}, which holds no values itself")
            check_whole(other, file[name])


def _taken(space: h5py.h5s.SpaceID) -> list[range]:
    """Return the indices that a selection takes along each axis. Raises ValueError where it is no product of such."""
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return [range(size) for size in space.shape]
    slabs = [*zip(*space.get_regular_hyperslab())] if space.is_regular_hyperslab() else []
    if not slabs or any(1 < block < stride and count > 1 for _, stride, count, block in slabs):
        raise ValueError("a virtual dataset is put together of irregular parts: map boxes")
    return [
        range(start, start + stride * count, stride) if block == 1 else range(start, start + count * block)
        for start, stride, count, block in slabs
    ]


def _overlap(parts: list[list[range]]) -> bool:
    """Do some parts of a dataset, the indices of each along each axis, share an element? Raises ValueError for many."""
    pairs = 0
    parts = sorted((part for part in parts if all(map(len, part))), key=lambda part: part[0][0])
    for i, part in enumerate(parts):
        for other in parts[i + 1 :]:
            if other[0][0] > part[0][-1]:
                break
            pairs += 1
            if pairs > MOST_PAIRS:
                raise ValueError("a virtual dataset is put together of very many parts: map files of whole time steps")
            if all(map(_meet, part, other)):
                return True
    return False


def _meet(a: range, b: range) -> bool:
    """Do two ranges share a number? By the Chinese remainder theorem."""
    common = math.gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return False
    step = b.step // common
    first = a.start + a.step * ((b.start - a.start) // common * pow(a.step // common, -1, step) % step)  # of a, and b's
    period = a.step * step
    first += max(-(-(b.start - first) // period), 0) * period
    return first <= min(a[-1], b[-1])
