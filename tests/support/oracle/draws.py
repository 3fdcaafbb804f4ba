"""Random arguments for the calls that make_cases.py makes; no TensorFlow.

Floats are drawn from the multiples of 1/8, so that sums do not depend on their order, or, where the case is not
`exact`, from the normal distribution. The fields of the arguments are those in cases.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import PerReplica

SEED = 20260
FLOATS = ("float32", "float64")
DTYPES = (*FLOATS, "int32", "int64")


class Draw:
    """Random arguments for one kind of call on one number of replicas."""

    def __init__(self, n_replicas: int, stream: int) -> None:
        self.rng = np.random.default_rng([SEED, n_replicas, stream])
        self.n_replicas = n_replicas
        self.exact = True

    def start(self, p_exact: float = 0.85) -> None:
        """Decide for the next case whether its floats sum exactly."""
        self.exact = self.chance(p_exact)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Return one of low..high, both included."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, choices: Any) -> Any:
        return choices[self.integer(0, len(choices) - 1)]

    def weighted(self, weights: dict[Any, float]) -> Any:
        total = sum(weights.values())
        return list(weights)[int(self.rng.choice(len(weights), p=[weight / total for weight in weights.values()]))]

    def shape(self, rank: int) -> list[int]:
        return [0 if self.chance(0.04) else self.integer(1, 4) for _ in range(rank)]

    def array(self, shape: Any, dtype: str) -> np.ndarray:
        if dtype.startswith("int"):
            values = self.rng.integers(-50, 51, shape)
        elif self.exact:
            values = self.rng.integers(-128, 129, shape) / 8
        else:
            values = self.rng.standard_normal(shape)
        return np.asarray(values, dtype)

    def per_replica(self, shape: list[int], dtype: str, varying: int | None = None) -> PerReplica:
        """Draw an array for each replica; dimension `varying` differs between them."""
        values = []
        for _ in range(self.n_replicas):
            replica_shape = []
            for i, n in enumerate(shape):
                if i == varying:
                    replica_shape.append(self.integer(0, 5))
                else:
                    replica_shape.append(n)
            values.append(self.array(replica_shape, dtype))
        return PerReplica(tuple(values))

    def reduce_op(self) -> str:
        valid = {"ReduceOp.SUM": 30, "ReduceOp.MEAN": 30, "SUM": 8, "MEAN": 8, "sum": 8, "mean": 8, "Mean": 2}
        return self.weighted({**valid, "max": 1, "MIN": 1, "average": 1, "": 0.5})


def draw_reduce(draw: Draw) -> dict[str, Any]:
    draw.start()
    shape = draw.shape(draw.weighted({0: 1, 1: 3, 2: 4, 3: 2}))
    axis, in_function = draw_axis(draw, len(shape))
    if shape and draw.chance(0.5 if axis in (0, -len(shape)) else 0.2):
        varying = 0
    else:
        varying = None
    value = draw_reduce_value(draw, shape, varying)
    op = draw.reduce_op()
    # Graphs are rewritten so that they multiply by the inverse of a constant divisor.
    draw.exact = draw.exact and not (in_function and op.upper().endswith("MEAN"))
    return {"reduce_op": op, "value": value, "axis": axis, "in_function": in_function}


def draw_reduce_value(draw: Draw, shape: list[int], varying: int | None) -> Any:
    dtype = draw.one_of(DTYPES)
    how = draw.weighted({"distributed": 90, "tensor": 5, "number": 3, "mixed dtypes": 1})
    if how == "tensor":
        return draw.array(shape, dtype)
    if how == "number":
        return draw.one_of([1.5, -2, 3])  # not 0: TensorFlow fails by accident there, on an attribute of arrays
    value = draw.per_replica(shape, dtype, varying)
    if how == "mixed dtypes":
        return PerReplica((value.values[0].astype("float64"), *(v.astype("int32") for v in value.values[1:])))
    return value


def draw_axis(draw: Draw, rank: int) -> tuple[Any, bool]:
    """Return the axis and whether the call is made in a tf.function, which a list needs."""
    how = draw.weighted({"none": 20, "int": 20, "negative": 15, "several": 25, "out of range": 8, "odd": 6})
    if how == "none" or (rank == 0 and how in ("int", "negative", "several") and draw.chance(0.6)):
        return None, draw.chance(0.1)
    if how == "odd":
        return draw.one_of(["a", 1.5, "0", (0, "a"), (0.5,), (0, 0), ()]), False
    if how == "out of range":
        far = draw.one_of([rank, rank + 2, -rank - 1, -rank - 3])
        return draw.one_of([far, (0, far), (far,)]), False
    axes = draw.rng.permutation(rank)[: draw.integer(1, max(rank, 1))]
    axes = tuple(int(axis) - (rank if draw.chance(0.3) else 0) for axis in axes)
    if how == "several":
        return as_sequence(draw, axes)
    first = axes[0] % rank if axes else 0
    return (first if how == "int" else first - rank if rank else -1), draw.chance(0.1)


def as_sequence(draw: Draw, axes: tuple[int, ...]) -> tuple[Any, bool]:
    how = draw.weighted({"tuple": 15, "list in function": 7, "list": 1})
    return (axes if how == "tuple" else list(axes)), how == "list in function"


def draw_gathered(draw: Draw, rank: int, fits: bool) -> PerReplica:
    """Draw parts for a gather along some axis of theirs, or, with `fits` False, parts of which one does not fit."""
    shape = draw.shape(rank)
    dtype = draw.one_of(DTYPES)
    value = draw.per_replica(shape, dtype)
    if fits:
        return value
    odd = draw.integer(0, draw.n_replicas - 1)
    longer = draw.array([n + 1 for n in shape] if draw.chance(0.7) else [*shape, 1], dtype)
    return PerReplica(tuple(longer if i == odd else part for i, part in enumerate(value.values)))


def draw_gather(draw: Draw) -> dict[str, Any]:
    draw.start(0.9)
    how = draw.weighted(
        {"equal": 40, "unequal": 40, "does not fit": 10, "scalars": 5, "negative": 4, "out of range": 3}
    )
    if how == "scalars":
        rank = 0
    else:
        rank = draw.integer(2 if how == "does not fit" else 1, 3)
    axis = draw.integer(0, max(rank - 1, 0))
    if how == "unequal":
        value = draw.per_replica(draw.shape(rank), draw.one_of(DTYPES), axis)
    else:
        value = draw_gathered(draw, rank, how != "does not fit" or draw.n_replicas == 1)
    axis = {"negative": axis - rank, "out of range": rank + 1}.get(how, axis)
    return {"value": value, "axis": axis, "one_device": how not in ("equal", "unequal") or has_empty_leaf(value)}


def draw_nest(draw: Draw, leaf: Callable[[], Any]) -> Any:
    how = draw.weighted({"leaf": 50, "list": 15, "tuple": 10, "dict": 15, "deep": 10})
    if how == "leaf":
        return leaf()
    if how == "dict":
        return {name: leaf() for name in ("b", "a", "c")[: draw.integer(1, 3)]}
    if how == "deep":
        return {"x": [leaf(), (leaf(),)], "y": leaf()}
    items = [leaf() for _ in range(draw.integer(1, 3))]
    if how == "list":
        return items
    return tuple(items)


def has_empty_leaf(nest: Any) -> bool:
    """Return whether there is a leaf without any element on all replicas: a collective on it would hang."""
    if isinstance(nest, PerReplica):
        return all(part.size == 0 for part in nest.values)
    return any(map(has_empty_leaf, nest.values() if isinstance(nest, dict) else nest))


def draw_all_gather(draw: Draw) -> dict[str, Any]:
    how = draw.weighted({"equal": 40, "unequal": 40, "does not fit": 8, "scalars": 4})
    draw.start(0.9)
    if how == "scalars":
        rank = 0
    else:
        rank = draw.integer(2 if how == "does not fit" else 1, 3)
    axis = draw.integer(0, max(rank - 1, 0))
    if how == "does not fit":
        value = draw_gathered(draw, rank, draw.n_replicas == 1)
    else:
        varying = axis if how == "unequal" else None
        value = draw_nest(draw, lambda: draw.per_replica(draw.shape(rank), draw.one_of(DTYPES), varying))
    return {"value": value, "axis": axis, "one_device": how in ("does not fit", "scalars") or has_empty_leaf(value)}


def draw_all_reduce(draw: Draw) -> dict[str, Any]:
    draw.start()
    if draw.chance(0.08) and draw.n_replicas > 1:
        value = draw_gathered(draw, draw.integer(1, 3), fits=False)
        return {"reduce_op": draw.reduce_op(), "value": value, "one_device": True}
    # Collectives want one dtype for all leaves and some elements, or may hang. Nests with int32 are refused by all.
    mixed = draw.chance(0.3)
    alone = not mixed and draw.chance(0.3)
    if mixed:
        dtypes = ("float32", "float64", "int64")
    else:
        dtypes = (draw.one_of(DTYPES if alone else (*FLOATS, "int64")),)

    def leaf():
        shape = draw.shape(draw.integer(0, 3))
        return draw.per_replica(shape if mixed else [n or 1 for n in shape], draw.one_of(dtypes))

    value = leaf() if alone else draw_nest(draw, leaf)
    return {"reduce_op": draw.reduce_op(), "value": value, "one_device": mixed}


def draw_split(draw: Draw) -> dict[str, Any]:
    draw.start(1.0)
    rows = draw.weighted({0: 2, draw.integer(1, 12): 50, draw.integer(13, 40): 48})
    if draw.chance(0.4):
        batch_size = draw.integer(1, 6)
    else:
        batch_size = draw.integer(1, 3 * draw.n_replicas + 2)
    repeats = {"repeat_rows": 1, "repeat_batches": 1}
    if draw.chance(0.25):
        repeats[draw.one_of(list(repeats))] = draw.integer(2, 3)
    return {"rows": rows, "batch_size": batch_size, "drop_remainder": draw.chance(0.35), **repeats}


def draw_per_replica_batch_size(draw: Draw) -> dict[str, Any]:
    draw.start(1.0)
    return {"global_batch_size": draw.integer(0, 40) if draw.chance(0.5) else draw.n_replicas * draw.integer(0, 9)}


def draw_context(draw: Draw) -> str:
    return draw.weighted({"replica": 85, "cross": 8, "default": 7})


def draw_average_loss(draw: Draw) -> dict[str, Any]:
    draw.start(0.8)
    context = draw_context(draw)
    dtype = draw.weighted({"float32": 6, "float64": 3, "int32": 0.5})
    shape = draw.shape(draw.weighted({0: 0.5, 1: 7, 2: 2, 3: 0.5}))
    varying = 0 if shape and draw.chance(0.25) else None

    def value(shape: list[int], dtype: str) -> Any:
        if context == "replica":
            return draw.per_replica(shape, dtype, varying if shape else None)
        return draw.array(shape, dtype)

    losses = value(shape, dtype)
    weights = None
    if draw.chance(0.55):
        weights = draw_weights(draw, losses, draw.one_of(FLOATS) if draw.chance(0.15) else dtype)
    size = draw.weighted({None: 45, draw.integer(1, 40): 40, 0: 5, -3: 2, 8.0: 3, "vector": 2})
    if size == "vector":
        size = np.array([4, 4], "int32")
    return {"per_example_loss": losses, "sample_weight": weights, "global_batch_size": size, "context": context}


def draw_weights(draw: Draw, losses: Any, dtype: str) -> Any:
    how = draw.weighted({"same": 50, "number": 12, "scalar": 8, "rows": 20, "column": 5, "does not fit": 6})
    if how == "number":
        return draw.one_of([0.5, 2.0, 0.0, 3])
    if how == "scalar":
        return draw.array([], dtype)

    def weights(part: np.ndarray) -> np.ndarray:
        rows = list(part.shape[:1])
        shapes = {"same": list(part.shape), "rows": rows, "column": [*rows, 1]}
        return draw.array(shapes.get(how, [*part.shape[:-1], 7]), dtype)

    if isinstance(losses, PerReplica):
        return PerReplica(tuple(map(weights, losses.values)))
    return weights(losses)


def draw_regularization_loss(draw: Draw) -> dict[str, Any]:
    draw.start(0.8)
    context = draw_context(draw)
    dtype = draw.weighted({"float32": 5, "float64": 3, "int32": 1})
    how = draw.weighted({"number": 1, "same": 3, "each": 6})
    if how == "number":
        value = draw.one_of([1.0, 0.25, 3])
    elif how == "same" or context != "replica":
        value = draw.array(draw.shape(draw.integer(0, 2)), dtype)
    else:
        value = draw.per_replica(draw.shape(draw.integer(0, 2)), dtype)
    return {"regularization_loss": value, "context": context}


def draw_variable(draw: Draw) -> dict[str, Any]:
    synchronization = draw.weighted({"AUTO": 3, "ON_WRITE": 3, "ON_READ": 6, "NONE": 0.5})
    # Copies of an ON_READ variable that were divided by another number than a power of two do not sum exactly.
    divides = synchronization == "ON_READ" and draw.n_replicas in (3, 5)
    draw.start(0.0 if divides else 0.9)
    shape = draw.shape(draw.integer(0, 2))
    dtype = draw.weighted({"float32": 5, "float64": 3, "int32": 1, "int64": 1})
    aggregation = draw.one_of(["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
    return {
        "initial_value": draw.array(shape, dtype),
        "trainable": draw.weighted({None: 8, False: 3, True: 1}),
        "synchronization": synchronization,
        "aggregation": aggregation,
        "actions": [draw_action(draw, shape, dtype) for _ in range(draw.integer(2, 6))],
    }


def draw_action(draw: Draw, shape: list[int], dtype: str) -> dict[str, Any]:
    method = draw.weighted(
        {"read_value": 6, "assign": 5, "assign_add": 5, "assign_sub": 4, "scatter_add": 0.7, "scatter_update": 0.7}
    )
    context = draw.weighted({"replica": 47, "cross": 45, "default": 8})
    action = {"method": method, "context": context, "value": None, "indices": None}
    if method == "read_value":
        return action
    if method.startswith("scatter") and shape and shape[0]:
        action["indices"] = draw.rng.permutation(shape[0])[: draw.integer(1, shape[0])].astype("int32")
        shape = [len(action["indices"]), *shape[1:]]
    elif method.startswith("scatter"):
        action["method"] = "assign"
    how = draw.weighted({"each": 80, "tensor": 6, "number": 8, "does not fit": 2})
    number = draw.one_of([2, -3] if dtype.startswith("int") else [2.0, -0.5])
    if how == "number" and action["indices"] is None:
        if not shape or action["method"] != "assign" or draw.chance(0.1):
            action["value"] = number
        else:
            action["value"] = draw.array(shape, dtype)
    elif how == "each" and context == "replica":
        action["value"] = draw.per_replica(shape, dtype)
    else:
        action["value"] = draw.array([*shape, 2] if how == "does not fit" else shape, dtype)
    return action
