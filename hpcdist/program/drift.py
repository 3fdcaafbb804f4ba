"""Finds ranks that drift apart: parameters and settings of optimizers that must be equal, and are not any more.

A digest of a small part travels with the sum of gradients, where each rank adds it and its square: they fit together if
all ranks have the same. Which part depends on the number of the sum alone, so nobody waits, and nothing is agreed on.
Every 4th sum compares settings, every 16th a slice of the parameters; after at most 64 slices all were compared.

What a program has dropped may live on, on some ranks only: the garbage collector runs when it likes. So settings are
those of the optimizers that have made a step since they were compared last, and ranks that differ look first whether
all of them still have what they compare.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.program import torch_hooks
from hpcdist.program.model_plan import IdentitySet
from hpcdist.program.tensors import in_memory_order, is_dense

#: Sums between two comparisons of the settings of optimizers, and of a slice of the parameters.
SUMS_PER_SETTINGS = 4
SUMS_PER_SLICE = 16
_MAX_SLICES = 64
_SLICE_BYTES = 64 << 10
_NUMBERS = (float, int, bool)


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter, in the order of its memory: from `low` to before `high` of parameter `number`."""

    number: int
    low: int
    high: int


def plan_slices(sizes: Sequence[int], itemsizes: Sequence[int]) -> list[list[Piece]]:
    """Return what each slice consists of, in turn: about as many bytes each.

    Args:
        sizes: elements of each parameter.
        itemsizes: bytes of an element of each.
    """
    n_bytes = sum(size * itemsize for size, itemsize in zip(sizes, itemsizes, strict=True))
    n_slices = min(_MAX_SLICES, -(-n_bytes // _SLICE_BYTES))
    slice_bytes = -(-n_bytes // max(n_slices, 1))
    slices: list[list[Piece]] = []
    free_bytes = 0
    for number, (size, itemsize) in enumerate(zip(sizes, itemsizes, strict=True)):
        low = 0
        while low < size:
            if free_bytes < itemsize:
                slices.append([])
                free_bytes = max(slice_bytes, itemsize)
            high = min(size, low + free_bytes // itemsize)
            slices[-1].append(Piece(number, low, high))
            free_bytes -= (high - low) * itemsize
            low = high
    return slices


class StateDigests:
    """Digests of what must be equal on all ranks.

    Attributes:
        n_changes: how often the first parameter was changed when the last step had ended; at the end of the program it
            tells whether somebody has loaded others since.
        is_reported: whether a difference was reported.
        n_compared: number of optimizers whose settings the last digest is of.
        last_digests: of settings, and of a slice of the parameters, as the last sum has carried them.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._parameters: list[Callable[[], nn.Parameter | None]] = []
        self._slices: list[list[Piece]] = []
        self._steppers: IdentitySet[Optimizer] = IdentitySet()
        self._pending: list[Tensor] = []
        self._last_number = -1
        self.last_digests = (0, 0)
        self._numbers: list[float] | None = None  # the settings that were digested last
        self._digest_of_numbers = 0
        self.n_changes = -1
        self.is_reported = False
        self.n_compared = 0

    def note_report(self) -> None:
        """Note that a difference was reported."""
        self.is_reported = True

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare these parameters, by name, from now on, and the settings of optimizers that step from now on."""
        self._names = [name for name, _ in parameters]
        self._parameters = [torch_hooks.weak_reference(parameter) for _, parameter in parameters]
        sizes = [parameter.numel() for _, parameter in parameters]
        self._slices = plan_slices(sizes, [parameter.element_size() for _, parameter in parameters])
        self._steppers = IdentitySet()
        self._pending = []
        self._last_number = -1
        self.last_digests = (0, 0)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are compared and still exist, by name."""
        pairs = [
            (name, reference())
            for name, reference in zip(self._names, self._parameters, strict=True)
        ]
        return [(name, parameter) for name, parameter in pairs if parameter is not None]

    @property
    def n_parameters(self) -> int:
        """Number of parameters that are compared, those that are gone included."""
        return len(self._parameters)

    def hold(self) -> list[nn.Parameter | None]:
        """Return all parameters, None for each that is gone. Those of the list do not go while ranks agree on them."""
        return [reference() for reference in self._parameters]

    def keep(self, parameters: Sequence[nn.Parameter | None], are_kept: Sequence[int]) -> None:
        """Go on with the parameters that all ranks still have.

        Args:
            parameters: what `hold` has returned.
            are_kept: 1 for each that is compared, on all ranks alike; 0 for the others, of which some rank has none.
        """
        retained_parameters: list[tuple[str, nn.Parameter]] = []
        for name, parameter, is_kept in zip(self._names, parameters, are_kept, strict=True):
            if is_kept and parameter is not None:
                retained_parameters.append((name, parameter))
        self.watch(retained_parameters)

    @property
    def n_steppers(self) -> int:
        """Number of optimizers that have made a step since the last comparison, and still exist."""
        return len(list(self._steppers))

    @property
    def n_sums_of_rotation(self) -> int:
        """Number of sums after which all parameters were compared."""
        return SUMS_PER_SLICE * len(self._slices)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has made a step."""
        self._steppers.add(optimizer)
        first = self._parameters[0]() if self._parameters else None
        self.n_changes = -1 if first is None else first._version

    @property
    def is_changed_since_step(self) -> bool:
        """Whether the first parameter was changed after the last step."""
        first = self._parameters[0]() if self._parameters else None
        return first is None or first._version != self.n_changes

    def digest_at(self, number: int) -> int:
        """Return the digest that a sum carries; 0 for one that compares nothing.

        Args:
            number: of the sum, the same on all ranks; of the same number, the digest is computed once.
        """
        if number % SUMS_PER_SETTINGS or not self._parameters:
            return 0
        if self._last_number != number:
            of_settings = self.digest_of_settings()
            self._steppers = IdentitySet()
            of_slice = 0
            if not number % SUMS_PER_SLICE and self._slices:
                of_slice = self._digest_of_slice(number // SUMS_PER_SLICE % len(self._slices))
            self.last_digests = (of_settings, of_slice)
            self._last_number = number
        of_settings, of_slice = self.last_digests
        return of_settings ^ of_slice

    def digest_of_settings(self) -> int:
        """Return a digest of the numbers among the settings of the optimizers that have made a step, of 63 bits."""
        numbers: list[float] = []
        optimizers = list(self._steppers)
        self.n_compared = len(optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # as floats, and none is -0.0: equal numbers have one digest
                numbers += [value + 0.0 for value in group.values() if type(value) in _NUMBERS]
        if numbers != self._numbers:
            self._numbers = numbers
            self._digest_of_numbers = xxhash.xxh3_64_intdigest(repr(numbers).encode()) >> 1
        return self._digest_of_numbers

    def _digest_of_slice(self, number: int) -> int:
        """Return a digest of a slice, of 63 bits; of what is on a device, that of the slice before.

        That one was computed many steps ago, so nobody waits for the device.
        """
        digest = xxhash.xxh3_64()
        sums = self._pending
        self._pending = self._add_slice(number, digest)
        for sum_of_bits in sums:
            digest.update(str(sum_of_bits.item()).encode())
        return digest.intdigest() >> 1

    def _add_slice(self, number: int, digest: Any) -> list[Tensor]:
        """Add the elements of a slice that are on the host to a digest; return sums of the bits of the others."""
        sums: list[Tensor] = []
        for piece in self._slices[number]:
            parameter = self._parameters[piece.number]()
            if parameter is None:
                continue
            values = _flat(parameter.detach())[piece.low : piece.high]
            if values.device.type == "cpu":
                digest.update(_array_of(values))
            elif values.is_cuda:  # what a lazy device would have to compute is left out
                sums.append(_sum_of_bits(values))
        return sums

    def digest_of_all(self) -> int:
        """Return a digest of all parameters, of 63 bits. Cost: they are read once."""
        digest = xxhash.xxh3_64()
        for number in range(len(self._slices)):
            for sum_of_bits in self._add_slice(number, digest):
                digest.update(str(sum_of_bits.item()).encode())
        return digest.intdigest() >> 1

    def describe(self, number: int) -> str:
        """Return what the sum of a number compares."""
        if number % SUMS_PER_SLICE or not self._slices:
            return "the settings of optimizers"
        pieces = self._slices[number // SUMS_PER_SLICE % len(self._slices)]
        names = [self._names[piece.number] for piece in (pieces[0], pieces[-1])]
        parameters = names[0] if len(pieces) == 1 else f"{names[0]!r} to {names[1]!r}"
        return f"the settings of optimizers, or the parameters {parameters}"


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, in the order of its memory where it fills that."""
    return in_memory_order(tensor) if is_dense(tensor) else tensor.reshape(-1)


def _array_of(values: Tensor) -> Any:
    return values.contiguous().view(torch.uint8).numpy()


def _sum_of_bits(values: Tensor) -> Tensor:
    """Return the sum of the bits of values, as whole numbers, on their device."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.int64)
    return values.contiguous().view(whole).sum(dtype=torch.int64)


def are_there(parameters: Sequence[nn.Parameter | None]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return 1 for each parameter that there is, and 0 for each None."""
    return np.array([parameter is not None for parameter in parameters], np.uint8)


def odd_ranks(digests: Sequence[int]) -> list[int]:
    """Return the ranks whose digest is not that of most; in a tie, that of the lowest rank counts."""
    common = Counter(digests).most_common(1)[0][0]
    return [rank for rank, digest in enumerate(digests) if digest != common]
