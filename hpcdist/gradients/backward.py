"""Backwards: what becomes of the gradients of parameters between the start of `loss.backward()` and its sums.

`torch_hooks.around_gradients` shows the start and the end of a backward. At its start the gradients that parameters
hold are put away, so that autograd leaves only the gradients of this backward. At its end these are taken to the slots,
and, once all replicas of the process have ended theirs, summed over all ranks. Where sums overlap with the backward, a
parameter's hook takes its gradient at once.

Replicas of one process run in turn, and a backward may wait in its middle while other replicas run, as with
SyncBatchNorm. The scheduler switches `parameter.grad`, and each replica has its own `_Pass`. A single replica does not
wait.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcdist.errors import GradientError, NotFiniteError
from hpcdist.gradients.buckets import PrivateBuckets
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.local_gradients import LocalGradients
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.slot import Slot
from hpcdist.gradients.sums import GradientSums
from hpcdist.program import torch_hooks
from hpcdist.program.part_weights import Weight
from hpcdist.program.tensors import plus
from hpcdist.replicas.scheduler import ReplicaScheduler


class _Pass:
    """One replica's running backward.

    Args:
        replica: number of the replica; None outside of `run` where there are several.
        parameters: parameters of all slots; None for a parameter that is gone.
        creates_graph: whether gradients can be differentiated.
        is_nested: whether the backward runs inside another call of autograd.

    Attributes:
        replica: number of the replica.
        parameters: parameters of all slots.
        creates_graph: whether gradients can be differentiated.
        stashed: gradients that parameters held before the backward, by the number of the slot.
        taken_slots: slots that have taken their gradients while the backward runs.
        weight: weight of the gradients that were taken while it runs; None before any was taken.
        is_scaled: whether the backward has reached a scaled loss.
        has_crossed: whether it went through the sum of an all_reduce. Then gradients that one replica's loss gives to
            another replica's parameters are weighted by the rows of that other replica.
        is_nested: whether it runs inside another backward, or one inside it has made gradients of the same parameters.
        depth: number of backwards that run, 1 for this one alone.
        inner_marks: marks of the gradients when the last backward inside it began; None before the first.
    """

    def __init__(
        self,
        replica: int | None,
        parameters: Sequence[nn.Parameter | None],
        creates_graph: bool,
        is_nested: bool,
    ) -> None:
        self.replica = replica
        self.parameters = parameters
        self.creates_graph = creates_graph
        self.stashed: dict[int, Tensor] = {}
        self.taken_slots: set[Slot] = set()
        self.weight: Weight | None = None
        self.is_scaled = False
        self.has_crossed = False
        self.is_nested = is_nested
        self.inner_marks: list[tuple[int, int]] | None = None
        self.depth = 1

    def local_replica(self) -> int:
        """Return the number of the replica. Backwards outside of replicas have been refused."""
        assert self.replica is not None, "a backward outside of replicas is refused"
        return self.replica

    def stash(self) -> None:
        """Put away the gradients of all parameters."""
        for number, parameter in enumerate(self.parameters):
            if parameter is not None and parameter.grad is not None:
                self.stashed[number] = parameter.grad
                parameter.grad = None

    def restore(self) -> None:
        """Put back the gradients of parameters for which the backward has written none."""
        for number, gradient in self.stashed.items():
            parameter = self.parameters[number]
            if parameter is not None and parameter.grad is None:
                parameter.grad = gradient

    def gradients(self) -> "list[Tensor | None]":
        """Return the gradients that the backward has written, for each slot."""
        return [None if parameter is None else parameter.grad for parameter in self.parameters]

    def written(self, slots: Sequence[Slot]) -> list[tuple[Slot, TensorWeakRef]]:
        """Return weak references to the gradients that the backward has written, with their slots."""
        pairs = zip(slots, self.gradients(), strict=True)
        return [(slot, TensorWeakRef(gradient)) for slot, gradient in pairs if gradient is not None]

    def marks(self) -> list[tuple[int, int]]:
        """Return marks of the gradients, which differ once a backward has written one."""
        marks: list[tuple[int, int]] = []
        for gradient in self.gradients():
            version = 0 if gradient is None else gradient._version
            marks.append((id(gradient), version))
        return marks

    def clear(self) -> None:
        """Remove the gradients of all parameters."""
        for parameter in self.parameters:
            if parameter is not None:
                parameter.grad = None


class Backward:
    """Sums the gradients of every synchronized backward over the replicas, one or more of which are in this process.

    Args:
        sums: sums gradients, and publishes the sums.
        scheduler: runs the replicas.
        state: gradients and buffers with which each replica resumes after a sum.
        is_switched: whether buffers and gradients are switched between replicas, so that they resume with the sums.
    """

    def __init__(
        self,
        sums: GradientSums,
        scheduler: ReplicaScheduler,
        state: ReplicaState,
        is_switched: bool,
    ) -> None:
        self._sums = sums
        self._scheduler = scheduler
        self._state = state
        self._is_switched = is_switched
        self._local: LocalGradients = state.local
        self._has_several = len(scheduler.replicas) > 1
        self._is_overlapped = sums.reducer.route.is_overlapped and not self._has_several
        self._looks_for_infinity = "finite" in sums.reducer.group.world.debug
        self._arrivals: list[nn.Parameter] = []  # parameters that running backwards have reached
        self._passes: dict[int | None, _Pass] = {}
        self._unsynced: set[int | None] = set()  # replicas inside no_sync; None for all replicas
        # gradients of a backward that raised in its middle
        self._failed: list[tuple[Slot, TensorWeakRef]] = []
        # sums of earlier backwards that the first replica had in its parameters
        self._earlier: dict[Slot, Tensor] = {}
        torch_hooks.around_gradients(self)

    # -- parameters -------------------------------------------------------------------------------------------------

    def hook(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Take part in every backward that reaches a parameter, for as long as the parameter lives."""
        arrive = functools.partial(self._arrivals.append)
        if self._is_overlapped and isinstance(slot, DenseSlot):
            arrive = functools.partial(self._take_early, slot)
        # this object lives as long as the parameter, whose hook holds it
        vars(arrive)["owner"] = self
        torch_hooks.after_accumulation(parameter, arrive)

    def require_seen(self) -> None:
        """Raise GradientError for gradients of a backward whose start was not seen; on this rank only."""
        if self._arrivals and not self._passes:
            self._arrivals.clear()
            raise GradientError(
                "backward: expected loss.backward() or torch.autograd.backward, got another call of autograd that has "
                "written gradients of parameters made in strategy.scope(); go backward by one of these."
            )

    def require_host(self, slots: Sequence[Slot]) -> None:
        """Raise GradientError for parameters on a device, whose hooks torch calls in one thread for all replicas.

        The error is raised on every rank that has several replicas.
        """
        names_on_device = [slot.name for slot in slots if slot.device.type != "cpu"]
        if names_on_device and self._has_several:
            raise GradientError(
                f"strategy: expected parameters on the host for {len(self._scheduler.replicas)} replicas of one rank, "
                f"got {names_on_device[0]!r} on a device; start as many ranks as replicas, or leave them on the host."
            )

    # -- synchronized or not ----------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in the block accumulate gradients of the calling replica; outside of `run`, of all replicas."""
        replica = self._scheduler.replica
        before = set(self._unsynced)
        self._unsynced.add(replica)
        try:
            yield
        finally:
            if replica not in before:
                self._unsynced.discard(replica)

    @property
    def is_syncing(self) -> bool:
        """Whether backwards of the calling replica sum; False inside `no_sync`."""
        return not self._unsynced or not self._unsynced & {None, self._scheduler.replica}

    @property
    def _is_summing(self) -> bool:
        return self.is_syncing and not self._sums.is_local

    @property
    def is_running(self) -> bool:
        """Whether a backward of the calling replica is running, or has ended in an error."""
        return bool(self._failed) or self._key in self._passes

    def hidden_slots(self) -> set[Slot]:
        """Return the slots whose parameters have gradients that the calling replica's running backward has put away."""
        running = self._passes.get(self._key)
        if running is None:
            return set()
        stashed = {self._sums.slots[number] for number in running.stashed}
        return stashed | running.taken_slots

    @property
    def _key(self) -> int | None:
        """The calling replica; None outside of `run` where there are several replicas."""
        return self._scheduler.replica if self._has_several else self._scheduler.replicas[0]

    def take_scaled_loss(self, loss: Tensor) -> None:
        """Settle that gradients are summed, once a backward reaches this loss, unless the program chose a mean."""
        self._sums.op.take_scaled_loss(loss)

    def mark_scaled(self, loss: Tensor) -> None:
        """Mark backwards that reach this loss as those of a scaled loss."""
        if loss.requires_grad:
            torch_hooks.at_gradient_of(loss, self._note_scaled_loss)

    def _note_scaled_loss(self) -> None:
        running = self._passes.get(self._key)
        if running is not None:
            running.is_scaled = True

    def note_crossing(self) -> None:
        """Note that the running backward goes from each replica's loss into the graphs of other replicas."""
        running = self._passes.get(self._key)
        if running is not None:
            running.has_crossed = True

    # -- a backward begins ------------------------------------------------------------------------------------------

    def begin_backward(self, creates_graph: bool) -> None:
        """Put away the gradients that parameters hold."""
        if not self._sums.slots:
            return
        self.require_seen()
        replica = self._key
        running = self._passes.get(replica)
        is_inside = torch_hooks.is_in_backward()
        if running is not None and is_inside:
            running.depth += 1
            if running.depth == 2:
                running.inner_marks = running.marks()
            return
        self._drop_failed()
        parameters = [slot.reference() for slot in self._sums.slots]
        running = _Pass(replica, parameters, creates_graph, is_inside)
        self._passes[replica] = running
        running.stash()

    def _take_early(self, slot: DenseSlot, parameter: nn.Parameter) -> None:
        """Take a gradient while the backward runs, and start the sums of complete buckets."""
        self._arrivals.append(parameter)
        running = self._passes.get(self._key)
        gradient = parameter.grad
        if running is None or gradient is None:
            return
        is_plain = not running.creates_graph and running.depth == 1
        if not is_plain or not self._is_summing or not self._sums.op.is_settled(running.is_scaled):
            return  # taken at the end of the backward
        if running.stashed or self._looks_for_infinity:
            return
        slot.require_kind(gradient)
        if running.weight is None:
            running.weight = self._sums.weights.find(0)
        running.taken_slots.add(slot)
        scale = self._sums.op.scale(running.weight.rows)
        buckets = self._sums.buckets
        assert isinstance(buckets, PrivateBuckets), "sums in shared memory do not overlap"
        with torch.no_grad():
            buckets.take_early(slot, gradient, scale)
        parameter.grad = None

    # -- a backward ends --------------------------------------------------------------------------------------------

    def end_backward(self, is_whole: bool) -> None:
        """Sum the gradients that the backward has made, or accumulate them.

        Args:
            is_whole: whether the backward has returned, and has not raised.
        """
        running = self._passes.get(self._key)
        if running is None:
            return
        if running.depth > 1:
            running.depth -= 1
            if running.depth == 1:
                running.is_nested = running.is_nested or running.inner_marks != running.marks()
            return
        has_gradients = bool(self._arrivals)
        if self._has_several:  # other backwards may run, too
            has_gradients = any(gradient is not None for gradient in running.gradients())
        if len(self._passes) == 1:
            self._arrivals.clear()
        if is_whole and has_gradients:
            with torch.no_grad():
                self._end(running)
            return
        del self._passes[running.replica]
        if has_gradients:
            self._failed = running.written(self._sums.slots)
        running.restore()
        if running.taken_slots:
            self._sums.drop()

    def _end(self, running: _Pass) -> None:
        """Sum or accumulate the gradients of a backward that has returned."""
        is_summing = self._is_summing
        try:
            self._require_usual(running)
            self._sums.note_managed()
            self._sums.op.require(running.is_scaled)
            if is_summing:
                counts = self._contribute(running)
            else:
                self._accumulate(running)
        except BaseException:
            self._drop(running)
            raise
        del self._passes[running.replica]
        if not is_summing:
            return
        if self._has_several:
            running.clear()  # the gradients are in the sums of this rank
            self._scheduler.barrier("a backward")
        if not self._has_several or self._scheduler.is_last:
            self._finish(counts, running)

    def _require_usual(self, running: _Pass) -> None:
        """Raise GradientError for a backward whose gradients cannot be summed; on this rank only."""
        if running.replica is None:
            raise GradientError(
                f"backward: expected a call inside strategy.run, as this rank has {len(self._scheduler.replicas)} "
                f"replicas, got one outside; put the step into a function and call strategy.run(step, args=(batch,))."
            )
        if running.is_nested:
            raise GradientError(
                "backward: expected one backward at a time, got one inside another, as reentrant activation "
                "checkpointing does; pass use_reentrant=False to torch.utils.checkpoint."
            )
        if torch_hooks.is_compiled():
            raise GradientError(
                "backward: expected a compiled model, got a compiled function that goes backward, whose sums "
                "torch.compile cannot trace; compile the model, by torch.compile(model) or model.compile(), not the "
                "step."
            )
        if self._sums.is_broken:
            raise GradientError(
                "backward: expected earlier backwards to end, got one that failed when sums had begun on other ranks; "
                "let the error end the job, and start it again."
            )
        if running.creates_graph:
            raise GradientError(
                f"backward: expected no create_graph=True, got a gradient with a graph for "
                f"{self._names(running)[0]!r}; use torch.autograd.grad for gradients of gradients."
            )
        if self._looks_for_infinity:
            self._require_finite(running)

    def _names(self, running: _Pass) -> list[str]:
        """Return the names of parameters that the backward has written gradients of."""
        return [slot.name for slot, _ in running.written(self._sums.slots)]

    def _require_finite(self, running: _Pass) -> None:
        for slot, gradient in zip(self._sums.slots, running.gradients(), strict=True):
            if gradient is None:
                continue
            values = gradient._values() if gradient.is_sparse else gradient
            if not values.isfinite().all():
                raise NotFiniteError(
                    f"backward: expected finite gradients with HPCDIST_DEBUG=finite, got NaN or infinity in "
                    f"{slot.name!r} on {self._sums.reducer.group.world.describe()}; look at the loss and the rows of "
                    f"this step."
                )

    def _accumulate(self, running: _Pass) -> None:
        """Leave a replica's gradients in `parameter.grad`, added to the gradients that it has accumulated before."""
        replica = running.local_replica()
        index = self._scheduler.replicas.index(replica)
        scale = 1.0
        if self._sums.is_local:
            weight = self._sums.weights.take(index, None)
            scale = self._sums.op.local_scale(weight.rows)
        else:
            self._forget_dropped(replica, running.stashed)
            weight = self._sums.weights.take(index, self._local.weight(replica))
            self._local.note_backward(replica, weight, running.has_crossed)
        for number, gradient in enumerate(running.gradients()):
            parameter = running.parameters[number]
            if gradient is None or parameter is None:
                continue
            if scale != 1:
                # not in place: autograd may have written views of one tensor; zero rows may have made NaN
                gradient = gradient * scale if scale else torch.zeros_like(gradient)
            slot = self._sums.slots[number]
            stashed = running.stashed.get(number)
            parameter.grad = self._local.accumulate(replica, slot, stashed, gradient)
        running.restore()

    def _forget_dropped(
        self,
        replica: int,
        stashed: Mapping[int, Tensor],
    ) -> None:
        """Forget the weight of accumulated gradients, if the program has dropped these."""
        slots = self._sums.slots
        for number, gradient in stashed.items():
            if self._local.holds(replica, slots[number], gradient):
                return
        self._local.begin_anew(replica)

    def _contribute(self, running: _Pass) -> list[float]:
        """Take a replica's new and accumulated gradients to the sums; return its counts.

        Raises:
            GradientError: when a gradient was set by hand before the backward, or cannot be taken; on this rank only.
        """
        replica = running.local_replica()
        index = self._scheduler.replicas.index(replica)
        self._forget_dropped(replica, running.stashed)
        earlier_weight = running.weight or self._local.weight(replica)
        weight = self._sums.weights.take(index, earlier_weight)
        if running.weight is not None:  # gradients were multiplied by this weight already
            weight = running.weight._replace(refusal=weight.refusal)
        has_crossed = running.has_crossed or self._local.has_crossed(replica)
        self._local.begin_anew(replica)
        gradients = running.gradients()
        zeros: set[int] = set()
        if running.stashed:
            zeros = self._sort_stashed(replica, running.stashed, gradients)
        self._local.forget(replica)
        is_touched: list[bool] = []
        for number, gradient in enumerate(gradients):
            is_touched.append(gradient is not None or number in zeros)
        if running.taken_slots:
            for number, slot in enumerate(self._sums.slots):
                is_touched[number] = is_touched[number] or slot in running.taken_slots
        return self._sums.add(replica, gradients, is_touched, weight, has_crossed)

    def _sort_stashed(
        self,
        replica: int,
        stashed: Mapping[int, Tensor],
        gradients: list[Tensor | None],
    ) -> set[int]:
        """Add accumulated gradients to this backward's gradients; keep sums of earlier backwards to be added later.

        Returns:
            Numbers of slots whose parameters held zeros, which count as a gradient: an optimizer may decay them.
        """
        slots = self._sums.slots
        zeros: set[int] = set()
        for number, gradient in stashed.items():
            slot = slots[number]
            if self._local.holds(replica, slot, gradient):
                written = gradients[number]
                gradients[number] = gradient if written is None else plus(gradient, written)
            elif slot.has_zeros(gradient):
                zeros.add(number)
            else:
                if not self._state.has_given(slot, gradient):
                    slot.require_published(gradient)
                if replica != self._scheduler.replicas[0]:
                    continue
                if self._has_several:
                    self._earlier[slot] = gradient.clone()
                else:
                    self._earlier[slot] = slot.keep_earlier(gradient)
        return zeros

    def _finish(self, counts: list[float], running: _Pass) -> None:
        """Sum the gradients of all replicas, and let the replicas resume with the sums. Collective over all ranks."""
        earlier = self._earlier
        self._earlier = {}
        try:
            self._sums.finish(counts, running.parameters, earlier)
        except BaseException:
            self._drop(running)
            raise
        if self._is_switched:
            self._state.share()
            self._scheduler.release()

    # -- errors -----------------------------------------------------------------------------------------------------

    def _drop(self, running: _Pass) -> None:
        """Forget a backward, and its gradients, which cannot be distinguished from earlier sums."""
        self._passes.pop(running.replica, None)
        self._earlier.clear()
        self._sums.drop()
        running.clear()
        for slot in self._sums.slots:
            slot.leave(None, None)

    def _drop_failed(self) -> None:
        """Forget the gradients of a backward that has raised in its middle."""
        failed = self._failed
        self._failed = []
        for slot, reference in failed:
            parameter = slot.reference()
            gradient = reference()
            if parameter is not None and gradient is not None and parameter.grad is gradient:
                parameter.grad = None

    def stop(self) -> None:
        """Forget the backwards that replicas had begun before an error stopped them."""
        if self._has_several:
            self._passes.clear()
            self._earlier.clear()
            self._sums.drop()
        self._arrivals.clear()
