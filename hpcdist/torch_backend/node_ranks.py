"""The ranks of a process group that torchrun started on one host: shared memory, and no MPI."""

import atexit
import contextlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from torch import Tensor
from torch._C._distributed_c10d import Store

from hpcdist.collectives.buffers import host_array, shared_array
from hpcdist.collectives.node_sums import NodeSums, stage_bytes
from hpcdist.collectives.ops import MEAN, Op
from hpcdist.collectives.staging import add_rows
from hpcdist.errors import CollectiveError, CollectiveFailed, CollectiveTimeoutError, agreed
from hpcdist.plan.replicas import plan_row_additions
from hpcdist.runtime.node_memory import (
    CELLS,
    NodeBarrier,
    OwnMemory,
    create_memory,
    map_memory,
    map_pieces,
    open_memory,
    path_of,
    whole_pages,
)
from hpcdist.runtime.waiting import late, wait_until
from hpcdist.torch_backend.ranks import ANY_RANK, Array, Message, Ranks, no_bytes

#: Bytes of a slot, of which each rank has two.
SLOT_BYTES = 512 << 10
#: Messages of up to this size travel in torch's store; larger messages in separate memory, which the store names.
INLINE_BYTES = 16 << 10
#: Bytes to read of another rank: the rank, the first of its bytes, and the memory for them.
_Read = tuple[int, int, Array]


class NodeRanks(Ranks):
    """The ranks of a process group on one host, in shared memory; see `Ranks`. Collective over these ranks.

    Memory per rank: the memory for sums (`stage_bytes`) and 1 MiB for everything else.

    Args:
        store: torch's store, for this group alone. Messages are announced in it.
        rank: rank of this process in the group.
        names: names of the ranks in error messages.
        timeout_s: longest time for one call.
        is_crowded: whether the host has more ranks than cores.

    Attributes:
        store: the argument `store`.
        name: name of this rank.

    Raises:
        CollectiveFailed: when memory cannot be shared; on every rank.
    """

    largest_tag = 2**31 - 1

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
        is_crowded: bool,
    ) -> None:
        self.store = store
        self.rank = rank
        self.size = len(names)
        self.timeout_s = timeout_s
        self.name = names[rank]
        n_cells = self.size * CELLS
        sums_start = whole_pages(n_cells * 8)
        slots_start = sums_start + whole_pages(stage_bytes(self.size))
        pieces = _share(store, rank, self.size, slots_start + 2 * SLOT_BYTES, timeout_s)
        board = pieces[0].cast("q")[:n_cells]
        self._barrier = NodeBarrier(board, rank, names, timeout_s, is_busy_waiting=not is_crowded)
        self._slots = [
            np.frombuffer(piece[slots_start:], np.uint8).reshape(2, SLOT_BYTES) for piece in pieces
        ]
        self._turn = 0
        if self.size > 1:
            stages = [piece[sums_start:slots_start] for piece in pieces]
            self._sums = NodeSums(self._barrier, stages, rank, names)
        self._additions = plan_row_additions(self.size)
        self._sent: list[_SentMessage] = []  # kept until they are received
        self._receivers: list[_Receiver] = []
        self._n_sent: Counter[tuple[int, int]] = Counter()
        self._n_received: Counter[tuple[int, int]] = Counter()
        self._is_free = False
        atexit.register(_send_all_at_exit, weakref.ref(self))

    def recorded(self, name: str, buffer: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def have_same(self, number: int) -> bool:
        return self._barrier.wait(number) is None

    def barrier(self) -> None:
        self._barrier.wait()

    # -- moves --------------------------------------------------------------------------------------------------------

    def _exchange(self, sent: Array, reads: Sequence[_Read]) -> None:
        """Publish bytes, and read some of the bytes that other ranks publish, slot by slot.

        A slot is written again two rounds later: between lies a barrier, which no rank enters before it has read it.

        Args:
            sent: bytes that this rank publishes.
            reads: bytes to read, in any order.

        Cost: a barrier for each 512 KiB of the rank that publishes most, and one before.
        """
        lengths = self._barrier.wait(sent.size) or [sent.size]
        for start in range(0, max(lengths), SLOT_BYTES):
            stop = start + SLOT_BYTES
            self._turn = 1 - self._turn
            part = sent[start:stop]
            self._slots[self.rank][self._turn, : part.size] = part
            self._barrier.wait()
            for rank, first, target in reads:
                low = max(first, start)
                high = min(first + target.size, stop)
                if low < high:
                    target[low - first : high - first] = self._slots[rank][
                        self._turn, low - start : high - start
                    ]

    def broadcast(self, data: Array, root: int) -> None:
        if self.rank == root:
            self._exchange(data, [])
        else:
            self._exchange(no_bytes(), [(root, 0, data)])

    def all_gather(
        self,
        local_bytes: Array,
        counts: Sequence[int],
        joined: Array,
    ) -> None:
        parts = np.split(joined, np.cumsum(counts)[:-1])
        self._exchange(local_bytes, [(rank, 0, part) for rank, part in enumerate(parts)])

    def gather(
        self,
        local_bytes: Array,
        counts: Sequence[int],
        joined: Array,
        root: int,
    ) -> None:
        reads: list[_Read] = []
        if self.rank == root:
            for rank, part in enumerate(np.split(joined, np.cumsum(counts)[:-1])):
                reads.append((rank, 0, part))
        self._exchange(local_bytes, reads)

    def scatter(
        self,
        joined: Array,
        counts: Sequence[int],
        local_part: Array,
        root: int,
    ) -> None:
        starts = np.zeros(self.size, np.int64)
        if self.rank == root:
            starts[1:] = np.cumsum(counts)[:-1]
        self.broadcast(starts.view(np.uint8), root)
        sent = joined if self.rank == root else no_bytes()
        first = int(starts[self.rank])
        self._exchange(sent, [(root, first, local_part)])

    def all_to_all(
        self,
        sent: Array,
        sent_counts: Sequence[int],
        received: Array,
        counts: Sequence[int],
    ) -> None:
        # starts[sender, receiver]: the first of the sender's bytes that are for the receiver
        starts = np.empty((self.size, self.size), np.int64)
        local_starts = np.concatenate([[0], np.cumsum(sent_counts)[:-1]]).astype(np.int64)
        self.all_gather(
            local_starts.view(np.uint8),
            [local_starts.nbytes] * self.size,
            starts.reshape(-1).view(np.uint8),
        )
        reads: list[_Read] = []
        for rank, part in enumerate(np.split(received, np.cumsum(counts)[:-1])):
            first = int(starts[rank, self.rank])
            reads.append((rank, first, part))
        self._exchange(sent, reads)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        if self.size == 1:
            return
        divisor = self.size if op is MEAN else None
        if (shared := shared_array(tensor)) is not None:
            self._sums.all_reduce(shared, op, divisor)
            return
        with host_array(tensor) as array:
            self._sums.all_reduce(array, op, divisor)

    def reduce_scatter(
        self,
        contribution: Array,
        counts: Sequence[int],
        op: Op,
    ) -> Array:
        first = sum(counts[: self.rank]) * contribution.itemsize
        n_own = counts[self.rank]
        rows = np.empty((self.size, n_own), contribution.dtype)
        reads = [(rank, first, row.view(np.uint8)) for rank, row in enumerate(rows)]
        self._exchange(contribution.view(np.uint8), reads)
        add_rows(list(rows), self._additions, op.ufunc)
        return rows[0]

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, data: Array, rank: int, tag: int, title: str) -> Message:
        """See `Ranks`. The bytes are put into shared memory, or the store, at once. The store takes 0.1 ms and more."""
        while self._sent and self._sent[0].is_received():
            self._sent.pop(0)
        number = self._n_sent[rank, tag]
        self._n_sent[rank, tag] += 1
        message = _SentMessage(title, self, data, _key(self.rank, rank, tag, number))
        self._sent.append(message)
        return message

    def recv(self, tensor: Tensor, rank: int, tag: int, title: str) -> Message:
        """See `Ranks`. Receivers of one tag get messages of a rank in the order in which they were made."""
        receiver = _Receiver(title, self, tensor, rank, tag)
        self._receivers.append(receiver)
        return receiver

    def deliver(self) -> None:
        """Give the receivers the messages that have come for them."""
        waiting: list[_Receiver] = []
        for receiver in self._receivers.copy():
            awaited_sources = {
                earlier_receiver.source
                for earlier_receiver in waiting
                if earlier_receiver.tag == receiver.tag
            }
            ranks = range(self.size) if receiver.source == ANY_RANK else [receiver.source]
            has_taken = False
            for rank in ranks:
                is_for_earlier = rank in awaited_sources or ANY_RANK in awaited_sources
                if not is_for_earlier and self._has_taken(receiver, rank):
                    has_taken = True
                    break
            if has_taken:
                self._receivers.remove(receiver)
            else:
                waiting.append(receiver)

    def _has_taken(self, receiver: "_Receiver", rank: int) -> bool:
        """Let a receiver copy the next message of a rank, if it has come; the sender may free its memory then."""
        number = self._n_received[rank, receiver.tag]
        key = _key(rank, self.rank, receiver.tag, number)
        if not self.store.check([key]):
            return False
        where, _, content = self.store.get(key).partition(b" ")
        if where == b"here":
            message = memoryview(content)
        else:
            n_bytes = int(content)
            message = map_memory(where.decode())[:n_bytes]
        receiver.copy(message, rank)
        self._n_received[rank, receiver.tag] += 1
        self.store.delete_key(key)
        return True

    def give_up(self, receiver: "_Receiver") -> None:
        """Leave messages to the other receivers."""
        self._receivers.remove(receiver)

    def free(self) -> None:
        """See `Ranks`. Receives what other ranks send meanwhile, as they may wait here for their messages, too.

        Raises:
            CollectiveTimeoutError: when nobody receives a message; on the rank that has sent it.
        """
        self._is_free = True
        if not wait_until(self._has_sent_all, self.timeout_s, yields=0):
            raise self._sent[0].not_received()
        self.store.add("ended", 1)
        wait_until(self._have_all_ended, self.timeout_s, yields=0)

    def _has_sent_all(self) -> bool:
        """Return whether all messages of this rank are received; receive the messages that have come."""
        self.deliver()
        self._sent = [message for message in self._sent if not message.is_received()]
        return not self._sent

    def _have_all_ended(self) -> bool:
        self.deliver()
        return bool(self.store.add("ended", 0) >= self.size)

    def send_all(self) -> None:
        """Wait until all messages are received, at the end of a program that has not shut the group down."""
        if not self._is_free:
            wait_until(self._has_sent_all, self.timeout_s, yields=0)


def _send_all_at_exit(ranks_reference: "weakref.ref[NodeRanks]") -> None:
    ranks = ranks_reference()
    # when an error ends the program, nobody must wait for its messages
    if ranks is not None and not hasattr(sys, "last_type"):
        ranks.send_all()


class _SentMessage(Message):
    """A message whose bytes wait in shared memory. It counts as sent at once, as its buffer is free again.

    Args:
        title: name of the message in errors.
        ranks: ranks of the group.
        data: bytes of the message.
        key: key in the store under which it is announced until it is received.
    """

    def __init__(self, title: str, ranks: NodeRanks, data: Array, key: str) -> None:
        super().__init__(title, ranks.name, data, None, ranks.timeout_s)
        self._store = ranks.store
        self._key = key
        if data.size <= INLINE_BYTES:  # a file descriptor for each would run out
            self._store.set(key, b"here " + data.tobytes())
        else:
            self._memory = OwnMemory(data.size)
            self._memory.memory[: data.size] = data.data
            self._store.set(key, f"{self._memory.path} {data.size}")
        self._is_done = True

    def _look(self) -> None:
        raise AssertionError("it is done when it is made")

    def _give_up(self) -> bool:
        return False

    def is_received(self) -> bool:
        """Return whether its memory may be freed."""
        return not self._store.check([self._key])

    def not_received(self) -> CollectiveTimeoutError:
        """Return the error of a message that nobody has received in time."""
        return late(self._title, self._timeout_s, "it", self._rank)


class _Receiver(Message):
    """A receiver that waits for a message; see `Message`.

    Attributes:
        source: rank of the sender, or ANY_RANK.
        tag: tag of the message.
    """

    def __init__(
        self,
        title: str,
        ranks: NodeRanks,
        tensor: Tensor,
        source: int,
        tag: int,
    ) -> None:
        super().__init__(title, ranks.name, no_bytes(tensor.nbytes), tensor, ranks.timeout_s)
        self._ranks = ranks
        self.source = source
        self.tag = tag

    def copy(self, message: memoryview, source: int) -> None:
        """Take the bytes of a message."""
        n_copied = min(len(message), self._data.size)
        self._data[:n_copied] = np.frombuffer(message, np.uint8, n_copied)
        self._arrive(len(message), source)

    def _look(self) -> None:
        self._ranks.deliver()

    def _give_up(self) -> bool:
        if self._is_done:
            return False
        self._ranks.give_up(self)
        self._fail("none in time")
        return True


def _key(source: int, target: int, tag: int, number: int) -> str:
    return f"message/{source}/{target}/{tag}/{number}"


def _share(
    store: Store,
    rank: int,
    size: int,
    nbytes: int,
    timeout_s: float,
) -> list[memoryview]:
    """Return memory that the ranks of a group share, a piece for each rank. Collective over these ranks.

    Raises:
        CollectiveFailed: when a rank cannot share memory; the error of the first such rank, on every rank.
    """
    text = ""
    fd = -1
    pieces = []
    try:
        try:
            if rank == 0:
                fd = create_memory(size * nbytes)
        except CollectiveError as error:
            text = str(error)
        if rank == 0:
            store.set("memory", path_of(fd))
        _wait_for(store, ["memory"], rank, timeout_s)
        try:
            if rank > 0:
                fd = open_memory(store.get("memory").decode())
            if not text:
                pieces = map_pieces(fd, size, nbytes, rank)
        except CollectiveError as error:
            text = str(error)
        store.set(f"mapped/{rank}", text)
        _wait_for(store, [f"mapped/{member}" for member in range(size)], rank, timeout_s)
    finally:
        if fd >= 0:
            os.close(fd)
    texts = [store.get(f"mapped/{member}").decode() for member in range(size)]
    if any(texts):
        raise agreed(CollectiveFailed(next(filter(None, texts))))
    return pieces


def _wait_for(store: Store, keys: list[str], rank: int, timeout_s: float) -> None:
    """Wait until other ranks have set keys in the store.

    Raises:
        CollectiveTimeoutError: when they do not in time.
    """
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise late("init_process_group", timeout_s, "some ranks", f"rank {rank}") from error
