"""A model of a disk that loses its power: from a record of operations, every state that may be found afterwards.

A sync makes the content of a file durable, and a sync of a folder the names in it; nothing else does. Of what came
after the last sync,

- any subset of the changes to names may be there, and each change is there wholly or not (a rename is one change);
- a file has its content as of the last sync, or the whole new one, or the room allocated for it, with zeros, or new
  content torn at multiples of 512 bytes: any first part (the rest cut off or old), any last part, all but one part.

Bounds: of more than MANY unsynced changes in one folder (none occurs in a program that is right) subsets are only the
first so many, all but one, and each alone. Where several files are unsynced, one at a time takes all its forms while
the others are all old or all new.
"""

import hashlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from small_training import WatchedDisk

SECTOR = 512
MANY = 5


class RecordingDisk(WatchedDisk):
    """Records every operation once it is done, with paths relative to a folder.

    Attributes:
        log: (operation, ...) in order.
    """

    def __init__(self, base, log=None):
        self.base = base
        self.log = [] if log is None else log
        self.paths = {}
        self.turn = threading.RLock()  # operations of several threads are done in the order of the log

    def watch(self, name, act, *arguments):
        with self.turn:
            return self.record(name, act, *arguments)

    def record(self, name, act, *arguments):
        result = act(*arguments)
        entry = []
        for a in arguments:
            if isinstance(a, Path):
                entry.append(str(a.relative_to(self.base)))
            else:
                entry.append(a)
        if name in ("create", "open_end"):
            self.paths[result] = entry[0]
        elif isinstance(arguments[0], int):
            entry[0] = self.paths[arguments[0]]
        if name == "write":
            entry[1] = bytes(entry[1][:result])
        self.log.append((name, *entry))
        return result


@dataclass
class File:
    """A file: what is durable, what came after, and the size that was allocated since."""

    synced: bytes = b""
    content: bytearray = field(default_factory=bytearray)
    allocated: int = 0

    @property
    def is_pending(self) -> bool:
        return bytes(self.content) != self.synced or self.allocated > 0

    def write(self, offset: int, data: bytes) -> None:
        self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
        self.content[offset : offset + len(data)] = data

    def truncate(self, nbytes: int) -> None:
        del self.content[nbytes:]

    def sync(self) -> None:
        self.synced = bytes(self.content)
        self.allocated = 0

    def forms(self) -> list[bytes]:
        """Return every content that the file may have, the old one first and the new one second."""
        new = bytes(self.content)
        size = max(self.allocated, len(self.content))
        old = self.synced[:size].ljust(size, b"\0")
        contents = [self.synced, new, old]
        for at in range(SECTOR, len(new), SECTOR):
            contents += [new[:at], new[:at] + old[at:], old[:at] + new[at:]]
            contents.append(new[: at - SECTOR] + old[at - SECTOR : at] + new[at:])
        return list(dict.fromkeys(contents))


@dataclass
class Folder:
    """A folder: names that are durable, and changes (name that goes, name that comes, what it names) after that."""

    synced: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)

    def now(self) -> dict:
        return self._after(self.pending)

    def sync(self) -> None:
        self.synced = self.now()
        self.pending = []

    def forms(self) -> list[dict]:
        """Return every set of names that may be there."""
        return list(map(self._after, _subsets(self.pending)))

    def _after(self, changes) -> dict:
        names = dict(self.synced)
        for gone, come, node in changes:
            names.pop(gone, None)
            if come is not None:
                names[come] = node
        return names


def _subsets(items: list) -> Iterator[tuple]:
    if len(items) <= MANY:
        for number in range(len(items) + 1):
            yield from itertools.combinations(items, number)
        return
    for number in range(len(items) + 1):
        yield tuple(items[:number])
        yield tuple(items[:number] + items[number + 1 :])
        yield tuple(items[number : number + 1])


class Model:
    """What a disk holds after some operations. Starts with what is in a folder, durable."""

    def __init__(self, base: Path) -> None:
        self.folders = {".": Folder()}
        for path in sorted(base.rglob("*")):
            name = str(path.relative_to(base))
            if path.is_dir():
                node = name
            else:
                node = File(path.read_bytes(), bytearray(path.read_bytes()))
            self.folders[str(Path(name).parent)].synced[path.name] = node
            if path.is_dir():
                self.folders[name] = Folder()

    def file(self, path: str) -> File:
        return self._folder_of(path).now()[os.path.basename(path)]

    def _folder_of(self, path: str) -> Folder:
        return self.folders[os.path.dirname(path) or "."]

    def _change(self, path: str, gone, come, node) -> None:
        self._folder_of(path).pending.append((gone, come, node))

    def apply(self, operation: str, *entry) -> None:
        """Carry out one entry of a log."""
        path = entry[0]
        name = os.path.basename(path)
        if operation == "make_folder":
            self.folders[path] = Folder()
            self._change(path, None, name, path)
        elif operation == "create" and name in self._folder_of(path).now():
            self.file(path).content.clear()
        elif operation == "create" or operation == "make_new":
            self._change(path, None, name, File())
        elif operation == "replace_link":
            self._change(path, None, name, File(entry[1].encode(), bytearray(entry[1].encode())))
        elif operation == "allocate":
            self.file(path).allocated = entry[1]
        elif operation == "write":
            self.file(path).write(entry[2], entry[1])
        elif operation == "truncate":
            self.file(path).truncate(entry[1])
        elif operation == "sync":
            self.file(path).sync()
        elif operation == "rename":
            self._change(path, name, os.path.basename(entry[1]), self.file(path))
        elif operation == "remove":
            self._change(path, name, None, None)
        elif operation == "sync_folder":
            self.folders[path].sync()
        else:
            assert operation in ("close", "open_end"), operation

    def states(self) -> Iterator[dict]:
        """Yield every state after a power cut now: paths to content, None for folders."""
        pending = [path for path, folder in self.folders.items() if folder.pending]
        for forms in itertools.product(*(self.folders[path].forms() for path in pending)):
            chosen = dict(zip(pending, forms, strict=True))
            tree = dict(self._tree(".", chosen))
            yield from _with_contents(tree)

    def _tree(self, path: str, chosen: dict) -> Iterator[tuple]:
        for name, node in chosen.get(path, self.folders[path].synced).items():
            node_path = name if path == "." else f"{path}/{name}"
            yield node_path, node
            if isinstance(node, str):
                yield from self._tree(node, chosen)


def _with_contents(tree: dict) -> Iterator[dict]:
    files = {path: node for path, node in tree.items() if isinstance(node, File)}
    pending = {path: node.forms() for path, node in files.items() if node.is_pending}
    base = {}
    for path in tree:
        if path in files:
            base[path] = files[path].synced
        else:
            base[path] = None
    if not pending:
        yield base
    for form_index in (0, 1):
        other_contents = {path: forms[min(form_index, len(forms) - 1)] for path, forms in pending.items()}
        for path, forms in pending.items():
            for form in forms:
                yield {**base, **other_contents, path: form}


def digest(state: dict) -> bytes:
    """Return a key that is equal for equal states only."""
    state_hash = hashlib.blake2b(digest_size=16)
    for path, content in sorted(state.items()):
        state_hash.update(repr((path, None if content is None else hashlib.blake2b(content).digest())).encode())
    return state_hash.digest()


def write_out(state: dict, base: Path) -> None:
    """Make a folder hold a state."""
    for path, content in sorted(state.items()):
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)
