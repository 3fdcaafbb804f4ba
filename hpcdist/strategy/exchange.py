"""What replicas bring to a merge, made into one tensor for all of them: sum, mean, the first one's; and all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.dtypes import SUM_DTYPES, dtype_name

if TYPE_CHECKING:
    from hpcdist.strategy.base import Strategy


def sum_over_replicas(strategy: "Strategy", tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one tensor of each local replica over all replicas, in the order that gradients are added in.

    Collective: all ranks. Same shape and dtype required on every replica: yes.

    Args:
        strategy: whose replicas.
        tensors: unchanged; bool ones are or-ed.
    """
    first = tensors[0]
    rows = [tensor.detach().cpu().to(_sum_dtype(tensor)).reshape(-1).clone().numpy() for tensor in tensors]
    return _like(first, torch.from_numpy(np.asarray(strategy._sum_over_replicas(rows))))


def mean_over_replicas(strategy: "Strategy", tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of one tensor of each local replica over all replicas; see `sum_over_replicas`."""
    first = tensors[0]
    wide = [tensor.detach().to(_sum_dtype(tensor)) for tensor in tensors]
    return (sum_over_replicas(strategy, wide) / strategy.num_replicas_in_sync).to(first.dtype)


def first_of_replicas(strategy: "Strategy", tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor of replica 0, bit for bit, on every rank.

    Collective: all ranks. Same shape and dtype required on every replica: yes.

    Cost: a sum of bytes, in which all others bring zeros: strategies sum, but have no broadcast.
    """
    rows = [np.zeros(tensor.numel() * tensor.element_size(), np.uint8) for tensor in tensors]
    if strategy.own_replicas[0] == 0:
        rows[0] = _bytes_of(tensors[0])
    return _from_bytes(strategy._sum_over_replicas(rows), tensors[0])


def all_of_replicas(strategy: "Strategy", tensors: Sequence[Tensor]) -> Tensor:
    """Return (replicas, ...): the tensors of all replicas in their order, bit for bit, on every rank and on the host.

    Collective: all ranks. Same shape and dtype required on every replica: yes.
    """
    rows = np.stack([_bytes_of(tensor) for tensor in tensors])
    joined, _ = strategy._gather_over_ranks(rows, None)
    first = tensors[0].cpu()
    return _from_bytes(joined, first.new_empty((len(joined), *first.shape)))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.dtype is torch.bool:
        return torch.int64
    return getattr(torch, SUM_DTYPES.get(dtype_name(tensor), dtype_name(tensor)))  # type: ignore[no-any-return]


def _bytes_of(tensor: Tensor) -> Any:
    if tensor.numel() == 0:  # which torch does not view as bytes
        return np.zeros(0, np.uint8)
    return tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8).numpy()


def _from_bytes(flat: Any, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return like.clone()
    tensor = torch.from_numpy(np.array(flat).reshape(-1)).view(like.dtype)
    return tensor.reshape(like.shape).to(like.device)


def _like(like: Tensor, flat: Tensor) -> Tensor:
    return flat.reshape(like.shape).to(like.device, like.dtype)
