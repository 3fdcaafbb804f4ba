"""From the first gradient of a backward to its end: gradients are taken, buckets summed, sums published.

`parameter.grad` is found, set aside, replaced: `record.py` knows what it holds. Buckets know when they are complete:
`bucket_set.py`. This file knows about the backward as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpcdist.errors import GradientError
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.bucket_set import BucketSet
from hpcdist.gradients.buffers import BufferRecord, average_buffers, gather_changed
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.rows import HandedRows
from hpcdist.notices import N_NUMBERS, Notices

#: Backwards are numbered modulo this, so that sums of squares over thousands of replicas are exact in float32.
_NUMBERS = 31


class BackwardSum:
    """Sums the gradients of every synchronized backward over the replicas.

    Args:
        reducer: sums buckets, and knows which replicas there are.
        is_mean: whether gradients are averaged by rows instead of summed; None until someone says.

    Attributes:
        is_mean: see above.
        handed: rows of the parts that each local replica was handed, to weigh it by.
        is_running: whether a backward is under way, or one ended in an error.
        notices: what ranks tell each other with every sum.
        on_averaged: called when buffers are the same on all replicas again.
    """

    def __init__(self, reducer: Reducer, is_mean: bool | None) -> None:
        self._reducer = reducer
        self._n_replicas = reducer.replicas.n_replicas
        self.is_mean = is_mean
        self.handed = [HandedRows() for _ in reducer.own_replicas]
        self.notices = Notices()
        self.on_averaged: Callable[[], None] | None = None
        self._records: list[ParameterRecord] = []
        self._buffers: list[BufferRecord] = []
        self._is_syncing = True
        self._backward: int | None = None
        self._has_accumulated = False
        self._weight: float | None = None
        self._is_broken = False
        self._n_sums = 0

    @property
    def is_running(self) -> bool:
        """Whether a backward is under way, or one ended in an error."""
        return self._backward is not None

    def plan(self, records: Sequence[tuple[ParameterRecord, nn.Parameter]], buffers: list[BufferRecord]) -> None:
        """Sum these from now on. Collective on several hosts: all replicas."""
        self._records = [record for record, _ in records]
        self._buffers = buffers
        n_counts = len(records) + len(buffers) + 3 + N_NUMBERS
        self._buckets = BucketSet(records, n_counts, self._reducer)

    def hook(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        """Take part in every backward that reaches a parameter."""
        torch_hooks.before_accumulation(parameter, lambda: self._before_accumulation(record))
        torch_hooks.after_accumulation(parameter, lambda owner: self._after_accumulation(record, owner))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in the block accumulate this replica's gradients without a sum."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def _before_accumulation(self, record: ParameterRecord) -> None:
        if self._backward != torch_hooks.backward_id():
            self._begin()
        parameter = record.parameter
        if parameter is not None:
            record.set_aside(parameter)

    def _after_accumulation(self, record: ParameterRecord, parameter: nn.Parameter) -> None:
        refuse_graph(record)
        if not self._has_accumulated:
            self._weigh()
        if self._is_syncing:
            record.take(parameter, self._scale)
            self._buckets.arrived(record)
        else:
            record.accumulate_locally(parameter)

    def _begin(self) -> None:
        refuse_nested()
        if self._backward is not None:
            self._drop()
        if self._is_broken:
            raise GradientError(
                "backward: expected earlier backwards to end, got one that failed when sums had begun on others; "
                "let the error end the job, and start it again."
            )
        self._backward = torch_hooks.backward_id()
        torch_hooks.at_end_of_backward(self._end)

    def _weigh(self) -> None:
        """Find out how this backward's gradients are weighed, when it turns out that it accumulates some."""
        self._has_accumulated = True
        self._require_op()
        weight = self.handed[0].weight(is_mean=bool(self.is_mean))
        if self._weight is not None and not any(record.is_local for record in self._records):
            self._weight = None  # what was accumulated under no_sync was thrown away
        if self.is_mean and self._weight not in (None, weight):
            raise GradientError(
                f"backward: expected micro-batches of equal rows under no_sync with ReduceOp.MEAN, got "
                f"{self._weight:g} and {weight:g}; use drop_remainder, or compute_average_loss with ReduceOp.SUM."
            )
        self._weight = weight

    def _require_op(self) -> None:
        if self.is_mean is None:
            raise GradientError(
                f"backward: expected to know how the gradients of {self._n_replicas} replicas combine, got no "
                f"gradient_op; scale the loss by hpcdist.compute_average_loss, or make the strategy with "
                f"gradient_op=ReduceOp.SUM (the loss is divided by the global batch) or ReduceOp.MEAN (the loss is a "
                f"mean over the local batch)."
            )

    def _drop(self) -> None:
        """Forget a backward that began and never ended, because something in it raised."""
        self._is_broken = self._is_broken or self._buckets.is_under_way
        self._buckets.reset()
        for record in self._records:
            record.drop()
        self._backward, self._has_accumulated, self._weight = None, False, None

    @torch.no_grad()
    def _end(self) -> None:
        if not self._has_accumulated:
            for record in self._records:
                record.put_back()
        elif self._is_syncing:
            try:
                self._sum()
            except BaseException:
                self._drop()
                raise
            self._weight = None
        self._backward, self._has_accumulated = None, False

    @property
    def _own_weight(self) -> float:
        return 1.0 if self._weight is None else self._weight

    @property
    def _scale(self) -> float:
        """What this replica's gradients are multiplied by."""
        return self._own_weight if self.is_mean else 1.0

    def _sum(self) -> None:
        weight = self._own_weight
        changed = [weight > 0 and buffer.is_changed for buffer in self._buffers]
        for record in self._records:
            if not record.is_touched:
                record.stand_in(self._scale)
        self._n_sums += 1
        totals = self._buckets.finish(self._counts(changed, weight))
        self._publish(totals, [gather_changed(self._buffers, changed)])

    def _counts(self, changed: list[bool], weight: float) -> list[float]:
        """Return what is summed along: who has which gradient and buffer, the weight, which backward, and notices."""
        number, touched = self._n_sums % _NUMBERS, (record.is_touched for record in self._records)
        return [*touched, *changed, weight, number, number * number, *self.notices.send()]

    def _publish(self, totals: list[float], contributions: list[list[Tensor | None]]) -> None:
        """Make sums and averages what parameters and buffers hold. Collective where buffers changed: all ranks."""
        *counted, total, numbers, squares = totals[:-N_NUMBERS]
        if self._n_replicas * squares != numbers * numbers:
            self._is_broken = True
            raise GradientError(
                f"backward: expected every replica at the same backward, got number {self._n_sums} here and others "
                f"elsewhere; let all ranks run the same steps, also those without rows."
            )
        self.notices.receive(totals[-N_NUMBERS:])
        if self.is_mean and total not in (0, 1):
            self._buckets.divide(total)
        for record, n_touched in zip(self._records, counted, strict=False):
            record.publish(n_touched)
        if self._buffers:
            average_buffers(self._buffers, contributions, counted[len(self._records) :], self._reducer)
        if self.on_averaged is not None:
            self.on_averaged()


def refuse_graph(record: ParameterRecord) -> None:
    """Raise GradientError where a gradient has a graph of its own; on this rank only."""
    if torch.is_grad_enabled():
        raise GradientError(
            f"backward: expected no create_graph=True, got a gradient with a graph for {record.name!r}; use "
            f"torch.autograd.grad for gradients of gradients."
        )


def refuse_nested() -> None:
    """Raise GradientError for a backward inside another one; on this rank only."""
    if torch_hooks.is_nested_backward():
        raise GradientError(
            "backward: expected one backward at a time, got one inside another, as reentrant activation "
            "checkpointing does; pass use_reentrant=False to torch.utils.checkpoint."
        )
