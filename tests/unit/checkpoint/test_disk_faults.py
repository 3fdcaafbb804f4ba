"""Any call to the system fails, at any point: earlier checkpoints stay, the error tells, a restart goes on.

What may pass, as an answer of a file server that is lost, is no error.

`make crashes` takes every call; else every third. The errors come from below `Disk`, in place of the functions of `os`.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
from collections import Counter

import pytest
from scale import SCALE
from small_training import N_STEPS, STARTS, Training, newest_saved

from hpcdist.checkpoint import durable, store
from hpcdist.errors import CheckpointError, ExitCode

EVERY = SCALE.choose(3, 1)
CALLS = ["mkdir", "open", "fallocate", "pwrite", "fsync", "close", "replace", "symlink", "unlink", "listdir", "statvfs"]
REFUSALS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS]
PASSING = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
#: Old checkpoints that cannot be removed, or looked for, stay, and the log says so: no reason to end a job.
TOLERATED = ["symlink", "unlink", "listdir"]
STAYS = r"(old checkpoints stay|incomplete files stay|no note of the first save) in "
#: What the message says that was expected.
EXPECTED = [
    r"to write \d+ bytes to step-\d{8}-\d{4}\.h5",
    "a folder that can be (written|read)",
    "to name the run",
    "to note the attempt",
    "to set damaged checkpoints aside",
]


#: What `durable` calls by itself, past `os`.
OWN_CALLS = {"fallocate": durable.fallocate}


class FaultyOs:
    """The module `os` with one call that fails, once or for good, or writes half of what it is given."""

    def __init__(self, call, nth, code, times=1):
        self.call = call
        self.nth = nth
        self.code = code
        self.times = times
        self.n_calls = 0

    def __getattr__(self, name):
        if name == self.call:
            return self.fail
        return getattr(os, name)

    def fail(self, *arguments):
        if is_of_a_listing(*arguments):
            return getattr(os, self.call)(*arguments)
        self.n_calls += 1
        act = OWN_CALLS.get(self.call) or getattr(os, self.call)
        if not self.nth <= self.n_calls < self.nth + self.times:
            return act(*arguments)
        if self.code == "lost":  # the server has done it, and the client asks it again
            act(*arguments)
            return act(*arguments)
        if self.code is None:
            return os.pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
        if self.call == "close":
            os.close(*arguments)  # also a close that fails has closed
        raise OSError(self.code, os.strerror(self.code))


def is_of_a_listing(target, *more):
    """Return whether a call is one that only makes a listing fresh: it may fail, see below."""
    if isinstance(target, int):
        path = os.readlink(f"/proc/self/fd/{target}")
    else:
        path = str(target)
    return ".listing.tmp-" in path


def test_a_listing_that_cannot_be_made_fresh_is_used_as_it_is(fast_folder, monkeypatch):
    def refuse(disk, folder):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "create", full)
            refresh(disk, folder)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refresh = durable.refresh_listing
    monkeypatch.setattr(durable, "refresh_listing", refuse)
    goes_on(fast_folder / "run", None)


@pytest.fixture(params=["fresh", "broken"])
def template(request, fast_folder):
    """Return (folder or None, newest sound checkpoint in it)."""
    path = fast_folder / "template"
    newest = STARTS[request.param](path)
    return path if path.exists() else None, newest


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(durable, "_PAUSES_S", (0.0, 0.0))


def run_with_fault(path, template, monkeypatch, faulty):
    """Return (the error or None, the newest checkpoint that was committed)."""
    shutil.rmtree(path, ignore_errors=True)
    if template[0]:
        shutil.copytree(template[0], path)
    told = [template[1]] if template[1] else []
    with monkeypatch.context() as patch:
        for module in (durable, store):
            patch.setattr(module, "os", faulty)
        if faulty.call in OWN_CALLS:
            patch.setattr(durable, faulty.call, faulty.fail)
        try:
            Training(path, None, told.append).run()
        except CheckpointError as error:
            return error, max(told, default=None)
    return None, max(told, default=None)


def faults(call, code, path, template, monkeypatch, times=1):
    """Yield (error, newest committed checkpoint) for each nth call that fails."""
    nth = 1
    while True:
        faulty = FaultyOs(call, nth, code, times)
        outcome = run_with_fault(path, template, monkeypatch, faulty)
        if faulty.n_calls < nth:
            return
        yield outcome
        nth += EVERY


def goes_on(path, committed):
    """Hold that what was committed is there, and that a training comes to its end on it."""
    newest = newest_saved(path)
    assert committed is None or (newest is not None and newest >= committed)
    Training(path).run()
    assert newest_saved(path).step == N_STEPS
    assert list(path.rglob("*.tmp-*")) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: errno.errorcode[code])
def test_a_refusal_is_reported_and_survived(fast_folder, template, monkeypatch, caplog, code):
    path = fast_folder / "run"
    counts = Counter()
    for call in CALLS:
        times = 8 if code in PASSING else 3  # more than are tried again
        for error, committed in faults(call, code, path, template, monkeypatch, times):
            counts[call] += 1
            was_told = re.search(STAYS, caplog.text)
            _ = caplog.clear()
            goes_on(path, committed)
            if error is None:
                assert call in TOLERATED or was_told, call
                continue
            counts["told"] += 1
            assert error.exit_code == ExitCode.CHECKPOINT_IO
            assert os.strerror(code) in str(error)
            assert str(path) in str(error)
            assert any(re.search(expected, str(error)) for expected in EXPECTED), error
            counts["with bytes"] += bool(re.search(EXPECTED[0], str(error)))
    print(f"{sum(counts[call] for call in CALLS)} refusals: {dict(counts)}")
    assert counts["with bytes"] > 10


def count_harmless(path, calls, code, template, monkeypatch, times=1):
    """Assert that no fault of some kind is an error; return how many there were, by call."""
    counts = Counter()
    for call in calls:
        for error, committed in faults(call, code, path, template, monkeypatch, times):
            counts[call] += 1
            assert error is None, f"{call}: {error}"
            assert newest_saved(path) == committed
            goes_on(path, committed)
    print(f"{sum(counts.values())} harmless faults ({code}): {dict(counts)}")
    return counts


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("code", "calls"),
    [(errno.EINTR, ["mkdir", "replace", "symlink", "unlink"]), (None, ["pwrite"])],  # Python repeats the others itself
    ids=["EINTR", "short write"],
)
def test_an_interruption_or_a_short_write_is_no_error(fast_folder, template, monkeypatch, code, calls):
    counts = count_harmless(fast_folder / "run", calls, code, template, monkeypatch)
    assert sum(counts.values()) > 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("code", PASSING, ids=lambda code: errno.errorcode[code])
def test_an_error_that_passes_is_none(fast_folder, template, monkeypatch, code):
    """As where a file server restarts. After a failed fsync, all of a file is written again."""
    calls = sorted({*CALLS} - {"statvfs"})
    counts = count_harmless(fast_folder / "run", calls, code, template, monkeypatch, times=2)
    assert sum(counts.values()) > 20


@pytest.mark.timeout(600)
def test_an_answer_that_is_lost_is_no_error(fast_folder, template, monkeypatch, caplog):
    calls = ("mkdir", "replace", "symlink", "unlink", "open")
    counts = count_harmless(fast_folder / "run", calls, "lost", template, monkeypatch)
    assert re.search(STAYS, caplog.text) is None
    assert counts["replace"] > 2


class SyncedOs:
    """The module `os`; notes whether a file or a folder is forced to the disk."""

    def __init__(self):
        self.synced = []

    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            kind = "folder"
        else:
            kind = "file"
        self.synced.append(kind)
        os.fsync(descriptor)


def test_a_file_and_its_name_are_forced_to_the_disk(tmp_path, monkeypatch):
    synced = SyncedOs()
    monkeypatch.setattr(durable, "os", synced)
    durable.replace_text(durable.Disk(), tmp_path / "name", "text")
    assert synced.synced == ["file", "folder"]


def test_blocks_that_a_disk_does_not_take_directly_go_through_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command, flags=0: 0)  # O_DIRECT is taken, it seems
    monkeypatch.setattr(durable, "os", FaultyOs("pwrite", 1, errno.EINVAL))
    block = memoryview(bytes(range(256)) * 32)
    durable.replace_file(durable.Disk(), tmp_path / "name", [(0, block)], len(block))
    assert (tmp_path / "name").read_bytes() == bytes(block)
