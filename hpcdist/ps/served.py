"""The parameters of a strategy's models that servers hold: as a worker's optimizers and checkpoints use them."""

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import GradientError, NotFiniteError
from hpcdist.plan.partitioners import VariableSpec, place
from hpcdist.program.owners import Stepper
from hpcdist.program.settings import parameters_of
from hpcdist.ps.client import Client, Groups
from hpcdist.ps.layout import ShardSpec, specs_of
from hpcdist.runtime.process import end_job
from hpcdist.runtime.step_flags import Request, encode
from hpcdist.runtime.time_spent import time_spent
from hpcdist.runtime.world import World

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layout:
    """Variables that servers began to hold together.

    Attributes:
        variables: in the order of their numbers.
        shards: of each server.
    """

    variables: tuple[VariableSpec, ...]
    shards: dict[int, list[ShardSpec]]


class ServedParameters:
    """A worker's view of variables that are on servers: each step of an optimizer pushes gradients and pulls values.

    Args:
        world: the workers are its role.
        client: speaks with the servers.
        partitioner: see `plan.partitioners.place`.
        is_by_bytes: likewise.
        skips_non_finite: whether a step with a gradient that is not finite is counted and left out; else it raises.
        needs_sum: whether servers sum the gradients of several workers, so that losses must be scaled for that.

    Attributes:
        is_summed: False: gradients are not summed over the workers before a step.
        needs_sum: as given.
        n_skipped: steps of this worker that were left out.
        layouts: what `adopt` has let the servers hold, in this order.
    """

    is_summed = False
    is_private = is_divided = False
    stepper = Stepper.SERVERS

    def __init__(
        self,
        world: World,
        client: Client,
        partitioner: Callable[..., Any] | None,
        is_by_bytes: bool,
        skips_non_finite: bool,
        needs_sum: bool,
    ) -> None:
        self._world = world
        self.client = client
        self._partitioner = partitioner
        self._is_by_bytes = is_by_bytes
        self._skips_non_finite = skips_non_finite
        self.needs_sum = needs_sum
        self._specs: list[VariableSpec] = []
        self._variables: list[nn.Parameter] = []
        self._numbers: dict[int, int] = {}
        self._counters: list[int] = []
        self._hidden: list[Tensor | None] = []
        self.layouts: list[Layout] = []
        self.n_skipped = 0

    def holds(self, tensor: Any) -> bool:
        """Return whether a tensor is one of the variables."""
        number = self._numbers.get(id(tensor))
        return number is not None and self._variables[number] is tensor

    def adopt(
        self, named: Sequence[tuple[str, nn.Parameter]], sparse: Iterable[nn.Parameter]
    ) -> None:
        """Let the servers hold parameters that are trained, and equal on all workers.

        Collective where there are new ones: the workers.

        Args:
            named: parameters.
            sparse: those of them whose gradients may be sparse.

        Raises:
            UsageError: when the partitioner returns nonsense; on every worker alike.
        """
        new = [
            (name, parameter)
            for name, parameter in named
            if parameter.requires_grad and not self.holds(parameter)
        ]
        if not new:
            return
        self.require_unwritten()
        first = len(self._specs)
        of_rows = {id(parameter) for parameter in sparse}
        specs = [
            *self._specs,
            *(
                VariableSpec(name, tuple(parameter.shape), parameter.dtype)
                for name, parameter in new
            ),
        ]
        with self._world.agreed(self._world.role_comm):
            shards = place(specs, self.client.n_servers, self._partitioner, self._is_by_bytes)
        self._specs = specs
        self._variables += [parameter for _, parameter in new]
        self._numbers = {id(variable): number for number, variable in enumerate(self._variables)}
        sparse_numbers = frozenset(
            number for number, variable in enumerate(self._variables) if id(variable) in of_rows
        )
        specs_by_server = specs_of(
            specs,
            (shard for shard in shards if shard.variable >= first),
            sparse_numbers,
            self.client.chunk_bytes,
        )
        self.client.adopt(specs_by_server, self._variables, self._world.is_chief)
        self.layouts.append(Layout(tuple(specs[first:]), specs_by_server))
        self._meet()
        self._note_written()

    def learn(self, layout: Layout, variables: Sequence[nn.Parameter]) -> None:
        """Take variables that another client of the servers has let them hold; `pull` brings their values.

        Not collective.
        """
        self._specs += layout.variables
        self._variables += variables
        self._numbers = {id(variable): number for number, variable in enumerate(self._variables)}
        self.client.adopt(layout.shards, self._variables, is_first=False)
        self.client.forget_values()
        self._note_written()

    def learn_optimizer(self, number: int, optimizer: Optimizer) -> None:
        """Take an optimizer that another client of the servers has given them. Not collective."""
        self.client.note_optimizer(
            number, optimizer, [members for _, members in self._groups_of(optimizer)]
        )

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer, which servers get at the first call."""
        return self.client.number_of(optimizer, self._groups_of(optimizer))

    def variable(self, number: int) -> nn.Parameter:
        """Return a variable by its number."""
        return self._variables[number]

    def variable_number(self, parameter: Any) -> int | None:
        """Return the number of a variable; None for anything else."""
        return self._numbers.get(id(parameter)) if self.holds(parameter) else None

    def pull(self, is_whole: bool = False) -> None:
        """Write the servers' values into the variables. Not collective.

        Args:
            is_whole: also those that have not changed there since the last time, over whatever was written here.
        """
        if is_whole:
            self.client.forget_values()
        else:
            self.require_unwritten()
        self._pull()

    def _pull(self) -> None:
        self.client.pull()
        self._note_written()
        self._act_on_signal()

    def _act_on_signal(self) -> None:
        """Stop all workers if a server has got a signal to stop, and has told this client alone."""
        if self.client.signal:
            name = self.client.signal
            self.client.signal = ""
            stop_for(f"{name} to a parameter server", self._world)

    def _note_written(self) -> None:
        """Note the values as they are: they are the servers'."""
        self._counters = [variable._version for variable in self._variables]

    def require_unwritten(self) -> None:
        """Raise GradientError if anybody but the servers has written to a variable here."""
        for name, variable, counter in zip(
            self._specs, self._variables, self._counters, strict=True
        ):
            if variable._version != counter:
                raise GradientError(
                    f"step: expected {name.name!r} as the parameter servers gave it, got it written to on "
                    f"{self._world.describe()}; leave its changes to an optimizer, or load a checkpoint."
                )

    def _meet(self) -> None:
        """Wait for all workers; bounded. Collective: the workers."""
        self._world.wait(self._world.role_comm.Ibarrier())

    # -- steps ------------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Make an optimizer's step on the servers, and hide the gradients from the optimizer here.

        Not collective; it waits for other workers as the strategy's rules say.

        Raises:
            NotFiniteError: for a gradient that is not finite; on this rank.
        """
        self._check_step(parameters)
        gradients = [parameter.grad for parameter in parameters]
        requester = self._world.step_flags.requester
        request = Request.NONE if requester is None else requester.requested()
        due = self._push(optimizer, parameters, request)
        self._world.step_flags.record(encode(due))
        self._hidden = gradients
        for parameter in parameters:
            parameter.grad = None

    def _check_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise GradientError unless servers hold the parameters of a step, as they are here."""
        self.require_unwritten()
        foreign = [
            parameter
            for parameter in parameters
            if parameter.requires_grad and not self.holds(parameter)
        ]
        if foreign:
            raise GradientError(
                f"step: expected parameters made in strategy.scope() and in use since, got one of shape "
                f"{tuple(foreign[0].shape)} that no server holds; build it in the scope, and call the model itself."
            )

    def _push(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], request: Request
    ) -> Request:
        """Push gradients with what this rank requests of all; return what is due on all after this step."""
        number = self.number_of(optimizer)
        if not self._are_finite([parameter.grad for parameter in parameters]):
            for parameter in parameters:
                parameter.grad = None
            self.n_skipped += 1
        try:
            with time_spent.timed("communication", "push"):
                due = self.client.step(number, settings_of(optimizer), request)
            time_spent.stale += self.client.n_missed
        finally:
            self._note_written()
        self._act_on_signal()
        return due

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the gradients back that `begin_step` has hidden."""
        hidden = self._hidden
        self._hidden = []
        for parameter, gradient in zip(parameters, hidden, strict=True):
            parameter.grad = gradient

    def _are_finite(self, gradients: Sequence[Tensor | None]) -> bool:
        present_values = [
            gradient._values() if gradient.is_sparse else gradient
            for gradient in gradients
            if gradient is not None
        ]
        is_finite = all(
            bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
            for values in present_values
        )
        if not is_finite and not self._skips_non_finite:
            raise NotFiniteError(
                f"step: expected finite gradients, got NaN or infinity on {self._world.describe()}; look for the cause "
                f"by HPCDIST_DEBUG=finite, or leave such steps out by non_finite='skip'."
            )
        return is_finite

    def _groups_of(self, optimizer: Optimizer) -> Groups:
        members = [
            [self._numbers[id(parameter)] for parameter in group["params"] if self.holds(parameter)]
            for group in optimizer.param_groups
        ]
        all_settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        return list(zip(all_settings, members, strict=True))

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def refresh(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring every worker to the values after all pushes so far; ranks that save get the states of optimizers too.

        Collective: the workers. None pushes meanwhile.
        """
        self.require_unwritten()
        self._meet()
        self._pull()
        # which makes its node's copy in memory
        if self._world.is_chief or self._world.node_comm.rank == 0:
            for optimizer in optimizers:
                self.client.fetch_state(optimizer)
        self._meet()

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring what servers hold of some objects to one state on all workers. Collective if there is anything."""
        candidates = list(objects)
        optimizers = self._optimizers_of(candidates)
        if optimizers or any(map(self.holds, _tensors_of(candidates))):
            self.refresh(optimizers)

    def publish(self, objects: Iterable[Any]) -> None:
        """Make what every worker has just loaded into variables and optimizers the servers' values and states.

        Collective if servers hold any of the objects: the workers. None pushes meanwhile.
        """
        candidates = list(objects)
        optimizers = self._optimizers_of(candidates)
        loaded = [tensor for tensor in _tensors_of(candidates) if self.holds(tensor)]
        if not optimizers and not loaded:
            return
        self._meet()
        for optimizer in optimizers:
            self.number_of(optimizer)
        if self._world.is_chief:
            self.client.assign({self._numbers[id(tensor)] for tensor in loaded}, optimizers)
        self._meet()
        self._pull()

    def _optimizers_of(self, objects: Iterable[Any]) -> list[Optimizer]:
        """Return the optimizers among some objects that step one of the variables."""
        return [
            item
            for item in objects
            if isinstance(item, Optimizer) and any(map(self.holds, parameters_of(item)))
        ]

    def changing(self) -> AbstractContextManager[bool]:
        """Let each worker change its copies of the variables; the next step refuses what it finds changed."""
        return nullcontext(True)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group that may change from step to step, such as a learning rate."""

    def plain(value: Any) -> Any:
        is_number = isinstance(value, np.generic) or (
            isinstance(value, Tensor) and value.numel() == 1
        )
        return value.item() if is_number else value

    return [
        {
            name: plain(value)
            for name, value in group.items()
            if isinstance(plain(value), _PLAIN)
            or (isinstance(value, (tuple, list)) and name != "params")
        }
        for group in optimizer.param_groups
    ]


def stop_for(reason: str, world: World) -> None:
    """Stop the job as for a signal to this rank, which another one got: by its handler, or without one at once.

    Args:
        reason: the name of the signal, and who got it, such as "SIGTERM to rank 3 (worker 1)".
        world: whose rank this is.
    """
    requester = world.step_flags.requester
    if requester is None:
        number = signal.Signals[reason.partition(" ")[0]]
        end_job(f"hpcdist: {reason}, and no handler that saves: ending the job\n", 128 + number)
    requester.stop(reason)


def _tensors_of(objects: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of modules, and tensors, among some objects."""
    tensors: list[Tensor] = []
    for item in objects:
        if isinstance(item, nn.Module):
            tensors += item.parameters()
        elif isinstance(item, Tensor):
            tensors.append(item)
    return tensors
