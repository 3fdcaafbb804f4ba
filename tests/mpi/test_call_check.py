"""Every way in which one rank can be in another collective than the others."""

import re

import numpy as np
import pytest

from hpcdist.collectives.group import Group
from hpcdist.diagnostics.call_check import MAX_NAMES, CallCheck, call_site, odd_ones
from hpcdist.errors import CollectiveTimeoutError, DesyncError
from hpcdist.runtime.world import World

pytestmark = pytest.mark.mpi


@pytest.fixture
def world():
    new_world = World()
    yield new_world
    new_world.free()


@pytest.fixture
def call_check(world):
    checker = CallCheck(world.comm, world)
    yield checker
    checker.free()


@pytest.fixture
def odd(comm):
    """Return whether this is the odd rank: the last one."""
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    return comm.rank == comm.size - 1


def text_everywhere(comm, call_check, *call, **more):
    with pytest.raises(DesyncError) as caught:
        call_check.check(*call, **more)
    assert caught.value.is_agreed
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1
    assert "\n" not in texts[0]
    return texts[0]


def usual(comm):
    """Return how a message names those that are right."""
    if comm.size == 2:
        return "rank 0 (worker 0)"
    return f"{comm.size - 1} of {comm.size} ranks"


def last(comm):
    return f"on rank {comm.size - 1} (worker {comm.size - 1}); let all ranks call the same collectives"


def test_the_same_on_all_ranks(call_check):
    for n_elements in range(20):
        call_check.check("all_reduce sum", "float32", n_elements)
        call_check.check("all_reduce sum", "float32", 6, shape=(2, 3))


CALLS = {
    "op": ("all_reduce max", "float32", 6, (2, 3)),
    "dtype": ("all_reduce sum", "float64", 6, (2, 3)),
    "count": ("all_reduce sum", "float32", 7, (2, 3)),
    "shape": ("all_reduce sum", "float32", 6, (3, 2)),
}


@pytest.mark.feature("debugging.mismatch-detection", "debugging.finite-and-shape-checks")
@pytest.mark.parametrize("name", CALLS)
def test_another_call_on_one_rank(comm, call_check, odd, name):
    right = ("all_reduce sum", "float32", 6, (2, 3))
    if odd:
        arguments = CALLS[name]
    else:
        arguments = right
    text = text_everywhere(comm, call_check, *arguments, site="train.py:5")
    assert text.startswith(
        f"collective 1: expected all_reduce sum float32 x 6 (2, 3) at train.py:5 as on {usual(comm)}, got "
    )
    op, dtype, n_elements, shape = CALLS[name]
    assert f"got {op} {dtype} x {n_elements} {shape} at train.py:5 {last(comm)}" in text


def test_another_order_on_one_rank(comm, call_check, odd):
    call_check.check("all_reduce sum", "float32", 1)
    first = ("a", 1)
    second = ("b", 2)
    op, n_elements = second if odd else first
    text = text_everywhere(comm, call_check, op, "float32", n_elements, site="train.py:5")
    assert text.startswith("collective 2: expected a float32 x 1 at train.py:5 as on ")
    assert f"got b float32 x 2 at train.py:5 {last(comm)}" in text


def test_another_line_of_the_program_on_one_rank(comm, call_check, odd):
    def check():
        call_check.check("all_reduce sum", "float32", 1)

    def check_elsewhere():
        call_check.check("all_reduce sum", "float32", 1)

    local_check = check
    if odd:
        local_check = check_elsewhere
    with pytest.raises(DesyncError) as caught:
        local_check()
    lines = re.findall(r"all_reduce sum float32 x 1 at \S*test_call_check.py:(\d+)", str(caught.value))
    assert int(lines[1]) == int(lines[0]) + 3


def test_calls_continue_after_an_error_that_was_caught(comm, call_check, odd):
    for _ in range(3):
        text_everywhere(comm, call_check, "all_reduce sum", "float32", int(odd))
        call_check.check("all_reduce sum", "float32", 1)


def test_long_names_leave_op_and_count_to_be_compared(comm, call_check, odd):
    site = "x" * 5000 + "/train.py:5"
    text = text_everywhere(comm, call_check, "all_reduce sum", "float32", int(odd), site=site)
    assert text.count("x/train.py:5") == 2
    call_check.check("all_reduce sum", "float32", 1, site="ä" * 300)


@pytest.mark.parametrize("absent", ["first", "last"])
def test_a_rank_that_does_not_come_is_named(comm, world, odd, monkeypatch, absent):
    monkeypatch.setattr("hpcdist.diagnostics.call_check.ANSWER_S", 0.5)
    call_check = CallCheck(comm, world, timeout_s=0.3)
    missing = 0 if absent == "first" else comm.size - 1
    if comm.rank != missing:
        with pytest.raises(CollectiveTimeoutError) as caught:
            call_check.check("all_reduce sum", "float32", 1, site="train.py:5")
        assert not caught.value.is_agreed
        assert (
            f"for all_reduce sum float32 x 1 at train.py:5, got no answer from rank {missing} (worker {missing});"
            in str(caught.value)
        )
    comm.Barrier()
    call_check.free()


def test_the_time_limit_is_the_groups_own(comm, world, odd, monkeypatch):
    """One rank stays away; the world would wait for it for much longer."""
    monkeypatch.setattr("hpcdist.diagnostics.call_check.ANSWER_S", 0.5)
    world.debug = frozenset({"collectives"})
    world.timeout_s = 20.0
    group = Group(comm, world, timeout_s=0.3)
    group.watchdog.stop()  # which would end the job
    text = ""
    if not odd:
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.recorded("all_reduce sum", np.ones(1))
        text = str(caught.value)
    comm.Barrier()
    group.free()
    assert odd or "expected every rank within 0.3 s for all_reduce sum float64 x 1 at " in text


def test_debug_of_one_rank_holds_for_all(comm, monkeypatch):
    for value, is_on in (("collectives", True), ("", False)):
        if comm.rank == comm.size - 1:
            monkeypatch.setenv("HPCDIST_DEBUG", value)
        new_world = World()
        if is_on:
            expected = frozenset({"collectives"})
        else:
            expected = frozenset()
        assert new_world.debug == expected
        new_world.free()


def test_odd_ones():
    names = [f"rank {rank}" for rank in range(12)]
    text = odd_ones({0: "b", 1: "a", 2: "a", 3: "c"}, names)
    assert text.startswith("expected a as on 2 of 4 ranks, got b on rank 0, c on rank 3; let ")
    assert odd_ones({0: "b", 1: "a"}, names).startswith("expected b as on rank 0, got a on rank 1; ")
    many = odd_ones({0: "a", 1: "a"} | dict.fromkeys(range(2, 12), "b"), names)
    assert many.startswith("expected b as on 10 of 12 ranks, got a on rank 0, rank 1; ")
    text = odd_ones(dict.fromkeys(range(10), "a") | {0: "b"}, names)
    assert text.startswith("expected a as on 9 of 10 ranks, got b on rank 0;")
    text = odd_ones(dict.fromkeys(range(10), "a") | dict.fromkeys(range(10, 30), "b"), [*names, *"x" * 20])
    assert f"got a on {', '.join(names[:MAX_NAMES])} and 2 more; " in text


def test_the_call_site_is_outside_the_package():
    assert "test_call_check.py:" in call_site()
