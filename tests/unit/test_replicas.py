"""Replicas dealt to ranks, their partial sums, and whose turn it is: no ranks take part."""

import itertools
import threading

import pytest
import torch

from hpcdist.errors import DesyncError
from hpcdist.gradients.replicas.scheduler import Turns
from hpcdist.gradients.replicas.subtree_sums import PartialSums
from hpcdist.plan.replicas import ReplicaPlan, plan_row_additions

SIZES = [(n_replicas, n_ranks) for n_replicas in range(1, 18) for n_ranks in range(1, n_replicas + 1)]


class Symbol:
    """Adds up as text, so that the order shows."""

    def __init__(self, text):
        self.text = text

    def add_(self, other):
        self.text = f"({self.text}{other.text})"

    def clone(self):
        return Symbol(self.text)


def tree(n_replicas):
    rows = [Symbol(f"{replica}.") for replica in range(n_replicas)]
    for into, row in plan_row_additions(n_replicas):
        rows[into].add_(rows[row])
    return rows[0].text


@pytest.mark.parametrize(("n_replicas", "n_ranks"), SIZES)
def test_partial_sums_of_all_ranks_add_up_in_the_tree(n_replicas, n_ranks):
    plan = ReplicaPlan(n_replicas, n_ranks)
    assert list(itertools.chain(*map(plan.of_rank, range(n_ranks)))) == list(range(n_replicas))
    rows = []
    for rank in range(n_ranks):
        sums = PartialSums(n_replicas)
        for replica in plan.of_rank(rank):
            sums.push(replica, Symbol(f"{replica}."), is_ours=False)
        of_rank = sums.take()
        assert len(of_rank) == len(plan.subtrees[rank])
        rows += of_rank
    for into, row in plan.additions:
        rows[into].add_(rows[row])
    assert rows[0].text == tree(n_replicas)


@pytest.mark.parametrize(("n_replicas", "n_ranks"), SIZES)
def test_a_plain_sum_over_ranks_is_the_tree_where_the_plan_says_so(n_replicas, n_ranks):
    plan = ReplicaPlan(n_replicas, n_ranks)
    if plan.is_one_tree_of_ranks:
        rows = [Symbol(of_rank_tree(plan, rank)) for rank in range(n_ranks)]
        for into, row in plan_row_additions(n_ranks):
            rows[into].add_(rows[row])
        assert rows[0].text == tree(n_replicas)
    if n_replicas % n_ranks == 0 and (n_replicas // n_ranks).bit_count() == 1:
        assert plan.is_one_tree_of_ranks


def of_rank_tree(plan, rank):
    sums = PartialSums(plan.n_replicas)
    for replica in plan.of_rank(rank):
        sums.push(replica, Symbol(f"{replica}."), is_ours=False)
    (only,) = sums.take()
    return only.text


def test_a_pushed_tensor_that_is_not_ours_is_left_alone():
    sums, slot = PartialSums(4), torch.ones(3)
    sums.push(0, slot, is_ours=False)
    slot.fill_(2)
    sums.push(1, slot, is_ours=False)
    assert slot.tolist() == [2, 2, 2]
    assert sums.take()[0].tolist() == [3, 3, 3]


class Noted:
    """Writes down who leaves and who enters."""

    def __init__(self):
        self.events = []

    def begin(self):
        self.events.append("begin")

    def end(self):
        self.events.append("end")

    def leave(self, replica):
        self.events.append(f"-{replica}")

    def enter(self, replica):
        self.events.append(f"+{replica}")


def test_replicas_go_in_turn_and_the_last_one_acts():
    noted, log = Noted(), []
    turns = Turns(range(2, 5), [noted])

    def call():
        log.append(f"start {turns.replica}")
        turns.meet("the middle")
        if turns.is_last:
            log.append(f"act {turns.replica}")
            turns.part()
        log.append(f"rest {turns.replica}")
        return turns.replica

    assert turns.run([call] * 3) == [2, 3, 4]
    assert log == ["start 2", "start 3", "start 4", "act 4", "rest 2", "rest 3", "rest 4"]
    assert noted.events == ["begin", "+2", "-2", "+3", "-3", "+4", "-4", "+2", "-2", "+3", "-3", "+4", "-4", "end"]
    assert turns.replica is None


def test_merge_gives_each_its_part():
    turns = Turns(range(3), [])
    calls = [lambda: (turns.merge("a sum", turns.replica + 1, lambda all_: [sum(all_)] * 3), turns.replica)] * 3
    assert turns.run(calls) == [(6, 0), (6, 1), (6, 2)]


def test_nobody_is_a_replica_in_what_a_merge_calls():
    turns, seen = Turns(range(2), []), []
    turns.run([lambda: turns.merge("a merge", None, lambda all_: [seen.append(turns.replica)] * 2)] * 2)
    assert seen == [None]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_one_replica_stops_the_others_and_is_raised_once(failing):
    turns, after = Turns(range(3), []), []

    def call():
        if turns.replica == failing:
            raise KeyError("mine")
        turns.meet("a backward")
        after.append(turns.replica)

    with pytest.raises(KeyError, match="mine"):
        turns.run([call] * 3)
    assert after == []
    assert not [thread for thread in threading.enumerate() if "_thread" in thread.name and thread.is_alive()]


def test_replicas_that_make_other_calls_are_named():
    turns = Turns(range(2), [])
    calls = [lambda: turns.meet("a backward"), lambda: turns.meet("an all_reduce")]
    with pytest.raises(DesyncError, match="expected replica 1 at a backward, as replica 0, got it at an all_reduce"):
        turns.run(calls)
    with pytest.raises(DesyncError, match="expected replica 1 at its end, as replica 0, got it at a backward"):
        turns.run([lambda: None, lambda: turns.meet("a backward")])
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]


def test_replicas_have_the_modes_of_the_caller():
    turns = Turns(range(2), [])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = turns.run([lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))] * 2)
    assert found == [(False, True)] * 2
