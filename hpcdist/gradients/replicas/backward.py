"""Backwards of several replicas in one process: each adds its gradients, the last one sums them over all ranks.

Replicas run one at a time, but a backward may wait in its middle while others run, as SyncBatchNorm's does. So a
replica's gradients are only collected while its backward runs, and go to their slots when it has ended.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpcdist.errors import GradientError
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.backward import Contribution, GradientSums, graph_refusal, refuse_unsupported
from hpcdist.gradients.bucket_set import BucketSet
from hpcdist.gradients.record import ParameterRecord, Pending
from hpcdist.gradients.replicas.local_sums import LocalSums
from hpcdist.gradients.replicas.scheduler import ReplicaScheduler
from hpcdist.gradients.replicas.state import ReplicaState
from hpcdist.gradients.tensors import has_values, plus


class _Pass:
    """One replica's backward: what it found in `grad`, and what it wrote there."""

    def __init__(self) -> None:
        self.backward: int | None = None
        self.found: dict[ParameterRecord, Tensor] = {}
        self.gradients: dict[ParameterRecord, Tensor] = {}


class ReplicaBackwardSum:
    """Sums the gradients of every backward over the replicas, several of which are in this process.

    Args:
        sums: what is summed, and how it is published.
        scheduler: runs the replicas.
        state: what each replica resumes with after a sum.
    """

    def __init__(self, sums: GradientSums, scheduler: ReplicaScheduler, state: ReplicaState) -> None:
        self._sums = sums
        self._scheduler = scheduler
        self._state = state
        self._passes = {replica: _Pass() for replica in scheduler.replicas}
        self._unsynced: set[int | None] = set()  # the replicas inside no_sync; None: all of them
        self._contributions: list[Contribution] = []
        self._earlier: dict[ParameterRecord, Tensor] = {}
        self._local_sums: LocalSums | None = None  # from the first contribution to the sum over ranks

    def require_host(self, records: Sequence[tuple[ParameterRecord, nn.Parameter]]) -> None:
        """Raise GradientError for parameters on a device, whose hooks torch calls in one thread for all replicas.

        On every rank that has several replicas.
        """
        elsewhere = [record.name for record, parameter in records if parameter.device.type != "cpu"]
        if elsewhere:
            raise GradientError(
                f"strategy: expected parameters on the host for {len(self._scheduler.replicas)} replicas of one rank, "
                f"got {elsewhere[0]!r} on a device; start as many ranks as replicas, or leave them on the host."
            )

    def hook(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        """Take part in every backward that reaches a parameter."""
        torch_hooks.before_accumulation(parameter, functools.partial(self._before_accumulation, record))
        torch_hooks.after_accumulation(parameter, functools.partial(self._after_accumulation, record))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in the block accumulate the calling replica's gradients; outside of `run`, those of all."""
        replica, before = self._scheduler.replica, set(self._unsynced)
        self._unsynced.add(replica)
        try:
            yield
        finally:
            if replica not in before:
                self._unsynced.discard(replica)

    @property
    def is_syncing(self) -> bool:
        """Whether backwards of the calling replica sum: False inside `no_sync`."""
        return not self._unsynced & {None, self._scheduler.replica}

    @property
    def is_running(self) -> bool:
        """Whether a backward of the calling replica is running."""
        return self._scheduler.replica is not None and self._own_pass().backward is not None

    def _own_pass(self) -> _Pass:
        replica = self._scheduler.replica
        if replica is None:
            raise GradientError(
                f"backward: expected a call inside strategy.run, as this rank has {len(self._scheduler.replicas)} "
                f"replicas, got one outside; put the step into a function and call strategy.run(step, args=(batch,))."
            )
        return self._passes[replica]

    def _before_accumulation(self, record: ParameterRecord, gradient: Tensor) -> None:
        own, parameter = self._own_pass(), record.parameter
        if own.backward != torch_hooks.backward_id():
            refuse_unsupported()
            own.backward = torch_hooks.backward_id()
            torch_hooks.at_end_of_backward(self._end)
        if parameter is not None and parameter.grad is not None:
            own.found[record], parameter.grad = parameter.grad, None

    def _after_accumulation(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        if torch.is_grad_enabled():
            raise graph_refusal(record)
        own, gradient = self._own_pass(), parameter.grad
        if gradient is not None:  # it is None where the gradient is undefined
            self._sums.require_finite(record, gradient)
            own.gradients[record] = gradient
            parameter.grad = None

    @torch.no_grad()
    def _end(self) -> None:
        own = self._own_pass()
        if not own.gradients:  # torch.autograd.grad writes no gradients
            self._sums.has_crossed = False
            for record, found in own.found.items():
                if (parameter := record.parameter) is not None:
                    parameter.grad = found
            self._passes[self._replica] = _Pass()
            return
        self._sums.note_managed()
        self._sums.require_op(own.backward or 0)
        if not self.is_syncing:
            self._accumulate(own)
            return
        for record in self._sums.records:  # stash what parameters hold that this backward did not reach
            if (parameter := record.parameter) is not None and parameter.grad is not None:
                own.found[record], parameter.grad = parameter.grad, None
        self._add(own)
        self._passes[self._replica] = _Pass()
        self._scheduler.barrier("a backward")
        if self._scheduler.is_last:
            self._finish()
            self._scheduler.release()

    def _accumulate(self, own: _Pass) -> None:
        """Leave a replica's gradients in `parameter.grad`, added to what it has accumulated before."""
        replica, local = self._replica, self._state.local
        local.note_weight(replica, self._sums.weight_after(self._scheduler.local_index, local.first_weight(replica)))
        for record, gradient in own.gradients.items():
            left = local.accumulate(replica, record, own.found.pop(record, None), gradient)
            if (parameter := record.parameter) is not None:
                parameter.grad = left
        for record, found in own.found.items():  # which this backward did not reach
            if (parameter := record.parameter) is not None:
                parameter.grad = found
        self._passes[replica] = _Pass()

    @property
    def _replica(self) -> int:
        assert self._scheduler.replica is not None, "_own_pass raises outside of a replica"
        return self._scheduler.replica

    def _add(self, own: _Pass) -> None:
        """Copy a replica's gradients to their slots, and add them to this rank's sums.

        Raises:
            GradientError: when the replica found a gradient that was set by hand; on this rank only.
        """
        sums, index, is_last = self._sums, self._scheduler.local_index, self._scheduler.is_last
        first_weight = self._state.local.first_weight(self._replica) if self._has_local(own) else None
        weight = sums.weight_after(index, first_weight).rows
        self._take_local(own)
        scale = sums.scale(weight)
        for record, found in own.found.items():
            if not self._state.has_given(record, found):
                record.require_published(found)
        if index == 0:
            self._earlier = {record: found.clone() for record, found in own.found.items()}
        for record in sums.records:
            parameter, gradient = record.parameter, own.gradients.get(record)
            record.restart(_pending(self._earlier.get(record)) if is_last else Pending())
            if parameter is not None and gradient is not None:
                parameter.grad = gradient
                record.take(parameter, scale)
            else:
                record.stand_in(scale)
        contribution = sums.contribution(weight, index)
        if index == 0:
            sums.n_sums += 1  # with the first contribution, by which `stop` knows that it was counted
        self._contributions.append(contribution)
        if self._local_sums is None:
            assert isinstance(sums.buckets, BucketSet), "shares are summed where each rank has one replica"
            self._local_sums = LocalSums(sums.buckets, sums.reducer)
        self._local_sums.add(self._replica, sums.counts(contribution, weight))
        if not is_last:  # its gradients are in the local sums; the last replica publishes
            for record in sums.records:
                record.restart(Pending())
                if (parameter := record.parameter) is not None:
                    parameter.grad = None

    def _has_local(self, own: _Pass) -> bool:
        """Return whether the replica has accumulated gradients under no_sync that this backward adds to."""
        local = self._state.local
        return any(local.holds(self._replica, record, gradient) for record, gradient in own.found.items())

    def _take_local(self, own: _Pass) -> None:
        """Add what the replica has accumulated under no_sync to this backward's gradients."""
        replica, local = self._replica, self._state.local
        kept = {record: found for record, found in own.found.items() if local.holds(replica, record, found)}
        for record, found in kept.items():
            gradient = own.gradients.get(record)
            own.gradients[record] = found if gradient is None else plus(found, gradient)
            del own.found[record]
        local.clear(replica)

    def _finish(self) -> None:
        local_sums, self._local_sums = self._local_sums, None
        contributions, self._contributions = self._contributions, []
        assert local_sums is not None, "every replica has added to them"
        self._sums.publish(local_sums.finish(self._sums.divisor_of), contributions)
        for record in self._sums.records:
            parameter, result = record.parameter, record.published
            # another replica may use the slot before all have seen the sum
            if record.part is not None and parameter is not None and result is not None and parameter.grad is result:
                record.leave(result.clone())
        self._state.share()

    def stop(self) -> None:
        """Forget what replicas did before an error stopped them."""
        self._passes = {replica: _Pass() for replica in self._scheduler.replicas}
        if self._contributions:  # begun here, but not summed: ranks with one replica have not counted it
            self._sums.n_sums -= 1
        self._contributions, self._earlier, self._local_sums = [], {}, None
        if self._sums.records:
            self._sums.drop()


def _pending(earlier: Tensor | None) -> Pending:
    """Return a gradient that an earlier backward left as pending: a sum to add to this one's, or zeros to keep."""
    if earlier is None or has_values(earlier):
        return Pending(earlier=earlier)
    return Pending(has_zeros=True)
