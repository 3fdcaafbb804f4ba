"""Loss helpers: losses scaled by the global batch, so that summed gradients are the gradient of the mean."""

from typing import Any

from hpcdist.errors import UsageError
from hpcdist.strategy.base import strategy_of_losses


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """Return this replica's part of the mean loss: the (weighted) sum over its examples / global batch.

    The parts of all replicas add up to the mean over the global batch, so gradients are to be summed; calling this
    tells the strategy so.

    Args:
        per_example_loss: (rows, ...) torch tensor or numpy array.
        sample_weight: broadcast against `per_example_loss`; weights scale, they do not enter the divisor.
        global_batch_size: default: rows here x replicas, which is wrong for a short last batch: give it then.

    Returns:
        A 0-d tensor or number; zero for a global batch of zero.

    Raises:
        UsageError: for a loss without rows and no global_batch_size, a negative global_batch_size, or when the strategy
            was made with gradient_op=ReduceOp.MEAN, which would divide twice.
    """
    strategy = strategy_of_losses()
    if global_batch_size is None:
        if per_example_loss.ndim == 0:
            raise UsageError(
                "compute_average_loss: expected one loss per example, got a single number; use reduction='none' or "
                "give global_batch_size."
            )
        global_batch_size = per_example_loss.shape[0] * strategy.num_replicas_in_sync
    if global_batch_size < 0:
        raise UsageError(
            f"compute_average_loss: expected global_batch_size of at least 0, got {global_batch_size}; give the rows "
            "of all."
        )
    strategy.use_sum_of_scaled_losses()
    weighted = per_example_loss if sample_weight is None else per_example_loss * sample_weight
    total = weighted.sum()
    return total / global_batch_size if global_batch_size else total * 0.0
