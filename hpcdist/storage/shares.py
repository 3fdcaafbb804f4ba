"""One rank's share of an optimizer's parameters and gradients: stepped, clipped, saved and loaded.

`storage/zero_redundancy.py` has the optimizer that the program sees. Parameters that lie side by side in the memory of
a host are stepped as one, see `plan/runs.py`: this takes a few calls where a plain optimizer makes hundreds.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives import library
from hpcdist.collectives.group import Group
from hpcdist.errors import GradientError
from hpcdist.plan.runs import Place, Run, plan_runs
from hpcdist.plan.shards import BLOCK_ELEMENTS
from hpcdist.program import torch_hooks
from hpcdist.program.tensors import in_memory_order, is_dense
from hpcdist.storage.sharded_gradient import ShardedGradient
from hpcdist.storage.sharded_state import SharedState, State, StateKey, probe_state

#: Groups of an optimizer: options, and "params".
Groups = list[dict[str, Any]]
#: Returns a plain optimizer of groups, hidden from the strategy.
MakeOptimizer = Callable[[Groups], Optimizer]
#: Whole states, by the number of the parameter.
States = dict[int, State]
#: (start, stop) of elements.
Range = tuple[int, int]
#: A float64 for each block of gradients, from which their norm is calculated.
Blocks = npt.NDArray[Any]


class OwnedShare(Protocol):
    """The facts of a parameter whose gradient is summed by shares.

    Attributes:
        name: name of the parameter.
        reference: a weak reference to the parameter.
        owned_range: (start, stop) of this rank's share in the parameter's memory.
        ranges: (start, stop) of each owner's share.
    """

    name: str
    reference: Callable[[], nn.Parameter | None]
    owned_range: Range
    ranges: Sequence[Range]

    @property
    def bucket(self) -> int:
        """Number of the bucket of the gradient."""

    @property
    def has_local(self) -> bool:
        """Whether `parameter.grad` is a gradient of this replica only, accumulated under no_sync."""


class _Gradient(NamedTuple):
    """Shares of gradients that lie side by side, and a flat view over all of them."""

    shares: list[Tensor]
    flat: Tensor


class Shares:
    """This rank's share of an optimizer's parameters, and the plain optimizer that steps it.

    Args:
        groups: groups of the optimizer that the program made: parameters and options.
        make: function that returns a plain optimizer of such groups, hidden from the strategy.
        slots: slots of the parameters; None for a parameter that is not trained.
        group: the ranks that own the shares. Collective over the ranks of the host.
        joins: whether parameters are stepped as one where possible.
        states: whole states, by the number of the parameter, for which there must be room: an optimizer keeps state
            that was made by options which are off now.

    Attributes:
        group: the ranks.
        slots: slots of the parameters.
        joins: whether parameters are stepped as one where possible.
        pattern: flags of the options that are on, by which the optimizer keeps more or less state.
    """

    def __init__(
        self,
        groups: Groups,
        make: MakeOptimizer,
        slots: Sequence[OwnedShare | None],
        group: Group,
        joins: bool,
        states: States,
    ) -> None:
        self.group = group
        self.slots = slots
        self.joins = joins
        self.pattern = pattern_of(groups)
        self._local_rank = group.node_comm.rank
        self._parameters: list[nn.Parameter] = []
        self._group_of: list[int] = []  # number of each parameter's group
        for number, options in enumerate(groups):
            parameters = options["params"]
            self._parameters += parameters
            self._group_of += [number] * len(parameters)
        self._ranges: list[Range] = []
        for parameter, slot in self._with_slots():
            owned_range = _owned_range(parameter, slot, self._local_rank)
            self._ranges.append(owned_range)
        self._runs = plan_runs(self._places(), joins)
        self._pieces = list(map(self._piece_of, self._runs))
        self._inner = self._make_inner(groups, make)
        #: Keys of the state that was found by a probe, by group and dtype.
        self._probed: dict[tuple[int, torch.dtype], list[StateKey]] = {}
        keys: list[list[StateKey]] = []
        for run in self._runs:
            keys.append(self._keys_of(run, groups, make, states))
        self._state = SharedState(group, self._parameters, self._runs, keys)
        #: For each run, views over the gradients of the last two sums.
        self._gradients: list[list[_Gradient]] = [[] for _ in self._runs]
        self._n_states = 0
        self._views: list[tuple[State, str, Tensor]] = []
        if self._inner is not None and self._inner.state:  # made before a first step, as by Adagrad
            self._share_state(self._inner)
        self.wait()  # so that every rank may read all of the state

    # -- the plan ---------------------------------------------------------------------------------------------------

    def _with_slots(self) -> list[tuple[nn.Parameter, OwnedShare | None]]:
        """Return the parameters with their slots."""
        return list(zip(self._parameters, self.slots, strict=True))

    def _places(self) -> list[Place]:
        """Return the place of each parameter, by which `plan_runs` decides which parameters are stepped as one."""
        places: list[Place] = []
        windows: dict[int, int] = {}  # pieces of memory, in the order in which all ranks meet them
        for number, (parameter, slot) in enumerate(self._with_slots()):
            kind: tuple[int, str, int, int] | None = None
            n_elements = parameter.numel()
            ranges: Sequence[Range] = ((0, n_elements),)
            if slot is not None:
                storage_address = parameter.untyped_storage().data_ptr()
                window = windows.setdefault(storage_address, len(windows))
                group_number = self._group_of[number]
                kind = (group_number, str(parameter.dtype), slot.bucket, window)
                ranges = slot.ranges
            place = Place(
                kind=kind,
                address=parameter.data_ptr(),
                n_elements=n_elements,
                item_bytes=parameter.element_size(),
                ranges=ranges,
            )
            places.append(place)
        return places

    def _piece_of(self, run: Run) -> Tensor | None:
        """Return this rank's share of a run, flat, in the memory of its parameters; None without one."""
        if not run.is_owner(self._local_rank):
            return None
        start, stop = run.owned_range(self._local_rank)
        first_member = self._parameters[run.members[0]].data
        offset = first_member.storage_offset() + start
        return first_member.as_strided((stop - start,), (1,), offset)

    def _make_inner(
        self,
        groups: Groups,
        make: MakeOptimizer,
    ) -> Optimizer | None:
        """Return the plain optimizer of this rank's pieces; None if it has none."""
        inner_groups: Groups = []
        for options in groups:
            inner_groups.append({**without_parameters(options), "params": []})
        for run, piece in zip(self._runs, self._pieces, strict=True):
            if piece is not None:
                number = self._group_of[run.members[0]]
                inner_groups[number]["params"].append(piece)
        if not any(options["params"] for options in inner_groups):
            return None
        return make(inner_groups)

    def _keys_of(
        self,
        run: Run,
        groups: Groups,
        make: MakeOptimizer,
        states: States,
    ) -> list[StateKey]:
        """Return the keys of the state that the optimizer keeps of a run."""
        first_number = run.members[0]
        first_member = self._parameters[first_number]
        dtype = first_member.dtype
        group_number = self._group_of[first_number]
        if (group_number, dtype) not in self._probed:
            options = without_parameters(groups[group_number])
            self._probed[group_number, dtype] = probe_state(make, options, dtype)
        keys = list(self._probed[group_number, dtype])
        names = {key.name for key in keys}
        for name, value in states.get(first_number, {}).items():
            if name not in names and isinstance(value, Tensor):
                is_elementwise = value.shape == first_member.shape
                keys.append(StateKey(name, is_elementwise, value.dtype))
        return keys

    def wait(self) -> None:
        """Wait for the other ranks of the host. Collective over the ranks of the host."""
        with self.group.recorded("shares of an optimizer", None):
            self.group.barrier.wait()

    # -- a step -----------------------------------------------------------------------------------------------------

    def has_mixed_run(self) -> bool:
        """Return whether a run has parameters with a gradient, and parameters without one.

        The same on all ranks, as a backward leaves a gradient on all ranks or on none.
        """
        parameters = self._parameters
        for run in self._runs:
            n_members = len(run.members)
            if n_members > 1:
                n_gradients = sum(parameters[member].grad is not None for member in run.members)
                if 0 < n_gradients < n_members:
                    return True
        return False

    def step(self, groups: Groups) -> None:
        """Step this rank's share, with the present options of the groups."""
        inner = self._inner
        if inner is None:
            return
        for options, inner_options in zip(groups, inner.param_groups, strict=True):
            inner_options.update(without_parameters(options))
        for number, piece in enumerate(self._pieces):
            if piece is not None:
                piece.grad = self._gradient_of(number)
        torch_hooks.bare_step(type(inner))(inner)
        for piece in self._pieces:
            if piece is not None:
                piece.grad = None  # so that zero_grad frees it
        self._share_state(inner)

    def _gradient_of(self, number: int) -> Tensor | None:
        """Return this rank's share of the gradient of a run, flat; None without a gradient."""
        run = self._runs[number]
        if len(run.members) == 1:
            return self._share_of_gradient(run.members[0])
        shares: list[Tensor] = []
        for member in run.members:
            start, stop = self._ranges[member]
            if start < stop:
                share = self._share_of_gradient(member)
                if share is not None:
                    shares.append(share)
        if not shares:
            return None
        if len(shares) == 1:
            return shares[0]
        earlier_gradients = self._gradients[number]
        for earlier in earlier_gradients:
            has_same_length = len(earlier.shares) == len(shares)
            if has_same_length and all(map(operator.is_, earlier.shares, shares)):
                return earlier.flat
        flat = _view_over(shares)
        if flat is None:
            return torch.cat(shares)
        joined = _Gradient(shares, flat)
        self._gradients[number] = [*earlier_gradients[-1:], joined]
        return flat

    def _share_of_gradient(self, number: int) -> Tensor | None:
        """Return this rank's elements of a gradient, which is a share or, if the program has summed it, whole."""
        parameter = self._parameters[number]
        gradient = parameter.grad
        if gradient is None:
            return None
        if isinstance(gradient, ShardedGradient):
            return gradient.share
        start, stop = self._ranges[number]
        return flat_gradient(parameter, gradient)[start:stop]

    def _share_state(self, inner: Optimizer) -> None:
        """Move state to the shared memory: of first steps, and state that the optimizer has since put elsewhere."""
        n_states = sum(map(bool, inner.state.values()))
        if n_states != self._n_states:
            for number, piece in enumerate(self._pieces):
                if piece is None:
                    continue
                run_state = inner.state.get(piece)
                if run_state and not self._state.has(number):
                    self._state.take(number, run_state)
                    self._remember_views(run_state)
            self._n_states = n_states
        for state, key, view in self._views:
            if state[key] is not view:
                view.copy_(state[key])
                state[key] = view

    def _remember_views(self, state: State) -> None:
        for key, view in state.items():
            self._views.append((state, key, view))

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Return this rank's share of each gradient, or all of a whole gradient, to be changed in place."""
        self._require_no_local()
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if isinstance(gradient, ShardedGradient):
                gradients.append(gradient.share)
            elif gradient is not None:
                gradients.append(gradient)
        return gradients

    def _require_no_local(self) -> None:
        """Raise GradientError for gradients of this replica only, which all ranks have after no_sync."""
        for slot in self.slots:
            if slot is not None and slot.has_local:
                raise GradientError(
                    f"ZeroRedundancyOptimizer: expected gradients summed over the replicas, got a local one in "
                    f"{slot.name!r}; run the last backward outside no_sync."
                )

    def norm(self, order: float) -> float:
        """Return the norm of all gradients, the same on any number of ranks. Collective over the group."""
        self._require_no_local()
        shares: list[tuple[int, Tensor | None]] = []
        for number, (start, _) in enumerate(self._ranges):
            share = self._share_of_gradient(number)
            shares.append((start, share))
        blocks = blocks_of(self._parameters, shares, order)
        if self.group.host != 0:  # the first host has all blocks
            blocks = np.zeros_like(blocks)
        with self.group.recorded("norms of gradients", blocks):
            library.all_reduce(blocks, self.group)
        return norm_of_blocks(blocks, order)

    # -- state ------------------------------------------------------------------------------------------------------

    def read(self) -> States:
        """Return the whole state by the numbers of the parameters."""
        states: States = {}
        for number in range(len(self._parameters)):
            state = self._state.read(number)
            if state:
                states[number] = state
        return states

    def fits(self, states: States) -> bool:
        """Return whether a whole state can be taken, as it is alike for parameters that are stepped as one."""
        return self._state.fits(states)

    def write(self, states: States) -> None:
        """Take a whole state that fits, by the numbers of the parameters. Collective over the ranks of the host."""
        self.wait()  # another rank may still read
        self._views = []
        for number, piece in enumerate(self._pieces):
            state = self._state.write(number, states)
            if self._inner is not None and piece is not None:
                self._inner.state.pop(piece, None)
                if state:
                    self._inner.state[piece] = state
                    self._remember_views(state)
        self._n_states = 0
        if self._inner is not None:
            self._n_states = sum(map(bool, self._inner.state.values()))
        self.wait()  # so that every rank may read all of the state


def pattern_of(groups: Groups) -> list[list[bool]]:
    """Return flags of the options of each group that are on. A momentum of 0 keeps no state, any other does."""
    pattern: list[list[bool]] = []
    for group in groups:
        flags = [bool(value) for key, value in group.items() if key not in ("params", "lr")]
        pattern.append(flags)
    return pattern


def flat_gradient(
    parameter: nn.Parameter,
    gradient: Tensor,
) -> Tensor:
    """Return a whole gradient as a flat tensor in the order of its parameter's memory."""
    if not is_dense(parameter) or gradient.stride() != parameter.stride():
        laid_out = torch.empty_like(parameter, dtype=gradient.dtype)
        gradient = laid_out.copy_(gradient)
    return in_memory_order(gradient)


def without_parameters(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    return {key: value for key, value in options.items() if key != "params"}


def _owned_range(
    parameter: nn.Parameter,
    slot: OwnedShare | None,
    local_rank: int,
) -> Range:
    """Return (start, stop) of this rank's share of a parameter. The first rank owns parameters that are not trained."""
    if slot is not None:
        return slot.owned_range
    if local_rank == 0:
        return 0, parameter.numel()
    return 0, 0


def _view_over(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view over flat tensors that lie side by side in one memory; None if they do not."""
    first_part = parts[0]
    storage_address = first_part.untyped_storage().data_ptr()
    next_address = first_part.data_ptr()
    n_elements = 0
    for part in parts:
        if part.data_ptr() != next_address or part.dtype != first_part.dtype:
            return None
        if part.untyped_storage().data_ptr() != storage_address:
            return None
        next_address += part.nbytes
        n_elements += part.numel()
    return first_part.as_strided((n_elements,), (1,), first_part.storage_offset())


def blocks_of(
    parameters: Sequence[nn.Parameter],
    shares: Sequence[tuple[int, Tensor | None]],
    order: float,
) -> Blocks:
    """Return a float64 for each block of all gradients: its largest magnitude, or the sum of powers of magnitudes.

    Blocks begin at the same elements on any number of ranks, and one rank owns each, so their sum is always the same.

    Args:
        parameters: all parameters.
        shares: for each parameter, the start of this rank's share, and the flat gradient of the share; None without
            one.
        order: order of the norm; may be infinite.
    """
    block_counts = [-(-parameter.numel() // BLOCK_ELEMENTS) for parameter in parameters]
    blocks = np.zeros(sum(block_counts))
    first_block = 0
    for n_blocks, (start, gradient) in zip(block_counts, shares, strict=True):
        if gradient is not None and gradient.numel():
            values = _values_of_blocks(gradient, order)
            offset = first_block + start // BLOCK_ELEMENTS
            blocks[offset : offset + len(values)] = values
        first_block += n_blocks
    return blocks


def _values_of_blocks(gradient: Tensor, order: float) -> Blocks:
    """Return the values of the blocks of one share."""
    elements = gradient.detach().double().cpu().numpy()
    magnitudes = np.abs(elements)
    n_blocks = -(-len(magnitudes) // BLOCK_ELEMENTS)
    padded_magnitudes = np.zeros((n_blocks, BLOCK_ELEMENTS))
    padded_magnitudes.reshape(-1)[: len(magnitudes)] = magnitudes
    if order == np.inf:
        return np.asarray(padded_magnitudes.max(1))
    powers = padded_magnitudes**order
    return np.asarray(powers.sum(1))


def norm_of_blocks(blocks: Blocks, order: float) -> float:
    """Return the norm of all gradients from the values of their blocks."""
    if order == np.inf:
        return float(blocks.max(initial=0.0))
    total = blocks.sum()
    return float(total ** (1 / order))
