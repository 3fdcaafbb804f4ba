import errno
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcdist.checkpoint import durable, header, read
from hpcdist.checkpoint import store as store_module
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store, latest_checkpoint
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import AttemptReplaced, CheckpointDamaged, CheckpointError, CheckpointMismatch, UsageError


class FailingDisk(Disk):
    """A disk whose nth call of some operation fails, and all later ones if it `stays` so."""

    def __init__(self):
        self.failing = ""
        self.code = 0
        self.nth = 1
        self.stays = True
        self.calls = 0

    def fail(self, operation, code, nth=1, stays=True):
        self.failing = operation
        self.code = code
        self.nth = nth
        self.stays = stays
        self.calls = 0

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "failing"):
            self.calls += 1
            if self.calls == self.nth or (self.stays and self.calls > self.nth):
                raise OSError(self.code, os.strerror(self.code))
        return object.__getattribute__(self, name)


@pytest.fixture
def disk():
    return FailingDisk()


def attempt(path, disk=None):
    folder = Store(path, disk)
    folder.begin()
    return folder


@pytest.fixture
def folder(tmp_path, disk):
    return attempt(tmp_path / "run" / "checkpoints", disk)


def commit(folder, step, n_elements=100, time_s=0.0, metrics=None):
    image = FileImage()
    path = folder.path_of(step)
    facts = {"step": step, "time_s": time_s, "metrics": metrics or {}, "written": {}}
    lay_out(image, facts, {"dict": []}, [NamedArray("x", "float32", np.full(n_elements, step, np.float32))])
    folder.commit(step, image)
    return path


def prune(folder, *options, **named):
    folder.verify_and_prune(folder.saved()[-1], Retention(*options, **named))


def steps(folder):
    return [saved.step for saved in folder.saved()]


def latest_value(folder):
    latest = folder.read_latest()
    if latest is None:
        return None
    return float(latest.arrays[0].values[0])


def names(folder):
    """Return the files of a folder, but for the ledger."""
    return sorted(path.name for path in folder.path.iterdir() if path.is_file() and not path.is_symlink())


def damage(path, offset=4800):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage_index(path):
    damage(path, -1)


def damage_header(path):
    damage(path, 0)


def test_nothing_there(folder, tmp_path):
    assert folder.read_latest() is None
    assert latest_checkpoint(folder.path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_latest_is_the_highest_step(folder):
    for step in (5, 20, 100000000):
        commit(folder, step)
    assert latest_value(folder) == 100000000
    assert latest_checkpoint(folder.path) == str(folder.path / "step-100000000-0001.h5")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.feature("checkpoints.checksums-and-fallback", "complaints.broken-checkpoint-files")
@pytest.mark.parametrize("harm", [damage, damage_index, damage_header, cut, os.unlink])
def test_damage_is_stepped_over_and_explained(folder, harm, caplog):
    commit(folder, 1)
    newest = commit(folder, 2)
    harm(newest)
    assert latest_value(folder) == 1
    assert "skipped damaged step 2: restore: expected" in caplog.text or harm is os.unlink


def test_a_file_without_a_header_is_no_checkpoint(folder, caplog):
    commit(folder, 1)
    for content in (b"", b"half", bytes(9000)):
        (folder.path / "step-00000002-0001.h5").write_bytes(content)
        assert latest_value(folder) == 1
    assert caplog.text.count("expected the header of a checkpoint in ") == 3
    assert "got no header, which was not written or is cut off" in caplog.text


def test_only_damaged_ones_is_an_error_not_a_fresh_start(folder):
    damage(commit(folder, 1))
    with pytest.raises(CheckpointError, match="got 1 damaged"):
        folder.read_latest()


def test_a_newer_format_stops_instead_of_going_back(folder, monkeypatch):
    commit(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(header, "FORMAT", 99)
        commit(folder, 2)
    with pytest.raises(CheckpointMismatch, match="checkpoint.*format.*2.*99") as caught:
        folder.read_latest()
    assert caught.value.exit_code == 78


def test_damaged_ones_are_set_aside_once_an_older_one_is_in_use(folder):
    for step in (1, 2, 3):
        path = commit(folder, step)
    damage(path)
    later = attempt(folder.path)
    saved = later.read_latest().saved
    assert saved == Saved(1, 2)
    later.resume_from(saved)
    assert steps(later) == [1, 2]
    assert [path.name for path in folder.path.glob("*.bad")] == ["step-00000003-0001.h5.bad"]
    commit(later, 3)
    assert later.read_latest().saved == Saved(2, 3)


def test_prune_keeps_the_last(folder):
    for step in range(1, 6):
        commit(folder, step)
    prune(folder, 2)
    assert names(folder) == [f"step-0000000{step}-0001.h5" for step in (4, 5)]


@pytest.mark.feature("evaluation.best-checkpoint-export")
def test_people_find_the_latest_and_the_best_by_name(folder):
    for step, loss in enumerate((0.5, 0.2, 0.9), 1):
        commit(folder, step, metrics={"loss": loss})
        prune(folder, 1, keep_best="loss")
    assert os.readlink(folder.path / "latest.h5") == "step-00000003-0001.h5"
    assert os.readlink(folder.path / "best.h5") == "step-00000002-0001.h5"
    assert read_value(folder.path / "best.h5") == 2


def read_value(path):
    with read.open_checkpoint(path) as file:
        return float(file.read_arrays()[0].values[0])


def test_a_file_system_without_links_is_good_enough(folder, disk):
    commit(folder, 1)
    disk.fail("replace_link", errno.EPERM)
    prune(folder, 1)
    assert latest_value(folder) == 1


@pytest.mark.feature("complaints.hdf5-locks")
def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(folder):
    path = commit(folder, 1)
    with read.open_checkpoint(path) as file:
        commit(folder, 1, n_elements=7)
        assert len(file.read_arrays()[0].values) == 100
    assert len(folder.read_latest().arrays[0].values) == 7


def test_a_damaged_newest_one_is_noticed_before_others_are_removed(folder):
    commit(folder, 1)
    damage(commit(folder, 2))
    with pytest.raises(CheckpointError, match="save: expected to read back .*arrays.*committed"):
        prune(folder, 1)
    assert latest_value(folder) == 1


def test_a_damaged_file_neither_counts_nor_goes(folder):
    for step in (1, 2, 3, 4):
        commit(folder, step)
    damage_header(folder.path / str(Saved(1, 3)))
    prune(folder, 2)
    assert names(folder) == [f"step-0000000{step}-0001.h5" for step in (2, 3, 4)]


def test_a_later_attempt_leaves_nothing_to_prune(folder, caplog):
    """A process that was replaced removes nothing any more."""
    for step in (1, 2, 3):
        commit(folder, step)
    attempt(folder.path)
    prune(folder, 1)
    assert "another attempt of this job has begun" in caplog.text
    assert steps(folder) == [1, 2, 3]


@pytest.mark.feature("checkpoints.atomic-commit")
def test_leftovers_of_killed_writers_are_swept(folder):
    (folder.path / ".step-00000001-0001.h5.tmp-00000000-0123456789abcdef").write_bytes(b"x")
    (folder.path / "notes.txt").write_text("mine")
    later = attempt(folder.path)
    assert names(later) == ["notes.txt"]


@pytest.mark.feature("checkpoints.checkpoint-manager", "checkpoints.save-and-retention-policy")
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [5]),
        ({"keep_every_n_hours": 2}, [1, 3, 5]),
        ({"keep_every_n_hours": 3}, [1, 4, 5]),
        ({"keep_best": "loss"}, [2, 5]),
        ({"keep_best": "loss", "best_mode": "max"}, [4, 5]),
        ({"keep_best": "other"}, [5]),
        ({"keep_best": "loss", "n_best": 2}, [2, 3, 5]),
        ({"keep_best": "loss", "n_best": 2, "best_mode": "max"}, [4, 5]),
        ({"keep_best": "loss", "n_best": 9}, [2, 3, 4, 5]),
        ({"keep_every_n_steps": 2}, [1, 3, 5]),
        ({"keep_every_n_steps": 3, "keep_every_n_hours": 2}, [1, 3, 4, 5]),
        ({"max_to_keep": None}, [1, 2, 3, 4, 5]),
    ],
)
def test_what_is_kept(folder, options, kept):
    """Also over attempts: all that counts is in the files."""
    losses = [float("nan"), 0.1, 0.1, 0.9, 0.5]
    for hour, loss in enumerate(losses, 1):
        commit(folder, hour, time_s=3600.0 * hour, metrics={"loss": loss})
        prune(folder, **{"max_to_keep": 1, **options})
        folder = attempt(folder.path)
    assert steps(folder) == kept


@pytest.mark.parametrize(
    "options",
    [{"max_to_keep": 0}, {"keep_every_n_hours": 0}, {"best_mode": "good"}, {"n_best": 0}, {"keep_every_n_steps": 0}],
)
def test_bad_retention(options):
    with pytest.raises(UsageError, match="CheckpointManager"):
        Retention(**options)


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="folder.*written"):
        attempt(tmp_path / "file" / "below")


OPERATIONS = ["create", "allocate", "write", "sync", "close", "rename", "sync_folder"]


@pytest.mark.feature("checkpoints.atomic-commit")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_any_failing_operation_leaves_the_previous_one_usable(folder, disk, operation, code):
    commit(folder, 1)
    disk.fail(operation, code)
    with pytest.raises(CheckpointError, match="Earlier") as caught:
        commit(folder, 2)
    disk.fail("", 0)
    assert os.strerror(code) in str(caught.value)
    assert str(folder.path) in str(caught.value)
    if operation == "sync_folder":
        expected_value = 2
    else:
        expected_value = 1
    assert latest_value(folder) == expected_value, "a whole file, whose name may be lost"
    assert not list(folder.path.rglob("*.tmp-*"))


def test_a_full_disk_is_noticed_before_anything_is_written(folder, monkeypatch):
    commit(folder, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 0, 255)))
    with pytest.raises(CheckpointError, match="bytes.*free.*36864"):
        commit(folder, 2)
    assert latest_value(folder) == 1


def test_a_file_system_without_a_size_is_not_full(folder, monkeypatch):
    """As ramfs, and tmpfs without a limit."""
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    commit(folder, 1)
    assert latest_value(folder) == 1


def test_missing_memory_for_a_copy_is_reported(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CheckpointError, match="8192.*Cannot"):
        FileImage().resize(5000, 0, 0)


class NoHugePages(mmap.mmap):
    """Memory as of a kernel that was built without transparent huge pages."""

    def madvise(self, *arguments):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_kernel_without_huge_pages_is_good_enough(folder, monkeypatch):
    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    commit(folder, 1)
    assert latest_value(folder) == 1


def test_a_disk_that_fills_while_hdf5_writes(folder):
    """A real limit instead of a patched call: files of this process may not grow beyond 64 KiB."""
    import resource
    import signal

    commit(folder, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(CheckpointError, match="Earlier"):
            commit(folder, 2, n_elements=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert latest_value(folder) == 1
    assert commit(folder, 3, n_elements=1 << 20).exists()


class RecordingDisk(Disk):
    def __init__(self):
        self.done = []

    def __getattribute__(self, name):
        real = object.__getattribute__(self, name)
        if name == "done" or name.startswith("_"):
            return real

        def operation(*arguments):
            target = next((str(a) for a in arguments if isinstance(a, os.PathLike)), "")
            self.done.append((name, target.rpartition("/")[2].partition(".tmp")[0].lstrip(".")))
            return real(*arguments)

        return operation


def test_room_is_allocated_before_a_file_is_written(tmp_path):
    disk = Disk()
    descriptor = disk.create(tmp_path / "file")
    disk.allocate(descriptor, 1 << 20)
    disk.close(descriptor)
    status = (tmp_path / "file").stat()
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.allocate(descriptor, 1)


@pytest.mark.feature("checkpoints.atomic-commit")
def test_a_commit_is_the_file_then_its_name_then_the_folder(tmp_path):
    """Without any one of these syncs a power cut can leave a name whose file is not on the disk."""
    disk = RecordingDisk()
    folder = attempt(tmp_path, disk)
    commit(folder, 1)
    disk.done.clear()
    commit(folder, 2)
    name = "step-00000002-0001.h5"
    looked = disk.done[:3]
    writes = [entry for entry in disk.done[3:] if entry[0] != "write"]
    assert looked == [("create", "listing"), ("close", ""), ("remove", "listing")], "who else has begun"
    assert writes == [
        ("create", name),
        *[("allocate", ""), ("sync", ""), ("close", ""), ("rename", name)],
        ("sync_folder", tmp_path.name),
    ]


class OrderedDisk(Disk):
    """Notes the offsets of writes."""

    def __init__(self):
        self.offsets = []

    def write(self, descriptor, data, offset):
        self.offsets.append(offset)
        return super().write(descriptor, data, offset)


def test_the_header_is_written_last(tmp_path):
    disk = OrderedDisk()
    folder = attempt(tmp_path, disk)
    commit(folder, 1)
    disk.offsets.clear()
    commit(folder, 2)
    assert disk.offsets[-1] == 0
    assert min(disk.offsets[:-1]) == 4096


@pytest.mark.parametrize("operation", OPERATIONS)
def test_saving_a_step_again_never_loses_the_first_save(folder, disk, operation):
    first = commit(folder, 7)
    disk.fail(operation, errno.EROFS)
    with pytest.raises(CheckpointError):
        commit(folder, 7, n_elements=50)
    disk.fail("", 0)
    assert latest_value(folder) == 7
    assert commit(folder, 7, n_elements=50) == first == folder.latest()[1]
    assert len(folder.read_latest().arrays[0].values) == 50


def test_an_attempt_that_goes_back_in_its_own_steps_can_save_the_next_one(folder):
    commit(folder, 5)
    path = commit(folder, 10)
    path.write_bytes(path.read_bytes()[:-1])
    folder.resume_from(folder.read_latest().saved)
    commit(folder, 6)
    assert folder.read_latest().saved == Saved(1, 6)


def test_a_save_into_a_folder_that_was_removed_says_so(folder):
    commit(folder, 7)
    shutil.rmtree(folder.path)
    with pytest.raises(CheckpointError, match=r"save.*folder.*removed"):
        commit(folder, 8)


def test_a_step_before_the_last_is_refused(folder):
    commit(folder, 300)
    with pytest.raises(CheckpointError, match="300.*5.*restore.*first"):
        commit(folder, 5)
    assert names(folder) == ["step-00000300-0001.h5"]


def test_a_renamed_checkpoint_is_not_taken_for_another_step(folder, caplog):
    commit(folder, 1)
    path = commit(folder, 2)
    path.rename(folder.path / str(Saved(1, 9)))
    assert latest_value(folder) == 1
    assert "expected step 9 in " in caplog.text


def test_what_cannot_be_pruned_stays(folder, disk, caplog):
    for step in (1, 2):
        commit(folder, step)
    disk.fail("remove", errno.EACCES)
    prune(folder, 1)
    assert "old checkpoints stay" in caplog.text
    assert steps(folder) == [1, 2]


def test_a_run_keeps_its_name_and_a_copy_gets_another(folder, tmp_path):
    assert folder.run_id() == attempt(folder.path).run_id() != ""
    shutil.copytree(folder.path, tmp_path / "copy")
    assert attempt(tmp_path / "copy").run_id() not in ("", folder.run_id())
    folder.path.rename(tmp_path / "moved")
    assert Store(tmp_path / "moved").run_id() == folder_id(tmp_path / "moved")


def folder_id(path):
    return (path / "run-id").read_text().split()[0]


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda path: path.write_text("x/../.. y"), "got 'x/../.. y'"),
        (lambda path: path.write_bytes(b"ab\xffcd"), "got 'utf-8' codec can't decode byte 0xff"),
        (lambda path: path.write_text("x" * 5000), "got no file of at most 1024 bytes"),
        (os.mkfifo, "got no file of at most 1024 bytes"),
    ],
    ids=["a path", "no text", "too long", "a pipe"],
)
def test_a_name_of_a_run_that_is_none_is_refused(folder, make, got):
    make(folder.path / "run-id")
    with pytest.raises(CheckpointError, match=f"expected the name of the run in .*run-id, {got}.*; remove the file"):
        folder.run_id()


# -- attempts -----------------------------------------------------------------------------------------------------


def test_reading_makes_nothing(tmp_path):
    store = Store(tmp_path / "run" / "checkpoints")
    assert (store.read_latest(), store.latest(), store.saved(), store.latest_attempts(9)) == (None, None, [], [])
    assert not (tmp_path / "run").exists()


def test_a_later_attempt_replaces_an_earlier_one(folder):
    commit(folder, 10)
    later = attempt(folder.path)
    with pytest.raises(AttemptReplaced, match="attempt.*1.*2.*another") as caught:
        commit(folder, 20)
    assert caught.value.exit_code == 76
    assert steps(folder) == [10]
    assert later.read_latest().saved == Saved(1, 10)
    later.resume_from(Saved(1, 10))
    commit(later, 11)
    assert later.read_latest().saved == Saved(2, 11)


def test_a_zombie_that_was_about_to_commit_does_no_harm(folder, monkeypatch):
    """It looked, saw nobody, and was suspended; its checkpoint counts as older than that of the later attempt."""
    commit(folder, 10)
    later = attempt(folder.path)
    later.resume_from(later.read_latest().saved)
    commit(later, 11)
    monkeypatch.setattr(folder, "check_current", lambda **options: None)
    commit(folder, 500)
    assert later.read_latest().saved == Saved(2, 11)
    prune(later, 1)
    assert names(later) == ["step-00000011-0002.h5"]


def test_two_attempts_that_begin_at_once_get_two_numbers(tmp_path):
    code = """
import sys
from hpcdist.checkpoint.store import Store
store = Store(sys.argv[1])
store.begin()
print(store.attempt)
"""
    jobs = [subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) for _ in range(4)]
    assert sorted(int(job.communicate(timeout=50)[0]) for job in jobs) == [1, 2, 3, 4]


class OvertakenDisk(Disk):
    """Another attempt takes the first number right before this one does."""

    def make_new(self, path):
        if path.name == "0001.jsonl":
            path.touch()
        super().make_new(path)


def test_an_attempt_that_is_overtaken_takes_the_next_number(tmp_path):
    assert attempt(tmp_path, OvertakenDisk()).attempt == 2


def test_a_checkpoint_of_a_later_attempt_without_its_ledger_is_older_than_what_is_saved_now(folder):
    """A file of another run that was copied here, or a ledger that was removed."""
    path = commit(folder, 300)
    path.rename(folder.path / str(Saved(7, 300)))
    later = attempt(folder.path)
    assert later.attempt == 8
    commit(later, 301)
    prune(later, 1)
    assert later.read_latest().saved == Saved(8, 301)


def test_a_listing_that_is_old_does_not_keep_an_attempt_from_its_number(tmp_path, monkeypatch):
    """Network file systems keep listings for up to a minute."""
    for _ in range(5):
        attempt(tmp_path)
    monkeypatch.setattr(Store, "_attempts", lambda store: [1])
    assert attempt(tmp_path).attempt == 6


class BesideDisk(Disk):
    """Another attempt begins right before this one makes a file."""

    def create(self, path):
        if len(list((path.parent / "attempts").iterdir())) == 1:
            attempt(path.parent)
        return super().create(path)


class LostDisk(Disk):
    """Another attempt begins while this one writes, and sweeps what it has written."""

    def sync(self, descriptor):
        super().sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if ".tmp-" in path.name:
            attempt(path.parent)


class LastMomentDisk(Disk):
    """Another attempt begins and sweeps when this one has looked for it, and is about to rename."""

    def rename(self, path, to):
        if ".tmp-" in path.name:
            attempt(path.parent)
        super().rename(path, to)


@pytest.mark.parametrize("disk", [BesideDisk(), LostDisk(), LastMomentDisk()])
def test_an_attempt_replaced_while_it_writes_commits_nothing(tmp_path, disk):
    with pytest.raises(AttemptReplaced, match="attempt.*1.*latest"):
        commit(attempt(tmp_path, disk), 1)
    assert names(Store(tmp_path)) == []


def test_what_cannot_be_removed_is_reported(tmp_path, disk, caplog):
    (commit(attempt(tmp_path), 1).parent / ".step-00000002-0001.h5.tmp-00000000-0123456789abcdef").write_bytes(b"half")
    disk.fail("remove", errno.EIO)
    assert attempt(tmp_path, disk).attempt == 2
    assert "incomplete files stay in " in caplog.text


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_stepped_over(folder, make):
    commit(folder, 1)
    make(folder.path / str(Saved(1, 2)))
    assert folder.read_latest().saved == Saved(1, 1)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(folder, monkeypatch, caplog):
    """Not even at the last look."""
    monkeypatch.setattr(store_module, "_MAX_LOOKS", 1)
    commit(folder, 1)
    commit(folder, 2)

    def remove(saved, file):
        if saved.step == 2:
            file.path.unlink()
            raise CheckpointDamaged("its blocks are gone")
        return saved

    assert folder.use_latest(remove) == Saved(1, 1)
    assert (folder.damaged, caplog.text) == ([], "")


def test_a_suspect_is_stepped_over_unless_it_is_the_only_one(folder):
    for step in (1, 2):
        commit(folder, step)
    assert folder.read_latest({2}).saved == Saved(1, 1)
    assert folder.read_latest({1, 2}).saved == Saved(1, 2)


def lines_of(store, number):
    return store.ledger_of(number).read_text().splitlines()


def test_the_first_save_of_a_later_step_is_noted_once_and_before_it_is_written(folder, monkeypatch):
    commit(folder, 5)
    later = attempt(folder.path)
    later.resume_from(Saved(1, 5))
    commit(later, 5)
    monkeypatch.setattr(Store, "_check_space", lambda store, nbytes: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            commit(later, 6)
    assert lines_of(later, 2) == ['{"event": "save"}']


def test_a_line_of_the_ledger_is_durable_and_starts_after_a_torn_one(tmp_path):
    disk = RecordingDisk()
    folder = attempt(tmp_path, disk)
    disk.done.clear()
    folder.note("one", step=1)
    assert [entry[0] for entry in disk.done] == ["open_end", "write", "sync", "close"]
    path = tmp_path / "attempts" / "0001.jsonl"
    path.write_text(path.read_text() + '{"ev')
    folder.note("two")
    assert lines_of(folder, 1) == ['{"event": "one", "step": 1}', '{"ev', '{"event": "two"}']


READS = {"open": (os, "open"), "header and index": (os, "pread"), "arrays": (os, "preadv")}


def fail_reads(monkeypatch, call, error, n_times):
    """Let the first reads of some kind fail; return the pauses that are made."""
    module, name = READS[call]
    whole = getattr(module, name)
    pauses = []
    errors = [error] * n_times

    def fail(*arguments, **options):
        if errors:
            raise errors.pop()
        return whole(*arguments, **options)

    monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(read.time, "sleep", pauses.append)
    return pauses


ERRORS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM]


@pytest.mark.parametrize("call", READS)
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_not_damaged(folder, monkeypatch, call, code):
    commit(folder, 1)
    commit(folder, 2)
    error = OSError(code, os.strerror(code))
    pauses = fail_reads(monkeypatch, call, error, 2)
    assert folder.read_latest().saved == Saved(1, 2), "it was well at the third try"
    assert 0 < sum(pauses) <= 1
    pauses = fail_reads(monkeypatch, call, error, 100)
    with pytest.raises(CheckpointError, match=f"step-00000002.*{os.strerror(code)}") as caught:
        folder.read_latest()
    assert not isinstance(caught.value, CheckpointDamaged)
    assert len(pauses) == 2
    monkeypatch.undo()
    folder.resume_from(folder.read_latest().saved)
    assert not list(folder.path.rglob("*.bad"))


def test_a_file_that_is_gone_was_pruned_or_is_damage(folder, monkeypatch):
    commit(folder, 1)
    commit(folder, 2)
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    fail_reads(monkeypatch, "open", gone, 1)
    assert folder.read_latest().saved == Saved(1, 2), "a second listing tells"
    fail_reads(monkeypatch, "open", gone, 2)
    assert folder.read_latest().saved == Saved(1, 1)
    assert folder.damaged == [Saved(1, 2)]


class Overtaken(Store):
    """Reads while a writer commits the next step, and prunes the one that is about to be read, some times."""

    def __init__(self, writer, n_times):
        super().__init__(writer.path)
        self.writer = writer
        self.n_times = n_times

    def saved(self):
        saved_checkpoints = super().saved()
        if self.n_times:
            self.n_times -= 1
            commit(self.writer, saved_checkpoints[-1].step + 1)
            prune(self.writer, 1)
        return saved_checkpoints


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(store_module, "_LOOK_AGAIN_S", 0.0)


@pytest.mark.parametrize("n_times", [1, 2, 9])
def test_a_writer_that_prunes_while_a_file_is_read_damages_none(folder, n_times, caplog):
    commit(folder, 1)
    reader = Overtaken(folder, n_times)
    assert reader.read_latest().saved == Saved(1, 1 + n_times)
    assert reader.damaged == []
    assert "skipped" not in caplog.text


def test_a_writer_that_is_always_quicker_is_reported(folder):
    commit(folder, 1)
    reader = Overtaken(folder, 100)
    with pytest.raises(CheckpointError, match="checkpoint.*stays"):
        reader.read_latest()
    assert reader.damaged == []


@pytest.mark.parametrize(("is_direct", "n_syncs"), [(False, 1 + 3), (True, 1)])
def test_cached_writes_are_synced_on_the_way(tmp_path, monkeypatch, is_direct, n_syncs):
    """The sync at the end, which no block tells of, never takes long."""

    def set_flags(descriptor, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT and not is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return 0

    monkeypatch.setattr(durable, "SYNC_EVERY_BYTES", 2 * 4096)
    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    disk = Disk()
    syncs = []
    monkeypatch.setattr(disk, "sync", syncs.append)
    durable.replace_file(disk, tmp_path / "file", durable.in_order([memoryview(bytes(4096))] * 7))
    assert len(syncs) == n_syncs
    assert (tmp_path / "file").stat().st_size == 7 * 4096
