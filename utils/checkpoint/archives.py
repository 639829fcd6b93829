"""Archives of torch.save, and pickles, from anywhere: looked at before anything is made of them.

`torch.load(weights_only=True)` runs no code. But what it makes can be larger than the file: members that are
compressed, or lie upon each other; storages that claim more than their bytes; `bytearray(10**12)`, which it allows.
"""

import collections
import io
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

# What pickles of tensors, and of dcp's description of them, are made of. No PUT: it could name any place in the memo.
OPERATIONS = set(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS MEMOIZE BINGET "
    "LONG_BINGET STACK_GLOBAL NEWOBJ REDUCE BUILD".split()
)
# Bytes of a number.
STORAGES = {f"{kind}Storage": size for size, kinds in {
    1: "Untyped Bool Byte Char", 2: "Short Half BFloat16", 4: "Int Float", 8: "Long Double ComplexFloat",
    16: "ComplexDouble",
}.items() for kind in kinds.split()}  # fmt: skip
OF_TORCH = OPERATIONS - {"STACK_GLOBAL", "NEWOBJ"} | {"GLOBAL", "BINPUT", "LONG_BINPUT", "BINPERSID"}
CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}  # what lies below stays the same object
MOST_PARTS, LARGEST_INT = 256, 2**60  # above it many numbers have one hash
# Records of a zip archive.
END, END64, LOCATOR64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")


def _effect(operation: pickletools.OpcodeInfo) -> tuple[int, bool, int]:
    """Return how many objects it takes from the stack, whether also all from a mark on, and how many it leaves."""
    before, mark = operation.stack_before, pickletools.markobject
    return before.index(mark) if mark in before else len(before), mark in before, len(operation.stack_after)


EFFECTS = {operation.name: _effect(operation) for operation in pickletools.opcodes}


def check_operations(content: bytes, allowed: set[str] = OPERATIONS) -> None:
    """Raise pickle.UnpicklingError for a pickle with other operations, or that grows when it is read.

    A tuple has few parts, and those of its parts count, too, as often as they stand in it: to hash tuples of tuples
    of the same tuple would take for ever, and to hash a million of them, each in the next, more stack than there is.
    """
    stack: list[int] = []  # of each object how many parts have to be hashed with it
    marks, memo = [0], []
    try:
        for operation, argument, _ in pickletools.genops(content):
            name = operation.name
            if name not in allowed:
                raise pickle.UnpicklingError(f"it has the operation {name}, which no pickle of ours does")
            if isinstance(argument, int) and abs(argument) >= LARGEST_INT:
                raise pickle.UnpicklingError(f"it has a number above {LARGEST_INT:,}")
            if name == "MARK":
                marks.append(len(stack))
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                place = len(memo) if name == "MEMOIZE" else argument
                if place > len(memo):
                    raise pickle.UnpicklingError("its memo has holes")
                memo[place : place + 1] = [stack[-1]]
            else:
                count, is_marked, left = EFFECTS[name]
                first = (marks.pop() if is_marked else len(stack)) - count
                if first < marks[-1]:
                    raise pickle.UnpicklingError("its stack runs dry")
                parts = stack[first:]
                stack[first:] = [parts[0] if name in CHANGES else 1 + sum(parts)] * left
                if stack and stack[-1] > MOST_PARTS:
                    raise pickle.UnpicklingError(f"it has a tuple of more than {MOST_PARTS} parts")
    except (ValueError, IndexError) as error:  # of genops; of a memo, or a stack, that has less
        raise pickle.UnpicklingError(str(error)) from None


class _Look(pickle.Unpickler):
    """Makes nothing, and compares what each storage claims with the bytes that it has."""

    def __init__(self, content: bytes, sizes: dict[str, int]):
        super().__init__(io.BytesIO(content))
        self.sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: collections.OrderedDict()  # empty: many of one long list would fill the memory
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return lambda *_: None
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which weights do not")

    def persistent_load(self, pid: Any) -> None:
        kind, size, key, _, count = pid
        if kind != "storage" or self.sizes.get(f"data/{key}", -1) != count * size:
            raise pickle.UnpicklingError(f"storage {key} claims another size than it has")


def check_archive(file: Path | BinaryIO) -> None:
    """Raise ValueError or pickle.UnpicklingError for an archive that would grow, or that torch.save does not write."""
    with zipfile.ZipFile(file) as archive:
        members, stream = archive.infolist(), archive.fp
        if any(x.compress_type != zipfile.ZIP_STORED or x.file_size != x.compress_size for x in members):
            raise ValueError("an archive that is compressed: torch writes none")
        stream.seek(0, 2)
        total = stream.tell()
        _check_end(stream, total)
        if sum(x.file_size for x in members) > total:
            raise ValueError("an archive whose members lie upon each other")
        names = {x.orig_filename.partition("/")[2]: x for x in members}
        if len({name.lower() for name in names}) < len(members) or any(x.filename != x.orig_filename for x in members):
            raise ValueError("an archive whose members share a name: two readers could take two of them")
        if "data.pkl" not in names:
            raise ValueError("an archive without data.pkl: torch writes it")
        content = archive.read(names["data.pkl"])
    check_operations(content, OF_TORCH)
    _Look(content, {name: x.file_size for name, x in names.items()}).load()


def _check_end(stream: BinaryIO, total: int) -> None:
    """Raise ValueError unless the list of members ends where its end is told: two readers could see two lists."""
    stream.seek(max(total - END.size, 0))
    at, mark = total - END.size, b"PK\5\6"
    found = stream.read(END.size)
    if len(found) < END.size or not found.startswith(mark):
        raise ValueError("an archive with something behind its end")
    *_, size, start, _ = END.unpack(found)
    before = at - LOCATOR64.size - END64.size
    if before >= 0:
        stream.seek(before)
        *head, size64, start64 = END64.unpack(stream.read(END64.size))
        locator, _, place, _ = LOCATOR64.unpack(stream.read(LOCATOR64.size))
        marks = head[0] == b"PK\6\6", locator == b"PK\6\7"
        if any(marks):
            if not all(marks) or not place == before == start64 + size64 or start not in (start64, 2**32 - 1):
                raise ValueError("an archive with two ends")
            return
    if start + size != at:
        raise ValueError("an archive with two beginnings")
