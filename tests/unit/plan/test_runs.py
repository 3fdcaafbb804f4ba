"""Which parameters are stepped as one."""

import random

import pytest

from hpcdist.plan.runs import JOINED_ELEMENTS, Place, plan_runs
from hpcdist.plan.shards import plan_shards

KIND = (0, "torch.float32", 0, 0)


def places_of(sizes, n_owners, kind=KIND, gap_bytes=0):
    """Return parameters that lie one after another, in the order of their bucket."""
    shares = plan_shards(sizes, n_owners)
    places = []
    address = 4096
    for number, size in enumerate(sizes):
        ranges = [share.get(number, (0, 0)) for share in shares]
        places.append(Place(kind, address, size, 4, ranges))
        address += 4 * size + gap_bytes
    return places


@pytest.mark.parametrize("seed", range(100))
def test_runs_hold_all_parameters_and_every_owners_elements(seed):
    draws = random.Random(seed)
    sizes = [draws.choice([64, 4096, 1 << 16, 10, 0, 65]) for _ in range(draws.randrange(1, 12))]
    n_owners = draws.randrange(1, 5)
    places = places_of(sizes, n_owners)
    draws.shuffle(places)
    runs = plan_runs(places, joins=True)
    members = sum((run.members for run in runs), ())
    assert sorted(members) == list(range(len(places)))
    for run in runs:
        for owner in range(n_owners):
            start, stop = run.owned_range(owner)
            owned = set(range(start, stop))
            of_members = set()
            for member, first in zip(run.members, run.starts, strict=True):
                member_start, member_stop = places[member].ranges[owner]
                of_members |= set(range(first + member_start, first + member_stop))
            assert owned == of_members
        if len(run.members) > 1:
            assert all(places[member].n_elements % JOINED_ELEMENTS == 0 for member in run.members)
            for member, first in zip(run.members, run.starts, strict=True):
                assert places[member].address == places[run.members[0]].address + 4 * first


def test_small_parameters_are_one_run():
    (run,) = plan_runs(places_of([4096, 64, 4096, 64], 2), joins=True)
    assert run.members == (0, 1, 2, 3)
    assert run.starts == (0, 4096, 4160, 8256)
    assert run.ranges == ((0, 4160), (4160, 8320))


@pytest.mark.parametrize(
    "places",
    [
        places_of([64, 64], 2, gap_bytes=64),
        places_of([64, 65], 2),
        places_of([64, 64], 2, kind=None),
        [*places_of([64], 1), *(Place((1, "torch.float32", 0, 0), 4096 + 256, 64, 4, ((0, 64),)) for _ in range(1))],
    ],
    ids=["a gap", "odd elements", "not trained", "another group"],
)
def test_others_are_runs_of_their_own(places):
    assert [run.members for run in plan_runs(places, joins=True)] == [(0,), (1,)]


def test_a_share_in_two_pieces_ends_a_run():
    ranges = [((0, 64), (0, 0)), ((0, 0), (0, 64)), ((0, 64), (0, 0))]
    places = [Place(KIND, 256 * number, 64, 4, of_owners) for number, of_owners in enumerate(ranges)]
    assert [run.members for run in plan_runs(places, joins=True)] == [(0, 1), (2,)]


def test_nothing_is_joined_if_it_is_not_to_be():
    assert len(plan_runs(places_of([64, 64, 64], 2), joins=False)) == 3


def test_a_run_without_elements_is_the_first_owners():
    (run,) = plan_runs(places_of([0], 2), joins=True)
    assert list(map(run.is_owner, range(3))) == [True, False, False]


@pytest.mark.parametrize("addresses", [(4096, 1 << 20), (1 << 20, 4096), (4096, 4096 + 256)])
def test_runs_are_the_same_wherever_pieces_of_memory_lie(addresses):
    places = []
    for window, address in enumerate(addresses):
        places.append(Place((0, "torch.float32", 0, window), address, 64, 4, ((0, 64),)))
    foreign = [Place(None, address + 8192, 64, 4, ((0, 64),)) for address in addresses]
    assert [run.members for run in plan_runs([*places, *foreign], joins=True)] == [(2,), (3,), (0,), (1,)]
