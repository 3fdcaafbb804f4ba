"""What each replica of a process has accumulated under `no_sync`: gradients that are not summed yet.

One replica's is in `parameter.grad`; those of the others are kept here.
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

    They outlive a run: outside of runs `parameter.grad` is the last replica's, so those are held weakly.

    Args:
        replicas: those of this process.
    """

    def __init__(self, replicas: range) -> None:
        self._last = replicas[-1]
        self._gradients: dict[int, dict[Slot, Tensor | TensorWeakRef]] = {
            replica: {} for replica in replicas
        }
        self._weights: dict[int, Weight] = {}
        self._crossed: set[int] = set()
        self._versions: dict[Slot, int] = {}  # of the last replica's, at the end of the last run

    def has_any(self) -> bool:
        """Return whether any replica has some."""
        return any(self._gradients.values())

    def of(self, replica: int, slot: Slot) -> Tensor | None:
        """Return what a replica has accumulated for a parameter."""
        gradient = self._gradients[replica].get(slot)
        return gradient() if isinstance(gradient, TensorWeakRef) else gradient

    def holds(self, replica: int, slot: Slot, gradient: Tensor | None) -> bool:
        """Return whether a tensor is what a replica has accumulated for a parameter."""
        return gradient is not None and self.of(replica, slot) is gradient

    def accumulate(
        self,
        replica: int,
        slot: Slot,
        stashed: Tensor | None,
        gradient: Tensor,
    ) -> Tensor:
        """Return what a replica's `parameter.grad` becomes: the new gradient, added to what was accumulated before.

        Args:
            replica: whose gradient it is.
            slot: the parameter's.
            stashed: what `parameter.grad` held before the backward.
            gradient: what the backward has written.

        Raises:
            GradientError: when that was a sum over replicas; on this rank only.
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
        """Forget what a replica has accumulated: it is summed."""
        self._gradients[replica].clear()

    def weight(self, replica: int) -> Weight | None:
        """Return the weight of what a replica has accumulated."""
        return self._weights.get(replica)

    def has_crossed(self, replica: int) -> bool:
        """Return whether a backward of what a replica has accumulated went through the sum of an all_reduce."""
        return replica in self._crossed

    def note_backward(self, replica: int, weight: Weight, has_crossed: bool) -> None:
        """Note a backward whose gradients are accumulated."""
        self._weights[replica] = weight
        if has_crossed:
            self._crossed.add(replica)

    def begin_anew(self, replica: int) -> None:
        """Forget the weight of what a replica had accumulated, which is gone or summed."""
        self._weights.pop(replica, None)
        self._crossed.discard(replica)

    def clear(self) -> None:
        """Forget what all replicas have accumulated."""
        for replica, gradients in self._gradients.items():
            gradients.clear()
            self.begin_anew(replica)

    def _items(self, replica: int) -> Sequence[tuple[Slot, Tensor]]:
        pairs = [(slot, self.of(replica, slot)) for slot in self._gradients[replica]]
        return [(slot, gradient) for slot, gradient in pairs if gradient is not None]

    def begin_run(self) -> None:
        """Forget all of them if the program has dropped, replaced or zeroed a gradient since the last run.

        Raises:
            GradientError: when it has changed one in another way, of which the other replicas' know nothing; on this
                rank only.
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
        """Forget what replicas have dropped in the run, and note what the last one leaves in `parameter.grad`.

        Where only other replicas have accumulated, that becomes zeros, so that the program can drop it after the run.

        Args:
            final_gradients: by replica, what it had in `parameter.grad` at the end.
        """
        for replica, gradients in final_gradients.items():
            for slot, gradient in self._items(replica):
                if gradients.get(slot) is not gradient:
                    del self._gradients[replica][slot]
        lasts = dict(self._items(self._last))
        for replica in list(self._gradients):
            for slot, gradient in self._items(replica):
                parameter = slot.parameter
                if slot not in lasts and parameter is not None and parameter.grad is None:
                    parameter.grad = lasts[slot] = torch.zeros_like(gradient)
                    self._gradients[self._last][slot] = TensorWeakRef(lasts[slot])
        self._versions = {slot: gradient._version for slot, gradient in lasts.items()}
