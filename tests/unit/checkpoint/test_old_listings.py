"""Clients of a network file system that list a folder as it was, until they change something in it themselves.

As those of NFS do for up to a minute. Made up here: this tests the protocol above, not a file system.
"""

import os

import numpy as np
import pytest

from hpcdist.checkpoint import durable, store
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import AttemptReplaced, CheckpointError
from hpcdist.run.ledger import Launch, Ledger


class Clients:
    """The module `os` of several clients in one process; `now` is the one that calls."""

    def __init__(self):
        self.now = "a"
        self.listings = {}

    def __getattr__(self, name):
        return getattr(os, name)

    def listdir(self, path):
        key = self.now, os.path.realpath(path)
        if key not in self.listings:
            self.listings[key] = os.listdir(path)
        return self.listings[key]

    def forget(self, path):
        self.listings.pop((self.now, os.path.realpath(os.path.dirname(path))), None)

    def open(self, path, flags, *mode):
        if flags & os.O_CREAT:
            self.forget(path)
        return os.open(path, flags, *mode)

    def mkdir(self, path, *mode):
        self.forget(path)
        os.mkdir(path, *mode)

    def replace(self, path, to):
        self.forget(path)
        os.replace(path, to)

    def unlink(self, path):
        self.forget(path)
        os.unlink(path)

    def symlink(self, target, path):
        self.forget(path)
        os.symlink(target, path)


@pytest.fixture
def clients(monkeypatch):
    fake_os = Clients()
    for module in (durable, store):
        monkeypatch.setattr(module, "os", fake_os)
    return fake_os


def begun(path):
    """Return the folder, with an attempt that has begun."""
    folder = Store(path)
    folder.begin()
    return folder


def commit(folder, step, max_to_keep=1):
    image = FileImage()
    facts = {"step": step, "time_s": 0.0, "metrics": {}, "written": {}}
    lay_out(image, facts, {}, [NamedArray("w", "float64", np.full(9, step, float))])
    folder.commit(step, image)
    folder.verify_and_prune(Saved(folder.attempt, step), Retention(max_to_keep))


@pytest.mark.parametrize("max_to_keep", [1, 2])
def test_a_restart_finds_what_another_client_has_saved(clients, tmp_path, max_to_keep):
    """Also where what it has listed is still there: nothing would tell it."""
    first = begun(tmp_path / "run")
    commit(first, 10)
    clients.now = "b"
    assert Store(tmp_path / "run").read_latest().saved.step == 10
    clients.now = "a"
    commit(first, 20, max_to_keep)
    clients.now = "b"
    second = begun(tmp_path / "run")
    assert second.attempt == 2
    assert second.read_latest().saved == Saved(1, 20)


def test_an_attempt_sees_its_successor_at_its_next_save(clients, tmp_path):
    first = begun(tmp_path / "run")
    commit(first, 10)
    clients.now = "b"
    second = begun(tmp_path / "run")
    second.resume_from(second.read_latest().saved)
    clients.now = "a"
    with pytest.raises(AttemptReplaced):
        commit(first, 40)
    clients.now = "c"
    assert Store(tmp_path / "run").read_latest().saved == Saved(1, 10)


def test_a_reader_waits_for_a_newer_listing_and_calls_nothing_damaged(clients, tmp_path, monkeypatch, caplog):
    """As an evaluator that reads while checkpoints are pruned: it cannot change the folder."""
    first = begun(tmp_path / "run")
    commit(first, 10)
    clients.now = "b"
    reader = Store(tmp_path / "run")
    assert reader.read_latest().saved.step == 10
    clients.now = "a"
    commit(first, 20)
    commit(first, 30)
    clients.now = "b"
    n_waits = []

    def wait(seconds):
        n_waits.append(seconds)
        if len(n_waits) == 3:  # the old listing has expired
            clients.listings.clear()

    monkeypatch.setattr(store.time, "sleep", wait)
    assert reader.read_latest().saved.step == 30
    assert reader.damaged == []
    assert "damaged" not in caplog.text


def test_an_attempt_that_restores_makes_its_listing_fresh(clients, tmp_path, monkeypatch):
    """A process of an earlier attempt that is still alive prunes after the attempt has begun."""
    first = begun(tmp_path / "run")
    commit(first, 10)
    clients.now = "b"
    second = begun(tmp_path / "run")
    second.saved()
    (tmp_path / "run" / str(Saved(1, 10))).rename(tmp_path / "run" / str(Saved(1, 20)))  # by another client
    monkeypatch.setattr(store.time, "sleep", lambda seconds: None)
    with pytest.raises(CheckpointError, match="expected step 20 in|that verifies"):
        second.read_latest()  # it looks at the new name, which is not that step's
    assert second.damaged == [Saved(1, 20)]


def test_progress_is_counted_from_attempts_of_other_nodes(clients, tmp_path):
    def attempt(client, step):
        clients.now = client
        folder = Store(tmp_path / "run")
        ledger = Ledger(folder)
        ledger.begin(Launch(None, (client,), None, is_vouched=False))
        commit(folder, step)
        folder.note("commit", step=step)
        return ledger

    attempt("a", 10)
    attempt("b", 30)
    third = attempt("a", 40)
    assert [attempt_entry.number for attempt_entry in third.attempts()] == [1, 2, 3]
    assert third.attempts()[-1].base_step == 30
