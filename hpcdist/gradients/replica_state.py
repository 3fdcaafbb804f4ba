"""What is private to a replica while another one of the same process runs: gradients and buffers of shared modules."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hpcdist.errors import HpcdistError, UsageError
from hpcdist.gradients.local_gradients import LocalGradients
from hpcdist.gradients.slot import Slot
from hpcdist.program.model_plan import ModelBuffer
from hpcdist.program.tensors import have_same_bits


@dataclass(frozen=True)
class Snapshot:
    """Gradients (by reference) and copies of buffers at one moment.

    `is_shared`: several replicas resume with the same gradients; all but the last one get copies then.
    """

    gradients: list[Tensor | None]
    buffers: list[Tensor | None]
    is_shared: bool = False


class ReplicaState:
    """Switches `parameter.grad` and buffers between the replicas of a process, and watches merges.

    A merge_call runs between replicas. What it changes, all replicas get. It may not change buffers that a replica has
    changed on its own since the start of the run or the last sum: a merge sees only one replica's on each rank, so
    the result would depend on the number of ranks.

    Args:
        replicas: of this process. With one, only merges are watched.
        agree: raises an error of any rank on all of them; collective.

    Attributes:
        local: what replicas have accumulated under no_sync.

    Cost: references to all gradients and a copy of all buffers at each switch; after a sum, and in a run that begins
        with gradients, a copy of all gradients for each replica but the last, so that each may clip its own. A merge
        costs a copy of all gradients and two of all buffers.
    """

    def __init__(self, replicas: range, agree: Callable[[HpcdistError | None], None]) -> None:
        self._has_several = len(replicas) > 1
        self._last = replicas[-1]
        self._agree = agree
        self.local = LocalGradients(replicas)
        self._slots: Sequence[Slot] = ()
        self._buffers: Sequence[ModelBuffer] = ()
        self._saved: dict[int, Snapshot] = {}
        self._start: Snapshot | None = None
        self._common: list[Tensor | None] = []  # buffers that all replicas had at the start or the last sum
        self._own: set[str] = set()  # names of buffers that replicas have changed since
        # the parameter whose gradient each replica's copy is
        self._copies: MutableMapping[Tensor, Slot] = WeakTensorKeyDictionary()

    def watch(self, slots: Sequence[Slot], buffers: Sequence[ModelBuffer]) -> None:
        """Switch these from now on."""
        self._slots, self._buffers = slots, buffers
        self.share()

    def begin_run(self) -> None:
        """Let every replica begin with what there is now, or with what it has accumulated itself."""
        self._saved.clear()
        if self._has_several:
            self.local.begin_run()
        self._start = self._set_common()

    def end_run(self) -> None:
        """Leave what the last replica that ran has."""
        if self._has_several:
            self.local.end_run(
                {replica: dict(zip(self._slots, one.gradients, strict=False)) for replica, one in self._saved.items()}
            )
        self._saved.clear()
        self._start = None
        self._common = []
        self._own.clear()

    def share(self) -> None:
        """Give every replica the gradients and buffers that there are now."""
        self._saved = dict.fromkeys(self._saved, self._set_common())

    def _set_common(self) -> Snapshot:
        now = self._snapshot()
        self._common = now.buffers
        self._own.clear()
        return Snapshot(now.gradients, now.buffers, is_shared=True)

    def suspend(self, replica: int) -> None:
        """Save a replica's state, and slot which buffers it has changed."""
        now = self._snapshot()
        self._own |= {
            buffer.name
            for buffer, common, value in zip(self._buffers, self._common, now.buffers, strict=False)
            if not have_same_bits(value, common)
        }
        if self._has_several:
            self._saved[replica] = now

    @torch.no_grad()
    def resume(self, replica: int) -> None:
        """Restore a replica's state; of one that begins, what there was at the start of the run."""
        if not self._has_several:
            return
        saved = self._saved.get(replica, self._start)
        assert saved is not None, "begin_run comes before the first replica"
        for slot, gradient in zip(self._slots, saved.gradients, strict=True):
            if (parameter := slot.parameter) is not None:
                if saved is self._start and (own := self.local.of(replica, slot)) is not None:
                    gradient = own
                elif self.local.holds(self._last, slot, gradient) and replica != self._last:
                    gradient = None
                elif gradient is not None and saved.is_shared and replica != self._last:
                    gradient = self._copy(slot, gradient)
                parameter.grad = gradient
        for buffer, kept in zip(self._buffers, saved.buffers, strict=True):
            if (tensor := buffer.tensor) is not None and kept is not None:
                tensor.data.copy_(kept)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Apply what the block changes to every replica; the block sees the state of the last one.

        A gradient that it sets, drops or writes into becomes every replica's, each with a copy of its own; so does a
        buffer that it writes into. What it leaves alone stays what it was for each replica.

        Collective where it writes into buffers: the ranks of the role.

        Raises:
            UsageError: for buffers that a replica has changed on its own; on all ranks.
        """
        self.suspend(self._last)
        before, marks = self._snapshot(), [_mark(buffer.tensor) for buffer in self._buffers]
        values = [None if gradient is None else gradient.clone() for gradient in before.gradients]
        yield
        now = self._snapshot()
        written = [
            _mark(buffer.tensor) != mark or not have_same_bits(found, after)
            for buffer, mark, found, after in zip(self._buffers, marks, before.buffers, now.buffers, strict=True)
        ]
        if any(written):
            names = {buffer.name for buffer, is_written in zip(self._buffers, written, strict=True) if is_written}
            self._agree(_refusal(sorted(self._own & names)))
            self._common = _choose(self._common, now.buffers, written)
        is_changed = [
            after is not found or not have_same_bits(value, after)
            for found, value, after in zip(before.gradients, values, now.gradients, strict=True)
        ]
        if any(is_changed) and self.local.has_any():
            raise UsageError(
                "merge_call: expected no change of gradients that replicas have accumulated under no_sync, got one; "
                "change them after the backward that sums them."
            )
        for replica, own in self._saved.items():
            gradients = self._copies_of_changed(own.gradients, now.gradients, is_changed)
            self._saved[replica] = Snapshot(gradients, _choose(own.buffers, now.buffers, written))

    def _copies_of_changed(
        self, own: Sequence[Tensor | None], new: Sequence[Tensor | None], is_changed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return a replica's gradients, with copies of the new ones where the last replica's were changed."""
        return [
            mine if not changed else None if theirs is None else self._copy(slot, theirs)
            for slot, mine, theirs, changed in zip(self._slots, own, new, is_changed, strict=True)
        ]

    def _copy(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Return a copy of a published gradient for another replica, which may change it in place."""
        copied = gradient.detach().clone()
        self._copies[copied] = slot
        return copied

    def has_given(self, slot: Slot, gradient: Tensor) -> bool:
        """Return whether a tensor is a copy of a parameter's published gradient that a replica was given."""
        return self._copies.get(gradient) is slot

    def _snapshot(self) -> Snapshot:
        parameters = [slot.parameter for slot in self._slots]
        tensors = [buffer.tensor for buffer in self._buffers]
        return Snapshot(
            [None if parameter is None else parameter.grad for parameter in parameters],
            [None if tensor is None else tensor.detach().clone() for tensor in tensors],
        )


def _choose(own: Sequence[Tensor | None], new: Sequence[Tensor | None], is_new: Sequence[bool]) -> list[Tensor | None]:
    return [theirs if changed else mine for mine, theirs, changed in zip(own, new, is_new, strict=True)]


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
