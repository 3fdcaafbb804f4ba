"""Several ranks of one worker entry: they sum their gradients before one push, and have one worker's values."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.calls import all_reduce, grouped_all_reduce
from hpcdist.collectives.group import group_of
from hpcdist.collectives.moves import all_gather, broadcast
from hpcdist.ps.client import Client, Groups
from hpcdist.ps.messages import Kind, Message
from hpcdist.ps.served import ServedParameters
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.step_flags import Request
from hpcdist.runtime.waiting import late, wait_until
from hpcdist.runtime.world import World

_NONE, _DENSE, _SPARSE = range(3)
#: How much longer a replica waits for the first one of its entry than that one waits for servers.
_LATE_S = 60.0


class SilentClient(Client):
    """Of a replica that is not the first of its entry: it notes what that one's client does, and asks nobody."""

    def number_of(self, optimizer: Optimizer, groups: Groups) -> int:
        """Return 0: no server is asked."""
        return 0

    def step(self, number: int, settings: list[dict[str, Any]], request: Request) -> Request:
        """Count a step."""
        self.clock += 1
        return Request.NONE

    def _answers(
        self, call: str, kind: Kind, requests: Sequence[tuple[int, dict[str, Any]]]
    ) -> Iterator[tuple[int, Message]]:
        return iter(())


class EntryParameters(ServedParameters):
    """A replica's view of variables on servers, where its worker entry has several replicas, each on a rank.

    A step is one of the entry: its replicas' gradients are summed, the first replica pushes the sum and pulls values,
    and all of them take these. What `ServedParameters` does alone is collective here: the ranks of the entry.

    Cost of a step, beyond the first replica's: an all-reduce of the gradients, and a broadcast of the variables that
    have changed, whole.

    Args:
        comm: the ranks of the entry.
        world, client, partitioner, is_by_bytes, skips_non_finite: as `ServedParameters`.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        world: World,
        client: Client,
        partitioner: Callable[..., Any] | None,
        is_by_bytes: bool,
        skips_non_finite: bool,
    ) -> None:
        super().__init__(world, client, partitioner, is_by_bytes, skips_non_finite, needs_sum=True)
        self._comm = comm
        group_of(comm, None, world)  # which the collectives below find by the communicator
        # version counters of the variables when all replicas last had the same values
        self._shared: list[int] = []

    def begin_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Make one step of the entry on the servers, and hide the gradients from the optimizer here."""
        with self._world.agreed(self._comm):
            self._check_step(parameters)
        local_gradients = [parameter.grad for parameter in parameters]
        try:
            for parameter, total in zip(parameters, self._summed(parameters), strict=True):
                parameter.grad = total
            super().begin_step(optimizer, parameters)
        except BaseException:
            for parameter, gradient in zip(parameters, local_gradients, strict=True):
                parameter.grad = gradient
            raise
        self._hidden = local_gradients

    def _summed(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sum of the replicas' gradients of each parameter, in memory of its own; None where all have none.

        Sparse where any is; its rows follow each other in the order of the replicas.
        """
        kinds = np.array(
            [_kind_of(local_parameter.grad) for local_parameter in parameters], np.int64
        )
        all_reduce(kinds, "max", comm=self._comm)
        totals: list[Tensor | None] = []
        for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
            gradient = parameter.grad
            if kind == _NONE:
                totals.append(None)
            elif kind == _SPARSE:
                totals.append(self._joined(parameter, gradient))
            else:
                blank = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                totals.append(blank if gradient is None else blank.copy_(gradient))
        grouped_all_reduce(
            [total for total in totals if total is not None and not total.is_sparse],
            comm=self._comm,
        )
        return totals

    def _joined(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        """Return the rows of all replicas' gradients as one sparse gradient."""
        if gradient is None:
            none = torch.empty((1, 0), dtype=torch.int64)
            rows = parameter.new_empty((0, *parameter.shape[1:]))
            gradient = torch.sparse_coo_tensor(
                none.to(rows.device), rows, parameter.shape, check_invariants=False
            )
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        indices = all_gather(gradient._indices()[0], comm=self._comm)
        values = all_gather(gradient._values(), comm=self._comm)
        return torch.sparse_coo_tensor(
            indices[None], values, parameter.shape, check_invariants=False
        )

    def _push(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], request: Request
    ) -> Request:
        requests = np.array([request], np.int64)
        all_reduce(requests, "max", comm=self._comm)
        due = Request.NONE
        with self._world.agreed(self._comm):
            try:
                due = super()._push(optimizer, parameters, Request(int(requests[0])))
            finally:
                self._await_first()
        return self._share(due)

    def _await_first(self) -> None:
        """Wait for the first replica's push, longer than that one waits: its error says what is late."""
        request = self._comm.Ibarrier()
        limit_s = self._world.timeout_s + _LATE_S
        if not wait_until(request.Test, limit_s):
            raise late(
                "step", limit_s, "the first rank of this worker entry", self._world.describe()
            )

    def _pull(self) -> None:
        with self._world.agreed(self._comm):
            super()._pull()
        self._share(Request.NONE)

    @torch.no_grad()
    def _share(self, due: Request) -> Request:
        """Take the first replica's values of the variables that it has new ones of; return what is due there."""
        before = [*self._shared, *([-1] * len(self._variables))]
        news = np.array(
            [
                due,
                *(
                    variable._version != count
                    for variable, count in zip(self._variables, before, strict=False)
                ),
            ],
            np.int64,
        )
        broadcast(news, comm=self._comm)
        changed = [
            variable
            for variable, is_new in zip(self._variables, news[1:].tolist(), strict=True)
            if is_new
        ]
        for kind in sorted({(str(variable.dtype), str(variable.device)) for variable in changed}):
            bucket = [
                variable
                for variable in changed
                if (str(variable.dtype), str(variable.device)) == kind
            ]
            flat = torch.cat([variable.detach().reshape(-1) for variable in bucket])
            broadcast(flat, comm=self._comm)
            for variable, values in zip(
                bucket, torch.split(flat, [variable.numel() for variable in bucket]), strict=True
            ):
                if self._comm.rank > 0:
                    variable.copy_(values.view_as(variable))
        self._note_written()
        self._shared = list(self._counters)
        return Request(int(news[0]))


def _kind_of(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE
