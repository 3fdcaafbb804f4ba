"""LoopGuard: refuses programs that nothing can save, as they never come to a point between two iterations."""

from hpcdist.errors import UsageError, agreed
from hpcdist.runtime.loop_state import LoopState
from hpcdist.stopping.steps import StepCount

#: Optimizer steps after which a program that has not reached a point between two iterations is refused.
_MAX_UNSAFE_STEPS = 20
#: Draws and polls after a backward that no step has followed, after which a program without any step is refused: far
#: more than the batches that gradients are accumulated over.
_MAX_POINTS_WITHOUT_STEP = 1000


class LoopGuard:
    """Counts the points at which the program's loop could not be interrupted.

    Not collective; all ranks that make the same calls conclude the same.

    Args:
        loop: state of the program's loop.
        steps: steps of the job.
    """

    def __init__(self, loop: LoopState, steps: StepCount) -> None:
        self._loop = loop
        self._steps = steps
        self._has_own_polls = False
        self._n_skipped_polls = 0

    def admits_poll(self) -> bool:
        """Return whether a poll of the program is between two iterations: not while gradients wait for a step."""
        self._has_own_polls = True
        is_accumulating = self._loop.is_training and not self._loop.is_complete
        self._n_skipped_polls += is_accumulating
        return not is_accumulating

    def note_safe_point(self) -> None:
        """Note that the program is between two iterations."""
        self._n_skipped_polls = 0

    def require_steps(self) -> None:
        """Refuse a program whose backwards no optimizer steps.

        Raises:
            UsageError: on all ranks.
        """
        n_points = self._n_skipped_polls + self._loop.n_rejected
        is_long = n_points >= _MAX_POINTS_WITHOUT_STEP
        if is_long and self._loop.has_begun and not self._steps.has_optimizer_steps:
            raise agreed(
                UsageError(
                    f"PreemptionCheckpointHandler: expected steps of the optimizers of the Checkpoint, got none at "
                    f"{n_points} draws or polls after a backward; call optimizer.step(), or "
                    f"save_checkpoint_if_preempted() after each step."
                )
            )

    def require_safe_points(self) -> None:
        """Refuse a program that made many steps without a point between two iterations, unless it may come to one.

        Raises:
            UsageError: on all ranks.
        """
        loop = self._loop
        if loop.n_steps_since_safe_point < _MAX_UNSAFE_STEPS:
            return
        if self._n_skipped_polls >= _MAX_UNSAFE_STEPS:
            raise agreed(
                UsageError(
                    f"poll: expected calls after optimizer.step(), got {self._n_skipped_polls} while gradients waited "
                    f"for a step, at which nothing can be saved; call handler.poll() at the end of each iteration."
                )
            )
        is_lost = loop.n_parts == 0 or loop.n_rejected > 1 or loop.has_lost_position
        if is_lost and not (self._has_own_polls or loop.forget_idle_optimizers()):
            raise agreed(_unsafe_loop_error(loop))


def _unsafe_loop_error(loop: LoopState) -> UsageError:
    """Return the error of a program that cannot be saved, with the lines that cure it."""
    n_steps = loop.n_steps_since_safe_point
    if loop.has_lost_position:
        return UsageError(
            f"PreemptionCheckpointHandler: expected the position in the data to be in the Checkpoint, got {n_steps} "
            f"steps on a DataLoader that is not; write batches = "
            f"strategy.experimental_distribute_dataset(loader), iterate over that and give Checkpoint(data=batches), "
            f"or use hpcdist.DistributedSampler, give Checkpoint(data=sampler), and begin with for epoch in "
            f"range(sampler.epoch, n_epochs)."
        )
    if loop.was_ambiguous:
        return UsageError(
            f"PreemptionCheckpointHandler: expected to know which batches were trained on, got {n_steps} steps of a "
            f"loop that draws ahead and copies or casts what it draws; give the model the tensors as they were drawn, "
            f"or draw each batch when the last one is trained on."
        )
    if loop.n_parts > 0:
        return UsageError(
            f"PreemptionCheckpointHandler: expected a point between two iterations, where it may save and stop, got "
            f"none in {n_steps} steps of a loop that draws while gradients or batches wait for a step; draw a batch "
            f"when the last one is trained on, step all optimizers of the Checkpoint for it, or call handler.poll() "
            f"at the end of each iteration."
        )
    return UsageError(
        f"PreemptionCheckpointHandler: expected batches of a distributed dataset, or calls of handler.poll(), got "
        f"neither in {n_steps} steps: nothing is saved; call handler.poll() at the end of each iteration (once before "
        f"the loop, if it polls less often), and begin it at handler.step, or train on "
        f"strategy.experimental_distribute_dataset(loader)."
    )
