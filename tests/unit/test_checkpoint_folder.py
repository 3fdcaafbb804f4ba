import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.folder import CheckpointFolder, latest_checkpoint
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    folder.create()
    return folder


def commit(folder, step, n_elements=100):
    return folder.commit(step, {"dict": []}, [NamedArray("x", "float32", np.full(n_elements, step, np.float32))], {})


def latest_value(folder):
    found = folder.read_latest()
    return None if found is None else float(found[2][0].values[0])


def names(folder):
    """Return the files of a folder but for the lock."""
    return sorted(path.name for path in folder.path.iterdir() if path.name != ".lock")


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
    assert latest_checkpoint(folder.path) == str(folder.path / "step-100000000.h5")


@pytest.mark.parametrize("harm", [damage, lambda path: path.write_bytes(path.read_bytes()[:-1]), os.unlink])
@pytest.mark.parametrize("suffix", [".h5", ".json"])
def test_damage_is_stepped_over_and_explained(folder, harm, suffix, caplog):
    commit(folder, 1)
    newest = commit(folder, 2)
    harm(newest.with_suffix(suffix))
    assert latest_value(folder) == 1
    gone_manifest = suffix == ".json" and not newest.with_suffix(".json").exists()
    assert gone_manifest or "step 2 is skipped: restore: expected" in caplog.text


def test_a_file_without_manifest_is_no_checkpoint(folder):
    commit(folder, 1)
    (folder.path / "step-00000002.h5").write_bytes(b"half")
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
        commit(folder, step)
    damage(folder.path / "step-00000003.h5")
    folder.set_aside_after(2)
    assert folder.steps() == [1, 2]
    assert sorted(p.name for p in folder.path.glob("*.bad")) == ["step-00000003.h5.bad", "step-00000003.json.bad"]


def test_prune_keeps_the_last_and_leaves_no_orphans(folder):
    for step in range(1, 6):
        commit(folder, step)
    folder.manifest_path(2).unlink()  # a kill between removing the manifest and the file
    folder.prune(2)
    assert names(folder) == [
        "step-00000004.h5",
        "step-00000004.json",
        "step-00000005.h5",
        "step-00000005.json",
    ]


def test_leftovers_of_killed_writers_are_swept(folder):
    (folder.path / "step-00000001.h5.tmp-123").write_bytes(b"x")
    (folder.path / "notes.txt").write_text("mine")
    folder.create()
    assert names(folder) == ["notes.txt"]


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder that can be written"):
        CheckpointFolder(tmp_path / "file" / "below").create()


OPERATIONS = ["fsync", "replace", "pwrite", "posix_fallocate"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_any_failing_operation_leaves_the_previous_one_usable(folder, monkeypatch, operation, code):
    commit(folder, 1)

    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        with pytest.raises(CheckpointError, match="Earlier checkpoints are untouched") as caught:
            commit(folder, 2)
    assert os.strerror(code) in str(caught.value)
    assert str(folder.path) in str(caught.value)
    assert latest_value(folder) == 1
    assert not list(folder.path.glob("*.tmp-*"))


def test_a_full_disk_is_noticed_before_anything_is_written(folder, monkeypatch):
    commit(folder, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 0, 255)))
    with pytest.raises(CheckpointError, match="bytes free in .*, got 36864"):
        commit(folder, 2)
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


def recorded_operations(monkeypatch, act):
    """Return the names of the durable operations that act() performs, in order."""
    names = []

    def record(name, real):
        def operation(*arguments):
            target = next((str(a) for a in arguments if isinstance(a, (str, os.PathLike))), "")
            names.append((name, target.rpartition("/")[2].partition(".tmp")[0]))
            return real(*arguments)

        return operation

    with monkeypatch.context() as patch:
        patch.setattr(durable, "fsync", record("fsync", durable.fsync))
        patch.setattr(os, "replace", record("replace", os.replace))
        act()
    return names


def test_commit_is_file_then_folder_then_manifest_then_folder(folder, monkeypatch):
    """Without any one of these syncs a power cut can leave a manifest whose file is not on the disk."""
    assert recorded_operations(monkeypatch, lambda: commit(folder, 1)) == [
        ("fsync", "step-00000001.h5"),
        ("replace", "step-00000001.h5"),
        ("fsync", "checkpoints"),
        ("fsync", "step-00000001.json"),
        ("replace", "step-00000001.json"),
        ("fsync", "checkpoints"),
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_saving_a_step_again_never_loses_the_first_save(folder, monkeypatch, operation, nth):
    """The nth call fails: in the file's part of the commit, or in the manifest's."""
    first = commit(folder, 7)
    real, calls = getattr(os, operation), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        failed = False
        try:
            commit(folder, 7, n_elements=50)
        except CheckpointError:
            failed = True
    assert failed == (len(calls) >= nth)
    assert latest_value(folder) == 7
    second = commit(folder, 7)
    assert folder.latest() == second != first
    folder.prune(1)
    assert names(folder) == sorted([second.name, "step-00000007.json"])


def test_a_step_before_the_last_is_refused(folder):
    commit(folder, 300)
    with pytest.raises(CheckpointError, match="expected a step after 300, .* got 5; restore first"):
        commit(folder, 5)
    assert names(folder) == ["step-00000300.h5", "step-00000300.json"]


def test_a_renamed_checkpoint_is_not_taken_for_another_step(folder, caplog):
    commit(folder, 1)
    path = commit(folder, 2)
    path.with_suffix(".json").rename(folder.manifest_path(9))
    assert latest_value(folder) == 1
    assert "manifest of step 9" in caplog.text


def test_what_cannot_be_pruned_stays(folder, monkeypatch, caplog):
    for step in (1, 2):
        commit(folder, step)

    def fail(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(durable, "remove", fail)
    folder.prune(1)
    assert "old checkpoints stay" in caplog.text
    assert folder.steps() == [1, 2]


def test_another_process_that_writes_there_is_refused(folder):
    folder.create()  # the same process may
    code = "import sys; from hpcdist.checkpoint.folder import CheckpointFolder; CheckpointFolder(sys.argv[1]).create()"
    done = subprocess.run([sys.executable, "-c", code, folder.path], capture_output=True, text=True, timeout=30)
    assert "got another job that is writing there" in done.stderr
    (folder.path / "x.tmp-1").write_text("its file is not swept")
    subprocess.run([sys.executable, "-c", code, folder.path], capture_output=True, timeout=30, check=False)
    assert (folder.path / "x.tmp-1").exists()
