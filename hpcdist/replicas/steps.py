"""An optimizer's step with several replicas in one process: all wait for it, and the last replica makes it for all."""

from collections.abc import Sequence

from torch import Tensor, nn

from hpcdist.errors import GradientError
from hpcdist.program.hidden import hide_gradients, restore_gradients
from hpcdist.program.tensors import have_same_bits
from hpcdist.replicas.scheduler import ReplicaScheduler


class ReplicaSteps:
    """Lets the last local replica make each step: replicas share parameters and optimizer.

    Args:
        scheduler: scheduler that runs the replicas.
    """

    def __init__(self, scheduler: ReplicaScheduler) -> None:
        self._scheduler = scheduler
        # hidden gradients of the replicas that do not make the step, by replica
        self._hidden: dict[int, list[Tensor | None]] = {}
        # gradients of the replicas that wait at the step, by replica
        self._brought: dict[int, list[Tensor | None]] = {}

    def begin(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Wait until all local replicas are at the step; return whether the caller makes it, as outside of replicas.

        The optimizer of a replica that does not make the step finds no gradients.
        """
        replica = self._scheduler.replica
        if replica is None:
            return True
        if not self._scheduler.is_last:
            self._brought[replica] = [parameter.grad for parameter in parameters]
        self._scheduler.barrier("an optimizer's step")
        if not self._scheduler.is_last:
            self._hidden[replica] = hide_gradients(parameters)
        return self._scheduler.is_last

    def require_equal(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compare the gradients that the other replicas have at the step with the gradients here.

        Raises:
            GradientError: when replicas have changed the gradients, equal after a backward, in different ways; on this
                rank only.

        Cost: one comparison of all gradients for each replica but the last.
        """
        brought = self._brought
        self._brought = {}
        for replica, gradients in brought.items():
            for parameter, replica_gradient in zip(parameters, gradients, strict=True):
                if not have_same_bits(parameter.grad, replica_gradient):
                    raise GradientError(
                        f"step: expected every replica of this rank to change the summed gradients alike, got "
                        f"another one of shape {tuple(parameter.shape)} on replica {replica} than on replica "
                        f"{self._scheduler.replica}; clip on every replica, and start as many ranks as replicas to "
                        f"use GradScaler, which unscales only once."
                    )

    def end(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Restore hidden gradients; return whether the caller made the step, as outside of replicas."""
        replica = self._scheduler.replica
        if replica is None or replica not in self._hidden:
            return True
        restore_gradients(parameters, self._hidden.pop(replica))
        return False

    def release(self) -> None:
        """Let the other replicas run again, once the last replica has made the step."""
        self._scheduler.release()

    def stop(self) -> None:
        """Forget steps that replicas had begun before an error stopped them."""
        self._hidden.clear()
        self._brought.clear()
