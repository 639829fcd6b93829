"""A checksum of many bytes, as fast as memory: the CRC-32 of the sums of each 512 words of 64 bits. No torch.

Any word that changes alone changes its sum. (A CRC of all bytes takes five times as long; it would also see words that
change places within four kilobytes, which no disk does.)
"""

import zlib
from pathlib import Path

import numpy as np

BLOCK = 512 * 8  # bytes that are added up
PIECE = 2**20  # bytes read at a time: they stay in the processor's cache


class Checksum:
    """The checksum of `length` bytes that come piece by piece: of whole blocks, but for the last one."""

    def __init__(self, length: int):
        self.value = zlib.crc32(str(length).encode())

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        missing = -len(piece) % BLOCK
        words = np.frombuffer(bytes(piece) + bytes(missing) if missing else piece, "<u8")
        self.value = zlib.crc32(words.reshape(-1, BLOCK // 8).sum(axis=1), self.value)


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
