"""The saver: one buffer, one thread, and waits that end."""

import threading
import time

import numpy as np
import pytest

from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Store
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointError
from hpcdist.runtime.process import make_world
from hpcdist.saving import saver as module
from hpcdist.saving.fast_tier import FastTier
from hpcdist.saving.saver import Saver

ARRAYS = [NamedArray("x", "float32", np.ones(4 << 20, np.float32))]


@pytest.fixture
def hangs():
    event = threading.Event()
    yield event
    event.set()


def make(tmp_path, prepare=lambda: None):
    store = Store(tmp_path / "disk")
    store.begin()
    return Saver(make_world(), store, Retention(3), prepare)


def test_blocks_that_are_read_back_count_as_progress(tmp_path):
    saver = make(tmp_path)
    saver.save(1, ({"dict": []}, ARRAYS), {}, {})
    saver.wait()
    assert saver.store.n_blocks_read >= 4
    assert saver._n_blocks_so_far > saver.store.n_blocks_read


def test_a_file_that_cannot_be_read_back_is_not_the_last_one(tmp_path, monkeypatch):
    """An equal state, saved again, must be written again."""
    saver = make(tmp_path)
    verify_and_prune = Store.verify_and_prune

    def damaged(*arguments):
        monkeypatch.setattr(Store, "verify_and_prune", verify_and_prune)
        raise CheckpointError("damaged")

    monkeypatch.setattr(Store, "verify_and_prune", damaged)
    saver.save(1, ({"dict": []}, ARRAYS), {}, {})
    with pytest.raises(CheckpointError, match="damaged"):
        saver.wait()
    assert saver.last is None
    saver.save(1, ({"dict": []}, ARRAYS), {}, {})
    saver.wait()
    assert saver.last.step == 1


def test_a_copy_that_is_never_done_is_waited_for_so_long_and_no_longer(tmp_path, caplog, monkeypatch, hangs):
    monkeypatch.setattr(module, "_LIMIT_S", 0.2)
    saver = make(tmp_path, hangs.wait)
    saver.keep_copies(FastTier(tmp_path / "memory", "run", 1))
    saver.copy(5, ({}, ARRAYS), {})
    started = time.monotonic()
    saver.forget_copies()
    assert time.monotonic() - started < 2
    assert "expected the last copy to be done within 0.2 s, got none" in caplog.text
    hangs.set()
    saver.wait()
    assert list((tmp_path / "memory").rglob("step-*")) == [], "it comes too late"


def test_no_copy_is_made_while_the_disk_takes_a_file_and_training_does_not_wait(tmp_path, caplog, hangs):
    saver = make(tmp_path, hangs.wait)
    tier = FastTier(tmp_path / "memory", "run", 1)
    saver.keep_copies(tier)
    saver.save(5, ({}, ARRAYS), {}, {})
    started = time.monotonic()
    saver.copy(6, ({}, [NamedArray("x", "float32", np.zeros(4 << 20, np.float32))]), {})
    saver.copy(6, ({}, ARRAYS), {})
    assert time.monotonic() - started < 2
    assert caplog.text.count("no copies are made while the last file is being written") == 1
    hangs.set()
    saver.wait()
    assert saver.store.read_latest().arrays[0].values.all(), "the buffer was left alone"
    saver.copy(7, ({}, ARRAYS), {})
    saver.wait()
    assert tier.find()[0].step == 7


class SlowToClose(Disk):
    """A network file system, which writes back what it holds when a file is closed."""

    def close(self, descriptor):
        time.sleep(0.3)
        super().close(descriptor)


def test_a_slow_close_is_waited_for(tmp_path, monkeypatch):
    store = Store(tmp_path / "disk", SlowToClose())
    store.begin()
    saver = Saver(make_world(), store, Retention(3))
    monkeypatch.setattr(make_world(), "timeout_s", 2.0)
    started = time.monotonic()
    saver.save(1, ({}, ARRAYS), {}, {})
    assert time.monotonic() - started < 0.3, "training does not wait"
    saver.wait()
    assert saver.last.step == 1


def test_a_thread_that_is_stuck_is_an_error_after_the_timeout(tmp_path, monkeypatch, hangs):
    saver = make(tmp_path, hangs.wait)
    monkeypatch.setattr(make_world(), "timeout_s", 0.3)
    saver.save(1, ({}, ARRAYS), {}, {})
    with pytest.raises(CheckpointError, match="4194304.*bytes.*within.*0.3.*none"):
        saver.wait()
    hangs.set()
    saver.wait()
    assert saver.last.step == 1


def test_a_save_that_is_a_copy_too_is_laid_out_once(tmp_path, monkeypatch):
    saver = make(tmp_path)
    n_layouts = []
    tier = FastTier(tmp_path / "memory", "run", 1)
    saver.keep_copies(tier)
    lay_out = module.lay_out
    monkeypatch.setattr(module, "lay_out", lambda *arguments: n_layouts.append(lay_out(*arguments)))
    saver.save(5, ({}, ARRAYS), {}, {}, in_memory=True)
    saver.wait()
    assert (len(n_layouts), tier.find()[0].step, saver.store.latest()[0].step) == (1, 5, 5)
    assert tier.find()[1].read_bytes() == saver.store.latest()[1].read_bytes()
