"""A folder of checkpoints: finds the newest that verifies; commits and prunes for the attempt that writes.

    step-00000300-0007.h5     step 300, as attempt 7 saved it
    latest.h5, best.h5        links to two of them, for people
    attempts/0007.jsonl       what attempt 7 did: making this file gave it its number
    run-id                    the name of the run, for its copies in memory

Any process may read. One attempt of a job writes: a process of an earlier one that is still alive looks for a later
attempt before it gives a file its name, and ends if there is one. Locks would not do: on network file systems they
outlive their holders, or do not hold. The newest checkpoint is the highest step of the latest attempt that has one.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.event_lines import (
    LIMIT_BYTES,
    SHORT_BYTES,
    FollowedFile,
    thinned,
    with_last_commit,
)
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.read import (
    CheckpointFile,
    Index,
    open_checkpoint,
    read_patiently,
    read_text,
)
from hpcdist.checkpoint.retention import Retention, SaveFacts
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import AttemptReplaced, CheckpointDamaged, CheckpointError, CheckpointMissing
from hpcdist.forks import make_lock

logger = logging.getLogger("hpcdist")

#: Allowance for names in the check of free space.
_OVERHEAD_BYTES = 1 << 16
#: Most listings of a folder while its writer prunes files faster than they are read.
_MAX_LOOKS = 10
_LOOK_AGAIN_S = 0.1
#: Longest time for which a client of a network file system lists a folder as it was, and the pause between two looks.
_OLD_LISTING_S = 65.0
_LOOK_LATER_S = 1.0
_MAX_RUN_ID_BYTES = 1 << 10
_CHECKPOINT = re.compile(r"step-(\d{8,19})-(\d{4,18})\.h5$")
_ATTEMPT = re.compile(r"(\d{4,18})\.jsonl$")
_Result = TypeVar("_Result")


@dataclass(frozen=True, order=True)
class Saved:
    """Names a checkpoint of a folder. Names compare by age: the newer one is larger.

    Attributes:
        attempt: number of the attempt that wrote the checkpoint.
        step: number of optimizer steps taken.
    """

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{self.attempt:04d}.h5"


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: its name, its path, its index and its arrays."""

    saved: Saved
    path: Path
    index: Index
    arrays: list[NamedArray]


#: Called with the name of a checkpoint and its open file.
_Use = Callable[[Saved, CheckpointFile], _Result]


class Store:
    """Reads checkpoints of a folder and, after `begin`, writes them.

    Args:
        folder: path of the folder, which need not exist. Reading makes nothing.
        disk: file system calls, which tests replace.

    Attributes:
        path: path of the folder.
        attempt: number of this attempt; 0 before `begin`.
        damaged: checkpoints that did not verify in the last search.
        n_blocks_read: number of blocks read so far: while it grows, a slow read is not stuck.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        disk: Disk | None = None,
    ) -> None:
        self.path = Path(folder).absolute()  # the program may change its folder
        self.attempt = 0
        self.damaged: list[Saved] = []
        self.n_blocks_read = 0
        self._disk = disk or Disk()
        self._last_before = -1
        self._last_saved = -1
        self._has_saved = False
        self._thinned_bytes = 0
        self._noting = make_lock()  # the saver's thread notes commits
        self._facts: dict[Saved, SaveFacts] = {}

    # -- reading --------------------------------------------------------------------------------------------------

    def saved(self) -> list[Saved]:
        """Return all checkpoints, unverified, oldest first.

        Raises:
            CheckpointError: if the folder exists and cannot be read.
        """
        with self.explained("restore", "a folder that can be read"):
            names = durable.patiently(lambda: _names_in(self.path))
        checkpoints: list[Saved] = []
        for name in names:
            match = _CHECKPOINT.match(name)
            if match is None:
                continue
            step = int(match[1])
            attempt = int(match[2])
            if step < 1 << 63:
                checkpoints.append(Saved(attempt, step))
        return sorted(checkpoints)

    def read_latest(
        self,
        but: Collection[int] = (),
        before_reading: Callable[[Saved], None] = lambda saved: None,
    ) -> Found | None:
        """Return the latest checkpoint that verifies; None for an empty folder.

        Skips damaged checkpoints and logs why.

        Args:
            but: steps to skip too, unless there is no other checkpoint.
            before_reading: function that is called with each checkpoint whose index verifies, before its arrays are
                read.

        Raises:
            CheckpointError: if checkpoints exist but none verifies, or if one cannot be read, as the newest is then
                unknown.
            CheckpointMismatch: if one has a newer format.
        """

        def read(saved: Saved, file: CheckpointFile) -> Found:
            before_reading(saved)
            arrays = file.read_arrays(self._count_block)
            return Found(saved, file.path, file.index, arrays)

        return self.use_latest(read, but)

    def latest(self) -> tuple[Saved, Path] | None:
        """Return the latest checkpoint that verifies, and its path; otherwise like `read_latest`."""

        def verify(saved: Saved, file: CheckpointFile) -> tuple[Saved, Path]:
            file.verify(self._count_block)
            return saved, file.path

        return self.use_latest(verify)

    def _count_block(self) -> None:
        self.n_blocks_read += 1

    def use_latest(
        self,
        use: _Use[_Result],
        but: Collection[int] = (),
        n_looks: int = 1,
        since: float | None = None,
    ) -> _Result | None:
        """Return the result of `use` for the latest checkpoint for which it does not raise CheckpointDamaged.

        `use` may be called again for a checkpoint that cannot be read at once. A network file system may list files
        that are gone, for up to a minute: then the folder is listed again. Otherwise like `read_latest`.

        Args:
            use: function of a checkpoint's name and its open file.
            but: steps to skip too, unless there is no other checkpoint.
            n_looks: number of listings so far. Only this method gives it, when it calls itself.
            since: time of the first listing. Only this method gives it.
        """
        if since is None:
            since = time.monotonic()
        candidates = self.saved()[::-1]
        self.damaged = []
        # the sort is stable: among the others, and among these, the newest stays first
        for saved in sorted(candidates, key=lambda saved: saved.step in but):
            try:
                return self._use(saved, use)
            except CheckpointDamaged as error:
                is_missing = isinstance(error, CheckpointMissing)
                is_gone = is_missing and _is_gone(self.path / str(saved))
                if is_gone and self.attempt:
                    self.refresh_listings()
                listed = self.saved()[::-1]
                has_changed = listed != candidates
                was_pruned = has_changed or (is_missing and n_looks == 1)
                if was_pruned and n_looks < _MAX_LOOKS:
                    time.sleep(_LOOK_AGAIN_S)
                    return self.use_latest(use, but, n_looks + 1, since)
                is_old_listing = is_gone and not has_changed
                if is_old_listing and time.monotonic() - since < _OLD_LISTING_S:
                    time.sleep(_LOOK_LATER_S)
                    return self.use_latest(use, but, n_looks, since)
                if saved in listed and not is_gone:
                    self.damaged.append(saved)
                    logger.warning("skipped damaged step %d: %s", saved.step, error)
        if candidates:
            raise self._none_sound() from None
        return None

    def _use(self, saved: Saved, use: _Use[_Result]) -> _Result:
        """Return the result of `use` for an open checkpoint.

        Raises:
            CheckpointDamaged: if it is not what was committed.
            CheckpointError: if it cannot be read.
        """
        path = self.path / str(saved)

        def open_and_use() -> _Result:
            with open_checkpoint(path) as file:
                if file.index.step != saved.step:
                    raise CheckpointDamaged(
                        f"restore: expected step {saved.step} in {path}, got step {file.index.step}; rename the file "
                        f"back."
                    )
                return use(saved, file)

        return read_patiently(path, open_and_use)

    def _none_sound(self) -> CheckpointError:
        if not self.damaged:
            return CheckpointError(
                f"restore: expected a checkpoint in {self.path} that stays until it is read, got each one pruned "
                f"before that, however often the folder was listed; keep more checkpoints, or save less often."
            )
        return CheckpointError(
            f"restore: expected a checkpoint that verifies in {self.path}, got {len(self.damaged)} damaged; restore "
            f"one from a backup, or start with a new run folder."
        )

    def latest_attempts(self, n_latest: int) -> list[int]:
        """Return the numbers of the latest attempts, oldest first.

        Raises:
            CheckpointError: if the folder exists and cannot be read.
        """
        with self.explained("restore", "a folder that can be read"):
            return durable.patiently(self._attempts)[-n_latest:]

    def ledger_of(self, number: int) -> Path:
        """Return the path of an attempt's ledger."""
        return self.path / "attempts" / f"{number:04d}.jsonl"

    def _attempts(self) -> list[int]:
        """Return the numbers of all attempts, in order."""
        numbers: list[int] = []
        for name in _names_in(self.path / "attempts"):
            match = _ATTEMPT.match(name)
            if match is not None:
                numbers.append(int(match[1]))
        return sorted(numbers)

    @contextmanager
    def explained(self, operation: str, expected: str) -> Iterator[None]:
        """Turn errors of the file system in the block into a CheckpointError."""
        try:
            yield
        except OSError as error:
            if operation == "save" and self.attempt and _is_gone(self.path):
                raise CheckpointError(
                    f"save: expected the folder {self.path}, which this attempt has made, got none: it was removed, or "
                    f"its file system is not mounted. Its checkpoints are gone, unless you put it back; run again."
                ) from None
            reason = error.strerror or " ".join(str(error).split())[:200]
            advice = "fix this and run again"
            if operation == "save":
                advice = "free space or choose another folder"
            raise CheckpointError(
                f"{operation}: expected {expected} in {self.path}, got {reason}; {advice}. Earlier checkpoints are "
                f"untouched."
            ) from None

    # -- the attempt that writes ----------------------------------------------------------------------------------

    def begin(self, number: int | None = None) -> None:
        """Start to write: take a number, which shuts out earlier attempts.

        Also removes their incomplete files: on a nearly full disk the first save may need the space.

        Args:
            number: number of the attempt, if it has one already. Default: the next free number.

        Raises:
            CheckpointError: if the folder cannot be written.
        """
        with self.explained("save", "a folder that can be written"):
            self.attempt = durable.patiently(lambda: self._begin(number))
            steps = [saved.step for saved in self.saved()]
            self._last_before = max(steps, default=-1)
            self._has_saved = False
            self._last_saved = -1
            self.damaged = []
        with self._tolerated("incomplete files stay"):
            for folder in (self.path, self.path / "attempts"):
                durable.sweep_temporary(self._disk, folder)

    def _begin(self, number: int | None) -> int:
        durable.make_folders(self._disk, self.path / "attempts")
        self.refresh_listings()
        if number is None:
            number = self._take_number()
        else:
            # the file exists where another node, which shares this memory, has made it
            with contextlib.suppress(FileExistsError):
                self._disk.make_new(self.ledger_of(number))
        self._disk.sync_folder(self.path / "attempts")
        return number

    def refresh_listings(self) -> None:
        """Let the next listings of the folder, if there is one, come from its server."""
        for folder in (self.path, self.path / "attempts"):
            durable.refresh_listing(self._disk, folder)

    def _take_number(self) -> int:
        """Make the ledger of a new attempt, whose number is higher than all others; return the number."""
        attempts = self._attempts()
        attempts += [saved.attempt for saved in self.saved()]
        number = max(attempts, default=0)
        while True:
            number += 1
            # taken by another attempt, or by us in a request whose answer was lost: skip it
            with contextlib.suppress(FileExistsError):
                self._disk.make_new(self.ledger_of(number))
                return number

    def note(self, event: str, **facts: Any) -> None:
        """Append an event to this attempt's ledger; it is durable on return.

        Raises:
            AttemptReplaced: if a later attempt has begun.
            CheckpointError: if it cannot be written.
        """
        self.check_current()
        with self._noting, self.explained("save", "to note the attempt"):
            line = json.dumps({"event": event, **facts})
            path = self.ledger_of(self.attempt)
            durable.patiently(lambda: durable.append_line(self._disk, path, line))
            self._thin(path)

    def _thin(self, path: Path) -> None:
        """Make a ledger shorter that has become long. A failure is logged, as the event before it is durable."""
        limit_bytes = max(LIMIT_BYTES, 1.25 * self._thinned_bytes)
        try:
            n_bytes = os.stat(path).st_size
            if n_bytes <= limit_bytes:
                return
            self._thinned_bytes = n_bytes  # after a failure, not at each event
            self._thinned_bytes = durable.patiently(lambda: self._replace_ledger(path, thinned))
        except AttemptReplaced:
            raise
        except (OSError, CheckpointError) as error:
            logger.warning("ledger: expected to shorten %s, got %s; the save counts", path, error)

    def _replace_ledger(
        self,
        path: Path,
        shorten: Callable[[list[str]], list[str]],
    ) -> int:
        """Replace a ledger by a shorter one of the same facts; return its length in bytes."""
        _, lines = FollowedFile(path).new_lines()
        shortened = shorten(list(lines))
        text = "".join(f"{line}\n" for line in shortened)
        content = text.encode()
        blocks = [(0, memoryview(content))]
        durable.replace_file(
            self._disk, path, blocks, before_rename=self.check_current, is_swept=True
        )
        return len(content)

    def shorten_ledgers(self, n_latest: int) -> None:
        """Drop all commits but the last from ledgers of old attempts. A failure is only logged.

        Args:
            n_latest: number of the latest attempts, whose ledgers stay as they are.
        """
        with self._tolerated("long ledgers stay"):
            for number in self._attempts()[:-n_latest]:
                path = self.ledger_of(number)
                if os.stat(path).st_size > SHORT_BYTES:
                    self._replace_ledger(path, with_last_commit)

    def check_current(self, has_time: bool = False) -> None:
        """Raise AttemptReplaced if a later attempt of the job has begun, so that two never write.

        Args:
            has_time: whether there is time to refresh the listing first, by a change of the folder.
        """
        with self.explained("save", "a folder that can be read"):
            if has_time:
                durable.refresh_listing(self._disk, self.path / "attempts")
            newest = max(durable.patiently(self._attempts), default=0)
        if newest > self.attempt:
            raise AttemptReplaced(
                f"save: expected attempt {self.attempt} to be the latest in {self.path}, got {newest}: another attempt "
                f"of this job has begun; this one ends. Its last checkpoint is untouched."
            )

    def run_id(self) -> str:
        """Return the random identifier of this folder's run, made by its first attempt.

        A copy of the folder is another run: the file holds the folder's inode number, which a copy does not share.

        Raises:
            CheckpointError: if it cannot be read or written, or is invalid.
        """
        path = self.path / "run-id"
        with self.explained("save", "to name the run"):
            status = durable.patiently(lambda: os.stat(self.path))
            inode = status.st_ino
            with contextlib.suppress(FileNotFoundError):
                stored_id = self._read_run_id(path)
                if stored_id[1] == inode:
                    return stored_id[0]
            name = secrets.token_hex(8)
            text = f"{name} {inode}"
            durable.patiently(lambda: durable.replace_text(self._disk, path, text))
        return name

    def _read_run_id(self, path: Path) -> tuple[str, int]:
        """Return the identifier of a run, and the inode number of its folder."""
        try:
            text = read_text(path, _MAX_RUN_ID_BYTES)
            match = re.fullmatch(r"([0-9a-f]{16}) (\d{1,20})", text)
            if match is None:
                raise ValueError(repr(text[:40]))
        except ValueError as error:
            raise self._no_run_id(path, str(error)) from None
        return match[1], int(match[2])

    def _no_run_id(self, path: Path, text: str) -> CheckpointError:
        return CheckpointError(
            f"restore: expected the name of the run in {path}, got {text}; remove the file (copies in memory are then "
            f"no longer found)."
        )

    def path_of(self, step: int) -> Path:
        """Return the path of the file that the next commit of a step writes.

        The disk is not asked: who waits for it may wait for ever.

        Raises:
            CheckpointError: if the folder has a later step.
        """
        last = max(self._last_saved, self._last_before)
        if step < last:
            raise CheckpointError(
                f"save: expected step {last}, the last one in {self.path}, or a later one, got {step}; restore first, "
                f"or choose another folder."
            )
        saved = Saved(self.attempt, step)
        return self.path / str(saved)

    def commit(self, step: int, image: FileImage) -> Index:
        """Write a checkpoint, in place of an earlier save of the same step; it is durable on return.

        A crash at any point leaves all committed checkpoints intact.

        Args:
            step: number of optimizer steps taken; see `path_of`.
            image: content of the file.

        Returns:
            index of the checkpoint.

        Raises:
            AttemptReplaced: if a later attempt has begun.
            CheckpointError: if the file system refuses.
        """
        saved = Saved(self.attempt, step)
        self.check_current(has_time=True)
        self._note_save(step)
        with self.explained("save", f"to write {image.nbytes} bytes to {saved}"):
            try:
                durable.patiently(lambda: self._write(saved, image))
            except FileNotFoundError:
                # a later attempt may have removed the file, as one of a killed writer
                self.check_current()
                raise
        self._facts.pop(saved, None)
        self._last_saved = step
        return self._index_of(saved)

    def _index_of(self, saved: Saved) -> Index:
        return self._use(saved, lambda _, file: file.index)

    def _write(self, saved: Saved, image: FileImage) -> None:
        self._check_space(image.nbytes)
        path = self.path / str(saved)
        durable.replace_file(
            self._disk,
            path,
            image.blocks(),
            image.nbytes,
            before_rename=self.check_current,
            is_swept=True,
        )

    def _note_save(self, step: int) -> None:
        """Record, once, that this attempt reached a save: the checkpoint it restored can be trained on."""
        if not self._has_saved and step > self._last_before:
            self._has_saved = True
            with self._tolerated("no note of the first save"):
                self.note("save")

    def _check_space(self, nbytes: int) -> None:
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        needed = nbytes + _OVERHEAD_BYTES
        # 0 blocks: a file system without a size, such as ramfs
        if status.f_blocks and free < needed:
            raise CheckpointError(
                f"save: expected {needed} bytes free in {self.path}, got {free}; free some space. "
                f"Earlier checkpoints are untouched."
            )

    def verify_and_prune(self, newest: Saved, retention: Retention) -> None:
        """Verify the newest checkpoint, then remove those that are not kept, and renew the links for people.

        A failed removal or link is only logged, as the newest checkpoint is safe.

        Raises:
            CheckpointDamaged: if the newest checkpoint differs from what was written; nothing is removed then.
            CheckpointError: if the newest checkpoint cannot be read; nothing is removed then.
        """
        try:
            self._use(newest, lambda _, file: file.verify(self._count_block))
        except CheckpointError as error:
            fact, _, _ = str(error).removeprefix("restore: ").rpartition("; ")
            raise type(error)(
                f"save: expected to read back what was written to {self.path / str(newest)}, got an error ({fact}); "
                f"look at this disk. Earlier checkpoints are untouched."
            ) from None
        with self._tolerated("old checkpoints stay"):
            self.check_current()
            readable = self._facts_of_readable()
            survivors = retention.retained(list(readable.values()))
            for saved, facts in readable.items():
                if not any(facts is survivor for survivor in survivors):
                    # copies in memory: another node, which shares it, may be quicker
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.remove(self.path / str(saved))
            self._link("latest.h5", newest)
            best = retention.best(survivors)
            for saved, facts in readable.items():
                if facts is best:
                    self._link("best.h5", saved)

    def remove_all(self) -> None:
        """Remove all checkpoints, of a run that has ended. A failed removal is only logged."""
        with self._tolerated("checkpoints of a finished run stay"):
            self.check_current()
            paths = [self.path / "latest.h5", self.path / "best.h5"]
            removable = [path for path in paths if os.path.islink(path)]
            removable += [self.path / str(saved) for saved in self.saved()]
            for path in removable:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(path)

    def _facts_of_readable(self) -> dict[Saved, SaveFacts]:
        """Return the facts of each checkpoint that can be read, from the oldest to the newest."""
        readable: dict[Saved, SaveFacts] = {}
        for saved in self.saved():
            facts = self._facts_of(saved)
            if facts is not None:
                readable[saved] = facts
        return readable

    def _facts_of(self, saved: Saved) -> SaveFacts | None:
        """Return the facts for retention; None if the file cannot be read: it is then neither counted nor removed."""
        if saved not in self._facts:
            with contextlib.suppress(CheckpointError):
                index = self._index_of(saved)
                self._facts[saved] = SaveFacts(
                    step=index.step,
                    time_s=index.time_s,
                    metrics=index.metrics,
                )
        return self._facts.get(saved)

    def _link(self, name: str, saved: Saved) -> None:
        """Make a name in the folder a link to a checkpoint, for people. It may be lost: restarts do not use it."""
        path = self.path / name
        if os.path.islink(path) and os.readlink(path) == str(saved):
            return
        try:
            self._disk.replace_link(path, str(saved))
        except OSError as error:
            # file systems without links
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    @contextmanager
    def _tolerated(self, consequence: str) -> Iterator[None]:
        """Log the consequence of an error in the block, and the error, and continue."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            logger.warning("%s in %s: %s", consequence, self.path, error)

    def resume_from(self, used: Saved) -> None:
        """Expect steps after the restored checkpoint; rename those that `read_latest` found damaged to *.bad.

        Raises:
            CheckpointError: if the folder cannot be written.
        """
        with self.explained("restore", "to set damaged checkpoints aside"):
            durable.patiently(self._set_damaged_aside)
        last_saved = -1
        for saved in self.saved():
            if saved.attempt == self.attempt:
                last_saved = max(last_saved, saved.step)
        self.damaged = []
        self._last_before = used.step
        self._last_saved = last_saved

    def _set_damaged_aside(self) -> None:
        for saved in self.damaged:
            with contextlib.suppress(FileNotFoundError):  # listings may be old
                path = self.path / str(saved)
                self._disk.rename(path, self.path / f"{saved}.bad")
        if self.damaged:
            self._disk.sync_folder(self.path)


def _is_gone(path: Path) -> bool:
    """Return whether there is certainly nothing of that name: a file system that does not answer may have it."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return False


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def use_one(path: Path, use: _Use[_Result]) -> _Result:
    """Return the result of `use` for the checkpoint at `path`, whatever its name is.

    Raises:
        CheckpointDamaged: if it is not what was committed, or not there.
        CheckpointError: if it cannot be read.
        CheckpointMismatch: if a newer hpcdist wrote it.
    """

    def open_and_use() -> _Result:
        with open_checkpoint(path) as file:
            saved = Saved(0, file.index.step)
            return use(saved, file)

    return read_patiently(path, open_and_use)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the latest checkpoint in `directory` that verifies; None for an empty folder.

    Not collective. Writes nothing. Skips damaged checkpoints and logs why.

    >>> hpcdist.latest_checkpoint("runs/nothing-yet/checkpoints") is None
    True

    Raises:
        CheckpointError: if checkpoints exist but none verifies, a newer hpcdist wrote one, one cannot be read, or each
            was pruned before it was read.
    """
    latest = Store(directory).latest()
    if latest is None:
        return None
    _, path = latest
    return str(path)
