import errno
import fcntl
import mmap
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from hpcdist.checkpoint import durable, manifest, safe_open
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import RESTORING, Place, crashed_twice
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.reader import CheckpointReader, latest_checkpoint
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tier import Tier
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import AttemptReplaced, CheckpointDamaged, CheckpointError, UsageError


class FailingDisk(Disk):
    """A disk whose nth call of some operation fails, and all later ones if it `stays` so."""

    def __init__(self):
        self.failing, self.code, self.nth, self.stays, self.calls = "", 0, 1, True, 0

    def fail(self, operation, code, nth=1, stays=True):
        self.failing, self.code, self.nth, self.stays, self.calls = operation, code, nth, stays, 0

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
    folder = CheckpointFolder(path, disk)
    folder.begin()
    return folder


@pytest.fixture
def folder(tmp_path, disk):
    return attempt(tmp_path / "run" / "checkpoints", disk)


def commit(folder, step, n_elements=100, **more):
    image = FileImage()
    lay_out(image, {"dict": []}, [NamedArray("x", "float32", np.full(n_elements, step, np.float32))])
    path = folder.new_data_path(step)
    folder.newest = folder.commit(step, path, image, {}, **more)
    return path


def prune(folder, *options, **named):
    folder.prune(folder.newest, Retention(*options, **named))


def steps(folder):
    return [place.step for place in folder.places()]


def latest_value(folder):
    found = folder.read_latest()
    return None if found is None else float(found.arrays[0].values[0])


def names(folder):
    """Return the files of a folder."""
    return sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file())


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_nothing_there(folder, tmp_path):
    assert folder.read_latest() is None
    assert latest_checkpoint(folder.path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_latest_is_the_highest_step(folder):
    for step in (5, 20, 100000000):
        commit(folder, step)
    assert latest_value(folder) == 100000000
    assert latest_checkpoint(folder.path) == str(folder.path / "gen-0001" / "step-100000000.h5")


@pytest.mark.parametrize("harm", [damage, lambda path: path.write_bytes(path.read_bytes()[:-1]), os.unlink])
@pytest.mark.parametrize("suffix", [".h5", ".json"])
def test_damage_is_stepped_over_and_explained(folder, harm, suffix, caplog):
    commit(folder, 1)
    newest = commit(folder, 2)
    harm(newest.with_suffix(suffix))
    assert latest_value(folder) == 1
    gone_manifest = suffix == ".json" and not newest.with_suffix(".json").exists()
    assert gone_manifest or "skipped damaged step 2: restore: expected" in caplog.text


def test_a_file_without_manifest_is_no_checkpoint(folder):
    commit(folder, 1)
    (folder.path / "gen-0001" / "step-00000002.h5").write_bytes(b"half")
    assert latest_value(folder) == 1


def test_only_damaged_ones_is_an_error_not_a_fresh_start(folder):
    damage(commit(folder, 1))
    with pytest.raises(CheckpointError, match="got 1 damaged"):
        folder.read_latest()


def test_a_newer_format_stops_instead_of_going_back(folder):
    commit(folder, 1)
    path = commit(folder, 2)
    path.with_suffix(".json").write_text(Manifest(2, path.name, 1, "x", {}, format=99).to_text())
    with pytest.raises(CheckpointError, match="format up to 1, got 99"):
        folder.read_latest()


def test_damaged_ones_are_set_aside_once_an_older_one_is_in_use(folder):
    for step in (1, 2, 3):
        path = commit(folder, step)
    damage(path)
    later = attempt(folder.path)
    place = later.read_latest().place
    assert place == Place(1, 2)
    later.resume_from(place)
    assert steps(later) == [1, 2]
    assert sorted(p.name for p in path.parent.glob("*.bad")) == ["step-00000003.h5.bad", "step-00000003.json.bad"]
    commit(later, 3)
    assert later.read_latest().place == Place(2, 3)


def test_prune_keeps_the_last_and_leaves_no_orphans(folder):
    for step in range(1, 6):
        commit(folder, step)
    Place(1, 2).manifest(folder.path).unlink()  # a kill between removing the manifest and the file
    prune(folder, 2)
    assert names(folder) == [f"gen-0001/step-0000000{step}.{end}" for step in (4, 5) for end in ("h5", "json")]


def test_a_damaged_newest_one_is_noticed_before_others_are_removed(folder):
    commit(folder, 1)
    damage(commit(folder, 2))
    with pytest.raises(CheckpointError, match="other bytes"):
        prune(folder, 1)
    assert latest_value(folder) == 1


def test_a_damaged_manifest_neither_counts_nor_goes(folder):
    """Nor does its file; what is pruned beside it takes its file along."""
    for step in (1, 2, 3, 4):
        commit(folder, step)
    Place(1, 3).manifest(folder.path).write_text("?")
    prune(folder, 2)
    assert names(folder) == [f"gen-0001/step-0000000{step}.{kind}" for step in (2, 3, 4) for kind in ("h5", "json")]


def test_a_later_attempt_leaves_nothing_to_prune(folder, caplog):
    """A process that was replaced removes nothing any more."""
    for step in (1, 2, 3):
        commit(folder, step)
    attempt(folder.path)
    prune(folder, 1)
    assert "another attempt of this job has begun" in caplog.text
    assert len([name for name in names(folder) if name.endswith("json")]) == 3


def test_leftovers_of_killed_writers_are_swept(folder):
    (folder.path / "gen-0001" / "step-00000001.h5.tmp-123").write_bytes(b"x")
    (folder.path / "gen-0001" / "step-00000001.h5").write_bytes(b"x")
    (folder.path / "notes.txt").write_text("mine")
    later = attempt(folder.path)
    commit(later, 1)
    prune(later, 1)
    assert names(later) == ["gen-0002/step-00000001.h5", "gen-0002/step-00000001.json", "notes.txt"]
    assert not (later.path / "gen-0001").exists()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [5]),
        ({"keep_every_n_hours": 2}, [1, 3, 5]),
        ({"keep_every_n_hours": 3}, [1, 4, 5]),
        ({"keep_best": "loss"}, [2, 5]),
        ({"keep_best": "loss", "best_mode": "max"}, [4, 5]),
        ({"keep_best": "other"}, [5]),
    ],
)
def test_what_is_kept(folder, options, kept):
    """Also over attempts: all that counts is in the manifests."""
    losses = [float("nan"), 0.1, 0.1, 0.9, 0.5]
    for hour, loss in enumerate(losses, 1):
        commit(folder, hour, time_s=3600.0 * hour, metrics={"loss": loss})
        prune(folder, 1, **options)
        newest = folder.newest
        folder = attempt(folder.path)
        folder.newest = newest
    assert steps(folder) == kept


@pytest.mark.parametrize("options", [{"max_to_keep": 0}, {"keep_every_n_hours": 0}, {"best_mode": "good"}])
def test_bad_retention(options):
    with pytest.raises(UsageError, match="CheckpointManager: expected"):
        Retention(**options)


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder that can be written"):
        attempt(tmp_path / "file" / "below")


OPERATIONS = ["create", "allocate", "write", "sync", "close", "rename", "sync_folder"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_any_failing_operation_leaves_the_previous_one_usable(folder, disk, operation, code):
    commit(folder, 1)
    disk.fail(operation, code)
    with pytest.raises(CheckpointError, match="Earlier checkpoints are untouched") as caught:
        commit(folder, 2)
    disk.fail("", 0)
    assert os.strerror(code) in str(caught.value)
    assert str(folder.path) in str(caught.value)
    assert latest_value(folder) == 1
    assert not list(folder.path.rglob("*.tmp-*"))


def test_a_full_disk_is_noticed_before_anything_is_written(folder, monkeypatch):
    commit(folder, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 0, 255)))
    with pytest.raises(CheckpointError, match="bytes free in .*, got 36864"):
        commit(folder, 2)
    assert latest_value(folder) == 1


def test_a_file_system_without_a_size_is_not_full(folder, monkeypatch):
    """As ramfs, and tmpfs without a limit."""
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    commit(folder, 1)
    assert latest_value(folder) == 1


def test_missing_memory_for_a_copy_is_reported(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CheckpointError, match="expected 5000 bytes of memory for a copy .*, got Cannot"):
        FileImage().resize(5000)


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
        with pytest.raises(CheckpointError, match="Earlier checkpoints are untouched"):
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
            self.done.append((name, target.rpartition("/")[2].partition(".tmp")[0]))
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


def test_commit_is_file_then_folder_then_manifest_then_folder(tmp_path):
    """Without any one of these syncs a power cut can leave a manifest whose file is not on the disk."""
    disk = RecordingDisk()
    folder = attempt(tmp_path, disk)
    disk.done.clear()
    commit(folder, 1)
    one_file = [("allocate", ""), ("write", ""), ("sync", ""), ("close", "")]
    data, manifest = "step-00000001.h5", "step-00000001.json"
    writes = [entry for entry in disk.done if entry[0] != "write"]
    assert writes == [
        *[("create", data), *[entry for entry in one_file if entry[0] != "write"], ("rename", data)],
        ("sync_folder", "gen-0001"),
        *[("create", manifest), *[entry for entry in one_file if entry[0] != "write"], ("rename", manifest)],
        ("sync_folder", "gen-0001"),
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_saving_a_step_again_never_loses_the_first_save(folder, disk, operation, nth):
    """The nth call fails: in the file's part of the commit, or in the manifest's."""
    first = commit(folder, 7)
    disk.fail(operation, errno.EIO, nth, stays=False)
    failed = False
    try:
        commit(folder, 7, n_elements=50)
    except CheckpointError:
        failed = True
    assert failed == (disk.calls >= nth)
    disk.fail("", 0)
    assert latest_value(folder) == 7
    second = commit(folder, 7)
    assert folder.latest() == second != first
    prune(folder, 1)
    assert names(folder) == sorted([f"gen-0001/{second.name}", "gen-0001/step-00000007.json"])


def test_a_step_before_the_last_is_refused(folder):
    commit(folder, 300)
    with pytest.raises(CheckpointError, match="expected a step after 300, .* got 5; restore first"):
        commit(folder, 5)
    assert names(folder) == ["gen-0001/step-00000300.h5", "gen-0001/step-00000300.json"]


def test_a_renamed_checkpoint_is_not_taken_for_another_step(folder, caplog):
    commit(folder, 1)
    path = commit(folder, 2)
    path.with_suffix(".json").rename(Place(1, 9).manifest(folder.path))
    assert latest_value(folder) == 1
    assert "manifest of step 9" in caplog.text


def test_what_cannot_be_pruned_stays(folder, disk, caplog):
    for step in (1, 2):
        commit(folder, step)
    disk.fail("remove", errno.EACCES)
    prune(folder, 1)
    assert "old checkpoints stay" in caplog.text
    assert steps(folder) == [1, 2]


def test_a_run_keeps_its_name(folder):
    assert folder.run_id() == attempt(folder.path).run_id() != ""


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


def test_a_later_attempt_replaces_an_earlier_one(folder):
    commit(folder, 10)
    later = attempt(folder.path)
    with pytest.raises(AttemptReplaced, match="generation 1 to be the newest in .*, got 2: another attempt") as caught:
        commit(folder, 20)
    assert caught.value.exit_code == 76
    assert steps(folder) == [10]
    assert later.read_latest().place == Place(1, 10)
    later.resume_from(Place(1, 10))
    commit(later, 11)
    assert later.read_latest().place == Place(2, 11)


def test_a_zombie_that_was_about_to_commit_does_no_harm(folder, monkeypatch):
    """It looked, saw nobody, and was suspended; its checkpoint lies in its own generation, behind the newer one."""
    commit(folder, 10)
    later = attempt(folder.path)
    later.resume_from(later.read_latest().place)
    commit(later, 11)
    monkeypatch.setattr(folder, "check_current", lambda: None)
    commit(folder, 500)
    assert later.read_latest().place == Place(2, 11)
    prune(later, 1)
    assert names(later) == ["gen-0002/step-00000011.h5", "gen-0002/step-00000011.json"]
    with pytest.raises(CheckpointError):
        commit(folder, 600)  # its folder is gone


def test_two_attempts_that_begin_at_once_get_two_generations(tmp_path):
    code = """
import sys
from hpcdist.checkpoint.folder import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
folder.begin()
print(folder.generation)
"""
    jobs = [subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) for _ in range(4)]
    assert sorted(int(job.communicate(timeout=50)[0]) for job in jobs) == [1, 2, 3, 4]


class OvertakenDisk(Disk):
    """Another attempt makes the first generation right before this one does."""

    def make_folder(self, path):
        if path.name == "gen-0001":
            os.mkdir(path)
        super().make_folder(path)


def test_an_attempt_that_is_overtaken_takes_the_next_number(tmp_path):
    assert attempt(tmp_path, OvertakenDisk()).generation == 2


class BesideDisk(Disk):
    """Another attempt begins right before this one makes a file, or gives it its name."""

    def __init__(self, operation, suffix):
        self.operation, self.suffix = operation, suffix

    def begin(self, operation, path):
        if self.operation == operation and self.suffix in path.suffixes and path.parent.name == "gen-0001":
            self.operation = ""
            attempt(path.parents[1])

    def create(self, path):
        self.begin("create", path)
        return super().create(path)

    def rename(self, path, to):
        self.begin("rename", to)
        super().rename(path, to)


@pytest.mark.parametrize("suffix", [".h5", ".json"])
@pytest.mark.parametrize("operation", ["create", "rename"])
def test_an_attempt_replaced_while_it_writes_is_an_error(tmp_path, operation, suffix):
    """Though what it writes was removed as the remains of a killed attempt: it has committed nothing."""
    with pytest.raises(AttemptReplaced, match="expected generation 1 to be the newest"):
        commit(attempt(tmp_path, BesideDisk(operation, suffix)), 1)
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_what_killed_writers_left_goes_before_the_first_save(tmp_path):
    """Where the disk is nearly full that would fail without the room."""
    first = attempt(tmp_path)
    kept = commit(first, 1)
    for name in ("step-00000002.h5.tmp-99", "step-00000002.h5", "step-00000001-1.h5"):
        (kept.parent / name).write_bytes(b"half")
    (tmp_path / "run-id.tmp-99").write_text("half")
    (kept.parent / "step-00000003.h5.bad").write_bytes(b"to be looked at")
    attempt(tmp_path)
    names = {"step-00000001.h5", "step-00000001.json", "step-00000003.h5.bad"}
    assert {path.name for path in kept.parent.iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == {"gen-0001", "gen-0002"}


def test_what_cannot_be_removed_is_reported(tmp_path, disk, caplog):
    (commit(attempt(tmp_path), 1).parent / "step-00000002.h5").write_bytes(b"half")
    disk.fail("remove", errno.EIO)
    assert attempt(tmp_path, disk).generation == 2
    assert "incomplete files stay in " in caplog.text


def die(path, restored, **more):
    folder = attempt(path)
    folder.note_attempt(restored, **more)
    return folder


def test_attempts_without_a_checkpoint_are_counted(tmp_path):
    first = die(tmp_path, None)
    commit(first, 5)
    assert attempt(tmp_path).fruitless_attempts() == []
    for _ in range(2):
        die(tmp_path, "gen-0001/step-00000005")
    found = attempt(tmp_path).fruitless_attempts()
    assert [one.generation for one in found] == [4, 3]
    assert crashed_twice(found) == {5}
    assert crashed_twice(found[:1]) == set()


def test_attempts_that_came_to_a_save_are_counted_and_no_suspects_of_their_checkpoint(tmp_path):
    """A disk that is full, or a save that is cut off again and again, says nothing against what was restored."""
    commit(die(tmp_path, None), 5)
    for _ in range(2):
        die(tmp_path, "gen-0001/step-00000005", has_trained=True)
    die(tmp_path, "gen-0001/step-00000005")
    found = attempt(tmp_path).fruitless_attempts()
    assert len(found) == 3
    assert crashed_twice(found) == set()
    die(tmp_path, "gen-0001/step-00000005")
    assert crashed_twice(attempt(tmp_path).fruitless_attempts()) == {5}


def test_an_attempt_that_ended_by_itself_breaks_the_row(tmp_path):
    die(tmp_path, None)
    die(tmp_path, None, has_ended=True)
    die(tmp_path, None)
    assert [one.generation for one in attempt(tmp_path).fruitless_attempts()] == [3]


def test_a_suspect_is_stepped_over_unless_it_is_the_only_one(folder):
    for step in (1, 2):
        commit(folder, step)
    assert folder.read_latest({2}).place == Place(1, 1)
    assert folder.read_latest({1, 2}).place == Place(1, 2)


def test_empty_generations_stay_until_there_is_a_checkpoint(tmp_path):
    for _ in range(3):
        folder = die(tmp_path, None)
    assert len(folder.fruitless_attempts()) == 2
    commit(folder, 1)
    prune(folder, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gen-0003"]


def test_a_checkpoint_that_was_found_damaged_was_no_progress(tmp_path):
    """A disk that spoils what is written: each attempt goes on from step 5 and leaves a step 10 that is damaged."""
    commit(die(tmp_path, None), 5)
    for n_before in range(3):
        folder = attempt(tmp_path)
        folder.note_attempt(RESTORING, has_ended=False)
        place = folder.read_latest().place
        assert place == Place(1, 5)
        folder.resume_from(place)
        folder.note_attempt(str(place), has_ended=False)
        assert len(folder.fruitless_attempts(place.step)) == n_before
        damage(commit(folder, 10))


def test_a_save_of_the_step_that_was_restored_forgets_no_attempt_that_died(tmp_path):
    """As is made of a state that was found in memory."""
    commit(die(tmp_path, None), 5)
    for _ in range(2):
        die(tmp_path, "gen-0001/step-00000005")
    folder = die(tmp_path, "gen-0001/step-00000005")
    folder.resume_from(Place(1, 5))
    commit(folder, 5)
    prune(folder, 3)
    assert len(attempt(tmp_path).fruitless_attempts()) == 3
    folder = attempt(tmp_path)
    folder.resume_from(Place(4, 5))
    commit(folder, 6)
    prune(folder, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gen-0001", "gen-0004", "gen-0006"]


def test_who_dies_while_it_restores_counts(tmp_path):
    commit(die(tmp_path, None), 5)
    for _ in range(2):
        die(tmp_path, RESTORING)
    folder = attempt(tmp_path)
    assert len(folder.fruitless_attempts()) == len(folder.fruitless_attempts(5)) == 2
    assert crashed_twice(folder.fruitless_attempts()) == set()


def test_the_next_one_went_on_from_a_later_step_so_this_one_came_further(tmp_path):
    die(tmp_path, None)
    die(tmp_path, "gen-0001/step-00000050")  # in memory
    die(tmp_path, "gen-0002/step-00000090")
    folder = attempt(tmp_path)
    assert [one.generation for one in folder.fruitless_attempts()] == [3]
    assert [one.generation for one in folder.fruitless_attempts(90)] == [3]
    assert folder.fruitless_attempts(91) == []


def test_a_replaced_attempt_notes_nothing(tmp_path):
    first = die(tmp_path, None)
    attempt(tmp_path)
    with pytest.raises(AttemptReplaced):
        first.note_attempt(None, has_ended=True)


READS = {
    "manifest": (manifest, "read_text"),
    "digest": (manifest, "digest_file"),
    "hdf5": (h5py, "File"),
}
IN_TEXT = "Can't read data (file read failed: file descriptor = 3, errno = 5, error message = 'Input/output error')"


def fail_reads(monkeypatch, read, error, n_times):
    """Let the first reads of some kind fail; return the pauses that are made."""
    module, name = READS[read]
    whole, pauses, errors = getattr(module, name), [], [error] * n_times

    def fail(*arguments, **options):
        if errors:
            raise errors.pop()
        return whole(*arguments, **options)

    monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(safe_open.time, "sleep", pauses.append)
    return pauses


ERRORS = [
    *(OSError(code, os.strerror(code)) for code in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM)),
    OSError(IN_TEXT),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.errno))
def test_a_file_that_cannot_be_read_is_not_damaged(folder, monkeypatch, read, error):
    commit(folder, 1)
    commit(folder, 2)
    pauses = fail_reads(monkeypatch, read, error, 2)
    assert folder.read_latest().place == Place(1, 2), "it was well at the third try"
    assert 0 < sum(pauses) <= 1
    pauses = fail_reads(monkeypatch, read, error, 100)
    with pytest.raises(
        CheckpointError, match=r"step-00000002.*(Input/output|Stale|denied|open files|memory)"
    ) as caught:
        folder.read_latest()
    assert not isinstance(caught.value, CheckpointDamaged)
    assert len(pauses) == 2
    monkeypatch.undo()
    folder.resume_from(folder.read_latest().place)
    assert not list(folder.path.rglob("*.bad"))


@pytest.mark.parametrize("read", READS)
def test_a_file_that_is_gone_was_pruned_or_is_damage(folder, monkeypatch, read):
    commit(folder, 1)
    commit(folder, 2)
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    fail_reads(monkeypatch, read, gone, 1)
    assert folder.read_latest().place == Place(1, 2), "a second listing tells"
    fail_reads(monkeypatch, read, gone, 2)
    assert folder.read_latest().place == Place(1, 1)
    assert folder.damaged == [Place(1, 2)]


class Overtaken(CheckpointReader):
    """Reads while a writer commits the next step, and prunes the one that is read, some times."""

    def __init__(self, writer, n_times):
        super().__init__(writer.path)
        self.writer, self.n_times = writer, n_times

    def manifest(self, place):
        found = super().manifest(place)
        if self.n_times:
            self.n_times -= 1
            commit(self.writer, place.step + 1)
            prune(self.writer, 1)
        return found


@pytest.mark.parametrize("n_times", [1, 2, 9])
def test_a_writer_that_prunes_while_a_file_is_read_damages_none(folder, n_times, caplog):
    commit(folder, 1)
    reader = Overtaken(folder, n_times)
    assert reader.read_latest().place == Place(1, 1 + n_times)
    assert reader.damaged == []
    assert "skipped" not in caplog.text


def test_a_writer_that_is_always_quicker_is_reported(folder):
    commit(folder, 1)
    reader = Overtaken(folder, 100)
    with pytest.raises(CheckpointError, match="expected a checkpoint in .* that stays until it is read"):
        reader.read_latest()
    assert reader.damaged == []
    assert steps(folder) == [11]


def test_blocks_that_are_read_back_count_as_progress(folder):
    tier = Tier(folder, Retention(3))
    tier.save(1, {"dict": []}, [NamedArray("x", "float32", np.ones(4 << 20, np.float32))], {}, {})
    tier.finish()
    assert folder.n_blocks_read >= 4
    assert tier.n_blocks > folder.n_blocks_read


@pytest.mark.parametrize(("is_direct", "n_syncs"), [(False, 1 + 3), (True, 1)])
def test_cached_writes_are_synced_on_the_way(tmp_path, monkeypatch, is_direct, n_syncs):
    """The sync at the end, which no block tells of, never takes long."""

    def set_flags(descriptor, command, flags=0):
        if flags & os.O_DIRECT and not is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return 0

    monkeypatch.setattr(durable, "SYNC_EVERY_BYTES", 2 * 4096)
    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    disk, syncs = Disk(), []
    monkeypatch.setattr(disk, "sync", syncs.append)
    durable.replace_file(disk, tmp_path / "file", [memoryview(bytes(4096))] * 7)
    assert len(syncs) == n_syncs
    assert (tmp_path / "file").stat().st_size == 7 * 4096
