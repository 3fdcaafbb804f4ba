"""Finds ranks that drift apart: parameters and settings of optimizers that must be equal, and are not any more.

A digest of a small part of the state travels with the sum of gradients, where each rank adds the digest and its square:
the two sums fit together if all ranks have the same digest. The part depends only on the number of the sum, so nobody
waits, and nothing is agreed on. Every 4th sum compares settings, every 16th a slice of the parameters; after at most 64
slices all parameters were compared.

Objects that a program has dropped may live on, on some ranks only, as garbage collectors run at different times. So
only optimizers that have made a step since the last comparison are compared. Ranks that differ look first whether the
compared objects still exist on every rank.
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

from hpcdist.program import tensor_internals
from hpcdist.program.model_plan import IdentitySet, NamedParameter
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


def plan_slices(
    sizes: Sequence[int],
    itemsizes: Sequence[int],
) -> list[list[Piece]]:
    """Return the pieces of each slice, in turn. Slices have about the same number of bytes.

    Args:
        sizes: elements of each parameter.
        itemsizes: bytes of an element of each parameter.
    """
    parameters = list(zip(sizes, itemsizes, strict=True))
    n_bytes = sum(size * itemsize for size, itemsize in parameters)
    n_small_slices = -(-n_bytes // _SLICE_BYTES)
    n_slices = min(_MAX_SLICES, n_small_slices)
    slice_bytes = -(-n_bytes // max(n_slices, 1))
    slices: list[list[Piece]] = []
    free_bytes = 0
    for number, (size, itemsize) in enumerate(parameters):
        low = 0
        while low < size:
            if free_bytes < itemsize:
                slices.append([])
                free_bytes = max(slice_bytes, itemsize)
            n_fitting = free_bytes // itemsize
            high = min(size, low + n_fitting)
            slices[-1].append(Piece(number, low, high))
            free_bytes -= (high - low) * itemsize
            low = high
    return slices


class StateDigests:
    """Digests of the state that must be equal on all ranks.

    Attributes:
        n_changes: number of changes of the first parameter until the end of the last step. At the end of the program it
            shows whether other parameters were loaded since.
        is_reported: whether a difference was reported.
        n_compared: number of optimizers whose settings are in the last digest.
        last_digests: digests of settings and of a slice of the parameters, as the last sum has carried them.
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

    def watch(self, parameters: Sequence[NamedParameter]) -> None:
        """Compare these parameters, by name, from now on, and the settings of optimizers that step from now on."""
        self._names = []
        self._parameters = []
        sizes: list[int] = []
        itemsizes: list[int] = []
        for name, parameter in parameters:
            self._names.append(name)
            self._parameters.append(tensor_internals.weak_reference(parameter))
            sizes.append(parameter.numel())
            itemsizes.append(parameter.element_size())
        self._slices = plan_slices(sizes, itemsizes)
        self._steppers = IdentitySet()
        self._pending = []
        self._last_number = -1
        self.last_digests = (0, 0)

    def parameters(self) -> list[NamedParameter]:
        """Return the parameters that are compared and still exist, by name."""
        existing_parameters: list[NamedParameter] = []
        for name, reference in zip(self._names, self._parameters, strict=True):
            parameter = reference()
            if parameter is not None:
                existing_parameters.append((name, parameter))
        return existing_parameters

    @property
    def n_parameters(self) -> int:
        """Number of parameters that are compared, including parameters that are gone."""
        return len(self._parameters)

    def hold(self) -> list[nn.Parameter | None]:
        """Return all parameters, None for each that is gone. The list keeps them alive while ranks agree on them."""
        return [reference() for reference in self._parameters]

    def keep(
        self,
        parameters: Sequence[nn.Parameter | None],
        are_kept: Sequence[int],
    ) -> None:
        """Compare only the parameters that all ranks still have.

        Args:
            parameters: list that `hold` has returned.
            are_kept: flags of the parameters, equal on all ranks: 1 for each parameter to compare, 0 for each that some
                rank does not have any more.
        """
        retained_parameters: list[NamedParameter] = []
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
        first_parameter = self._parameters[0]() if self._parameters else None
        self.n_changes = -1
        if first_parameter is not None:
            self.n_changes = first_parameter._version

    @property
    def is_changed_since_step(self) -> bool:
        """Whether the first parameter was changed after the last step."""
        first_parameter = self._parameters[0]() if self._parameters else None
        if first_parameter is None:
            return True
        return first_parameter._version != self.n_changes

    def digest_at(self, number: int) -> int:
        """Return the digest that a sum carries; 0 for a sum that compares nothing.

        Args:
            number: number of the sum, the same on all ranks. The digest for a number is computed once.
        """
        if number % SUMS_PER_SETTINGS or not self._parameters:
            return 0
        if self._last_number != number:
            settings_digest = self.digest_of_settings()
            self._steppers = IdentitySet()
            slice_digest = 0
            if not number % SUMS_PER_SLICE and self._slices:
                slice_number = number // SUMS_PER_SLICE % len(self._slices)
                slice_digest = self._digest_of_slice(slice_number)
            self.last_digests = (settings_digest, slice_digest)
            self._last_number = number
        settings_digest, slice_digest = self.last_digests
        return settings_digest ^ slice_digest

    def digest_of_settings(self) -> int:
        """Return a digest of the numbers among the settings of the optimizers that have made a step, of 63 bits."""
        numbers: list[float] = []
        optimizers = list(self._steppers)
        self.n_compared = len(optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for value in group.values():
                    if type(value) in _NUMBERS:
                        # as floats, and none is -0.0: equal numbers have one digest
                        numbers.append(value + 0.0)
        if numbers != self._numbers:
            self._numbers = numbers
            text = repr(numbers).encode()
            self._digest_of_numbers = xxhash.xxh3_64_intdigest(text) >> 1
        return self._digest_of_numbers

    def _digest_of_slice(self, number: int) -> int:
        """Return a digest of a slice, of 63 bits.

        Of elements on a device it has the sums of the slice before, which were computed many steps ago. So nobody waits
        for the device.
        """
        digest = xxhash.xxh3_64()
        pending_sums = self._pending
        self._pending = self._add_slice(number, digest)
        _add_sums(digest, pending_sums)
        return digest.intdigest() >> 1

    def _add_slice(self, number: int, digest: Any) -> list[Tensor]:
        """Add the elements of a slice that are on the host to a digest; return sums of the bits of GPU elements."""
        sums: list[Tensor] = []
        for piece in self._slices[number]:
            parameter = self._parameters[piece.number]()
            if parameter is None:
                continue
            flat = _flat(parameter.detach())
            values = flat[piece.low : piece.high]
            if values.device.type == "cpu":
                digest.update(_array_of(values))
            elif values.is_cuda:  # parameters that a lazy device would have to compute are left out
                sums.append(_sum_of_bits(values))
        return sums

    def digest_of_all(self) -> int:
        """Return a digest of all parameters, of 63 bits. Cost: they are read once."""
        digest = xxhash.xxh3_64()
        for number in range(len(self._slices)):
            sums = self._add_slice(number, digest)
            _add_sums(digest, sums)
        return digest.intdigest() >> 1

    def describe(self, number: int) -> str:
        """Return a text that names what the sum of a number compares."""
        if number % SUMS_PER_SLICE or not self._slices:
            return "the settings of optimizers"
        slice_number = number // SUMS_PER_SLICE % len(self._slices)
        pieces = self._slices[slice_number]
        parameters = self._names[pieces[0].number]
        if len(pieces) > 1:
            last_parameter = self._names[pieces[-1].number]
            parameters = f"{parameters!r} to {last_parameter!r}"
        return f"the settings of optimizers, or the parameters {parameters}"


def _add_sums(digest: Any, sums: Sequence[Tensor]) -> None:
    """Add sums of bits, as decimal numbers, to a digest. Waits for the devices of the sums."""
    for sum_of_bits in sums:
        decimal = str(sum_of_bits.item())
        digest.update(decimal.encode())


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, in the order of its memory if they fill one block."""
    if is_dense(tensor):
        return in_memory_order(tensor)
    return tensor.reshape(-1)


def _array_of(values: Tensor) -> Any:
    """Return the bytes of values on the host."""
    return values.contiguous().view(torch.uint8).numpy()


def _sum_of_bits(values: Tensor) -> Tensor:
    """Return the sum of the bits of values, as whole numbers, on their device."""
    integer_dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    integer_dtype = integer_dtypes.get(values.element_size(), torch.int64)
    return values.contiguous().view(integer_dtype).sum(dtype=torch.int64)


def are_there(parameters: Sequence[nn.Parameter | None]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return 1 for each parameter that exists, and 0 for each None."""
    flags = [parameter is not None for parameter in parameters]
    return np.array(flags, np.uint8)


def odd_ranks(digests: Sequence[int]) -> list[int]:
    """Return the ranks whose digest is not the most frequent one; in a tie the digest of the lowest rank counts."""
    [(common_digest, _)] = Counter(digests).most_common(1)
    return [rank for rank, digest in enumerate(digests) if digest != common_digest]
