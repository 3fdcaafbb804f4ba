"""A backend of torch.distributed over hpcdist's collectives, for DistributedDataParallel scripts as they are.

>>> import hpcdist.torch_backend
>>> torch.distributed.init_process_group("hpcdist", init_method="hpcdist://")

The ranks are those that mpirun or srun started. Tensors on the host only: others are refused.

Source: torch/distributed/distributed_c10d.py (torch 2.13), where a ProcessGroup written in Python replaces the whole
group; torch.testing._internal.distributed.multi_threaded_pg is another one.
"""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.futures import Future

from hpcdist.collectives import library
from hpcdist.collectives.calls import reduce_buffer
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import MEAN, OPS, SUM, Op
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.errors import CollectiveError, CollectiveTimeoutError, ConfigurationError, DesyncError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world
from hpcdist.runtime.waiting import late, wait_until

Array = npt.NDArray[Any]
_AUTO = CommunicationOptions()
_RedOp = dist.ReduceOp.RedOpType
_OPS = {
    _RedOp.SUM: SUM,
    _RedOp.AVG: MEAN,
    _RedOp.PRODUCT: OPS["product"],
    _RedOp.MIN: OPS["min"],
    _RedOp.MAX: OPS["max"],
    _RedOp.BAND: Op("bitwise and", 10, MPI.BAND, np.bitwise_and),
    _RedOp.BOR: Op("bitwise or", 11, MPI.BOR, np.bitwise_or),
    _RedOp.BXOR: Op("bitwise xor", 12, MPI.BXOR, np.bitwise_xor),
}
_BITWISE = (_RedOp.BAND, _RedOp.BOR, _RedOp.BXOR)
#: What a reduction of bools is, as True + True is True.
_OF_BOOLS = {_RedOp.SUM: _RedOp.MAX, _RedOp.PRODUCT: _RedOp.MIN}
_HALF = (torch.float16, torch.bfloat16)
_REDUCED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}


class HpcdistProcessGroup(dist.ProcessGroup):
    """The collectives of one group of ranks.

    Each call is blocking, also with async_op=True: on the host more threads gain nothing. So all ranks make the calls
    of all groups in one order, and no rank waits for a message before a collective that the sender makes first.
    Messages from rank to rank travel in the background.

    Before values move, ranks compare operation, dtype and sizes, by a reduction of 16 bytes.

    Args:
        comm: the ranks of the group, in its order; all of them make it.
        timeout_s: after which a call that some rank has not joined ends the job.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        super().__init__(comm.rank, comm.size)
        self._group = Group(comm, make_world(), timeout_s=timeout_s)
        self._messages: list[_Message] = []  # kept while MPI uses their memory
        self._group_name, self._is_shut_down = "", False

    def name(self) -> str:
        """Return "hpcdist"."""
        return "hpcdist"

    getBackendName = name  # noqa: N815  torch calls it so from C++

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name under which torch finds the group again."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return that name."""
        return self._group_name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def shutdown(self) -> None:
        """Free the communicators, once messages have arrived; nothing if it was called. Collective: the group.

        Raises:
            CollectiveTimeoutError: when nobody receives a message that was sent.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        messages, self._messages = self._messages, []
        try:
            with contextlib.ExitStack() as stack:  # all of them, whichever raises
                for message in messages:
                    stack.callback(message.finish)
        finally:
            self._group.free()

    @contextlib.contextmanager
    def _call(self, name: str, recorded: Any, *tensors: Tensor) -> Iterator[None]:
        """Record the collective of the block, and translate errors of MPI.

        Args:
            name: of the call.
            recorded: a buffer that is as large on every rank; None where sizes may differ.
            tensors: which the call reads and writes.

        Raises:
            CollectiveError: for tensors off the host, before anything is sent. DesyncError: for an error of MPI; on
                this rank.
        """
        _require_host(name, *tensors)
        try:
            with self._group.recorded(name, recorded):
                yield
        except (MPI.Exception, OverflowError) as error:
            raise _desync(name, error) from error

    def _require_same(self, call: str, *facts: Any) -> None:
        """Raise DesyncError on every rank unless all give the same facts, such as dtype and sizes. Collective."""
        mark = zlib.crc32(repr((call, facts)).encode())
        found = np.array([mark, -mark])
        self._group.comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
        if found[0] != -found[1]:
            raise _differ(call, ", ".join(map(str, facts)))

    def _require_all(self, call: str, is_right: bool, *facts: Any) -> None:
        """Raise DesyncError on every rank unless sizes are right on all. Collective."""
        found = np.array([is_right])
        self._group.comm.Allreduce(MPI.IN_PLACE, found, MPI.LAND)
        if not found[0]:
            raise _differ(call, ", ".join(map(str, facts)))

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace the tensor by its reduction over all ranks."""
        (tensor,) = tensors
        self._reduce("all_reduce", tensor, opts)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        for tensor in tensors:
            self._reduce("all_reduce", tensor, opts)
        return _done(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Replace root's tensor by the reduction over all ranks."""
        (tensor,) = tensors
        self._reduce("reduce", tensor if self.rank() == opts.rootRank else tensor.clone(), opts)
        return _done(tensors)

    def _reduce(self, call: str, tensor: Tensor, opts: Any) -> None:
        kind, factor = _reduction(call, opts, tensor)
        with self._call(call, None):
            self._require_same(call, kind.name, tensor.dtype, tensor.numel())
        if factor is not None:
            tensor.detach().mul_(factor)
        with _contiguous(tensor) as whole:
            if whole.dtype == torch.bool:
                whole = whole.view(torch.uint8)
            if kind in _BITWISE:
                with self._call(_OPS[kind].title, whole):
                    library.all_reduce(whole.numpy(), self._group, _OPS[kind])
            else:
                reduce_buffer(whole, _OPS[kind], _AUTO, self._group)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """Put the reduction of this rank's tensor of each rank's list into the output."""
        (output,), (parts,) = outputs, inputs
        self._require("reduce_scatter", parts, output)
        if parts[self.rank()].numel() != output.numel():
            raise _mismatch(
                "reduce_scatter", f"{output.numel()} elements for rank {self.rank()}", parts[self.rank()].shape
            )
        joined = torch.cat([one.reshape(-1) for one in parts])
        return self._reduce_rows(output, joined, [one.numel() for one in parts], opts, outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Work:
        """Put this rank's part of the reduction of a tensor that is as large as all outputs into the output."""
        if given.numel() != output.numel() * self.size() or given.dtype != output.dtype:
            expected = f"input of {output.numel() * self.size()} {output.dtype}"
            raise _mismatch("reduce_scatter_tensor", expected, given.shape, given.dtype)
        return self._reduce_rows(output, given.reshape(-1), [output.numel()] * self.size(), opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        """Do reduce_scatter_single of each output and input."""
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_rows(self, output: Tensor, joined: Tensor, counts: list[int], opts: Any, result: list[Tensor]) -> Work:
        kind, factor = _reduction("reduce_scatter", opts, joined)
        own = joined.detach()
        given = own.clone(memory_format=torch.contiguous_format) if factor is None else own * factor
        given = given.float() if given.dtype in _HALF else given
        array = (given.view(torch.uint8) if given.dtype == torch.bool else given).contiguous().numpy()
        received = np.empty(counts[self.rank()], array.dtype)
        with self._call("reduce_scatter", None, output):
            self._require_same("reduce_scatter", kind.name, joined.dtype, counts)
            self._group.comm.Reduce_scatter(array, received, counts, _OPS[kind].mpi_op)
        found = torch.from_numpy(received)
        if kind == _RedOp.AVG:
            found /= self.size()
        output.detach().copy_(found.reshape(output.shape))
        return _done(result)

    # -- moves --------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Replace the tensor by root's."""
        (tensor,) = tensors
        with self._call("broadcast", None, tensor), _contiguous(tensor) as whole:
            self._require_same("broadcast", tensor.dtype, tensor.numel(), f"root {opts.rootRank}")
            library.broadcast(_bytes_of(whole), self._group.comm, opts.rootRank)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Put each rank's tensor into its place of the list."""
        (parts,), (own,) = outputs, inputs
        self._require("all_gather", parts, own)
        if own.numel() != parts[self.rank()].numel():
            raise _mismatch("all_gather", f"{parts[self.rank()].numel()} elements of rank {self.rank()}", own.shape)
        joined = self._gather_bytes(own, [one.nbytes for one in parts])
        _deal(joined, parts)
        return _done(outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do allgather of each input; outputs are a list for each rank."""
        if any(len(of_rank) != len(inputs) for of_rank in outputs):
            found = [len(of_rank) for of_rank in outputs]
            raise _mismatch("all_gather_coalesced", f"lists of {len(inputs)} tensors", found)
        for number, own in enumerate(inputs):
            self.allgather([[of_rank[number] for of_rank in outputs]], [own])
        return _done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        """Put all ranks' tensors into one, one after the other."""
        if output.numel() != given.numel() * self.size() or output.dtype != given.dtype:
            expected = f"output of {given.numel() * self.size()} {given.dtype}"
            raise _mismatch("all_gather_into_tensor", expected, output.shape, output.dtype)
        _deal(self._gather_bytes(given, [given.nbytes] * self.size()), [output])
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do all_gather_single of each output and input."""
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_bytes(self, own: Tensor, counts: list[int]) -> Array:
        joined = np.empty(sum(counts), np.uint8)
        with self._call("all_gather", None, own):
            self._require_same("all_gather", own.dtype, f"{counts} bytes")
            library.all_gather(_bytes_of(own), counts, joined, self._group)
        return joined

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Put each rank's tensor into its place of root's list."""
        (own,), is_root = inputs, self.rank() == opts.rootRank
        parts = outputs[0] if is_root else []
        if is_root:
            self._require("gather", parts, own)
        counts = [one.nbytes for one in parts]
        joined = np.empty(sum(counts), np.uint8)
        with self._call("gather", None, own):
            self._require_counts("gather", counts, opts.rootRank, own)
            self._group.comm.Gatherv(_bytes_of(own), [joined, counts] if is_root else None, opts.rootRank)
        _deal(joined, parts)
        return _done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """Put this rank's tensor of root's list into the output."""
        (output,), is_root = outputs, self.rank() == opts.rootRank
        parts = inputs[0] if is_root else []
        _require_host("scatter", output)
        if is_root:
            self._require("scatter", parts, output)
        joined = np.concatenate([_bytes_of(one) for one in parts]) if is_root else None
        counts = [one.nbytes for one in parts]
        with _contiguous(output) as whole, self._call("scatter", None, output):
            self._require_counts("scatter", counts, opts.rootRank, output)
            self._group.comm.Scatterv([joined, counts] if is_root else None, _bytes_of(whole), opts.rootRank)
        return _done(outputs)

    def _require_counts(self, call: str, counts: list[int], root: int, own: Tensor) -> None:
        """Raise DesyncError on every rank unless each has a tensor of as many bytes as root says. Collective."""
        self._require_same(call, own.dtype, f"root {root}")
        said = np.array(counts or [0] * self.size())
        self._group.comm.Bcast(said, root)
        self._require_all(call, said[self.rank()] == own.nbytes, f"{own.nbytes} bytes, {said[self.rank()]} on root")

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Put each rank's tensor for this one into its place of the list."""
        self._require("all_to_all", inputs)
        self._require("all_to_all", outputs)
        sent, counts = [_bytes_of(one) for one in inputs], [one.nbytes for one in outputs]
        received, coming = np.empty(sum(counts), np.uint8), np.empty(self.size(), np.int64)
        with self._call("all_to_all", None):
            self._group.comm.Alltoall(np.array([one.size for one in sent]), coming)
            dtype = inputs[0].dtype
            is_right = coming.tolist() == counts and outputs[0].dtype == dtype
            self._require_all("all_to_all", is_right, dtype, f"{counts} bytes for {coming.tolist()}")
            self._group.comm.Alltoallv([np.concatenate(sent), [one.size for one in sent]], [received, counts])
        _deal(received, outputs)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        """Send rows to each rank, by default as many to each, and receive its rows."""
        for tensor, splits, name in ((given, input_splits, "input"), (output, output_splits, "output")):
            if (splits and sum(splits) != len(tensor)) or (not splits and len(tensor) % self.size()):
                raise _mismatch(
                    "all_to_all_single", f"rows of the {name} that the splits divide", tensor.shape, list(splits)
                )
        rows_out = list(output_splits) or [len(output) // self.size()] * self.size()
        rows_in = list(input_splits) or [len(given) // self.size()] * self.size()
        with _contiguous(output) as whole:
            self.alltoall(list(whole.split(rows_out)), list(given.split(rows_in)))
        return _done([output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks of the group are here."""
        with self._call("barrier", None):
            self._group.wait([self._group.comm.Ibarrier()])
        return _done([])

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Start to send a tensor."""
        (tensor,) = tensors
        self._require_message("send", tensor, tag)
        data = _bytes_of(tensor).copy()
        title = f"send to rank {rank} with tag {tag}"
        return self._started(_Message(title, self._group, self._group.comm.Isend(data, rank, tag), None, data))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Start to receive a tensor."""
        (tensor,) = tensors
        self._require_message("recv", tensor, tag)
        data = np.empty(tensor.nbytes, np.uint8)
        title = f"recv from {'any rank' if rank == MPI.ANY_SOURCE else f'rank {rank}'} with tag {tag}"
        return self._started(_Message(title, self._group, self._group.comm.Irecv(data, rank, tag), tensor, data))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Start to receive a tensor from any rank."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _require_message(self, call: str, tensor: Tensor, tag: int) -> None:
        _require_host(call, tensor)
        largest = self._group.comm.Get_attr(MPI.TAG_UB)
        assert isinstance(largest, int), "every MPI library says it"
        if not 0 <= tag <= largest:
            raise _mismatch(call, f"a tag from 0 to {largest}", tag)

    def _started(self, message: "_Message") -> "_Message":
        self._messages = [*(one for one in self._messages if one.is_active()), message]
        return message

    def _require(self, call: str, parts: Sequence[Tensor], own: Tensor | None = None) -> None:
        """Raise CollectiveError unless there is a tensor for each rank; on this rank, before anything is sent."""
        if len(parts) != self.size():
            raise _mismatch(call, f"{self.size()} tensors, one for each rank", len(parts))
        for one in [*parts, *([] if own is None else [own])]:
            _require_host(call, one)
            if one.dtype != parts[0].dtype:
                raise _mismatch(call, f"tensors of {parts[0].dtype}", one.dtype)


class _Message(Work):
    """A message in flight.

    Args:
        title: for errors.
        group: its ranks.
        request: MPI's.
        tensor: what receives it; None where it is sent.
        data: its bytes, which MPI reads or writes.
    """

    def __init__(self, title: str, group: Group, request: MPI.Request, tensor: Tensor | None, data: Array) -> None:
        super().__init__()
        self._title = title
        self._group, self._request, self._tensor, self._data = group, request, tensor, data
        self._status = MPI.Status()
        self._error: CollectiveError | None = None
        self._is_done = False

    def is_active(self) -> bool:
        """Return whether MPI still uses its memory."""
        if not self._is_done:
            self._test()
        return not self._is_done

    def is_completed(self) -> bool:
        """Return whether `wait` returns at once."""
        return not self.is_active()

    def is_success(self) -> bool:
        """Return whether it has arrived."""
        return self.is_completed() and self._error is None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when it has arrived.

        Args:
            timeout: longest wait; 0: that of the group.

        Raises:
            CollectiveTimeoutError: when nobody sends, or receives, it in time; what nobody sends in time is given up.
                CollectiveError: when a message of another size has come.
        """
        limit_s = min(timeout.total_seconds() or self._group.timeout_s, self._group.timeout_s)
        if not wait_until(self.is_completed, limit_s, yields=0):
            if self._tensor is not None:
                self._request.Cancel()  # else it would take the next message
                wait_until(self.is_completed, limit_s, yields=0)
            if self._tensor is None or self._status.Is_cancelled():
                raise late(self._title, limit_s, "it", self._group.world)
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Wait for what is sent, and give up what nobody has sent; afterwards MPI no longer uses the memory."""
        if self._tensor is not None and self.is_active():
            self._request.Cancel()
        if not wait_until(self.is_completed, self._group.timeout_s, yields=0):
            raise late(self._title, self._group.timeout_s, "it", self._group.world)

    def _test(self) -> None:
        n_expected = self._data.size
        try:
            self._is_done = self._request.Test(self._status)
        except MPI.Exception as error:  # a longer message
            self._is_done = True
            self._error = _mismatch("recv", f"a message of {n_expected} bytes", _first_line(error))
            return
        if not self._is_done or self._tensor is None or self._status.Is_cancelled():
            return
        n_bytes = self._status.Get_count(MPI.BYTE)
        if n_bytes == n_expected:
            _deal(self._data, [self._tensor])
        else:
            self._error = _mismatch("recv", f"a message of {n_expected} bytes", f"one of {n_bytes}")

    def _source_rank(self) -> int:
        return self._status.Get_source()

    def get_future(self) -> Future[None]:
        """Return a future that is done: it waits first."""
        self.wait()
        found: Future[None] = Future()
        found.set_result(None)
        return found


def _done(result: Any) -> Work:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _reduction(call: str, opts: Any, tensor: Tensor) -> tuple[Any, Any]:
    """Return the kind of a reduction, and the factor that scales values before it, or None.

    Raises:
        CollectiveError: for a reduction that values of this dtype do not have; on this rank, before anything is sent.
    """
    op = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    kind = next((one for one in (*_OPS, _RedOp.PREMUL_SUM) if op == one), None)
    _require_host(call, tensor)
    if kind is None or tensor.dtype not in _REDUCED:
        raise _mismatch(
            call, "a reduction of bools, integers, floats or complex numbers", kind and kind.name, tensor.dtype
        )
    if kind == _RedOp.PREMUL_SUM:
        return _RedOp.SUM, op.__getstate__()[1]
    is_exact = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if kind in _BITWISE and not is_exact:
        raise _mismatch(call, "integers or bools for a bitwise reduction", tensor.dtype)
    if kind in (_RedOp.MIN, _RedOp.MAX) and tensor.dtype.is_complex:
        raise _mismatch(call, "numbers that have an order", tensor.dtype)
    if kind == _RedOp.AVG and is_exact:
        raise _mismatch(call, "floats for an average", tensor.dtype)
    return (_OF_BOOLS.get(kind, kind) if tensor.dtype == torch.bool else kind), None


def _require_host(call: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise _mismatch(call, "tensors on the host", f"one on {tensor.device}")
        if tensor.layout is not torch.strided:
            raise _mismatch(call, "dense tensors", f"one of layout {tensor.layout}; make its gradient dense")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _desync(call: str, error: BaseException) -> DesyncError:
    return DesyncError(
        f"{call}: expected the same call and sizes on every rank, of less than 2 GiB, got {_first_line(error)!r} from "
        f"the MPI library; let all ranks make the same calls in the same order."
    )


def _differ(call: str, own: str) -> DesyncError:
    error = DesyncError(
        f"{call}: expected the same call and sizes that fit on every rank, got {own} here and others elsewhere; "
        f"let all ranks make the same calls in the same order."
    )
    error.is_agreed = True
    return error


def _mismatch(call: str, expected: str, *got: Any) -> CollectiveError:
    return CollectiveError(f"{call}: expected {expected}, got {', '.join(map(str, got))}; correct the call.")


@contextlib.contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a contiguous tensor, and copy its values back after the block, unless it is the given one."""
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        yield own
        return
    whole = _resolved(own)
    yield whole
    own.copy_(whole)


def _resolved(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same values, in memory as they are read."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> Array:
    """Return the values of a tensor as bytes: its memory, if it is contiguous."""
    if not tensor.numel():  # which torch cannot view as bytes
        return np.empty(0, np.uint8)
    found: Array = _resolved(tensor.detach()).reshape(-1).view(torch.uint8).numpy()
    return found


def _deal(joined: Array, tensors: Sequence[Tensor]) -> None:
    """Copy bytes into tensors, one after the other."""
    start = 0
    for tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if n_bytes:
            part = torch.from_numpy(joined[start : start + n_bytes]).view(tensor.dtype)
            tensor.detach().copy_(part.reshape(tensor.shape))
        start += n_bytes


# -- what torch calls ---------------------------------------------------------------------------------------------


def _make_group(options: Any, group_options: Any) -> HpcdistProcessGroup:
    """Return a group of ranks, for init_process_group and new_group. Collective: these ranks."""
    world = make_world()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if world.size < len(ranks) or ranks[options.group_rank] != world.rank:
        raise ConfigurationError(
            f"torch_backend: expected the ranks of MPI, of which this is {world.rank} of {world.size}, got rank "
            f"{ranks[options.group_rank]} of {len(ranks)} from torch; start the program by mpirun or srun, and use "
            f'init_process_group("hpcdist", init_method="hpcdist://").'
        )
    limit_s = min(options.timeout.total_seconds(), world.timeout_s)
    _wait_for_members(options, limit_s)
    members = world.comm.Get_group().Incl(ranks)
    comm = world.comm.Create_group(members, tag=min(ranks))
    try:
        return HpcdistProcessGroup(comm, limit_s)
    finally:
        comm.Free()  # the group has a copy of its own
        members.Free()


def _wait_for_members(options: Any, limit_s: float) -> None:
    """Return when all ranks of a group are making it: MPI would wait without a limit.

    Raises:
        CollectiveTimeoutError: when one does not come in time; on those that came, and on those that come later.
    """
    store, ranks = options.store, range(options.group_size)
    store.set(f"here/{options.group_rank}", "1")
    cause, verdict = None, "all are here"
    try:
        store.wait([f"here/{rank}" for rank in ranks], timedelta(seconds=limit_s))
    except RuntimeError as error:
        absent = [rank for rank in ranks if not store.check([f"here/{rank}"])]
        cause, verdict = error, f"no answer from {absent} of its ranks"
    verdict = store.compare_set("verdict", "", verdict).decode()  # the first one counts
    if verdict != "all are here":
        raise CollectiveTimeoutError(
            f"new_group: expected all of {options.group_size} ranks within {limit_s:g} s, got {verdict}; let all of "
            f"them make it, in the same order."
        ) from cause


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and number of ranks: those of MPI. Collective: all ranks."""
    world = make_world()
    store, port = None, ""
    with world.agreed(world.comm):
        if world.rank == 0:
            try:
                store = dist.TCPStore("0.0.0.0", 0, world.size, True, timeout, wait_for_workers=False)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"torch_backend: expected a free port for torch's store, got {_first_line(error)!r}; free one."
                ) from error
            port = str(store.port)
    host, port = world.broadcast_text(f"{MPI.Get_processor_name()} {port}", 0, world.comm).split()
    if store is None:
        store = dist.TCPStore("127.0.0.1" if world.n_hosts == 1 else host, int(port), world.size, False, timeout)
    yield store, world.rank, world.size


dist.Backend.register_backend("hpcdist", _make_group, extended_api=True, devices="cpu")
dist.register_rendezvous_handler("hpcdist", _rendezvous)
