"""Files of events, one line of JSON each: followed while they grow, and thinned before they cost time.

Whoever reads such a file again and again reads only what has been appended. An attempt of a long run commits a hundred
thousand checkpoints: of the older ones, every other line goes as often as the file has grown to its limit.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

#: A file is thinned when it is longer.
LIMIT_BYTES = 256 << 10
#: Ledgers of old attempts that are longer lose their commits.
SHORT_BYTES = 16 << 10
#: Commits at the end of a file that are kept when it is thinned.
N_LATEST = 500
#: Bytes that are read at a time. A longer line is no event.
_PIECE_BYTES = 1 << 20


class FollowedFile:
    """Reads what has been appended to a file since the last time.

    Args:
        path: path of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def new_lines(self) -> tuple[bool, Iterator[str]]:
        """Return whether the file is another one than before, and its lines from there on or its new lines.

        A last line that has no end yet comes now and again with the next ones. What is no regular file has no lines.

        Raises:
            OSError: if the file system refuses.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._restart(0), iter(())
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return self._restart(0), iter(())
        is_other = status.st_ino != self._inode or status.st_size < self._offset
        if is_other:
            self._restart(status.st_ino)
        return is_other, self._lines(descriptor)

    def _restart(self, inode: int) -> bool:
        """Begin at the start of a file; return True."""
        self._inode = inode
        self._offset = 0
        return True

    def _lines(self, descriptor: int) -> Iterator[str]:
        tail = b""
        try:
            while piece := os.pread(descriptor, _PIECE_BYTES, self._offset + len(tail)):
                *lines, tail = (tail + piece).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    yield line.decode(errors="replace")
                if len(tail) > _PIECE_BYTES:  # no event: another program's bytes
                    self._offset += len(tail)
                    tail = b""
            if tail:
                yield tail.decode(errors="replace")
        finally:
            os.close(descriptor)


def thinned(lines: Sequence[str]) -> list[str]:
    """Return the lines of a ledger, oldest first, without every other one of its older commits."""
    commits = _commits_in(lines)
    dropped = set(commits[:-N_LATEST:2])
    return [line for number, line in enumerate(lines) if number not in dropped]


def with_last_commit(lines: Sequence[str]) -> list[str]:
    """Return the lines of a ledger, oldest first, without its commits but the last."""
    dropped = set(_commits_in(lines)[:-1])
    return [line for number, line in enumerate(lines) if number not in dropped]


def _commits_in(lines: Sequence[str]) -> list[int]:
    """Return the positions of commits in the lines of a ledger."""
    return [number for number, line in enumerate(lines) if _is_commit(line)]


def _is_commit(line: str) -> bool:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("event") == "commit"
