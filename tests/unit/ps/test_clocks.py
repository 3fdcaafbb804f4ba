import pytest

from hpcdist.ps.clocks import Clocks, RequestClock
from hpcdist.runtime.step_flags import Request


@pytest.mark.feature("parameter-servers.bounded-staleness")
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_worker_begins_a_step_when_all_others_are_near_enough(max_staleness):
    clocks = Clocks(range(3), max_staleness)
    for pushed in range(1, 8):
        clocks.push(0, pushed)
        assert (clocks.awaited(pushed) == []) == (pushed <= max_staleness)
    assert clocks.awaited(7) == [1, 2]
    clocks.push(1, 7)
    assert clocks.awaited(7) == [2]
    clocks.leave(2)
    assert clocks.awaited(7) == []
    assert clocks.live == [0, 1]


def test_without_a_bound_nobody_waits():
    clocks = Clocks(range(2))
    clocks.push(0, 100)
    assert clocks.awaited(100) == []
    assert clocks.latest == 100


def test_clocks_never_go_back():
    clocks = Clocks([0])
    clocks.push(0, 5)
    clocks.push(0, 3)
    assert clocks.latest == 5


def test_all_workers_act_on_a_request_after_a_step_that_none_has_pushed_yet():
    requests = RequestClock()
    requests.ask(Request.STOP, clock=3, latest=7)
    requests.ask(Request.STOP, clock=4, latest=8)  # it asks until it has stopped
    assert list(map(requests.due, (3, 7, 8, 9))) == [Request.NONE, Request.NONE, Request.STOP, Request.NONE]


def test_a_save_is_asked_for_again_only_once_it_was_made():
    requests = RequestClock()
    requests.ask(Request.SAVE, clock=2, latest=2)
    requests.ask(Request.SAVE, clock=3, latest=3)  # the chief asks with the push after which it saves
    assert list(map(requests.due, (3, 4))) == [Request.SAVE, Request.NONE]
    requests.ask(Request.SAVE | Request.STOP, clock=9, latest=9)
    assert requests.due(10) == Request.SAVE | Request.STOP
