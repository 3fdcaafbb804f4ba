"""What each replica of a process has accumulated under `no_sync`, while another one's is in `parameter.grad`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hpcdist.errors import GradientError
from hpcdist.gradients.part_weights import Weight
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.tensors import has_values, plus


class LocalGradients:
    """The gradients that were not summed yet, by replica.

    They outlive a run: outside of runs `parameter.grad` is the last replica's.

    Args:
        replicas: of this process.
    """

    def __init__(self, replicas: range) -> None:
        self._last = replicas[-1]
        self._of: dict[int, dict[ParameterRecord, Tensor]] = {replica: {} for replica in replicas}
        self._weights: dict[int, Weight] = {}
        self._versions: dict[ParameterRecord, int] = {}  # of the last replica's, at the end of the last run

    def has_any(self) -> bool:
        """Return whether any replica has some."""
        return any(self._of.values())

    def holds(self, replica: int, record: ParameterRecord, gradient: Tensor | None) -> bool:
        """Return whether a tensor is what a replica has accumulated for a parameter."""
        return gradient is not None and self._of[replica].get(record) is gradient

    def of(self, replica: int, record: ParameterRecord) -> Tensor | None:
        """Return what a replica has accumulated for a parameter."""
        return self._of[replica].get(record)

    def accumulate(self, replica: int, record: ParameterRecord, found: Tensor | None, gradient: Tensor) -> Tensor:
        """Return what a replica's `parameter.grad` becomes: the new gradient, added to what was accumulated before.

        Args:
            replica: whose.
            record: the parameter.
            found: what the backward found in `parameter.grad`.
            gradient: what it wrote.

        Raises:
            GradientError: when it found a sum over replicas; on this rank only.
        """
        if found is not None and self.holds(replica, record, found):
            gradient = plus(found, gradient)
        elif found is not None and has_values(found):
            raise GradientError(
                f"no_sync: expected zeroed or local gradients, got one summed over the replicas in {record.name!r}; "
                f"call zero_grad() before accumulating."
            )
        self._of[replica][record] = gradient
        return gradient

    def first_weight(self, replica: int) -> Weight | None:
        """Return the weight of the first backward whose gradients a replica has accumulated; None without any."""
        return self._weights.get(replica) if self._of[replica] else None

    def note_weight(self, replica: int, weight: Weight) -> None:
        """Note the weight of a backward whose gradients are accumulated."""
        self._weights[replica] = weight

    def clear(self, replica: int) -> None:
        """Forget a replica's: they are summed."""
        self._of[replica].clear()

    def begin_run(self) -> None:
        """Forget all of them if the program has dropped, replaced or zeroed a gradient since the last run.

        Raises:
            GradientError: when it has changed one in another way, of which the other replicas' know nothing; on this
                rank only.
        """
        for record, gradient in self._of[self._last].items():
            parameter = record.parameter
            is_changed = self._versions.get(record, gradient._version) != gradient._version
            if parameter is not None and (parameter.grad is not gradient or (is_changed and not has_values(gradient))):
                for own in self._of.values():
                    own.clear()
                return
            if is_changed:
                raise GradientError(
                    f"run: expected gradients accumulated under no_sync as they were, or zeroed, got others in "
                    f"{record.name!r}; change them inside run, where each replica has its own."
                )

    @torch.no_grad()
    def end_run(self, left: Mapping[int, Mapping[ParameterRecord, Tensor | None]]) -> None:
        """Forget what replicas have dropped in the run, and note what the last one leaves in `parameter.grad`.

        Where only other replicas have accumulated, that becomes zeros, so that the program can drop it after the run.

        Args:
            left: by replica, what it had in `parameter.grad` at the end.
        """
        for replica, gradients in left.items():
            own = self._of[replica]
            self._of[replica] = {record: one for record, one in own.items() if gradients.get(record) is one}
        lasts = self._of[self._last]
        for own in list(self._of.values()):
            for record, gradient in own.items():
                if record not in lasts and (parameter := record.parameter) is not None and parameter.grad is None:
                    parameter.grad = lasts[record] = torch.zeros_like(gradient)
        self._versions = {record: gradient._version for record, gradient in lasts.items()}
