"""Generations: each attempt of a job writes into its own folder, `gen-0001`, `gen-0002`, ...

A process of an earlier attempt that is still alive (a zombie) writes only into its own folder, and detects at its next
commit that it has been replaced. Only pruning modifies the folders of earlier attempts. Readers use the highest
generation that has a checkpoint.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.safe_open import read_text

_FOLDER = re.compile(r"gen-(\d{4,18})$")  # 18 digits fit into 63 bits
_MANIFEST = re.compile(r"step-(\d{8,})\.json$")
_STEP = re.compile(r"step-(\d+)$")
#: Value of `AttemptNote.restored` until the attempt has found a checkpoint to resume from.
RESTORING = ""
#: The file in a generation's folder that holds the attempt's record.
_ATTEMPT = "attempt.json"
_MAX_NOTE_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Place:
    """Where a checkpoint is stored. Places compare by age: the newer one is larger.

    Attributes:
        generation: number of the attempt that wrote it.
        step: optimizer steps taken.
    """

    generation: int
    step: int

    def __str__(self) -> str:
        return f"{folder_name(self.generation)}/step-{self.step:08d}"

    def manifest(self, root: Path) -> Path:
        """Return the path of its manifest."""
        return root / f"{self}.json"


def folder_name(generation: int) -> str:
    """Return the name of a generation's folder."""
    return f"gen-{generation:04d}"


def generations(root: Path) -> list[int]:
    """Return the generations that have a folder, oldest first.

    Raises:
        OSError: if the root exists and cannot be read.
    """
    return sorted(int(match[1]) for name in names_in(root) if (match := _FOLDER.match(name)))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; empty if the folder does not exist.

    Raises:
        OSError: if it cannot be read.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def places(root: Path) -> list[Place]:
    """Return the places of all manifests, unverified, oldest first.

    Raises:
        OSError: if a folder exists and cannot be read.
    """
    return sorted(
        Place(generation, int(match[1]))
        for generation in generations(root)
        for name in names_in(root / folder_name(generation))
        if (match := _MANIFEST.match(name))
    )


def make_generation(disk: Disk, root: Path, number: int | None = None) -> int:
    """Make the folder of a new attempt and return its number, which is unique.

    Args:
        disk: file system calls.
        root: the folder of all generations; created if missing.
        number: number of the attempt, if it has one; default: the next.

    Raises:
        OSError: if the file system refuses.
    """
    durable.make_folders(disk, root)
    if number is not None:
        durable.make_folders(disk, root / folder_name(number))
        return number
    while True:
        number = max(generations(root), default=0) + 1
        try:
            disk.make_folder(root / folder_name(number))
        except FileExistsError:  # another attempt took this number first
            continue
        disk.sync_folder(root)
        return number


@dataclass(frozen=True)
class AttemptNote:
    """The record of an attempt.

    Attributes:
        generation: number of the attempt.
        restored: the checkpoint that it resumed from; None for a new run, `RESTORING` if it died before the restore.
        has_ended: it ended in an orderly way: stopped or finished.
        has_trained: it reached a save, successful or not, so the checkpoint that it resumed from can be trained on.
        has_committed: it left a checkpoint of a later step than it resumed from.
    """

    generation: int
    restored: str | None
    has_ended: bool
    has_trained: bool
    has_committed: bool

    @property
    def is_fruitless(self) -> bool:
        """Whether it died without progress."""
        return not (self.has_ended or self.has_committed)

    @property
    def first_step(self) -> int | None:
        """The step that it resumed from; -1 for a new run, None if it died before the restore."""
        return None if self.restored == RESTORING else step_of(self.restored)


def step_of(place: str | None) -> int:
    """Return the step of a `Place` in text form; -1 if there is none."""
    match = _STEP.search(place or "")
    return int(match[1]) if match else -1


def write_attempt(
    disk: Disk, root: Path, generation: int, restored: str | None, has_ended: bool, has_trained: bool
) -> None:
    """Write the record of an attempt; see `AttemptNote`.

    Raises:
        OSError: if the file system refuses.
    """
    text = json.dumps({"restored": restored, "has_ended": has_ended, "has_trained": has_trained})
    durable.replace_text(disk, root / folder_name(generation) / _ATTEMPT, text)


def fruitless_attempts(root: Path, before: int, first_step: int | None = None) -> list[AttemptNote]:
    """Return the consecutive attempts right before a generation that died without progress, newest first.

    An attempt made progress if it left a checkpoint of a later step than it resumed from, or if the next attempt
    resumed from a later step, from a copy in memory. Attempts without a record (they died earlier, or are not
    restarted automatically) are ignored.

    Args:
        root: the folder of all generations.
        before: the generation.
        first_step: the step that its attempt resumes from, if known.

    Raises:
        OSError: if a folder cannot be read.
    """
    found: list[AttemptNote] = []
    last = {place.generation: place.step for place in places(root)}
    for generation in reversed([number for number in generations(root) if number < before]):
        attempt = _read_attempt(root, generation, last.get(generation, -1))
        if attempt is None and generation not in last:
            continue
        if attempt is None or not attempt.is_fruitless:
            break
        if first_step is not None and attempt.first_step is not None and first_step > attempt.first_step:
            break
        found.append(attempt)
        first_step = attempt.first_step if attempt.first_step is not None else first_step
    return found


def _read_attempt(root: Path, generation: int, last_step: int) -> AttemptNote | None:
    path = root / folder_name(generation) / _ATTEMPT
    try:
        content = json.loads(read_text(path, _MAX_NOTE_BYTES))
        restored = content["restored"] if type(content["restored"]) is str else None
        has_ended, has_trained = bool(content["has_ended"]), bool(content.get("has_trained"))
        return AttemptNote(generation, restored, has_ended, has_trained, last_step > step_of(restored))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def crashed_twice(attempts: list[AttemptNote]) -> set[int]:
    """Return the steps from which two of these attempts resumed before they died: their state may kill the job.

    An attempt that reached a save does not count: not its state killed it, but something else, such as a full disk.
    """
    steps = [attempt.first_step for attempt in attempts if not attempt.has_trained]
    return {step for step in steps if step is not None and step >= 0 and steps.count(step) >= 2}


def remove_generation(disk: Disk, root: Path, generation: int) -> None:
    """Remove the folder of an attempt if it holds nothing but the attempt's record.

    Raises:
        OSError: if the file system refuses.
    """
    folder = root / folder_name(generation)
    names = names_in(folder)
    if set(names) <= {_ATTEMPT}:
        for name in names:
            disk.remove(folder / name)
        disk.remove_folder(folder)
