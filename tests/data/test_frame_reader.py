"""Reading frames: the right numbers, nothing else, in as few requests as can be."""

import errno
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.helpers import fields, write_file
from utils import files as storage
from utils.data import files as data_files
from utils.data.files import Files
from utils.data.frames import FrameReader, OpenFiles, consecutive
from utils.data.token_shard import TokenShard
from utils.errors import ReadError


def reader(folder, channels, rows, columns):
    return FrameReader(Files.open(str(folder)), channels, rows, columns)


@pytest.mark.parametrize("layout", [{}, {"chunks": (1, 1, 17, 32)}, {"compression": "gzip"}])
@pytest.mark.parametrize("dtype", ["float32", "float16", ">f4"])
@pytest.mark.parametrize("rows", [range(17), range(16), range(4, 12)])
@pytest.mark.parametrize("columns", [32, 30])
def test_layouts_dtypes_and_crops(tmp_path, layout, dtype, rows, columns):
    data = fields(4, 5, 17, 32).astype(dtype)
    write_file(tmp_path / "2000.h5", data, **layout)
    frames = reader(tmp_path, [3, 0, 1], rows, columns)
    assert frames.is_direct == (not layout and dtype != ">f4" and columns == 32)
    frame = frames.read_frame(0, 2)
    assert frame.dtype == (np.float16 if dtype == "float16" else np.float32)
    np.testing.assert_array_equal(frame, data[2, [3, 0, 1], rows.start : rows.stop, :columns])


def test_files_that_only_hdf5_can_read(tmp_path, monkeypatch):
    """A header in front is no hindrance. Data in another file, or mixed types are."""
    monkeypatch.setenv("LINKED_FILES", "1")
    data = fields(4, 2, 8, 16)
    for name, more in (("head", {"userblock_size": 512}), ("elsewhere", {})):
        (tmp_path / name).mkdir()
        with h5py.File(tmp_path / name / "2000.h5", "w", **more) as file:
            external = [(str(tmp_path / "raw"), 0, data.nbytes)] if name == "elsewhere" else None
            stored = file.create_dataset("fields", data.shape, "f4", external=external)
            stored[:] = data
    write_file(tmp_path / "mixed/2000.h5", data)
    write_file(tmp_path / "mixed/2001.h5", data.astype(np.float16))
    for name, is_direct in (("head", True), ("elsewhere", False), ("mixed", False)):
        frames = reader(tmp_path / name, [0, 1], range(8), 16)
        assert frames.is_direct == is_direct, name
        np.testing.assert_array_equal(frames.read_frame(0, 3), data[3])


def count_reads(monkeypatch):
    """Return a list that gets the bytes of each read by `preadv`."""
    seen, original = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: seen.append(original(*args)) or seen[-1])
    return seen


def test_one_request_a_frame_also_where_a_row_is_cropped(tmp_path, monkeypatch):
    assert consecutive([2, 3, 4, 0, 7, 8]) == [(0, 2, 3), (3, 0, 1), (4, 7, 2)]
    row = 32 * 4
    write_file(tmp_path / "2000.h5", fields(3, 600, 17, 32))
    seen = count_reads(monkeypatch)
    for channels, rows, expected in (
        (range(5), range(17), [5 * 17 * row]),
        ([1, 2, 4], range(17), [2 * 17 * row, 17 * row]),
        (range(5), range(16), [(5 * 17 - 1) * row]),  # reads the 17th rows as well, but the last
        (range(5), range(8), [8 * row] * 5),  # half of the rows are unwanted: a request a channel
        (range(600), range(16), [(500 * 17 - 1) * row, (100 * 17 - 1) * row]),  # more pieces than the system takes
    ):
        seen.clear()
        frames = reader(tmp_path, list(channels), rows, 32)
        frames.read_frame(0, 1)
        assert seen == expected and len(frames.requests) == len(expected)


def test_what_comes_in_parts_is_put_together(tmp_path, monkeypatch):
    """A system may return less than was asked for, as Linux does above 2 GB."""
    data = fields(3, 5, 17, 32)
    write_file(tmp_path / "2000.h5", data)
    original = os.preadv

    def a_little(fd, buffers, offset):
        got, few = 0, []
        for buffer in buffers:
            few.append(buffer[: 1000 - got])
            got += len(few[-1])
            if got == 1000:
                break
        return original(fd, few, offset)

    monkeypatch.setattr(os, "preadv", a_little)
    for rows in (17, 16):
        np.testing.assert_array_equal(
            reader(tmp_path, list(range(5)), range(rows), 32).read_frame(0, 1), data[1, :, :rows]
        )


def test_a_damaged_file_is_named(tmp_path):
    write_file(tmp_path / "2000.h5", fields(4, 2, 16, 32), chunks=(1, 2, 16, 32), fletcher32=True)
    with h5py.File(tmp_path / "2000.h5") as file:
        damaged = file["fields"].id.get_chunk_info(2).byte_offset
    with (tmp_path / "2000.h5").open("r+b") as file:
        file.seek(damaged)
        file.write(b"wrong")
    frames = reader(tmp_path, [0, 1], range(16), 32)
    frames.read_frame(0, 1)
    with pytest.raises(ReadError, match="2000.h5: frame 2 cannot be read"):
        frames.read_frame(0, 2)


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip"}, {"chunks": (1, 1, 16, 32)}])
@pytest.mark.parametrize("columns", [32, 31])
def test_a_file_that_vanishes_or_shrinks_is_named(tmp_path, layout, columns):
    """HDF5 would read zeros behind the end of some."""
    path = tmp_path / "2000.h5"
    write_file(path, fields(4, 2, 16, 32), **layout)
    frames = reader(tmp_path, [0, 1], range(16), columns)
    path.rename(tmp_path / "away")
    with pytest.raises(ReadError, match="2000.h5: frame 0 cannot be read"):
        frames.read_frame(0, 0)
    (tmp_path / "away").rename(path)
    frames.read_frame(0, 0)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ReadError, match="2000.h5: frame 3 cannot be read.*Mend it or copy it again"):
        frames.read_frame(0, 3)


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip"}])
def test_a_file_that_was_replaced_before_it_is_opened_is_named(tmp_path, layout):
    path = tmp_path / "2000.h5"
    write_file(path, fields(4, 2, 16, 32), **layout)
    frames = reader(tmp_path, [0, 1], range(16), 32)
    write_file(path, fields(2, 3, 16, 32), names=["a", "b", "c"], **layout)
    for _ in range(2):
        with pytest.raises(ReadError, match="2000.h5: frame 1 cannot be read .it is another file than at the start"):
            frames.read_frame(0, 1)


def test_inputs_and_targets_share_the_open_files(tmp_path):
    for year in range(2000, 2004):
        write_file(tmp_path / f"{year}.h5", fields(2, 2, 16, 32))
    files = Files.open(str(tmp_path))

    def still_open() -> int:
        return sum(Path(fd).is_relative_to(tmp_path) for fd in map(os.path.realpath, Path("/proc/self/fd").iterdir()))

    opened = OpenFiles(files)
    readers = [FrameReader(files, [c], range(16), 32, opened) for c in (0, 1)]
    for file in range(4):
        for frames in readers:
            frames.read_frame(file, 1)
    assert still_open() == 4
    del opened, readers, frames
    assert still_open() == 0


@pytest.mark.parametrize("error, opened", [(errno.EIO, 1), (errno.ENOTCONN, 1), (errno.ESTALE, 3)])
@pytest.mark.parametrize("times", [2, 3])
def test_a_storage_that_fails_for_a_moment(tmp_path, monkeypatch, error, opened, times):
    """A read is done again, of what a server no longer knows after the file was opened anew."""
    data = fields(4, 2, 16, 32)
    write_file(tmp_path / "2000.h5", data)
    frames, original, open_, paths = reader(tmp_path, [0, 1], range(16), 32), os.preadv, os.open, []
    left = [None] * times

    def failing(fd, *args):
        if left:
            left.pop()
            raise OSError(error, os.strerror(error))
        return original(fd, *args)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(os, "open", lambda *args, **more: paths.append(args[0]) or open_(*args, **more))
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)

    def held() -> int:
        return [*map(os.path.realpath, Path("/proc/self/fd").iterdir())].count(str(tmp_path / "2000.h5"))

    if times == 3:
        with pytest.raises(ReadError, match=rf"2000\.h5: frame 1 cannot be read \({os.strerror(error)}\)"):
            frames.read_frame(0, 1)
    np.testing.assert_array_equal(frames.read_frame(0, 1), data[1])
    assert len(paths) == held() == opened + (times == 3 and error == errno.ESTALE)
    if times == 2:  # an error that was raised holds on to its reader
        del frames
        assert held() == 0


@pytest.mark.parametrize("call", ["an attribute", "the date"])
@pytest.mark.parametrize("times", [2, 3])
def test_a_storage_that_fails_while_a_file_is_looked_at(tmp_path, monkeypatch, call, times):
    """HDF5 tells of it in words of its own, and h5py by errors of many kinds."""
    write_file(tmp_path / "2000.h5", fields(4, 2, 16, 32))
    name, error = {
        "an attribute": ("check_links", RuntimeError("no info (file read failed: fd = 7, errno = 5, message = 'I/O')")),
        "the date": ("stamp", OSError(errno.EIO, "I/O", str(tmp_path))),
    }[call]
    original, left, pauses = getattr(data_files, name), [error] * times, []

    def failing(what):
        if left:
            raise left.pop()
        return original(what)

    monkeypatch.setattr(data_files, name, failing)
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    if times == 3:
        with pytest.raises(ValueError, match=rf"^cannot read .*2000\.h5 \({os.strerror(errno.EIO)}\): mend that, or"):
            Files.open(str(tmp_path))
    assert Files.open(str(tmp_path)).steps == (4,) and pauses == [0.5, 2]


def test_a_compression_that_is_not_installed_is_named(tmp_path, monkeypatch):
    write_file(tmp_path / "2000.h5", fields(4, 2, 16, 32), compression="gzip")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: number != 1)
    with pytest.raises(ValueError, match="2000.h5 is compressed with deflate.*pip install hdf5plugin"):
        Files.open(str(tmp_path))


def bytes_read_by_this_process():
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count the bytes that are read")
@pytest.mark.parametrize("layout, columns", [({}, 128), ({}, 120), ({"chunks": (1, 1, 8, 128)}, 128)])
@pytest.mark.parametrize(
    "shards, patch_rows", [(1, [8]), (4, [2, 2, 2, 2]), (7, [2, 2, 2, 2, 2, 3, 1]), (72, [1] * 64 + [0] * 8)]
)
def test_a_rank_reads_the_patch_rows_of_its_tokens_and_no_more(tmp_path, layout, columns, shards, patch_rows):
    """Counted by the operating system: 8 x 16 patches of 8 points, 4 KB a row of patches and channel."""
    write_file(tmp_path / "2000.h5", fields(2, 3, 64, 128), **layout)
    files = Files.open(str(tmp_path))
    for i, count in enumerate(patch_rows):
        shard = TokenShard((64, 128), 8, shards, i)
        frames = FrameReader(files, [0, 2], shard.rows, columns)
        frames.read_frame(0, 1)  # opens the file, and its table of chunks
        before = bytes_read_by_this_process()
        nothing = bytes_read_by_this_process() - before
        before = bytes_read_by_this_process()
        frame = frames.read_frame(0, 1)
        assert bytes_read_by_this_process() - before - nothing == frame.nbytes == count * 2 * 8 * columns * 4
