"""The interface of a process group's ranks: they move bytes and reduce, by MPI or, under torchrun, by shared memory."""

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from hpcdist.collectives.ops import Op
from hpcdist.errors import CollectiveError
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.waiting import late, wait_until

Array = npt.NDArray[Any]
#: In place of a sender: messages are received from any rank.
ANY_RANK = -1


class Ranks(abc.ABC):
    """The ranks of one process group.

    All methods but `send`, `recv` and `start` block; all but `send` and `recv` are collective. Arrays are flat,
    contiguous and on the host; arrays that move are bytes.

    Attributes:
        rank: rank of this process, in the group's order.
        size: number of ranks.
        timeout_s: longest time for one call.
        largest_tag: largest tag of a message.
    """

    rank: int
    size: int
    timeout_s: float
    largest_tag: int

    @abc.abstractmethod
    def recorded(self, name: str, buffer: Any) -> AbstractContextManager[Any]:
        """Record the collective of a block, for reports.

        Args:
            name: name of the call.
            buffer: buffer that has the same size on every rank; None where sizes may differ.

        Raises:
            DesyncError: for a fault that the library finds in the block; on this rank.
        """

    @abc.abstractmethod
    def have_same(self, number: int) -> bool:
        """Return whether all ranks gave the same number, of at most 63 bits; the same answer on all."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when all ranks are here."""

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Replace a contiguous tensor by its reduction: the same bits on all ranks."""

    def start(self, call: Callable[["Ranks"], None]) -> Handle | None:
        """Start to make a call on these ranks, in a thread, in the order of all calls that are started.

        Collective over these ranks.

        Returns:
            A handle; None where a thread would gain nothing, as inside a host: nothing is called then.
        """
        return None

    @abc.abstractmethod
    def reduce_scatter(
        self,
        contribution: Array,
        counts: Sequence[int],
        op: Op,
    ) -> Array:
        """Return this rank's part of the reduction; `counts` are the elements of each rank's part."""

    @abc.abstractmethod
    def broadcast(self, data: Array, root: int) -> None:
        """Replace bytes by root's."""

    @abc.abstractmethod
    def all_gather(
        self,
        local_bytes: Array,
        counts: Sequence[int],
        joined: Array,
    ) -> None:
        """Put the bytes of all ranks into `joined`; `counts` are the bytes of each."""

    @abc.abstractmethod
    def gather(
        self,
        local_bytes: Array,
        counts: Sequence[int],
        joined: Array,
        root: int,
    ) -> None:
        """Put the bytes of all ranks into root's `joined`; `counts` are read on root only."""

    @abc.abstractmethod
    def scatter(
        self,
        joined: Array,
        counts: Sequence[int],
        local_part: Array,
        root: int,
    ) -> None:
        """Put this rank's part of root's `joined` into `local_part`; `counts` are read on root only."""

    @abc.abstractmethod
    def all_to_all(
        self,
        sent: Array,
        sent_counts: Sequence[int],
        received: Array,
        counts: Sequence[int],
    ) -> None:
        """Send bytes to each rank, and put the bytes that each rank sends here into `received`."""

    @abc.abstractmethod
    def send(self, data: Array, rank: int, tag: int, title: str) -> "Message":
        """Start to send bytes, which nobody changes later. `title` names it in errors."""

    @abc.abstractmethod
    def recv(self, tensor: Tensor, rank: int, tag: int, title: str) -> "Message":
        """Start to receive a tensor from a rank, or from ANY_RANK."""

    @abc.abstractmethod
    def free(self) -> None:
        """Free the memory and communicators that the ranks share, once all messages of this rank are received."""


class Message(Work):
    """A message in flight.

    Args:
        title: name of the message in errors.
        rank: name of this rank in errors.
        data: bytes that are sent, or memory for bytes that are received.
        tensor: tensor that receives the bytes. None if they are sent.
        timeout_s: longest wait.
    """

    def __init__(
        self,
        title: str,
        rank: object,
        data: Array,
        tensor: Tensor | None,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._title = title
        self._rank = rank
        self._data = data
        self._tensor = tensor
        self._timeout_s = timeout_s
        self._error: CollectiveError | None = None
        self._source = ANY_RANK
        self._is_done = False

    @abc.abstractmethod
    def _look(self) -> None:
        """Call `_arrive` or `_fail` if the message has arrived."""

    @abc.abstractmethod
    def _give_up(self) -> bool:
        """Leave the next message to the next receiver; return False if a message has arrived meanwhile."""

    def _arrive(self, n_bytes: int, source: int) -> None:
        """Note that a number of bytes are in `data`, or have been sent."""
        self._is_done = True
        self._source = source
        if self._tensor is None:
            return
        if n_bytes == self._data.size:
            deal(self._data, [self._tensor])
        else:
            self._fail(f"one of {n_bytes}")

    def _fail(self, actual: str) -> None:
        """Note that no message of the expected size has come."""
        self._is_done = True
        self._error = mismatch("recv", f"a message of {self._data.size} bytes", actual)

    def is_completed(self) -> bool:
        """Return whether `wait` returns at once."""
        if not self._is_done:
            self._look()
        return self._is_done

    def is_success(self) -> bool:
        """Return whether it has arrived."""
        return self.is_completed() and self._error is None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when it has arrived.

        Args:
            timeout: longest wait; 0: the longest wait of the group.

        Raises:
            CollectiveTimeoutError: when no rank sends, or receives, the message in time. A message that no rank sends
                in time is given up.
            CollectiveError: when a message of another size has come.
        """
        limit_s = min(timeout.total_seconds() or self._timeout_s, self._timeout_s)
        has_ended = wait_until(self.is_completed, limit_s, yields=0)
        if not has_ended and (self._tensor is None or self._give_up()):
            raise late(self._title, limit_s, "the other rank", self._rank)
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Wait for a message that this rank sends; give up a receive that nobody answers. The memory is free then."""
        if self._tensor is not None:
            self._give_up()
        elif not wait_until(self.is_completed, self._timeout_s, yields=0):
            raise late(self._title, self._timeout_s, "the other rank", self._rank)

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[None]:
        """Return a future that is done: it waits first."""
        self.wait()
        future: Future[None] = Future()
        future.set_result(None)
        return future


class Pending(Work):
    """A call that a thread makes.

    Args:
        handle: handle of the call.
        future: future of torch, which the call completes.
    """

    def __init__(self, handle: Handle, future: Future[Any]) -> None:
        super().__init__()
        self._handle = handle
        self._future = future

    def is_completed(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._handle.is_done

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self._handle.is_done and self._handle.error is None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when it has ended.

        Args:
            timeout: longest wait; 0: the longest wait of the group.

        Raises:
            CollectiveTimeoutError: when it takes longer.
            What the call raised.
        """
        self._handle.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> Future[Any]:
        """Return the future that the call completes."""
        return self._future


def mismatch(call: str, expected: str, *actual: Any) -> CollectiveError:
    """Return the error of a call with wrong arguments."""
    actual_text = ", ".join(map(str, actual))
    return CollectiveError(f"{call}: expected {expected}, got {actual_text}; correct the call.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its class where it has none."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def deal(joined: Array, tensors: Sequence[Tensor]) -> None:
    """Copy bytes into tensors, one after the other."""
    start = 0
    for tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if n_bytes:
            part = torch.from_numpy(joined[start : start + n_bytes]).view(tensor.dtype)
            tensor.detach().copy_(part.reshape(tensor.shape))
        start += n_bytes


def no_bytes(n_bytes: int = 0) -> Array:
    """Return memory for a number of bytes; by default for none."""
    return np.empty(n_bytes, np.uint8)
