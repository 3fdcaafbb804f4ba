import gc
import threading
import time
import weakref

import pytest

from hpcdist.background import BackgroundThread


def test_one_after_the_other_and_errors_are_kept():
    writer = BackgroundThread("hpcdist-test")
    done = []
    futures = [writer.submit(lambda number=number: done.append(number) or number) for number in range(5)]
    assert [future.result(10) for future in futures] == done == list(range(5))
    failing = writer.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert writer.submit(lambda: 7).result(10) == 7


def test_the_thread_ends_with_its_owner():
    before = threading.enumerate()
    writer = BackgroundThread("hpcdist-test")
    writer.submit(lambda: None).result(10)
    [thread] = set(threading.enumerate()) - set(before)
    assert thread.daemon
    del writer
    gc.collect()
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not thread.is_alive()


class Held:
    def write(self):
        return 7

    def fail(self):
        raise OSError("full")


@pytest.mark.parametrize("name", ["write", "fail"])
def test_whoever_waits_for_a_call_finds_nothing_alive_that_it_held(name):
    """Ranks plan by what the garbage collector leaves; the chief alone has just written."""
    writer = BackgroundThread("hpcdist-test")
    call_owner = Held()
    reference = weakref.ref(call_owner)
    seen = []
    gate = threading.Event()
    writer.submit(lambda: gate.wait(10))
    future = writer.submit(getattr(call_owner, name))
    future.add_done_callback(lambda done: seen.append(reference() is None))  # called as soon as the result is there
    del call_owner
    gate.set()
    future.exception(10)
    assert seen == [name == "write"], "an error's traceback holds its frames"
    del future
    gc.collect()
    writer.submit(lambda: None).result(10)
    assert reference() is None
