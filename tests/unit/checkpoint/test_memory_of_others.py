"""Copies in memory, where all users of a node may write: a folder that others made, or can write to, is refused."""

import fcntl
import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.saving.fast_tier import STALE_S, FastTier

RUN = "0123456789abcdef"


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "shm"


@pytest.fixture
def own(memory):
    """Return the folder that the copies of this user and run belong into."""
    return memory / f"hpcdist-{os.getuid()}-{RUN}"


def copied(memory, attempt, step):
    tier = FastTier(memory, RUN, attempt)
    with tier.tolerated():
        tier.commit(step, image_of(step))
    return tier


def image_of(step):
    image = FileImage()
    facts = {"step": step, "time_s": 0.0, "metrics": {}, "written": {}}
    lay_out(image, facts, {}, [NamedArray("w", "float64", np.full(9, step, float))])
    return image


def step_in(memory, attempt=2):
    newest_copy = FastTier(memory, RUN, attempt).find()
    if newest_copy is None:
        return None
    return newest_copy[0].step


def test_nobody_else_sees_copies_whatever_the_umask(memory, own):
    before = os.umask(0)
    try:
        copied(memory, 1, 5)
    finally:
        os.umask(before)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert step_in(memory) == 5


def is_link(memory, owned_folder, monkeypatch):
    owned_folder.rename(memory / "elsewhere")
    owned_folder.symlink_to(memory / "elsewhere")


def can_be_written_by(mode):
    return lambda memory, owned_folder, monkeypatch: owned_folder.chmod(mode)


def is_of_another_user(memory, owned_folder, monkeypatch):
    os.chown(owned_folder, 12345, -1)


TAKEN = {
    "a link": is_link,
    "of a group": can_be_written_by(0o770),
    "of all": can_be_written_by(0o707),
    "of another user": is_of_another_user,
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_copies_that_others_can_have_written_are_not_taken(memory, own, monkeypatch, caplog, take):
    copied(memory, 9999, 7)
    take(memory, own, monkeypatch)
    before = sorted(memory.rglob("*"))
    tier = FastTier(memory, RUN, 2)
    assert "continues without copies in memory on this node: fast tier: expected a folder that only user" in caplog.text
    tier.commit(8, image_of(8))
    assert tier.find() is None
    assert sorted(memory.rglob("*")) == before


def test_a_folder_that_is_taken_meanwhile_is_neither_read_nor_emptied(memory, own, monkeypatch):
    """Where the folder around it is not sticky: in memory it is."""
    checkpoints = memory / "elsewhere"
    tier = copied(memory, 2, 7)
    shutil.copytree(own, checkpoints)
    shutil.rmtree(own)
    own.symlink_to(checkpoints)
    assert tier.find() is None
    tier.remove()
    assert list(checkpoints.rglob("*.h5"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_that_is_given_to_another_user_meanwhile_is_not_emptied(memory, own):
    tier = copied(memory, 2, 7)
    os.chown(own, 12345, -1)
    tier.remove()
    assert list(own.rglob("*.h5"))


@pytest.mark.parametrize("run", ["x/../../kept", "../kept", "\0", "/etc"])
def test_the_name_of_a_run_leads_nowhere_else(memory, run):
    outside_folder = memory.parent / "kept"
    (memory / f"hpcdist-{os.getuid()}-x").mkdir(parents=True)
    (outside_folder / "attempts").mkdir(parents=True)
    tier = FastTier(memory, run, 1)
    assert list(memory.rglob("0001.jsonl")) != []
    assert tier.find() is None
    tier.remove()
    assert (outside_folder / "attempts").exists()


def test_a_folder_that_cannot_be_made_is_reported_once(memory, caplog):
    memory.write_text("a file")
    tier = FastTier(memory, RUN, 1)
    assert tier.find() is None
    assert caplog.text.count("fast tier") == 1


# -- copies that a job has left ----------------------------------------------------------------------------------


def make_old(path):
    long_ago = time.time() - STALE_S - 60
    os.utime(path, (long_ago, long_ago))


def test_copies_that_a_killed_job_has_left_are_removed_by_the_next_one(memory, own, caplog):
    code = f"""
import os, signal
from hpcdist.saving.fast_tier import FastTier
FastTier({str(memory)!r}, {RUN!r}, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    FastTier(memory, "another", 1)
    assert own.exists(), "it may be restarted at once"
    make_old(own)
    FastTier(memory, "another", 2)
    assert not own.exists()
    assert f"removed {own}, the copies of a job that is gone" in caplog.text


def test_copies_of_a_job_that_runs_or_of_another_user_are_left(memory, own):
    tier = FastTier(memory, RUN, 1)
    other_user_folder = memory / f"hpcdist-{os.getuid() + 1}-0-run"
    other_user_folder.mkdir()
    outside = memory.parent / "outside"
    outside.mkdir()
    link = memory / f"hpcdist-{os.getuid()}-0-link"
    link.symlink_to(outside)
    long_ago = time.time() - STALE_S - 60
    os.utime(link, (long_ago, long_ago), follow_symlinks=False)
    for path in (own, other_user_folder, outside):
        make_old(path)
    FastTier(memory, "another", 1)
    assert [path.exists() for path in (own, other_user_folder, outside)] == [True] * 3
    del tier
    gc.collect()
    FastTier(memory, "another", 2)
    assert not own.exists(), "its process no longer keeps copies there"


def test_a_folder_that_another_process_is_removing_is_not_used(memory, own, caplog):
    own.mkdir(parents=True)
    remover = os.open(own, os.O_RDONLY)
    fcntl.flock(remover, fcntl.LOCK_EX)
    tier = FastTier(memory, RUN, 1)
    os.close(remover)
    assert not tier.is_kept
    assert f"expected to lock {own}" in caplog.text


def test_a_folder_that_was_removed_before_it_was_locked_is_made_again(memory, own, monkeypatch):
    flock = fcntl.flock
    removed = []

    def remove_first(descriptor, kind):
        if not removed:
            removed.append(own.rmdir())
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert FastTier(memory, RUN, 1).is_kept
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
