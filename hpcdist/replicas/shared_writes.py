"""Finds writes to objects that the replicas of a process share: parameters, and the settings of optimizers.

Code inside `run` is called once for each replica, so a write that no optimizer makes would be made several times.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import UsageError
from hpcdist.program import tensor_internals
from hpcdist.program.model_plan import IdentitySet
from hpcdist.program.settings import settings_of
from hpcdist.program.tensors import to_array

#: In the first runs all parameters are hashed at each turn; later one parameter in every 8th run, on all ranks alike.
_N_HASHED_RUNS = 3
_HASHED_RUN = 8
#: First bytes of a parameter that are hashed.
_HASHED_BYTES = 1 << 20

#: First and last bytes of every parameter that are looked at in every run.
_END_BYTES = 16
_GONE = -1


class _Marks(NamedTuple):
    """Marks of all parameters, which change when somebody writes to a parameter.

    Attributes:
        addresses: address of the memory of each parameter; `_GONE` for one that the garbage collector has taken.
        versions: number of changes of each parameter that torch has seen.
        digests: digests of the bytes of the parameters that are hashed, by the number of the parameter.
        ends: first and last bytes of each parameter; empty for one that is not in one piece on the host.
    """

    addresses: list[int]
    versions: list[int]
    digests: dict[int, int]
    ends: list[bytes]


class SharedWrites:
    """Compares parameters and settings at the beginning and the end of each replica's turn.

    An optimizer's step and a merge may write: a comparison ends before them, and begins anew after them. A single
    replica on this rank is compared too: a program must not depend on the number of ranks. Ranks that share one copy of
    the parameters compare it alike: between two steps no rank may write to it, and a step begins and ends on all ranks.

    A write that torch counts is found at once. A write past its counters, through `.data` or numpy, is found at once if
    it changes the first or last elements of a parameter, as scaling does. Any other write is found in the first runs,
    where all parameters are hashed, and later if it comes in a run that hashes the part it writes to.

    Args:
        optimizers: optimizers of the scope.

    Cost: in the first runs a hash of all parameters at each switch of replicas; later 0.4 microseconds for each
        parameter, and in every 8th run a hash of at most 1 MiB of one.
    """

    def __init__(self, optimizers: IdentitySet[Optimizer]) -> None:
        self._optimizers = optimizers
        self._names: list[str] = []
        self._references: list[Callable[[], nn.Parameter | None]] = []
        self._addresses: list[int] = []  # addresses of the memory that `_ends` are views of
        self._ends: list[_Bytes] = []
        self._n_runs = 0
        self._marks: _Marks | None = None  # None when it is no replica's turn
        self._settings: list[tuple[weakref.ref[Optimizer], list[dict[str, Any]]]] = []

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare these parameters from now on."""
        self._names = []
        self._references = []
        for name, parameter in parameters:
            self._names.append(name)
            self._references.append(tensor_internals.weak_reference(parameter))
        self._n_runs = 0
        if self._marks is not None:
            self.begin()

    def begin_run(self) -> None:
        """Count the run."""
        self._n_runs += 1

    def end_run(self) -> None:
        """Stop comparing, also when replicas were stopped in their turns."""
        self._marks = None

    def suspend(self, replica: int) -> None:
        """End a replica's turn; raise as `end`."""
        self.end()

    def resume(self, replica: int) -> None:
        """Begin a replica's turn."""
        self.begin()

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let the block write."""
        is_turn = self._marks is not None
        self.end()
        try:
            yield
        finally:
            if is_turn:
                self.begin()

    def begin(self) -> None:
        """Record parameters and settings when a replica's turn begins, or continues."""
        self._marks = self._read_marks()
        self._settings = [
            (weakref.ref(optimizer), settings_of(optimizer)) for optimizer in self._optimizers
        ]

    def end(self) -> None:
        """Compare parameters and settings with the recorded ones; do nothing when it is no replica's turn.

        Raises:
            UsageError: when the replica has written to them; on this rank, whose run it ends.
        """
        marks = self._marks
        self._marks = None
        if marks is None:
            return
        now = self._read_marks()
        if now != marks:
            self._require_equal(marks, now)
        for reference, groups in self._settings:
            optimizer = reference()
            if optimizer is None:
                continue
            for group, current in zip(groups, settings_of(optimizer), strict=False):
                changed = [key for key, value in group.items() if current.get(key) != value]
                if changed:
                    raise _refusal(
                        f"an optimizer's {changed[0]!r}, as a scheduler's step makes it,"
                    )

    def _require_equal(self, before: _Marks, now: _Marks) -> None:
        """Raise UsageError if a parameter was written to; one that the garbage collector has taken was not."""
        for number, name in enumerate(self._names):
            if now.addresses[number] == _GONE:
                continue
            is_counted = before.addresses[number] != now.addresses[number]
            is_counted = is_counted or before.versions[number] != now.versions[number]
            ends = slice(2 * number, 2 * number + 2)
            has_other_ends = before.ends[ends] != now.ends[ends]
            if (
                is_counted
                or has_other_ends
                or before.digests.get(number) != now.digests.get(number)
            ):
                raise _refusal(f"parameter {name!r}")

    def _read_marks(self) -> _Marks:
        """Return the marks of the parameters as they are now."""
        parameters = [reference() for reference in self._references]
        addresses: list[int] = []
        versions: list[int] = []
        for parameter in parameters:
            if parameter is None:
                addresses.append(_GONE)
                versions.append(0)
                continue
            addresses.append(parameter.data_ptr())
            versions.append(0 if parameter.is_inference() else parameter._version)
        if addresses != self._addresses:
            self._addresses = addresses
            self._ends = []
            for parameter in parameters:
                self._ends += _ends_of(parameter)
        digests: dict[int, int] = {}
        for number in self._hashed_now():
            parameter = parameters[number]
            if parameter is not None:
                digests[number] = _hash(parameter, None if self._is_early else _HASHED_BYTES)
        return _Marks(addresses, versions, digests, [end.raw for end in self._ends])

    @property
    def _is_early(self) -> bool:
        """Whether all parameters are hashed, as this is one of the first runs."""
        return self._n_runs <= _N_HASHED_RUNS

    def _hashed_now(self) -> Sequence[int]:
        """Return the numbers of the parameters that this run hashes."""
        n_parameters = len(self._names)
        if self._is_early:
            return range(n_parameters)
        if self._n_runs % _HASHED_RUN or not n_parameters:
            return ()
        return (self._n_runs // _HASHED_RUN % n_parameters,)


_Bytes = ctypes.Array[ctypes.c_char]
_NO_BYTES = ctypes.create_string_buffer(0)


def _ends_of(tensor: Tensor | None) -> tuple[_Bytes, _Bytes]:
    """Return views of the first and last bytes of a host tensor in one piece; empty views for any other tensor."""
    if (
        tensor is None
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or not tensor.data_ptr()
    ):
        return _NO_BYTES, _NO_BYTES
    n_bytes = min(_END_BYTES, tensor.nbytes)
    address = tensor.data_ptr()
    view = ctypes.c_char * n_bytes
    return view.from_address(address), view.from_address(address + tensor.nbytes - n_bytes)


def _hash(tensor: Tensor, max_bytes: int | None) -> int:
    """Return a digest of a tensor's first bytes; without a limit, of all its bytes."""
    flat = tensor.detach().reshape(-1)
    if max_bytes is not None:
        n_elements = max_bytes // max(1, flat.element_size())
        flat = flat[:n_elements]
    array, _ = to_array(flat)
    return xxhash.xxh3_64_intdigest(array.view("u1").data)


def _refusal(target: str) -> UsageError:
    """Return the error of a replica that has written to something that replicas share."""
    return UsageError(
        f"run: expected replicas to leave what they share to optimizers, got a write to {target} outside of an "
        f"optimizer's step; the function is called for each replica: write after run, or in "
        f"get_replica_context().merge_call(...)."
    )
