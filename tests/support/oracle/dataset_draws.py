"""Random distributed datasets, and how many rows each replica gets at each step."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from draws import Draw
from forms import Form

LONGEST = 200


@dataclass(frozen=True)
class Drawn:
    """A distributed dataset as the draws know it.

    Attributes:
        sizes: rows of each batch of a pass, the first ones of an endless one.
        n_replicas: that each batch is divided among; 1 where a batch is one replica's.
        row: nest of (shape, dtype) of a row.
        is_endless: whether a pass never ends.
        is_exact: whether sums of its floats do not depend on their order.
    """

    sizes: tuple[int, ...]
    n_replicas: int
    row: Any
    is_endless: bool
    is_exact: bool

    def element_after(self, steps: int | None) -> Any:
        """Return the forms of the last element of an iteration of some steps; None when there is none."""
        sizes = self.sizes[:steps]
        if not sizes:
            return None
        part = -(-sizes[-1] // self.n_replicas)
        rows = [max(0, min(part, sizes[-1] - part * number)) for number in range(self.n_replicas)]
        return map_rows(self.row, rows, not self.is_exact)


def map_rows(row: Any, rows: list[int], is_rounded: bool) -> Any:
    if isinstance(row, dict):
        return {key: map_rows(column, rows, is_rounded) for key, column in row.items()}
    if isinstance(row, list):  # a tuple of arrays
        return tuple(map_rows(column, rows, is_rounded) for column in row)
    shape, dtype = row
    return Form(tuple((n, *shape) for n in rows), dtype, is_rounded=is_rounded)


def draw_source(draw: Any) -> tuple[Any, int, Any]:
    """Return a source, its number of rows, and what a row looks like."""
    n_rows = draw.weighted({draw.integer(1, 12): 5, draw.integer(13, 40): 5})
    how = draw.weighted({"range": 4, "array": 3, "tuple": 2, "dict": 2})
    if how == "range":
        return n_rows, n_rows, ((), "int64")

    def array() -> tuple[np.ndarray, Any]:
        shape = draw.small_shape(draw.weighted({0: 3, 1: 3, 2: 1}))
        values = draw.array([n_rows, *shape], draw.one_of(("float32", "float64", "int64")))
        return values, (tuple(shape), str(values.dtype))

    (first_array, spec) = array()
    (second_array, other_spec) = array()
    if how == "array":
        return first_array, n_rows, spec
    if how == "tuple":
        return (first_array, second_array), n_rows, [spec, other_spec]
    return {"x": first_array, "y": second_array}, n_rows, {"x": spec, "y": other_spec}


def draw_stages(draw: Draw, n_rows: int, can_map: bool) -> tuple[list[Any], list[int], bool]:
    """Return the calls that build a dataset, the rows of its batches, and whether it is endless."""
    stages: list[Any] = []
    n = n_rows
    times = 1
    is_repeated = False
    if draw.chance(0.12):
        shards = draw.integer(1, 3)
        stages.append(("shard", shards, index := draw.integer(0, shards - 1)))
        n = len(range(index, n, shards))
    if can_map and draw.chance(0.25):
        stages.append(("map", "add 1"))
    if draw.chance(0.15):
        stages.append(("take", count := draw.one_of([-1, 0, draw.integer(1, n_rows + 2)])))
        n = n if count == -1 else min(n, count)
    if draw.chance(0.25):
        times = draw.weighted({1: 1, 2: 5, 3: 3, -1: 1})
        stages.append(("repeat", times))
        is_repeated = True
    total = n * (LONGEST if times == -1 else times)
    if is_repeated and draw.chance(0.2):
        stages.append(("take", count := draw.integer(1, total + 2)))
        total = min(total, count)
        times = 1
    batches, is_endless = draw_batches(draw, stages, total, times == -1 and n > 0, can_map)
    return stages, batches, is_endless


def draw_batches(draw: Draw, stages: list[Any], total: int, is_endless: bool, can_map: bool) -> tuple[list[int], bool]:
    """Add batch and what follows it to the stages; return the rows of each batch."""
    if draw.chance(0.4):
        size = draw.integer(1, 6)
    else:
        size = draw.integer(1, 3 * draw.n_replicas + 2)
    drop = draw.chance(0.35)
    stages.append(("batch", size, drop))
    batches = [min(size, total - start) for start in range(0, total, size)]
    batches = [rows for rows in batches if rows == size or not drop]
    if can_map and draw.chance(0.15):
        stages.append(("map", "add 1"))
    if draw.chance(0.12):
        stages.append(("take", count := draw.integer(0, 5)))
        batches = batches[:count]
        is_endless = False
    elif draw.chance(0.15) and not is_endless:
        stages.append(("repeat", times := draw.weighted({2: 4, 3: 2, -1: 1})))
        is_endless = times == -1 and bool(batches)
        if is_endless:
            batches = list(itertools.islice(itertools.cycle(batches), LONGEST))
        else:
            batches = batches * abs(times)
    if draw.chance(0.15):
        stages.append(("prefetch", draw.integer(1, 3)))
    return batches, is_endless


def draw_distribute(draw: Any) -> dict[str, Any]:
    source, n_rows, row = draw_source(draw)
    out = draw.name("d")
    if draw.chance(0.15):
        return draw_from_function(draw, source, n_rows, row, out)
    stages, sizes, is_endless = draw_stages(draw, n_rows, can_map=True)
    if isinstance(row, tuple) and draw.chance(0.1):
        stages.insert(0, ("map", "pair"))
        row = [row, row]
    policy = draw.weighted({None: 75, "DATA": 20, "OFF": 3, "AUTO": 10})
    draw.datasets[out] = Drawn(tuple(sizes), draw.n_replicas, row, is_endless, draw.exact)
    return {"source": source, "stages": stages, "policy": policy, "as_function": None, "out": out, "exact": True}


def draw_from_function(draw: Any, source: Any, n_rows: int, row: Any, out: str) -> dict[str, Any]:
    """Draw a dataset that a function makes: one for all replicas, which one rank must hold, or one for each."""
    draw.mode = mode = draw.mode or draw.one_of(["PER_WORKER", "PER_REPLICA"])  # one changes the strategy for good
    stages: list[Any] = [("shard_by_context",)] if draw.chance(0.7) else []
    size = draw.integer(1, 4) * (draw.n_replicas if draw.chance(0.9) else 1)
    stages.append(("batch_by_context", size, draw.chance(0.4)))
    if mode == "PER_WORKER":
        draw.ranks = [1]
    draw.datasets[out] = Drawn((), 1, row, False, draw.exact)
    return {"source": source, "stages": stages, "policy": None, "as_function": mode, "out": out, "exact": True}
