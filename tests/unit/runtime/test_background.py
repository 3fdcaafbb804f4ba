import gc
import threading
import time

import pytest

from hpcdist.background import BackgroundThread


def test_one_after_the_other_and_errors_are_kept():
    writer, done = BackgroundThread("hpcdist-test"), []
    futures = [writer.submit(lambda number=number: done.append(number) or number) for number in range(5)]
    assert [future.result(10) for future in futures] == done == list(range(5))
    failing = writer.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert writer.submit(lambda: 7).result(10) == 7


def test_the_thread_ends_with_its_owner():
    before, writer = threading.enumerate(), BackgroundThread("hpcdist-test")
    writer.submit(lambda: None).result(10)
    [thread] = set(threading.enumerate()) - set(before)
    assert thread.daemon
    del writer
    gc.collect()
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not thread.is_alive()
