"""The least cost of synchronization in Python on this machine: one host, one replica for each rank, and no checks.

Gradients are copied to memory that the ranks share; after one barrier each rank adds the gradients that it needs. A
contender that is as fast as its floor can gain only in the barrier and the additions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import Trainee, adam, build
from torch import Tensor, nn
from torch.optim import Adam

from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_memory import CELLS, NodeBarrier
from hpcdist.runtime.node_window import NodeWindow
from hpcdist.runtime.process import make_world

_ALIGNED_ELEMENTS = 16
#: A function that is called for what it does.
Action = Callable[[], None]


class SharedRows:
    """A row of floats for each rank, which all ranks of the host read. Collective over `comm`.

    Args:
        comm: ranks of one host.
        n_elements: length of a row.
    """

    def __init__(self, comm: MPI.Comm, n_elements: int) -> None:
        world = make_world()
        cells = NodeWindow(comm, 8 * CELLS * comm.size, world)
        board = cells.pieces[0].cast("q")
        names = [f"rank {rank}" for rank in range(comm.size)]
        self._barrier = NodeBarrier(board, comm.rank, names, 60.0, is_busy_waiting=True)
        self.rows: list[Tensor] = []
        memory = NodeWindow(comm, 4 * n_elements, world)
        for piece in memory.pieces:
            row = torch.frombuffer(piece, dtype=torch.float32)
            self.rows.append(row[:n_elements])

    def wait(self) -> None:
        """Wait for the other ranks. Collective over the ranks of the host."""
        self._barrier.wait()


def padded_length(parameters: Sequence[nn.Parameter], n_ranks: int) -> int:
    """Return how many elements parameters have, in shares of whole cache lines."""
    n_elements = sum(parameter.numel() for parameter in parameters)
    block = _ALIGNED_ELEMENTS * n_ranks
    n_blocks = -(-n_elements // block)
    return n_blocks * block


def views_of(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return parts of flat memory in the shapes of parameters, one after the other."""
    views = []
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        part = flat[start:stop]
        views.append(part.view(parameter.shape))
        start = stop
    return views


def add_rows(rows: Sequence[Tensor], out: Tensor) -> None:
    """Write the mean of the ranks' rows to `out`."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    out.div_(len(rows))


class Arrivals:
    """Counts the gradients of a backward; with the last one, copies all of them to their slots in one call.

    Args:
        parameters: all parameters of a model; each backward reaches every one of them.
        finish: function that is called when all gradients are in the slots.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], finish: Action) -> None:
        self._parameters = parameters
        self._finish = finish
        self._n_missing = len(parameters)
        self._slots: list[Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._count)

    def use(self, slots: list[Tensor]) -> None:
        """Have the next backward's gradients copied to these slots."""
        self._slots = slots

    def _count(self, parameter: Tensor) -> None:
        self._n_missing -= 1
        if self._n_missing:
            return
        self._n_missing = len(self._parameters)
        gradients = [parameter.grad for parameter in self._parameters]
        torch._foreach_copy_(self._slots, gradients)
        self._finish()


def whole_sums(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return a model all of whose gradients every rank adds: one barrier, and two sets of slots used in turn."""
    model = build(name, device)
    parameters = list(model.parameters())
    n_elements = padded_length(parameters, comm.size)
    sets = [SharedRows(comm, n_elements), SharedRows(comm, n_elements)]
    slots = [views_of(shared.rows[comm.rank], parameters) for shared in sets]
    total = torch.zeros(n_elements)
    gradients = views_of(total, parameters)

    def finish() -> None:
        shared = sets[0]
        shared.wait()
        add_rows(shared.rows, total)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        sets.reverse()
        slots.reverse()
        arrivals.use(slots[0])

    arrivals = Arrivals(parameters, finish)
    arrivals.use(slots[0])
    return model, adam(model)


class _SharedAdam(Adam):
    """Steps this rank's share of a model whose parameters all ranks share, and waits for the other ranks."""

    def __init__(self, share: nn.Parameter, wait: Action) -> None:
        super().__init__([share], lr=1e-3, fused=True)
        self._wait = wait

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave the share's gradient: every backward overwrites it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's share. Collective over all ranks."""
        super().step()
        self._wait()


def shares(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return a model whose shares the ranks add and step, in memory that all ranks share: two barriers."""
    model = build(name, device)
    parameters = list(model.parameters())
    n_elements = padded_length(parameters, comm.size)
    weights = SharedRows(comm, n_elements)
    gradients = SharedRows(comm, n_elements)
    low = comm.rank * n_elements // comm.size
    high = (comm.rank + 1) * n_elements // comm.size
    memories = views_of(weights.rows[0], parameters)
    for parameter, memory in zip(parameters, memories, strict=True):
        if comm.rank == 0:
            memory.copy_(parameter.data)
        parameter.data = memory
    weights.wait()
    share = nn.Parameter(weights.rows[0][low:high])
    share.grad = torch.zeros(high - low)

    def finish() -> None:
        gradients.wait()
        shares_of_ranks = [row[low:high] for row in gradients.rows]
        add_rows(shares_of_ranks, share.grad)
        for parameter in parameters:
            parameter.grad = None

    arrivals = Arrivals(parameters, finish)
    slots = views_of(gradients.rows[comm.rank], parameters)
    arrivals.use(slots)
    return model, _SharedAdam(share, weights.wait)
