"""The sums at the end of every synchronized backward, and how they are published."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcdist.collectives.options import CommunicationImplementation
from hpcdist.errors import DesyncError, GradientError, agreed
from hpcdist.gradients.buckets import Buckets, PrivateBuckets
from hpcdist.gradients.buffers import BufferRecord, average_buffers, find_changed, gather_changed
from hpcdist.gradients.comm_hook import GradBucket
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.facts import (
    MODULI,
    N_BEHIND_COUNTS,
    Contribution,
    Facts,
    counts_in,
    encode_facts,
    facts_in,
    flags_in,
    weight_in,
)
from hpcdist.gradients.local_rounds import LocalRounds
from hpcdist.gradients.local_sums import LocalSums, sum_rows
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.sharded import ShardedSlot
from hpcdist.gradients.shared_buckets import ShareSums, WholeSums
from hpcdist.gradients.slot import Slot
from hpcdist.gradients.sparse import SparseSlot, sum_sparse
from hpcdist.gradients.weights import GradientOp, RowWeights
from hpcdist.program.drift import StateDigests, are_there, odd_ranks
from hpcdist.program.part_weights import Weight
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.step_flags import StepFlags

_sums_numbers = itertools.count(1)
#: Largest number of ranks that a text lists.
_MAX_NAMED = 8
logger = logging.getLogger("hpcdist")


class GradientSums:
    """The sums of one strategy.

    Args:
        reducer: sums buckets, and knows which replicas there are.
        is_mean: whether gradients are averaged by rows instead of summed; None until it is settled.
        step_flags: requests to stop or save, which travel with the sums.

    Attributes:
        number: number that names these sums in this process.
        reducer: sums buckets.
        n_replicas: number of replicas of all ranks.
        op: how gradients combine.
        weights: rows by which the gradients of each local replica are weighted.
        slots: slots of the gradients that are summed; slots in buckets come first.
        sparse_slots: slots that are in no bucket.
        buffers: float buffers, which are averaged.
        n_sums: number of sums of gradients that this rank has begun.
        is_broken: whether sums may have begun that other ranks will wait for, and that never end.
        rounds: rounds of local steps; None if gradients are summed at every step.
        last_weight: rows of this rank's last replica in the last sum.
        n_entered_before: number of collectives that this rank's main thread had entered when the last sum was
            published.
        states: digests of the state that must be equal on all ranks.
        copies: digests of copies of the model that the program trains outside of the scope.
    """

    def __init__(
        self,
        reducer: Reducer,
        is_mean: bool | None,
        step_flags: StepFlags,
    ) -> None:
        self.number = next(_sums_numbers)
        self.reducer = reducer
        self.n_replicas = reducer.replicas.n_replicas
        n_local = len(reducer.own_replicas)
        self.op = GradientOp(is_mean, self.n_replicas)
        self.weights = RowWeights(self.op, step_flags.loop, self.number, n_local)
        self.slots: Sequence[Slot] = ()
        self.sparse_slots: Sequence[SparseSlot] = ()
        self.buffers: Sequence[BufferRecord] = ()
        self.n_sums = 0
        self.is_broken = False
        self.rounds: LocalRounds | None = None
        self.last_weight = 1.0
        self.n_entered_before = 0
        self.states = StateDigests()
        self.copies = StateDigests()
        self._buckets: Buckets | None = None
        self._local_sums: LocalSums | None = None
        self._contributions: list[Contribution] = []
        self._n_in_buckets = 0
        self._comm_hook: Callable[[GradBucket], Any] | None = None
        self._step_flags = step_flags
        self._has_several = n_local > 1

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

    def note_managed(self) -> None:
        """Note that the running backward makes gradients of the strategy's parameters."""
        self._step_flags.loop.note_managed()

    # -- the plan ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        slots: Sequence[Slot],
        buffers: Sequence[BufferRecord],
    ) -> None:
        """Sum these gradients, and average these buffers, from now on.

        Collective over all replicas where memory is shared, and on several hosts.
        """
        in_buckets = [slot for slot in slots if slot.is_in_bucket]
        self.sparse_slots = [slot for slot in slots if isinstance(slot, SparseSlot)]
        self.slots = [*in_buckets, *self.sparse_slots]
        self.buffers = buffers
        self._n_in_buckets = len(in_buckets)
        n_counts = len(slots) + len(buffers) + len(self.sparse_slots) + N_BEHIND_COUNTS
        self._buckets = self._make_buckets(in_buckets, n_counts)
        if self._has_several:
            assert isinstance(self._buckets, PrivateBuckets), (
                "memory is shared by ranks of one replica each"
            )
            self._local_sums = LocalSums(self._buckets, self.reducer)

    def _make_buckets(self, slots: Sequence[Slot], n_counts: int) -> Buckets:
        """Return the buckets of gradients by how their sums are made. Collective where `plan` is collective."""
        sharded_slots = [slot for slot in slots if isinstance(slot, ShardedSlot)]
        if sharded_slots:
            return ShareSums(sharded_slots, n_counts, self.reducer)
        dense_slots = [slot for slot in slots if isinstance(slot, DenseSlot)]
        route = self.reducer.route
        has_one_each = self.n_replicas == self.reducer.group.size
        is_in_shared_memory = route.algorithm is CommunicationImplementation.SHARED_MEMORY
        is_on_host = self.reducer.device.type == "cpu"
        may_share = is_in_shared_memory and not route.by_subtrees
        if may_share and has_one_each and is_on_host and self._comm_hook is None:
            return WholeSums(dense_slots, n_counts, self.reducer)
        return PrivateBuckets(dense_slots, n_counts, self.reducer, self._comm_hook)

    @property
    def buckets(self) -> Buckets:
        """The buckets of the plan."""
        assert self._buckets is not None, "hooks of parameters are made with the plan"
        return self._buckets

    # -- one sum ----------------------------------------------------------------------------------------------------

    def add(
        self,
        replica: int,
        gradients: Sequence[Tensor | None],
        is_touched: Sequence[bool],
        weight: Weight,
        has_crossed: bool,
    ) -> list[float]:
        """Take the gradients that a local replica adds to the next sum, in its turn; return its counts.

        Args:
            replica: number of the replica.
            gradients: gradient of each slot; None where the replica adds none.
            is_touched: for each slot, whether there is a gradient, even one of zeros.
            weight: weight of the gradients.
            has_crossed: whether the backward went through the sum of an all_reduce.
        """
        scale = self.op.scale(weight.rows)
        self.buckets.fill(gradients, scale)
        sparse_gradients = gradients[self._n_in_buckets :]
        for slot, gradient in zip(self.sparse_slots, sparse_gradients, strict=True):
            slot.take(gradient, scale)
        contribution = self._contribution(is_touched, weight, has_crossed)
        if not self._contributions:
            # counted with the first contribution, by which `drop` knows that the sum was counted
            self.n_sums += 1
        self._contributions.append(contribution)
        self.last_weight = weight.rows
        facts = encode_facts(contribution, self.n_sums, self._state_digest())
        counts = [*contribution.counts(), *facts, *self._step_flags.request_numbers()]
        if self._local_sums is not None:
            self._local_sums.add(replica, counts)
        return counts

    def _contribution(
        self,
        is_touched: Sequence[bool],
        weight: Weight,
        has_crossed: bool,
    ) -> Contribution:
        """Return the numbers and tensors that a replica adds to a sum outside of the buckets."""
        is_mean = bool(self.op.is_mean)
        doubtful_rows = weight.doubtful_rows if is_mean else None
        if doubtful_rows is None and is_mean and has_crossed:
            doubtful_rows = int(weight.rows)
        changed_buffers = [False] * len(self.buffers)
        if weight.rows > 0:
            changed_buffers = find_changed(self.buffers)
        loop = self._step_flags.loop
        return Contribution(
            is_touched=is_touched,
            buffers=gather_changed(self.buffers, changed_buffers),
            sparse=[slot.contribution for slot in self.sparse_slots],
            weight=weight.rows,
            doubtful_rows=doubtful_rows,
            refusal=weight.refusal if is_mean else None,
            key=weight.key if weight.is_planned or is_mean else None,
            has_entry=loop.has_entry,
            has_peeks=loop.has_peeks,
            has_crossed=has_crossed,
        )

    def _state_digest(self) -> int:
        """Return the digest that this sum compares; 0 where nothing is compared, as in rounds of local steps."""
        if self.rounds is not None:
            return 0
        return self.states.digest_at(self.n_sums) ^ self.copies.digest_at(self.n_sums)

    def _divisor_of(self, totals: Sequence[float]) -> float | None:
        """Return the divisor of sums, the weight of all replicas; None if they are not divided."""
        total = weight_in(totals)
        if self.op.is_mean and total not in (0, 1):
            return total
        return None

    def finish(
        self,
        counts: Sequence[float],
        parameters: Sequence[nn.Parameter | None],
        earlier: Mapping[Slot, Tensor],
    ) -> None:
        """Sum the gradients that all replicas have added, and publish the sums. Collective over all ranks.

        Args:
            counts: counts of this rank's last replica.
            parameters: parameters of all slots; None for a parameter that is gone.
            earlier: sums of earlier backwards, which are added to the new sums.
        """
        contributions = self._contributions
        if self._local_sums is None:
            totals = self.buckets.finish(counts, self._divisor_of)
        else:
            totals = self._local_sums.finish(self._divisor_of)
        self._contributions = []
        self._learn(totals, contributions)
        total_counts = counts_in(totals)
        n_slots = len(self.slots)
        n_touched = total_counts[:n_slots]
        if self.sparse_slots:
            n_sparse = n_touched[self._n_in_buckets :]
            n_dense = total_counts[n_slots + len(self.buffers) :]
            divisor = self._divisor_of(totals)
            self._sum_sparse(n_sparse, n_dense, contributions, divisor)
        self._publish(parameters, n_touched, earlier)
        if self.buffers:
            n_changed = total_counts[n_slots : n_slots + len(self.buffers)]
            values = [contribution.buffers for contribution in contributions]
            average_buffers(self.buffers, values, n_changed, self.reducer)
        self.n_entered_before = self.reducer.group.journal.n_entered

    def _learn(
        self,
        totals: Sequence[float],
        contributions: Sequence[Contribution],
    ) -> None:
        """Check the facts that all replicas must have in common, and record their requests.

        Raises:
            GradientError, DesyncError: when the gradients do not fit together; on all ranks.
        """
        facts = facts_in(totals)
        self._require_same_backward(facts)
        if not facts.is_same_state(self.n_replicas):
            self._report_drift()
        self._step_flags.record_requests(flags_in(totals))
        is_entered = facts.n_entered == self.n_replicas
        key = facts.key if self.weights.are_named else None
        self._step_flags.loop.share(is_entered, facts.n_peeked > 0, key, MODULI)
        if facts.n_refused:
            self.is_broken = True
            refusals = [contribution.refusal for contribution in contributions]
            refusal = next(filter(None, refusals), _REFUSED_ELSEWHERE)
            raise agreed(GradientError(refusal))
        if facts.n_doubtful:
            self._require_equal_rows(contributions)

    def _publish(
        self,
        parameters: Sequence[nn.Parameter | None],
        n_touched: Sequence[float],
        earlier: Mapping[Slot, Tensor],
    ) -> None:
        """Put each new sum, plus an earlier one, into `parameter.grad`; without a new sum, the earlier one or None."""
        is_plain = not earlier and not self._has_several
        for slot, parameter, n_replicas in zip(self.slots, parameters, n_touched, strict=True):
            if parameter is None or not n_replicas:
                slot.leave(parameter, earlier.get(slot))
            elif (
                is_plain
                and slot.held_gradient is not None
                and slot.held_gradient.data_ptr() == slot.address
            ):
                try:
                    parameter.grad = slot.held_gradient
                except RuntimeError:
                    slot.require_unconverted(parameter)
                    raise
                slot.published = slot.held_gradient
            else:
                slot.publish(parameter, earlier.get(slot), self._has_several)

    def _require_same_backward(self, facts: Facts) -> None:
        """Raise GradientError on all ranks unless all replicas are at the same backward, of the same batch."""
        if not facts.is_same_backward(self.n_replicas):
            self.is_broken = True
            raise GradientError(
                f"backward: expected every replica at the same backward, got number {self.n_sums} here and others "
                f"elsewhere; let all ranks run the same steps, also those without rows."
            )
        if not facts.is_same_batch:
            self.is_broken = True
            raise agreed(GradientError(_OTHER_BATCHES if self.weights.are_planned else _OTHER_ROWS))

    def _report_drift(self) -> None:
        """Raise DesyncError on all ranks, naming the ranks that differ; for copies of the model, warn once.

        Parameters that some ranks have freed, and other ranks not yet, are no difference: later sums compare the other
        parameters.

        Collective over all ranks.
        """
        group = self.reducer.group
        number = self.n_sums
        settings_digest, slice_digest = self.states.last_digests
        row_of_rank = [
            settings_digest,
            slice_digest,
            self.copies.digest_at(number),
            self.states.n_compared,
            self.copies.n_parameters,
        ]
        rows = np.empty((group.size, len(row_of_rank)), np.int64)
        request = group.comm.Iallgather(np.array(row_of_rank, np.int64), rows)
        group.wait([request])
        settings_digests, slice_digests, copy_digests, optimizer_counts, copy_counts = rows.T
        has_freed = self._forget_freed(self.states)
        if not np.ptp(copy_counts) and self._forget_freed(self.copies):
            copy_digests[:] = 0
        differing_ranks: list[int] = []
        if not np.ptp(optimizer_counts):
            differing_ranks = odd_ranks(settings_digests.tolist())
        if not differing_ranks and not has_freed:
            differing_ranks = odd_ranks(slice_digests.tolist())
        if not differing_ranks:
            self._warn_of_copies(odd_ranks(copy_digests.tolist()))
            return
        self.is_broken = True
        self.states.note_report()
        compared = self.states.describe(number)
        ranks = ", ".join(map(str, differing_ranks[:_MAX_NAMED]))
        raise agreed(
            DesyncError(
                f"backward: expected {compared} to be equal on all {group.size} ranks, got others on rank {ranks}; "
                f"look for a schedule that is fed by local losses, load_state_dict on some ranks only, and code that "
                f"changes parameters there."
            )
        )

    def _forget_freed(self, states: StateDigests) -> bool:
        """Leave out parameters that are gone on some ranks; return whether there were any.

        Collective over all ranks.
        """
        group = self.reducer.group
        parameters = states.hold()
        are_alive = are_there(parameters)
        request = group.comm.Iallreduce(MPI.IN_PLACE, are_alive, MPI.MIN)
        group.wait([request], buffers=[are_alive])
        if are_alive.all():
            return False
        states.keep(parameters, are_alive.tolist())
        return True

    def _warn_of_copies(self, differing_ranks: Sequence[int]) -> None:
        """Compare copies of the model no more, and log the ranks whose copies differ, if there are any."""
        if not differing_ranks:
            return
        self.copies = StateDigests()
        if self.reducer.group.rank == 0:
            logger.warning(
                "backward: expected copies of the model that are trained to be equal on all ranks, got others on rank "
                "%s; make them in strategy.scope(), or leave them if each rank is to have its own.",
                ", ".join(map(str, differing_ranks[:_MAX_NAMED])),
            )

    def _require_equal_rows(self, contributions: Sequence[Contribution]) -> None:
        """Raise GradientError on all ranks unless parts have the same number of rows on all replicas.

        All replicas weigh the same then. Collective over all ranks.
        """
        row_counts: list[int] = []
        arrays: list[npt.NDArray[Any]] = []
        for contribution in contributions:
            n_rows = contribution.doubtful_rows or 0
            row_counts.append(n_rows)
            arrays.append(np.array([n_rows, n_rows * n_rows]))
        total, total_of_squares = sum_rows(self.reducer, arrays, "rows")
        if self.n_replicas * total_of_squares == total**2:
            return
        expected = "for a backward after a pass whose parts no backward used"
        advice = (
            "train on each part before the next is drawn, evaluate under torch.no_grad(), "
            "use drop_remainder=True"
        )
        if any(contribution.has_crossed for contribution in contributions):
            expected = "for a backward through all_reduce, all_gather or SyncBatchNorm"
            advice = "use drop_remainder=True"
        raise GradientError(
            f"backward: expected parts of as many rows on all replicas {expected}, with ReduceOp.MEAN, got "
            f"{row_counts[-1]} rows here and other numbers elsewhere; {advice}, or use compute_average_loss with "
            f"ReduceOp.SUM."
        )

    def _sum_sparse(
        self,
        n_touched: Sequence[float],
        n_dense: Sequence[float],
        contributions: Sequence[Contribution],
        divisor: float | None,
    ) -> None:
        """Sum the sparse gradients that some replica has, and divide the sums. Collective over all ranks."""
        numbers = [number for number, n_replicas in enumerate(n_touched) if n_replicas]
        slots = [self.sparse_slots[number] for number in numbers]
        dense_counts = [n_dense[number] for number in numbers]
        values: list[list[Tensor | None]] = []
        for contribution in contributions:
            values.append([contribution.sparse[number] for number in numbers])
        sum_sparse(slots, values, dense_counts, self.reducer)
        for slot in slots:
            if divisor is not None and slot.total is not None:
                slot.total.div_(divisor)

    def count_local_step(self, optimizer: Optimizer) -> None:
        """Count a local step. Collective over all replicas at the last step of a round, which ends it."""
        if self.rounds is not None and self.rounds.count_step(optimizer):
            self.average_round()

    def average_round(self) -> None:
        """Average the tensors that local steps have made differ, and end the round.

        Without local steps since the last average nothing is done. Otherwise collective over all replicas.
        """
        if self.rounds is None or not self.rounds.is_open:
            return
        named: list[tuple[str, Tensor]] = []
        for slot in self.slots:
            parameter = slot.parameter
            if parameter is not None:
                named.append((slot.name, parameter))
        for record in self.buffers:
            tensor = record.buffer.tensor
            if tensor is not None:
                named.append((record.buffer.name, tensor))
        self.rounds.average(named)

    def drop(self) -> None:
        """Forget sums that have begun and will not end, because of an error."""
        if self._contributions and self._has_several and not self.buckets.is_started:
            # one replica had begun before another raised: ranks whose only replica raised
            # have not counted the sum
            self.n_sums -= 1
        self._contributions = []
        if self._local_sums is not None:
            self._local_sums.drop()
        if self._buckets is not None:
            self.is_broken = self.is_broken or self._buckets.is_started
            self._buckets.reset()


_OTHER_BATCHES = (
    "backward: expected parts of the same global batch on all replicas, got other batches elsewhere; let all ranks "
    "draw the same batches: a rank that needs rows alone, as for a plot, reads them from the dataset itself, or looks "
    "at the first batch by next(iter(batches)), which consumes none."
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
