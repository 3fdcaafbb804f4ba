"""Two levels: whatever the placement, the lanes' sum is the tree over the replicas when it is ordered."""

import itertools
import tracemalloc
from functools import partial

import pytest

from hpcdist.plan.placement import Placement, plan_lanes, plan_placement
from hpcdist.plan.replicas import is_subtree, plan_row_additions, plan_subtrees
from hpcdist.plan.schedules import plan_halving, plan_ring

PLACEMENTS = {
    "1": [0],
    "4 on one": [0, 0, 0, 0],
    "1 + 1": [0, 1],
    "2 x 2": [0, 0, 2, 2],
    "3 x 2": [0, 0, 2, 2, 4, 4],
    "3 x 3": [0, 0, 0, 3, 3, 3, 6, 6, 6],
    "4 x 3": [0] * 3 + [3] * 3 + [6] * 3 + [9] * 3,
    "3 + 1": [0, 0, 0, 3],
    "1 + 4 + 2": [0, 1, 1, 1, 1, 5, 5],
    "dealt": [0, 1, 0, 1, 0, 1],
    "crossed": [0, 1, 1, 0],
}


def text(left_operand, right):
    return "(" + "+".join(sorted((left_operand, right))) + ")"


def tree(rows):
    rows = list(rows)
    for into, row in plan_row_additions(len(rows)):
        rows[into] = text(rows[into], rows[row])
    return rows[0]


def lanes_sum(placement, is_ordered):
    """Carry out the plans of all hosts; return what the owner of a part on each host computes."""
    plans = [plan_lanes(placement, host, is_ordered) for host in range(len(placement.hosts))]
    sent = []
    for plan, ranks in zip(plans, placement.hosts, strict=True):
        rows = [chr(97 + rank) for rank in ranks]
        for into, row in plan.local_additions:
            rows[into] = text(rows[into], rows[row])
        sent.append([rows[place] for place in plan.retained_rows])
    results = []
    for plan in plans:
        assert plan.arriving == tuple(map(len, sent))
        rows = list(itertools.chain.from_iterable(sent))
        for into, row in plan.additions:
            rows[into] = text(rows[into], rows[row])
        results.append(rows[plan.root])
    return results


@pytest.mark.parametrize("lowest", PLACEMENTS.values(), ids=PLACEMENTS)
def test_an_ordered_sum_is_the_tree_over_the_replicas_on_any_placement(lowest):
    placement = plan_placement(lowest)
    expected = tree(chr(97 + rank) for rank in range(len(lowest)))
    assert lanes_sum(placement, is_ordered=True) == [expected] * len(placement.hosts)


@pytest.mark.parametrize("lowest", PLACEMENTS.values(), ids=PLACEMENTS)
def test_an_unordered_sum_has_every_replica_once_and_is_the_same_on_all_hosts(lowest):
    placement = plan_placement(lowest)
    results = lanes_sum(placement, is_ordered=False)
    assert len(set(results)) == 1
    assert sorted(filter(str.isalpha, results[0])) == [chr(97 + rank) for rank in range(len(lowest))]


def test_random_placements():
    for lowest in itertools.product(range(3), repeat=5):
        first = {host: lowest.index(host) for host in lowest}
        placement = plan_placement([first[host] for host in lowest])
        assert set(lanes_sum(placement, is_ordered=True)) == {tree("abcde")}


@pytest.mark.parametrize(
    ("lowest", "is_aligned"),
    [("4 on one", True), ("1 + 1", True), ("2 x 2", True), ("3 x 2", True), ("3 x 3", False), ("dealt", False)],
)
def test_aligned_placements_send_one_row_per_host(lowest, is_aligned):
    placement = plan_placement(PLACEMENTS[lowest])
    assert placement.is_aligned is is_aligned
    hosts = range(len(placement.hosts))
    n_retained = [len(plan_lanes(placement, host, True).retained_rows) for host in hosts]
    assert all(n_rows == 1 for n_rows in n_retained) is is_aligned


def test_the_result_is_left_in_the_row_of_the_first_local_rank():
    for lowest in PLACEMENTS.values():
        placement = plan_placement(lowest)
        for host, is_ordered in itertools.product(range(len(placement.hosts)), (True, False)):
            assert plan_lanes(placement, host, is_ordered).retained_rows[0] == 0


def test_placement():
    placement = plan_placement([0, 1, 1, 0, 4])
    assert placement == Placement(((0, 3), (1, 2), (4,)))
    assert (placement.size, placement.n_lanes, placement.host_of(2)) == (5, 1, 1)


def test_partials_are_the_fewest():
    assert plan_subtrees(range(8), 8) == [(0, 8)]
    assert plan_subtrees([1, 2, 3, 4], 8) == [(1, 2), (2, 4), (4, 5)]
    assert plan_subtrees([0, 2, 4], 5) == [(0, 1), (2, 3), (4, 5)]


def test_what_one_subtree_is():
    for n in range(1, 34):
        for start, stop in itertools.combinations(range(n + 1), 2):
            assert is_subtree(start, stop, n) == (len(plan_subtrees(range(start, stop), n)) == 1)


def test_the_plan_of_one_rank_among_65536_is_small():
    """So that nothing grows with the square of the job: the bytes are counted, as times depend on the machine."""
    size = 1 << 16

    def peak_bytes(call):
        tracemalloc.start()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    lowest_of_8 = [rank // 8 * 8 for rank in range(size)]
    lowest_of_6 = [rank // 6 * 6 for rank in range(size)]
    placements = [plan_placement(lowest_of_8), plan_placement(lowest_of_6)]
    assert [placement.is_aligned for placement in placements] == [True, False]
    for placement, is_ordered in itertools.product(placements, (False, True)):
        assert peak_bytes(partial(plan_lanes, placement, 5, is_ordered)) < 200 * size  # a row of each host, at least
    assert peak_bytes(lambda: plan_halving(size, 5, 1 << 22)) < 100_000
    assert peak_bytes(lambda: sum(1 for _ in plan_ring(size, 5, 1 << 22))) < 100_000
