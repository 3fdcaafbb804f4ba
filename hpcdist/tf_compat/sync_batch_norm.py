"""Batch normalisation by the statistics of the whole global batch, not of each replica's part."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import UsageError
from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy, get_strategy
from hpcdist.strategy.replica_context import reduce_leaves


class SyncBatchNorm(_BatchNorm):
    """As torch's BatchNorm1d, 2d and 3d, but in training by mean and variance over the rows of all replicas.

    It belongs to the strategy it is made in; outside all it is torch's. Parts of any length weigh by their rows, also
    empty ones. Either all replicas go through it, backward too, or none.

    Collective in training over all replicas, in the same order of calls. With one replica on each rank also outside
    `run`.

    Args:
        num_features: number of channels, the second dimension.
        eps: number that is added to the variance.
        momentum: weight of a step in the running statistics; None averages over all steps.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics, by which evaluation normalises.

    Cost: one all-reduce of 2 x num_features + 1 float64 numbers forward, and one backward.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        **factory: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self._owner = _Owner(get_strategy())

    def forward(self, input: Tensor) -> Tensor:
        """Return (rows, num_features, ...) normalised.

        Raises:
            RuntimeError: in training, inside another strategy, or outside `run` where this process has several
                replicas. ValueError: for another shape, or in training for one value per channel in all.
        """
        self._check_input_dim(input)
        strategy = self._sharing_strategy()
        if strategy is None:
            return super().forward(input)
        mean, variance, count = self._moments(input, strategy)
        self._track(mean, variance, count)
        return self._normalised(input, mean, variance)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm: expected (rows, {self.num_features}, ...), got {tuple(input.shape)}; give the "
                f"channels as second dimension."
            )

    def _sharing_strategy(self) -> Strategy | None:
        """Return the strategy whose replicas combine statistics. None in evaluation, or for a replica on its own."""
        if not self.training:
            return None
        entry = context.current()
        strategy = self._owner.strategy
        # workers of parameter servers are at different steps
        if strategy.num_replicas_in_sync < max(2, strategy.n_replicas):
            return None
        if entry is not None and entry.strategy is not strategy:
            raise RuntimeError(
                f"SyncBatchNorm: expected a call in the {type(strategy).__name__} that it was made in, got one in "
                f"another {type(entry.strategy).__name__}: mixing them is not possible; make it in the scope it is "
                f"used in."
            )
        is_in_replica = entry is not None and entry.replica is not None
        if not is_in_replica and len(strategy.own_replicas) > 1:
            raise RuntimeError(
                f"SyncBatchNorm: expected a call inside strategy.run, as this process has "
                f"{len(strategy.own_replicas)} replicas, got one outside; run the step by strategy.run."
            )
        return strategy

    def _moments(self, values: Tensor, strategy: Strategy) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and biased variance of each channel over all replicas, and the number of values of a channel."""
        sums: Tensor = _Sums.apply(values)  # type: ignore[no-untyped-call]
        total: Tensor = reduce_leaves(strategy, ReduceOp.SUM, [sums])[0]
        count = total[-1].detach()
        if count == 1:
            raise UsageError(
                "SyncBatchNorm: expected more than one value per channel in training, got one over all replicas; "
                "give it larger batches, or call eval()."
            )
        means = total[:-1] / count.clamp(min=1.0)
        mean, mean_square = means.chunk(2)
        variance = (mean_square - mean * mean).clamp(min=0.0)
        return mean, variance, count

    @torch.no_grad()
    def _track(
        self,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
    ) -> None:
        if self.running_mean is None or self.running_var is None or count == 0:
            return
        assert self.num_batches_tracked is not None, "torch has all statistics, or none"
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            weight = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * count / (count - 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)

    def _normalised(
        self,
        values: Tensor,
        mean: Tensor,
        variance: Tensor,
    ) -> Tensor:
        dtype = torch.promote_types(values.dtype, torch.float32)
        shape = (1, -1) + (1,) * (values.dim() - 2)
        scale = torch.rsqrt(variance + self.eps).to(dtype)
        if self.weight is not None:
            scale = scale * self.weight
        centred = values.to(dtype) - mean.to(dtype).view(shape)
        normal = centred * scale.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        return normal.to(values.dtype)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm in a module by a SyncBatchNorm; return the module, or the replacement of a BatchNorm.

    Call it in the strategy's scope, before optimizers are made. Parameters and statistics are the same tensors.

    >>> with strategy.scope():
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    ...     model = hpcdist.convert_sync_batchnorm(model)

    Args:
        module: module that is changed in place.

    Raises:
        UsageError: for a lazy BatchNorm that has not seen data.
    """
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child))
    if isinstance(module, _BatchNorm) and type(module) is not SyncBatchNorm:
        return _converted(module)
    return module


def _converted(old: _BatchNorm) -> SyncBatchNorm:
    if isinstance(old, nn.modules.lazy.LazyModuleMixin) and old.has_uninitialized_params():
        raise UsageError(
            f"convert_sync_batchnorm: expected layers that know their channels, got {type(old).__name__}; feed the "
            f"model one batch first."
        )
    new = SyncBatchNorm(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
    )
    for tensors in ("_parameters", "_buffers"):
        getattr(new, tensors).update(getattr(old, tensors))
    return new.train(old.training)


class _Owner:
    """A strategy, shared by copies of the modules that hold it, and left behind when they are pickled."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy = strategy or get_strategy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Owner":
        return self

    def __reduce__(self) -> tuple[type["_Owner"], tuple[()]]:
        return _Owner, ()


class _Sums(torch.autograd.Function):
    """(rows, channels, ...) -> sums and sums of squares of each channel, and its number of values, in float64.

    In float64, as the variance is a small difference of them where the mean is large. With a backward written by hand,
    as autograd would keep the values in float64 for it.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        axes = [axis for axis in range(values.dim()) if axis != 1]
        wide = values.double()
        n_channels = values.shape[1]
        n_of_channel = values.numel() // max(1, n_channels)
        sums = wide.sum(axes)
        squares = (wide * wide).sum(axes)
        count = wide.new_tensor([n_of_channel])
        return torch.cat([sums, squares, count])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        shape = (1, -1) + (1,) * (values.dim() - 2)
        of_sums, of_squares = gradient[:-1].view(2, *shape)
        of_values: Tensor = of_sums + 2.0 * values * of_squares
        return of_values.to(values.dtype)
