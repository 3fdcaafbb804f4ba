"""Every schedule, carried out by ranks that take turns in one process: right sums, in the promised order and cost."""

import itertools

import numpy as np
import pytest

from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.replicas import plan_additions, plan_row_additions
from hpcdist.plan.schedules import n_elements_sent, plan_halving, plan_ring

SIZES = range(1, 18)
PLANS = {"ring": plan_ring, "halving": plan_halving}


def counts(size):
    return sorted({0, 1, size - 1, size + 1, 37, 64})


class Symbolic:
    """A sum that remembers its brackets."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Symbolic("(" + "+".join(sorted((self.text, other.text))) + ")")


def by_tree(rows):
    rows = list(rows)
    for into, row in plan_row_additions(len(rows)):
        rows[into] = rows[into] + rows[row]
    return rows[0]


def carry_out(schedules, buffers):
    """Run all ranks until none can go on; a rank sends when its round begins. Return what is left in the boxes."""
    boxes = {}
    turns = [0] * len(buffers)
    has_sent = [False] * len(buffers)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, (schedule, buffer) in enumerate(zip(schedules, buffers, strict=True)):
            while turns[rank] < len(schedule):
                turn = schedule[turns[rank]]
                if not has_sent[rank]:
                    for send in turn.sends:
                        boxes.setdefault((rank, send.peer), []).append((send, list(buffer[send.start : send.stop])))
                    has_sent[rank] = is_moving = True
                if not all(boxes.get((receive.peer, rank)) for receive in turn.receives):
                    break
                arrived = [(receive, boxes[receive.peer, rank].pop(0)) for receive in turn.receives]
                for send, (sent, _) in arrived:
                    assert (sent.start, sent.stop) == (send.start, send.stop)
                take(turn, rank, buffer, arrived)
                turns[rank] = turns[rank] + 1
                has_sent[rank] = False
                is_moving = True
    assert turns == list(map(len, schedules))
    return list(itertools.chain.from_iterable(boxes.values()))


def take(turn, rank, buffer, arrived):
    if not turn.is_sum:
        for receive, (_, received_values) in arrived:
            buffer[receive.start : receive.stop] = received_values
    elif turn.receives:
        for receive, (_, received_values) in arrived:
            part = slice(receive.start, receive.stop)
            buffer[part] = [
                local_value + peer_value for local_value, peer_value in zip(buffer[part], received_values, strict=True)
            ]


@pytest.mark.feature("collectives.ring-all-reduce")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_rank_ends_with_the_sum(plan, size):
    for n_elements in counts(size):
        buffers = []
        for rank in range(size):
            buffers.append([(rank + 1) * (place + 1) for place in range(n_elements)])
        undelivered = carry_out([list(plan(size, rank, n_elements)) for rank in range(size)], buffers)
        assert undelivered == []
        expected = [size * (size + 1) // 2 * (place + 1) for place in range(n_elements)]
        assert all(buffer == expected for buffer in buffers)


@pytest.mark.parametrize("size", [*SIZES, 24, 31, 33])
def test_the_order_of_a_sum_is_the_tree_over_ranks(size):
    for n_elements in (0, 1, size + 1, 5 * size + 3):
        buffers = [[Symbolic(f"{rank};")] * n_elements for rank in range(size)]
        assert carry_out([plan_halving(size, rank, n_elements) for rank in range(size)], buffers) == []
        expected = by_tree([Symbolic(f"{rank};") for rank in range(size)]).text
        assert {value.text for value in itertools.chain.from_iterable(buffers)} <= {expected}


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_has_the_same_bits_on_all_ranks(size):
    buffers = [[Symbolic(chr(97 + rank))] * (2 * size) for rank in range(size)]
    carry_out([list(plan_ring(size, rank, 2 * size)) for rank in range(size)], buffers)
    assert len({tuple(value.text for value in buffer) for buffer in buffers}) == 1


@pytest.mark.feature("collectives.ring-all-reduce")
@pytest.mark.parametrize("size", SIZES)
def test_costs_are_the_closed_formulas(size):
    n_elements = 64 * 3 * size
    for rank in range(size):
        ring = list(plan_ring(size, rank, n_elements))
        assert n_elements_sent(ring) == 2 * (size - 1) * n_elements // size
        assert sum(len(turn.sends) for turn in ring) == 2 * (size - 1)
        assert len(ring) == 2 * (size - 1)


@pytest.mark.parametrize("size", [*SIZES, 24, 63, 64, 65, 96])
def test_costs_of_halving(size):
    """A power of two of ranks: the closed formula. Else no rank sends more than half as much again."""
    n_elements = 720 * size
    exchanged = 2 * (size - 1) * n_elements // size
    n_rounds = 2 * (size - 1).bit_length()
    schedules = [plan_halving(size, rank, n_elements) for rank in range(size)]
    sent = list(map(n_elements_sent, schedules))
    if size & (size - 1) == 0:
        assert set(sent) == {exchanged}
        assert all(len(turn.sends) == 1 for turn in itertools.chain.from_iterable(schedules))
    assert sum(sent) == pytest.approx(size * exchanged, rel=0.01)
    assert max(sent) <= 1.5 * exchanged + size
    assert max(map(len, schedules)) == n_rounds


def test_bytes_of_a_ring_that_does_not_divide_evenly():
    for size in SIZES:
        for n_elements in counts(size):
            chunks = []
            for start, stop in (block_bounds(n_elements, size, part) for part in range(size)):
                chunks.append(stop - start)
            for rank in range(size):
                if size > 1:
                    left_out = chunks[(rank + 1) % size] + chunks[(rank + 2) % size]
                else:
                    left_out = 2 * n_elements
                assert n_elements_sent(plan_ring(size, rank, n_elements)) == 2 * n_elements - left_out


@pytest.mark.parametrize("n_rows", [0, 1, 2, 3, 5, 6, 7, 8, 17])
def test_rows_are_added_once_each(n_rows):
    pairs = plan_row_additions(n_rows)
    assert sorted(row for _, row in pairs) == list(range(1, n_rows))
    rows = np.arange(n_rows)
    for into, row in pairs:
        rows[into] += rows[row]
    assert n_rows == 0 or rows[0] == n_rows * (n_rows - 1) // 2


def test_the_tree_by_hand():
    assert by_tree(list(map(Symbolic, "abcde"))).text == "(((a+b)+(c+d))+e)"
    assert plan_additions([(4, 6), (0, 4)]) == [(1, 0)]
