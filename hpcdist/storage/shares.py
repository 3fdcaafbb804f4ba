"""One rank's share of an optimizer's parameters and gradients: stepped, clipped, saved and loaded.

See `storage/zero_redundancy.py`, whose optimizer is the program's front of it.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives import library
from hpcdist.collectives.group import Group
from hpcdist.errors import GradientError
from hpcdist.plan.shards import BLOCK_ELEMENTS
from hpcdist.program import torch_hooks
from hpcdist.program.tensors import in_memory_order
from hpcdist.storage.sharded_gradient import ShardedGradient
from hpcdist.storage.sharded_state import SharedState, probe_state

#: Groups of an optimizer: options, and "params".
Groups = list[dict[str, Any]]


class OwnedShare(Protocol):
    """What is to be known of a parameter whose gradient is summed by shares.

    Attributes:
        name: name of the parameter.
        reference: a weak reference to the parameter.
        owned_range: (start, stop) of this rank's share in the parameter's memory.
    """

    name: str
    reference: "weakref.ref[nn.Parameter]"
    owned_range: tuple[int, int]

    @property
    def has_local(self) -> bool:
        """Whether `parameter.grad` is this replica's own, accumulated under no_sync."""


class Shares:
    """This rank's share of an optimizer's parameters, and the optimizer that steps it.

    Args:
        groups: of the optimizer that the program made: parameters and options.
        make: returns a plain optimizer of such groups, hidden from the strategy.
        slots: of the parameters; None for one that is not trained; nothing without a group.
        group: the ranks; None: this one alone, whose share is everything.

    Attributes:
        slots, group: see above.
        pattern: of the options that say which state there is.
    """

    def __init__(
        self,
        groups: Groups,
        make: Callable[[Groups], Optimizer],
        slots: Sequence[OwnedShare | None],
        group: Group | None,
    ) -> None:
        self.group, self.slots = group, slots
        self.pattern = pattern_of(groups)
        self._parameters: list[nn.Parameter] = [one for given in groups for one in given["params"]]
        is_first = group is None or group.node_comm.rank == 0
        whole = [(0, one.numel() * is_first) for one in self._parameters]  # of what is not trained, too
        self._own = [own if slot is None else slot.owned_range for own, slot in zip_longest(whole, slots)]
        self._mine: list[Tensor | None] = []
        for parameter, owned_range in zip(self._parameters, self._own, strict=True):
            self._mine.append(parameter if group is None else _owned_slice(parameter, owned_range, is_first))
        options = [{key: value for key, value in given.items() if key != "params"} for given in groups]
        numbers = iter(self._mine)
        shares = [[next(numbers) for _ in given["params"]] for given in groups]
        inner_groups = [
            {**own, "params": [one for one in part if one is not None]}
            for own, part in zip(options, shares, strict=True)
        ]
        has_any = any(one["params"] for one in inner_groups)
        self._inner: Optimizer | None = make(inner_groups) if has_any else None
        self._state: SharedState | None = None
        if group is not None:
            keys = []
            for own, given in zip(options, groups, strict=True):
                dtypes = {one.dtype for one in given["params"]}
                found = {dtype: probe_state(make, own, dtype) for dtype in dtypes}
                keys += [found[one.dtype] for one in given["params"]]
            self._state = SharedState(group, self._parameters, keys, self._own)
        self._n_states = 0
        self._views: list[tuple[dict[str, Any], str, Tensor]] = []
        if self._inner is not None and self._inner.state:  # as that of Adagrad
            self._share_state(self._inner)

    def wait(self) -> None:
        """Wait for the other ranks of the host. Collective: they."""
        if self.group is not None:
            with self.group.recorded("shares of an optimizer", None):
                self.group.barrier.wait()

    def step(self, groups: Groups) -> None:
        """Step this rank's share, with the options that the groups have now."""
        if self._inner is None:
            return
        step = torch_hooks.bare_step(type(self._inner))
        for given, own in zip(groups, self._inner.param_groups, strict=True):
            own.update({key: value for key, value in given.items() if key != "params"})
        if self.group is None:
            step(self._inner)
            return
        for number, mine in enumerate(self._mine):
            if mine is not None:
                mine.grad = self._share_of_gradient(number)
        step(self._inner)
        for mine in self._mine:
            if mine is not None:
                mine.grad = None  # so that zero_grad frees it
        self._share_state(self._inner)

    def _share_of_gradient(self, number: int) -> Tensor | None:
        """Return this rank's elements of a gradient, by shares or, if the program has summed it, whole."""
        gradient = self._parameters[number].grad
        if gradient is None:
            return None
        if isinstance(gradient, ShardedGradient):
            return gradient.share
        start, stop = self._own[number]
        laid_out = torch.empty_like(self._parameters[number], dtype=gradient.dtype)
        is_alike = gradient.stride() == laid_out.stride()
        return in_memory_order(gradient if is_alike else laid_out.copy_(gradient))[start:stop]

    def _require_no_local(self) -> None:
        """Raise GradientError for gradients of this replica alone, which all ranks have after no_sync."""
        for slot in self.slots:
            if slot is not None and slot.has_local:
                raise GradientError(
                    f"ZeroRedundancyOptimizer: expected gradients summed over the replicas, got a local one in "
                    f"{slot.name!r}; run the last backward outside no_sync."
                )

    def _share_state(self, inner: Optimizer) -> None:
        """Keep state in the shared memory: that of first steps, and what the optimizer has put elsewhere since."""
        if self._state is None:
            return
        if len(inner.state) != self._n_states:
            for number, mine in enumerate(self._mine):
                if mine is not None and inner.state.get(mine) and not self._state.has(number):
                    state = inner.state[mine]
                    self._state.take(number, state)
                    self._views += [(state, key, value) for key, value in state.items()]
            self._n_states = len(inner.state)
        for state, key, view in self._views:
            if state[key] is not view:
                view.copy_(state[key])
                state[key] = view

    def gradients(self) -> list[Tensor]:
        """Return what this rank has of each gradient, to be changed in place: its share, or all of a whole one."""
        found = [one.grad for one in self._parameters]
        self._require_no_local()
        return [one.share if isinstance(one, ShardedGradient) else one for one in found if one is not None]

    def norm(self, order: float) -> float:
        """Return the norm of all gradients. Collective: the group.

        Of blocks that begin at the same places on any number of ranks, each summed by one rank; then of all in order.
        """
        self._require_no_local()
        sizes = [-(-one.numel() // BLOCK_ELEMENTS) for one in self._parameters]
        blocks = np.zeros(sum(sizes))
        first = 0
        for number, (start, size) in enumerate(zip((own[0] for own in self._own), sizes, strict=True)):
            gradient = self._share_of_gradient(number)
            if gradient is not None and gradient.numel():
                values = _norms_of_blocks(gradient, order)
                at = first + start // BLOCK_ELEMENTS
                blocks[at : at + len(values)] = values
            first += size
        if self.group is not None:
            blocks = self._on_all_ranks(blocks)
        if order == np.inf:
            return float(blocks.max(initial=0.0))
        return float(blocks.sum() ** (1 / order))

    def _on_all_ranks(self, blocks: Any) -> Any:
        """Return the blocks of all owners: one host has all of them. Collective: the group."""
        assert self.group is not None, "there are other ranks"
        own = blocks if self.group.host == 0 else np.zeros_like(blocks)
        with self.group.recorded("norms of gradients", own):
            library.all_reduce(own, self.group)
        return own

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the whole state by the numbers of the parameters."""
        if self._state is None:
            states = [] if self._inner is None else [self._inner.state.get(one) for one in self._parameters]
        else:
            states = [self._state.read(number) for number in range(len(self._parameters))]
        return {number: dict(state) for number, state in enumerate(states) if state}

    def write(self, states: dict[int, dict[str, Any]]) -> None:
        """Take the whole state by the numbers of the parameters. Collective: the ranks of the host."""
        if self._state is None:
            if self._inner is not None:
                self._inner.load_state_dict({**self._inner.state_dict(), "state": states})
            return
        self.wait()  # another rank may still read
        self._views = []
        for number, mine in enumerate(self._mine):
            own = self._state.write(number, states.get(number))
            if self._inner is not None and mine is not None:
                self._inner.state.pop(mine, None)
                if own:
                    self._inner.state[mine] = own
                    self._views += [(own, key, value) for key, value in own.items()]
        self._n_states = 0 if self._inner is None else len(self._inner.state)
        self.wait()  # so that every rank may read all of it


def _owned_slice(parameter: nn.Parameter, owned_range: tuple[int, int], is_first: bool) -> Tensor | None:
    """Return this rank's share of a parameter, flat; None without one. One without elements is the first rank's."""
    start, stop = owned_range
    if start == stop and not (is_first and parameter.numel() == 0):
        return None
    return in_memory_order(parameter.data)[start:stop]


def pattern_of(groups: Groups) -> list[list[bool]]:
    """Return which options of each group are on: a momentum of 0 keeps no state, and any other does."""
    return [[bool(value) for key, value in group.items() if key not in ("params", "lr")] for group in groups]


def _norms_of_blocks(gradient: Tensor, order: float) -> Any:
    """Return each block's largest magnitude, or the sum of powers of its magnitudes, of a flat gradient; float64."""
    values = np.abs(gradient.detach().double().numpy())
    n_blocks = -(-len(values) // BLOCK_ELEMENTS)
    padded = np.zeros((n_blocks, BLOCK_ELEMENTS))
    padded.reshape(-1)[: len(values)] = values
    return padded.max(1) if order == np.inf else (padded**order).sum(1)
