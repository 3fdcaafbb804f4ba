"""Backwards of several replicas in one process: each pushes its gradients, the last one sums them over all ranks.

Replicas run one at a time (`turns.py`), but a backward may wait in its middle while others go on, as SyncBatchNorm's
does. So a replica's gradients are only collected while its backward runs, and take their places when it has ended.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpcdist.errors import GradientError
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.backward import BackwardSum, refuse_graph, refuse_nested
from hpcdist.gradients.buffers import BufferRecord, gather_changed
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.turns import Turns


class _Pass:
    """One replica's backward: what it found in `grad`, and what it wrote there."""

    def __init__(self) -> None:
        self.backward: int | None = None
        self.found: dict[ParameterRecord, Tensor] = {}
        self.gradients: dict[ParameterRecord, Tensor] = {}


class ReplicaBackwardSum(BackwardSum):
    """Sums the gradients of every backward over the replicas, several of which are in this process.

    Args:
        reducer: sums buckets, and knows which replicas there are.
        is_mean: whether gradients are averaged by rows instead of summed; None until someone says.
        turns: whose turn it is.
        state: what each replica sees when it goes on after a sum.
    """

    def __init__(self, reducer: Reducer, is_mean: bool | None, turns: Turns, state: ReplicaState) -> None:
        super().__init__(reducer, is_mean)
        self._turns = turns
        self._state = state
        self._passes = {replica: _Pass() for replica in turns.replicas}
        self._contributions: list[list[Tensor | None]] = []
        self._earlier: dict[ParameterRecord, Tensor] = {}

    def plan(self, records: Sequence[tuple[ParameterRecord, nn.Parameter]], buffers: list[BufferRecord]) -> None:
        """Sum these from now on. Collective on several hosts: all ranks.

        Raises:
            GradientError: for parameters on a device, whose hooks torch calls in one thread for all replicas; on every
                rank that has several replicas.
        """
        elsewhere = [record.name for record, parameter in records if parameter.device.type != "cpu"]
        if elsewhere:
            raise GradientError(
                f"strategy: expected parameters on the host for {len(self._turns.replicas)} replicas of one rank, got "
                f"{elsewhere[0]!r} on a device; start as many ranks as replicas."
            )
        super().plan(records, buffers)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Refuse: gradients of several replicas share the parameters."""
        raise GradientError(
            f"no_sync: expected one replica on each rank, got {len(self._turns.replicas)} here; start as many ranks as "
            f"replicas, or accumulate in the loss."
        )
        yield

    @property
    def is_running(self) -> bool:
        """Whether a backward of the calling replica is under way."""
        return self._turns.replica is not None and self._own_pass().backward is not None

    def _own_pass(self) -> _Pass:
        replica = self._turns.replica
        if replica is None:
            raise GradientError(
                f"backward: expected a call inside strategy.run, as this rank has {len(self._turns.replicas)} "
                f"replicas, got one outside; put the step into a function and call strategy.run(step, args=(batch,))."
            )
        return self._passes[replica]

    def _before_accumulation(self, record: ParameterRecord) -> None:
        own, parameter = self._own_pass(), record.parameter
        if own.backward != torch_hooks.backward_id():
            refuse_nested()
            own.backward = torch_hooks.backward_id()
            torch_hooks.at_end_of_backward(self._end)
        if parameter is not None and parameter.grad is not None:
            own.found[record], parameter.grad = parameter.grad, None

    def _after_accumulation(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        refuse_graph(record)
        self._require_op()
        own, gradient = self._own_pass(), parameter.grad
        assert gradient is not None, "autograd writes the gradient before it calls this"
        own.gradients[record] = gradient
        parameter.grad = None

    @torch.no_grad()
    def _end(self) -> None:
        own = self._own_pass()
        if own.gradients:
            self._find_rest(own)
            self._push(own)
            self._forget(own)
            self._turns.meet("a backward")
            if self._turns.is_last:
                self._finish()
                self._turns.part()
        else:
            self._put_back(own)

    def _find_rest(self, own: _Pass) -> None:
        """Set aside what parameters hold that this backward did not reach."""
        for record in self._records:
            parameter = record.parameter
            if parameter is not None and parameter.grad is not None:
                own.found[record], parameter.grad = parameter.grad, None

    def _put_back(self, own: _Pass) -> None:
        for record, found in own.found.items():
            if (parameter := record.parameter) is not None:
                parameter.grad = found
        self._forget(own)

    def _forget(self, own: _Pass) -> None:
        own.found, own.gradients, own.backward = {}, {}, None

    def _push(self, own: _Pass) -> None:
        """Give a replica's gradients their places, and add them to this rank's sums.

        Raises:
            GradientError: when the replica found a gradient that was set by hand; on this rank only.
        """
        place = self._turns.place
        for record, found in own.found.items():
            record.require_summed(found)
        self._weight = self.handed[place].weight(is_mean=bool(self.is_mean))
        changed = [self._weight > 0 and buffer.is_changed for buffer in self._buffers]
        if place == 0:
            self._earlier = {record: found.clone() for record, found in own.found.items()}
        for record in self._records:
            self._bring(record, own.gradients.get(record))
        if place == 0:
            self._n_sums += 1
        self._contributions.append(gather_changed(self._buffers, changed))
        self._buckets.push(self._turns.replicas[place], self._counts(changed, self._weight))
        if not self._turns.is_last:
            for record in self._records:
                record.forget()

    def _bring(self, record: ParameterRecord, gradient: Tensor | None) -> None:
        parameter = record.parameter
        if parameter is not None:
            record.bring(parameter, gradient, self._earlier.get(record) if self._turns.is_last else None)
        if gradient is not None and parameter is not None:
            record.take(parameter, self._scale)
        else:
            record.stand_in(self._scale)

    def _finish(self) -> None:
        contributions, self._contributions = self._contributions, []
        self._publish(self._buckets.finish_pushed(), contributions)
        self._weight = None
        for record in self._records:
            record.keep_apart()
        self._state.share()

    def stop(self) -> None:
        """Forget what replicas did that an error has stopped."""
        self._passes = {replica: _Pass() for replica in self._turns.replicas}
        if self._contributions:  # begun here, but not summed: ranks with one replica have not counted it
            self._n_sums -= 1
        self._contributions, self._earlier = [], {}
        if self._records:
            self._drop()
