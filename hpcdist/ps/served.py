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
from hpcdist.ps.updates import Settings
from hpcdist.runtime.process import end_job
from hpcdist.runtime.step_flags import Request, encode
from hpcdist.runtime.time_spent import time_spent
from hpcdist.runtime.world import World

#: Types of settings that travel as JSON, beside tuples and lists.
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layout:
    """Variables that servers began to hold together.

    Attributes:
        variables: specs of the variables, in the order of their numbers.
        shards: specs of the shards of each server, by its number.
    """

    variables: tuple[VariableSpec, ...]
    shards: dict[int, list[ShardSpec]]


class ServedParameters:
    """A worker's view of variables that are on servers: each step of an optimizer pushes gradients and pulls values.

    Args:
        world: world of this rank; the workers are the ranks of its role.
        client: client of the servers.
        partitioner: function that says into how many shards a variable is split; see `plan.partitioners.place`.
        is_by_bytes: whether servers are chosen by the bytes that they hold; see `plan.partitioners.place`.
        skips_non_finite: whether a step with a gradient that is not finite is counted and left out; else it raises.
        needs_sum: whether servers sum the gradients of several workers, so that losses must be scaled for that.

    Attributes:
        is_summed: whether gradients are summed over the workers before a step: never.
        needs_sum: the argument `needs_sum`.
        n_skipped: number of steps of this worker that were left out.
        layouts: variables that servers began to hold at each call of `adopt`, in the order of the calls.
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
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        sparse: Iterable[nn.Parameter],
    ) -> None:
        """Let the servers hold parameters that are trained, and equal on all workers.

        Collective over the workers if any of the parameters is new; else not collective.

        Args:
            named: parameters with their names.
            sparse: parameters among them whose gradients may be sparse.

        Raises:
            UsageError: when the partitioner returns nonsense; on every worker alike.
        """
        new_variables: list[nn.Parameter] = []
        new_specs: list[VariableSpec] = []
        for name, parameter in named:
            if parameter.requires_grad and not self.holds(parameter):
                shape = tuple(parameter.shape)
                new_variables.append(parameter)
                new_specs.append(VariableSpec(name, shape, parameter.dtype))
        if not new_variables:
            return
        self.require_unwritten()
        first = len(self._specs)
        specs = [*self._specs, *new_specs]
        with self._world.agreed(self._world.role_comm):
            shards = place(
                specs,
                self.client.n_servers,
                self._partitioner,
                self._is_by_bytes,
            )
        self._add_variables(new_specs, new_variables)
        sparse_ids = set(map(id, sparse))
        sparse_numbers = frozenset(
            number for number, variable in enumerate(self._variables) if id(variable) in sparse_ids
        )
        new_shards = [shard for shard in shards if shard.variable >= first]
        specs_by_server = specs_of(
            specs,
            new_shards,
            sparse_numbers,
            self.client.chunk_bytes,
        )
        self.client.adopt(specs_by_server, self._variables, self._world.is_chief)
        self.layouts.append(Layout(tuple(new_specs), specs_by_server))
        self._meet()
        self._note_written()

    def learn(self, layout: Layout, variables: Sequence[nn.Parameter]) -> None:
        """Take variables that another client of the servers has let them hold; `pull` brings their values.

        Not collective.
        """
        self._add_variables(layout.variables, variables)
        self.client.adopt(layout.shards, self._variables, is_first=False)
        self.client.forget_values()
        self._note_written()

    def _add_variables(
        self,
        specs: Sequence[VariableSpec],
        variables: Sequence[nn.Parameter],
    ) -> None:
        """Give the next numbers to variables that servers hold from now on."""
        self._specs += specs
        for variable in variables:
            self._numbers[id(variable)] = len(self._variables)
            self._variables.append(variable)

    def learn_optimizer(self, number: int, optimizer: Optimizer) -> None:
        """Take an optimizer that another client of the servers has given them. Not collective."""
        members_of_groups = [members for _, members in self._groups_of(optimizer)]
        self.client.note_optimizer(number, optimizer, members_of_groups)

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer, which servers get at the first call."""
        return self.client.number_of(optimizer, self._groups_of(optimizer))

    def variable(self, number: int) -> nn.Parameter:
        """Return a variable by its number."""
        return self._variables[number]

    def variable_number(self, parameter: Any) -> int | None:
        """Return the number of a variable; None for anything else."""
        if not self.holds(parameter):
            return None
        return self._numbers[id(parameter)]

    def pull(self, is_whole: bool = False) -> None:
        """Write the servers' values into the variables. Not collective.

        Args:
            is_whole: whether to write all values, over whatever was written here, and not only the values that have
                changed on the servers since the last time.
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
        """Stop all workers if a server has got a signal to stop, which it reports to this client alone."""
        if self.client.signal:
            name = self.client.signal
            self.client.signal = ""
            stop_for(f"{name} to a parameter server", self._world)

    def _note_written(self) -> None:
        """Note that the variables have the values of the servers now."""
        self._counters = [variable._version for variable in self._variables]

    def require_unwritten(self) -> None:
        """Raise GradientError if anybody but the servers has written to a variable here."""
        for spec, variable, counter in zip(
            self._specs,
            self._variables,
            self._counters,
            strict=True,
        ):
            if variable._version != counter:
                raise GradientError(
                    f"step: expected {spec.name!r} as the parameter servers gave it, got it written to on "
                    f"{self._world.describe()}; leave its changes to an optimizer, or load a checkpoint."
                )

    def _meet(self) -> None:
        """Wait for all workers; bounded. Collective over the workers."""
        self._world.wait(self._world.role_comm.Ibarrier())

    # -- steps ------------------------------------------------------------------------------------------------------

    def begin_step(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Make an optimizer's step on the servers, and hide the gradients from the optimizer here.

        Not collective; it waits for other workers as the strategy's rules say.

        Raises:
            NotFiniteError: for a gradient that is not finite; on this rank.
        """
        self._check_step(parameters)
        gradients = [parameter.grad for parameter in parameters]
        requester = self._world.step_flags.requester
        request = Request.NONE
        if requester is not None:
            request = requester.requested()
        due = self._push(optimizer, parameters, request)
        self._world.step_flags.record_requests(encode(due))
        self._hidden = gradients
        for parameter in parameters:
            parameter.grad = None

    def _check_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise GradientError unless servers hold the parameters of a step, as they are here."""
        self.require_unwritten()
        for parameter in parameters:
            if parameter.requires_grad and not self.holds(parameter):
                raise GradientError(
                    f"step: expected parameters made in strategy.scope() and in use since, got one of shape "
                    f"{tuple(parameter.shape)} that no server holds; build it in the scope, and call the model itself."
                )

    def _push(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        request: Request,
    ) -> Request:
        """Push gradients and the request of this rank; return the requests that all workers act on after this step."""
        number = self.number_of(optimizer)
        if not self._has_finite_gradients(parameters):
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

    def _has_finite_gradients(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether all gradients of a step are finite.

        Raises:
            NotFiniteError: when one is not, unless such steps are left out; on this rank.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            values = gradient._values() if gradient.is_sparse else gradient
            # a sum takes less time than a look at each element, but may overflow
            if torch.isfinite(values.sum()) or torch.isfinite(values).all():
                continue
            if self._skips_non_finite:
                return False
            raise NotFiniteError(
                f"step: expected finite gradients, got NaN or infinity on {self._world.describe()}; look for the cause "
                f"by HPCDIST_DEBUG=finite, or leave such steps out by non_finite='skip'."
            )
        return True

    def _groups_of(self, optimizer: Optimizer) -> Groups:
        """Return the settings of each group of an optimizer, and the numbers of its variables."""
        groups: Groups = []
        for param_group in optimizer.param_groups:
            settings = dict(param_group)
            parameters = settings.pop("params")
            members = [
                self._numbers[id(parameter)] for parameter in parameters if self.holds(parameter)
            ]
            groups.append((settings, members))
        return groups

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def refresh(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring every worker to the values after all pushes so far; ranks that save get the states of optimizers too.

        Collective over the workers. None of them pushes meanwhile.
        """
        self.require_unwritten()
        self._meet()
        self._pull()
        # the first rank of a node makes the node's copy in memory
        if self._world.is_chief or self._world.node_comm.rank == 0:
            for optimizer in optimizers:
                self.client.fetch_state(optimizer)
        self._meet()

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring all workers to one state of some objects, as far as servers hold them.

        Collective over the workers if servers hold any of the objects; else not collective.
        """
        candidates = list(objects)
        optimizers = self._optimizers_of(candidates)
        if optimizers or any(map(self.holds, _tensors_of(candidates))):
            self.refresh(optimizers)

    def publish(self, objects: Iterable[Any]) -> None:
        """Give servers the values and states that every worker has just loaded into variables and optimizers.

        Collective over the workers if servers hold any of the objects; else not collective. None of them pushes
        meanwhile.
        """
        candidates = list(objects)
        optimizers = self._optimizers_of(candidates)
        loaded_variables: set[int] = set()
        for tensor in _tensors_of(candidates):
            if self.holds(tensor):
                loaded_variables.add(self._numbers[id(tensor)])
        if not optimizers and not loaded_variables:
            return
        self._meet()
        for optimizer in optimizers:
            self.number_of(optimizer)
        if self._world.is_chief:
            self.client.assign(loaded_variables, optimizers)
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
        """Let each worker change its copies of the variables; the next step refuses variables that have changed."""
        return nullcontext(True)


def settings_of(optimizer: Optimizer) -> list[Settings]:
    """Return the settings of each group that may change from step to step, such as a learning rate."""
    settings_of_groups: list[Settings] = []
    for group in optimizer.param_groups:
        settings: Settings = {}
        for name, value in group.items():
            plain_value = _plain(value)
            is_sequence = isinstance(value, (tuple, list)) and name != "params"
            if is_sequence or isinstance(plain_value, _PLAIN):
                settings[name] = plain_value
        settings_of_groups.append(settings)
    return settings_of_groups


def _plain(value: Any) -> Any:
    """Return a number of Python in place of a number of numpy or a tensor of one element; else the value."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def stop_for(reason: str, world: World) -> None:
    """Stop the job as for a signal to this rank, which another rank got: by the handler here, or without one at once.

    Args:
        reason: name of the signal, and the rank that got it, such as "SIGTERM to rank 3 (worker 1)".
        world: world of this rank.
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
