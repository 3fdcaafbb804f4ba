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
    """Client of a replica that is not the first of its entry. It counts steps, and asks no server."""

    def number_of(self, optimizer: Optimizer, groups: Groups) -> int:
        """Return 0: no server is asked."""
        return 0

    def step(
        self,
        number: int,
        settings: list[dict[str, Any]],
        request: Request,
    ) -> Request:
        """Count a step."""
        self.clock += 1
        return Request.NONE

    def _answers(
        self,
        call: str,
        kind: Kind,
        requests: Sequence[tuple[int, dict[str, Any]]],
    ) -> Iterator[tuple[int, Message]]:
        return iter(())


class EntryParameters(ServedParameters):
    """A replica's view of variables on servers, where its worker entry has several replicas, each on a rank.

    A step is one of the entry: its replicas' gradients are summed, the first replica pushes the sum and pulls values,
    and all of them take these. `begin_step`, pushes and pulls, which are not collective in `ServedParameters`, are
    collective over the ranks of the entry here.

    Cost of a step, beyond the cost for the first replica: an all-reduce of the gradients, and a broadcast of the
    variables that have changed, whole.

    Args:
        comm: communicator of the ranks of the entry.
        world, client, partitioner, is_by_bytes, skips_non_finite: arguments of `ServedParameters`.
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
        super().__init__(
            world,
            client,
            partitioner,
            is_by_bytes,
            skips_non_finite,
            needs_sum=True,
        )
        self._comm = comm
        group_of(comm, None, world)  # the collectives below find the group by the communicator
        # version counters of the variables when all replicas last had the same values
        self._shared: list[int] = []

    def begin_step(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
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
        """Return the sum of the replicas' gradients of each parameter, in separate memory.

        A sum is None where no replica has a gradient. It is sparse where a replica's gradient is; its rows follow each
        other in the order of the replicas.
        """
        local_kinds = [_kind_of(parameter.grad) for parameter in parameters]
        kinds = np.array(local_kinds, np.int64)
        all_reduce(kinds, "max", comm=self._comm)
        totals: list[Tensor | None] = []
        dense_totals: list[Tensor] = []
        for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
            gradient = parameter.grad
            if kind == _NONE:
                totals.append(None)
            elif kind == _SPARSE:
                totals.append(self._joined(parameter, gradient))
            else:
                total = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                if gradient is not None:
                    total.copy_(gradient)
                totals.append(total)
                dense_totals.append(total)
        grouped_all_reduce(dense_totals, comm=self._comm)
        return totals

    def _joined(
        self,
        parameter: nn.Parameter,
        gradient: Tensor | None,
    ) -> Tensor:
        """Return the rows of all replicas' gradients as one sparse gradient."""
        if gradient is None:
            no_rows = parameter.new_empty((0, *parameter.shape[1:]))
            no_indices = torch.empty((1, 0), dtype=torch.int64).to(no_rows.device)
            gradient = torch.sparse_coo_tensor(
                no_indices,
                no_rows,
                parameter.shape,
                check_invariants=False,
            )
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        gradient = gradient.coalesce()
        indices = all_gather(gradient._indices()[0], comm=self._comm)
        values = all_gather(gradient._values(), comm=self._comm)
        return torch.sparse_coo_tensor(
            indices[None],
            values,
            parameter.shape,
            check_invariants=False,
        )

    def _push(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        request: Request,
    ) -> Request:
        requests = np.array([request], np.int64)
        all_reduce(requests, "max", comm=self._comm)
        entry_request = Request(int(requests[0]))
        due = Request.NONE
        with self._world.agreed(self._comm):
            try:
                due = super()._push(optimizer, parameters, entry_request)
            finally:
                self._await_first()
        return self._share(due)

    def _await_first(self) -> None:
        """Wait for the first replica's push, for longer than the first replica waits: its error says what is late."""
        request = self._comm.Ibarrier()
        limit_s = self._world.timeout_s + _LATE_S
        if not wait_until(request.Test, limit_s):
            raise late(
                "step",
                limit_s,
                "the first rank of this worker entry",
                self._world.describe(),
            )

    def _pull(self) -> None:
        with self._world.agreed(self._comm):
            super()._pull()
        self._share(Request.NONE)

    @torch.no_grad()
    def _share(self, due: Request) -> Request:
        """Take the first replica's values of the variables that it has new values of.

        Returns:
            The requests that are due on the first replica.
        """
        local_news = [int(due)]
        for number, variable in enumerate(self._variables):
            is_new = number >= len(self._shared) or variable._version != self._shared[number]
            local_news.append(int(is_new))
        news = np.array(local_news, np.int64)
        broadcast(news, comm=self._comm)
        buckets: dict[tuple[str, str], list[nn.Parameter]] = {}
        for variable, is_new in zip(self._variables, news[1:].tolist(), strict=True):
            if is_new:
                kind = (str(variable.dtype), str(variable.device))
                buckets.setdefault(kind, []).append(variable)
        for kind in sorted(buckets):
            bucket = buckets[kind]
            flat = torch.cat([variable.detach().reshape(-1) for variable in bucket])
            broadcast(flat, comm=self._comm)
            if self._comm.rank > 0:
                sizes = [variable.numel() for variable in bucket]
                for variable, values in zip(bucket, torch.split(flat, sizes), strict=True):
                    variable.copy_(values.view_as(variable))
        self._note_written()
        self._shared = list(self._counters)
        return Request(int(news[0]))


def _kind_of(gradient: Tensor | None) -> int:
    """Return whether a gradient is sparse, dense or absent."""
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE
