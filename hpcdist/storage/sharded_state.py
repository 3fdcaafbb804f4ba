"""The state of an optimizer whose elements several ranks own, whole, in memory that the ranks of a host share.

So it exists once on each host, and any rank can read all of it: what a checkpoint holds is what a plain optimizer has.
Each rank writes its share, in the optimizer's step; others read it between steps only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.group import Group
from hpcdist.errors import UsageError
from hpcdist.program import torch_hooks
from hpcdist.program.tensors import in_memory_order
from hpcdist.storage.host_storage import allocate, cut_memory, padded, shaped_as

_PROBE_ELEMENTS = 64


def probe_state(
    make: Callable[[Any], Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> dict[str, tuple[bool, Any]]:
    """Return what an optimizer keeps of a parameter: key -> whether for each element, and the dtype.

    Found by a step on zeros.

    Args:
        make: returns the optimizer of some groups.
        options: of the parameter's group.
        dtype: of the parameter.

    Raises:
        UsageError: when it keeps something else than tensors of the parameter's shape and numbers in tensors.
    """
    probe = torch.zeros(_PROBE_ELEMENTS, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    optimizer = make([{**options, "params": [probe]}])
    torch_hooks.bare_step(type(optimizer))(optimizer)
    found = {}
    for key, value in optimizer.state[probe].items():
        if not isinstance(value, Tensor) or value.shape not in ((_PROBE_ELEMENTS,), ()):
            raise UsageError(
                f"ZeroRedundancyOptimizer: expected an optimizer whose state is of a parameter's shape, got {key!r} of "
                f"{type(optimizer).__name__}; use a plain optimizer."
            )
        found[key] = (value.dim() == 1, value.dtype)
    return found


class SharedState:
    """The state of some parameters, by key.

    Collective: the ranks of the host.

    Args:
        group: the ranks.
        parameters: whose state.
        keys: of each parameter, as `probe_state` returns them.
        own: of each parameter, (start, stop) of this rank's share.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[nn.Parameter],
        keys: Sequence[dict[str, tuple[bool, Any]]],
        own: Sequence[tuple[int, int]],
    ) -> None:
        self._parameters, self._keys, self._own = parameters, keys, own
        self._local_rank, n_ranks = group.node_comm.rank, group.node_comm.size
        n_values = [
            [one.numel() if is_whole else n_ranks for is_whole, _ in of.values()]
            for one, of in zip(parameters, keys, strict=True)
        ]
        sizes = [
            padded(n * dtype.itemsize)
            for counts, of in zip(n_values, keys, strict=True)
            for n, (_, dtype) in zip(counts, of.values(), strict=True)
        ]
        n_flags = padded(len(parameters) * n_ranks)
        flags, *memories = cut_memory(allocate(group, n_flags + sum(sizes)), [n_flags, *sizes])
        self._has_state = flags[: len(parameters) * n_ranks].view(len(parameters), n_ranks)
        left = iter(memories)
        self._flat: list[dict[str, Tensor]] = [
            {
                key: next(left)[: n * dtype.itemsize].view(dtype)
                for n, (key, (_, dtype)) in zip(counts, of.items(), strict=True)
            }
            for counts, of in zip(n_values, keys, strict=True)
        ]

    def take(self, number: int, state: dict[str, Any]) -> None:
        """Move the state of this rank's share of a parameter here: its tensors are views of this memory afterwards."""
        start, stop = self._own[number]
        for key, (is_whole, _) in self._keys[number].items():
            flat = self._flat[number][key]
            view = flat[start:stop] if is_whole else flat[self._local_rank]
            view.copy_(torch.as_tensor(state[key]))
            state[key] = view
        self._has_state[number, self._local_rank] = 1

    def _is_owner(self, number: int) -> bool:
        """Return whether this rank keeps state of a parameter. One without elements is the first rank's."""
        start, stop = self._own[number]
        return start < stop or (self._parameters[number].numel() == 0 and self._local_rank == 0)

    def has(self, number: int) -> bool:
        """Return whether the state of this rank's share of a parameter is here."""
        return bool(self._has_state[number, self._local_rank])

    def read(self, number: int) -> dict[str, Tensor] | None:
        """Return the whole state of a parameter, without copying what is of its shape; None before its first step."""
        owners = self._has_state[number].nonzero()
        if not len(owners):
            return None
        first = int(owners[0])
        return {
            key: shaped_as(self._flat[number][key], self._parameters[number]) if is_whole else flat[first].clone()
            for (key, (is_whole, _)), flat in zip(self._keys[number].items(), self._flat[number].values(), strict=True)
        }

    def write(self, number: int, whole: dict[str, Any] | None) -> dict[str, Tensor]:
        """Set this rank's share of a parameter's state; return it, as views of this memory."""
        self._has_state[number, self._local_rank] = 0
        start, stop = self._own[number]
        if not whole or not self._is_owner(number):
            return {}
        state = {}
        for key, (is_whole, _) in self._keys[number].items():
            if is_whole:
                target = torch.empty_like(self._parameters[number], dtype=whole[key].dtype)
                state[key] = in_memory_order(target.copy_(whole[key]))[start:stop]
            else:
                state[key] = whole[key]
        self.take(number, state)
        return state
