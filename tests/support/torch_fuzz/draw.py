"""Draws programs from seeds: the same program from the same seed, on any machine."""

import random
from dataclasses import replace
from typing import Any

from torch_fuzz.events import EVENTS, MAY_BE_REFUSED, NEEDS_WHOLE_GRADIENTS, WRITES_WEIGHTS
from torch_fuzz.mistakes import MISTAKES
from torch_fuzz.models import HAS_STATISTICS, KINDS, NEEDS_ROWS, NOT_TWICE
from torch_fuzz.program import ClusterSpec, DataSpec, ModelSpec, OptimizerSpec, Phase, Program
from torch_fuzz.steps import GRADIENTS
from torch_fuzz.training import SCHEDULERS

#: Optimizers and the options they draw from. eps is large, so that rounding of a gradient that is zero is not
#: magnified to a step; learning rates are small, so that programs do not diverge.
_EPS = [1e-3]
_OPTIMIZERS: dict[str, dict[str, list[Any]]] = {
    "SGD": {"lr": [0.05], "momentum": [0.0, 0.9], "weight_decay": [0.0, 0.01], "foreach": [False, True]},
    "Adam": {"lr": [0.01], "eps": _EPS, "weight_decay": [0.0, 0.01], "amsgrad": [False, True]},
    "AdamW": {"lr": [0.01], "eps": _EPS, "weight_decay": [0.01, 0.1], "fused": [False, True]},
    "RMSprop": {"lr": [0.005], "eps": _EPS, "momentum": [0.0, 0.9], "centered": [False, True]},
    "Adagrad": {"lr": [0.02], "eps": _EPS, "lr_decay": [0.0, 0.1]},
    "Adadelta": {"lr": [0.5], "eps": _EPS, "weight_decay": [0.0, 0.01]},
    "NAdam": {"lr": [0.01], "eps": _EPS, "decoupled_weight_decay": [False, True], "weight_decay": [0.0, 0.1]},
    "RAdam": {"lr": [0.01], "eps": _EPS, "weight_decay": [0.0, 0.01]},
    "Adamax": {"lr": [0.01], "eps": _EPS, "maximize": [False, True]},
    "ASGD": {"lr": [0.05], "t0": [2.0], "weight_decay": [0.0, 0.01]},
    "Rprop": {"lr": [0.001]},
    "LBFGS": {"lr": [0.1], "max_iter": [3], "history_size": [4], "line_search_fn": [None, "strong_wolfe"]},
}
#: Kinds of models in which some gradients are zero but for rounding, whose sign Rprop would follow.
_NO_RPROP = {"attention", "batch_norm"}
#: How often a program's optimizers are ZeroRedundancyOptimizers, where they may be.
_DIVIDED_SHARE = 0.25
_OWN = {"strategy's method", "optimizer's method", "own sums", "applied sums"}


def draw_program(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    model = _draw_model(rng)
    cluster = _draw_cluster(rng)
    combine = rng.choice(["settled", "average", "average", "sum", "sum", "mean", "mean"])
    has_critic = (rng.random() < 0.15 and not cluster.has_several) or rng.random() < 0.05
    no_closure = cluster.has_several or cluster.strategy == "central"
    kinds = [_draw_optimizer(rng, model, no_closure) for _ in range(2 if has_critic else 1)]
    data = _draw_data(rng, model)
    phases = tuple(
        _draw_phase(rng, number, model, cluster, combine, kinds, data, has_critic)
        for number in range(rng.choice([1, 2, 2, 3]))
    )
    program = Program(
        seed=seed,
        dtype="float32" if rng.random() < 0.15 else "float64",
        model=model,
        critic=ModelSpec("critic", rng.choice([3, 8])) if has_critic else None,
        optimizers=tuple(kinds),
        combine=combine,
        data=data,
        cluster=cluster,
        phases=phases,
        scheduler=rng.choice(sorted(SCHEDULERS)) if rng.random() < 0.35 and kinds[0].kind != "LBFGS" else "",
        has_average=rng.random() < 0.2 and cluster.strategy != "central",
    )
    if rng.random() < _DIVIDED_SHARE:
        program = _divided(program)
    if _writes_unseen(program.cluster):
        return _without_writes(program)
    return program


def _writes_unseen(cluster: ClusterSpec) -> bool:
    """Return whether all ranks would write to one copy of the weights, and nobody looks, as outside of `run`."""
    return cluster.has_one_copy and not cluster.uses_run


def _without_writes(program: Program) -> Program:
    """Return a program that leaves writes to weights to optimizers, as is documented for ranks with one copy."""
    phases = []
    for phase in program.phases:
        if "write" in phase.mistake:
            phases.append(replace(phase, mistake=""))
        else:
            phases.append(phase)
    return replace(program, phases=tuple(phases))


def _divided(program: Program) -> Program:
    """Return a program with ZeroRedundancyOptimizers, without what these are documented to refuse."""
    cluster = program.cluster
    kinds = [spec.kind for spec in program.optimizers]
    is_summed_so = cluster.implementation in ("AUTO", "HIERARCHICAL") and cluster.strategy != "central"
    if cluster.extra_replicas is not None or not is_summed_so or "LBFGS" in kinds:
        return program
    return replace(
        program,
        cluster=replace(cluster, divides_steps=True),
        optimizers=tuple(replace(spec, is_in_scope=True) for spec in program.optimizers),
        phases=tuple(map(_without_whole_gradients, program.phases)),
    )


def _without_whole_gradients(phase: Phase) -> Phase:
    return replace(
        phase,
        events=tuple(event for event in phase.events if event not in WRITES_WEIGHTS | NEEDS_WHOLE_GRADIENTS),
        gradient="backward" if phase.gradient in _OWN | {"closure"} else phase.gradient,
        clip="value" if phase.clip == "scale" else phase.clip,
    )


def _draw_model(rng: random.Random) -> ModelSpec:
    kinds = sorted(set(KINDS) - {"max_norm"})
    if rng.random() < 0.005:
        kind = "max_norm"
    else:
        kind = rng.choice(kinds)
    if kind == "attention":
        width = 4 * rng.choice([1, 2, 3])
    else:
        width = rng.choice([3, 4, 8, 17])
    if rng.random() < 0.25:
        frozen = tuple(rng.sample(range(12), rng.choice([1, 2])))
    else:
        frozen = ()
    n_heads = rng.choice([1, 2, 3]) if rng.random() < 0.5 else 0
    return ModelSpec(kind, width, n_heads, frozen, has_counter=rng.random() < 0.15)


def _draw_cluster(rng: random.Random) -> ClusterSpec:
    if rng.random() < 0.35:
        extra = rng.choice([0, 1, 2, 3])
    else:
        extra = None
    common: dict[str, Any] = {
        "extra_replicas": extra,
        "uses_run": extra is not None or rng.random() < 0.4,
        "direct_bytes": rng.choice([0, 0, 64, 200]),
    }
    strategy = rng.choices(["multi_worker", "mirrored", "central"], [8, 1, 1.5])[0]
    if strategy != "multi_worker":
        return ClusterSpec(strategy, **common)
    hosts = "1 each" if rng.random() < 0.3 else ""
    implementation = rng.choice(["AUTO"] * 5 + ["RING", "HIERARCHICAL", "HALVING", "MPI"])
    buckets = rng.choice([0, 0, 0, 256, 1024])
    return ClusterSpec(strategy, hosts=hosts, implementation=implementation, bucket_bytes=buckets, **common)


def _draw_optimizer(rng: random.Random, model: ModelSpec, no_closure: bool) -> OptimizerSpec:
    weights = {"SGD": 6, "Adam": 4, "AdamW": 4, "LBFGS": 0.03 if no_closure else 1.5}
    names = [name for name in _OPTIMIZERS if name != "Rprop" or model.kind not in _NO_RPROP]
    kind = rng.choices(names, [weights.get(name, 2) for name in names])[0]
    options = {key: rng.choice(values) for key, values in _OPTIMIZERS[kind].items()}
    options = {key: value for key, value in options.items() if value is not None}
    if options.get("momentum") and kind == "SGD" and rng.random() < 0.4:
        options["nesterov"] = True
    n_groups = 1 if kind == "LBFGS" else rng.choice([1, 1, 2, 3])
    return OptimizerSpec(kind, options, n_groups, is_in_scope=rng.random() < 0.8)


def _draw_data(rng: random.Random, model: ModelSpec) -> DataSpec:
    if model.kind in NEEDS_ROWS:
        batch = rng.choice([6, 7, 8, 12])
    else:
        batch = rng.choice([2, 3, 4, 6, 7, 12])
    n_batches = rng.choice([2, 3, 4])
    if model.kind in NEEDS_ROWS:
        remainder_rows = 0
    else:
        remainder_rows = rng.choice([0, 1, batch // 2])
    if model.kind in HAS_STATISTICS and remainder_rows == 1:
        remainder_rows = 2
    return DataSpec(
        n_rows=n_batches * batch + remainder_rows % batch,
        batch=batch,
        is_shuffled=rng.random() < 0.4,
        drops_remainder=rng.random() < 0.2,
        prefetch=rng.choice([0, 0, 0, 2]),
    )


def _draw_phase(
    rng: random.Random,
    number: int,
    model: ModelSpec,
    cluster: ClusterSpec,
    combine: str,
    kinds: list[OptimizerSpec],
    data: DataSpec,
    has_critic: bool,
) -> Phase:
    fields: dict[str, Any] = {
        "n_steps": rng.choice([2, 3, 4, 5]),
        "events": _draw_events(rng, number, model, cluster),
        "zero_grad": rng.choices(["none", "zeros", "never"], [6, 4, 1])[0],
        "clip": rng.choices(["", "norm", "value", "scale", "merged norm"], [6, 2, 1, 1, 1])[0],
        "heads": rng.choice(["all", "none", "alternate", "tags", "rest"]),
        "loss": rng.choice(["mse", "cross_entropy", "smooth"]),
        "has_weights": rng.random() < 0.2,
        "has_penalty": rng.random() < 0.15 and model.kind not in NOT_TWICE,
        "has_regularizer": rng.random() < 0.2,
        "trains_critic": has_critic and rng.random() < 0.8,
        "n_batches": rng.choice([1, 1, 1, 2, 3]),
    }
    fields["gradient"] = _draw_gradient(rng, cluster, combine, kinds, fields, model, data)
    if rng.random() < 0.12:
        fields["mistake"] = rng.choice(_mistakes(rng, cluster))
        fields["n_batches"] = 1
    may_scale = not cluster.uses_run and fields["gradient"] in ("backward", "no_sync", "terms", "twice")
    fields["uses_scaler"] = may_scale and rng.random() < 0.15 and "mistake" not in fields
    if fields["clip"] == "merged norm" and not cluster.uses_run:
        fields["clip"] = "norm"
    if fields["has_penalty"] and fields["gradient"] == "features":
        fields["has_penalty"] = False
    return Phase(**fields)


def _mistakes(rng: random.Random, cluster: ClusterSpec) -> list[str]:
    """Return mistakes to choose from: seldom such that end a job, as one rank alone refuses them."""
    if rng.random() < 0.9 and (cluster.has_several or cluster.strategy == "central"):
        return [name for name in sorted(MISTAKES) if "closure" not in name and "no_sync" not in name]
    return sorted(MISTAKES)


def _draw_gradient(
    rng: random.Random,
    cluster: ClusterSpec,
    combine: str,
    kinds: list[OptimizerSpec],
    fields: dict[str, Any],
    model: ModelSpec,
    data: DataSpec,
) -> str:
    if any(kind.kind == "LBFGS" for kind in kinds):
        fields["n_batches"] = 1
        return "closure"
    is_uneven = data.n_rows % data.batch and not data.drops_remainder
    names = sorted(GRADIENTS)
    weights = {"backward": 8.0, "no_sync": 4.0}
    chosen = rng.choices(names, [weights.get(name, 1.0) for name in names])[0]
    is_wrong = (
        (chosen in ("no_sync", "no_sync chunks") and fields["zero_grad"] == "never")
        or (chosen == "closure" and (cluster.has_several or cluster.strategy == "central"))
        or (chosen in _OWN and combine == "mean")
        or (chosen == "no_sync" and combine == "mean" and is_uneven)
        or (chosen == "features" and combine == "settled")
        or (chosen in ("chunks", "no_sync chunks", "features") and model.kind in HAS_STATISTICS | NEEDS_ROWS)
        or (chosen in ("chunks", "no_sync chunks") and combine == "mean")
        or (chosen in _OWN and fields["clip"] and chosen != "applied sums")
    )
    if is_wrong and rng.random() < 0.97:
        return "backward"
    if chosen in ("chunks", "no_sync chunks") and combine == "mean":
        return "backward"  # a mean of other chunks is another number, and nothing is wrong with it
    if chosen in _OWN | {"closure", "no_sync chunks"}:
        fields["n_batches"] = 1
    if chosen in _OWN - {"own sums"} and rng.random() < 0.9:
        fields["zero_grad"] = "none"
    if chosen == "own sums" and not cluster.uses_run:
        return "strategy's method"
    if chosen == "no_sync":
        fields["n_batches"] = max(2, fields["n_batches"])
    return chosen


def _draw_events(rng: random.Random, number: int, model: ModelSpec, cluster: ClusterSpec) -> tuple[str, ...]:
    names = sorted(set(EVENTS) - MAY_BE_REFUSED)
    if cluster.strategy == "central":
        names = [name for name in names if name not in WRITES_WEIGHTS]
    if model.kind != "conv":
        names = [name for name in names if name != "turn layout"]
    if number == 0:
        n_events = rng.choice([0, 0, 1])
    else:
        n_events = rng.choice([0, 1, 1, 2])
    chosen = rng.sample(names, n_events)
    if rng.random() < 0.04:
        chosen.append(rng.choice(sorted(MAY_BE_REFUSED)))
    return tuple(chosen)
