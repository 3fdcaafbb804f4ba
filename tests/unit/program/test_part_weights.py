"""By how many rows a backward is weighed, given the parts that it may use."""

import pytest

from hpcdist.program.part_weights import Weight, weigh
from hpcdist.runtime.parts import Part, PartSource


def parts_of(*rows, source=None):
    """Return parts of one source, each given by its rows and those of all replicas."""
    source = source or PartSource(1, None, None)
    return [
        Part(source, number, None if local_rows is None else (local_rows,), total, True, 10 * number, number, True)
        for number, (local_rows, total) in enumerate(rows, 1)
    ]


def test_one_part_weighs_by_its_rows_and_names_its_batch():
    assert weigh(parts_of((3, 5)), 0) == Weight(3.0, True, 5, 10)


@pytest.mark.parametrize("rows", [[(2, 4), (8, 16)], [(8, 16), (1, 2)], [(0, 4), (0, 3)]])
def test_parts_of_one_fraction_weigh_as_the_oldest(rows):
    weight = weigh(parts_of(*rows), 0)
    assert (weight.rows, weight.refusal, weight.key) == (rows[0][0], None, None)
    assert weight == weigh(parts_of(*rows)[::-1], 0), "in whatever order"


@pytest.mark.parametrize("rows", [[(2, 4), (3, 5)], [(1, 1), (6, 12)], [(0, 1), (1, 2)]])
def test_parts_of_other_fractions_are_refused(rows):
    assert "may be meant" in weigh(parts_of(*rows), 0).refusal


def test_without_parts_the_rows_of_all_replicas_must_be_equal_where_they_are_seen():
    assert weigh([], 0) == Weight()
    assert weigh([], 0, likely_rows=7) == Weight(key=7)


def test_a_part_that_nobody_has_planned_puts_the_others_in_doubt():
    """A loss of both is a sum of means, of which the unplanned one has another weight, unless ranks are alike."""
    unplanned_part = Part(PartSource(2, None, 7), 1, None, None, False, None, 1, True, 8)
    weight = weigh([*parts_of((4, 7)), unplanned_part], 0)
    assert (weight.rows, weight.doubtful_rows, weight.key) == (4, 4, None)


def test_parts_of_two_loaders_of_which_only_own_rows_are_known_must_be_alike_on_all_ranks():
    first = PartSource(1, None, 1)
    second = PartSource(2, None, 2)
    here, remote_parts = (
        [*parts_of((4, None), source=first), *parts_of((row_count, None), source=second)] for row_count in (16, 12)
    )
    assert weigh(here, 0).doubtful_rows != weigh(remote_parts, 0).doubtful_rows
    assert weigh(here, 0).rows == 1
    assert weigh(parts_of((4, None), (3, None)), 0).refusal, "two parts of one loader: either may be meant"
