"""Files of strangers: nothing that is loaded runs code, lies outside its folder, or claims more bytes than it has."""

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from tests.helpers import Evil, run_folder, run_here, tiny_flags
from utils.checkpoint import store as checkpoint
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.checkpoint.info import CHECKSUM, METADATA_CHECKSUM, Unreadable, _checksum, read_info, write_info
from utils.checkpoint.weights import load_tensors, read_weights
from utils.checksum import checksum

TENSOR = "model.pos_embed"
# Pickles: tuples of two of the tuple before, which as a key would be hashed for ever; a million, each in the next,
# which would take all the stack; many objects of one long list.
DOUBLED = b"\x80\4}K\1\x85\x94" + b"".join(b"h%ch%c\x86\x80\4\x94" % (i, i) for i in range(40)) + b"Ns."
NESTED = b"\x80\4})" + 10**6 * b"\x85" + b"Ns."
LONG = b"\x80\4](" + 1000 * b"K\1" + b"e\x94\x8c\5torch\x8c\4Size\x93h\0\x85R."
FLAGS = ("--num_iters=2", "--keep_checkpoints=1")


@pytest.fixture
def newest(tiny):
    """A checkpoint whose files a stranger may change."""
    (found,) = checkpoint.find(run_here(tiny_flags(tiny, *FLAGS)) / "checkpoints")
    return found


def described(folder: Path) -> SimpleNamespace:
    """Return dcp's own description."""
    return dcp.FileSystemReader(folder).read_metadata()


def write(folder: Path, metadata: object) -> None:
    """Write another description, and the info that fits it: of a stranger who knows what is checked."""
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    change_sizes(folder)


def change_sizes(folder: Path) -> None:
    info = json.loads((folder / "info.json").read_text())
    (folder / "info.json").unlink()
    told = {name: x for name, x in info.items() if not name.startswith("checksum")}
    write_info(folder, {**told, "is_finished": False})


def test_a_pickle_runs_nothing(newest, tiny, capsys):
    """Wherever it lies: the description, an object in it, a tensor that is said to be bytes, weights, an array."""
    ran, own = tiny / "ran", described(newest)
    evil = pickle.dumps(Evil(ran))
    pickle.loads(evil)
    assert ran.exists()  # it would work
    ran.unlink()
    write(newest, Evil(ran))
    assert checkpoint_main(["export", str(newest), str(tiny / "w.pt")]) == 2
    assert "it names posix.system, which no checkpoint of ours does" in capsys.readouterr().err
    assert checkpoint_main(["inspect", str(newest)]) == 2
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be read"):
        run_here(tiny_flags(tiny, *FLAGS, "--num_iters=2", "--resume=auto"))
    own.storage_meta = Evil(ran)
    write(newest, own)
    with pytest.raises(Unreadable, match="names posix.system"):
        read_weights(newest)
    own.storage_meta = None
    write(newest, own)
    call_it_bytes(newest, ran)
    with pytest.raises(Unreadable, match="BytesStorageMetadata"):
        checkpoint.read(newest, TENSOR)
    with pytest.raises(Unreadable, match="BytesStorageMetadata"):
        checkpoint.load(newest, {TENSOR: torch.zeros(1, 32, 32)}, alone=True)
    torch.save({"w": Evil(ran)}, tiny / "evil.pt")
    (tiny / "evil.safetensors").write_bytes(evil)
    for suffix in ("pt", "safetensors"):
        with pytest.raises(ValueError, match="holds no weights"):
            load_tensors(tiny / f"evil.{suffix}")
    (tiny / "stats/global_means.npy").write_bytes(evil)
    with pytest.raises(ValueError, match=r"global_means\.npy"):
        run_here(tiny_flags(tiny, "--run_num=b"))
    assert not ran.exists()


def call_it_bytes(folder: Path, ran: Path) -> None:
    """Say of a tensor that it is bytes: dcp unpickles those."""
    (folder / "evil.distcp").write_bytes(pickle.dumps(Evil(ran)))
    own = described(folder)
    place = next(iter(own.storage_data.values()))
    place.relative_path, place.offset, place.length = "evil.distcp", 0, (folder / "evil.distcp").stat().st_size
    own.state_dict_metadata[TENSOR], own.storage_data[MetadataIndex(TENSOR)] = BytesStorageMetadata(), place
    write(folder, own)


def test_weights_run_nothing_though_nobody_looked_at_their_archive(tmp_path, monkeypatch):
    """Of two guards the second holds alone."""
    torch.save({"w": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    monkeypatch.setattr("utils.checkpoint.weights.check_archive", lambda path: None)
    with pytest.raises(ValueError, match="holds no weights"):
        load_tensors(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_bytes_would_have_run(newest, tiny):
    """What the test above refuses: dcp alone runs it."""
    call_it_bytes(newest, tiny / "ran")
    with contextlib.suppress(dcp.CheckpointException):
        dcp.load({TENSOR: torch.zeros(1, 32, 32)}, checkpoint_id=newest, no_dist=True)
    assert (tiny / "ran").exists()


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda place, size: setattr(place, "relative_path", "../secret"), "'../secret' is no file of this folder"),
        (lambda place, size: setattr(place, "relative_path", "/etc/passwd"), "is no file of this folder"),
        (lambda place, size: setattr(place, "length", 10**12), "a slice ends after 1,000,"),
        (lambda place, size: setattr(place, "length", 9), "has only 9 bytes"),
        (lambda place, size: setattr(place, "offset", -1), "-1 is no count"),
        (lambda place, size: setattr(place, "transform_descriptors", ["zstd"]), "ours are plain"),
        (lambda place, size: setattr(size, "size", torch.Size([10**6] * 3)), "do not make up"),
        (lambda place, size: setattr(size.chunks[0], "offsets", torch.Size([0, 0, 1])), "do not make up"),
        (lambda place, size: setattr(size, "chunks", size.chunks * 2), "do not make up"),
        (lambda place, size: setattr(size, "chunks", []), "do not make up"),
        (lambda place, size: (setattr(size, "size", torch.Size([0, -1])), setattr(size, "chunks", [])), "no count"),
        (lambda place, size: setattr(size.properties, "dtype", torch.complex128), "has only"),
    ],
)
def test_a_description_that_does_not_fit_the_files(newest, change, found):
    """Before a byte is read, and memory taken."""
    own = described(newest)
    index, place = next(iter(own.storage_data.items()))
    change(place, own.state_dict_metadata[index.fqn])
    write(newest, own)
    with pytest.raises(Unreadable, match=found):
        checkpoint.metadata(newest)


def test_slices_that_share_their_bytes(newest):
    own = described(newest)
    places = [place for index, place in own.storage_data.items() if index.fqn.startswith(("model.", "optimizer."))]
    largest = max(places, key=lambda place: place.length)
    for place in places:
        place.offset, place.length = largest.offset, largest.length
    write(newest, own)
    with pytest.raises(Unreadable, match="slices lie upon each other"):
        checkpoint.metadata(newest)


def test_slices_that_cover_one_number_twice_and_another_never(newest):
    own = described(newest)
    tensor = own.state_dict_metadata[TENSOR]
    one, rows, columns = tensor.size
    tensor.chunks = [
        ChunkStorageMetadata(torch.Size([0, 0, 0]), torch.Size([one, rows - 1, columns])),
        ChunkStorageMetadata(torch.Size([0, 1, 0]), torch.Size([one, 1, columns])),
    ]
    (place,) = (place for index, place in own.storage_data.items() if index.fqn == TENSOR)
    own.storage_data |= {MetadataIndex(TENSOR, chunk.offsets): place for chunk in tensor.chunks}
    write(newest, own)
    with pytest.raises(Unreadable, match=f"the slices of {TENSOR} do not make up"):
        checkpoint.metadata(newest)


def test_a_slice_without_a_place(newest):
    own = described(newest)
    own.storage_data.pop(next(iter(own.storage_data)))
    write(newest, own)
    with pytest.raises(Unreadable, match="nothing says where model.pos_embed lies"):
        checkpoint.metadata(newest)


@pytest.mark.parametrize(
    "entry, value",
    [
        ("iteration", -1), ("iteration", "2"), ("iteration", True), ("epochs", 1.5), ("is_finished", None),
        ("epoch_losses", ["x"]), ("skipped", 1e3), ("scaler", []), ("config", {}), ("versions", None),
        ("best", {"loss": 1.0, "name": "../../other"}), ("best", {"loss": 1.0, "name": None}), ("best", None),
        ("best", {"loss": float("nan"), "name": "00000002-validated"}), ("best", {"loss": 1.0, "name": "0" * 300}),
        ("layout", {"ranks": "all"}), ("data", "none"), ("scaler", {"x": 1}),
        ("scaler", {**torch.amp.GradScaler("cpu").state_dict(), "scale": "a"}),
    ],
)  # fmt: skip
def test_an_info_that_no_run_writes(newest, entry, value):
    info = read_info(newest)
    (newest / "info.json").unlink()
    write_info(newest, {**info, entry: value})
    with pytest.raises(Unreadable, match=f"info.json: {entry} is .*, which no run writes"):
        read_info(newest)


@pytest.mark.parametrize("name", ["../../stats/global_means.npy", "/etc/passwd", "a/b"])
def test_files_out_of_the_folder(newest, name):
    info = json.loads((newest / "info.json").read_text())
    info = {**info, "format": 1, "files": {name: 1}}
    (newest / "info.json").write_text(json.dumps(info))
    with pytest.raises(Unreadable, match="files is .*, which no run writes"):
        read_info(newest)


def test_an_info_that_is_nested_without_end(newest):
    (newest / "info.json").write_text("[" * 10**6)
    with pytest.raises(Unreadable, match="not complete .ValueError in info.json"):
        read_info(newest)


@pytest.mark.parametrize(
    "content, found",
    [
        (b"\x80\4Nr\0\0\0\x08.", "LONG_BINPUT"),
        (DOUBLED, "a tuple of more than 256 parts"), (NESTED, "a tuple of more than 256 parts"),
        (b"\x80\4\x85.", "runs dry"), (b"\x80\4N(\x85.", "runs dry"), (b"\x80\4h\0.", "out of range"),
        (LONG, "a tensor of 1000 dimensions"),
        (b"\x80\4)\x91.", "FROZENSET"),
        (pickle.dumps({i * (2**61 - 1): None for i in range(1, 9)}), "a number above 1,152,921,504,606,846,976"),
        (b"junk", "not enough data in stream"),
    ],
)  # fmt: skip
def test_descriptions_that_grow(newest, content, found):
    (newest / ".metadata").write_bytes(content)
    with pytest.raises(Unreadable, match=found):
        checkpoint.metadata(newest)


def test_a_library_that_does_not_say_what_is_wrong(newest, monkeypatch):
    """As that of PyTorch 2.11: the description was read before, and the reason is told."""

    def load(*args: object, **options: object) -> None:
        raise dcp.CheckpointException("", {})

    monkeypatch.setattr(dcp, "load", load)
    (newest / ".metadata").write_bytes(b"junk")
    with pytest.raises(Unreadable, match="not enough data in stream"):
        checkpoint.load(newest, {TENSOR: torch.zeros(1, 32, 32)}, alone=True)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "info.json"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_files_that_are_none(newest, tiny, file, kind):
    """A pipe would be waited for; a link may lead anywhere."""
    path = newest / file
    path.rename(tiny / "elsewhere")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tiny / "elsewhere")
    with pytest.raises(Unreadable, match="no regular file|No such file"):
        read_info(newest)
    if file == ".metadata":
        with pytest.raises(Unreadable, match="no regular file"):
            checkpoint.metadata(newest)


def test_an_info_without_its_checksums(newest):
    info = json.loads((newest / "info.json").read_text())
    for lacking in ("checksum of .metadata", "checksum of this file"):
        (newest / "info.json").write_text(json.dumps({name: x for name, x in info.items() if name != lacking}))
        with pytest.raises(Unreadable, match="another checksum"):
            read_info(newest)
    (newest / ".metadata").unlink()
    (newest / "info.json").write_text(json.dumps({**info, "format": 1, "files": {}}))
    with pytest.raises(Unreadable, match="No such file"):
        read_info(newest)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "info.json"])
def test_a_flipped_bit_is_found_and_named(tiny, newest, file):
    """At any place: twenty of them, spread over the file."""
    path = newest / file
    content = path.read_bytes()
    for i in range(20):
        at = i * (len(content) - 1) // 19
        damaged = bytearray(content)
        damaged[at] ^= 1 << (i % 8)
        path.write_bytes(damaged)
        with pytest.raises(Unreadable, match=file):
            read_info(newest)
            assert file == "__0_0.distcp"  # the others are found before anything is made of them
            everything = {
                name: torch.empty(x.size, dtype=x.properties.dtype)
                for name, x in checkpoint.metadata(newest).state_dict_metadata.items()
            }
            checkpoint.load(newest, everything, alone=True)
    path.write_bytes(content)
    read_weights(newest)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tiny):
    argv = tiny_flags(tiny, "--num_iters=6", "--checkpoint_every=2", "--keep_checkpoints=9")
    folder = run_here(argv)
    finished, newest, *_ = checkpoint.find(folder / "checkpoints")
    shutil.rmtree(finished)
    slice_of = described(newest).storage_data
    (place,) = {place.offset: place for index, place in slice_of.items() if index.fqn == "model.pos_embed"}.values()
    path = newest / place.relative_path
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 2] ^= 16
    path.write_bytes(content)
    run_here([*argv, "--resume=auto"])
    log = (run_folder(argv) / "out.log").read_text()
    assert "model.pos_embed in __0_0.distcp has another checksum than when it was written" in log
    assert "Resumed after 2 iterations" in log


@pytest.mark.parametrize("format", [1, 2])
def test_checkpoints_with_no_checksums_or_with_others_are_read(newest, tiny, format):
    """Those of version 0.1.0, and those that came after it."""
    own, weights = described(newest), read_weights(newest)
    for place in own.storage_data.values():
        del place.digest
        if format == 2:
            place.checksum = 1
    write(newest, own)
    info = json.loads((newest / "info.json").read_text())
    told = {name: x for name, x in info.items() if not name.startswith("checksum")} | {"format": format}
    if format == 2:
        told |= {METADATA_CHECKSUM: 1}
        told[CHECKSUM] = _checksum(told)
    (newest / "info.json").write_text(json.dumps(told))
    assert all(torch.equal(x, weights[name]) for name, x in read_weights(newest).items())


def test_other_programs_read_our_checkpoints(newest):
    """The checksums are of no harm to dcp alone."""
    ours = checkpoint.read(newest, "model.")
    theirs = {name: torch.empty_like(x) for name, x in ours.items()}
    dcp.load(theirs, checkpoint_id=newest, no_dist=True)
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4095, 4096, 4097, 2**20, 2**20 + 5, 3 * 2**20 + 4100])
def test_a_checksum_tells_each_bit_and_the_length(tmp_path, size):
    path = tmp_path / "x"
    content = os.urandom(size)
    path.write_bytes(b"abc" + content + b"xyz")
    found = checksum(path, 3, size)
    for at in {0, size // 2, size - 1} if size else ():
        damaged = bytearray(content)
        damaged[at] ^= 128
        path.write_bytes(b"---" + damaged)
        assert checksum(path, 3, size) != found
    path.write_bytes(content + b"\0")
    assert checksum(path, 0, size) == found != checksum(path)
    with pytest.raises(EOFError):
        checksum(path, 0, size + 2)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("bit", range(64))
def test_a_checksum_tells_bits_that_change_together(tmp_path, bit):
    """Two, four or all words of some pages whose bit is stuck at one; two words that change against each other."""
    path, mask = tmp_path / "x", np.uint64(1 << bit)
    for rows in (1, 2, 4):
        pages = np.random.default_rng(bit).integers(0, 2**64, (rows, 512), np.uint64)
        pages[:, :16] &= ~mask
        path.write_bytes(pages)
        found = checksum(path)
        for count in (1, 2, 4, 8, 16, 512):
            path.write_bytes(pages | np.where(np.arange(512) < count, mask, np.uint64(0)))
            assert checksum(path) != found
        pages[0, 0] |= mask
        path.write_bytes(pages)
        found = checksum(path)
        pages[0, :2] ^= mask
        path.write_bytes(pages)
        assert checksum(path) != found
