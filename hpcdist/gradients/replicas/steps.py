"""An optimizer's step with several replicas in one process: all wait at it, and the last one makes it for all."""

from collections.abc import Sequence

from torch import Tensor, nn

from hpcdist.gradients.hidden import hide_gradients, restore_gradients
from hpcdist.gradients.replicas.scheduler import ReplicaScheduler


class ReplicaSteps:
    """Lets the last local replica make each step: replicas share parameters and optimizer.

    Args:
        scheduler: runs the replicas.
    """

    def __init__(self, scheduler: ReplicaScheduler) -> None:
        self._scheduler = scheduler
        self._hidden: dict[int, list[Tensor | None]] = {}  # by replica

    def begin(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Wait until all local replicas are at the step; return whether the caller makes it, as outside of replicas.

        The optimizer of one that does not make it finds no gradients.
        """
        replica = self._scheduler.replica
        if replica is None:
            return True
        self._scheduler.barrier("an optimizer's step")
        if not self._scheduler.is_last:
            self._hidden[replica] = hide_gradients(parameters)
        return self._scheduler.is_last

    def end(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Restore hidden gradients; return whether the caller made the step, as outside of replicas."""
        replica = self._scheduler.replica
        if replica is None or replica not in self._hidden:
            return True
        restore_gradients(parameters, self._hidden.pop(replica))
        return False

    def release(self) -> None:
        """Let the other replicas run again, once the last one has made the step."""
        self._scheduler.release()

    def stop(self) -> None:
        """Forget what replicas had begun before an error stopped them."""
        self._hidden.clear()
