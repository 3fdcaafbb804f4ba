"""MetricsFile: kills at any byte, records that are written again, and processes that are left over."""

import contextlib
import errno
import functools
import gc
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import CheckpointDamaged, CheckpointError, ExitCode, UsageError
from hpcdist.retries import Retries
from hpcdist.run import metrics_file
from hpcdist.run.metrics_file import MetricsFile as QueuedFile
from hpcdist.run.metrics_on_disk import MetricsOnDisk


class OneRank:
    is_chief = True
    timeout_s = 60.0


class OtherRank:
    is_chief = False
    timeout_s = 60.0


class MetricsFile(QueuedFile):
    """A file whose records are there when `write` returns, as most of these tests want."""

    def write(self, step, **values):
        super().write(step, **values)
        self.flush()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def records(path):
    return list(map(json.loads, path.read_text().splitlines()))


def steps_in(path):
    return [record["step"] for record in records(path)]


def written(path, steps, world=OneRank, **values):
    file = MetricsFile(path, world())
    for step in steps:
        file.write(step, loss=step / 2, **values)
    return file


def test_records_are_there_when_write_returns(path):
    file = written(path, [1])
    assert records(path) == [{"step": 1, "loss": 0.5}]
    file.write(4, accuracy=1.0)
    assert records(path)[-1] == {"step": 4, "accuracy": 1.0}
    assert len(file) == 2


def test_the_chief_alone_writes(path):
    file = written(path, [1, 2], OtherRank)
    assert len(file) == 2
    assert file.state_dict() == {"records": 2, "last_step": 2}
    file.load_state_dict({"records": 1, "last_step": 1})
    assert len(file) == 1
    assert not path.parent.exists()


@pytest.mark.parametrize("earlier", [[], [1, 2]], ids=["new folder", "records of an earlier run"])
def test_a_restart_keeps_what_the_checkpoint_knew_of(path, earlier):
    written(path, earlier)
    file = written(path, [5, 6])
    state = file.state_dict()
    file.write(7)
    restarted = MetricsFile(path, OneRank())
    restarted.load_state_dict(state)
    assert len(restarted) == 2
    assert steps_in(path) == [*earlier, 5, 6]
    restarted.write(7, loss=9)
    assert records(path)[-1] == {"step": 7, "loss": 9}


def test_a_checkpoint_of_the_same_step_before_and_after_its_record(path):
    """A save at the last step of an epoch comes before the record of the epoch, a last save after it."""
    file = written(path, [5])
    before = file.state_dict()
    file.write(10)
    after = file.state_dict()
    for state, steps in ((after, [5, 10]), (before, [5])):
        restarted = MetricsFile(path, OneRank())
        restarted.load_state_dict(state)
        assert steps_in(path) == steps


def test_without_a_checkpoint_a_step_is_written_anew(path):
    written(path, [1, 2, 3, 4])
    file = written(path, [3], epoch=1)
    assert records(path)[1:] == [{"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.5, "epoch": 1}]
    file.write(4)
    assert steps_in(path) == [1, 2, 3, 4]


def test_a_file_cut_at_any_byte(path):
    written(path, [1, 2, 3])
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        written(path, [9])
        n_whole = sum(end <= length for end in ends)
        assert steps_in(path) == [*range(1, n_whole + 1), 9]


def claimed(path):
    """Return the steps that an attempt finds, after it has taken the file over."""
    MetricsFile(path, OneRank()).claim()
    return steps_in(path)


def aside(path):
    return path.with_name("metrics.jsonl.bad")


def test_a_damaged_byte_costs_no_other_record(path, caplog):
    """Also one that changes the step, or joins two lines, or makes two of one."""
    written(path, range(11, 21))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    first = len(b"".join(lines[:2]))
    for place in range(first, first + len(lines[2])):
        for bit in range(8):
            aside(path).unlink(missing_ok=True)
            damaged = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            path.write_bytes(damaged)
            is_joined = whole[place : place + 1] == b"\n"
            retained_steps = claimed(path)
            if is_joined:
                last_steps = []
            else:
                last_steps = [14]
            assert [step for step in retained_steps if step != 13] == [
                11,
                12,
                *last_steps,
                *range(15, 21),
            ]
            remaining_bytes = path.read_bytes() + (aside(path).read_bytes() if aside(path).exists() else b"")
            assert sorted(remaining_bytes.splitlines()) == sorted(damaged.splitlines()), "nothing is deleted"
    assert f"order of steps in {path}, got 1 damaged, at line 3; moved them to {aside(path)}" in caplog.text


def test_a_restart_cuts_at_its_step_although_one_was_damaged(path):
    """A step that reads 19 in place of 13 is after the checkpoint's, and no reason to drop those that follow."""
    state = written(path, range(11, 17)).state_dict()
    written(path, [17])
    path.write_text(path.read_text().replace('{"step": 13', '{"step": 19'))
    MetricsFile(path, OneRank()).load_state_dict(state)
    assert steps_in(path) == [11, 12, 14, 15, 16]


def test_damage_of_a_file_in_use_costs_no_other_record(path):
    file = written(path, [1, 2, 3, 4, 5])
    state = {"records": 4, "last_step": 4}
    path.write_text(path.read_text().replace('{"step": 2', '{"stop": 2'))
    file.load_state_dict(state)
    assert claimed(path) == [1, 3, 4]


def test_lines_that_were_set_aside_earlier_stay(path):
    for name in (b"one", b"two"):
        written(path, [1, 2])
        path.write_bytes(name + b"\xff\n" + path.read_bytes())
        assert claimed(path) == [1, 2]
    assert aside(path).read_bytes() == b"one\xff\ntwo\xff\n"


def test_a_process_that_is_left_over_writes_to_no_effect(path):
    zombie = written(path, [1, 2])
    state = zombie.state_dict()
    successor = MetricsFile(path, OneRank())
    successor.load_state_dict(state)
    zombie.write(3, loss="of the zombie")
    successor.write(3, loss="of the new attempt")
    zombie.write(4, loss="of the zombie")
    assert [record["loss"] for record in records(path)] == [0.5, 1.0, "of the new attempt"]


def test_a_process_that_is_left_over_without_a_record_writes_to_no_effect(path):
    """It has begun, and written nothing until a later attempt has; that one may have restored nothing either."""
    zombie = MetricsFile(path, OneRank())
    zombie.claim()
    successor = MetricsFile(path, OneRank())
    successor.claim()
    successor.write(3, loss="of the new attempt")
    zombie.write(2, loss="of the zombie")
    successor.write(4, loss="of the new attempt")
    zombie.load_state_dict({"records": 0, "last_step": 0})
    assert [record["loss"] for record in records(path)] == ["of the new attempt"] * 2


def test_lost_records_are_reported(path, caplog):
    state = written(path, [1, 2]).state_dict()
    path.unlink()
    MetricsFile(path, OneRank()).load_state_dict(state)
    assert "expected 2 records" in caplog.text
    assert "got 0; the job continues without the others" in caplog.text
    assert path.read_text() == ""


def test_steps_go_up(path):
    file = written(path, [3])
    for step in (3, 2):
        with pytest.raises(UsageError, match=f"expected a step after the last record's 3, got {step}"):
            file.write(step)
    with pytest.raises(TypeError):  # a restart would not take it for a record
        file.write(4.0)
    file.write(np.int64(5))
    assert steps_in(path) == [3, 5]


def test_a_disk_that_refuses(path):
    path.parent.mkdir()
    path.mkdir()
    file = MetricsFile(path, OneRank())
    with pytest.raises(CheckpointError, match="metrics.*write"):
        file.write(1)
    path.rmdir()
    file.flush()
    assert records(path) == [{"step": 1}]


def test_the_records_of_a_run_whose_checkpoints_are_gone_are_kept(path, caplog):
    written(path, range(1, 10))
    before = path.read_bytes()
    written(path, [1, 2])
    assert len(path.read_text().splitlines()) == 2
    (saved_copy,) = path.parent.glob(f"{path.name}.2*")
    assert saved_copy.read_bytes() == before
    assert f"no checkpoint of its 9 later records was restored; it was copied to {saved_copy}" in caplog.text
    written(path, [3])
    assert len(list(path.parent.glob(f"{path.name}.2*"))) == 1, "nothing is dropped"


def test_a_record_of_step_0_is_a_record(path, caplog):
    """A run that begins again drops it, so it is copied first, as any other."""
    written(path, [0])
    before = path.read_bytes()
    written(path, [0])
    (backup_path,) = path.parent.glob(f"{path.name}.2*")
    assert backup_path.read_bytes() == before
    assert "no checkpoint of its 1 later records" in caplog.text


def test_records_are_durable_before_a_checkpoint_counts_them(path, monkeypatch):
    synced = []
    file = written(path, [1])
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    file.make_durable()
    assert synced == [path.stat().st_ino]


class FullDisk(Disk):
    """A disk that takes nothing any more, once it is full."""

    is_full = False

    def sync(self, descriptor):
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().sync(descriptor)


@pytest.mark.parametrize(
    "act",
    [
        lambda file, disk: file.make_durable(),
        lambda file, disk: MetricsFile(file.path, OneRank(), disk=disk).load_state_dict({"records": 1, "last_step": 1}),
        lambda file, disk: MetricsFile(file.path, OneRank(), disk=disk).claim(),
        lambda file, disk: QueuedFile(file.path, OneRank(), disk=disk).write(2),
    ],
    ids=["make_durable", "load_state_dict", "claim", "write"],
)
def test_a_full_disk_is_logged_and_ends_no_training(path, act, caplog):
    disk = FullDisk()
    file = MetricsFile(path, OneRank(), disk=disk)
    file.write(1)
    disk.is_full = True
    act(file, disk)
    deadline = time.monotonic() + 30
    while "Training goes on" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert f"metrics: writing records to {path}: No space left on device (failure 1 in a row)" in caplog.text
    disk.is_full = False
    assert records(path) == [{"step": 1}], "what was there stays"


def test_flush_raises_what_keeps_records_from_their_file(path):
    disk = FullDisk()
    file = MetricsFile(path, OneRank(), disk=disk)
    disk.is_full = True
    with pytest.raises(CheckpointError, match="No.*space.*device") as caught:
        file.write(1)  # and flush
    assert caught.value.exit_code == ExitCode.CHECKPOINT_IO


def test_records_that_cannot_be_written_are_kept_and_tried_again_with_growing_pauses(path, monkeypatch, caplog):
    now_s = [0.0]
    disk = FullForRecords()
    file = QueuedFile(path, OneRank(), disk=disk)
    file._log.retries = Retries("metrics", lambda: now_s[0])
    tries = []
    append = MetricsOnDisk._append
    monkeypatch.setattr(MetricsOnDisk, "_append", lambda *args: tries.append(now_s[0]) or append(*args))
    for step in range(1, 201):
        file.write(step)
        wait_for_thread(file)
        now_s[0] += 1.0
    assert file.retries.failure == "metrics: No space left on device"
    assert len(tries) < 12
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert max(pauses) >= 60
    disk.is_full = False
    now_s[0] += 300.0
    file.write(201)
    file.flush()
    assert steps_in(path) == [*range(1, 202)]
    assert file.retries.failure is None


def test_a_restore_drops_records_that_could_not_be_written(path):
    """They are of steps that are made again."""
    disk = FullForRecords()
    disk.is_full = False
    file = QueuedFile(path, OneRank(), disk=disk)
    for step in range(1, 6):
        file.write(step)
    file.flush()
    disk.is_full = True
    for step in range(6, 9):
        file.write(step, attempt="lost")
    wait_for_thread(file)
    file.load_state_dict({"records": 5, "last_step": 5})
    disk.is_full = False
    for step in range(6, 9):
        file.write(step, attempt="made again")
    file.flush()
    assert steps_in(path) == [*range(1, 9)]
    assert "lost" not in path.read_text()


def test_records_that_are_dropped_during_an_append_take_no_others_with_them(path, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_WAITING", 10)
    disk = HangingDisk()
    file = QueuedFile(path, OneRank(), disk=disk)
    for step in range(1, 100):
        file.write(step)
    n_kept = file._log.n_waiting
    disk.answers.set()
    file.flush()
    steps = steps_in(path)
    assert steps[-n_kept:] == [*range(100 - n_kept, 100)], "all that were not dropped"


def wait_for_thread(file):
    """Wait until the thread has done what it was given."""
    wait([file._log.call(lambda: None)], 30)


def test_of_many_records_that_cannot_be_written_the_oldest_are_lost(path, monkeypatch, caplog):
    monkeypatch.setattr(metrics_file, "MAX_WAITING", 100)
    disk = FullForRecords()
    file = QueuedFile(path, OneRank(), disk=disk)
    for step in range(1, 1001):
        file.write(step)
    assert file._log.n_waiting <= 101
    assert "records that" in caplog.text
    disk.is_full = False
    file.flush()
    assert records(path)[-1] == {"step": 1000}


@contextlib.contextmanager
def small_files(nbytes):
    """A real limit instead of a patched call: files of this process may not grow beyond some size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("n_more", [0, 10], ids=["nothing is taken", "a part is taken"])
def test_a_record_is_there_once_when_its_write_is_tried_again(path, n_more):
    file = MetricsFile(path, OneRank())
    file.write(1, text="x" * (1 << 16))
    before = path.read_bytes()
    with small_files(len(before) + n_more):
        for attempt in (functools.partial(file.write, 2), file.flush):
            with pytest.raises(CheckpointError, match="File too large; free space"):
                attempt()
            assert path.read_bytes() == before
        del attempt
    file.flush()
    assert len(file) == 2
    del file
    gc.collect()  # it is closed
    assert steps_in(path) == [1, 2]


class UncutFile(Disk):
    """A disk on which a file cannot be made shorter, while that is refused."""

    is_refused = False

    def truncate(self, *arguments):
        if self.is_refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().truncate(*arguments)


def test_a_part_of_a_record_that_could_not_be_cut_off_is_cut_off_later(path, monkeypatch):
    file = MetricsFile(path, OneRank(), disk=UncutFile())
    file.write(1, text="x" * (1 << 16))
    before = path.read_bytes()
    with small_files(len(before) + 10), monkeypatch.context() as patch:
        patch.setattr(UncutFile, "is_refused", True)
        with pytest.raises(CheckpointError, match="File too large|Input/output error"):
            file.write(2)
    assert path.read_bytes() == before + b'{"step": 2'
    file.write(3)
    assert steps_in(path) == [1, 2, 3]


class HangingDisk(Disk):
    """A file server that hangs until `answers` is set."""

    def __init__(self):
        self.answers = threading.Event()

    def write(self, *arguments):
        self.answers.wait(30)
        return super().write(*arguments)


def test_a_file_server_that_hangs_stops_no_training(path, monkeypatch):
    monkeypatch.setattr(OneRank, "timeout_s", 0.2)
    disk = HangingDisk()
    started = time.monotonic()
    file = QueuedFile(path, OneRank(), disk=disk)
    for step in range(1, 1001):
        file.write(step)
    assert time.monotonic() - started < 10
    with pytest.raises(CheckpointError, match="records.*within.*0.2"):
        file.flush()
    for _ in range(100):  # saves, of which the first waits
        file.make_durable()
    assert time.monotonic() - started < 10
    assert file.retries.failure.endswith("metrics.jsonl: no answer for 0.2 s")
    disk.answers.set()
    while file._log.n_waiting and time.monotonic() - started < 30:
        time.sleep(0.01)
    file.make_durable()
    assert steps_in(path) == [*range(1, 1001)]


class RefusesOnce(Disk):
    """A disk whose first write of a record fails with an error that may pass."""

    n_refused = 0

    def write(self, descriptor, data, offset):
        if not self.n_refused:
            self.n_refused += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(descriptor, data, offset)


def test_a_write_is_tried_again(path):
    disk = RefusesOnce()
    file = MetricsFile(path, OneRank(), disk=disk)
    for step in (1, 2):
        file.write(step)
    assert disk.n_refused == 1
    assert steps_in(path) == [1, 2]


AT_EXIT = """
import atexit, os, sys, time
import hpcdist
from hpcdist.checkpoint.durable import Disk
class Slow(Disk):
    def write(self, *arguments):
        time.sleep(0.3)
        if {is_full}:
            raise OSError(28, os.strerror(28))
        return super().write(*arguments)
def make():
    file = hpcdist.MetricsFile(sys.argv[1], disk=Slow())
    for step in (1, 2):
        time.sleep(0.5 * {has_pause})  # the thread is at it, and finalizers were registered after the hook
        file.write(step)
    return file
{kept} = make()
{kept} = None if {is_dropped} else {kept}
if {kept} is not None:
    atexit.register(lambda: {kept}.write(3))
"""


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("has_pause", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_the_end_of_the_program_waits_for_the_records_and_logs_what_is_lost(path, is_full, has_pause, is_dropped):
    code = AT_EXIT.format(is_full=is_full and not has_pause, has_pause=has_pause, is_dropped=is_dropped, kept="file")
    is_full = is_full and not has_pause
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (" did not take are lost." in done.stderr) == is_full
    expected = [1, 2] if is_dropped else [1, 2, 3]
    if is_full:
        expected_steps = []
    else:
        expected_steps = expected
    assert steps_in(path) == expected_steps
    assert ("No space left on device" in done.stderr) == is_full


DROPPED = """
import gc, os, sys, time
import hpcdist
from hpcdist.checkpoint.durable import Disk
class OnceFull(Disk):
    is_full = True
    def write(self, *arguments):
        if self.is_full:
            raise OSError(28, os.strerror(28))
        return super().write(*arguments)
disk = OnceFull()
hpcdist.MetricsFile(sys.argv[1], disk=disk).write(1)
time.sleep(0.5)  # the write has failed, and nothing but the hook of the end knows the record
gc.collect()
disk.is_full = False
"""


def test_a_record_whose_write_failed_is_written_at_the_end_though_its_file_is_dropped(path):
    done = subprocess.run([sys.executable, "-c", DROPPED, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert steps_in(path) == [1]


class SlowDisk(Disk):
    """A disk with slow writes, whose fsync fails while `is_lost`."""

    is_lost = False

    def write(self, *arguments):
        time.sleep(0.02)
        return super().write(*arguments)

    def sync(self, descriptor):
        if self.is_lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


def test_who_waits_for_records_does_not_wait_for_later_ones(path):
    """Records come faster than the disk takes them one by one; of those that wait, all go at once."""
    file = QueuedFile(path, OneRank(), disk=SlowDisk())
    is_over = threading.Event()
    file.write(1)
    durable_after_s = []

    def save():
        started = time.monotonic()
        file.make_durable()
        durable_after_s.append(time.monotonic() - started)
        is_over.set()

    threading.Thread(target=save).start()
    step = 1
    while not is_over.is_set():
        step += 1
        file.write(step)
        time.sleep(0.001)
    file.flush()
    assert durable_after_s[0] < 5
    assert steps_in(path) == [*range(1, step + 1)]


def test_what_a_failed_sync_may_have_lost_is_never_durable(path):
    disk = SlowDisk()
    file = MetricsFile(path, OneRank(), disk=disk)
    file.write(1)
    inode = path.stat().st_ino
    disk.is_lost = True
    file.make_durable()
    assert file.retries.failure.endswith("metrics.jsonl: Input/output error")
    disk.is_lost = False  # a sync of this file would succeed, without the pages that were dropped
    file.write(2)
    file.make_durable()
    assert path.stat().st_ino != inode, "all of it is written again"
    assert steps_in(path) == [1, 2]


class FullForRecords(Disk):
    """A disk that takes no records while it is full."""

    is_full = True

    def write(self, *arguments):
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(*arguments)


def test_a_checkpoint_is_written_though_its_records_are_not_in_the_file(path):
    disk = FullForRecords()
    file = QueuedFile(path, OneRank(), disk=disk)
    file.write(1)
    with pytest.raises(CheckpointError, match="No space left"):
        file.flush()
    file.make_durable()
    assert file.retries.failure is not None
    disk.is_full = False
    file.make_durable()
    assert file.retries.failure is None
    assert records(path) == [{"step": 1}]


def test_two_threads_that_write_and_wait_add_each_record_once(path, monkeypatch):
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(60):
            file = QueuedFile(path.with_name(f"{number}.jsonl"), OneRank())
            saver = threading.Thread(target=file.make_durable)
            saver.start()
            for step in range(1, 5):
                file.write(step)
            saver.join()
            file.flush()
            assert steps_in(file.path) == [1, 2, 3, 4]
    finally:
        sys.setswitchinterval(interval_s)


class NoRoomAside(Disk):
    """A disk that takes no damaged lines."""

    def create(self, path):
        if ".bad" in path.name:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().create(path)


def test_damaged_lines_stay_where_they_are_until_they_are_elsewhere(path):
    written(path, [1, 2])
    path.write_bytes(b"?\n" + path.read_bytes())
    whole = path.read_bytes()
    file = MetricsFile(path, OneRank(), disk=NoRoomAside())
    file.claim()
    assert "quota exceeded" in file.retries.failure
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "state", [None, [], {}, {"records": 1}, {"records": -1, "last_step": 1}, {"records": "1", "last_step": 1}]
)
def test_a_state_that_is_none_drops_no_records(path, state):
    file = written(path, [1, 2])
    with pytest.raises(CheckpointDamaged, match="metrics.*number.*records"):
        file.load_state_dict(state)
    assert len(records(path)) == len(file) == 2
