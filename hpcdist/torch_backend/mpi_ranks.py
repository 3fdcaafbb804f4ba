"""The ranks of a process group that mpirun or srun started: collectives of hpcdist, messages of MPI."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from hpcdist.collectives import library
from hpcdist.collectives.calls import reduce_buffer
from hpcdist.collectives.group import Group, group_of, thread_of
from hpcdist.collectives.ops import OPS, Op
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.errors import ConfigurationError, DesyncError
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world
from hpcdist.runtime.waiting import wait_until
from hpcdist.torch_backend.mpi_store import MPIStore
from hpcdist.torch_backend.ranks import ANY_RANK, Array, Message, Ranks, first_line, no_bytes

_AUTO = CommunicationOptions()


class MPIRanks(Ranks):
    """The ranks of a process group, over MPI; see `Ranks`. Collective over these ranks.

    Args:
        group: group of these ranks; `free` frees it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._comm = group.comm
        self.rank = self._comm.rank
        self.size = self._comm.size
        self.timeout_s = self._group.timeout_s
        largest_tag = self._comm.Get_attr(MPI.TAG_UB)
        assert isinstance(largest_tag, int), "every MPI library has this attribute"
        self.largest_tag = largest_tag
        self._messages: list[_MPIMessage] = []  # kept while MPI uses their memory

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], timeout_s: float) -> "MPIRanks":
        """Return the ranks that have these numbers in the world. Collective over these ranks.

        Args:
            numbers: numbers of the ranks, in the process group's order.
            timeout_s: time after which a call that some rank has not joined ends the job.
        """
        world = make_world()
        members = world.comm.Get_group().Incl(numbers)
        comm = world.comm.Create_group(members, tag=min(numbers))
        try:
            return cls(Group(comm, world, timeout_s=timeout_s))
        finally:
            comm.Free()  # the group has made a copy
            members.Free()

    def start(self, call: Callable[[Ranks], None]) -> Handle | None:
        """See `Ranks`. Between hosts the thread waits for messages; inside a host it would take a core."""
        if len(self._group.placement.hosts) == 1:
            return None
        thread = thread_of(self._group)
        ranks = self._group.keep("ranks of the thread", lambda: MPIRanks(thread.group))
        return thread.submit(lambda: call(ranks))

    @contextlib.contextmanager
    def recorded(self, name: str, buffer: Any) -> Iterator[None]:
        try:
            with self._group.recorded(name, buffer):
                yield
        except (MPI.Exception, OverflowError) as error:
            raise DesyncError(
                f"{name}: expected the same call and sizes on every rank, of less than 2 GiB, got "
                f"{first_line(error)!r} from the MPI library; let all ranks make the same calls in the same order."
            ) from error

    def have_same(self, number: int) -> bool:
        extremes = np.array([number, -number])
        self._comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MIN)
        return bool(extremes[0] == -extremes[1])

    def barrier(self) -> None:
        self._group.wait([self._comm.Ibarrier()])

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        if OPS.get(op.name) is op:
            reduce_buffer(tensor, op, _AUTO, self._group)
        else:  # bitwise
            with self.recorded(op.title, tensor):
                library.all_reduce(tensor.numpy(), self._group, op)

    def reduce_scatter(
        self,
        contribution: Array,
        counts: Sequence[int],
        op: Op,
    ) -> Array:
        received = np.empty(counts[self.rank], contribution.dtype)
        self._comm.Reduce_scatter(contribution, received, counts, library.mpi_op(op))
        return received

    def broadcast(self, data: Array, root: int) -> None:
        library.broadcast(data, self._comm, root)

    def all_gather(
        self,
        local_bytes: Array,
        counts: Sequence[int],
        joined: Array,
    ) -> None:
        library.all_gather(local_bytes, counts, joined, self._group)

    def gather(
        self,
        local_bytes: Array,
        counts: Sequence[int],
        joined: Array,
        root: int,
    ) -> None:
        self._comm.Gatherv(local_bytes, [joined, counts] if self.rank == root else None, root)

    def scatter(
        self,
        joined: Array,
        counts: Sequence[int],
        local_part: Array,
        root: int,
    ) -> None:
        self._comm.Scatterv([joined, counts] if self.rank == root else None, local_part, root)

    def all_to_all(
        self,
        sent: Array,
        sent_counts: Sequence[int],
        received: Array,
        counts: Sequence[int],
    ) -> None:
        self._comm.Alltoallv([sent, sent_counts], [received, counts])

    def send(self, data: Array, rank: int, tag: int, title: str) -> Message:
        request = self._comm.Isend(data, rank, tag)
        return self._started(_MPIMessage(title, self._group, request, data, None))

    def recv(self, tensor: Tensor, rank: int, tag: int, title: str) -> Message:
        data = no_bytes(tensor.nbytes)
        source = MPI.ANY_SOURCE if rank == ANY_RANK else rank
        request = self._comm.Irecv(data, source, tag)
        return self._started(_MPIMessage(title, self._group, request, data, tensor))

    def _started(self, message: "_MPIMessage") -> Message:
        """Keep a message until it is completed; return it."""
        incomplete_messages = [
            earlier_message
            for earlier_message in self._messages
            if not earlier_message.is_completed()
        ]
        self._messages = [*incomplete_messages, message]
        return message

    def free(self) -> None:
        messages = self._messages
        self._messages = []
        try:
            with contextlib.ExitStack() as stack:  # all of them, whichever raises
                for message in messages:
                    stack.callback(message.finish)
        finally:
            self._group.free()


def require_rank(numbers: Sequence[int], group_rank: int) -> None:
    """Raise ConfigurationError when this rank has another number in torch than in MPI; on this rank.

    Args:
        numbers: numbers of the process group's ranks in torch.
        group_rank: position of this rank among them.
    """
    world = make_world()
    if world.size < len(numbers) or numbers[group_rank] != world.rank:
        raise ConfigurationError(
            f"torch_backend: expected the ranks of MPI, of which this is {world.rank} of {world.size}, got rank "
            f"{numbers[group_rank]} of {len(numbers)} from torch; start the program by mpirun or srun, and use "
            f'init_process_group("hpcdist", init_method="hpcdist://").'
        )


class _MPIMessage(Message):
    """A message of MPI; see `Message`.

    Args:
        title: name of the message in errors.
        group: group of the process group's ranks.
        request: request of MPI.
        data: bytes that are sent, or memory for bytes that are received.
        tensor: tensor that receives the bytes. None if they are sent.
    """

    def __init__(
        self,
        title: str,
        group: Group,
        request: MPI.Request,
        data: Array,
        tensor: Tensor | None,
    ) -> None:
        super().__init__(title, group.world, data, tensor, group.timeout_s)
        self._request = request
        self._status = MPI.Status()

    def _look(self) -> None:
        try:
            if not self._request.Test(self._status):
                return
        except MPI.Exception as error:  # a longer message
            self._fail(first_line(error))
            return
        if self._status.Is_cancelled():
            self._fail("none in time")
        else:
            self._arrive(self._status.Get_count(MPI.BYTE), self._status.Get_source())

    def _give_up(self) -> bool:
        if self._is_done:
            return False
        self._request.Cancel()  # else it would take the next message
        has_ended = wait_until(self.is_completed, self._timeout_s, yields=0)
        return not has_ended or self._status.Is_cancelled()


def rendezvous(timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and number of ranks of MPI. Collective over all ranks."""
    world = make_world()
    group = group_of()
    store = group.keep("torch store", lambda: MPIStore(world))
    store.set_timeout(timeout)
    # process groups that are made again have the names of the first ones
    number = group.keep("torch rendezvous", itertools.count)
    yield dist.PrefixStore(f"{next(number)}/", store), world.rank, world.size
