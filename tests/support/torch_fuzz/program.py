"""What a random training program is: pure data, which a seed gives and JSON can hold."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Attributes:
        kind: of the trunk, a name in `models.KINDS`.
        width: of hidden layers.
        n_heads: layers behind the trunk that a step may leave out.
        frozen: numbers of parameters that begin frozen; taken modulo the number of parameters.
        has_counter: whether each forward changes a float buffer.
    """

    kind: str
    width: int
    n_heads: int = 0
    frozen: tuple[int, ...] = ()
    has_counter: bool = False


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: its class in torch.optim, its options, and into how many groups parameters are dealt."""

    kind: str
    options: dict[str, float | bool | str | list[float]]
    n_groups: int = 1
    is_in_scope: bool = True


@dataclass(frozen=True)
class DataSpec:
    """Rows, the global batch, and how batches are made."""

    n_rows: int
    batch: int
    is_shuffled: bool = False
    drops_remainder: bool = False
    prefetch: int = 0


@dataclass(frozen=True)
class ClusterSpec:
    """How replicas are run. The reference does not look at it.

    Attributes:
        strategy: "multi_worker", "mirrored" or "central".
        extra_replicas: replicas above the number of ranks; None: num_replicas is not given.
        uses_run: whether steps are called through `strategy.run`.
        hosts: made-up hosts of the ranks, a name in `made_up_hosts.HOSTS`; empty: the real one.
        implementation: of the all-reduce.
        bucket_bytes: largest bucket; 0: chosen.
        direct_bytes: size from which gradients are summed without a copy; 0: the usual one.
        divides_steps: whether optimizers are ZeroRedundancyOptimizers, whose gradients nobody can read.
    """

    strategy: str = "multi_worker"
    extra_replicas: int | None = None
    uses_run: bool = False
    hosts: str = ""
    implementation: str = "AUTO"
    bucket_bytes: int = 0
    direct_bytes: int = 0
    divides_steps: bool = False

    @property
    def has_one_copy(self) -> bool:
        """Whether the ranks of a host hold parameters once."""
        return self.divides_steps or self.strategy == "central"

    @property
    def has_several(self) -> bool:
        """Whether a rank has several replicas."""
        return bool(self.extra_replicas)


@dataclass(frozen=True)
class Phase:
    """Steps of one kind, and what happens before them.

    Attributes:
        events: names in `events.EVENTS`, before the first step.
        n_steps: of the phase.
        gradient: how a step gets its gradients, a name in `steps.GRADIENTS`.
        n_batches: global batches that are accumulated for one step.
        zero_grad: "none", "zeros" or "never".
        clip: "", "norm", "value" or "scale".
        heads: which heads a forward uses: "all", "none", "alternate", "tags" or "rest".
        loss: "mse", "cross_entropy" or "smooth".
        has_weights: whether rows are weighted. has_penalty: on the gradient by the rows. has_regularizer: L2.
        uses_scaler: whether GradScaler scales the loss.
        trains_critic: whether the second model is trained alternately.
        mistake: what each step does besides, a name in `mistakes.MISTAKES`; empty: nothing.
    """

    n_steps: int
    events: tuple[str, ...] = ()
    gradient: str = "backward"
    n_batches: int = 1
    zero_grad: str = "none"
    clip: str = ""
    heads: str = "all"
    loss: str = "mse"
    has_weights: bool = False
    has_penalty: bool = False
    has_regularizer: bool = False
    uses_scaler: bool = False
    trains_critic: bool = False
    mistake: str = ""


@dataclass(frozen=True)
class Program:
    """One training program.

    Attributes:
        combine: how losses are scaled: "settled" (compute_average_loss, no gradient_op), "average" (with SUM), "sum"
            (divided by the program, with SUM), "mean" (of local rows, with MEAN) or "unsaid" (nobody says how).
        scheduler: of the learning rate, a name in `training.SCHEDULERS`; empty: none.
        has_average: whether an average of the weights is kept.
    """

    seed: int
    dtype: str
    model: ModelSpec
    critic: ModelSpec | None
    optimizers: tuple[OptimizerSpec, ...]
    combine: str
    data: DataSpec
    cluster: ClusterSpec
    phases: tuple[Phase, ...]
    scheduler: str = ""
    has_average: bool = False

    def to_json(self) -> str:
        """Return the program as a line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str) -> Program:
    """Return the program that `to_json` has written."""
    fields = json.loads(text)
    critic = fields["critic"]
    fields["model"] = _model(fields["model"])
    fields["critic"] = None if critic is None else _model(critic)
    fields["optimizers"] = tuple(OptimizerSpec(**field) for field in fields["optimizers"])
    fields["data"] = DataSpec(**fields["data"])
    fields["cluster"] = ClusterSpec(**fields["cluster"])
    fields["phases"] = tuple(Phase(**{**field, "events": tuple(field["events"])}) for field in fields["phases"])
    return Program(**fields)


def _model(fields: dict) -> ModelSpec:
    return ModelSpec(**{**fields, "frozen": tuple(fields["frozen"])})
