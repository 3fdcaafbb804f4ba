"""A backward with one replica in this process, from its first gradient to its end: buckets are summed and published.

`record.py` knows what becomes of one parameter's gradient, `bucket_set.py` when a bucket is complete. Several replicas
in one process use `GradientSums` too, and the hooks in `replicas/backward.py`.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.errors import GradientError
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.batch_weights import RowCounts
from hpcdist.gradients.bucket_set import BucketSet
from hpcdist.gradients.buffers import BufferRecord, average_buffers, gather_changed
from hpcdist.gradients.comm_hook import GradBucket
from hpcdist.gradients.local_rounds import LocalRounds
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replicas.local_sums import sum_rows
from hpcdist.gradients.sharded_buckets import ShardedBuckets
from hpcdist.gradients.sharded_gradient import ShardedRecord
from hpcdist.gradients.sparse import SparseRecord, sum_sparse
from hpcdist.runtime.step_flags import N_NUMBERS, StepFlags

#: Numbers that travel with the sums, beside one for each gradient and buffer, and the step flags.
_N_FACTS = 4
#: Backwards are numbered modulo this, so that sums of squares over thousands of replicas are exact in float32.
_NUMBERS = 31


@dataclass(frozen=True)
class Contribution:
    """What one replica adds to a sum outside of the buckets.

    Attributes:
        buffers: one for each, as `gather_changed` returns them.
        sparse: gradients of the sparse records.
        doubtful_rows: rows that must be as many on all replicas, as gradients are weighted wrongly otherwise.
    """

    buffers: list[Tensor | None]
    sparse: list[Tensor | None]
    doubtful_rows: int | None


class GradientSums:
    """What is summed at the end of every synchronized backward, and how the sums are published.

    Args:
        reducer: sums buckets, and knows which replicas there are.
        is_mean: whether gradients are averaged by rows instead of summed; None until it is settled.
        step_flags: requests to stop or save, which travel along.
        after_average: called when float buffers are equal on all replicas again.

    Attributes:
        is_mean: see above. If it is not given, the first scaled loss that reaches a backward settles it.
        row_counts: rows of the parts that each local replica has got, to weigh it by.
        records, buffers, buckets: what takes part. sparse_records: of the records, those outside of the buckets.
        n_sums: sums of gradients that this rank has begun.
        is_broken: whether sums may have begun that other ranks wait for in vain.
        rounds: of local steps; None: gradients are summed at every step.
        last_weight: of this rank's last replica in the last sum, in rows.
        n_entered_before: collectives that this rank's main thread had entered when the last sum was published.
        has_crossed: whether this backward went through the sum of an all_reduce, so that what one replica's loss gives
            to another replica's parameters is weighted by the rows of the latter.
    """

    def __init__(
        self,
        reducer: Reducer,
        is_mean: bool | None,
        step_flags: StepFlags,
        after_average: Callable[[], None] | None = None,
    ) -> None:
        self.reducer = reducer
        self.n_replicas = reducer.replicas.n_replicas
        self.is_mean = is_mean
        self.row_counts = [RowCounts() for _ in reducer.own_replicas]
        self.records: list[ParameterRecord] = []
        self.sparse_records: list[SparseRecord] = []
        self.buffers: list[BufferRecord] = []
        self.n_sums = 0
        self.is_broken = False
        self.last_weight = 1.0
        self.n_entered_before = 0
        self.has_crossed = False
        self._comm_hook: Callable[[GradBucket], Any] | None = None
        self._step_flags = step_flags
        self._after_average = after_average
        self.rounds: LocalRounds | None = None
        self._looks_for_infinity = "finite" in reducer.group.world.debug
        self._is_settled_by_loss = False
        self._scaled: deque[int] = deque(maxlen=1024)  # backwards that a scaled loss has reached, newest first

    def set_comm_hook(self, hook: Callable[[GradBucket], Any]) -> None:
        """Let a hook sum the gradients of each bucket of plans made from now on."""
        self._comm_hook = hook

    def make_rounds(self, rounds: LocalRounds) -> None:
        """Let replicas step on their own gradients in rounds."""
        self.rounds = rounds

    @property
    def is_local(self) -> bool:
        """Whether the step that is being made is on a replica's own gradients."""
        return self.rounds is not None and self.rounds.is_local

    def local_weight(self, weight: float) -> float:
        """Return what the gradients of a local step are multiplied by: as if all replicas had the same rows."""
        return float(weight > 0) * (1 if self.is_mean else self.n_replicas)

    def take_scaled_loss(self, loss: Tensor) -> None:
        """Sum gradients from the first backward on that reaches this loss, which is divided by the global batch."""
        if loss.requires_grad and self.is_mean is None:
            torch_hooks.at_gradient_of(loss, self._settle)

    def mark_scaled(self, loss: Tensor) -> None:
        """Mark backwards that reach this loss as those of a scaled loss."""
        if loss.requires_grad:
            torch_hooks.at_gradient_of(loss, self._note_scaled_loss)

    def _settle(self) -> None:
        if self.is_mean is None:
            self.is_mean, self._is_settled_by_loss = False, True

    def _note_scaled_loss(self) -> None:
        backward = torch_hooks.backward_id()
        if not self._scaled or self._scaled[0] != backward:
            self._scaled.appendleft(backward)

    def is_op_settled(self, backward: int) -> bool:
        """Return whether it is settled how the gradients of a backward combine."""
        return self.is_mean is not None and (not self._is_settled_by_loss or backward in self._scaled)

    def plan(
        self,
        records: Sequence[tuple[ParameterRecord, nn.Parameter]],
        buffers: list[BufferRecord],
        is_sharded: bool = False,
    ) -> None:
        """Sum these from now on; sharded: by shares. Collective on several hosts, and for shares: all replicas."""
        self.records = [record for record, _ in records]
        self.sparse_records = [record for record in self.records if isinstance(record, SparseRecord)]
        self.buffers = buffers
        n_counts = len(records) + len(buffers) + len(self.sparse_records) + _N_FACTS + N_NUMBERS
        in_buckets = [pair for pair in records if not isinstance(pair[0], SparseRecord)]
        self.buckets: BucketSet | ShardedBuckets
        if is_sharded:
            shared = [(record, owner) for record, owner in in_buckets if isinstance(record, ShardedRecord)]
            self.buckets = ShardedBuckets(shared, n_counts, self.reducer)
        else:
            self.buckets = BucketSet(in_buckets, n_counts, self.reducer, self._comm_hook)

    def weight_of(self, local_index: int) -> float:
        """Return the weight of a local replica's gradients, in rows."""
        return self.row_counts[local_index].weight(is_mean=bool(self.is_mean))

    def require_op(self, backward: int) -> None:
        """Raise GradientError unless it is settled how the gradients of a backward combine; on this rank only.

        At the end of the backward: until then a scaled loss may still come.
        """
        if self._is_settled_by_loss and backward not in self._scaled:
            raise GradientError(
                "backward: expected a loss scaled by hpcdist.compute_average_loss, as earlier ones were, got one that "
                "was not; scale it too, or make the strategy with the gradient_op that all losses are meant for."
            )
        if self.is_mean is None:
            raise GradientError(
                f"backward: expected to know how the gradients of {self.n_replicas} replicas combine, got no "
                f"gradient_op; scale the loss by hpcdist.compute_average_loss, or make the strategy with "
                f"gradient_op=ReduceOp.SUM (the loss is divided by the global batch) or ReduceOp.MEAN (the loss is a "
                f"mean over the local batch)."
            )

    def require_finite(self, record: ParameterRecord, gradient: Tensor) -> None:
        """Raise GradientError for NaN or infinity with HPCDIST_DEBUG=finite; on this rank only."""
        if not self._looks_for_infinity:
            return
        values = gradient._values() if gradient.is_sparse else gradient
        if not values.isfinite().all():
            raise GradientError(
                f"backward: expected finite gradients with HPCDIST_DEBUG=finite, got NaN or infinity in "
                f"{record.name!r} on {self.reducer.group.world.describe()}; look at the loss and the rows of this step."
            )

    def scale(self, weight: float) -> float:
        """Return what a replica's gradients are multiplied by."""
        return weight if self.is_mean else 1.0

    def changed_buffers(self, weight: float) -> list[bool]:
        """Return which buffers the current replica has changed; one without rows changes none."""
        return [weight > 0 and buffer.is_changed for buffer in self.buffers]

    def contribution(self, weight: float, local_index: int) -> "Contribution":
        """Return what a local replica, whose turn it is, adds that is in no bucket."""
        buffers = gather_changed(self.buffers, self.changed_buffers(weight))
        doubtful_rows = self.row_counts[local_index].doubtful_rows
        if doubtful_rows is None and self.is_mean and self.has_crossed:
            doubtful_rows = int(weight)
        return Contribution(buffers, [record.contribution for record in self.sparse_records], doubtful_rows)

    def counts(self, contribution: "Contribution", weight: float) -> list[float]:
        """Return what is summed along: which gradients and buffers there are, weight, backward number, step flags."""
        number, self.last_weight = self.n_sums % _NUMBERS, weight
        touched = [record.pending.is_touched for record in self.records]
        changed = [buffer is not None for buffer in contribution.buffers]
        dense = [gradient is not None and not gradient.is_sparse for gradient in contribution.sparse]
        facts = [contribution.doubtful_rows is not None, weight, number, number * number]
        return [*touched, *changed, *dense, *facts, *self._step_flags.own_numbers()]

    def divisor_of(self, totals: list[float]) -> float | None:
        """Return what sums are divided by: the weight of all replicas; None: nothing.

        Args:
            totals: sums of `counts` over all replicas.
        """
        total = totals[-N_NUMBERS - 3]  # before the number of the backward and its square
        return total if self.is_mean and total not in (0, 1) else None

    def publish(self, totals: list[float], contributions: Sequence["Contribution"]) -> None:
        """Make sums, which are divided already, and averages what parameters and buffers hold.

        Collective where buffers changed or there are sparse gradients: all ranks.

        Args:
            totals: sums of `counts` over all replicas.
            contributions: of each local replica.
        """
        *counted, n_doubtful, _, numbers, squares = totals[:-N_NUMBERS]
        if self.n_replicas * squares != numbers * numbers:
            self.is_broken = True
            raise GradientError(
                f"backward: expected every replica at the same backward, got number {self.n_sums} here and others "
                f"elsewhere; let all ranks run the same steps, also those without rows."
            )
        self._step_flags.record(totals[-N_NUMBERS:])
        try:
            if n_doubtful:
                self._require_equal_rows([own.doubtful_rows or 0 for own in contributions])
        finally:
            self.has_crossed = False
        n_touched, rest = counted[: len(self.records)], counted[len(self.records) :]
        n_changed, n_dense = rest[: len(self.buffers)], rest[len(self.buffers) :]
        if self.sparse_records:
            divisor, touched = self.divisor_of(totals), dict(zip(self.records, n_touched, strict=True))
            self._sum_sparse(touched, n_dense, contributions, divisor)
        for record, n in zip(self.records, n_touched, strict=True):
            record.publish(n)
        if self.buffers:
            average_buffers(self.buffers, [own.buffers for own in contributions], n_changed, self.reducer)
        if self._after_average is not None:
            self._after_average()
        self.n_entered_before = self.reducer.group.journal.n_entered

    def _require_equal_rows(self, rows: list[int]) -> None:
        """Raise GradientError on all ranks unless all replicas may use parts of as many rows: all weigh the same then.

        Collective: all ranks.
        """
        summed = sum_rows(self.reducer, [np.array([n, n * n]) for n in rows], "rows")
        if self.n_replicas * summed[1] == summed[0] ** 2:
            return
        expected, advice = (
            ("for a backward through all_reduce, all_gather or SyncBatchNorm", "drop_remainder=True")
            if self.has_crossed
            else (
                "for a backward after a pass whose parts no backward used",
                "each part before the next, torch.no_grad() to evaluate, drop_remainder=True",
            )
        )
        raise GradientError(
            f"backward: expected parts of as many rows on all replicas {expected}, with ReduceOp.MEAN, got {rows[-1]} "
            f"rows here and other numbers elsewhere; use {advice}, or compute_average_loss with ReduceOp.SUM."
        )

    def _sum_sparse(
        self,
        n_touched: dict[ParameterRecord, float],
        n_dense: Sequence[float],
        contributions: Sequence["Contribution"],
        divisor: float | None,
    ) -> None:
        numbers = [number for number, record in enumerate(self.sparse_records) if n_touched[record]]
        records = [self.sparse_records[number] for number in numbers]
        own = [[one.sparse[number] for number in numbers] for one in contributions]
        sum_sparse(records, own, [n_dense[number] for number in numbers], self.reducer)
        for record in records:
            if divisor is not None and record.total is not None:
                record.total.div_(divisor)

    def drop(self) -> None:
        """Forget a backward that began and never ended, because something in it raised."""
        self.has_crossed = False
        self.is_broken = self.is_broken or self.buckets.is_started
        self.buckets.reset()
        for record in self.records:
            record.drop()


class BackwardSum:
    """Sums the gradients of every synchronized backward over the replicas, one of which is in this process.

    Args:
        sums: what is summed, and how it is published.
    """

    def __init__(self, sums: GradientSums) -> None:
        self._sums = sums
        self._is_syncing = True
        self._backward: int | None = None  # torch's number of the running backward
        self._has_accumulated = False
        self._weight: float | None = None  # weight of the gradients in rows, also of those accumulated under no_sync
        self._scale = self._local_weight = 1.0  # of gradients that are summed, and of others

    @property
    def is_running(self) -> bool:
        """Whether a backward is running, or one ended in an error."""
        return self._backward is not None

    @property
    def is_syncing(self) -> bool:
        """Whether backwards sum: False inside `no_sync`."""
        return self._is_syncing

    @property
    def _is_summing(self) -> bool:
        return self._is_syncing and not self._sums.is_local

    def hook(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        """Take part in every backward that reaches a parameter."""
        is_overlapped = self._sums.reducer.route.is_overlapped and not isinstance(record, SparseRecord)
        after = self._after_accumulation_overlapped if is_overlapped else self._after_accumulation
        torch_hooks.before_accumulation(parameter, functools.partial(self._before_accumulation, record))
        torch_hooks.after_accumulation(parameter, functools.partial(after, record))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in the block accumulate this replica's gradients without a sum."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def _before_accumulation(self, record: ParameterRecord, gradient: Tensor) -> None:
        if self._backward != torch_hooks.backward_id():
            self._begin()
        parameter = record.reference()
        if parameter is not None and parameter.grad is not None:
            record.stash(parameter)

    def _begin(self) -> None:
        refuse_unsupported()
        if self._backward is not None:
            self._drop()
        if self._sums.is_broken:
            raise GradientError(
                "backward: expected earlier backwards to end, got one that failed when sums had begun on others; "
                "let the error end the job, and start it again."
            )
        self._backward = torch_hooks.backward_id()
        torch_hooks.at_end_of_backward(self._end)

    def _after_accumulation(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        if torch.is_grad_enabled():
            raise graph_refusal(record)
        if parameter.grad is None:  # the gradient is undefined: as if the backward had not reached the parameter
            if not self._is_summing:
                record.unstash()
            return
        self._sums.require_finite(record, parameter.grad)
        if not self._has_accumulated:
            self._weigh()
        if not self._is_summing:
            record.accumulate_locally(parameter, self._local_weight)
            return
        record.take(parameter, self._scale)

    def _after_accumulation_overlapped(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        self._after_accumulation(record, parameter)
        is_taken = self._is_summing and record.pending.is_touched
        if is_taken and self._sums.is_op_settled(self._backward or 0):  # else nothing is started before the end
            self._sums.buckets.count_arrival(record)

    def _weigh(self) -> None:
        """Find out how this backward's gradients are weighed, when it turns out that it accumulates some."""
        self._has_accumulated = True
        weight = self._sums.weight_of(0)
        if self._sums.is_local:
            self._weight, self._local_weight = None, self._sums.local_weight(weight)
            return
        if self._weight is not None and not any(record.has_local for record in self._sums.records):
            self._weight, self._sums.has_crossed = None, False  # what was accumulated under no_sync was thrown away
        if self._sums.is_mean and self._weight not in (None, weight):
            raise GradientError(
                f"backward: expected micro-batches of equal rows under no_sync with ReduceOp.MEAN, got "
                f"{self._weight:g} and {weight:g}; use drop_remainder, or compute_average_loss with ReduceOp.SUM."
            )
        self._weight, self._scale = weight, self._sums.scale(weight)

    @torch.no_grad()
    def _end(self) -> None:
        if not self._has_accumulated:  # torch.autograd.grad writes no gradients
            self._sums.has_crossed = False
            for record in self._sums.records:
                record.unstash()
        else:
            try:
                self._sums.require_op(self._backward or 0)
                if self._is_summing:
                    self._sum()
            except BaseException:
                self._drop()
                raise
            if self._is_summing:
                self._weight, self._scale = None, 1.0
        self._backward, self._has_accumulated = None, False

    def _sum(self) -> None:
        sums, weight = self._sums, 1.0 if self._weight is None else self._weight
        for record in sums.records:
            if not record.pending.is_touched:
                record.stand_in(self._scale)
        sums.n_sums += 1
        contribution = sums.contribution(weight, local_index=0)
        counts = sums.counts(contribution, weight)
        if isinstance(sums.buckets, BucketSet) and sums.buckets.has_hook:
            totals = sums.buckets.sum_counts(counts)
            touched = {record for record, n in zip(sums.records, totals, strict=False) if n}
            sums.buckets.sum_by_hook(touched, sums.divisor_of(totals))
        else:
            totals = sums.buckets.finish(counts, sums.divisor_of)
        sums.publish(totals, [contribution])

    def _drop(self) -> None:
        self._sums.drop()
        self._backward, self._has_accumulated = None, False
        self._weight, self._scale = None, 1.0


def graph_refusal(record: ParameterRecord) -> GradientError:
    """Return the error of a gradient that has a graph of its own."""
    return GradientError(
        f"backward: expected no create_graph=True, got a gradient with a graph for {record.name!r}; use "
        f"torch.autograd.grad for gradients of gradients."
    )


def refuse_unsupported() -> None:
    """Raise GradientError for a backward inside another one, or inside a compiled function; on this rank only."""
    if torch_hooks.is_nested_backward():
        raise GradientError(
            "backward: expected one backward at a time, got one inside another, as reentrant activation "
            "checkpointing does; pass use_reentrant=False to torch.utils.checkpoint."
        )
    if torch_hooks.is_compiled_backward():
        raise GradientError(
            "backward: expected a compiled model, got a compiled function that goes backward, whose sums torch.compile "
            "cannot trace; compile the model, by torch.compile(model) or model.compile(), not the step."
        )
