"""What is private to a replica while another one of the same process runs: gradients and buffers of shared modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.gradients.model_plan import BufferPlace
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.tensors import have_same_bits


@dataclass(frozen=True)
class _Saved:
    """A replica's state. `is_shared`: others have the same gradients; all but the last get copies when they go on."""

    gradients: list[Tensor | None]
    buffers: list[Tensor | None]
    is_shared: bool = False


class ReplicaState:
    """Swaps `parameter.grad` and buffers when the turn passes from one replica to another.

    Args:
        last: the replica of this process that comes last.

    Cost: references to all gradients and a copy of all buffers at each hand-over; after a sum, and in a run that begins
    with gradients, a copy of all gradients for each replica but the last, so that each may clip its own.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._records: Sequence[ParameterRecord] = ()
        self._places: Sequence[BufferPlace] = ()
        self._saved: dict[int, _Saved] = {}
        self._start: _Saved | None = None

    def watch(self, records: Sequence[ParameterRecord], places: Sequence[BufferPlace]) -> None:
        """Keep these apart from now on."""
        self._records, self._places = records, places

    def begin(self) -> None:
        """Let every replica begin with what there is now."""
        self._saved.clear()
        now = self._now()
        self._start = _Saved(now.gradients, now.buffers, is_shared=True)

    def end(self) -> None:
        """Leave what the last replica that ran has."""
        self._saved.clear()
        self._start = None

    def share(self) -> None:
        """Give every replica the gradients and buffers that there are now."""
        now = self._now()
        shared = _Saved(now.gradients, now.buffers, is_shared=True)
        self._saved = dict.fromkeys(self._saved, shared)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Give every replica what the block changes; the block finds what the last replica has.

        A gradient that it sets, drops or writes into is then every replica's, each with a copy of its own; so is a
        buffer that it writes into. What it leaves alone stays what it was for each replica.

        Cost: a copy of all gradients and two of all buffers, to see what was changed; what was changed once more for
        each replica but the last.
        """
        before = self._now()
        values = [None if gradient is None else gradient.clone() for gradient in before.gradients]
        yield
        now = self._now()
        gradients = [
            after is not found or not have_same_bits(value, after)
            for found, value, after in zip(before.gradients, values, now.gradients, strict=True)
        ]
        buffers = [not have_same_bits(*pair) for pair in zip(before.buffers, now.buffers, strict=True)]
        for replica, own in self._saved.items():
            self._saved[replica] = _Saved(
                self._lend_changed(own.gradients, now.gradients, gradients),
                [two if differ else one for one, two, differ in zip(own.buffers, now.buffers, buffers, strict=True)],
            )

    def _lend_changed(
        self, own: Sequence[Tensor | None], new: Sequence[Tensor | None], is_changed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return a replica's gradients, with copies of the new ones where the last one's were changed."""
        return [
            mine if not changed else None if theirs is None else record.lend(theirs)
            for record, mine, theirs, changed in zip(self._records, own, new, is_changed, strict=True)
        ]

    def leave(self, replica: int) -> None:
        """Put a replica's state away."""
        self._saved[replica] = self._now()

    @torch.no_grad()
    def enter(self, replica: int) -> None:
        """Bring a replica's state back; of one that begins, what there was at the beginning."""
        saved = self._saved.get(replica, self._start)
        assert saved is not None, "begin comes before the first replica"
        for record, gradient in zip(self._records, saved.gradients, strict=True):
            if (parameter := record.parameter) is not None:
                is_lent = saved.is_shared and replica != self._last
                parameter.grad = record.lend(gradient) if is_lent and gradient is not None else gradient
        for place, kept in zip(self._places, saved.buffers, strict=True):
            if (tensor := place.tensor) is not None and kept is not None:
                tensor.data.copy_(kept)

    def _now(self) -> _Saved:
        parameters = [record.parameter for record in self._records]
        tensors = [place.tensor for place in self._places]
        return _Saved(
            [None if parameter is None else parameter.grad for parameter in parameters],
            [None if tensor is None else tensor.clone() for tensor in tensors],
        )
