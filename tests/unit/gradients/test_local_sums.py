"""Sums over the replicas of one rank add up, over all ranks, to the tree over all replicas. No MPI."""

import itertools

import pytest
import torch

from hpcdist.gradients.local_sums import SubtreeSums
from hpcdist.plan.replicas import ReplicaPlan, plan_row_additions

SIZES = [(n_replicas, n_ranks) for n_ranks, n_replicas in itertools.combinations_with_replacement(range(1, 18), 2)]


class Symbol:
    """Adds up as text, so that the order shows."""

    def __init__(self, text):
        self.text = text

    def add_(self, addend):
        self.text = f"({self.text}{addend.text})"

    def clone(self):
        return Symbol(self.text)


def tree(n_replicas):
    rows = [Symbol(f"{replica}.") for replica in range(n_replicas)]
    for into, row in plan_row_additions(n_replicas):
        rows[into].add_(rows[row])
    return rows[0].text


@pytest.mark.parametrize(("n_replicas", "n_ranks"), SIZES)
def test_subtree_sums_of_all_ranks_add_up_in_the_tree(n_replicas, n_ranks):
    plan = ReplicaPlan(n_replicas, n_ranks)
    assert list(itertools.chain(*map(plan.of_rank, range(n_ranks)))) == list(range(n_replicas))
    rows = []
    for rank in range(n_ranks):
        sums = SubtreeSums(n_replicas)
        for replica in plan.of_rank(rank):
            sums.add(replica, Symbol(f"{replica}."), is_kept=False)
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
    sums = SubtreeSums(plan.n_replicas)
    for replica in plan.of_rank(rank):
        sums.add(replica, Symbol(f"{replica}."), is_kept=False)
    (only,) = sums.take()
    return only.text


def test_a_pushed_tensor_that_is_not_ours_is_left_alone():
    sums = SubtreeSums(4)
    slot = torch.ones(3)
    sums.add(0, slot, is_kept=False)
    slot.fill_(2)
    sums.add(1, slot, is_kept=False)
    assert slot.tolist() == [2, 2, 2]
    assert sums.take()[0].tolist() == [3, 3, 3]
