"""Shows torch's forwards and backwards to the state of the program's loop.

Backwards are always seen. Forwards are seen once a loop has drawn a part while another part was still to be used.
Before that, a backward can only use the single part that was drawn.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from hpcdist.program import loader_hooks, tensor_internals, torch_hooks
from hpcdist.program.generators import StepGenerators
from hpcdist.program.own_loaders import OwnLoader
from hpcdist.program.part_tensors import PartTensors, leaves_of, length_of
from hpcdist.program.torch_hooks import Handle
from hpcdist.runtime.parts import Part, Uses
from hpcdist.runtime.step_flags import StepFlags
from hpcdist.runtime.worker_start import prepare_workers

#: Leaves of batches whose memory names a part.
_WEAK = (Tensor, np.ndarray)
#: The watch of each world, by its step flags, which are of a lower layer and do not know it.
_watches: "weakref.WeakKeyDictionary[StepFlags, LoopWatch]" = weakref.WeakKeyDictionary()


class LoopWatch:
    """Watches the loop of one world.

    Args:
        flags: step flags of the world.

    Attributes:
        tensors: memory by which the part of a tensor is known.
    """

    def __init__(self, flags: StepFlags) -> None:
        self.tensors = PartTensors()
        self._flags = weakref.proxy(flags)
        self._handle: Handle | None = None
        self._newest: tuple[Part, list[Callable[[], Any]]] | None = None
        self._generators: weakref.WeakValueDictionary[int, StepGenerators] = (
            weakref.WeakValueDictionary()
        )
        self._own_loaders: weakref.WeakKeyDictionary[DataLoader[Any], OwnLoader] = (
            weakref.WeakKeyDictionary()
        )
        torch_hooks.around_any_backward(self)
        loader_hooks.around_loaders(self)
        torch_hooks.after_any_step(self._after_step)
        flags.loop.watch_forwards_with(self._watch_forwards)

    def begin_backward(self, creates_graph: bool) -> None:
        """Begin to record what a backward uses."""
        self._flags.loop.begin_backward()

    def end_backward(self, is_whole: bool) -> None:
        """Record what a backward has used."""
        self._flags.loop.end_backward(is_whole)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._flags.loop.note_other_step()

    def seed_batches(
        self,
        owner: int,
        generators: StepGenerators,
    ) -> None:
        """Have random numbers seeded for each batch of an owner that is handed out.

        Args:
            owner: number of the strategy whose gradients are made of the batches.
            generators: random numbers of the owner.
        """
        self._generators[owner] = generators

    def _begin_batch(self, owner: int | None) -> None:
        """Seed an owner's random numbers for a batch; without an owner, the numbers of the newest one."""
        if owner is None:
            owner = max(self._generators.keys(), default=None)
        if owner is None:
            return
        generators = self._generators.get(owner)
        if generators is not None:
            generators.begin_batch(self._flags.loop.n_backwards)

    def hand_out(self, part: Part, nests: Any) -> None:
        """Seed random numbers for a part, and remember which tensors belong to it.

        While a backward can only use one part, only the tensors of the newest part are remembered.

        Args:
            part: part that is handed out.
            nests: tensors and arrays of the part, of all local replicas.
        """
        if part.is_for_training and not self._flags.loop.has_drawn_ahead:
            self._begin_batch(part.source.owner)
        if self._flags.loop.needs_identity:
            self.tensors.add(part, nests)
        else:
            references: list[Callable[[], Any]] = []
            for leaf in leaves_of(nests):
                if isinstance(leaf, _WEAK):
                    references.append(tensor_internals.weak_reference(leaf))
            self._newest = (part, references)

    def _watch_forwards(self, is_needed: bool) -> None:
        """Watch the calls of modules from now on, or stop watching them."""
        if is_needed and self._newest is not None:
            part, references = self._newest
            self.tensors.add(part, [reference() for reference in references])
        self._newest = None
        if is_needed and self._handle is None:
            self._handle = torch_hooks.around_outer_calls(self)
        elif not is_needed and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def before_pass(self, loader: "DataLoader[Any]") -> AbstractContextManager[None]:
        """Follow a DataLoader that the program has made; return a context in which it must begin its pass."""
        if self._flags.loop.is_drawing:
            return nullcontext()
        prepare_workers(loader)
        own_loader = self._own_loaders.get(loader)
        if own_loader is None:
            own_loader = OwnLoader(loader, self._flags)
            self._own_loaders[loader] = own_loader
        return own_loader.begin_pass(loader)

    def before_draw(self, loader: "DataLoader[Any]") -> None:
        """Act on requests if a draw begins an iteration. Collective over the ranks of the role in that case."""
        if loader in self._own_loaders:
            self._own_loaders[loader].before_draw()

    def after_draw(self, loader: "DataLoader[Any]", batch: Any) -> None:
        """Record a batch that the program has drawn."""
        if loader in self._own_loaders:
            part = self._own_loaders[loader].part_of(batch)
            self.hand_out(part, batch)

    def after_pass(self, loader: "DataLoader[Any]") -> None:
        """Note that a pass has ended."""
        if loader in self._own_loaders:
            self._own_loaders[loader].end_pass()

    def before_call(
        self,
        module: nn.Module,
        inputs: Any,
    ) -> "_Inputs | None":
        """Return the parts in the inputs of a call; None for a call that activation checkpointing makes again.

        Acts on requests if the call begins an iteration. Collective over the ranks of the role in that case.
        """
        if torch_hooks.is_in_backward() or torch_hooks.is_transforming():
            return None
        leaves = leaves_of(inputs)
        parts = self.tensors.parts_of(leaves)
        if parts and torch.is_grad_enabled() and _has_parameters(module):
            self._flags.poll_at_forward(parts)
        likely_rows = None if parts else length_of(leaves)
        return _Inputs(parts, likely_rows)

    def after_call(
        self,
        module: nn.Module,
        before: Any,
        output: Any,
    ) -> None:
        """Let a backward that reaches the output know the parts, and note a call that leaves something behind."""
        if before is None:
            return
        parts = before.parts
        outputs: list[Tensor] = []
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                outputs.append(leaf)
        if torch.is_grad_enabled() and outputs:
            reach = _Reach(self._flags.loop.uses_of_thread(), parts, before.likely_rows)
            for tensor in outputs:
                torch_hooks.call_at_gradient_of(tensor, reach)
            self._flags.loop.note_forward(parts)
        elif parts and module.training and _has_parameters(module):
            # other calls may be made on one rank alone
            self._flags.loop.note_forward()


@dataclass(frozen=True)
class _Inputs:
    """Parts in the inputs of a call, or without any parts the length of its first tensor."""

    parts: list[Part]
    likely_rows: int | None


class _Reach:
    """Adds the parts of a forward to the uses of a backward that reaches it."""

    def __init__(
        self,
        uses: Uses,
        parts: list[Part],
        likely_rows: int | None,
    ) -> None:
        self._uses = uses
        self._parts = parts
        self._likely_rows = likely_rows

    def __call__(self) -> None:
        self._uses.add(self._parts, self._likely_rows)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def watch_loop(flags: StepFlags) -> LoopWatch:
    """Return the watch of a world, which is made at the first call. Not collective."""
    watch = _watches.get(flags)
    if watch is None:
        watch = LoopWatch(flags)
        _watches[flags] = watch
    return watch
