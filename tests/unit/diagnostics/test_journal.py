from array import array

import pytest

from hpcdist.diagnostics.journal import N_KEPT, Journal


def run(journal, n_collectives, op="all_reduce"):
    for number in range(n_collectives):
        journal.enter(op, "float32", number)
        journal.leave()


def test_current_is_the_one_that_is_under_way():
    journal = Journal()
    assert journal.current is None
    assert journal.describe() == ""
    journal.enter("all_reduce", "float32", 1024)
    assert journal.current[:4] == (1, "all_reduce", "float32", 1024)
    assert str(journal.current) == "all_reduce float32 x 1024"
    journal.leave()
    assert journal.current is None
    journal.leave()
    assert len(journal.entries) == 1


@pytest.mark.feature("debugging.log-of-calls")
def test_the_last_64_are_remembered():
    journal = Journal()
    run(journal, 100)
    assert [entry.number for entry in journal.entries] == list(range(101 - N_KEPT, 101))
    assert [entry.n_elements for entry in journal.entries][-1] == 99
    journal.enter("broadcast", "int64", 5)
    assert len(journal.entries) == N_KEPT
    assert journal.entries[-1].op == "broadcast"


def test_the_unfinished_are_marked():
    journal = Journal()
    run(journal, 1)
    journal.enter("all_reduce", "float64", 7)  # raised: never left
    journal.enter("broadcast", "int64", 3)
    first, second, third = journal.describe().splitlines()
    assert first.split() == ["1", "all_reduce", "float32", "x", "0", first.split()[-2], "ms"]
    assert second.split(maxsplit=5) == ["2", "all_reduce", "float64", "x", "7", "ended by an error"]
    assert third.split(maxsplit=5)[5].startswith("running for 0.")
    journal.leave()
    assert journal.describe().splitlines()[2].endswith(" ms")


@pytest.mark.parametrize("stride", [1, 8])
def test_the_board_shows_who_is_behind(stride):
    cells = array("q", [0] * 3 * stride)
    journals = [Journal(memoryview(cells)[::stride], place) for place in range(3)]
    for journal, n_collectives in zip(journals, (2, 1, 2), strict=True):
        run(journal, n_collectives)
    assert cells[::stride].tolist() == [2, 1, 2]
    assert [journal.behind() for journal in journals] == [[1], [], [1]]


def test_without_a_board_nobody_is_behind():
    journal = Journal(local_rank=2)
    run(journal, 3)
    assert journal.board.tolist() == [3]
    assert journal.behind() == []


def test_the_board_shows_who_is_in_another_call():
    cells = array("q", [0] * 3)
    codes = array("q", [0] * 3)
    first, second, third = (Journal(memoryview(cells), place, memoryview(codes)) for place in range(3))
    for journal, op in ((first, "save"), (second, "all_reduce sum"), (third, "save")):
        journal.enter(op, "any", 0)
    assert first.apart() == {1: "all_reduce sum"}
    assert second.apart() == {0: "save", 2: "save"}
    second.leave()
    assert first.apart() == second.apart() == {}  # one that is in no collective may come
    second.enter("save", "any", 0)
    assert first.apart() == third.apart() == {}  # it is ahead: its number tells what it is in, not what it was
