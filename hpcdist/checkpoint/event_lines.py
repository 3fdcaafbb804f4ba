"""Files of events, one line of JSON each: followed while they grow, and thinned before they cost time.

A reader that polls a file reads only the lines appended since its last look. An attempt of a long run commits a hundred
thousand checkpoints: whenever the file has grown to its limit, every other line of the older commits is dropped.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

#: A file is thinned when it is longer.
LIMIT_BYTES = 256 << 10
#: Ledgers of old attempts that are longer lose all commits but the last.
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
        """Return whether the file is another one than before, and its lines: all of another file, else the new ones.

        A last line that has no end yet comes at each look, until it has one. Only a regular file has lines.

        Raises:
            OSError: if the file system refuses.
        """
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            return self._no_file()
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return self._no_file()
        inode = status.st_ino
        is_shorter = status.st_size < self._offset
        is_other = is_shorter or inode != self._inode
        if is_other:
            self._restart(inode)
        return is_other, self._lines(descriptor)

    def _no_file(self) -> tuple[bool, Iterator[str]]:
        """Return no lines, of another file than before."""
        self._restart(0)
        return True, iter(())

    def _restart(self, inode: int) -> None:
        """Begin at the start of a file."""
        self._inode = inode
        self._offset = 0

    def _lines(self, descriptor: int) -> Iterator[str]:
        tail = b""
        try:
            while True:
                position = self._offset + len(tail)
                piece = os.pread(descriptor, _PIECE_BYTES, position)
                if not piece:
                    break
                content = tail + piece
                *lines, tail = content.split(b"\n")
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
    dropped = commits[:-N_LATEST:2]
    return _without(lines, dropped)


def with_last_commit(lines: Sequence[str]) -> list[str]:
    """Return the lines of a ledger, oldest first, with only the last of its commits."""
    commits = _commits_in(lines)
    return _without(lines, commits[:-1])


def _without(lines: Sequence[str], positions: Sequence[int]) -> list[str]:
    """Return the lines but those at some positions."""
    dropped = set(positions)
    retained_lines: list[str] = []
    for position, line in enumerate(lines):
        if position not in dropped:
            retained_lines.append(line)
    return retained_lines


def _commits_in(lines: Sequence[str]) -> list[int]:
    """Return the positions of commits in the lines of a ledger."""
    return [position for position, line in enumerate(lines) if _is_commit(line)]


def _is_commit(line: str) -> bool:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(content, dict):
        return False
    return content.get("event") == "commit"
