"""The queue of a coordinator: each closure gets one result, whichever workers fall silent, and errors come once."""

import random

import numpy as np
import pytest

from hpcdist.errors import ClosureCancelledError, PSUnavailable
from hpcdist.ps import pickles
from hpcdist.strategy.coordination.queue import Closure, ClosureQueue

NOTHING = np.empty(0, np.uint8)


def closures(n):
    return [Closure(number, f"f{number}", NOTHING, None) for number in range(1, n + 1)]


def filled(n, capacity=100):
    queue = ClosureQueue(capacity)
    queued_closures = closures(n)
    for closure in queued_closures:
        queue.put(closure)
    return queue, queued_closures


def test_closures_go_out_in_order_and_results_come_back():
    queue, queued_closures = filled(3)
    assert list(map(queue.take, (0, 1, 0))) == queued_closures
    assert queue.take(1) is None
    queue.finish(0, pickles.dumps("first"))
    assert queued_closures[0].result.get() == "first"
    assert not queue.is_idle
    queue.finish(1, pickles.dumps("second"))
    queue.finish(0, pickles.dumps("third"))
    assert queue.is_idle
    assert [closure.result.get() for closure in queued_closures] == ["first", "second", "third"]


@pytest.mark.feature("semantics.schedule-rules")
def test_a_full_queue_says_so():
    queue, _ = filled(2, capacity=2)
    assert queue.is_full
    queue.take(0)
    assert not queue.is_full


@pytest.mark.feature("semantics.join-and-errors")
def test_an_error_is_taken_once_and_what_has_not_begun_is_cancelled():
    queue, queued_closures = filled(4)
    queue.take(0), queue.take(1)
    first = KeyError("first")
    queue.fail(0, first)
    queue.fail(1, KeyError("second"))
    assert queue.has_failed
    queue.cancel_waiting()
    assert queue.is_idle
    assert queue.take_error() is first
    assert queue.take_error() is None
    with pytest.raises(KeyError, match="second"):
        queued_closures[1].result.get()
    for closure in queued_closures[2:]:
        with pytest.raises(ClosureCancelledError, match="f"):
            closure.result.fetch()


def test_the_error_of_a_parameter_server_stays():
    queue, _ = filled(1)
    queue.take(0)
    queue.fail(0, PSUnavailable("gone"))
    assert isinstance(queue.take_error(), PSUnavailable)
    assert isinstance(queue.take_error(), PSUnavailable)


@pytest.mark.feature("semantics.lost-worker")
def test_what_a_silent_worker_ran_goes_to_another_one_before_what_waits():
    queue, queued_closures = filled(3)
    queue.take(0)
    queue.lose(0)
    assert queue.take(1) is queued_closures[0]
    queue.finish(1, pickles.dumps(1))
    assert not queue.is_awaited(0)
    queue.finish(0, pickles.dumps(2))  # late: the first one counts
    assert queued_closures[0].result.get() == 1
    assert queue.take(0) is queued_closures[1]


def test_a_late_result_counts_where_nobody_else_has_begun():
    queue, queued_closures = filled(1)
    queue.take(0)
    queue.lose(0)
    assert queue.is_awaited(0)
    queue.finish(0, pickles.dumps(1))
    assert queued_closures[0].result.get() == 1
    assert queue.is_idle
    assert queue.take(1) is None


@pytest.mark.feature("semantics.schedule-rules")
@pytest.mark.parametrize("seed", range(20))
def test_every_closure_is_run_and_has_the_first_result(seed):
    """Workers take up to two, fall silent, come back, and answer in their order, at random."""
    chance = random.Random(seed)
    queue, queued_closures = filled(60)
    has = {worker: [] for worker in range(3)}
    silent = set()
    first_result = {}
    runs = {}
    for _ in range(5000):
        worker = chance.randrange(3)
        act = chance.random()
        if act < 0.4 and worker not in silent and len(has[worker]) < 2:
            closure = queue.take(worker)
            if closure is not None:
                has[worker].append(closure)
        elif act < 0.8 and has[worker]:
            closure = has[worker].pop(0)
            value = (worker, runs.setdefault("n", 0))
            runs["n"] += 1
            assert queue.is_awaited(worker) == (closure not in first_result)
            first_result.setdefault(closure, value)
            queue.finish(worker, pickles.dumps(value))
        elif act < 0.85 and worker not in silent:
            silent.add(worker)
            queue.lose(worker)
        elif act < 0.95:
            silent.discard(worker)
        if queue.is_idle and not any(has.values()):
            break
    assert queue.is_idle
    assert [queued_closure.result.get() for queued_closure in queued_closures] == [
        first_result[queued_closure] for queued_closure in queued_closures
    ]
    assert queue.n_ended == 60
