"""The state of an optimizer whose elements several ranks own, whole, in memory that the ranks of a host share.

So it exists once on each host, and any rank can read all of it: what a checkpoint holds is what a plain optimizer has.
Each rank writes its share, in the optimizer's step; others read it between steps only.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.group import Group
from hpcdist.errors import UsageError
from hpcdist.plan.runs import Run
from hpcdist.program import torch_hooks
from hpcdist.program.tensors import in_memory_order
from hpcdist.storage.host_storage import allocate, cut_memory, padded, shaped_as

_PROBE_ELEMENTS = 64


class StateKey(NamedTuple):
    """What an optimizer keeps of a parameter under one name."""

    name: str
    is_elementwise: bool
    dtype: torch.dtype


def probe_state(
    make: Callable[[Any], Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> list[StateKey]:
    """Return what an optimizer keeps of a parameter, found by a step on zeros.

    Args:
        make: returns the optimizer of some groups.
        options: options of the parameter's group.
        dtype: dtype of the parameter.

    Raises:
        UsageError: when it keeps something else than tensors of the parameter's shape and numbers in tensors.
    """
    probe = torch.zeros(_PROBE_ELEMENTS, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    optimizer = make([{**options, "params": [probe]}])
    torch_hooks.bare_step(type(optimizer))(optimizer)
    keys: list[StateKey] = []
    for name, value in optimizer.state[probe].items():
        if not isinstance(value, Tensor) or value.shape not in ((_PROBE_ELEMENTS,), ()):
            raise UsageError(
                f"ZeroRedundancyOptimizer: expected an optimizer whose state is of a parameter's shape, got {name!r} "
                f"of {type(optimizer).__name__}; use a plain optimizer."
            )
        keys.append(StateKey(name, value.dim() == 1, value.dtype))
    return keys


class SharedState:
    """The state of an optimizer's parameters, by runs.

    Collective over the ranks of the host.

    Args:
        group: the ranks.
        parameters: all parameters of the optimizer.
        runs: those that are stepped as one.
        keys: for each run, what the optimizer keeps of it.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[nn.Parameter],
        runs: Sequence[Run],
        keys: Sequence[Sequence[StateKey]],
    ) -> None:
        self._parameters = parameters
        self._runs = runs
        self._keys = keys
        self._local_rank = group.node_comm.rank
        # parameter -> its run, and its place in the run
        self._run_of: dict[int, tuple[int, int]] = {}
        for number, run in enumerate(runs):
            for index, member in enumerate(run.members):
                self._run_of[member] = (number, index)
        self._allocate(group)

    def _allocate(self, group: Group) -> None:
        """Make the memory: a flag for each run and rank, and what is kept by run and key."""
        n_ranks = group.node_comm.size
        n_flags = len(self._runs) * n_ranks
        sizes = [padded(n_flags)]
        for run, keys in zip(self._runs, self._keys, strict=True):
            for key in keys:
                n_values = run.n_elements if key.is_elementwise else n_ranks
                sizes.append(padded(n_values * key.dtype.itemsize))
        flags, *memories = cut_memory(allocate(group, sum(sizes)), sizes)
        self._has_state = flags[:n_flags].view(len(self._runs), n_ranks)
        self._memory: list[dict[str, Tensor]] = []
        parts = iter(memories)
        for run, keys in zip(self._runs, self._keys, strict=True):
            named: dict[str, Tensor] = {}
            for key in keys:
                n_values = run.n_elements if key.is_elementwise else n_ranks
                named[key.name] = next(parts)[: n_values * key.dtype.itemsize].view(key.dtype)
            self._memory.append(named)

    def owns(self, number: int) -> bool:
        """Return whether this rank keeps state of a run."""
        return self._runs[number].is_owner(self._local_rank)

    def take(self, number: int, state: dict[str, Any]) -> None:
        """Move the state of this rank's share of a run here: its tensors are views of this memory afterwards."""
        start, stop = self._runs[number].owned_range(self._local_rank)
        self._require_room(number, state)
        for key in self._keys[number]:
            if key.name not in state:
                continue
            memory = self._memory[number][key.name]
            view = memory[start:stop] if key.is_elementwise else memory[self._local_rank]
            view.copy_(torch.as_tensor(state[key.name]))
            state[key.name] = view
        self._has_state[number, self._local_rank] = 1

    def _require_room(self, number: int, state: dict[str, Any]) -> None:
        """Raise UsageError for state that a first step did not show; on this rank only."""
        names = {key.name for key in self._keys[number]}
        unknown = [name for name in state if name not in names]
        if unknown:
            raise UsageError(
                f"ZeroRedundancyOptimizer: expected an optimizer that keeps {sorted(names)} of a parameter, as after "
                f"a first step, got {unknown[0]!r} too; let the first step make all of it, or use a plain optimizer."
            )

    def has(self, number: int) -> bool:
        """Return whether the state of this rank's share of a run is here."""
        return bool(self._has_state[number, self._local_rank])

    def read(self, parameter_number: int) -> dict[str, Tensor] | None:
        """Return the whole state of a parameter, without copying what is of its shape; None before its first step."""
        number, index = self._run_of[parameter_number]
        owners = self._has_state[number].nonzero()
        if not len(owners):
            return None
        first_owner = int(owners[0])
        parameter = self._parameters[parameter_number]
        start = self._runs[number].starts[index]
        state: dict[str, Tensor] = {}
        for key in self._keys[number]:
            memory = self._memory[number][key.name]
            if key.is_elementwise:
                state[key.name] = shaped_as(memory[start : start + parameter.numel()], parameter)
            else:
                state[key.name] = memory[first_owner].clone()
        return state

    def fits(self, states: dict[int, dict[str, Any]]) -> bool:
        """Return whether states, by the number of the parameter, are alike for all members of each run."""
        for number, run in enumerate(self._runs):
            members = [states.get(member) or {} for member in run.members]
            scalars = [
                key.name
                for key in self._keys[number]
                if not key.is_elementwise and key.name in members[0]
            ]
            for state in members[1:]:
                if state.keys() != members[0].keys():
                    return False
                if state and any(float(state[name]) != float(members[0][name]) for name in scalars):
                    return False
        return True

    def write(self, number: int, states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Set this rank's share of the state of a run that fits; return it, as views of this memory.

        Args:
            number: number of the run.
            states: whole states, by the number of the parameter.
        """
        self._has_state[number, self._local_rank] = 0
        run = self._runs[number]
        wholes = [states.get(member) for member in run.members]
        if not wholes[0] or not self.owns(number):
            return {}
        start, stop = run.owned_range(self._local_rank)
        state: dict[str, Any] = {}
        for key in self._keys[number]:
            if key.name not in wholes[0]:
                continue
            if key.is_elementwise:
                state[key.name] = self._flat_state(run, wholes, key.name)[start:stop]
            else:
                state[key.name] = wholes[0][key.name]
        self.take(number, state)
        return state

    def _flat_state(self, run: Run, wholes: Sequence[Any], name: str) -> Tensor:
        """Return what is kept under a name of all members of a run, flat, in the order of their memory."""
        flats: list[Tensor] = []
        for member, whole in zip(run.members, wholes, strict=True):
            laid_out = torch.empty_like(self._parameters[member], dtype=whole[name].dtype)
            flats.append(in_memory_order(laid_out.copy_(whole[name])))
        return flats[0] if len(flats) == 1 else torch.cat(flats)
