"""Gradients that each replica of a process has accumulated under `no_sync`, and that are not summed yet.

The gradients of one replica are in `parameter.grad`; the gradients of the other replicas are kept here.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from hpcdist.errors import GradientError
from hpcdist.gradients.slot import Slot
from hpcdist.program.part_weights import Weight
from hpcdist.program.tensors import has_values, plus


class LocalGradients:
    """The gradients that were not summed yet, by replica.

    They outlive a run. Outside of runs `parameter.grad` has the gradients of the last replica, which are held weakly.

    Args:
        replicas: replicas of this process.
    """

    def __init__(self, replicas: range) -> None:
        self._last = replicas[-1]
        self._gradients: dict[int, dict[Slot, Tensor | TensorWeakRef]] = {}
        for replica in replicas:
            self._gradients[replica] = {}
        self._weights: dict[int, Weight] = {}
        self._crossed: set[int] = set()
        # versions of the last replica's gradients, at the end of the last run
        self._versions: dict[Slot, int] = {}

    def has_any(self) -> bool:
        """Return whether any replica has accumulated gradients."""
        return any(self._gradients.values())

    def of(self, replica: int, slot: Slot) -> Tensor | None:
        """Return the gradient that a replica has accumulated for a parameter; None without one."""
        gradient = self._gradients[replica].get(slot)
        if isinstance(gradient, TensorWeakRef):
            referent: Tensor | None = gradient()
            return referent
        return gradient

    def holds(
        self,
        replica: int,
        slot: Slot,
        gradient: Tensor | None,
    ) -> bool:
        """Return whether a tensor is the gradient that a replica has accumulated for a parameter."""
        return gradient is not None and self.of(replica, slot) is gradient

    def accumulate(
        self,
        replica: int,
        slot: Slot,
        stashed: Tensor | None,
        gradient: Tensor,
    ) -> Tensor:
        """Return a replica's new `parameter.grad`: the new gradient, added to the accumulated one.

        Args:
            replica: replica whose gradient it is.
            slot: slot of the parameter.
            stashed: value of `parameter.grad` before the backward.
            gradient: gradient that the backward has written.

        Raises:
            GradientError: when `stashed` is a sum over replicas; on this rank only.
        """
        if self.holds(replica, slot, stashed):
            assert stashed is not None, "a gradient is held"
            gradient = plus(stashed, gradient)
        elif stashed is not None and not slot.has_zeros(stashed):
            raise GradientError(
                f"no_sync: expected zeroed or local gradients, got one summed over the replicas in {slot.name!r}; "
                f"call zero_grad() before accumulating."
            )
        reference = slot.note_local(gradient)
        self._gradients[replica][slot] = reference if replica == self._last else gradient
        return gradient

    def forget(self, replica: int) -> None:
        """Forget the gradients that a replica has accumulated, as they are summed."""
        self._gradients[replica].clear()

    def weight(self, replica: int) -> Weight | None:
        """Return the weight of the gradients that a replica has accumulated; None without any."""
        return self._weights.get(replica)

    def has_crossed(self, replica: int) -> bool:
        """Return whether an accumulated gradient of a replica went through the sum of an all_reduce."""
        return replica in self._crossed

    def note_backward(
        self,
        replica: int,
        weight: Weight,
        has_crossed: bool,
    ) -> None:
        """Note a backward whose gradients are accumulated."""
        self._weights[replica] = weight
        if has_crossed:
            self._crossed.add(replica)

    def begin_anew(self, replica: int) -> None:
        """Forget the weight of a replica's accumulated gradients, which are gone or summed."""
        self._weights.pop(replica, None)
        self._crossed.discard(replica)

    def clear(self) -> None:
        """Forget the gradients that all replicas have accumulated."""
        for replica, gradients in self._gradients.items():
            gradients.clear()
            self.begin_anew(replica)

    def _items(self, replica: int) -> Sequence[tuple[Slot, Tensor]]:
        """Return the slots and accumulated gradients of a replica, without gradients that were freed."""
        items: list[tuple[Slot, Tensor]] = []
        for slot in self._gradients[replica]:
            gradient = self.of(replica, slot)
            if gradient is not None:
                items.append((slot, gradient))
        return items

    def begin_run(self) -> None:
        """Forget all gradients if the program has dropped, replaced or zeroed one since the last run.

        Raises:
            GradientError: when the program has changed a gradient in another way, which the gradients of the other
                replicas do not follow; on this rank only.
        """
        accumulated = dict(self._items(self._last))
        for slot in list(self._gradients[self._last]):
            parameter = slot.parameter
            if parameter is None:
                continue
            gradient = accumulated.get(slot)
            if gradient is None or parameter.grad is not gradient:
                self.clear()
                return
            if self._versions.get(slot, gradient._version) == gradient._version:
                continue
            if not has_values(gradient):
                self.clear()
                return
            raise GradientError(
                f"run: expected gradients accumulated under no_sync as they were, or zeroed, got others in "
                f"{slot.name!r}; change them inside run, where each replica has its own."
            )

    @torch.no_grad()
    def end_run(self, final_gradients: Mapping[int, Mapping[Slot, Tensor | None]]) -> None:
        """Forget gradients that replicas have dropped in the run, and note the gradients that the last replica leaves.

        Where only other replicas have accumulated, `parameter.grad` becomes zeros, so that the program can drop it
        after the run.

        Args:
            final_gradients: values of `parameter.grad` at the end of each replica.
        """
        for replica, gradients in final_gradients.items():
            for slot, gradient in self._items(replica):
                if gradients.get(slot) is not gradient:
                    del self._gradients[replica][slot]
        last_gradients = dict(self._items(self._last))
        for replica in list(self._gradients):
            for slot, gradient in self._items(replica):
                parameter = slot.parameter
                if slot in last_gradients or parameter is None or parameter.grad is not None:
                    continue
                zeros = torch.zeros_like(gradient)
                parameter.grad = zeros
                last_gradients[slot] = zeros
                self._gradients[self._last][slot] = TensorWeakRef(zeros)
        self._versions = {}
        for slot, gradient in last_gradients.items():
            self._versions[slot] = gradient._version
