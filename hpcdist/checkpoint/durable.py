"""The seam to the file system: every operation that changes what is on a disk goes through a `Disk`.

Replacing a file so that a crash leaves the old one or the new one takes four steps: write beside it, fsync the file,
rename, fsync the folder. (T. Pillai et al., All File Systems Are Not Created Equal, OSDI 2014.)
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

#: Files being written are called NAME.tmp-PID; a reader never looks at them.
_TEMPORARY = re.compile(r"\.tmp-\d+$")
#: What file systems say that do not take O_DIRECT, or cannot allocate.
_NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
#: Direct writes start and end at multiples of this, in the file and in memory.
ALIGNMENT_BYTES = 4096
#: Writes through the page cache are forced to the disk this often, so that the last sync has little left to do: a save
#: counts as stuck when no block is written for long.
SYNC_EVERY_BYTES = 256 << 20


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(descriptor: int, nbytes: int) -> None:
    """Allocate a file, or fail where a file system cannot: posix_fallocate would write the whole file twice then."""
    while _libc.fallocate(descriptor, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _repeat(act: Callable[..., None], *arguments: Path | int) -> None:
    """Carry out a change of names until no signal interrupts it: Python repeats all other calls, but not these."""
    while True:
        with contextlib.suppress(InterruptedError):
            return act(*arguments)


class Disk:
    """The operations themselves. Tests put another in its place, which counts, records, fails or dies.

    Raises:
        OSError: from every method, when the file system refuses.
    """

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Make one folder; its name is durable once its parent is synced. The umask takes from the mode."""
        _repeat(os.mkdir, path, mode)

    def create(self, path: Path) -> int:
        """Make an empty file and return its descriptor."""
        return os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Give a new file its size and its place on the disk, where the file system can."""
        try:
            fallocate(descriptor, nbytes)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at a place in the file; return how many bytes were written."""
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """Force a file's content to the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file. Network file systems report late errors here."""
        os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name in its folder, in place of what has that name."""
        _repeat(os.replace, path, to)

    def sync_folder(self, path: Path) -> None:
        """Force the names in a folder to the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file. A crash may bring it back until its folder is synced."""
        _repeat(os.unlink, path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        _repeat(os.rmdir, path)


def make_folders(disk: Disk, path: Path) -> None:
    """Make a folder and its parents, and their names durable.

    Raises:
        OSError: when the file system refuses.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    _sync_name_if_new(disk, missing[0].parent if missing else path)
    for folder in missing:
        try:
            disk.make_folder(folder)
        except FileExistsError:  # somebody else made it meanwhile
            continue
        disk.sync_folder(folder.parent)


def _sync_name_if_new(disk: Disk, folder: Path) -> None:
    """Make the name of an empty folder durable: who made it may have been killed before that."""
    if not os.listdir(folder):
        with contextlib.suppress(PermissionError):  # a parent that we cannot read: others made the folder
            disk.sync_folder(folder.parent)


def replace_file(disk: Disk, path: Path, blocks: Iterable[memoryview], nbytes: int | None = None) -> None:
    """Make `path` a file of the given content, wholly or not at all.

    Args:
        disk: the seam.
        path: the file to make or replace.
        blocks: its content in order. Those that are aligned, in memory and in length, go to the disk past the page
            cache, where the file system offers that: less work for the processor, and no memory is taken.
        nbytes: of all blocks, if that is known: the file gets its place on the disk at once.

    Raises:
        OSError: when the file system refuses; `path` is then as it was, or, if only its name could not be made durable,
            the new file.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        _write_file(disk, temporary, blocks, nbytes)
        disk.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what cannot be removed now is swept by the next attempt
            disk.remove(temporary)
        raise
    disk.sync_folder(path.parent)


def _write_file(disk: Disk, path: Path, blocks: Iterable[memoryview], nbytes: int | None) -> None:
    descriptor = disk.create(path)
    try:
        if nbytes is not None:
            disk.allocate(descriptor, nbytes)
        offset = n_cached = 0
        for block in blocks:
            n_cached += _write_block(disk, descriptor, block, offset)
            offset += len(block)
            if n_cached >= SYNC_EVERY_BYTES:
                n_cached = 0
                disk.sync(descriptor)
        disk.sync(descriptor)  # safety: sync before rename
    except BaseException:
        with contextlib.suppress(OSError):  # the first error tells
            disk.close(descriptor)
        raise
    disk.close(descriptor)


def _write_block(disk: Disk, descriptor: int, block: memoryview, offset: int) -> int:
    """Write a whole block, past the page cache as long as what is left of it is aligned; return bytes in the cache."""
    is_offered, n_cached = True, 0
    while block:
        is_direct = is_offered and _set_direct(descriptor, (len(block) | offset) % ALIGNMENT_BYTES == 0)
        try:
            done = disk.write(descriptor, block, offset)
        except OSError as error:
            if not (is_direct and error.errno == errno.EINVAL):
                raise
            is_offered = _set_direct(descriptor, False)  # its blocks are larger than ours
            continue
        block, offset = block[done:], offset + done
        n_cached += 0 if is_direct else done
    return n_cached


def _set_direct(descriptor: int, is_wanted: bool) -> bool:
    """Let writes pass by the page cache, or no longer; return whether they do now."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if is_wanted else flags & ~os.O_DIRECT
    if wanted != flags:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            return False
    return is_wanted


def replace_text(disk: Disk, path: Path, text: str) -> None:
    """Make `path` a file of some text, wholly or not at all.

    Raises:
        OSError: when the file system refuses; `path` is then as it was, or, if only its name could not be made durable,
            the new file.
    """
    data = text.encode()
    replace_file(disk, path, [memoryview(data)], len(data))


def sweep_temporary(disk: Disk, folder: Path, of: str = "") -> None:
    """Remove what writers that were killed left behind. Only one process may write there.

    Args:
        disk: the seam.
        folder: where.
        of: the name of the only file that is meant; default: all.

    Raises:
        OSError: when the file system refuses.
    """
    for name in os.listdir(folder):
        if _TEMPORARY.search(name) and name.startswith(of):
            disk.remove(folder / name)
