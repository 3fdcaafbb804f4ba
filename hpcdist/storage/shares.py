"""One rank's share of an optimizer's parameters and gradients: stepped, clipped, saved and loaded.

`storage/zero_redundancy.py` has the optimizer that the program sees. Parameters that lie one after another in the
memory of a host are stepped as one, see `plan/runs.py`: that takes a few calls where a plain optimizer makes hundreds.
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
from hpcdist.storage.sharded_state import SharedState, StateKey, probe_state

#: Groups of an optimizer: options, and "params".
Groups = list[dict[str, Any]]
#: Whole states, by the number of the parameter.
States = dict[int, dict[str, Any]]


class OwnedShare(Protocol):
    """What is to be known of a parameter whose gradient is summed by shares.

    Attributes:
        name: name of the parameter.
        reference: a weak reference to the parameter.
        owned_range: (start, stop) of this rank's share in the parameter's memory.
        ranges: those of all owners.
    """

    name: str
    reference: Callable[[], nn.Parameter | None]
    owned_range: tuple[int, int]
    ranges: Sequence[tuple[int, int]]

    @property
    def bucket(self) -> int:
        """Number of the bucket of the gradient."""

    @property
    def has_local(self) -> bool:
        """Whether `parameter.grad` is this replica's own, accumulated under no_sync."""


class _Gradient(NamedTuple):
    """Shares of gradients that lie one after another, and a flat view of all of them."""

    shares: list[Tensor]
    flat: Tensor


class Shares:
    """This rank's share of an optimizer's parameters, and the plain optimizer that steps it.

    Args:
        groups: groups of the optimizer that the program made: parameters and options.
        make: returns a plain optimizer of such groups, hidden from the strategy.
        slots: slots of the parameters; None for one that is not trained.
        group: the ranks that own the shares. Collective over the ranks of the host.
        joins: whether parameters are stepped as one where they can be.
        states: whole states, by the number of the parameter, for which there must be room: an optimizer keeps what
            options that are off now have made.

    Attributes:
        group: the ranks.
        slots: slots of the parameters.
        joins: whether parameters are stepped as one where they can be.
        pattern: which options are on, by which the optimizer keeps more or less state.
    """

    def __init__(
        self,
        groups: Groups,
        make: Callable[[Groups], Optimizer],
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
        self._group_of: list[int] = []  # of each parameter
        for number, options in enumerate(groups):
            self._parameters += options["params"]
            self._group_of += [number] * len(options["params"])
        self._ranges = [
            _owned_range(parameter, slot, self._local_rank)
            for parameter, slot in self._with_slots()
        ]
        self._runs = plan_runs(self._places(), joins)
        self._pieces = [self._piece_of(run) for run in self._runs]
        self._inner = self._make_inner(groups, make)
        self._probed: dict[tuple[int, torch.dtype], list[StateKey]] = {}  # by group and dtype
        keys = [self._keys_of(run, groups, make, states) for run in self._runs]
        self._state = SharedState(group, self._parameters, self._runs, keys)
        self._gradients: list[list[_Gradient]] = [[] for _ in self._runs]  # of the last two sums
        self._n_states = 0
        self._views: list[tuple[dict[str, Any], str, Tensor]] = []
        if self._inner is not None and self._inner.state:  # as that of Adagrad
            self._share_state(self._inner)
        self.wait()  # so that every rank may read all of it

    # -- the plan ---------------------------------------------------------------------------------------------------

    def _with_slots(self) -> list[tuple[nn.Parameter, OwnedShare | None]]:
        return list(zip(self._parameters, self.slots, strict=True))

    def _places(self) -> list[Place]:
        """Return what decides which parameters are stepped as one."""
        places: list[Place] = []
        windows: dict[int, int] = {}  # pieces of memory, in the order in which all ranks meet them
        for number, (parameter, slot) in enumerate(self._with_slots()):
            kind: tuple[int, str, int, int] | None = None
            ranges: Sequence[tuple[int, int]] = ((0, parameter.numel()),)
            if slot is not None:
                window = windows.setdefault(parameter.untyped_storage().data_ptr(), len(windows))
                kind = (self._group_of[number], str(parameter.dtype), slot.bucket, window)
                ranges = slot.ranges
            item_bytes = parameter.element_size()
            places.append(Place(kind, parameter.data_ptr(), parameter.numel(), item_bytes, ranges))
        return places

    def _piece_of(self, run: Run) -> Tensor | None:
        """Return this rank's share of a run, flat, in the memory of its parameters; None without one."""
        if not run.is_owner(self._local_rank):
            return None
        start, stop = run.owned_range(self._local_rank)
        first = self._parameters[run.members[0]].data
        return first.as_strided((stop - start,), (1,), first.storage_offset() + start)

    def _make_inner(self, groups: Groups, make: Callable[[Groups], Optimizer]) -> Optimizer | None:
        """Return the plain optimizer of this rank's pieces; None if it has none."""
        inner_groups: Groups = []
        for options in groups:
            inner_groups.append({**without_parameters(options), "params": []})
        for run, piece in zip(self._runs, self._pieces, strict=True):
            if piece is not None:
                inner_groups[self._group_of[run.members[0]]]["params"].append(piece)
        if not any(options["params"] for options in inner_groups):
            return None
        return make(inner_groups)

    def _keys_of(
        self,
        run: Run,
        groups: Groups,
        make: Callable[[Groups], Optimizer],
        states: States,
    ) -> list[StateKey]:
        """Return what the optimizer keeps of a run."""
        first = self._parameters[run.members[0]]
        number = self._group_of[run.members[0]]
        if (number, first.dtype) not in self._probed:
            self._probed[number, first.dtype] = probe_state(
                make, without_parameters(groups[number]), first.dtype
            )
        keys = list(self._probed[number, first.dtype])
        names = {key.name for key in keys}
        for name, value in states.get(run.members[0], {}).items():
            if name not in names and isinstance(value, Tensor):
                keys.append(StateKey(name, value.shape == first.shape, value.dtype))
        return keys

    def wait(self) -> None:
        """Wait for the other ranks of the host. Collective over them."""
        with self.group.recorded("shares of an optimizer", None):
            self.group.barrier.wait()

    # -- a step -----------------------------------------------------------------------------------------------------

    def has_mixed_run(self) -> bool:
        """Return whether some parameters that are stepped as one have a gradient, and others have none.

        The same on all ranks, as a backward leaves gradients on all or none.
        """
        for run in self._runs:
            if len(run.members) > 1:
                n_gradients = sum(
                    self._parameters[member].grad is not None for member in run.members
                )
                if 0 < n_gradients < len(run.members):
                    return True
        return False

    def step(self, groups: Groups) -> None:
        """Step this rank's share, with the options that the groups have now."""
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
            share = self._share_of_gradient(member) if start < stop else None
            if share is not None:
                shares.append(share)
        if len(shares) < 2:
            return shares[0] if shares else None
        for joined in self._gradients[number]:
            if len(joined.shares) == len(shares) and all(map(operator.is_, joined.shares, shares)):
                return joined.flat
        flat = _view_over(shares)
        if flat is None:
            return torch.cat(shares)
        self._gradients[number] = [*self._gradients[number][-1:], _Gradient(shares, flat)]
        return flat

    def _share_of_gradient(self, number: int) -> Tensor | None:
        """Return this rank's elements of a gradient, by shares or, if the program has summed it, whole."""
        gradient = self._parameters[number].grad
        if gradient is None:
            return None
        if isinstance(gradient, ShardedGradient):
            return gradient.share
        start, stop = self._ranges[number]
        return flat_gradient(self._parameters[number], gradient)[start:stop]

    def _share_state(self, inner: Optimizer) -> None:
        """Keep state in the shared memory: that of first steps, and what the optimizer has put elsewhere since."""
        n_states = sum(map(bool, inner.state.values()))
        if n_states != self._n_states:
            for number, piece in enumerate(self._pieces):
                if piece is not None and inner.state.get(piece) and not self._state.has(number):
                    state = inner.state[piece]
                    self._state.take(number, state)
                    self._remember_views(state)
            self._n_states = n_states
        for state, key, view in self._views:
            if state[key] is not view:
                view.copy_(state[key])
                state[key] = view

    def _remember_views(self, state: dict[str, Any]) -> None:
        for key, view in state.items():
            self._views.append((state, key, view))

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """Return what this rank has of each gradient, to be changed in place: its share, or all of a whole one."""
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
        """Raise GradientError for gradients of this replica alone, which all ranks have after no_sync."""
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
            shares.append((start, self._share_of_gradient(number)))
        blocks = blocks_of(self._parameters, shares, order)
        # one host has all of them
        own_blocks = blocks if self.group.host == 0 else np.zeros_like(blocks)
        with self.group.recorded("norms of gradients", own_blocks):
            library.all_reduce(own_blocks, self.group)
        return norm_of_blocks(own_blocks, order)

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
        """Return whether a whole state can be taken: it is alike for parameters that are stepped as one."""
        return self._state.fits(states)

    def write(self, states: States) -> None:
        """Take the whole state, which fits, by the numbers of the parameters. Collective over the ranks of the host."""
        self.wait()  # another rank may still read
        self._views = []
        for number, piece in enumerate(self._pieces):
            state = self._state.write(number, states)
            if self._inner is not None and piece is not None:
                self._inner.state.pop(piece, None)
                if state:
                    self._inner.state[piece] = state
                    self._remember_views(state)
        self._n_states = 0 if self._inner is None else sum(map(bool, self._inner.state.values()))
        self.wait()  # so that every rank may read all of it


def pattern_of(groups: Groups) -> list[list[bool]]:
    """Return which options of each group are on: a momentum of 0 keeps no state, and any other does."""
    pattern: list[list[bool]] = []
    for group in groups:
        pattern.append([bool(value) for key, value in group.items() if key not in ("params", "lr")])
    return pattern


def flat_gradient(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return a whole gradient as a flat tensor in the order of its parameter's memory."""
    if not is_dense(parameter) or gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return in_memory_order(gradient)


def without_parameters(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group."""
    return {key: value for key, value in options.items() if key != "params"}


def _owned_range(
    parameter: nn.Parameter, slot: OwnedShare | None, local_rank: int
) -> tuple[int, int]:
    """Return (start, stop) of this rank's share of a parameter; one that is not trained is the first rank's."""
    if slot is not None:
        return slot.owned_range
    return (0, parameter.numel() if local_rank == 0 else 0)


def _view_over(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view over flat tensors that lie one after another in one memory; None if they do not."""
    first = parts[0]
    storage_address = first.untyped_storage().data_ptr()
    address = first.data_ptr()
    n_elements = 0
    for part in parts:
        is_next = (
            part.data_ptr() == address and part.untyped_storage().data_ptr() == storage_address
        )
        if not is_next or part.dtype != first.dtype:
            return None
        address += part.nbytes
        n_elements += part.numel()
    return first.as_strided((n_elements,), (1,), first.storage_offset())


def blocks_of(
    parameters: Sequence[nn.Parameter], shares: Sequence[tuple[int, Tensor | None]], order: float
) -> npt.NDArray[Any]:
    """Return a float64 for each block of all gradients: its largest magnitude, or the sum of powers of magnitudes.

    Blocks begin at the same elements on any number of ranks, and each is one rank's: a sum of them is always the same.

    Args:
        parameters: all parameters.
        shares: for each, where this rank's share begins, and its gradient there, flat; None without one.
        order: order of the norm; may be infinite.
    """
    n_blocks = [-(-parameter.numel() // BLOCK_ELEMENTS) for parameter in parameters]
    blocks = np.zeros(sum(n_blocks))
    first_block = 0
    for count, (start, gradient) in zip(n_blocks, shares, strict=True):
        if gradient is not None and gradient.numel():
            values = _values_of_blocks(gradient, order)
            offset = first_block + start // BLOCK_ELEMENTS
            blocks[offset : offset + len(values)] = values
        first_block += count
    return blocks


def _values_of_blocks(gradient: Tensor, order: float) -> npt.NDArray[Any]:
    magnitudes = np.abs(gradient.detach().double().cpu().numpy())
    n_blocks = -(-len(magnitudes) // BLOCK_ELEMENTS)
    padded_magnitudes = np.zeros((n_blocks, BLOCK_ELEMENTS))
    padded_magnitudes.reshape(-1)[: len(magnitudes)] = magnitudes
    if order == np.inf:
        return np.asarray(padded_magnitudes.max(1))
    return np.asarray((padded_magnitudes**order).sum(1))


def norm_of_blocks(blocks: npt.NDArray[Any], order: float) -> float:
    """Return the norm of all gradients from the values of their blocks."""
    if order == np.inf:
        return float(blocks.max(initial=0.0))
    return float(blocks.sum() ** (1 / order))
