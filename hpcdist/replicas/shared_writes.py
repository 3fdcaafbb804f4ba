"""Finds writes to what the replicas of a process share: parameters, and the settings of optimizers.

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
from hpcdist.program import torch_hooks
from hpcdist.program.model_plan import IdentitySet
from hpcdist.program.settings import settings_of
from hpcdist.program.tensors import to_array

#: In the first runs all parameters are hashed at each turn; later one of them in every 8th run, on all ranks alike.
_N_HASHED_RUNS = 3
_HASHED_RUN = 8
#: First bytes of a parameter that are hashed.
_HASHED_BYTES = 1 << 20

#: First and last bytes of every parameter that are looked at in every run.
_END_BYTES = 16
_GONE = -1


class _Marks(NamedTuple):
    """What changes when somebody writes to a parameter.

    Attributes:
        addresses: of the memory of each parameter; `_GONE` for one that the garbage collector has taken.
        versions: how often torch has seen each one change.
        digests: of the bytes of those that are hashed, by their number.
        ends: first and last bytes of each; nothing of one that is not in one piece on the host.
    """

    addresses: list[int]
    versions: list[int]
    digests: dict[int, int]
    ends: list[bytes]


class SharedWrites:
    """Compares parameters and settings at the beginning and the end of each replica's turn.

    An optimizer's step and a merge may write: the look at the turn ends before them, and begins anew after them. With
    one replica on this rank it looks too: a program must not depend on how many ranks there are. Ranks that share one
    copy look at it alike: between two steps no rank may write to it, and a step begins and ends on all of them.

    A write that torch counts is found at once. One past its counters, through `.data` or numpy, is found at once if it
    changes the first or last elements of a parameter, as scaling does; another one in the first runs, where all is
    hashed, and later if it comes in a run that hashes the part it writes to.

    Args:
        optimizers: those of the scope.

    Cost: in the first runs a hash of all parameters at each switch of replicas; later 0.4 microseconds for each
        parameter, and in every 8th run a hash of at most 1 MiB of one.
    """

    def __init__(self, optimizers: IdentitySet[Optimizer]) -> None:
        self._optimizers = optimizers
        self._names: list[str] = []
        self._references: list[Callable[[], nn.Parameter | None]] = []
        self._addresses: list[int] = []  # of which `_ends` are views
        self._ends: list[_Bytes] = []
        self._n_runs = 0
        self._marks: _Marks | None = None  # None: nobody's turn
        self._settings: list[tuple[weakref.ref[Optimizer], list[dict[str, Any]]]] = []

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Look at these from now on."""
        self._names = []
        self._references = []
        for name, parameter in parameters:
            self._names.append(name)
            self._references.append(torch_hooks.weak_reference(parameter))
        self._n_runs = 0
        if self._marks is not None:
            self.begin()

    def begin_run(self) -> None:
        """Count the run."""
        self._n_runs += 1

    def end_run(self) -> None:
        """Stop looking, also when replicas were stopped in their turns."""
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
        """Look at what there is when a replica's turn begins, or goes on."""
        self._marks = self._read_marks()
        self._settings = [
            (weakref.ref(optimizer), settings_of(optimizer)) for optimizer in self._optimizers
        ]

    def end(self) -> None:
        """Compare what there is with what there was; in nobody's turn, do nothing.

        Raises:
            UsageError: when the replica has written; on this rank, whose run it ends.
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
        """Return what the parameters are like now."""
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
    """Return views of the first and last bytes of a host tensor in one piece; of another one, of no bytes."""
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
    """Return a digest of a tensor's first bytes; None: of all."""
    flat = tensor.detach().reshape(-1)
    count = None if max_bytes is None else max_bytes // max(1, flat.element_size())
    return xxhash.xxh3_64_intdigest(to_array(flat[:count])[0].view("u1").data)


def _refusal(target: str) -> UsageError:
    return UsageError(
        f"run: expected replicas to leave what they share to optimizers, got a write to {target} outside of an "
        f"optimizer's step; the function is called for each replica: write after run, or in "
        f"get_replica_context().merge_call(...)."
    )
