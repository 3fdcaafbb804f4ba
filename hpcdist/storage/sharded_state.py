"""The whole state of an optimizer whose elements several ranks own, in memory that the ranks of a host share.

The state exists once on each host, and any rank can read all of it, so a checkpoint holds the state of a plain
optimizer. Each rank writes its share in the optimizer's step; other ranks read it only between steps.
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
#: State of a parameter or a run, by name.
State = dict[str, Any]


class StateKey(NamedTuple):
    """The form of an optimizer's state of a parameter under one name.

    Attributes:
        name: name of the state.
        is_elementwise: whether the state has the parameter's shape; otherwise it is a single number.
        dtype: dtype of the state.
    """

    name: str
    is_elementwise: bool
    dtype: torch.dtype


def probe_state(
    make: Callable[[Any], Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> list[StateKey]:
    """Return the keys of the state that an optimizer keeps of a parameter, found by a step on zeros.

    Args:
        make: function that returns the optimizer of some groups.
        options: options of the parameter's group.
        dtype: dtype of the parameter.

    Raises:
        UsageError: when it keeps other objects than tensors of the parameter's shape and numbers in tensors.
    """
    probe = torch.zeros(_PROBE_ELEMENTS, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    group = {**options, "params": [probe]}
    optimizer = make([group])
    torch_hooks.bare_step(type(optimizer))(optimizer)
    keys: list[StateKey] = []
    for name, value in optimizer.state[probe].items():
        has_shape = isinstance(value, Tensor) and value.shape in ((_PROBE_ELEMENTS,), ())
        if not has_shape:
            class_name = type(optimizer).__name__
            raise UsageError(
                f"ZeroRedundancyOptimizer: expected an optimizer whose state is of a parameter's shape, got {name!r} "
                f"of {class_name}; use a plain optimizer."
            )
        is_elementwise = value.dim() == 1
        key = StateKey(name, is_elementwise, value.dtype)
        keys.append(key)
    return keys


class SharedState:
    """The state of an optimizer's parameters, by runs.

    Collective over the ranks of the host.

    Args:
        group: the ranks.
        parameters: all parameters of the optimizer.
        runs: runs of parameters that are stepped as one.
        keys: for each run, the keys of the state that the optimizer keeps.
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
        #: Number of the run of each parameter, and the parameter's index in the run.
        self._run_of: dict[int, tuple[int, int]] = {}
        for number, run in enumerate(runs):
            for index, member in enumerate(run.members):
                self._run_of[member] = (number, index)
        self._allocate(group)

    def _allocate(self, group: Group) -> None:
        """Make the memory: a flag for each run and rank, and the state by run and key."""
        n_runs = len(self._runs)
        n_ranks = group.node_comm.size
        n_flags = n_runs * n_ranks
        sizes = [padded(n_flags)]
        for run, keys in zip(self._runs, self._keys, strict=True):
            for key in keys:
                sizes.append(padded(_nbytes_of(key, run, n_ranks)))
        memory = allocate(group, sum(sizes))
        flags, *state_memories = cut_memory(memory, sizes)
        self._has_state = flags[:n_flags].view(n_runs, n_ranks)
        self._memory: list[dict[str, Tensor]] = []
        next_memories = iter(state_memories)
        for run, keys in zip(self._runs, self._keys, strict=True):
            memory_of_run: dict[str, Tensor] = {}
            for key in keys:
                nbytes = _nbytes_of(key, run, n_ranks)
                padded_memory = next(next_memories)
                memory_of_run[key.name] = padded_memory[:nbytes].view(key.dtype)
            self._memory.append(memory_of_run)

    def owns(self, number: int) -> bool:
        """Return whether this rank keeps state of a run."""
        return self._runs[number].is_owner(self._local_rank)

    def take(self, number: int, state: State) -> None:
        """Move the state of this rank's share of a run here. Its tensors become views of the shared memory."""
        start, stop = self._runs[number].owned_range(self._local_rank)
        self._require_room(number, state)
        for key in self._keys[number]:
            if key.name not in state:
                continue
            memory = self._memory[number][key.name]
            view = memory[start:stop] if key.is_elementwise else memory[self._local_rank]
            value = torch.as_tensor(state[key.name])
            view.copy_(value)
            state[key.name] = view
        self._has_state[number, self._local_rank] = 1

    def _require_room(self, number: int, state: State) -> None:
        """Raise UsageError for state that a first step did not show; on this rank only."""
        names = {key.name for key in self._keys[number]}
        unknown = [name for name in state if name not in names]
        if unknown:
            raise UsageError(
                f"ZeroRedundancyOptimizer: expected an optimizer that keeps {sorted(names)} of a parameter, as after "
                f"a first step, got {unknown[0]!r} too; let the first step make all of it, or use a plain optimizer."
            )

    def has(self, number: int) -> bool:
        """Return whether the shared memory has the state of this rank's share of a run."""
        return bool(self._has_state[number, self._local_rank])

    def read(self, parameter_number: int) -> dict[str, Tensor] | None:
        """Return the whole state of a parameter, without copying tensors of its shape; None before its first step."""
        number, index = self._run_of[parameter_number]
        owners = self._has_state[number].nonzero()
        if not len(owners):
            return None
        first_owner = int(owners[0])
        parameter = self._parameters[parameter_number]
        start = self._runs[number].starts[index]
        stop = start + parameter.numel()
        state: dict[str, Tensor] = {}
        for key in self._keys[number]:
            memory = self._memory[number][key.name]
            if key.is_elementwise:
                state[key.name] = shaped_as(memory[start:stop], parameter)
            else:
                state[key.name] = memory[first_owner].clone()
        return state

    def fits(self, states: dict[int, State]) -> bool:
        """Return whether states, by the number of the parameter, are alike for all members of each run."""
        for number, run in enumerate(self._runs):
            scalar_names = [key.name for key in self._keys[number] if not key.is_elementwise]
            first_member, *other_members = run.members
            first_state = states.get(first_member) or {}
            for member in other_members:
                state = states.get(member) or {}
                if not _are_alike(first_state, state, scalar_names):
                    return False
        return True

    def write(self, number: int, states: dict[int, State]) -> State:
        """Set this rank's share of the state of a run that fits; return it, as views of the shared memory.

        Args:
            number: number of the run.
            states: whole states, by the number of the parameter.
        """
        self._has_state[number, self._local_rank] = 0
        run = self._runs[number]
        first_state = states.get(run.members[0])
        if not first_state or not self.owns(number):
            return {}
        start, stop = run.owned_range(self._local_rank)
        state: State = {}
        for key in self._keys[number]:
            if key.name not in first_state:
                continue
            if key.is_elementwise:
                flat = self._flat_state(run, states, key.name)
                state[key.name] = flat[start:stop]
            else:
                state[key.name] = first_state[key.name]
        self.take(number, state)
        return state

    def _flat_state(
        self,
        run: Run,
        states: dict[int, State],
        name: str,
    ) -> Tensor:
        """Return the state of all members of a run under a name, flat, in the order of their memory."""
        flats: list[Tensor] = []
        for member in run.members:
            value = states[member][name]
            laid_out = torch.empty_like(self._parameters[member], dtype=value.dtype)
            laid_out.copy_(value)
            flats.append(in_memory_order(laid_out))
        if len(flats) == 1:
            return flats[0]
        return torch.cat(flats)


def _nbytes_of(key: StateKey, run: Run, n_ranks: int) -> int:
    """Return the bytes of the state of a run under a key: of all elements, or one number of each rank."""
    n_values = run.n_elements if key.is_elementwise else n_ranks
    return n_values * key.dtype.itemsize


def _are_alike(
    first_state: State,
    state: State,
    scalar_names: Sequence[str],
) -> bool:
    """Return whether two states have the same names, and the same numbers under `scalar_names`."""
    if state.keys() != first_state.keys():
        return False
    common_names = [name for name in scalar_names if name in state]
    return all(float(state[name]) == float(first_state[name]) for name in common_names)
