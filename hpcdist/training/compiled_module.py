"""CompiledModule: a module with the losses, metrics and optimizer of `compile`, and the steps that replicas make."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import UsageError
from hpcdist.nest import leaves, map_nest
from hpcdist.program import torch_hooks
from hpcdist.storage.zero_redundancy import ZeroRedundancyOptimizer
from hpcdist.strategy.base import Strategy, get_strategy
from hpcdist.strategy.losses import compute_average_loss
from hpcdist.strategy.parameter_server import ParameterServerStrategy
from hpcdist.strategy.replica_context import get_replica_context
from hpcdist.tf_compat.torch_metric import TorchMetric
from hpcdist.training import inputs, named_metrics, optimizers
from hpcdist.training.callbacks import History
from hpcdist.training.compile_options import CompileOptions
from hpcdist.training.description import last_layer_of
from hpcdist.training.misfit import explained
from hpcdist.training.objective import Objective
from hpcdist.training.precision import LossScale, as_float32


class Piece(NamedTuple):
    """The rows of a replica's part of a batch that are computed at once.

    Attributes:
        share: fraction of the losses that count once in a step, such as losses of regularizers.
        n_rows: number of rows of the whole part. None if this piece is the whole part.
        counts: for losses that leave out some labels, `Objective.counts` over all replicas. None if not counted yet.
    """

    share: float = 1.0
    n_rows: int | None = None
    counts: Mapping[Any, tuple[float, float]] | None = None


@dataclass
class _StepState:
    """The step that runs now. It lies apart from the module, whose own attributes are slow to set.

    Attributes:
        global_rows: number of rows on all replicas. None if no rank knows it.
        must_check: whether outputs are checked.
        is_training: whether this is the train_step.
        has_own_call: whether the train_step has called the model's `backward` or `step`.
    """

    global_rows: int | None = None
    must_check: bool = False
    is_training: bool = False
    has_own_call: bool = False


_WHOLE = Piece()
#: The piece that this replica computes. Replicas of a rank take turns, and each has a separate context.
_piece: ContextVar[Piece] = ContextVar("piece", default=_WHOLE)
#: Whether `Model.step` lets the optimizer of this replica step.
_is_stepping: ContextVar[bool] = ContextVar("is_stepping", default=False)


class CompiledModule(nn.Module):
    """A module with an optimizer, losses and metrics, and its steps on all replicas of a strategy: the base of `Model`.

    Args and attributes are those of `Model`.
    """

    def __init__(self, module: nn.Module | None = None, name: str | None = None) -> None:
        super().__init__()
        if module is not None:
            self.module = module
        self.name = name or type(module or self).__name__
        self.strategy: Strategy = get_strategy()
        self.optimizer: Any = None
        self._has_rate = False
        self.stop_training = False
        self.history = History()
        self.n_steps_of_epoch = 0
        self.steps_per_execution = 1
        self.loss_scale: LossScale | None = None
        self.compiled_with: dict[str, Any] = {}
        self._compile_options = CompileOptions()
        self._objective: Objective | None = None
        self._regularizers: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []
        self._added_losses: list[Callable[[], Any]] = []
        # the losses that `forward` has added, by the number of the replica: several may share this process
        self._step_losses: dict[int, list[Any]] = {}
        self._class_weights: Tensor | None = None
        self._step_state = _StepState()
        self._compiled_modules: list[Any] = []  # in a list, as it is no part of the state

    @property
    def batch_rows(self) -> int | None:
        """In a step: the rows of the batch on all replicas, to divide losses by; None where nobody knows them."""
        return self._step_state.global_rows

    @property
    def net(self) -> nn.Module:
        """The module that the model was made of; the model itself where it is a subclass without a module."""
        is_wrapper = (
            list(self._modules) == ["module"] and not self._parameters and not self._buffers
        )
        return self.module if is_wrapper else self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if "module" not in self._modules:
            raise NotImplementedError(
                f"{self.name}: expected a module, or a subclass that defines forward, got neither; write Model(module)."
            )
        return (self._compiled_modules or [self.module])[0](*args, **kwargs)

    # -- compile, metrics, learning rate ----------------------------------------------------------------------------

    def compile(  # noqa: PLR0913  Keras' names
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        *,
        jit_compile: bool = False,
        steps_per_execution: int = 1,
        global_clipnorm: float | None = None,
        gradient_accumulation_steps: int = 1,
        dtype_policy: str = "float32",
        run_eagerly: bool | None = None,
    ) -> None:
        """Set how to train; inside or outside of the strategy's scope.

        >>> loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> keras_model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])

        Args:
            optimizer: an optimizer of torch; a function of the parameters that makes one, such as a class of
                torch.optim; or a name, which means the formula and the defaults of Keras.
            loss: a name; a Loss of `hpcdist.losses`; a loss module of torch; or a function (y_true, y_pred) that
                returns a loss for each row. By name it takes probabilities, as in Keras: for logits give
                `SparseCategoricalCrossentropy(from_logits=True)`. A list or dict of losses where the model returns
                a list or dict.
            metrics: names, Metrics, metrics of torchmetrics, or functions (y_true, y_pred); a list, or a list or dict
                of lists where the model returns several outputs.
            loss_weights: list or dict of the weights of several losses.
            weighted_metrics: metrics that take sample weights into account.
            jit_compile: whether torch.compile compiles the module.
            steps_per_execution: number of steps after which callbacks act.
            global_clipnorm: largest norm of all gradients together. Summed gradients are scaled down to it.
            gradient_accumulation_steps: number of pieces in which each replica computes its part of a batch, one after
                another, for batches that do not fit into memory. Gradients are over the whole batch, but for layers
                that look at the batch, such as BatchNorm, which see a piece. They are summed over replicas once.
            dtype_policy: "mixed_bfloat16" or "mixed_float16": layers compute in half precision, by torch.autocast;
                parameters, outputs and losses are float32. For float16 losses are scaled; see `LossScale`.
            run_eagerly: accepted and ignored.

        Raises:
            UsageError: for an unknown name, with a list of close ones; for an argument of another kind.
        """
        options = CompileOptions(
            jit_compile,
            steps_per_execution,
            global_clipnorm,
            gradient_accumulation_steps,
            dtype_policy,
        )
        self._require_applicable(options)
        with self.strategy.scope():
            self.optimizer = optimizers.get(optimizer, self.parameters())
            self._has_rate = hasattr(self.optimizer, "learning_rate")
            if options.scales_losses and isinstance(self.optimizer, ZeroRedundancyOptimizer):
                raise UsageError(
                    "compile: expected no mixed_float16 with a ZeroRedundancyOptimizer, whose gradients nobody can "
                    "unscale here, got it; take mixed_bfloat16."
                )
            self._objective = Objective(self.name, loss, loss_weights, metrics, weighted_metrics)
            self._objective.require_fitting(last_layer_of(self.net))
        self.compiled_with = {
            "loss": loss,
            "metrics": metrics,
            "loss_weights": loss_weights,
            "weighted_metrics": weighted_metrics,
            "options": asdict(options),
        }
        if options.changes_gradients and not self._compile_options.changes_gradients:
            weakref.finalize(self, torch_hooks.before_any_step(self._require_own_step).remove)
        self._compile_options = options
        self.steps_per_execution = steps_per_execution
        self.loss_scale = None
        if options.scales_losses:
            self.loss_scale = LossScale()
        self._compiled_modules = []
        if jit_compile:
            self._compiled_modules = [torch.compile(self.net)]

    def _require_applicable(self, options: CompileOptions) -> None:
        """Raise UsageError for options that do not go with the strategy, the model or an overridden train_step."""
        if options.changes_gradients and isinstance(self.strategy, ParameterServerStrategy):
            option = "global_clipnorm"
            cure = "leave it out"
            if options.scales_losses:
                option = "mixed_float16"
                cure = "take mixed_bfloat16"
            raise UsageError(
                f"compile: expected no {option} with parameter servers, where no worker knows the sums of gradients, "
                f"got it; {cure}."
            )
        if options.scales_losses and self.strategy.describe_sums().get("local_steps"):
            raise UsageError(
                "compile: expected no mixed_float16 with local_steps, where a rank that skips a step would miss one of "
                "its round, got it; take mixed_bfloat16."
            )
        has_pieces = options.gradient_accumulation_steps > 1
        if has_pieces and self.strategy.is_averaging:
            raise UsageError(
                "compile: expected a strategy that sums gradients with gradient_accumulation_steps, got one with "
                "gradient_op MEAN; leave that out."
            )
        if has_pieces and type(self).train_step is not CompiledModule.train_step:
            raise UsageError(
                "compile: expected no gradient_accumulation_steps for a model with a train_step of "
                "its own, got it; accumulate there, with self.strategy.no_sync()."
            )
        is_clipped = options.global_clipnorm is not None
        if is_clipped and any(getattr(layer, "sparse", False) for layer in self.modules()):
            raise UsageError(
                "compile: expected dense gradients with global_clipnorm, got a layer made with sparse=True; leave one "
                "of them out."
            )
        if options.jit_compile and self.net is self:
            raise UsageError(
                "compile: expected no jit_compile for a subclass without a module, got it; compile its parts."
            )

    @property
    def metrics(self) -> list[Any]:
        """The metrics that fit and evaluate reset, read and save: of `compile`; a subclass may return its own."""
        objective = self._objective
        if objective is None:
            return []
        return [objective.total, *(named_metric.metric for named_metric in objective.metrics)]

    @property
    def metrics_names(self) -> list[str]:
        """The names of the metrics in logs."""
        return list(self.named_metrics())

    def named_metrics(self) -> Mapping[str, Any]:
        """Return the metrics by their names in logs."""
        if self._objective is None:
            return {}
        return self._objective.by_name(self.metrics)

    def direction_of(self, name: str) -> str | None:
        """Return "max" or "min", whichever is the best value of a log; None where that is not known."""
        if name == "loss" or name.endswith("_loss"):
            return "min"
        return named_metrics.direction_of(self.named_metrics().get(name))

    @property
    def learning_rate(self) -> float:
        """The rate of the optimizer's first group; setting it scales the rates of further groups in proportion.

        A rate of 0 keeps the proportions, in the entry "rate_ratio" of a group, until another one is set.
        """
        if self.optimizer is None:
            raise UsageError(
                "learning_rate: expected model.compile(optimizer, loss) first, got none; call it."
            )
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        before = self.learning_rate
        for group in self.optimizer.param_groups:
            ratio = group.pop("rate_ratio", 1.0)
            if before:
                ratio = group["lr"] / before
            new_rate = rate
            if ratio != 1.0:
                new_rate = ratio * rate
            if ratio != 1.0 and not rate:
                group["rate_ratio"] = float(ratio)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(new_rate)
            else:
                group["lr"] = new_rate

    @property
    def trainable_variables(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def require_compiled(self, call: str) -> Objective:
        """Return what the model was compiled with.

        Raises:
            UsageError: before `compile`; for a learning rate that the program has set in Keras' way, which changes no
                optimizer of torch.
        """
        if not self._has_rate and hasattr(self.optimizer, "learning_rate"):
            rate = self.optimizer.learning_rate
            raise UsageError(
                f"{call}: expected model.learning_rate = {rate}, got model.optimizer.learning_rate, which this "
                f"optimizer does not read; del it, and set the model's."
            )
        if self._objective is None:
            raise UsageError(
                f"{call}: expected model.compile(optimizer, loss, metrics) first, got none; call it."
            )
        return self._objective

    # -- losses -----------------------------------------------------------------------------------------------------

    def add_regularizer(self, regularizer: Callable[[Tensor], Tensor], parameter: Tensor) -> None:
        """Add regularizer(parameter) to the loss of each step, once for all replicas.

        Args:
            regularizer: function of a parameter, such as `hpcdist.regularizers.L2(1e-4)`.
            parameter: parameter to regularize, such as `module.weight`.
        """
        self._regularizers.append((regularizer, parameter))

    def add_loss(self, loss: Any) -> None:
        """Add a loss to the losses of this step, from `forward`. A function without arguments is added to every step.

        It counts as a regularization: its mean over the replicas.
        """
        if callable(loss):
            self._added_losses.append(loss)
        else:
            self._losses_of_step().append(loss)

    def _losses_of_step(self) -> list[Any]:
        """Return the losses that `forward` has added in this replica's step."""
        replica = get_replica_context()
        number = -1
        if replica is not None:
            number = replica.replica_id_in_sync_group
        return self._step_losses.setdefault(number, [])

    @property
    def regularizers(self) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
        """The regularizers and parameters that `add_regularizer` was called with."""
        return list(self._regularizers)

    @property
    def has_added_losses(self) -> bool:
        """Whether `add_loss` was called with a function, for every step."""
        return bool(self._added_losses)

    @property
    def losses(self) -> list[Tensor]:
        """The losses of regularizers and `add_loss`, as they are now; for custom loops: `sum(model.losses)`."""
        losses = [make(parameter) for make, parameter in self._regularizers]
        losses += [make() for make in self._added_losses]
        if self._step_losses:
            losses += self._losses_of_step()
        return losses

    def compute_loss(
        self,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Tensor:
        """Return this replica's part of the loss of a step: the parts of all replicas add up to the mean over all rows.

        It is added to the metric "loss", the mean over the rows of an epoch. Collective over all replicas where a loss
        leaves out labels (`ignore_class`), as they count labels together, also without rows.

        Raises:
            UsageError: when outputs, labels and losses do not fit together.
        """
        objective = self.require_compiled("compute_loss")
        piece = _piece.get()
        counts = self._counts_of(y) if piece.counts is None else piece.counts
        rows = objective.loss_of_rows(y, y_pred, sample_weight, self._step_state.must_check, counts)
        extra = None
        added_losses = self.losses
        if added_losses:
            extra = torch.stack([torch.as_tensor(loss).sum() for loss in added_losses]).sum()
        counted_rows = rows.detach()
        if extra is not None:
            counted_rows = counted_rows + extra.detach()
        objective.total.update_state(counted_rows)
        if self.strategy.is_averaging:
            mean = rows.mean() if len(rows) else rows.sum()
            return mean if extra is None else mean + extra
        # asynchronous workers, too, push their part of a round
        n_replicas = self.strategy.n_replicas
        n_rows = self._step_state.global_rows
        if n_rows is None:
            n_rows = (piece.n_rows or len(rows)) * n_replicas
        total: Tensor = compute_average_loss(rows, global_batch_size=n_rows)
        if extra is not None:
            total = total + extra * piece.share / n_replicas
        return total

    def _counts_of(self, y: Any) -> Mapping[Any, tuple[float, float]]:
        """Return how many labels of a batch count for each loss that leaves out some; see `Objective.counts`.

        Collective over all replicas if a loss leaves out some labels.

        Raises:
            UsageError: on parameter servers, whose workers do not see each other's batches.
        """
        objective = self.require_compiled("compute_loss")
        if not objective.ignores_labels or y is None:
            return {}
        counts = objective.counts(y)
        replica = get_replica_context()
        if replica is None:
            return counts
        if isinstance(self.strategy, ParameterServerStrategy):
            raise UsageError(
                f"{self.name}: expected no ignore_class with parameter servers, where no worker knows how many labels "
                f"of the others count, got it; give these labels a sample_weight of 0."
            )
        replica_counts = torch.tensor(list(counts.values()), dtype=torch.float64)
        global_counts = replica.all_reduce(ReduceOp.SUM, replica_counts)
        return dict(zip(counts, global_counts.tolist(), strict=True))

    def compute_metrics(
        self,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Mapping[str, Any]:
        """Update the metrics by the rows of this replica; return the metrics, each computed when it is read."""
        self.require_compiled("compute_metrics").update_metrics(y, y_pred, sample_weight)
        return Results(self.named_metrics)

    # -- steps of a replica -----------------------------------------------------------------------------------------

    def train_step(self, data: Any) -> Mapping[str, Any]:
        """Train on this replica's part of a batch; a subclass may override it.

        Args:
            data: x, (x, y) or (x, y, sample_weight).

        Returns:
            Metrics by name, or values of this step that are no metrics. The mean over replicas of such values at the
            last step of an epoch goes to the logs.
        """
        self.optimizer.zero_grad()
        x, y, weight = inputs.unpack(data)
        train = self._train_on_piece
        if self._compile_options.gradient_accumulation_steps > 1:
            train = self._train_in_pieces
        logs = train(x, y, weight)
        self.step()
        return logs

    def _train_in_pieces(
        self,
        x: Any,
        y: Any,
        weight: Any,
    ) -> Mapping[str, Any]:
        *first_pieces, last_piece = inputs.pieces(
            (x, y, weight), self._compile_options.gradient_accumulation_steps
        )
        share = 1 / (len(first_pieces) + 1)
        n_rows = len(leaves(x)[0])
        token = _piece.set(Piece(share, n_rows, self._counts_of(y)))
        try:
            for piece in first_pieces:
                with self.strategy.no_sync():
                    self._train_on_piece(*piece)
            return self._train_on_piece(*last_piece)
        finally:
            _piece.reset(token)

    def _train_on_piece(
        self,
        x: Any,
        y: Any,
        weight: Any,
    ) -> Mapping[str, Any]:
        y_pred = self.call_with(x)
        self.backward(self.compute_loss(x, y, y_pred, weight))
        return self.compute_metrics(x, y, y_pred, weight)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss, in a train_step of your own: scaled, where float16 needs it."""
        self._step_state.has_own_call = True
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        torch.autograd.backward(loss)

    def step(self) -> None:
        """Let the optimizer step, in a train_step of your own, after `backward`: on clipped gradients, if asked for."""
        self._step_state.has_own_call = True
        parameters: list[nn.Parameter] = []
        if self._compile_options.changes_gradients:
            parameters = self.trainable_variables
        if self.loss_scale is not None and not self.loss_scale.remove_from(parameters):
            return  # an overflow, which all ranks see
        largest_norm = self._compile_options.global_clipnorm
        if largest_norm is not None:
            if isinstance(self.optimizer, ZeroRedundancyOptimizer):
                self.optimizer.clip_grad_norm_(largest_norm)
            else:
                nn.utils.clip_grad_norm_(parameters, largest_norm)
        token = _is_stepping.set(True)
        try:
            self.optimizer.step()
        finally:
            _is_stepping.reset(token)

    def _require_own_step(self, optimizer: Any, closure: Any) -> None:
        """Raise UsageError when an optimizer steps by itself, on gradients that are scaled, or not clipped."""
        is_ours = optimizer is self.optimizer or self._step_state.is_training
        if self._compile_options.changes_gradients and is_ours and not _is_stepping.get():
            raise self._own_call_refusal(f"a step of {type(optimizer).__name__}")

    def _own_call_refusal(self, actual: str) -> UsageError:
        return UsageError(
            f"{self.name}: expected a train_step that calls self.backward(loss) and self.step(), as it is compiled "
            f"with global_clipnorm or mixed_float16, got {actual}; call them."
        )

    @staticmethod
    def unpack(data: Any) -> tuple[Any, Any, Any]:
        """Return x, y and sample_weight of the argument of a step, as tensors; None for a missing part."""
        return inputs.unpack(data)

    def test_step(self, data: Any) -> Mapping[str, Any]:
        """Evaluate this replica's part of a batch; a subclass may override it. Gradients are off."""
        x, y, weight = inputs.unpack(data)
        y_pred = self.call_with(x)
        if self.require_compiled("test_step").has_loss:
            self.compute_loss(x, y, y_pred, weight)
        return self.compute_metrics(x, y, y_pred, weight)

    def predict_step(self, data: Any) -> Any:
        """Return the outputs for this replica's part of a batch; a subclass may override it. Gradients are off."""
        return self.call_with(inputs.unpack(data)[0])

    def call_with(self, x: Any) -> Any:
        """Return the outputs for x: a tuple is several inputs, a dict inputs by name."""
        if self._step_losses:
            self._losses_of_step().clear()
        device = self._device
        x = map_nest(lambda leaf: leaf.to(device), x)
        is_empty = not self.training and inputs.is_empty(x)
        # a last batch may leave nothing for this replica, and few modules take no rows
        if is_empty:
            x = map_nest(lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])), x)
        half = self._compile_options.half
        try:
            with torch.autocast(device.type, half) if half else contextlib.nullcontext():
                outputs = self._call_on(x)
        except (RuntimeError, IndexError, ValueError) as error:
            explanation = explained(self, error)
            if explanation is None:
                raise
            raise explanation from error
        if is_empty:
            outputs = map_nest(lambda leaf: leaf[:0], outputs)
        if half:
            outputs = map_nest(as_float32, outputs)
        return outputs

    def _call_on(self, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return self(*x)
        if isinstance(x, dict):
            return self(**x)
        return self(x)

    @property
    def _device(self) -> torch.device:
        parameter = _first_parameter(self)
        if parameter is None:
            return self.strategy.device
        return parameter.device

    def run_step(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        global_rows: int | None,
        must_check: bool = False,
    ) -> Any:
        """Run train_step, test_step or predict_step on every replica of this rank; return its result.

        Args:
            step: step of one replica.
            batch: batch of this rank.
            global_rows: number of rows of all replicas together. None if each replica knows only its rows.
            must_check: whether outputs are checked, such as for probabilities where logits are expected.
        """
        state = self._step_state
        state.global_rows = global_rows
        state.must_check = must_check
        is_training = step == self.train_step
        state.is_training = is_training
        state.has_own_call = False
        self._step_losses.clear()
        if self._class_weights is not None and is_training:
            step = functools.partial(self._with_class_weights, step)
        try:
            returned = self.strategy.run(step, args=(batch,))
        finally:
            state.is_training = False
        if is_training and self._compile_options.changes_gradients and not state.has_own_call:
            raise self._own_call_refusal("neither")
        if self.loss_scale is not None and is_training:
            self.loss_scale.update()
        return returned

    def _with_class_weights(self, step: Callable[[Any], Any], data: Any) -> Any:
        return step(inputs.with_class_weights(data, self._class_weights))

    # -- for loops and callbacks --------------------------------------------------------------------------------------

    def reset_metrics(self) -> None:
        """Reset the metrics. Collective over chief and workers."""
        for metric in self.metrics:
            metric.reset_state()

    def reset_local_metrics(self) -> None:
        """Reset this replica's part of the metrics, inside `run`. Not collective."""
        for metric in self.metrics:
            if not isinstance(metric, TorchMetric):
                metric.reset_state()

    def results(self) -> dict[str, float]:
        """Return the metrics over all replicas, by name, as numbers. Collective over chief and workers."""
        return {name: _number(metric.result()) for name, metric in self.named_metrics().items()}

    def local_result(self, name: str) -> float | None:
        """Return a metric over the rows of this rank's replicas so far. None for torchmetrics. Not collective.

        None also for a name that is no metric.
        """
        metric = self.named_metrics().get(name)
        if metric is None or isinstance(metric, TorchMetric):
            return None
        local_values = self.strategy.experimental_local_results(self.strategy.run(metric.result))
        return sum(map(_number, local_values)) / len(local_values)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn gradients and training behaviour off in a block; on parameter servers all workers get equal values."""
        if isinstance(self.strategy, ParameterServerStrategy):
            self.strategy.refresh()
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, is_training in modes.items():
                module.training = is_training

    def mean_of_step(self, values: Any) -> dict[str, float]:
        """Return the means over replicas of the values of a step that are no metrics.

        Collective over chief and workers.
        """
        if not isinstance(values, Mapping) or isinstance(values, Results):
            return {}
        metric_names = self.named_metrics()
        other_values = {
            name: value for name, value in sorted(values.items()) if name not in metric_names
        }
        if not other_values:
            return {}
        means = self.strategy.reduce_all(
            ReduceOp.MEAN, list(map(_as_floats, other_values.values()))
        )
        return {name: _number(mean) for name, mean in zip(other_values, means, strict=True)}

    def print_once(self, text: str) -> None:
        """Print a line, on the chief alone. One that cannot be written is dropped: it must not end a job."""
        if self.strategy.is_chief:
            with contextlib.suppress(OSError):
                print(text, flush=True)


class Results(Mapping[str, Any]):
    """Metrics by name, each read when it is asked for: inside `run` of this replica, outside collective."""

    def __init__(self, find: Callable[[], Mapping[str, Any]]) -> None:
        self._find = find

    def __getitem__(self, name: str) -> Any:
        return self._find()[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first of `module.parameters()`. None if there is none. Each step asks, and that generator is slow."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is None:
            continue
        parameter = _first_parameter(child)
        if parameter is not None:
            return parameter
    return None


def _number(value: Any) -> float:
    """Return a metric's value as a number; the mean of several values."""
    return float(torch.as_tensor(value).double().mean())


def _as_floats(value: Any) -> Any:
    """Return numbers of a step as float64 tensors, of each replica."""
    values = getattr(value, "values", None)
    if isinstance(values, tuple):
        return type(value)([torch.as_tensor(item).detach().double() for item in values])
    return torch.as_tensor(value).detach().double()
