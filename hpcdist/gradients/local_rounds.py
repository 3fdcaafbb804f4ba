"""Local SGD: every replica steps on its own gradients, and the weights are averaged every few steps."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.errors import DesyncError
from hpcdist.gradients.reducer import Reducer
from hpcdist.program.generators import StepGenerators
from hpcdist.program.tensors import layout
from hpcdist.runtime.world import World


class LocalRounds:
    """Rounds of local steps. Each round ends with an average of all tensors that training has changed.

    Requests to stop or save travel with the average. Inside a round the program does not stop or save, so that a
    checkpoint is the same on all replicas.

    Args:
        n_steps: number of steps of a round.
        first_step: number of the first local step. Gradients are summed before it, as without rounds ("post-local
            SGD").
        reducer: sums over the replicas, one of which is on each rank.
        generators: random numbers, which count the steps.
        world: world whose step flags travel with the average.

    Source: Stich, Local SGD converges fast and communicates little (ICLR 2019, arXiv 1805.09767); Lin et al., Don't use
        large mini-batches, use local SGD (ICLR 2020, arXiv 1808.07217) for the first, synchronous steps.
    """

    def __init__(
        self,
        n_steps: int,
        first_step: int,
        reducer: Reducer,
        generators: StepGenerators,
        world: World,
    ) -> None:
        self._n_steps = n_steps
        self._first_step = first_step
        self._reducer = reducer
        self._generators = generators
        self._world = world
        self._n_made = 0
        # held until the average, when all ranks must have the same optimizers
        self._steppers: list[Optimizer] = []

    def __str__(self) -> str:
        return f"{self._n_steps} from step {self._first_step}"

    @property
    def is_local(self) -> bool:
        """Whether the step that is being made is a local one."""
        return self._generators.step >= self._first_step

    @property
    def is_open(self) -> bool:
        """Whether local steps were made since the last average, so that replicas differ."""
        return self._n_made > 0

    def count_step(self, optimizer: Optimizer) -> bool:
        """Count a local step of an optimizer; return whether the round is over."""
        self._n_made += 1
        if not any(stepper is optimizer for stepper in self._steppers):
            self._steppers.append(optimizer)
        is_over = self._n_made >= self._n_steps
        if not is_over:
            self._world.step_flags.begin_round()
        return is_over

    def forget(self) -> None:
        """End the round without an average: all ranks have loaded the same values."""
        self._n_made = 0
        self._steppers = []
        self._world.step_flags.end_round()

    @torch.no_grad()
    def average(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors, and tensors in the state of the round's optimizers, by means over replicas; end the round.

        All tensors of floats of an optimizer are averaged, such as momentum and counters of steps.

        Collective over all replicas.

        Args:
            named: parameters, and buffers of floats, with their names.

        Raises:
            DesyncError: on all ranks, when replicas have different tensors, as when an optimizer has never seen a
                gradient on one of them.

        Cost: one all-reduce for each dtype, of parameters and the optimizers' state together; one copy of them.
        """
        named_tensors = [*named, *_states_of(self._steppers)]
        lines = [f"{self._n_made} local steps"]
        lines += [f"{name} {layout(tensor)}" for name, tensor in named_tensors]
        description = "\n".join(lines)
        self._world.require_same(
            description,
            self._reducer.group.comm,
            lambda chiefs: _explain(lines, chiefs.splitlines()),
        )
        flags = np.array(self._world.step_flags.request_numbers())
        self._reducer.sum_array(flags, "flags of a round")
        self._world.step_flags.record_requests(flags.tolist())
        tensors_by_dtype: dict[str, list[Tensor]] = {}
        for _, tensor in named_tensors:
            dtype = SUM_DTYPES[dtype_name(tensor)]
            tensors_by_dtype.setdefault(dtype, []).append(tensor)
        for dtype in sorted(tensors_by_dtype):
            self._average(tensors_by_dtype[dtype], dtype)
        self.forget()

    def _average(self, tensors: list[Tensor], dtype: str) -> None:
        """Replace tensors by their means over all replicas, summed in a dtype."""
        torch_dtype = getattr(torch, dtype)
        copies: list[Tensor] = []
        sizes: list[int] = []
        for tensor in tensors:
            copies.append(tensor.detach().reshape(-1).to("cpu", torch_dtype))
            sizes.append(tensor.numel())
        flat = torch.cat(copies)
        self._reducer.sum_array(flat.numpy(), "average of a round")
        flat.div_(self._reducer.replicas.n_replicas)
        for tensor, mean in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def _states_of(optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    """Return the tensors of floats that optimizers keep for each parameter."""
    named: list[tuple[str, Tensor]] = []
    for optimizer in optimizers:
        class_name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = optimizer.state.get(parameter, {})
                for key in sorted(state, key=str):
                    value = state[key]
                    if isinstance(value, Tensor) and dtype_name(value) in SUM_DTYPES:
                        named.append((f"{class_name} {number} {key}", value))
    return named


def _explain(lines: Sequence[str], chiefs_lines: Sequence[str]) -> DesyncError:
    """Return the error of a rank whose tensors differ from the chief's."""
    all_lines = [*lines, *chiefs_lines]
    differing = [line for line in all_lines if (line in lines) != (line in chiefs_lines)]
    first = differing[0] if differing else "another order"
    return DesyncError(
        f"local steps: expected the chief's {len(chiefs_lines) - 1} tensors to average, got {len(lines) - 1}, first "
        f"difference {first!r}; make the same number of steps on every rank, give every parameter a gradient on all "
        f"replicas, or sum gradients at every step."
    )
