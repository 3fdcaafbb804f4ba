"""Finds writes to what the replicas of a process share: parameters, and the settings of optimizers.

Code inside `run` is called once for each replica, so a write that no optimizer makes would be made several times.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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

_Mark = tuple[int, int, int, bytes]  # address, version counter, digest, first and last bytes


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

    Cost: in the first runs a hash of all parameters at each switch of replicas; later two microseconds for each
        parameter, and in every 8th run a hash of at most 1 MiB of one.
    """

    def __init__(self, optimizers: IdentitySet[Optimizer]) -> None:
        self._optimizers = optimizers
        self._parameters: list[tuple[str, Callable[[], nn.Parameter | None]]] = []
        self._n_runs = 0
        self._marks: list[_Mark | None] | None = None  # None: nobody's turn
        self._settings: list[tuple[weakref.ref[Optimizer], list[dict[str, Any]]]] = []

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Look at these from now on."""
        self._parameters = [(name, torch_hooks.weak_reference(parameter)) for name, parameter in parameters]
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
        self._settings = [(weakref.ref(optimizer), settings_of(optimizer)) for optimizer in self._optimizers]

    def end(self) -> None:
        """Compare what there is with what there was; in nobody's turn, do nothing.

        Raises:
            UsageError: when the replica has written; on this rank, whose run it ends.
        """
        marks, self._marks = self._marks, None
        if marks is None:
            return
        for (name, _), before, now in zip(self._parameters, marks, self._read_marks(), strict=True):
            if now is not None and before != now:
                raise _refusal(f"parameter {name!r}")
        for reference, groups in self._settings:
            optimizer = reference()
            if optimizer is None:
                continue
            for group, found in zip(groups, settings_of(optimizer), strict=False):
                changed = [key for key, value in group.items() if found.get(key) != value]
                if changed:
                    raise _refusal(f"an optimizer's {changed[0]!r}, as a scheduler's step makes it,")

    def _read_marks(self) -> list[_Mark | None]:
        """Return a mark of each parameter; None: the garbage collector has taken it, at a time of its own."""
        is_early, (number, rest) = self._n_runs <= _N_HASHED_RUNS, divmod(self._n_runs, _HASHED_RUN)
        hashed = -1 if rest or not self._parameters else number % len(self._parameters)
        marks: list[_Mark | None] = []
        for index, (_, reference) in enumerate(self._parameters):
            parameter = reference()
            if parameter is None:
                marks.append(None)
                continue
            version = 0 if parameter.is_inference() else parameter._version
            digest = 0
            if is_early or index == hashed:
                digest = _hash(parameter, None if is_early else _HASHED_BYTES)
            marks.append((parameter.data_ptr(), version, digest, _ends_of(parameter)))
        return marks


def _ends_of(tensor: Tensor) -> bytes:
    """Return the first and last bytes of a host tensor in one piece; of another one, nothing."""
    nbytes = tensor.nbytes
    if not nbytes or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return b""
    n, address = min(_END_BYTES, nbytes), tensor.data_ptr()
    return ctypes.string_at(address, n) + ctypes.string_at(address + nbytes - n, n)


def _hash(tensor: Tensor, max_bytes: int | None) -> int:
    """Return a digest of a tensor's first bytes; None: of all."""
    flat = tensor.detach().reshape(-1)
    count = None if max_bytes is None else max_bytes // max(1, flat.element_size())
    return xxhash.xxh3_64_intdigest(to_array(flat[:count])[0].view("u1").data)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"run: expected replicas to leave what they share to optimizers, got a write to {what} outside of an "
        f"optimizer's step; the function is called for each replica: write after run, or in "
        f"get_replica_context().merge_call(...)."
    )
