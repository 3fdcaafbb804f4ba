"""Buffers in a merge_call: which of them are the same on all replicas, so that what is done to them is so too."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hpcdist.errors import HpcdistError, UsageError
from hpcdist.gradients.model_plan import BufferPlace
from hpcdist.gradients.tensors import have_same_bits


class MergedBuffers:
    """Refuses what a merge_call does to buffers that are a replica's own then.

    Between the forward of a run and the sum of its backward each replica has values of its own. A merge finds those of
    one replica on each rank, so that what it makes of them would depend on the number of ranks.

    Args:
        agree: raises an error of any rank on all of them; collective.

    Cost: a copy of all buffers at the start of a run, at a sum and in a merge; one comparison at each hand-over.
    """

    def __init__(self, agree: Callable[[HpcdistError | None], None]) -> None:
        self._agree = agree
        self._places: Sequence[BufferPlace] = ()
        self._common: list[Tensor | None] = []
        self._own: set[str] = set()

    def watch(self, places: Sequence[BufferPlace]) -> None:
        """Look after these from now on."""
        self._places = places
        self.share()

    def share(self) -> None:
        """Take note that all replicas have the buffers that there are now."""
        self._common = self._copies()
        self._own.clear()

    def begin(self) -> None:
        """Take note that a run begins: all replicas find the same."""
        self.share()

    def end(self) -> None:
        """Forget what replicas had."""
        self._common = []
        self._own.clear()

    def enter(self, replica: int) -> None:
        """Do nothing: others keep what is a replica's own."""

    def leave(self, replica: int) -> None:
        """Take note of the buffers that a replica has changed."""
        self._own |= {
            place.name
            for place, common in zip(self._places, self._common, strict=False)
            if not have_same_bits(place.tensor, common)
        }

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let the block change buffers that all replicas have alike.

        Collective where it writes into any: the ranks of the role.

        Raises:
            UsageError: for buffers that a replica has changed since the start of the run or the last sum; on all ranks.
        """
        self.leave(-1)
        before, marks = self._copies(), [_mark(place.tensor) for place in self._places]
        yield
        written = [
            place.name
            for place, kept, mark in zip(self._places, before, marks, strict=True)
            if _mark(place.tensor) != mark or not have_same_bits(place.tensor, kept)
        ]
        if written:
            self._agree(_refusal(sorted(self._own.intersection(written))))
            self._common = [
                new if place.name in written else common
                for place, common, new in zip(self._places, self._common, self._copies(), strict=True)
            ]

    def _copies(self) -> list[Tensor | None]:
        tensors = [place.tensor for place in self._places]
        return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    """Return what differs once a tensor was replaced or written into; a write that changes no bits counts too."""
    return id(tensor), 0 if tensor is None or tensor.is_inference() else tensor._version


def _refusal(names: list[str]) -> UsageError | None:
    if not names:
        return None
    return UsageError(
        f"merge_call: expected no change of buffers that replicas have changed on their own since the start of the run "
        f"or the last backward, got one of {names[0]!r}; change it after backward, which averages it, or in the "
        f"replicas."
    )
