"""A backward with one replica in this process, from its first gradient to its end: buckets are summed and published.

`record.py` knows what becomes of one parameter's gradient, `bucket_set.py` when a bucket is complete. Several replicas
in one process use `GradientSums` too, and the hooks in `replicas/backward.py`.
"""

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.errors import DesyncError, GradientError, agreed
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.bucket_set import BucketSet
from hpcdist.gradients.buffers import BufferRecord, average_buffers, gather_changed
from hpcdist.gradients.comm_hook import GradBucket
from hpcdist.gradients.drift import StateDigests, odd_ranks
from hpcdist.gradients.local_rounds import LocalRounds
from hpcdist.gradients.part_weights import Weight, weigh
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replicas.local_sums import sum_rows
from hpcdist.gradients.sharded_buckets import ShardedBuckets
from hpcdist.gradients.sharded_gradient import ShardedRecord
from hpcdist.gradients.sparse import SparseRecord, sum_sparse
from hpcdist.runtime.step_flags import N_NUMBERS, StepFlags

#: Numbers that must agree travel modulo these, so that sums of squares over thousands of replicas are exact in float32.
_MODULI = (31, 29)
#: Extra values in the last bucket, beside one for each gradient and buffer, and the step flags: see `Facts`.
_N_FACTS = 6 + 2 * (1 + 2 * len(_MODULI))
#: Index of the weight of all replicas among the sums of `GradientSums.counts`.
_WEIGHT = -N_NUMBERS - _N_FACTS + 5
_sums_numbers = itertools.count(1)
#: Most ranks that a text lists.
_MAX_NAMED = 8
logger = logging.getLogger("hpcdist")


class Contribution(NamedTuple):
    """What one replica adds to a sum outside of the buckets.

    Attributes:
        buffers: one for each, as `gather_changed` returns them.
        sparse: gradients of the sparse records.
        doubtful_rows: rows that must be as many on all replicas, as gradients are weighted wrongly otherwise.
        refusal: why the gradients cannot be weighted; None if they can.
        key: names the batch, if one is known.
        has_entry: whether a forward was seen that could begin the iteration.
        has_peeks: whether passes were begun of which nothing was used.
    """

    buffers: list[Tensor | None]
    sparse: list[Tensor | None]
    doubtful_rows: int | None
    refusal: str | None
    key: int | None
    has_entry: bool
    has_peeks: bool


class Facts(NamedTuple):
    """What all ranks learn of a backward beside its sums: sums over all replicas of numbers that each adds.

    Attributes:
        n_doubtful: replicas that may be weighted wrongly.
        n_refused: replicas that cannot be weighted.
        n_keyed: replicas that know which batch they have used.
        n_entered: replicas that have seen a forward which could begin the iteration.
        n_peeked: replicas that have begun passes of which nothing was used.
        weight: rows of all replicas.
        numbers: of the backward, and the sum of its squares.
        keys: of the batch, for each modulus, and the sum of their squares.
        states: digests of what must be equal on all ranks, in the same way.
    """

    n_doubtful: float
    n_refused: float
    n_keyed: float
    n_entered: float
    n_peeked: float
    weight: float
    numbers: tuple[float, float]
    keys: tuple[tuple[float, float], ...]
    states: tuple[tuple[float, float], ...]

    @classmethod
    def decode(cls, values: Sequence[float]) -> "Facts":
        """Return the facts that `encode_facts` made into numbers."""
        n_doubtful, n_refused, n_keyed, n_entered, n_peeked, weight, *pairs = values
        numbers, *digests = zip(pairs[::2], pairs[1::2], strict=True)
        keys, states = tuple(digests[: len(_MODULI)]), tuple(digests[len(_MODULI) :])
        return cls(n_doubtful, n_refused, n_keyed, n_entered, n_peeked, weight, numbers, keys, states)

    @property
    def key(self) -> list[int] | None:
        """Remainders of the key of the batch, if a replica knows it."""
        return [round(total / self.n_keyed) for total, _ in self.keys] if self.n_keyed else None

    @property
    def is_same_batch(self) -> bool:
        """Whether all replicas that know their batch have used the same."""
        return all(self.n_keyed * squares == total * total for total, squares in self.keys)

    def is_same_state(self, n_replicas: int) -> bool:
        """Return whether all replicas have the same digest of what must be equal."""
        return all(n_replicas * squares == total * total for total, squares in self.states)


def encode_facts(contribution: Contribution, weight: float, backward_number: int, state: int = 0) -> list[float]:
    """Return what a replica adds to the facts of a backward.

    Args:
        contribution: of the replica.
        weight: in rows.
        backward_number: how many backwards were summed before.
        state: digest of what must be equal on all ranks.
    """
    number = backward_number % _MODULI[0]
    key = contribution.key or 0
    values: list[float] = [
        contribution.doubtful_rows is not None,
        contribution.refusal is not None,
        contribution.key is not None,
        contribution.has_entry,
        contribution.has_peeks,
        weight,
        number,
        number * number,
    ]
    for digest in (key, state):
        for modulus in _MODULI:
            remainder = digest % modulus
            values += (remainder, remainder * remainder)
    return values


class GradientSums:
    """What is summed at the end of every synchronized backward, and how the sums are published.

    Args:
        reducer: sums buckets, and knows which replicas there are.
        is_mean: whether gradients are averaged by rows instead of summed; None until it is settled.
        step_flags: requests to stop or save, which travel along.
        after_average: called when float buffers are equal on all replicas again.

    Attributes:
        number: names these sums in this process.
        is_mean: see above. If it is not given, the first scaled loss that reaches a backward settles it.
        weights: of the last backward of each local replica.
        records, buffers, buckets: what takes part. sparse_records: of the records, those outside of the buckets.
        n_sums: sums of gradients that this rank has begun.
        is_broken: whether sums may have begun that other ranks wait for in vain.
        rounds: of local steps; None: gradients are summed at every step.
        last_weight: of this rank's last replica in the last sum, in rows.
        n_entered_before: collectives that this rank's main thread had entered when the last sum was published.
        states: digests of what must be equal on all ranks.
        copies: digests of copies of the model that the program trains outside of the scope.
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
        self.number = next(_sums_numbers)
        self.reducer = reducer
        self.n_replicas = reducer.replicas.n_replicas
        self.is_mean = is_mean
        self.weights = [Weight() for _ in reducer.own_replicas]
        self._own_row_counts: list[int | None] = [None for _ in reducer.own_replicas]
        self.records: list[ParameterRecord] = []
        self.sparse_records: list[SparseRecord] = []
        self.buffers: list[BufferRecord] = []
        self.n_sums = 0
        self.is_broken = False
        self.last_weight = 1.0
        self.n_entered_before = 0
        self.has_crossed = False
        self.states = StateDigests()
        self.copies = StateDigests()
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

    def _weigh_by_parts(self, local_index: int) -> Weight:
        """Return the weight of the running backward by the parts that it may use."""
        loop = self._step_flags.loop
        weight = weigh(loop.candidates(self.number), local_index, loop.uses().likely_rows)
        if self.is_mean and not weight.is_planned:
            loop.keep_watching()  # to notice replicas that have other numbers of rows
        return weight

    def note_managed(self) -> None:
        """Note that the running backward makes gradients of these parameters."""
        self._step_flags.loop.note_managed()

    def set_row_count(self, local_index: int, n_rows: int) -> None:
        """Weigh the next backward of a local replica by a number of rows that the program gives."""
        self._own_row_counts[local_index] = n_rows

    def weight_of(self, local_index: int) -> Weight:
        """Return the weight of a local replica's gradients, in rows."""
        own_row_count = self._own_row_counts[local_index]
        if own_row_count is None:
            weight = self._weigh_by_parts(local_index)
        else:
            weight = Weight(float(own_row_count), is_planned=True)
        self.weights[local_index] = weight
        return weight

    def weight_after(self, local_index: int, first: Weight | None) -> Weight:
        """Return the weight of a backward that has ended, and whose gradients are added to those of a first one.

        Args:
            local_index: of the replica.
            first: weight of the first backward that was accumulated under no_sync; None without any.
        """
        self.weight_of(local_index)
        if self.is_mean and first is not None:
            self.require_fraction(local_index, first)
        self._own_row_counts[local_index] = None
        return self.weights[local_index]

    def require_fraction(self, local_index: int, first: Weight) -> None:
        """Refuse a backward whose part has another fraction than that of the first one that gradients are added to."""
        weight = self.weights[local_index]
        refusal = first.refusal or weight.refusal
        if refusal is None and not weight.has_fraction_of(first):
            refusal = _fraction_refusal(first, weight)
        self.weights[local_index] = weight._replace(refusal=refusal)

    def check_weight(self, local_index: int) -> None:
        """Refuse a backward, at its end, that has reached parts of another fraction than it was weighted by."""
        if self._own_row_counts[local_index] is not None:
            self._own_row_counts[local_index] = None
            return
        weight = self.weights[local_index]
        if not self._step_flags.loop.needs_identity:  # nothing new is known since the first gradient
            return
        at_end = self._weigh_by_parts(local_index)
        if weight.refusal is None and (at_end.refusal or not at_end.has_fraction_of(weight)):
            refusal = at_end.refusal or _fraction_refusal(weight, at_end)
            self.weights[local_index] = weight._replace(refusal=refusal)

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
        used = self.weights[local_index]
        doubtful_rows = used.doubtful_rows if self.is_mean else None
        if doubtful_rows is None and self.is_mean and self.has_crossed:
            doubtful_rows = int(weight)
        sparse = [record.contribution for record in self.sparse_records]
        refusal = used.refusal if self.is_mean else None
        key = used.key if used.is_planned or self.is_mean else None
        loop = self._step_flags.loop
        return Contribution(buffers, sparse, doubtful_rows, refusal, key, loop.has_entry, loop.has_peeks)

    def counts(self, contribution: "Contribution", weight: float) -> list[float]:
        """Return what is summed along: which gradients and buffers there are, weight, backward number, step flags."""
        self.last_weight = weight
        touched = [record.pending.is_touched for record in self.records]
        changed = [buffer is not None for buffer in contribution.buffers]
        dense = [gradient is not None and not gradient.is_sparse for gradient in contribution.sparse]
        facts = encode_facts(contribution, weight, self.n_sums, self.state_digest())
        return [*touched, *changed, *dense, *facts, *self._step_flags.own_numbers()]

    def state_digest(self) -> int:
        """Return the digest that this sum compares; 0 for nothing, as where ranks step on their own for a while."""
        if self.rounds is not None:
            return 0
        return self.states.digest_at(self.n_sums) ^ self.copies.digest_at(self.n_sums)

    def divisor_of(self, totals: list[float]) -> float | None:
        """Return what sums are divided by: the weight of all replicas; None: nothing.

        Args:
            totals: sums of `counts` over all replicas.
        """
        total = totals[_WEIGHT]
        return total if self.is_mean and total not in (0, 1) else None

    def publish(self, totals: list[float], contributions: Sequence["Contribution"]) -> None:
        """Make sums, which are divided already, and averages what parameters and buffers hold.

        Collective where buffers changed or there are sparse gradients: all ranks.

        Args:
            totals: sums of `counts` over all replicas.
            contributions: of each local replica.
        """
        counted = totals[: -N_NUMBERS - _N_FACTS]
        facts = _facts_in(totals)
        self._require_same_backward(facts)
        if not facts.is_same_state(self.n_replicas):
            self._report_drift()
        self._step_flags.record(totals[-N_NUMBERS:])
        is_named = all(weight.is_planned or weight.key is None for weight in self.weights)
        key = facts.key if is_named else None
        is_entered = facts.n_entered == self.n_replicas
        self._step_flags.loop.share(is_entered, facts.n_peeked > 0, key, _MODULI)
        if facts.n_refused:
            self.is_broken = True
            refusals = [contribution.refusal for contribution in contributions if contribution.refusal is not None]
            raise agreed(GradientError(refusals[0] if refusals else _REFUSED_ELSEWHERE))
        try:
            if facts.n_doubtful:
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

    def _require_same_backward(self, facts: Facts) -> None:
        """Raise GradientError on all ranks unless all replicas are at the same backward, of the same batch."""
        numbers, squares = facts.numbers
        if self.n_replicas * squares != numbers * numbers:
            self.is_broken = True
            raise GradientError(
                f"backward: expected every replica at the same backward, got number {self.n_sums} here and others "
                f"elsewhere; let all ranks run the same steps, also those without rows."
            )
        if not facts.is_same_batch:
            self.is_broken = True
            raise agreed(
                GradientError(_OTHER_BATCHES if all(weight.is_planned for weight in self.weights) else _OTHER_ROWS)
            )

    def _report_drift(self) -> None:
        """Raise DesyncError on all ranks, naming those that differ; of copies of the model, warn once.

        Collective: all ranks.
        """
        group, number = self.reducer.group, self.n_sums
        own_digests = np.array([self.states.digest_at(number), self.copies.digest_at(number)])
        digests = np.empty((group.size, 2), np.int64)
        group.wait([group.comm.Iallgather(own_digests, digests)])
        odd = odd_ranks(digests[:, 0].tolist())
        if not odd:
            self._warn_of_copies(odd_ranks(digests[:, 1].tolist()))
            return
        self.is_broken = True
        self.states.note_report()
        raise agreed(
            DesyncError(
                f"backward: expected {self.states.describe(number)} to be equal on all {group.size} ranks, got others "
                f"on rank {', '.join(map(str, odd[:_MAX_NAMED]))}; look for a schedule that is fed by local losses, "
                f"load_state_dict on some ranks only, and code that changes parameters there."
            )
        )

    def _warn_of_copies(self, odd: Sequence[int]) -> None:
        self.copies = StateDigests()
        if self.reducer.group.rank == 0 and odd:
            logger.warning(
                "backward: expected copies of the model that are trained to be equal on all ranks, got others on rank "
                "%s; make them in strategy.scope(), or leave them if each rank is to have its own.",
                ", ".join(map(str, odd[:_MAX_NAMED])),
            )

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


def _facts_in(totals: Sequence[float]) -> Facts:
    """Return the facts among the sums of `GradientSums.counts` over all replicas."""
    return Facts.decode(totals[-N_NUMBERS - _N_FACTS : -N_NUMBERS])


_OTHER_BATCHES = (
    "backward: expected parts of the same global batch on all replicas, got other batches elsewhere; let all ranks "
    "draw the same batches: what one rank alone needs, as for a plot, it reads from the dataset itself, or it takes "
    "one batch and begins again."
)
_OTHER_ROWS = (
    "backward: expected as many rows on all replicas with ReduceOp.MEAN, for batches that no distributed dataset has "
    "planned, got inputs of another length elsewhere; call strategy.set_row_count(n_rows) before the backward on every "
    "rank, or train on strategy.experimental_distribute_dataset(loader)."
)
_REFUSED_ELSEWHERE = (
    "backward: expected parts that can be weighted with ReduceOp.MEAN on all replicas, got some elsewhere that cannot; "
    "look at the line of that rank."
)


def _fraction_refusal(first: Weight, second: Weight) -> str:
    return (
        f"backward: expected parts, or micro-batches, of the same fraction of their batches with ReduceOp.MEAN, got "
        f"{first.rows:g} rows of {first.total_rows or 'an unknown number'} and {second.rows:g} of "
        f"{second.total_rows or 'an unknown number'}; use drop_remainder=True, or compute_average_loss with "
        f"ReduceOp.SUM."
    )


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
        self._weight: Weight | None = None  # of the gradients, also of those accumulated under no_sync
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
        sums = self._sums
        weight = sums.weight_of(0)
        if sums.is_local:
            self._weight = None
            self._local_weight = sums.local_weight(weight.rows)
            return
        if self._weight is not None and not any(record.has_local for record in sums.records):
            self._weight = None
            sums.has_crossed = False  # what was accumulated under no_sync was thrown away
        if sums.is_mean and self._weight is not None:
            sums.require_fraction(0, self._weight)
        self._weight = sums.weights[0]
        self._scale = sums.scale(weight.rows)

    @torch.no_grad()
    def _end(self) -> None:
        if not self._has_accumulated:  # torch.autograd.grad writes no gradients
            self._sums.has_crossed = False
            for record in self._sums.records:
                record.unstash()
        else:
            self._sums.note_managed()
            try:
                self._sums.check_weight(0)
                self._sums.require_op(self._backward or 0)
                if self._is_summing:
                    self._sum()
            except BaseException:
                self._drop()
                raise
            if self._is_summing:
                self._weight = None
                self._scale = 1.0
            elif self._weight is not None:
                self._weight = self._sums.weights[0]
        self._backward, self._has_accumulated = None, False

    def _sum(self) -> None:
        sums = self._sums
        weight = 1.0 if self._weight is None else self._weight.rows
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
        self._weight = None
        self._scale = 1.0


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
