"""Loss helpers: losses scaled by the global batch, so that summed gradients are the gradient of the mean."""

from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.program import owners
from hpcdist.strategy.base import Strategy, mark_scaled, strategies_of_losses


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: int | None = None,
) -> Any:
    """Return this replica's part of the mean loss: the (weighted) sum over its examples / global batch.

    The parts of all replicas add up to the mean over the global batch, so gradients must be summed. The first backward
    of a scaled loss settles that for the strategy, and a later backward that reaches no scaled loss raises
    GradientError. Where a backward goes in several calls, as from saved features, give the strategy its gradient_op.

    >>> losses = torch.tensor([1.0, 3.0])  # this replica's two rows of the batch's eight
    >>> hpcdist.compute_average_loss(losses, global_batch_size=8)
    tensor(0.5000)

    Args:
        per_example_loss: (rows, ...) torch tensor or numpy array; at least one dimension.
        sample_weight: a number, or an array that is broadcast against `per_example_loss`, (rows,) as one weight for
            each row; weights scale, they do not enter the divisor.
        global_batch_size: rows of all replicas; default: rows here x replicas, which is wrong for a short last batch:
            give it then.

    Returns:
        A 0-d tensor or number; zero for a global batch of zero.

    Raises:
        UsageError: for a loss without dimensions, which would be divided twice, a negative global_batch_size, weights
            that do not fit the loss, or when the strategy was made with gradient_op=ReduceOp.MEAN, which would divide
            twice.
    """
    strategies = _strategies()
    if np.ndim(per_example_loss) == 0:
        raise UsageError(
            "compute_average_loss: expected one loss for each example, got a single number; use reduction='none', or "
            "divide it yourself and make the strategy with gradient_op=ReduceOp.SUM."
        )
    if global_batch_size is None:
        global_batch_size = int(per_example_loss.shape[0]) * _n_replicas(
            strategies, "compute_average_loss"
        )
    if np.ndim(global_batch_size) or global_batch_size < 0:
        raise UsageError(
            f"compute_average_loss: expected global_batch_size as a number of at least 0, got {global_batch_size}; "
            f"give the rows of all replicas."
        )
    if len(strategies) > 1 and not all(strategy.is_summing for strategy in strategies):
        raise UsageError(
            f"compute_average_loss: expected one strategy, got {len(strategies)} alive and none entered; call it "
            f"inside strategy.scope() or run(), or give each strategy its gradient_op."
        )
    losses = per_example_loss
    if sample_weight is not None:
        losses = _weighted(per_example_loss, sample_weight)
    total = losses.sum()
    loss = total / global_batch_size if global_batch_size else total * 0.0
    for strategy in strategies:
        strategy.take_scaled_loss(loss)
    if any(strategy.is_averaging for strategy in strategies):
        raise UsageError(
            "compute_average_loss: expected a strategy that sums gradients, got gradient_op=ReduceOp.MEAN; use the "
            "mean over the local batch as loss, or gradient_op=ReduceOp.SUM."
        )
    mark_scaled(loss)
    return loss


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return this replica's part of a loss that is equal on all replicas: its sum / replicas.

    It is not divided where a strategy was made with gradient_op=ReduceOp.MEAN, which averages gradients.

    Args:
        regularization_loss: torch tensor, numpy array or number.

    Raises:
        UsageError: outside every scope and run, when strategies of different numbers of replicas are alive, or some
            that average gradients and some that do not.
    """
    total = regularization_loss
    if hasattr(regularization_loss, "sum"):
        total = regularization_loss.sum()
    strategies = _strategies()
    n_replicas = _n_replicas(strategies, "scale_regularization_loss")
    n_averaging = sum(strategy.is_averaging for strategy in strategies)
    if 0 < n_averaging < len(strategies):
        raise UsageError(
            f"scale_regularization_loss: expected strategies with one gradient_op, got {len(strategies)} alive of "
            f"which {n_averaging} with ReduceOp.MEAN; call it inside strategy.scope() or run()."
        )
    loss = total if n_averaging else total / n_replicas
    mark_scaled(loss)
    return loss


def _weighted(losses: Any, weight: Any) -> Any:
    try:
        return losses * _fitted(weight, losses)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"compute_average_loss: expected sample_weight that fits losses of shape {tuple(losses.shape)}, got shape "
            f"{tuple(getattr(weight, 'shape', ()))}; give one weight for each example."
        ) from error


def _fitted(weight: Any, losses: Any) -> Any:
    """Return weights with the dimensions of losses, where adding or dropping a last dimension of 1 does that.

    (rows,) against (rows, n) would be broadcast along n, and (rows, 1) against (rows,) to all pairs of rows.
    """
    missing = losses.ndim - getattr(weight, "ndim", losses.ndim)
    if missing == 1:
        return weight[..., None]
    if missing == -1 and weight.shape[-1] == 1:
        return weight[..., 0]
    return weight


def _strategies() -> list[Strategy]:
    """Return the strategies that a loss may belong to, without strategies that only wait for the garbage collector.

    Garbage collectors run at different moments on different ranks: a rank that still sees a dead strategy would raise
    alone.
    """
    strategies = strategies_of_losses()
    n_kinds = len({(strategy.is_summing, strategy.num_replicas_in_sync) for strategy in strategies})
    if n_kinds > 1 or (len(strategies) > 1 and not strategies[0].is_summing):
        del strategies  # the list would keep them alive
        owners.collect_garbage()
        strategies = strategies_of_losses()
    return strategies


def _n_replicas(strategies: list[Strategy], call: str) -> int:
    """Return the number of replicas that all strategies have; raise UsageError where they differ."""
    counts = sorted({strategy.num_replicas_in_sync for strategy in strategies})
    if len(counts) > 1:
        advice = ", or give global_batch_size" if call == "compute_average_loss" else ""
        raise UsageError(
            f"{call}: expected one number of replicas, got strategies with {counts}; call it inside strategy.scope() "
            f"or run(){advice}."
        )
    return counts[0]
