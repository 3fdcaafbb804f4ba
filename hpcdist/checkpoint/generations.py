"""Generations: each attempt of a job writes into a folder of its own, `gen-0001`, `gen-0002`, ...

A process of an earlier attempt that is still alive somewhere (a zombie) writes into its own folder only, and notices at
its next commit that it has been replaced. Pruning alone reaches into the folders of other attempts: checkpoints that
are not kept go, whoever wrote them. Readers take the highest generation that has a checkpoint.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.safe_open import read_text

_FOLDER = re.compile(r"gen-(\d{4,18})$")  # what fits into 63 bits
_MANIFEST = re.compile(r"step-(\d{8,})\.json$")
_STEP = re.compile(r"step-(\d+)$")
#: What an attempt went on from, as long as it has not found out.
RESTORING = ""
#: What an attempt started from, and whether it came to an end of its own.
_ATTEMPT = "attempt.json"
_MAX_NOTE_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Place:
    """Where a checkpoint lies. Later ones are larger.

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
        OSError: when the folder is there and cannot be read.
    """
    return sorted(int(match[1]) for name in names_in(root) if (match := _FOLDER.match(name)))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none when it is not there, or no longer.

    Raises:
        OSError: when it cannot be read.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def places(root: Path) -> list[Place]:
    """Return where there are manifests, oldest first; not verified.

    Raises:
        OSError: when a folder is there and cannot be read.
    """
    return sorted(
        Place(generation, int(match[1]))
        for generation in generations(root)
        for name in names_in(root / folder_name(generation))
        if (match := _MANIFEST.match(name))
    )


def make_generation(disk: Disk, root: Path, number: int | None = None) -> int:
    """Make the folder of a new attempt and return its number: no two attempts get the same one.

    Args:
        disk: the seam.
        root: the folder of all generations; made if need be.
        number: of the attempt, if it has one already; default: the next.

    Raises:
        OSError: when the file system refuses.
    """
    durable.make_folders(disk, root)
    if number is not None:
        durable.make_folders(disk, root / folder_name(number))
        return number
    while True:
        number = max(generations(root), default=0) + 1
        try:
            disk.make_folder(root / folder_name(number))
        except FileExistsError:  # another attempt was quicker
            continue
        disk.sync_folder(root)
        return number


@dataclass(frozen=True)
class AttemptNote:
    """What is written down of an attempt.

    Attributes:
        generation: its number.
        restored: the checkpoint that it went on from; None when it began anew, `RESTORING` when it did not come so far.
        has_ended: it came to an end of its own, be it that it was stopped or finished.
        has_trained: it has come to a save, whatever became of that: what it went on from can be trained on.
        has_committed: it has left a checkpoint of a later step than it went on from.
    """

    generation: int
    restored: str | None
    has_ended: bool
    has_trained: bool
    has_committed: bool

    @property
    def is_fruitless(self) -> bool:
        """Whether it died before it had a checkpoint."""
        return not (self.has_ended or self.has_committed)

    @property
    def first_step(self) -> int | None:
        """The step that it went on from; -1 when it began anew, None when it did not come so far."""
        return None if self.restored == RESTORING else step_of(self.restored)


def step_of(place: str | None) -> int:
    """Return the step of a place as a `Place` is written; -1 without one."""
    match = _STEP.search(place or "")
    return int(match[1]) if match else -1


def write_attempt(
    disk: Disk, root: Path, generation: int, restored: str | None, has_ended: bool, has_trained: bool
) -> None:
    """Write down what an attempt went on from, and how far it has come; see `AttemptNote`.

    Raises:
        OSError: when the file system refuses.
    """
    text = json.dumps({"restored": restored, "has_ended": has_ended, "has_trained": has_trained})
    durable.replace_text(disk, root / folder_name(generation) / _ATTEMPT, text)


def fruitless_attempts(root: Path, before: int, first_step: int | None = None) -> list[AttemptNote]:
    """Return the attempts right before a generation that died before they came further, the newest first.

    One came further if it left a checkpoint of a later step than it went on from, or if the next one went on from a
    later step than it: its copies in memory were found. Attempts that wrote nothing down (they died even earlier, or do
    not restart by themselves) do not count.

    Args:
        root: the folder of all generations.
        before: the generation.
        first_step: the step that its attempt goes on from, if that is known.

    Raises:
        OSError: when a folder cannot be read.
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
    """Return the steps that two of some fruitless attempts went on from: their state may be what kills the job.

    One that came to a save did not die of its state: of a full disk, or of a save that takes too long.
    """
    steps = [attempt.first_step for attempt in attempts if not attempt.has_trained]
    return {step for step in steps if step is not None and step >= 0 and steps.count(step) >= 2}


def remove_generation(disk: Disk, root: Path, generation: int) -> None:
    """Remove the folder of an attempt if nothing but its own notes is in it.

    Raises:
        OSError: when the file system refuses.
    """
    folder = root / folder_name(generation)
    names = names_in(folder)
    if set(names) <= {_ATTEMPT}:
        for name in names:
            disk.remove(folder / name)
        disk.remove_folder(folder)
