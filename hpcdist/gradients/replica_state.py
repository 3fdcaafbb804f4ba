"""The private state of a replica while another one of its process runs: gradients and buffers of shared modules."""

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

    Attributes:
        gradients: `parameter.grad` of each slot.
        buffers: copies of the buffers.
        is_shared: whether several replicas resume with the same gradients; all but the last one get copies then.
    """

    gradients: list[Tensor | None]
    buffers: list[Tensor | None]
    is_shared: bool = False


class ReplicaState:
    """Switches `parameter.grad` and buffers between the replicas of a process, and watches merges.

    A merge_call runs between replicas. All replicas get its changes. It may not change buffers that a replica has
    changed on its own since the start of the run or the last sum: a merge sees only the buffers of one replica on each
    rank, so the result would depend on the number of ranks.

    Args:
        replicas: replicas of this process. With one, only merges are watched.
        agree: function that raises an error of any rank on all ranks; collective.

    Attributes:
        local: gradients that replicas have accumulated under no_sync.

    Cost: references to all gradients and a copy of all buffers at each switch; after a sum, and in a run that begins
        with gradients, a copy of all gradients for each replica but the last, so that each may clip its own. A merge
        costs a copy of all gradients and two of all buffers.
    """

    def __init__(
        self,
        replicas: range,
        agree: Callable[[HpcdistError | None], None],
    ) -> None:
        self._has_several = len(replicas) > 1
        self._last = replicas[-1]
        self._agree = agree
        self.local = LocalGradients(replicas)
        self._slots: Sequence[Slot] = ()
        self._buffers: Sequence[ModelBuffer] = ()
        self._saved: dict[int, Snapshot] = {}
        self._start: Snapshot | None = None
        # buffers that all replicas had at the start or the last sum
        self._common: list[Tensor | None] = []
        self._diverged_names: set[str] = set()  # names of buffers that replicas have changed since
        # the parameter whose gradient each replica's copy is
        self._copies: MutableMapping[Tensor, Slot] = WeakTensorKeyDictionary()

    def watch(
        self,
        slots: Sequence[Slot],
        buffers: Sequence[ModelBuffer],
    ) -> None:
        """Switch these gradients and buffers from now on."""
        self._slots = slots
        self._buffers = buffers
        self.share()

    def begin_run(self) -> None:
        """Let every replica begin with the present gradients and buffers, or with the gradients it has accumulated."""
        self._saved.clear()
        if self._has_several:
            self.local.begin_run()
        self._start = self._set_common()

    def end_run(self) -> None:
        """Leave the gradients and buffers of the last replica that ran."""
        if self._has_several:
            final_gradients: dict[int, dict[Slot, Tensor | None]] = {}
            for replica, snapshot in self._saved.items():
                final_gradients[replica] = dict(zip(self._slots, snapshot.gradients, strict=False))
            self.local.end_run(final_gradients)
        self._saved.clear()
        self._start = None
        self._common = []
        self._diverged_names.clear()

    def share(self) -> None:
        """Give every replica the present gradients and buffers."""
        self._saved = dict.fromkeys(self._saved, self._set_common())

    def _set_common(self) -> Snapshot:
        now = self._snapshot()
        self._common = now.buffers
        self._diverged_names.clear()
        return Snapshot(now.gradients, now.buffers, is_shared=True)

    def suspend(self, replica: int) -> None:
        """Save a replica's state, and note which buffers it has changed."""
        now = self._snapshot()
        for buffer, common, value in zip(self._buffers, self._common, now.buffers, strict=False):
            if not have_same_bits(value, common):
                self._diverged_names.add(buffer.name)
        if self._has_several:
            self._saved[replica] = now

    @torch.no_grad()
    def resume(self, replica: int) -> None:
        """Restore a replica's state; for a replica that begins, the state at the start of the run."""
        if not self._has_several:
            return
        saved = self._saved.get(replica, self._start)
        assert saved is not None, "begin_run comes before the first replica"
        for slot, gradient in zip(self._slots, saved.gradients, strict=True):
            parameter = slot.parameter
            if parameter is not None:
                parameter.grad = self._gradient_of(replica, slot, gradient, saved)
        for buffer, values in zip(self._buffers, saved.buffers, strict=True):
            tensor = buffer.tensor
            if tensor is not None and values is not None:
                tensor.data.copy_(values)

    def _gradient_of(
        self,
        replica: int,
        slot: Slot,
        gradient: Tensor | None,
        saved: Snapshot,
    ) -> Tensor | None:
        """Return the new `parameter.grad` for a replica that resumes with a snapshot."""
        accumulated = self.local.of(replica, slot)
        if saved is self._start and accumulated is not None:
            return accumulated
        if replica == self._last or gradient is None:
            return gradient
        if self.local.holds(self._last, slot, gradient):
            return None
        if saved.is_shared:
            return self._copy(slot, gradient)
        return gradient

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Apply the changes of the block to every replica; the block sees the state of the last replica.

        Every replica gets a copy of each gradient that the block sets or writes into, and of each buffer that it writes
        into, and loses each gradient that it drops. Other gradients and buffers of the replicas stay as they were.

        Collective over the ranks of the role where it writes into buffers.

        Raises:
            UsageError: for buffers that a replica has changed on its own; on all ranks.
        """
        self.suspend(self._last)
        before = self._snapshot()
        marks = [_mark(buffer.tensor) for buffer in self._buffers]
        values = _copies(before.gradients)
        yield
        now = self._snapshot()
        are_written = self._written_buffers(marks, before, now)
        if any(are_written):
            written_names = _chosen_names(self._buffers, are_written)
            refused_names = sorted(self._diverged_names & written_names)
            self._agree(_refusal(refused_names))
            self._common = _choose(self._common, now.buffers, are_written)
        are_changed = _changed_gradients(before, values, now)
        if any(are_changed) and self.local.has_any():
            raise UsageError(
                "merge_call: expected no change of gradients that replicas have accumulated under no_sync, got one; "
                "change them after the backward that sums them."
            )
        for replica, snapshot in self._saved.items():
            gradients = self._copies_of_changed(snapshot.gradients, now.gradients, are_changed)
            buffers = _choose(snapshot.buffers, now.buffers, are_written)
            self._saved[replica] = Snapshot(gradients, buffers)

    def _written_buffers(
        self,
        marks: Sequence[tuple[int, int]],
        before: Snapshot,
        now: Snapshot,
    ) -> list[bool]:
        """Return, for each buffer, whether a merge has written into it."""
        are_written: list[bool] = []
        for number, buffer in enumerate(self._buffers):
            is_same = have_same_bits(before.buffers[number], now.buffers[number])
            has_same_mark = _mark(buffer.tensor) == marks[number]
            are_written.append(not has_same_mark or not is_same)
        return are_written

    def _copies_of_changed(
        self,
        gradients: Sequence[Tensor | None],
        new_gradients: Sequence[Tensor | None],
        are_changed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Return a replica's gradients, with copies of the new ones where the last replica's were changed."""
        copies = list(gradients)
        for number, gradient in enumerate(new_gradients):
            if not are_changed[number]:
                continue
            copies[number] = None
            if gradient is not None:
                copies[number] = self._copy(self._slots[number], gradient)
        return copies

    def _copy(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Return a copy of a published gradient for another replica, which may change it in place."""
        copied = gradient.detach().clone()
        self._copies[copied] = slot
        return copied

    def has_given(self, slot: Slot, gradient: Tensor) -> bool:
        """Return whether a tensor is a replica's copy of a parameter's published gradient."""
        return self._copies.get(gradient) is slot

    def _snapshot(self) -> Snapshot:
        """Return the present gradients, and copies of the present buffers."""
        parameters = [slot.parameter for slot in self._slots]
        tensors = [buffer.tensor for buffer in self._buffers]
        gradients = [None if parameter is None else parameter.grad for parameter in parameters]
        buffers = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        return Snapshot(gradients, buffers)


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def _chosen_names(
    buffers: Sequence[ModelBuffer],
    are_chosen: Sequence[bool],
) -> set[str]:
    """Return the names of the buffers that are marked by a flag."""
    names: set[str] = set()
    for buffer, is_chosen in zip(buffers, are_chosen, strict=True):
        if is_chosen:
            names.add(buffer.name)
    return names


def _changed_gradients(
    before: Snapshot,
    values: Sequence[Tensor | None],
    now: Snapshot,
) -> list[bool]:
    """Return, for each gradient, whether it was replaced or written into.

    Args:
        before: snapshot before the change.
        values: copies of the gradients of `before`.
        now: snapshot after the change.
    """
    are_changed: list[bool] = []
    for number, gradient in enumerate(now.gradients):
        is_same = gradient is before.gradients[number] and have_same_bits(values[number], gradient)
        are_changed.append(not is_same)
    return are_changed


def _choose(
    tensors: Sequence[Tensor | None],
    new_tensors: Sequence[Tensor | None],
    are_new: Sequence[bool],
) -> list[Tensor | None]:
    """Return tensors, with new ones where a flag is set."""
    chosen: list[Tensor | None] = []
    for number, tensor in enumerate(tensors):
        chosen.append(new_tensors[number] if are_new[number] else tensor)
    return chosen


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    """Return a mark that differs once a tensor was replaced or written into, even if no bits were changed."""
    if tensor is None or tensor.is_inference():
        return id(tensor), 0
    return id(tensor), tensor._version


def _refusal(names: list[str]) -> UsageError | None:
    if not names:
        return None
    return UsageError(
        f"merge_call: expected no change of buffers that replicas have changed on their own since the start of the run "
        f"or the last backward, got one of {names[0]!r}; change it after backward, which averages it, or in the "
        f"replicas."
    )
