import pytest

from hpcdist.cluster.assignment import NONE, RankFacts, assign_tasks
from hpcdist.cluster.spec import ClusterSpec
from hpcdist.errors import ConfigurationError

TWO = ClusterSpec({"worker": ["a:1", "b:1"]})
FULL = ClusterSpec({"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]})


def names(spec, rows):
    return list(map(str, assign_tasks(spec, [RankFacts(*row) for row in rows])))


def test_given_tasks_are_taken():
    assert names(TWO, [(1, 0, NONE), (0, 0, NONE)]) == ["worker 1", "worker 0"]


def test_ranks_without_a_task_take_entries_in_order():
    assert names(FULL, [(NONE, 0, NONE)] * 3) == ["chief 0", "worker 0", "ps 0"]


@pytest.mark.feature("complaints.host-lists-and-addresses")
def test_an_entry_owns_the_ranks_of_its_host():
    rows = [(NONE, 0, NONE), (NONE, 0, NONE), (NONE, 2, NONE)]
    assert names(TWO, rows) == ["worker 0", "worker 0", "worker 1"]


def test_host_names_decide_where_addresses_have_them():
    assert names(TWO, [(NONE, 0, 1), (NONE, 0, 1), (NONE, 2, 0)]) == ["worker 1", "worker 1", "worker 0"]


def test_one_entry_given_on_all_ranks_of_a_host():
    assert names(ClusterSpec({"worker": ["a:1"]}), [(0, 0, NONE)] * 3) == ["worker 0"] * 3


@pytest.mark.parametrize(
    ("spec", "rows", "expected"),
    [
        (TWO, [(0, 0, NONE), (NONE, 0, NONE)], "none on rank 1"),
        (TWO, [(0, 0, NONE), (0, 0, NONE)], 'drop "task"'),
        (TWO, [(NONE, 0, NONE)] * 3, "got 3 ranks on 1 hosts"),
        (TWO, [(NONE, 0, NONE)], "got 1 ranks on 1 hosts"),
        (TWO, [(0, 0, NONE), (1, 0, NONE), (1, 2, NONE)], "expected ranks on one host for worker 1"),
        (FULL, [(0, 0, NONE), (1, 0, NONE), (2, 0, NONE), (2, 0, NONE)], "expected one rank for ps 0"),
        (FULL, [(0, 0, NONE), (1, 0, NONE)], "got none for ps 0"),
    ],
)
def test_refuses_what_does_not_add_up(spec, rows, expected):
    with pytest.raises(ConfigurationError) as caught:
        names(spec, rows)
    assert expected in str(caught.value)
