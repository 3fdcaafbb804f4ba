"""The header of a checkpoint file: its first 4,096 bytes, which say what the rest must be.

One line of JSON: {"format": 2, "nbytes", "index": [offset, nbytes], "xxh3_128": [digest, digest]}; a line with the
digest of that line; zeros. The first digest covers the file from byte 4096 to the index, the second one the rest.
The header is written last: without it, no file is a checkpoint.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcdist.errors import CheckpointDamaged, CheckpointMismatch

FORMAT = 2
HEADER_BYTES = 4096


@dataclass(frozen=True)
class Header:
    """Content of a header.

    Attributes:
        nbytes: size of the file.
        index_offset: offset of the index in the file.
        index_nbytes: size of the index.
        arrays_digest: xxh3-128 of the bytes from `HEADER_BYTES` to the index, in hexadecimal.
        index_digest: xxh3-128 of the bytes from the index to the end of the file, in hexadecimal.
    """

    nbytes: int
    index_offset: int
    index_nbytes: int
    arrays_digest: str
    index_digest: str

    def to_bytes(self) -> bytes:
        """Return the first `HEADER_BYTES` of the file."""
        fields = {
            "format": FORMAT,
            "nbytes": self.nbytes,
            "index": (self.index_offset, self.index_nbytes),
            "xxh3_128": (self.arrays_digest, self.index_digest),
        }
        line = json.dumps(fields)
        text = f"{line}\n{_digest(line)}\n"
        return text.encode().ljust(HEADER_BYTES, b"\0")


def parse_header(data: bytes, path: Path) -> Header:
    """Return the header in the first bytes of the file at `path`.

    Raises:
        CheckpointDamaged: if they are not, byte for byte, a header that `to_bytes` returns.
        CheckpointMismatch: if a newer hpcdist wrote the file.
    """
    try:
        if data.count(b"\n") != 2:
            raise ValueError("no header, which was not written or is cut off")
        line, digest, zeros = data.decode().split("\n")
        if len(data) != HEADER_BYTES or digest != _digest(line) or zeros.strip("\0"):
            raise ValueError("other bytes than were committed")
        fields = json.loads(line)
        _check_format(fields["format"], path)
        index_offset, index_nbytes = fields["index"]
        arrays_digest, index_digest = fields["xxh3_128"]
        header = Header(
            nbytes=fields["nbytes"],
            index_offset=index_offset,
            index_nbytes=index_nbytes,
            arrays_digest=arrays_digest,
            index_digest=index_digest,
        )
        if header.to_bytes() != data or not _is_sound(header):
            raise ValueError(line[:80])
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        reason = " ".join(str(error).split())[:80]
        raise CheckpointDamaged(
            f"restore: expected the header of a checkpoint in {path}, got {reason}; use another checkpoint."
        ) from None
    return header


def is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_sound(header: Header) -> bool:
    """Return whether the parts lie within the file. The digest does not show it: anybody can compute a digest."""
    numbers = (header.nbytes, header.index_offset, header.index_nbytes)
    if not all(map(is_count, numbers)):
        return False
    if type(header.arrays_digest) is not str or type(header.index_digest) is not str:
        return False
    index_end = header.index_offset + header.index_nbytes
    return HEADER_BYTES <= header.index_offset <= index_end <= header.nbytes


def _check_format(stored: object, path: Path) -> None:
    if type(stored) is not int or stored < 1:
        raise ValueError(f"format {stored!r}"[:80])
    if stored > FORMAT:
        raise CheckpointMismatch(
            f"restore: expected checkpoint format {FORMAT}, got {stored} in {path}; install the hpcdist that wrote it, "
            f"or move the file away to resume from an older one."
        )
    if stored < FORMAT:
        raise ValueError(f"format {stored}, which this hpcdist does not read any more")


def _digest(line: str) -> str:
    return xxhash.xxh3_128_hexdigest(line.encode())
