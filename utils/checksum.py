"""A checksum of many bytes, as fast as memory: the CRC-32 of sums. No torch.

The bytes are a table of rows of 4096. Each row is added up, in words of 32 bits and without a carry that is lost: bits
that a line or a cell holds at one all count the same way. So is each column, of 64 bits: words of a row that change
against each other, or change places, are in two columns. (A CRC of all bytes takes three times as long.)
"""

import zlib
from pathlib import Path

import numpy as np

BLOCK = 512 * 8  # bytes of a row
PIECE = 2**20  # bytes read at a time: they stay in the processor's cache


class Checksum:
    """The checksum of `length` bytes that come piece by piece: of whole blocks, but for the last one."""

    def __init__(self, length: int):
        self._rows = zlib.crc32(str(length).encode())
        self._columns = np.zeros(BLOCK // 8, "<u8")

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        missing = -len(piece) % BLOCK
        words = np.frombuffer(bytes(piece) + bytes(missing) if missing else piece, "<u8").reshape(-1, BLOCK // 8)
        self._rows = zlib.crc32(words.view("<u4").sum(axis=1, dtype="<u8"), self._rows)
        self._columns += words.sum(axis=0)

    @property
    def value(self) -> int:
        return zlib.crc32(self._columns, self._rows)


def checksum(path: Path, offset: int = 0, length: int | None = None) -> int:
    """Return the checksum of `length` bytes of a file, or of all. Raises OSError, and EOFError where it is shorter."""
    left = path.stat().st_size - offset if length is None else length
    found, buffer = Checksum(left), bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            piece = memoryview(buffer)[: min(left, PIECE)]
            rest = piece
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise EOFError(f"{path} ends early: {left - len(piece) + len(rest)} bytes are missing")
                rest = rest[count:]
            found.add(piece)
            left -= len(piece)
    return found.value
