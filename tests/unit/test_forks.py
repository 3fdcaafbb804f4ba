"""Locks in forked children; every lock of the package is made so."""

import os
import re
import threading

import pytest

from hpcdist import forks


@pytest.mark.parametrize("make", [forks.make_lock, forks.make_rlock, forks.make_condition])
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_child(make):
    lock = make()
    is_held = threading.Event()
    may_leave = threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(30)
    pid = os.fork()
    if pid == 0:
        if make is forks.make_rlock:
            is_free = lock.acquire(timeout=5)
        else:
            is_free = lock.acquire(False)
        if is_free:
            code = 0
        else:
            code = 1
        os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert not lock.acquire(False), "the parent's lock is still held"
    may_leave.set()
    thread.join(30)
    assert status == 0


def test_every_lock_of_the_package_is_free_in_a_forked_child(root):
    places = []
    for path in (root / "hpcdist").rglob("*.py"):
        if path.name != "forks.py" and re.search(r"threading\.(Lock|RLock|Condition)\(", path.read_text()):
            places.append(path.name)
    assert places == []
