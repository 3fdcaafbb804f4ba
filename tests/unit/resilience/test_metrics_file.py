"""MetricsFile: kills at any byte, records that are written again, and processes that are left over."""

import contextlib
import errno
import gc
import json
import os
import resource
import signal
from io import FileIO

import numpy as np
import pytest

from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import CheckpointDamaged, CheckpointError, ExitCode, UsageError
from hpcdist.resilience import metrics_file
from hpcdist.resilience.metrics_file import MetricsFile


class OneRank:
    is_chief = True


class OtherRank:
    is_chief = False


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    again = MetricsFile(path, OneRank())
    again.load_state_dict(state)
    assert len(again) == 2
    assert [record["step"] for record in records(path)] == [*earlier, 5, 6]
    again.write(7, loss=9)
    assert records(path)[-1] == {"step": 7, "loss": 9}


def test_a_checkpoint_of_the_same_step_before_and_after_its_record(path):
    """A save at the last step of an epoch comes before the record of the epoch, a last save after it."""
    file = written(path, [5])
    before = file.state_dict()
    file.write(10)
    after = file.state_dict()
    for state, steps in ((after, [5, 10]), (before, [5])):
        again = MetricsFile(path, OneRank())
        again.load_state_dict(state)
        assert [record["step"] for record in records(path)] == steps


def test_without_a_checkpoint_a_step_is_written_anew(path):
    written(path, [1, 2, 3, 4])
    file = written(path, [3], epoch=1)
    assert records(path)[1:] == [{"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.5, "epoch": 1}]
    file.write(4)
    assert [record["step"] for record in records(path)] == [1, 2, 3, 4]


def test_a_file_cut_at_any_byte(path):
    written(path, [1, 2, 3])
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        written(path, [9])
        n_whole = sum(end <= length for end in ends)
        assert [record["step"] for record in records(path)] == [*range(1, n_whole + 1), 9]


def claimed(path):
    """Return the steps that an attempt finds, after it has taken the file over."""
    MetricsFile(path, OneRank()).claim()
    return [record["step"] for record in records(path)]


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
            kept = claimed(path)
            assert [step for step in kept if step != 13] == [11, 12, *([] if is_joined else [14]), *range(15, 21)]
            there = path.read_bytes() + (aside(path).read_bytes() if aside(path).exists() else b"")
            assert sorted(there.splitlines()) == sorted(damaged.splitlines()), "nothing is deleted"
    assert f"order of steps in {path}, got 1 damaged, at line 3; moved them to {aside(path)}" in caplog.text


def test_a_restart_cuts_at_its_step_although_one_was_damaged(path):
    """A step that reads 19 in place of 13 is after the checkpoint's, and no reason to drop those that follow."""
    state = written(path, range(11, 17)).state_dict()
    written(path, [17])
    path.write_text(path.read_text().replace('{"step": 13', '{"step": 19'))
    MetricsFile(path, OneRank()).load_state_dict(state)
    assert [record["step"] for record in records(path)] == [11, 12, 14, 15, 16]


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
    again = MetricsFile(path, OneRank())
    again.load_state_dict(state)
    zombie.write(3, loss="of the zombie")
    again.write(3, loss="of the new attempt")
    zombie.write(4, loss="of the zombie")
    assert [record["loss"] for record in records(path)] == [0.5, 1.0, "of the new attempt"]


def test_a_process_that_is_left_over_without_a_record_writes_to_no_effect(path):
    """It has begun, and written nothing until a later attempt has; that one may have restored nothing either."""
    zombie = MetricsFile(path, OneRank())
    zombie.claim()
    again = MetricsFile(path, OneRank())
    again.claim()
    again.write(3, loss="of the new attempt")
    zombie.write(2, loss="of the zombie")
    again.write(4, loss="of the new attempt")
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
    assert [record["step"] for record in records(path)] == [3, 5]


def test_a_disk_that_refuses(path):
    path.parent.mkdir()
    path.mkdir()
    with pytest.raises(CheckpointError, match="metrics: expected to write"):
        written(path, [1])


def test_the_records_of_a_run_whose_checkpoints_are_gone_are_kept(path, caplog):
    written(path, range(1, 10))
    before = path.read_bytes()
    written(path, [1, 2])
    assert len(path.read_text().splitlines()) == 2
    (kept,) = path.parent.glob(f"{path.name}.2*")
    assert kept.read_bytes() == before
    assert f"no checkpoint of its 9 later records was restored; it was copied to {kept}" in caplog.text
    written(path, [3])
    assert len(list(path.parent.glob(f"{path.name}.2*"))) == 1, "nothing is dropped"


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
        lambda file, disk: MetricsFile(file.path, OneRank(), disk=disk).write(2),
    ],
    ids=["make_durable", "load_state_dict", "claim", "write"],
)
def test_a_full_disk_is_reported(path, act):
    disk = FullDisk()
    file = MetricsFile(path, OneRank(), disk=disk)
    file.write(1)
    disk.is_full = True
    with pytest.raises(CheckpointError, match="No space left on device; free space") as caught:
        act(file, disk)
    assert caught.value.exit_code == ExitCode.CHECKPOINT_IO
    assert records(path) == [{"step": 1}], "what was there stays"


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
        for _ in range(2):
            with pytest.raises(CheckpointError, match="File too large; free space"):
                file.write(2)
            assert path.read_bytes() == before
    file.write(2)
    assert len(file) == 2
    del file
    gc.collect()  # it is closed
    assert [record["step"] for record in records(path)] == [1, 2]


class UncutFile(FileIO):
    """A file that cannot be made shorter, while that is refused."""

    is_refused = False

    def truncate(self, size=None):
        if self.is_refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().truncate(size)


def test_a_part_of_a_record_that_could_not_be_cut_off_is_cut_off_later(path, monkeypatch):
    monkeypatch.setattr(metrics_file, "FileIO", UncutFile)
    file = MetricsFile(path, OneRank())
    file.write(1, text="x" * (1 << 16))
    before = path.read_bytes()
    with small_files(len(before) + 10), monkeypatch.context() as patch:
        patch.setattr(UncutFile, "is_refused", True)
        with pytest.raises(CheckpointError, match="File too large"):
            file.write(2)
    assert path.read_bytes() == before + b'{"step": 2'
    file.write(3)
    assert [record["step"] for record in records(path)] == [1, 3]


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
    with pytest.raises(CheckpointError, match="quota exceeded"):
        MetricsFile(path, OneRank(), disk=NoRoomAside()).claim()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "state", [None, [], {}, {"records": 1}, {"records": -1, "last_step": 1}, {"records": "1", "last_step": 1}]
)
def test_a_state_that_is_none_drops_no_records(path, state):
    file = written(path, [1, 2])
    with pytest.raises(CheckpointDamaged, match="metrics: expected a number of records"):
        file.load_state_dict(state)
    assert len(records(path)) == len(file) == 2
