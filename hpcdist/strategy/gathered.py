"""The all-gather through which gradients flow, for losses over the rows of all ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcdist.collectives import calls, moves
from hpcdist.collectives.group import group_of
from hpcdist.runtime.mpi import MPI
from hpcdist.strategy.base import live_strategies


def all_gather(array: Any, comm: MPI.Comm | None = None) -> Any:
    """Return all ranks' arrays, joined along the first dimension in the order of the ranks.

    Collective over `comm`. Blocking. Same dtype and dimensions required on every rank, but for the first: yes.

    The gradient of a rank's rows is the sum over all ranks of the gradients that they have computed for these rows, so
    a backward through the result is collective, too. As with the gradients of parameters, each rank's loss is its share
    of the whole; with ReduceOp.MEAN all ranks must have the same number of rows.

    >>> ranks = hpcdist.all_gather(torch.tensor([strategy.rank]))
    >>> ranks.tolist() == list(range(strategy.size))
    True

    Args:
        array: (n_rows, ...) numbers or bools; n_rows may differ, and may be 0.
        comm: ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (sum of n_rows, ...) of the same kind and dtype, on every rank.

    Raises:
        CollectiveError: when ranks differ in dtype or in another dimension, or give a number; on every rank.

    Cost: every rank receives all other ranks' bytes; half precision travels as float32. The backward sums the same
        number of bytes. For floats, an all-reduce of 8 bytes finds out whether any rank needs the gradient.
    """
    if not isinstance(array, Tensor) or not (array.is_floating_point() or array.is_complex()):
        return moves.all_gather(array, comm)
    group = group_of(comm)
    has_gradient = array.requires_grad and torch.is_grad_enabled()
    if not group.world.all_reduce_int(int(has_gradient), MPI.MAX, group.comm):
        return moves.all_gather(array, comm)
    if not has_gradient:  # this rank's backward adds to the gradients of the other ranks
        array = array.detach().requires_grad_()
    with torch.enable_grad():
        return _Gathered.apply(array, comm)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: MPI.Comm | None) -> Tensor:
        ctx.comm = comm
        ctx.n_rows = len(rows)
        counts = moves.all_gather(torch.tensor([len(rows)]), comm)
        ctx.first = int(counts[: group_of(comm).rank].sum())
        joined: Tensor = moves.all_gather(rows.detach(), comm)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for strategy in live_strategies():
            strategy.sums.note_crossing()
        summed = gradient.clone(memory_format=torch.contiguous_format)
        calls.all_reduce(summed, comm=ctx.comm)
        return summed[ctx.first : ctx.first + ctx.n_rows], None
