"""Estimators: train, evaluate and predict by input functions, in a folder, from TF_CONFIG alone.

A thin front of `Model`, a checkpoint folder and the handler of stop requests, for programs of tf.estimator.
"""

import contextlib
import copy
import inspect
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from hpcdist.checkpoint.store import latest_checkpoint
from hpcdist.cluster.resolvers import MPIClusterResolver
from hpcdist.cluster.tf_config import TFConfigClusterResolver
from hpcdist.collectives.objects import broadcast_object
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.errors import DataError, UsageError, log
from hpcdist.nest import leaves, with_leaves
from hpcdist.saving.checkpoint import Checkpoint
from hpcdist.saving.manager import CheckpointManager
from hpcdist.saving.schedule import SaveSchedule
from hpcdist.stopping.preemption import PreemptionCheckpointHandler
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.strategy.parameter_server import ParameterServerStrategy
from hpcdist.training.backup import end_when_done
from hpcdist.training.event_file import open_writer
from hpcdist.training.inputs import rows_of_batches
from hpcdist.training.loop import evaluation
from hpcdist.training.model import Model
from hpcdist.training.optimizers import maker_like
from hpcdist.training.sidecar import SidecarEvaluator

InputFunction = Callable[..., Any]


@dataclass(frozen=True)
class RunConfig:
    """How an Estimator runs, as `tf.estimator.RunConfig`.

    Attributes:
        model_dir: folder of the run. Default: a new temporary folder.
        tf_random_seed: torch's seed when the model is made.
        save_summary_steps: steps between two values for TensorBoard. 0 writes no values.
        save_checkpoints_steps: steps between two saves. Default: save by time.
        save_checkpoints_secs: seconds between two saves, where save_checkpoints_steps is None.
        keep_checkpoint_max: number of checkpoints that are kept.
        log_step_count_steps: steps between two printed lines. 0 prints no lines.
        train_distribute: strategy. Default: ParameterServerStrategy where the cluster has ps tasks, else
            MultiWorkerMirroredStrategy.
        eval_distribute: strategy where train_distribute is None; otherwise ignored, as evaluation uses the strategy
            that the variables belong to.
    """

    model_dir: Any = None
    tf_random_seed: int | None = None
    save_summary_steps: int = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float = 600.0
    keep_checkpoint_max: int = 5
    log_step_count_steps: int = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None

    def strategy(self) -> Strategy:
        """Return the strategy. Collective over all ranks where it is made; ps ranks serve in it, and end there."""
        configured_strategy = self.train_distribute or self.eval_distribute
        if configured_strategy is not None:
            return configured_strategy
        spec = TFConfigClusterResolver().cluster_spec() or MPIClusterResolver().cluster_spec()
        if spec.has_tasks("ps"):
            return ParameterServerStrategy()
        return MultiWorkerMirroredStrategy()


class _TrainCall:
    """The call of `train` that is in progress, and the steps so far, as a checkpoint holds them.

    Attributes:
        global_step: number of steps so far, of all workers.
        is_running: whether the call has not ended.
        number: number of the call in its program, from 1.
        end: global step at which the call ends. None if it ends with the data.
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.is_running = False
        self.number = 0
        self.end: int | None = None
        self._batches: DistributedInput | None = None
        self._cursor: dict[str, Any] | None = None

    def begin(
        self,
        number: int,
        batches: DistributedInput,
        steps: int | None,
        max_steps: int | None,
    ) -> bool:
        """Begin a call, or resume the one that was loaded, at its next batch; return whether the call is new.

        Args:
            number: number of the call in its program, from 1.
            batches: batches that the call trains on.
            steps: number of steps of the call; None if it has no such limit.
            max_steps: global step at which it ends; None if it has no such limit. A resumed call obeys the new limit.
        """
        self._batches = batches
        if self.is_running and self.number == number and self._cursor is not None:
            batches.load_state_dict(self._cursor)
            if max_steps is not None:
                self.end = max_steps
            return False
        self.is_running = True
        self.number = number
        self.end = max_steps
        if steps is not None:
            self.end = self.global_step + steps
        return True

    def finish(self) -> None:
        """End the call."""
        self.is_running = False
        self._batches = None
        self._cursor = None

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes, and the position in the batches. The chief's counts where workers step separately."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        cursor = self._cursor
        if self._batches is not None:
            cursor = self._batches.state_dict()
        return {**public, "cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the call of an earlier run."""
        public = dict(state)
        self._cursor = public.pop("cursor")
        vars(self).update(public)


class Estimator:
    """Trains, evaluates and predicts by input functions; see `tf.estimator.Estimator`.

    Chief and workers run the same calls. The model is saved in `model_dir`, whose newest checkpoint is read at the
    first call. A call of `train` that was stopped or killed resumes at its next batch when the program runs again, and
    the calls before it are left out. Where a job may be stopped between calls of `train`, give `max_steps`.

    An input function returns a batched `hpcdist.Dataset` of (features, labels). It is called on every worker, and
    its rows are neither split nor sharded: a batch is for one replica. It may take `input_context`, and `params` and
    `config` as model_fn.

    Args:
        model_fn: function that returns a compiled `Model`; called once, in the strategy's scope. It may take `params`
            and `config`. TensorFlow's builds a graph for each mode; a torch module is made once, and knows its mode.
        model_dir: folder of the run. Default: folder of `config`.
        config: options of the run.
        params: argument of model_fn and of input functions.

    Attributes:
        model_dir: folder of the run, with `checkpoints/`, event files and `decision.json`.
        config: options of the run.

    Raises:
        UsageError: when model_fn returns something else; at the first call.
    """

    def __init__(
        self,
        model_fn: Callable[..., Model],
        model_dir: Any = None,
        config: RunConfig | None = None,
        params: Any = None,
    ) -> None:
        self.config = config or RunConfig()
        self.params = params
        self._model_fn = model_fn
        self.strategy = self.config.strategy()
        folder = Path(model_dir or self.config.model_dir or self._temporary_folder())
        self.model_dir = folder.absolute()  # the program may change its folder
        self._call = _TrainCall()
        self._n_calls = 0
        self._model_and_checkpoint: tuple[Model, Checkpoint] | None = None
        self._manager: CheckpointManager | None = None
        self._writers: dict[str, Any] = {}

    def _temporary_folder(self) -> str:
        """Return a new folder of the chief. Collective over chief and workers."""
        if self.strategy.cluster_resolver.cluster_spec().has_tasks("evaluator"):
            raise UsageError(
                "Estimator: expected model_dir, as an evaluator looks there, got none; give a folder."
            )
        folder = ""
        if self.strategy.is_chief:
            folder = tempfile.mkdtemp(prefix="hpcdist-estimator-")
            log(f"Estimator: model_dir is {folder}")
        if isinstance(self.strategy, MultiWorkerMirroredStrategy):
            return str(broadcast_object(folder, comm=self.strategy.world.role_comm))
        return folder

    @property
    def model(self) -> Model:
        """The model, made at the first use, with the newest checkpoint. Collective then: chief and workers."""
        return self._make()[0]

    @property
    def global_step(self) -> int:
        """Number of steps so far, of all workers together where each makes separate steps.

        Collective at the first use.
        """
        self._make()
        return self._call.global_step

    @property
    def _n_separate(self) -> int:
        """Number of workers that make separate steps; 1 where all workers make each step together."""
        return self.strategy.n_replicas // self.strategy.num_replicas_in_sync

    def _make(self) -> tuple[Model, Checkpoint]:
        """Return the model and the objects that are saved. It writes nothing: an evaluation is no attempt to train."""
        if self._model_and_checkpoint is None:
            model = self.new_model()
            # before the first batch, which may be the same on all workers
            self.strategy.prepare([model.net])
            parts = {
                "model": model.net,
                "optimizer": model.optimizer,
                "strategy": self.strategy,
                "call": self._call,
            }
            if model.loss_scale is not None:
                parts["loss_scale"] = model.loss_scale
            checkpoint = Checkpoint(**parts)
            world = checkpoint.world
            newest = ""
            with world.agreed(world.role_comm):
                if world.role_comm.rank == 0:
                    newest = latest_checkpoint(self.model_dir / "checkpoints") or ""
            newest = world.broadcast_text(newest, 0, world.role_comm)
            if newest:
                checkpoint.read(newest)
            self._model_and_checkpoint = model, checkpoint
        return self._model_and_checkpoint

    def new_model(self) -> Model:
        """Return a new compiled model."""
        if "features" in inspect.signature(self._model_fn).parameters:
            raise UsageError(
                "Estimator: expected a model_fn that makes a compiled hpcdist.Model once, got one that takes "
                "features and labels; let it return the model, which is called with them at each step."
            )
        if self.config.tf_random_seed is not None:
            torch.manual_seed(self.config.tf_random_seed)
        with self.strategy.scope():
            model = _call_with(self._model_fn, params=self.params, config=self.config)
        if not isinstance(model, Model):
            raise UsageError(
                f"Estimator: expected a model_fn that returns a compiled hpcdist.Model, got {type(model).__name__}; "
                f"return that."
            )
        model.require_compiled("Estimator")
        return model

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> "Estimator":
        """Train, and save at the end; return self. Collective over chief and workers.

        Args:
            input_fn: input function; see `Estimator`.
            steps: number of further steps. Default: until the data ends.
            max_steps: `global_step` at which training ends. It counts earlier calls and runs too: use it in jobs that
                are stopped and started again.

        Raises:
            UsageError: for both steps and max_steps, or less than 1 step; on an evaluator.
            DataError: when there are no batches.
            SystemExit: on a stop request, with code 75.
        """
        if steps is not None and max_steps is not None:
            raise UsageError("train: expected steps or max_steps, got both; leave one out.")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise UsageError(
                    f"train: expected {name} of at least 1, got {value}; leave it out to train until the data ends."
                )
        if self.strategy.cluster_resolver.task_type == "evaluator":
            raise UsageError(
                "train: expected chief or worker, got evaluator; call train_and_evaluate on all ranks."
            )
        model, checkpoint = self._make()
        self._n_calls += 1
        is_before_stop = self._call.is_running and self._n_calls < self._call.number
        if is_before_stop:  # this call had ended before the call that was stopped
            return self
        with self._handling(checkpoint) as (manager, handler):  # from here on stop requests count
            if max_steps is not None and self.global_step >= max_steps:
                return self  # before input_fn is called, as in TensorFlow; the run is finished
            batches = self._batches(input_fn)
            is_new = self._call.begin(self._n_calls, batches, steps, max_steps)
            first = self.global_step
            try:
                self._steps(model, batches)
                self._agree_on_step()
                if is_new and self.global_step == first:
                    raise DataError(
                        "train: expected batches, got none; return a dataset with rows from input_fn."
                    )
            except Exception:
                self._call.finish()
                raise
            finally:
                batches.drop_batch()  # the program may train another model
            self._call.finish()
            manager.save(handler.step, if_changed=True)
        return self

    @contextlib.contextmanager
    def _handling(
        self, checkpoint: Checkpoint
    ) -> Iterator[tuple[CheckpointManager, PreemptionCheckpointHandler]]:
        """Restore the newest checkpoint; obey stop requests and save periodically in the block."""
        if self._manager is None:
            folder = self.model_dir / "checkpoints"
            self._manager = CheckpointManager(checkpoint, folder, self.config.keep_checkpoint_max)
        manager = self._manager
        manager.wait()  # for a save of a call that has raised
        steps_between_saves = self.config.save_checkpoints_steps
        if steps_between_saves is None:
            schedule = SaveSchedule(every_s=self.config.save_checkpoints_secs)
        else:
            schedule = SaveSchedule(every_steps=max(1, steps_between_saves // self._n_separate))
        with contextlib.ExitStack() as stack:
            handler = PreemptionCheckpointHandler(None, manager, schedule=schedule)
            stack.push(handler)  # records how the run ends, if it ends with an error or a stop
            yield manager, handler
            stack.pop_all()
        end_when_done(handler, manager)

    def _agree_on_step(self) -> None:
        """Take the chief's global step, as workers that step separately may have seen different numbers of batches.

        Collective over chief and workers.
        """
        world = self._make()[1].world
        chief_step = world.broadcast_text(str(self._call.global_step), 0, world.role_comm)
        self._call.global_step = int(chief_step)

    def _steps(self, model: Model, batches: DistributedInput) -> None:
        """Make the remaining steps of the call."""
        call = self._call
        config = self.config
        n_separate = self._n_separate
        first = self._call.global_step
        n_remaining = None
        if call.end is not None:
            n_remaining = max(0, math.ceil((call.end - first) / n_separate))
        began_at = time.monotonic()
        model.train()
        with self.strategy.scope():
            model.reset_metrics()
            for number, (batch, n_rows) in enumerate(
                itertools.islice(rows_of_batches(batches), n_remaining)
            ):
                model.run_step(model.train_step, batch, n_rows, must_check=not number)
                call.global_step += n_separate
                is_printed = _is_due(config.log_step_count_steps, call.global_step, n_separate)
                is_written = _is_due(config.save_summary_steps, call.global_step, n_separate)
                if is_printed or is_written:
                    loss = model.local_result("loss")  # of this rank: reading it sends nothing
                    self.strategy.run(model.reset_local_metrics)
                if is_written and loss is not None:
                    self._write("", {"loss": loss}, call.global_step)
                if is_printed:
                    elapsed_s = max(1e-9, time.monotonic() - began_at)
                    pace = (call.global_step - first) / elapsed_s
                    line = f"step {call.global_step}  {pace:.3g} steps/s"
                    if loss is not None:
                        line += f"  loss {loss:.4g} (this rank)"
                    model.print_once(line)

    def _batches(self, input_fn: InputFunction) -> DistributedInput:
        """Return the batches of an input function, called on this worker. Collective over chief and workers."""

        def make(context: Any) -> Any:
            return _call_with(
                input_fn, input_context=context, params=self.params, config=self.config
            )

        with self.strategy.scope():
            return self.strategy.distribute_datasets_from_function(make)

    def _write(
        self,
        folder: str,
        values: dict[str, Any],
        step: int,
    ) -> None:
        """Write values for TensorBoard, where that is installed, on the chief alone."""
        if self.strategy.is_chief:
            if folder not in self._writers:
                self._writers[folder] = open_writer(self.model_dir / folder, step, is_needed=False)
            writer = self._writers[folder]
            if writer is not None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

    # -- evaluation and prediction ------------------------------------------------------------------------------------

    def evaluate(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return loss and metrics by name, with "average_loss" and "global_step". Collective over chief and workers.

        Args:
            input_fn: input function. Rows that several workers give count several times.
            steps: number of batches. Default: until the data ends.
            name: end of the name of the folder of event files, `eval_NAME`. Default: `eval`.
        """
        model = self.model
        batches = self._batches(input_fn)
        with self.strategy.scope():
            logs: dict[str, Any] = evaluation(model, batches, steps, [], 0)
        self._write(_evaluation_folder(name), logs, self.global_step)
        return {"average_loss": logs.get("loss"), **logs, "global_step": self.global_step}

    def predict(self, input_fn: InputFunction) -> Iterator[dict[str, Any]]:
        """Yield the outputs for each row of this worker's input, by name; a single output as "predictions".

        Collective over chief and workers, which go through the same number of batches.
        """
        model = self.model
        batches = self._batches(input_fn)
        try:
            for batch, n_rows in rows_of_batches(batches):
                with self.strategy.scope(), model.evaluating():
                    predictions = model.run_step(model.predict_step, batch, n_rows)
                columns = [self._joined_rows(value) for value in leaves(predictions)]
                for row in zip(*columns, strict=True):
                    outputs = with_leaves(predictions, list(row))
                    if not isinstance(outputs, dict):
                        outputs = {"predictions": outputs}
                    yield outputs
        finally:
            batches.drop_batch()

    def _joined_rows(self, value: Any) -> Any:
        """Return the rows of this rank's replicas as one array."""
        replica_values = self.strategy.experimental_local_results(value)
        rows = [torch.as_tensor(replica_value).cpu().numpy() for replica_value in replica_values]
        return np.concatenate(rows)


def _evaluation_folder(name: str | None) -> str:
    """Return the name of the folder of the event files of an evaluation."""
    if name is None:
        return "eval"
    return f"eval_{name}"


def _is_due(every: int, step: int, n_new: int) -> bool:
    """Return whether a multiple of `every` is among the last n_new steps; never for 0."""
    return every > 0 and step // every > (step - n_new) // every


def _call_with(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function with the arguments that it has parameters for."""
    parameters = inspect.signature(function).parameters
    accepted = {name: value for name, value in arguments.items() if name in parameters}
    return function(**accepted)


@dataclass(frozen=True)
class TrainSpec:
    """The data that `train_and_evaluate` trains on: an input function, and the global step at which training ends."""

    input_fn: InputFunction
    max_steps: int | None = None


@dataclass(frozen=True)
class EvalSpec:
    """The data that `train_and_evaluate` evaluates on.

    Attributes:
        input_fn: input function; see `Estimator`.
        steps: number of batches. None: until the data ends.
        name: end of the name of the folder of event files; see `Estimator.evaluate`.
        start_delay_secs: accepted: an evaluator begins with the first checkpoint.
        throttle_secs: accepted: it takes the newest checkpoint as soon as it is free.
    """

    input_fn: InputFunction
    steps: int | None = 100
    name: str | None = None
    start_delay_secs: float = 0.0
    throttle_secs: float = 0.0


def train_and_evaluate(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
) -> tuple[dict[str, Any], list[Any]] | None:
    """Train, and evaluate: beside training on the evaluator of the cluster, else when training has ended.

    Collective over all ranks, each in its role.

    Returns:
        Result of `Estimator.evaluate`, and an empty list in place of TensorFlow's list of exports. None where an
        evaluator of the cluster evaluates, whose results are in `eval/`, or in `eval_NAME/` for an EvalSpec with a
        name.

    Raises:
        SystemExit: on an evaluator, when the job ends; on a stop request, with code 75.
    """
    resolver = estimator.strategy.cluster_resolver
    if resolver.task_type == "evaluator":
        _evaluate_beside(estimator, eval_spec)
    estimator.train(train_spec.input_fn, max_steps=train_spec.max_steps)
    if "evaluator" in resolver.cluster_spec().jobs:
        return None
    return estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.name), []


def _evaluate_beside(estimator: Estimator, spec: EvalSpec) -> NoReturn:
    """Evaluate each new checkpoint until the job ends."""
    model = estimator.new_model()
    batches = estimator._batches(spec.input_fn)
    checkpoints = estimator.model_dir / "checkpoints"
    folder = estimator.model_dir / _evaluation_folder(spec.name)
    evaluator = SidecarEvaluator(model, batches, checkpoints, spec.steps, log_dir=folder)
    evaluator.start()
    raise SystemExit(0)  # as an evaluator that is a job of its own


def model_to_estimator(
    keras_model: Model | None = None,
    model_dir: Any = None,
    config: RunConfig | None = None,
) -> Estimator:
    """Return an Estimator for a compiled model of a module. It trains a copy, made in its strategy's scope.

    Args:
        keras_model: model to copy, with the weights that it has now.
        model_dir: folder of the run; see `Estimator`.
        config: options of the run; see `Estimator`.

    Raises:
        UsageError: for a model that is not compiled, or a subclass without a module, whose own code can make it for an
            `Estimator(function)`; for several groups of parameters, add_loss, and regularizers of other parameters.
    """
    if not isinstance(keras_model, Model) or keras_model.net is keras_model:
        raise UsageError(
            f"model_to_estimator: expected a compiled hpcdist.Model of a module, got {type(keras_model).__name__}; "
            f"write Estimator(function) with a function that makes the model and compiles it."
        )
    source_model = keras_model
    source_model.require_compiled("model_to_estimator")
    names = {id(parameter): name for name, parameter in source_model.net.named_parameters()}
    regularizers = [
        (make, names.get(id(parameter))) for make, parameter in source_model.regularizers
    ]
    n_groups = len(source_model.optimizer.param_groups)
    has_unknown_parameter = any(name is None for _, name in regularizers)
    if n_groups > 1 or source_model.has_added_losses or has_unknown_parameter:
        raise UsageError(
            "model_to_estimator: expected one group of parameters, and regularizers of parameters of the module, got "
            "several groups, add_loss, or a regularizer of a parameter outside the module; write Estimator(function) "
            "with a function that makes the model."
        )
    make_optimizer = maker_like(source_model.optimizer)
    compile_arguments = dict(source_model.compiled_with)
    compile_options = compile_arguments.pop("options")
    net = copy.deepcopy(source_model.net)  # with the weights that it has now
    model_name = source_model.name

    def copy_model() -> Model:
        model = Model(copy.deepcopy(net), model_name)
        model.compile(make_optimizer, **compile_arguments, **compile_options)
        for make, name in regularizers:
            model.add_regularizer(make, model.net.get_parameter(str(name)))
        return model

    return Estimator(copy_model, model_dir, config)
