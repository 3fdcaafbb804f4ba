"""Which parameters an optimizer of shares steps as one: parameters that lie one after another in memory.

A step of many small tensors costs mostly calls, and elementwise optimizers do not see where one tensor ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.plan.blocks import Bounds

#: Parameters of whole multiples of this are joined: an optimizer's vector instructions treat each element as they would
#: in the parameter alone, no last few elements of which are left to scalar code.
JOINED_ELEMENTS = 64


@dataclass(frozen=True)
class Place:
    """A parameter in memory, and the shares of its owners.

    Attributes:
        kind: group of the optimizer, dtype, bucket of the gradient, and piece of memory: equal for parameters that may
            be joined. None for a parameter that is joined with no other.
        address: address of its memory, in bytes.
        n_elements: number of its elements.
        item_bytes: bytes of an element.
        ranges: (start, stop) of each owner's share, in elements.
    """

    kind: tuple[int, str, int, int] | None
    address: int
    n_elements: int
    item_bytes: int
    ranges: Sequence[Bounds]


@dataclass(frozen=True)
class Run:
    """Parameters that are stepped as one.

    Attributes:
        members: numbers of the parameters, in the order of their memory.
        starts: first element of each member in the run.
        n_elements: number of elements of all members.
        ranges: (start, stop) of each owner's share, in elements of the run.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    n_elements: int
    ranges: tuple[Bounds, ...]

    def owned_range(self, owner: int) -> Bounds:
        """Return (start, stop) of an owner's share; (0, 0) for a rank that owns no share."""
        if owner >= len(self.ranges):
            return (0, 0)
        return self.ranges[owner]

    def is_owner(self, owner: int) -> bool:
        """Return whether an owner steps a part of the run. The first owner steps a run without elements."""
        start, stop = self.owned_range(owner)
        return start < stop or (self.n_elements == 0 and owner == 0)


def plan_runs(places: Sequence[Place], joins: bool) -> list[Run]:
    """Return runs that hold each parameter once. The same on all ranks that lay parameters out alike.

    Each owner's share of a run is one piece.

    Args:
        places: place of each parameter.
        joins: whether parameters are joined at all.
    """
    order = sorted(
        range(len(places)),
        key=lambda number: _order_of(number, places[number]),
    )
    runs: list[Run] = []
    for number in order:
        place = places[number]
        if joins and runs:
            last_run = runs[-1]
            last_place = places[last_run.members[-1]]
            if _may_follow(last_place, place):
                joined = _joined(last_run, number, place)
                if joined is not None:
                    runs[-1] = joined
                    continue
        run = Run(
            members=(number,),
            starts=(0,),
            n_elements=place.n_elements,
            ranges=tuple(place.ranges),
        )
        runs.append(run)
    return runs


def _order_of(
    number: int,
    place: Place,
) -> tuple[tuple[int, str, int, int], int]:
    """Return the key by which parameters are sorted: addresses count inside a piece of memory only.

    Pieces may lie in another order on other ranks, where runs must be the same.
    """
    if place.kind is None:
        return (-1, "", -1, -1), number
    return place.kind, place.address


def _may_follow(last: Place, place: Place) -> bool:
    """Return whether a parameter lies right behind another one of its kind, and both have no odd elements."""
    last_nbytes = last.n_elements * last.item_bytes
    is_adjacent = last.address + last_nbytes == place.address
    has_elements = last.n_elements > 0 and place.n_elements > 0
    is_whole = last.n_elements % JOINED_ELEMENTS == 0 and place.n_elements % JOINED_ELEMENTS == 0
    return (
        last.kind is not None
        and last.kind == place.kind
        and is_adjacent
        and has_elements
        and is_whole
    )


def _joined(
    run: Run,
    number: int,
    place: Place,
) -> Run | None:
    """Return a run with one more parameter; None if an owner's share would be two pieces then."""
    ranges: list[Bounds] = []
    all_ranges = zip(run.ranges, place.ranges, strict=True)
    for (start, stop), (new_start, new_stop) in all_ranges:
        if new_start == new_stop:
            ranges.append((start, stop))
        elif start == stop:
            ranges.append((run.n_elements + new_start, run.n_elements + new_stop))
        elif stop == run.n_elements + new_start:
            ranges.append((start, run.n_elements + new_stop))
        else:
            return None
    return Run(
        members=(*run.members, number),
        starts=(*run.starts, run.n_elements),
        n_elements=run.n_elements + place.n_elements,
        ranges=tuple(ranges),
    )
