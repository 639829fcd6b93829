"""Data files of strangers: their values lie in them or beside them, whole, and nothing in them runs code."""

import dataclasses
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import fields, write_file
from utils.checkpoint.weights import load_tensors
from utils.data import files as data_files
from utils.data.files import Files
from utils.data.frames import FrameReader
from utils.data.hdf5 import LARGEST_CHUNK, LINKED_FILES, _meet
from utils.data.staging import stage
from utils.data.statistics import Statistics
from utils.prepare_data.archive_file import open_archive

SHAPE = (4, 2, 8, 16)


@pytest.fixture
def data() -> np.ndarray:
    return fields(*SHAPE)


def create(path: Path) -> h5py.File:
    path.parent.mkdir(parents=True, exist_ok=True)
    return h5py.File(path, "w")


def link(path: Path, source: str, kind: str) -> None:
    """Write a file whose fields lie in another one."""
    with create(path) as file:
        if kind == "external link":
            file["fields"] = h5py.ExternalLink(source, "fields")
        elif kind == "soft link to an external link":
            file["elsewhere/x"] = h5py.ExternalLink(source, "fields")
            file["fields"] = h5py.SoftLink("/elsewhere/x")
        elif kind == "raw bytes":
            file.create_dataset("fields", SHAPE, "f4", external=[(source, 0, 4 * int(np.prod(SHAPE)))])
        else:
            layout = h5py.VirtualLayout(SHAPE, "f4")
            layout[:] = h5py.VirtualSource(source, "fields", SHAPE)
            file.create_virtual_dataset("fields", layout)


KINDS = ["external link", "soft link to an external link", "raw bytes", "virtual dataset"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_out_of_the_folder(tmp_path, monkeypatch, data, kind):
    secret = tmp_path / "secret/2000.h5"
    write_file(secret, data)
    link(tmp_path / "data/2000.h5", str(secret), kind)
    found = rf"data/2000.h5: .* lies in .*/secret/2000.h5, out of its folder: .* set {LINKED_FILES}=1"
    with pytest.raises(ValueError, match=found):
        Files.open(str(tmp_path / "data"))
    with pytest.raises(ValueError, match=found):
        open_archive(str(tmp_path / "data/2000.h5"))
    monkeypatch.setenv(LINKED_FILES, "1")
    files = Files.open(str(tmp_path / "data"))
    if kind != "raw bytes":
        np.testing.assert_array_equal(FrameReader(files, [0, 1], range(8), 16).read_frame(0, 3), data[3])


@pytest.mark.parametrize("kind", KINDS)
def test_values_in_a_file_beside(tmp_path, monkeypatch, data, kind):
    write_file(tmp_path / "data/parts/source.h5", data)
    monkeypatch.chdir(tmp_path / "data")  # HDF5 finds raw bytes from here
    link(tmp_path / "data/2000.h5", "parts/source.h5", kind)
    assert Files.open(str(tmp_path / "data")).shape == SHAPE[1:]


def test_values_by_way_of_a_file_beside(tmp_path, data):
    write_file(tmp_path / "secret.h5", data)
    link(tmp_path / "data/parts/b.h5", "../../secret.h5", "virtual dataset")
    link(tmp_path / "data/2000.h5", "parts/b.h5", "external link")
    with pytest.raises(ValueError, match=r"/fields lies in .*/secret\.h5, out of its folder"):
        Files.open(str(tmp_path / "data"))


def test_files_that_lead_to_each_other(tmp_path):
    link(tmp_path / "a.h5", "b.h5", "external link")
    link(tmp_path / "b.h5", "a.h5", "external link")
    with pytest.raises(ValueError, match="cannot read"):
        Files.open(str(tmp_path))


def test_a_file_that_leads_to_itself_by_another_name(tmp_path, monkeypatch):
    looked, is_hdf5 = [], h5py.is_hdf5
    monkeypatch.setattr(h5py, "is_hdf5", lambda path: looked.append(path) or is_hdf5(path))
    link(tmp_path / "a.h5", "b.bin", "external link")
    (tmp_path / "b.bin").symlink_to("a.h5")
    with pytest.raises(ValueError, match="cannot read"):
        Files.open(str(tmp_path))
    assert len(looked) == 1


def test_a_source_that_is_not_there(tmp_path):
    """HDF5 would give out zeros."""
    link(tmp_path / "2000.h5", "gone.h5", "virtual dataset")
    with pytest.raises(ValueError, match=r"2000\.h5: /fields lies in .*gone\.h5, which is not there: copy it"):
        Files.open(str(tmp_path))


def test_a_link_by_way_of_the_file_system(tmp_path, data):
    write_file(tmp_path / "secret.h5", data)
    link(tmp_path / "data/2000.h5", "beside.h5", "external link")
    (tmp_path / "data/beside.h5").symlink_to(tmp_path / "secret.h5")
    with pytest.raises(ValueError, match=r"/fields lies in .*beside\.h5, out of its folder"):
        Files.open(str(tmp_path / "data"))


@pytest.mark.parametrize("kind", ["external link", "raw bytes", "virtual dataset"])
def test_a_link_and_back(tmp_path, data, monkeypatch, kind):
    """`sub/..` is the folder in which what the link `sub` leads to lies, whatever a path's text says."""
    write_file(tmp_path / "secret/source.h5", data)
    (tmp_path / "secret/folder").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sub").symlink_to(tmp_path / "secret/folder")
    write_file(tmp_path / "data/source.bin", data)
    (tmp_path / "data/source.bin").rename(tmp_path / "data/source.h5")
    monkeypatch.chdir(tmp_path / "data")
    link(tmp_path / "data/2000.h5", "sub/../source.h5", kind)
    with pytest.raises(ValueError, match=r"lies in .*sub/\.\./source\.h5, out of its folder"):
        Files.of([tmp_path / "data/2000.h5"])


def test_a_file_by_two_names(tmp_path, data):
    """What it names lies elsewhere by its other name, which is a link: there a decoy, here a secret."""
    write_file(tmp_path / "secret.h5", data)
    write_file(tmp_path / "data/2000/secret.bin", data)
    (tmp_path / "data/2000/secret.bin").rename(tmp_path / "data/2000/secret.h5")
    link(tmp_path / "data/2000/d1/d2/x.bin", "../../secret.h5", "external link")
    (tmp_path / "data/2000/l").mkdir()
    (tmp_path / "data/2000/l.bin").symlink_to("d1/d2/x.bin")
    with create(tmp_path / "data/2000/2000.h5") as file:
        file["a"] = h5py.ExternalLink("d1/d2/x.bin", "fields")
        file["fields"] = h5py.ExternalLink("l.bin", "fields")
    with pytest.raises(ValueError, match=r"lies in .*secret\.h5, (out of its folder|which is not there)"):
        Files.of([tmp_path / "data/2000/2000.h5"])


def test_virtual_values_that_lie_upon_each_other(tmp_path, data):
    """As many as there are, and half of them nowhere. Every second step of two files is another thing."""
    write_file(tmp_path / "part.bin", data[:2])
    for name, places in (("twice", [slice(2), slice(2)]), ("turns", [slice(0, None, 2), slice(1, None, 2)])):
        source = h5py.VirtualSource("part.bin", "fields", (2, *SHAPE[1:]))
        with create(tmp_path / f"{name}.h5") as file:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            for place in places:
                whole = h5py.h5s.create_simple(SHAPE)
                whole.select_hyperslab((place.start or 0, 0, 0, 0), (2, *SHAPE[1:]), (place.step or 1, 1, 1, 1))
                properties.set_virtual(whole, b"part.bin", b"fields", source.sel.id)
            space = h5py.h5s.create_simple(SHAPE)
            h5py.h5d.create(file.id, b"fields", h5py.h5t.IEEE_F32LE, space, properties)
    assert Files.of([tmp_path / "turns.h5"]).steps == (4,)
    with pytest.raises(ValueError, match="some values of /fields lie in two files, and others in none: map each once"):
        Files.of([tmp_path / "twice.h5"])


def test_sources_by_a_pattern(tmp_path, data):
    """HDF5 puts a number in the place of %b: who looks for a file of that name looks at another one."""
    write_file(tmp_path / "parts/%b.bin", data)
    source = h5py.VirtualSource("parts/%b.bin", "fields", (1, *SHAPE[1:]))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    there, unlimited = h5py.h5s.create_simple((4, *SHAPE[1:]), (h5py.h5s.UNLIMITED, *SHAPE[1:])), h5py.h5s.UNLIMITED
    there.select_hyperslab((0,) * 4, (unlimited, 1, 1, 1), (1, 1, 1, 1), (1, *SHAPE[1:]))
    properties.set_virtual(there, b"parts/%b.bin", b"fields", source.sel.id)
    with create(tmp_path / "2000.h5") as file:
        h5py.h5d.create(file.id, b"fields", h5py.h5t.IEEE_F32LE, there, properties)
    with pytest.raises(ValueError, match="names sources by a pattern, 'parts/%b.bin': name each file"):
        Files.open(str(tmp_path))


def test_virtual_values_that_lie_nowhere(tmp_path, data):
    """HDF5 would give out zeros: of a part that is not mapped, and of a source that is not whole."""
    write_file(tmp_path / "whole/part.bin", data[:3])
    layout = h5py.VirtualLayout(SHAPE, "f4")
    layout[:3] = h5py.VirtualSource("part.bin", "fields", (3, *SHAPE[1:]))
    with create(tmp_path / "whole/2000.h5") as file:
        file.create_virtual_dataset("fields", layout)
    with pytest.raises(ValueError, match="768 of 1,024 values of /fields lie in some file: map them all"):
        Files.open(str(tmp_path / "whole"))
    with create(tmp_path / "part/part.bin") as file:
        file.create_dataset("fields", SHAPE, "f4", chunks=(1, *SHAPE[1:]))[:2] = data[:2]
    link(tmp_path / "part/2000.h5", "part.bin", "virtual dataset")
    with pytest.raises(ValueError, match=r"part\.bin holds 2 of 4 chunks of fields"):
        Files.open(str(tmp_path / "part"))


def test_raw_bytes_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link(tmp_path / "2000.h5", "raw.bin", "raw bytes")
    (tmp_path / "raw.bin").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="has 100 of 4,096 bytes of fields in other files"):
        Files.open(str(tmp_path))


def test_files_with_links_are_not_staged(tmp_path, data):
    """The copy would lack what they lead to."""
    write_file(tmp_path / "data/parts/source.h5", data)
    link(tmp_path / "data/2000.h5", "parts/source.h5", "virtual dataset")
    files = Files.open(str(tmp_path / "data"))
    with pytest.raises(ValueError, match="takes values from other files, which are not copied: leave --stage_dir out"):
        stage(files, [0], str(tmp_path / "node"))


@pytest.mark.parametrize("chunks", [None, (1, 1, 8, 16)])
def test_values_that_were_never_written(tmp_path, data, chunks):
    with create(tmp_path / "2000.h5") as file:
        stored = file.create_dataset("fields", SHAPE, "f4", chunks=chunks)
        if chunks:
            stored[:3] = data[:3]
    found = "6 of 8 chunks of fields" if chunks else "0 of 4,096 bytes of fields"
    with pytest.raises(ValueError, match=f"holds {found}: copy it again, or finish it"):
        Files.open(str(tmp_path))


@pytest.mark.parametrize("what", ["fields", "latitude", "time"])
def test_shapes_that_have_no_bytes(tmp_path, data, what):
    """A small file that claims much more than it holds."""
    large = {"fields": (4, 1, 10**6, 10**6), "latitude": (10**12,), "time": (10**12,)}
    with create(tmp_path / "2000.h5") as file:
        if what == "fields":
            file.create_dataset("fields", large["fields"], "f4", chunks=(1, 1, 1000, 1000), compression="gzip")
        else:
            shape = (10**12, 1, 1, 1) if what == "time" else (1, 1, 10**12, 1)
            file.create_dataset("fields", shape, "f4", chunks=tuple(min(n, 1000) for n in shape))
            file.create_dataset(what, large[what], "i8", chunks=(1000,))
    with pytest.raises(ValueError, match="holds 0 of 4,000,000 chunks|no axis is longer than 16,777,216"):
        Files.open(str(tmp_path))


def test_chunks_too_large_to_be_decompressed(tmp_path):
    with create(tmp_path / "2000.h5") as file:
        file.create_dataset("fields", (1, 1, 2**14, 2**15), "f4", chunks=(1, 1, 2**14, 2**15), compression="gzip")
    assert 2**14 * 2**15 * 4 > LARGEST_CHUNK
    with pytest.raises(ValueError, match=r"fields in chunks of 2\.1 GB: store it in chunks of a frame"):
        Files.open(str(tmp_path))


def test_a_folder_with_the_name_of_a_file(tmp_path):
    (tmp_path / "2000.h5").mkdir()
    with pytest.raises(ValueError) as error:
        Files.open(str(tmp_path))
    assert "2000.h5 is a folder, and its name that of a data file: rename it" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["group", "texts", "complex"])
def test_axes_that_are_no_numbers(tmp_path, data, what):
    write_file(tmp_path / "2000.h5", data, start=None)
    with h5py.File(tmp_path / "2000.h5", "a") as file:
        if what == "group":
            file.create_group("time")
        else:
            file["time"] = np.array([b"x"] * 4) if what == "texts" else np.ones(4, complex)
    with pytest.raises(ValueError, match=r"has time, (a group|of .* \[4\]): it must be \[4\] numbers"):
        Files.open(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("data/2000.h5", "means.npy", "weights.pt"):
        os.mkfifo(tmp_path / name)
    tell = r"{} is no file, but a pipe, a socket or a device: copy what it gives into a file$"
    with pytest.raises(ValueError, match=tell.format("2000.h5")):
        Files.open(str(tmp_path / "data"))
    with pytest.raises(ValueError, match=tell.format("2000.h5")):
        open_archive(str(tmp_path / "data/2000.h5"))
    with pytest.raises(ValueError, match=tell.format("means.npy")):
        Statistics(("u",), (0,), True).load(str(tmp_path / "means.npy"), "global_means_path")
    with pytest.raises(ValueError, match=tell.format("weights.pt")):
        load_tensors(tmp_path / "weights.pt")


def test_axes_that_are_not_known(tmp_path, data):
    """A single row that has no latitude could lie anywhere."""
    write_file(tmp_path / "one/2000.h5", data[:, :, :1], start=None)
    with pytest.raises(ValueError, match=r"has 1 row\(s\) and no latitude: store the latitude of each row"):
        Files.open(str(tmp_path / "one"))
    with h5py.File(tmp_path / "one/2000.h5", "a") as file:
        file["latitude"] = np.array([np.nan])
    with pytest.raises(ValueError, match="has a latitude that is not finite"):
        Files.open(str(tmp_path / "one"))


def moved(values: np.ndarray, i: int, by: float) -> np.ndarray:
    """Return values of which one is another."""
    return np.where(np.arange(len(values)) == i, values + by, values)


NORTH, EAST = np.linspace(80.0, -80.0, 8), np.arange(16) * 22.5


@pytest.mark.parametrize(
    "name, values, units, told",
    [
        ("latitude", np.deg2rad(NORTH), "radians", "a latitude in 'radians': write degrees"),
        ("latitude", NORTH * 2, "", "a latitude above 90, or in no order"),
        ("latitude", moved(NORTH, 3, 30), "", "a latitude above 90, or in no order"),
        ("latitude", NORTH * 0, "", "a latitude above 90, or in no order"),
        ("longitude", EAST[::-1], "", "longitudes that do not go east once around"),
        ("longitude", moved(EAST, 3, 22.5), "", "longitudes that do not go east once around"),
        ("longitude", EAST * 2, "", "longitudes that do not go east once around"),
        ("latitude", NORTH[::-1], "degrees_north", None), ("longitude", EAST - 180, "degrees_east", None),
        ("longitude", (EAST + 180) % 360, "", None), ("longitude", np.linspace(0, 360, 16), "", None),
    ],
)  # fmt: skip
def test_grids_that_lie_on_no_globe(tmp_path, data, name, values, units, told):
    write_file(tmp_path / "2000.h5", data)
    with h5py.File(tmp_path / "2000.h5", "a") as file:
        file[name] = values
        file[name].attrs["units"] = units
    if told is None:
        np.testing.assert_allclose(getattr(Files.open(str(tmp_path)), name), values)
        return
    with pytest.raises(ValueError, match=f"2000.h5 has {told}"):
        Files.open(str(tmp_path))


def test_numbers_whose_bits_are_others(tmp_path, data):
    """h5py calls them float32, too: HDF5 converts them, and who reads bytes must not take them as they lie."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_norm(h5py.h5t.NORM_NONE)
    with create(tmp_path / "2000.h5") as file:
        space = h5py.h5s.create_simple(SHAPE)
        stored = h5py.h5d.create(file.id, b"fields", kind, space)
        stored.write(h5py.h5s.ALL, h5py.h5s.ALL, data)
        assert stored.dtype == data.dtype
    expected = h5py.File(tmp_path / "2000.h5")["fields"][2]
    np.testing.assert_allclose(expected, data[2], rtol=1e-6)
    files = Files.open(str(tmp_path))
    np.testing.assert_array_equal(FrameReader(files, [0, 1], range(8), 16).read_frame(0, 2), expected)
    assert files.offsets == (None,)


@pytest.mark.parametrize("name", ["2000\n2026-01-01 ERROR forged.h5", "2000\x1b[31m.h5"])
def test_names_of_files_that_no_line_can_show(tmp_path, data, name):
    write_file(tmp_path / name, data)
    with pytest.raises(ValueError, match="has a name that no line can show: rename it"):
        Files.open(str(tmp_path))


@pytest.mark.timeout(20)
def test_statistics_and_names_of_very_many_channels(tmp_path):
    with (tmp_path / "means.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1, 10**9, 1, 1)})
        file.truncate(file.tell() + 4 * 10**9)
    with pytest.raises(ValueError, match=r"means.npy has the shape \[1, 1000000000, 1, 1\]"):
        Statistics(("u",), (0,), True).load(str(tmp_path / "means.npy"), "global_means_path")
    names = tuple(f"c{i}" for i in range(50_000))
    write_file(tmp_path / "2000.h5", np.zeros((1, 1, 4, 8), "f4"))
    files = dataclasses.replace(Files.open(str(tmp_path)), shape=(50_001, 4, 8), channel_names=(*names, "c7"))
    with pytest.raises(ValueError, match="channel_names has 'c7' twice"):
        files.names(None)


@pytest.mark.parametrize("time", [[0, 1, 2, np.inf], [0, 1, 2, 1e300], [0, 1, 2, 2**62]])
def test_times_that_are_no_dates(tmp_path, data, time):
    write_file(tmp_path / "2000.h5", data, start=None)
    with h5py.File(tmp_path / "2000.h5", "a") as file:
        file["time"] = np.array(time)
    with pytest.raises(ValueError, match=r"2000\.h5 has a time that is no date of 386 to 3554"):
        Files.open(str(tmp_path))


def test_what_hdf5_itself_refuses_names_the_file(tmp_path, data):
    write_file(tmp_path / "2000.h5", data)
    with h5py.File(tmp_path / "2000.h5", "a") as file:
        file["fields"].attrs["channel_names"] = np.array([b"\xff", b"v"])
    with pytest.raises(ValueError, match=r"cannot read .*2000\.h5 as HDF5 .*: copy it again"):
        Files.open(str(tmp_path))


@pytest.mark.timeout(30)
def test_virtual_values_of_very_many_parts(tmp_path, monkeypatch):
    """Each would be compared with each."""
    monkeypatch.setattr("utils.data.hdf5.MOST_PAIRS", 100)
    write_file(tmp_path / "part.bin", np.zeros((1, 1, 8, 16), "f4"))
    for parts, told in ((14, None), (15, "very many parts: map files of whole time steps")):
        layout = h5py.VirtualLayout((1, parts, 8, 16), "f4")
        for i in range(parts):
            layout[:, i] = h5py.VirtualSource("part.bin", "fields", (1, 1, 8, 16))[:, 0]
        with create(tmp_path / "2000.h5") as file:
            file.create_virtual_dataset("fields", layout)
        if told is None:
            Files.of([tmp_path / "2000.h5"])
        else:
            with pytest.raises(ValueError, match=told):
                Files.of([tmp_path / "2000.h5"])


@given(*2 * [st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))])
def test_ranges_that_share_a_number(a, b):
    a, b = (range(start, start + step * count, step) for start, step, count in (a, b))
    assert _meet(a, b) == bool({*a} & {*b})


def test_an_axis_longer_than_any(tmp_path, monkeypatch, data):
    monkeypatch.setattr(data_files, "LONGEST_AXIS", 15)
    write_file(tmp_path / "2000.h5", data)
    with pytest.raises(ValueError, match=r"2000\.h5 has fields \[4, 2, 8, 16\]: no axis is longer than 15"):
        Files.open(str(tmp_path))


def test_damage_is_told_in_one_line(tmp_path, data):
    path = tmp_path / "2000.h5"
    write_file(path, data, chunks=(1, 1, 8, 16), compression="gzip")
    content = path.read_bytes()
    for i in range(40):  # whatever happens, it is a ValueError of one line, or nothing is wrong with what is read
        damaged = bytearray(content)
        damaged[i * 61 % len(content)] ^= 255
        path.write_bytes(damaged)
        try:
            Files.open(str(tmp_path))
        except ValueError as error:
            assert "\n" not in str(error)
