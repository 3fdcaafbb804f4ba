"""The ranks of a process group that mpirun or srun started: collectives of hpcdist, messages of MPI."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from hpcdist.collectives import library
from hpcdist.collectives.calls import reduce_buffer
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import OPS, Op
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.errors import ConfigurationError, DesyncError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world
from hpcdist.runtime.waiting import wait_until
from hpcdist.torch_backend.ranks import ANY_RANK, Array, Message, Ranks, first_line, no_bytes

_AUTO = CommunicationOptions()


class MPIRanks(Ranks):
    """See `Ranks`. Collective: these ranks.

    Args:
        numbers: of the process group's ranks in the world.
        timeout_s: after which a call that some rank has not joined ends the job.
    """

    def __init__(self, numbers: Sequence[int], timeout_s: float) -> None:
        world = make_world()
        members = world.comm.Get_group().Incl(numbers)
        comm = world.comm.Create_group(members, tag=min(numbers))
        try:
            self._group = Group(comm, world, timeout_s=timeout_s)
        finally:
            comm.Free()  # the group has a copy of its own
            members.Free()
        self._comm = self._group.comm
        self.rank, self.size, self.timeout_s = self._comm.rank, self._comm.size, self._group.timeout_s
        largest_tag = self._comm.Get_attr(MPI.TAG_UB)
        assert isinstance(largest_tag, int), "every MPI library says it"
        self.largest_tag = largest_tag
        self._messages: list[_MPIMessage] = []  # kept while MPI uses their memory

    @contextlib.contextmanager
    def recorded(self, name: str, buffer: Any) -> Iterator[None]:  # noqa: D102  as in Ranks; so are the others
        try:
            with self._group.recorded(name, buffer):
                yield
        except (MPI.Exception, OverflowError) as error:
            raise DesyncError(
                f"{name}: expected the same call and sizes on every rank, of less than 2 GiB, got "
                f"{first_line(error)!r} from the MPI library; let all ranks make the same calls in the same order."
            ) from error

    def have_same(self, number: int) -> bool:  # noqa: D102
        found = np.array([number, -number])
        self._comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
        return bool(found[0] == -found[1])

    def barrier(self) -> None:  # noqa: D102
        self._group.wait([self._comm.Ibarrier()])

    def all_reduce(self, tensor: Tensor, op: Op) -> None:  # noqa: D102
        if OPS.get(op.name) is op:
            reduce_buffer(tensor, op, _AUTO, self._group)
        else:  # bitwise
            with self.recorded(op.title, tensor):
                library.all_reduce(tensor.numpy(), self._group, op)

    def reduce_scatter(self, given: Array, counts: Sequence[int], op: Op) -> Array:  # noqa: D102
        received = np.empty(counts[self.rank], given.dtype)
        self._comm.Reduce_scatter(given, received, counts, library.mpi_op(op))
        return received

    def broadcast(self, data: Array, root: int) -> None:  # noqa: D102
        library.broadcast(data, self._comm, root)

    def all_gather(self, own: Array, counts: Sequence[int], joined: Array) -> None:  # noqa: D102
        library.all_gather(own, counts, joined, self._group)

    def gather(self, own: Array, counts: Sequence[int], joined: Array, root: int) -> None:  # noqa: D102
        self._comm.Gatherv(own, [joined, counts] if self.rank == root else None, root)

    def scatter(self, joined: Array, counts: Sequence[int], own: Array, root: int) -> None:  # noqa: D102
        self._comm.Scatterv([joined, counts] if self.rank == root else None, own, root)

    def all_to_all(  # noqa: D102
        self, sent: Array, sent_counts: Sequence[int], received: Array, counts: Sequence[int]
    ) -> None:
        self._comm.Alltoallv([sent, sent_counts], [received, counts])

    def send(self, data: Array, rank: int, tag: int, title: str) -> Message:  # noqa: D102
        return self._started(_MPIMessage(title, self._group, self._comm.Isend(data, rank, tag), data, None))

    def recv(self, tensor: Tensor, rank: int, tag: int, title: str) -> Message:  # noqa: D102
        data = no_bytes(tensor.nbytes)
        request = self._comm.Irecv(data, MPI.ANY_SOURCE if rank == ANY_RANK else rank, tag)
        return self._started(_MPIMessage(title, self._group, request, data, tensor))

    def _started(self, message: "_MPIMessage") -> Message:
        self._messages = [*(one for one in self._messages if not one.is_completed()), message]
        return message

    def free(self) -> None:  # noqa: D102
        messages, self._messages = self._messages, []
        try:
            with contextlib.ExitStack() as stack:  # all of them, whichever raises
                for message in messages:
                    stack.callback(message.finish)
        finally:
            self._group.free()


def require_rank(numbers: Sequence[int], group_rank: int) -> None:
    """Raise ConfigurationError when torch takes this rank for another one than MPI does; on this rank.

    Args:
        numbers: of the process group's ranks, as torch has them.
        group_rank: which of them this is.
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
        request: MPI's.
    """

    def __init__(self, title: str, group: Group, request: MPI.Request, data: Array, tensor: Tensor | None) -> None:
        super().__init__(title, group.world, data, tensor, group.timeout_s)
        self._request, self._status = request, MPI.Status()

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
        return not wait_until(self.is_completed, self._timeout_s, yields=0) or self._status.Is_cancelled()


def rendezvous(timeout: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and number of ranks: those of MPI. Collective: all ranks."""
    world = make_world()
    store, port = None, ""
    with world.agreed(world.comm):
        if world.rank == 0:
            try:
                store = dist.TCPStore("0.0.0.0", 0, world.size, True, timeout, wait_for_workers=False)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"torch_backend: expected a free port for torch's store, got {first_line(error)!r}; free one."
                ) from error
            port = str(store.port)
    host, port = world.broadcast_text(f"{MPI.Get_processor_name()} {port}", 0, world.comm).split()
    if store is None:
        store = dist.TCPStore("127.0.0.1" if world.n_hosts == 1 else host, int(port), world.size, False, timeout)
    yield store, world.rank, world.size
