"""ZeroRedundancyOptimizer: each rank of a host sums and steps its share of the parameters, which the host holds once.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC20, arXiv
1910.02054), stage 1, and torch.distributed.optim.ZeroRedundancyOptimizer for the name. There each rank sends the
parameters that it has stepped to all other ranks; here it writes them to memory that all ranks of its host read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from hpcdist.collectives.group import Group
from hpcdist.collectives.options import CommunicationImplementation
from hpcdist.collectives.route import Route
from hpcdist.errors import UsageError
from hpcdist.program import torch_hooks
from hpcdist.program.model_plan import ModelPlan
from hpcdist.program.settings import parameters_of
from hpcdist.runtime.process import make_world
from hpcdist.storage.host_storage import is_on_host
from hpcdist.storage.shares import OwnedShare, Shares, States, pattern_of, without_parameters
from hpcdist.storage.undivided import Undivided

#: Optimizers that treat each element by itself, so that a share is stepped as in the whole parameter. Another class
#: declares this by an attribute `is_elementwise = True`.
_ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)


class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer whose work and state are divided over the ranks of each host.

    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)
    ...     optimizer = hpcdist.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)

    At the first use of the model its parameters move to memory that the ranks of a host share. A backward leaves each
    rank its share of the summed gradients, and `step` updates this share of the parameters, which all ranks read.
    Weights have the bits that `optimizer_class` gives them under the same strategy. Its state_dict and checkpoints are
    the state_dict and checkpoints of that class, on any number of ranks.

    Between backward and step gradients cannot be read: `parameter.grad` raises. To clip them, call `clip_grad_norm_`
    or `clip_grad_value_` here; torch.amp.GradScaler works. A graph that was kept cannot be used again after a step.
    Your code that writes to parameters belongs in `strategy.extended.update`: elsewhere all ranks of a host would write
    to the same memory. `step`, `clip_grad_norm_`, `load_state_dict` and the first use are collective over chief and
    workers.

    It is for MultiWorkerMirroredStrategy and MirroredStrategy with one replica on each rank, on the CPU. All optimizers
    of the scope must be ZeroRedundancyOptimizers. With one rank it works as `optimizer_class`.

    Args:
        params: parameters made in the scope, or groups of them.
        optimizer_class: class of torch.optim that treats each element by itself, or your class that does so and has an
            attribute `is_elementwise = True`.
        defaults: options of the class.

    Raises:
        UsageError: for another class of optimizer.

    Cost: memory of a host: parameters and state once; on each rank its gradients, and gradients below 1 MiB twice. The
        sum is half of an all-reduce: each rank writes its gradients and reads 1/n of the gradients of n ranks. A step
        waits at two barriers.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer] = Adam,
        **defaults: Any,
    ) -> None:
        _require_elementwise(optimizer_class)
        self.optimizer_class = optimizer_class
        self._shares: Shares | Undivided | None = None
        # whether neighbouring parameters are stepped as one; see Shares
        self._joins = True
        self._loaded: dict[str, Any] | None = None
        self._defaults = defaults
        plain_optimizer = self.make_part([torch.zeros(1)])
        super().__init__(params, plain_optimizer.defaults)

    @property
    def checkpoint_kind(self) -> str:
        """Name in checkpoints: the name of the plain optimizer, whose state it has."""
        return self.optimizer_class.__name__

    def make_part(self, groups: Any) -> Optimizer:
        """Return a plain optimizer with the options of this one, hidden from the strategy."""
        return torch_hooks.make_part(self.optimizer_class, groups, **self._defaults)

    def shard(self, slots: Sequence[OwnedShare], group: Group) -> None:
        """Divide the parameters of these slots; the strategy calls it when it plans. Collective over the group."""
        loaded = self._loaded
        if self._shares is not None:
            loaded = _copied(self.state_dict())
        self._loaded = None
        slots_by_id = {id(slot.reference()): slot for slot in slots}
        slots_of_parameters = [slots_by_id.get(id(parameter)) for parameter in parameters_of(self)]
        states = {} if loaded is None else loaded["state"]
        self._shares = self._new_shares(slots_of_parameters, group, states)
        if loaded is not None:
            self._write(self._shares, states)

    def _new_shares(
        self,
        slots: Sequence[OwnedShare | None],
        group: Group,
        states: States,
    ) -> Shares:
        """Divide the parameters, with room for states. Collective over the ranks of the host."""
        return Shares(self.param_groups, self.make_part, slots, group, self._joins, states)

    def _write(self, shares: Shares, states: States) -> None:
        """Take a whole state. If states of neighbours that are stepped as one differ, each is stepped by itself then.

        Collective over the ranks of the host.
        """
        if not shares.fits(states):
            self._joins = False
            shares = self._new_shares(shares.slots, shares.group, states)
            self._shares = shares
        shares.write(states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before the first use.

        Raises:
            UsageError: after the first use.
        """
        if getattr(self, "_shares", None) is not None:
            raise UsageError(
                "add_param_group: expected all groups before the first use of the model, got one after it; give them "
                "when the ZeroRedundancyOptimizer is made."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share. Collective over chief and workers.

        Args:
            closure: function that computes a loss and its gradients, and returns the loss; or None.

        Raises:
            UsageError: when parameters or optimizer were made outside of a strategy's scope, or the optimizer after
                the first use of the model.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._shares is None:
            parameters = parameters_of(self)
            if all(parameter.grad is None for parameter in parameters):
                return loss
        shares = self._made_shares()
        if isinstance(shares, Shares):
            if closure is not None:
                shares.wait()  # another rank may still be in its closure, and read parameters
            shares = self._fitting(shares)
        shares.step(self.param_groups)
        return loss

    def _fitting(self, shares: Shares) -> Shares:
        """Return shares that fit the options and the gradients of a step, with the same state.

        Once some of the neighbours that are stepped as one had a gradient and others had none, each parameter is
        stepped by itself from then on. Collective if new shares are made.
        """
        is_same_pattern = shares.pattern == pattern_of(self.param_groups)
        if shares.joins and shares.has_mixed_run():
            self._joins = False
        if is_same_pattern and shares.joins == self._joins:
            return shares
        states = _copied(self.state_dict())["state"]
        shares.wait()  # until all ranks have read
        fitting = self._new_shares(shares.slots, shares.group, states)
        self._shares = fitting
        self._write(fitting, states)
        return fitting

    def _made_shares(self) -> "Shares | Undivided":
        """Return the shares; on the only rank of a job they are made at the first call."""
        if self._shares is None:
            n_ranks = make_world().role_comm.size
            if n_ranks > 1:
                raise UsageError(
                    f"ZeroRedundancyOptimizer: expected parameters and optimizer made in the scope of a strategy, and "
                    f"the optimizer before the first use of the model, got an optimizer that no strategy has planned, "
                    f"on {n_ranks} ranks; make both in strategy.scope()."
                )
            copied_groups = [dict(options) for options in self.param_groups]
            plain_optimizer = self.make_part(copied_groups)
            self._shares = Undivided(self.param_groups, plain_optimizer)
            if self._loaded is not None:
                self._shares.write(self._loaded["state"])
                self._loaded = None
        return self._shares

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before that, float64.

        The norm has the same bits on any number of ranks. Collective over chief and workers.

        Args:
            max_norm: largest norm of all gradients together.
            norm_type: order of a p-norm; may be infinite.
            error_if_nonfinite: whether to raise RuntimeError, on all ranks, for a norm of infinity or NaN.

        Cost: a sum over ranks of 8 bytes for each 1,024 elements.
        """
        if not norm_type > 0:
            raise UsageError(
                f"clip_grad_norm_: expected a norm_type above 0, got {norm_type}; give 2.0 or inf."
            )
        norm = self._made_shares().norm(float(norm_type))
        if error_if_nonfinite and not np.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: expected a finite norm of order {norm_type} of the gradients, got {norm}; look at "
                f"the loss, or pass error_if_nonfinite=False."
            )
        scale = max_norm / (norm + 1e-6)
        if scale > 1:  # false for a NaN, which is not hidden
            scale = 1.0
        for gradient in self._made_shares().gradients():
            gradient.mul_(scale)
        return torch.tensor(norm, dtype=torch.float64)

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Bound each element of the gradients by -clip_value and clip_value. Not collective."""
        for gradient in self._made_shares().gradients():
            gradient.clamp_(-clip_value, clip_value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `optimizer_class`, whole on every rank; tensors are not copied.

        Not collective. The next step of another rank changes the state.
        """
        groups: list[dict[str, Any]] = []
        first_number = 0
        for group in self.param_groups:
            end_number = first_number + len(group["params"])
            numbers = list(range(first_number, end_number))
            groups.append({**group, "params": numbers})
            first_number = end_number
        if self._shares is not None:
            return {"state": self._shares.read(), "param_groups": groups}
        loaded = {} if self._loaded is None else self._loaded["state"]
        return {"state": loaded, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of `optimizer_class` or of this class, from any number of ranks.

        Collective over chief and workers.

        Raises:
            ValueError: for different groups, or a state of different shapes.
        """
        saved_groups = state_dict["param_groups"]
        states = self._states_by_number(saved_groups, state_dict["state"])
        for group, options in zip(self.param_groups, saved_groups, strict=True):
            group.update(without_parameters(options))
        if self._shares is None:
            self._loaded = {"state": states}
            return
        if isinstance(self._shares, Undivided):
            self._shares.write(states)
            return
        shares = self._shares
        if shares.pattern != pattern_of(self.param_groups):
            shares.wait()
            shares = self._new_shares(shares.slots, shares.group, states)
            self._shares = shares
        self._write(shares, states)

    def _states_by_number(
        self,
        saved_groups: Sequence[dict[str, Any]],
        saved_states: Any,
    ) -> States:
        """Return saved states by the numbers of this optimizer's parameters.

        Raises:
            ValueError: for different groups, or a state of different shapes.
        """
        saved_sizes = [len(group["params"]) for group in saved_groups]
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"load_state_dict: expected groups of {sizes} parameters, got {saved_sizes}; make the same groups"
            )
        saved_names: list[Any] = []
        for group in saved_groups:
            saved_names += group["params"]
        states: States = {}
        pairs = zip(saved_names, parameters_of(self), strict=True)
        for number, (name, parameter) in enumerate(pairs):
            if name in saved_states:
                states[number] = saved_states[name]
                _require_shape(number, parameter, saved_states[name])
        return states

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy: an optimizer that was not used yet, with a copy of the state."""
        attributes = {
            "optimizer_class": self.optimizer_class,
            "_defaults": self._defaults,
            "_joins": True,
            "_shares": None,
        }
        loaded = {"state": _copied(self.state_dict())["state"]}
        return {**super().__getstate__(), **attributes, "_loaded": loaded}


def why_not(
    optimizers: Iterable[Optimizer],
    plan: ModelPlan,
    group: Group,
    route: Route,
    n_replicas: int,
    obstacles: Iterable[str],
) -> UsageError | None:
    """Return the error if gradients of a strategy's models cannot be summed by shares; equal on all ranks.

    Args:
        optimizers: optimizers of the strategy's scope.
        plan: plan of the strategy's models.
        group: the ranks.
        route: how gradients are summed.
        n_replicas: number of replicas of all ranks.
        obstacles: other uses of parameters or gradients by the strategy, such as local steps.
    """
    reasons = list(_obstacles_in_optimizers(list(optimizers), plan))
    reasons += [f"{obstacle}; leave that out" for obstacle in obstacles]
    reasons += _obstacles_in_route(group, route, n_replicas)
    for name, parameter in plan.trained:
        if parameter in plan.sparse:
            reasons.append(f"sparse gradients of {name!r}; make them dense")
    for name, parameter in plan.parameters:
        if not is_on_host(parameter):
            reasons.append(f"{name!r} on {parameter.device}; keep it on the CPU")
    if not reasons:
        return None
    return UsageError(
        f"ZeroRedundancyOptimizer: expected a strategy with one replica on each rank, whose optimizers all are "
        f"ZeroRedundancyOptimizers, got {reasons[0]}."
    )


def _obstacles_in_optimizers(
    optimizers: Sequence[Optimizer],
    plan: ModelPlan,
) -> Iterator[str]:
    """Yield the reasons against shares in the optimizers of a scope: plain ones, and parameters in two of them."""
    planned_ids = {id(parameter) for _, parameter in plan.parameters}
    divided_ids: list[int] = []
    for optimizer in optimizers:
        parameter_ids = list(map(id, parameters_of(optimizer)))
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            divided_ids += parameter_ids
            if not planned_ids.issuperset(parameter_ids):
                yield "a parameter that was not made in the scope; make it there"
        elif not planned_ids.isdisjoint(parameter_ids):
            yield f"{type(optimizer).__name__} for parameters of the scope; leave it out"
    if len(divided_ids) != len(set(divided_ids)):
        yield "a parameter in two of them; give it to one"


def _obstacles_in_route(
    group: Group,
    route: Route,
    n_replicas: int,
) -> Iterator[str]:
    """Yield the reasons against shares in the way gradients are summed."""
    if n_replicas != group.size:
        yield "a strategy with num_replicas; leave it out"
    if route.wire_dtype is not None:
        yield f"wire_dtype {route.wire_dtype}; leave it out"
    if route.algorithm not in (
        CommunicationImplementation.SHARED_MEMORY,
        CommunicationImplementation.HIERARCHICAL,
    ):
        where = " on the host, with device='cpu'" if route.is_on_device else ""
        yield f"gradients summed by {route.name}; ask for AUTO{where}"
    if not group.facts.can_share_memory:
        yield "ranks that share no memory; use a plain optimizer"
    if route.is_ordered and not group.placement.is_aligned:
        yield "is_ordered=True across these hosts; leave it out"


def _require_shape(
    number: int,
    parameter: nn.Parameter,
    state: dict[str, Any],
) -> None:
    """Raise ValueError unless the saved tensors of a parameter have its shape, or no dimensions."""
    shape = tuple(parameter.shape)
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    other_shapes = sorted(shapes - {shape, ()})
    if other_shapes:
        raise ValueError(
            f"load_state_dict: expected the state of parameter {number} in shape {shape}, got {other_shapes}; load "
            f"that of the same model"
        )


def _require_elementwise(optimizer_class: Any) -> None:
    """Raise UsageError for a class that is no optimizer, or does not treat each element by itself."""
    is_optimizer = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    is_declared = getattr(optimizer_class, "is_elementwise", False)
    if not is_optimizer or not (optimizer_class in _ELEMENTWISE or is_declared):
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        names = ", ".join(sorted(elementwise.__name__ for elementwise in _ELEMENTWISE))
        raise UsageError(
            f"ZeroRedundancyOptimizer: expected an optimizer that treats each element by itself ({names}), got {name}; "
            f"use it without ZeroRedundancyOptimizer, or, if it treats each element by itself, give its class "
            f"is_elementwise = True."
        )


def _copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict with copies of the tensors."""
    copied_states: States = {}
    for number, state in state_dict["state"].items():
        copied_state: dict[str, Any] = {}
        for key, value in state.items():
            copied_state[key] = value.clone() if isinstance(value, Tensor) else value
        copied_states[number] = copied_state
    return {**state_dict, "state": copied_states}
