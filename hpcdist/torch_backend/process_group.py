"""torch's ProcessGroup: its calls on tensors, as moves and reductions of bytes and arrays (`Ranks`).

Source: torch/distributed/distributed_c10d.py (torch 2.13), where a ProcessGroup written in Python replaces the whole
group; torch.testing._internal.distributed.multi_threaded_pg is another one.
"""

import contextlib
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.futures import Future

from hpcdist.collectives.ops import MEAN, OPS, SUM, Op
from hpcdist.errors import DesyncError
from hpcdist.torch_backend.ranks import (
    ANY_RANK,
    Array,
    Message,
    Pending,
    Ranks,
    deal,
    mismatch,
    no_bytes,
)

_RedOp = dist.ReduceOp.RedOpType
_OPS = {
    _RedOp.SUM: SUM,
    _RedOp.AVG: MEAN,
    _RedOp.PRODUCT: OPS["product"],
    _RedOp.MIN: OPS["min"],
    _RedOp.MAX: OPS["max"],
    _RedOp.BAND: Op("bitwise and", 10, "BAND", np.bitwise_and),
    _RedOp.BOR: Op("bitwise or", 11, "BOR", np.bitwise_or),
    _RedOp.BXOR: Op("bitwise xor", 12, "BXOR", np.bitwise_xor),
}
_BITWISE = (_RedOp.BAND, _RedOp.BOR, _RedOp.BXOR)
#: The kinds of reductions that bools have in place of sums and products, as True + True is True.
_OF_BOOLS = {_RedOp.SUM: _RedOp.MAX, _RedOp.PRODUCT: _RedOp.MIN}
_HALF = (torch.float16, torch.bfloat16)
_REDUCIBLE_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def leave_uncompiled() -> None:
    """Let torch.compile call the methods of process groups as they are, as it calls methods that are written in C++.

    Cost: a second at the first call, in which torch's compiler is imported. DDP imports it, too.
    """
    for name, method in list(vars(HpcdistProcessGroup).items()):
        if isinstance(method, types.FunctionType) and not hasattr(method, "_torchdynamo_disable"):
            setattr(HpcdistProcessGroup, name, torch.compiler.disable(method))


class HpcdistProcessGroup(dist.ProcessGroup):
    """The collectives of one group of ranks.

    Inside a host each call is blocking, also with async_op=True: more threads gain nothing. Between hosts all_reduce
    with async_op=True runs in a thread, as DistributedDataParallel asks for, with separate communicators. All ranks
    make the calls of all groups in one order, and no rank waits for a message before a collective that the sender
    makes first. Messages from rank to rank travel in the background.

    Before values move, ranks compare operation, dtype and sizes, by a small reduction.

    Args:
        ranks: ranks of the group, in its order; all of them make the group.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.rank, ranks.size)
        self._ranks = ranks
        self._group_name = ""
        self._is_shut_down = False

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
        """Free the ranks, once messages have arrived; later calls do nothing. Collective over the group.

        Raises:
            CollectiveTimeoutError: when nobody receives a message that was sent.
        """
        if not self._is_shut_down:
            self._is_shut_down = True
            self._ranks.free()

    @contextlib.contextmanager
    def _call(self, name: str, recorded: Any, *tensors: Tensor) -> Iterator[None]:
        """Record the collective of the block; see `Ranks.recorded`.

        Args:
            name: name of the call.
            recorded: buffer that has the same size on every rank; None where sizes may differ.
            tensors: tensors that the call reads and writes.

        Raises:
            CollectiveError: for tensors off the host, before anything is sent.
            DesyncError: for a fault that the MPI library finds; on this rank.
        """
        _require_host(name, *tensors)
        with self._ranks.recorded(name, recorded):
            yield

    def _require_same(self, call: str, *facts: Any) -> None:
        """Raise DesyncError on every rank unless all give the same facts, such as dtype and sizes.

        Collective over the group.
        """
        _require_same(self._ranks, call, *facts)

    def _require_all(self, call: str, is_right: bool, *facts: Any) -> None:
        """Raise DesyncError on every rank unless sizes are right on all ranks. Collective over the group."""
        are_same = self._ranks.have_same(int(is_right))
        if not are_same or not is_right:
            raise _differ(call, ", ".join(map(str, facts)))

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace the tensor by its reduction over all ranks; between hosts while the caller goes on, if it asks."""
        (tensor,) = tensors
        kind, factor = _reduction("all_reduce", opts, tensor)
        if opts is not None and opts.asyncOp:
            future: Future[list[Tensor]] = Future()

            def reduce(ranks: Ranks) -> None:
                try:
                    _reduce(ranks, "all_reduce", tensor, kind, factor)
                except BaseException as error:
                    future.set_exception(error)
                    raise
                future.set_result(tensors)

            handle = self._ranks.start(reduce)
            if handle is not None:
                return Pending(handle, future)
        _reduce(self._ranks, "all_reduce", tensor, kind, factor)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        for tensor in tensors:
            kind, factor = _reduction("all_reduce", opts, tensor)
            _reduce(self._ranks, "all_reduce", tensor, kind, factor)
        return _done(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Replace root's tensor by the reduction over all ranks."""
        (tensor,) = tensors
        kind, factor = _reduction("reduce", opts, tensor)
        if self.rank() != opts.rootRank:
            tensor = tensor.clone()
        _reduce(self._ranks, "reduce", tensor, kind, factor, f"root {opts.rootRank}")
        return _done(tensors)

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: Any,
    ) -> Work:
        """Reduce the tensors that all ranks' lists hold for this rank into the output."""
        (output,) = outputs
        (parts,) = inputs
        self._require("reduce_scatter", parts, output)
        local_part = parts[self.rank()]
        if local_part.numel() != output.numel():
            expected = f"{output.numel()} elements for rank {self.rank()}"
            raise mismatch("reduce_scatter", expected, local_part.shape)
        joined = torch.cat([part.reshape(-1) for part in parts])
        counts = [part.numel() for part in parts]
        return self._reduce_parts(output, joined, counts, opts, outputs)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input_tensor: Tensor,
        opts: Any,
    ) -> Work:
        """Reduce inputs as large as all ranks' outputs together, and put this rank's part into the output."""
        n_elements = output.numel() * self.size()
        if input_tensor.numel() != n_elements or input_tensor.dtype != output.dtype:
            raise mismatch(
                "reduce_scatter_tensor",
                f"input of {n_elements} {output.dtype}",
                input_tensor.shape,
                input_tensor.dtype,
            )
        flat_input = input_tensor.reshape(-1)
        counts = [output.numel()] * self.size()
        return self._reduce_parts(output, flat_input, counts, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
    ) -> Work:
        """Do reduce_scatter_single of each output and input."""
        for output, input_tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input_tensor, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_parts(
        self,
        output: Tensor,
        joined: Tensor,
        counts: list[int],
        opts: Any,
        result: list[Tensor],
    ) -> Work:
        """Put this rank's part of a reduction into the output.

        Args:
            output: tensor for this rank's part.
            joined: values that this rank contributes, one part after the other.
            counts: number of elements of each rank's part.
            opts: options of the call.
            result: tensors that the call returns.
        """
        kind, factor = _reduction("reduce_scatter", opts, joined)
        contribution = joined.detach()
        if factor is None:
            contribution = contribution.clone(memory_format=torch.contiguous_format)
        else:
            contribution = contribution * factor
        if contribution.dtype in _HALF:
            contribution = contribution.float()
        elif contribution.dtype == torch.bool:
            contribution = contribution.view(torch.uint8)
        array = contribution.contiguous().numpy()
        with self._call("reduce_scatter", None, output):
            self._require_same("reduce_scatter", kind.name, joined.dtype, counts)
            received = self._ranks.reduce_scatter(array, counts, _OPS[kind])
        reduced = torch.from_numpy(received)
        if kind == _RedOp.AVG:
            reduced /= self.size()
        output.detach().copy_(reduced.reshape(output.shape))
        return _done(result)

    # -- moves --------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Replace the tensor by root's."""
        (tensor,) = tensors
        with self._call("broadcast", None, tensor), _contiguous(tensor) as whole:
            self._require_same("broadcast", tensor.dtype, tensor.numel(), f"root {opts.rootRank}")
            self._ranks.broadcast(_bytes_of(whole), opts.rootRank)
        return _done(tensors)

    def allgather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: Any = None,
    ) -> Work:
        """Put each rank's tensor into its place of the list."""
        (parts,) = outputs
        (input_tensor,) = inputs
        self._require("all_gather", parts, input_tensor)
        n_elements = parts[self.rank()].numel()
        if input_tensor.numel() != n_elements:
            expected = f"{n_elements} elements of rank {self.rank()}"
            raise mismatch("all_gather", expected, input_tensor.shape)
        joined = self._gather_bytes(input_tensor, [part.nbytes for part in parts])
        deal(joined, parts)
        return _done(outputs)

    def allgather_coalesced(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: Any = None,
    ) -> Work:
        """Do allgather of each input; outputs are a list for each rank."""
        list_lengths = list(map(len, outputs))
        if any(length != len(inputs) for length in list_lengths):
            expected = f"lists of {len(inputs)} tensors"
            raise mismatch("all_gather_coalesced", expected, list_lengths)
        for number, input_tensor in enumerate(inputs):
            parts = [of_rank[number] for of_rank in outputs]
            self.allgather([parts], [input_tensor])
        return _done(outputs)

    def all_gather_single(
        self,
        output: Tensor,
        input_tensor: Tensor,
        opts: Any = None,
    ) -> Work:
        """Put all ranks' tensors into one, one after the other."""
        n_elements = input_tensor.numel() * self.size()
        if output.numel() != n_elements or output.dtype != input_tensor.dtype:
            expected = f"output of {n_elements} {input_tensor.dtype}"
            raise mismatch("all_gather_into_tensor", expected, output.shape, output.dtype)
        joined = self._gather_bytes(input_tensor, [input_tensor.nbytes] * self.size())
        deal(joined, [output])
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,
    ) -> Work:
        """Do all_gather_single of each output and input."""
        for output, input_tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input_tensor)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_bytes(self, local_tensor: Tensor, counts: list[int]) -> Array:
        """Return the bytes of all ranks' tensors, one after the other; `counts` are the bytes of each."""
        joined = no_bytes(sum(counts))
        with self._call("all_gather", None, local_tensor):
            self._require_same("all_gather", local_tensor.dtype, f"{counts} bytes")
            self._ranks.all_gather(_bytes_of(local_tensor), counts, joined)
        return joined

    def gather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: Any,
    ) -> Work:
        """Put each rank's tensor into its place of root's list."""
        (input_tensor,) = inputs
        parts: list[Tensor] = []
        if self.rank() == opts.rootRank:
            parts = outputs[0]
            self._require("gather", parts, input_tensor)
        counts = [part.nbytes for part in parts]
        joined = no_bytes(sum(counts))
        with self._call("gather", None, input_tensor):
            self._require_counts("gather", counts, opts.rootRank, input_tensor)
            self._ranks.gather(_bytes_of(input_tensor), counts, joined, opts.rootRank)
        deal(joined, parts)
        return _done(outputs)

    def scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: Any,
    ) -> Work:
        """Put this rank's tensor of root's list into the output."""
        (output,) = outputs
        _require_host("scatter", output)
        parts: list[Tensor] = []
        joined = no_bytes()
        if self.rank() == opts.rootRank:
            parts = inputs[0]
            self._require("scatter", parts, output)
            joined = np.concatenate([_bytes_of(part) for part in parts])
        counts = [part.nbytes for part in parts]
        with _contiguous(output) as whole, self._call("scatter", None, output):
            self._require_counts("scatter", counts, opts.rootRank, output)
            self._ranks.scatter(joined, counts, _bytes_of(whole), opts.rootRank)
        return _done(outputs)

    def _require_counts(
        self,
        call: str,
        counts: list[int],
        root: int,
        local_tensor: Tensor,
    ) -> None:
        """Raise DesyncError on every rank unless each has a tensor of the bytes that root expects.

        Collective over the group.
        """
        self._require_same(call, local_tensor.dtype, f"root {root}")
        root_counts = np.array(counts or [0] * self.size())
        self._ranks.broadcast(root_counts.view(np.uint8), root)
        expected_bytes = root_counts[self.rank()]
        self._require_all(
            call,
            expected_bytes == local_tensor.nbytes,
            f"{local_tensor.nbytes} bytes, {expected_bytes} on root",
        )

    def alltoall(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,
    ) -> Work:
        """Put the tensor that each rank sends to this rank into that rank's place of the list."""
        self._require("all_to_all", inputs)
        self._require("all_to_all", outputs)
        sent = [_bytes_of(input_tensor) for input_tensor in inputs]
        counts = [output.nbytes for output in outputs]
        sizes = [sent_bytes.size for sent_bytes in sent]
        received = no_bytes(sum(counts))
        coming = np.empty(self.size(), np.int64)
        dtype = inputs[0].dtype
        with self._call("all_to_all", None):
            self._require_same("all_to_all", dtype)
            size_bytes = [coming.itemsize] * self.size()
            self._ranks.all_to_all(
                np.array(sizes).view(np.uint8),
                size_bytes,
                coming.view(np.uint8),
                size_bytes,
            )
            is_right = coming.tolist() == counts and outputs[0].dtype == dtype
            facts = f"{counts} bytes for {coming.tolist()}"
            self._require_all("all_to_all", is_right, dtype, facts)
            self._ranks.all_to_all(np.concatenate(sent), sizes, received, counts)
        deal(received, outputs)
        return _done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input_tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send rows to each rank, by default the same number to all, and receive its rows."""
        for tensor, splits, name in (
            (input_tensor, input_splits, "input"),
            (output, output_splits, "output"),
        ):
            has_wrong_sum = bool(splits) and sum(splits) != len(tensor)
            is_uneven = not splits and len(tensor) % self.size() != 0
            if has_wrong_sum or is_uneven:
                raise mismatch(
                    "all_to_all_single",
                    f"rows of the {name} that the splits divide",
                    tensor.shape,
                    list(splits),
                )
        output_rows = list(output_splits) or [len(output) // self.size()] * self.size()
        input_rows = list(input_splits) or [len(input_tensor) // self.size()] * self.size()
        with _contiguous(output) as whole:
            self.alltoall(list(whole.split(output_rows)), list(input_tensor.split(input_rows)))
        return _done([output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks of the group are here."""
        with self._call("barrier", None):
            self._require_same("barrier")
            self._ranks.barrier()
        return _done([])

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Message:
        """Start to send a tensor."""
        (tensor,) = tensors
        self._require_message("send", tensor, tag)
        title = f"send to rank {rank} with tag {tag}"
        return self._ranks.send(_bytes_of(tensor).copy(), rank, tag, title)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Message:
        """Start to receive a tensor."""
        (tensor,) = tensors
        self._require_message("recv", tensor, tag)
        source = "any rank" if rank == ANY_RANK else f"rank {rank}"
        title = f"recv from {source} with tag {tag}"
        return self._ranks.recv(tensor, rank, tag, title)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Message:
        """Start to receive a tensor from any rank."""
        return self.recv(tensors, ANY_RANK, tag)

    def _require_message(self, call: str, tensor: Tensor, tag: int) -> None:
        """Raise CollectiveError unless a tensor and a tag can be sent; on this rank."""
        _require_host(call, tensor)
        if not 0 <= tag <= self._ranks.largest_tag:
            raise mismatch(call, f"a tag from 0 to {self._ranks.largest_tag}", tag)

    def _require(
        self,
        call: str,
        parts: Sequence[Tensor],
        local_tensor: Tensor | None = None,
    ) -> None:
        """Raise CollectiveError unless there is a tensor for each rank; on this rank, before anything is sent."""
        if len(parts) != self.size():
            raise mismatch(call, f"{self.size()} tensors, one for each rank", len(parts))
        tensors = list(parts)
        if local_tensor is not None:
            tensors.append(local_tensor)
        for tensor in tensors:
            _require_host(call, tensor)
            if tensor.dtype != parts[0].dtype:
                raise mismatch(call, f"tensors of {parts[0].dtype}", tensor.dtype)


def _reduce(
    ranks: Ranks,
    call: str,
    tensor: Tensor,
    kind: Any,
    factor: Any,
    *facts: str,
) -> None:
    """Replace a tensor by its reduction. Collective over the ranks.

    Args:
        ranks: ranks that take part.
        call: name of the call, for errors.
        tensor: values of this rank; overwritten.
        kind: kind of the reduction, from `_reduction`.
        factor: number that the values are scaled by first, from `_reduction`; None for none.
        facts: what else must be the same on all ranks, such as the root.
    """
    with ranks.recorded(call, None):
        _require_same(ranks, call, kind.name, tensor.dtype, tensor.numel(), *facts)
    if factor is not None:
        tensor.detach().mul_(factor)
    with _contiguous(tensor) as whole:
        if whole.dtype == torch.bool:
            whole = whole.view(torch.uint8)
        ranks.all_reduce(whole, _OPS[kind])


def _require_same(ranks: Ranks, call: str, *facts: Any) -> None:
    """Raise DesyncError on every rank unless all give the same facts. Collective over the ranks."""
    mark = zlib.crc32(repr((call, facts)).encode())
    if not ranks.have_same(mark):
        raise _differ(call, ", ".join(map(str, facts)))


def _done(result: Any) -> Work:
    """Return the work of a call that is done."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _reduction(call: str, opts: Any, tensor: Tensor) -> tuple[Any, Any]:
    """Return the kind of a reduction, and the factor that scales values before it, or None.

    Raises:
        CollectiveError: for a reduction that values of this dtype do not have; on this rank, before anything is sent.
    """
    op = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    known_kinds = (*_OPS, _RedOp.PREMUL_SUM)
    kind = next((candidate for candidate in known_kinds if op == candidate), None)
    _require_host(call, tensor)
    if kind is None or tensor.dtype not in _REDUCIBLE_DTYPES:
        raise mismatch(
            call,
            "a reduction of bools, integers, floats or complex numbers",
            kind and kind.name,
            tensor.dtype,
        )
    if kind == _RedOp.PREMUL_SUM:
        return _RedOp.SUM, op.__getstate__()[1]
    is_exact = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if kind in _BITWISE and not is_exact:
        raise mismatch(call, "integers or bools for a bitwise reduction", tensor.dtype)
    if kind in (_RedOp.MIN, _RedOp.MAX) and tensor.dtype.is_complex:
        raise mismatch(call, "numbers that have an order", tensor.dtype)
    if kind == _RedOp.AVG and is_exact:
        raise mismatch(call, "floats for an average", tensor.dtype)
    if tensor.dtype == torch.bool:
        kind = _OF_BOOLS.get(kind, kind)
    return kind, None


def _require_host(call: str, *tensors: Tensor) -> None:
    """Raise CollectiveError for a tensor that is off the host, or not dense; on this rank."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise mismatch(call, "tensors on the host", f"one on {tensor.device}")
        if tensor.layout is not torch.strided:
            actual = f"one of layout {tensor.layout}; make its gradient dense"
            raise mismatch(call, "dense tensors", actual)


def _differ(call: str, facts: str) -> DesyncError:
    """Return the error of calls that differ between ranks, for all of them."""
    here = facts or "this call"
    error = DesyncError(
        f"{call}: expected the same call and sizes that fit on every rank, got {here} here and others elsewhere; "
        f"let all ranks make the same calls in the same order."
    )
    error.is_agreed = True
    return error


@contextlib.contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a contiguous tensor of the same values; after the block copy its values back, unless it is the same one."""
    detached = tensor.detach()
    if detached.is_contiguous() and not detached.is_conj() and not detached.is_neg():
        yield detached
        return
    whole = _resolved(detached)
    yield whole
    detached.copy_(whole)


def _resolved(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same values, in memory as they are read."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> Array:
    """Return the values of a tensor as bytes: its memory, if it is contiguous."""
    if not tensor.numel():  # which torch cannot view as bytes
        return no_bytes()
    flat_bytes: Array = _resolved(tensor.detach()).reshape(-1).view(torch.uint8).numpy()
    return flat_bytes
