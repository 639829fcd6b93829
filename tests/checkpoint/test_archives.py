"""Archives of weights from strangers: what torch reads without running code must still not be more than they hold."""

import io
import pickletools
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from utils.checkpoint.archives import check_archive
from utils.checkpoint.weights import load_tensors, load_weights


def test_an_archive_that_grows(tmp_path):
    """torch reads compressed members, too: a thousand bytes for each."""
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "w.pt")
    assert load_tensors(tmp_path / "w.pt").keys() == {"w"}
    packed = zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "w.pt") as plain, packed:
        for member in plain.namelist():
            packed.writestr(member, plain.read(member))
    with pytest.raises(ValueError, match="holds no weights"):
        load_tensors(tmp_path / "z.pt")


def archive(path: Path, pickled: bytes, data: bytes = b"", **more: bytes) -> Path:
    """Write an archive as torch does, with this for data.pkl and for its only storage."""
    with zipfile.ZipFile(path, "w") as out:
        for name, content in {"data.pkl": pickled, "data/0": data, "version": b"3\n", **more}.items():
            out.writestr(f"w/{name}", content)
    return path


def storage(count: int, name: str = "FloatStorage") -> bytes:
    """Return the pickle of a tensor whose storage claims so many numbers."""
    pid = b"(X\7\0\0\0storagectorch\n" + name.encode() + b"\nX\1\0\0\0" + b"0X\3\0\0\0cpuJ"
    pid += count.to_bytes(4, "little") + b"tQ"
    shape = b"J" + count.to_bytes(4, "little") + b"\x85K\1\x85"
    return (
        b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\0" + shape + b"\x89ccollections\nOrderedDict\n)RtR."
    )


# An OrderedDict of a long list of pairs: many of them would make a large one of a small file.
LONG = b"\x80\2](NN\x86NN\x86eq\0ccollections\nOrderedDict\nh\0\x85R."


@pytest.mark.timeout(30)
def test_weights_that_make_more_than_they_hold(tmp_path):
    """Each is read by torch with weights_only=True."""
    good = archive(tmp_path / "good.pt", storage(2), bytes(8))
    assert load_tensors(good).tolist() == [0, 0]
    huge = b"\x80\2cbuiltins\nbytearray\nJ\0\0\0\x40\x85R."
    assert pickletools.dis(huge, out=io.StringIO()) is None
    cases = {
        "names builtins.bytearray": archive(tmp_path / "a.pt", huge),
        "claims another size than it has": archive(tmp_path / "b.pt", storage(2**20), bytes(8)),
        "LONG_BINPUT": archive(tmp_path / "c.pt", b"\x80\2Nr\0\0\0\x08."),
        "a tuple of more than 256 parts": archive(tmp_path / "d.pt", b"\x80\2)" + 300 * b"\x85" + b"."),
        "takes 0 positional arguments": archive(tmp_path / "g.pt", LONG),
        "without data.pkl": archive(tmp_path / "e.pt", b"", b"").rename(tmp_path / "e2.pt"),
    }
    with zipfile.ZipFile(tmp_path / "e2.pt", "w") as out:
        out.writestr("w/other", b"")
    torch.save({"w": torch.zeros(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    cases["not a zip file"] = tmp_path / "legacy.pt"
    behind = tmp_path / "f.pt"
    behind.write_bytes(good.read_bytes() + b"x")
    cases["something behind its end"] = behind
    for found, path in cases.items():
        with pytest.raises(Exception, match=found if "LONG" not in found else "memo has holes|LONG_BINPUT"):
            check_archive(path)
        with pytest.raises(ValueError, match="holds no weights"):
            load_tensors(path)


def test_an_archive_with_two_lists_of_members(tmp_path):
    """Python reads the list that ends at the end of the file; torch the one whose place is told there."""
    stored = archive(tmp_path / "a.pt", storage(2), bytes(8)).read_bytes()
    torn = tmp_path / "two.pt"
    end = stored.rindex(b"PK\5\6")
    size, start = struct.unpack("<2L", stored[end + 12 : end + 20])
    torn.write_bytes(stored[: start + size] + stored[start : start + size] + stored[end:])
    with zipfile.ZipFile(torn) as seen:
        assert len(seen.infolist()) == 3
    with pytest.raises(ValueError, match="two beginnings"):
        check_archive(torn)


def test_a_large_archive_with_two_ends(tmp_path, monkeypatch):
    """torch reads the record that the locator leads to; Python the one before the locator."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    path = archive(tmp_path / "a.pt", storage(2), bytes(8))
    check_archive(path)
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\6\7")
    content[at + 8 : at + 16] = struct.pack("<Q", 0)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="two ends"):
        check_archive(path)


def test_a_locator_where_no_large_archive_has_one(tmp_path):
    """What stands before the end may be a comment on the last member: torch follows it, Python does not."""
    path = archive(tmp_path / "a.pt", storage(2), bytes(8))
    with zipfile.ZipFile(path, "a") as out:
        member = zipfile.ZipInfo("w/last")
        member.comment = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
        out.writestr(member, b"")
    with pytest.raises(ValueError, match="two ends"):
        check_archive(path)


def test_weights_whose_dict_has_words_of_a_stranger(tmp_path):
    """A pickle sets attributes of an OrderedDict: `keys` of it would be no method."""
    state = b"}X\4\0\0\0keysX\1\0\0\0xsb."
    archive(tmp_path / "a.pt", b"\x80\2ccollections\nOrderedDict\n)R" + state)
    with pytest.raises(ValueError, match="holds no weights"):
        load_weights(torch.nn.Linear(2, 2), str(tmp_path / "a.pt"))


@pytest.mark.parametrize("other", ["w/data.pkl", "v/data.pkl", "w/DATA.pkl"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_two_members_of_one_name(tmp_path, other):
    """Python takes the last, torch the first."""
    huge = b"\x80\2cbuiltins\nbytearray\nJ\0\0\0\x40\x85R."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as out:
        for name, content in zip((other, "w/data.pkl", "w/data/0", "w/version"), (huge, storage(2), bytes(8), b"3\n")):
            out.writestr(name, content)
    with pytest.raises(ValueError, match="members share a name"):
        check_archive(tmp_path / "a.pt")


def test_an_archive_with_a_member_of_two_names(tmp_path):
    """Of a name with a zero byte Python takes what is before it."""
    path = archive(tmp_path / "a.pt", storage(2), bytes(8), **{"data.pkl!x": b""})
    path.write_bytes(path.read_bytes().replace(b"data.pkl!", b"data.pkl\0"))
    with pytest.raises(ValueError, match="members share a name"):
        check_archive(path)


@pytest.mark.parametrize("large", [False, True])
def test_archives_of_torch_are_read(tmp_path, large, monkeypatch):
    """Also such as have the records of large ones."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10 if large else zipfile.ZIP64_LIMIT)
    check_archive(archive(tmp_path / "a.pt", storage(2), bytes(8)))
    for weights in (
        {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)[1:]},
        torch.nn.Linear(2, 2).state_dict(),
    ):
        torch.save(weights, tmp_path / "b.pt")
        assert load_tensors(tmp_path / "b.pt").keys() == weights.keys()
