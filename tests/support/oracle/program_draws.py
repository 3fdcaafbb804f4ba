"""Random programs: steps in cross-replica context; no TensorFlow. The fields of steps are described in program.py."""

from dataclasses import replace
from typing import Any

from cases import PerReplica
from dataset_draws import draw_distribute
from draws import DTYPES, FLOATS, Draw, as_sequence, draw_axis
from forms import Form, leaves_with_paths
from replica_draws import draw_run

STREAM = 10_000
#: Replicas of the programs, in turn; fewer ones more often, as they are quicker and more numbers of ranks fit them.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 4)
WEIGHTS = {
    "values": 3,
    "constant": 1,
    "reduce": 5,
    "gather": 3,
    "local_results": 1,
    "variable": 2,
    "write": 3,
    "read": 2,
    "state": 0.5,
    "distribute": 1.3,
    "element_spec": 1,
    "iterate": 2.2,
    "iter": 0.5,
    "next": 1.5,
    "batch_size": 0.5,
    "average_loss": 0.15,
    "regularization_loss": 0.15,
    "run": 8,
    "update": 0.7,
}
#: Of three programs in four: TensorFlow takes half a second for each iterator.
WITHOUT_DATASETS = {**WEIGHTS, "distribute": 0.0, "iterate": 0.0, "iter": 0.0, "next": 0.0, "element_spec": 0.0}


class ProgramDraw(Draw):
    """Draws one program: what registers hold, and the steps so far."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(SIZES[number % len(SIZES)], STREAM + number)
        self.exact = self.chance(0.8)
        self.forms: dict[str, Any] = {}
        self.variables: dict[str, dict[str, Any]] = {}
        self.datasets: dict[str, Any] = {}
        self.iterators: dict[str, str] = {}
        self.one_device = self.chance(0.9)  # collectives are traced anew at every gather
        self.ranks: list[int] | None = None
        self.mode: str | None = None
        self.n_names = 0

    def name(self, letter: str) -> str:
        self.n_names += 1
        return f"{letter}{self.n_names}"

    def leaves(self, **wanted: bool) -> dict[str, Form]:
        """Return the leaves of all registers whose properties are as wanted."""
        all_leaves: dict[str, Form] = {}
        for name, nest in self.forms.items():
            all_leaves.update(leaves_with_paths(name, nest))
        leaves = {}
        for key, form in all_leaves.items():
            properties = {property_name: getattr(form, property_name) for property_name in wanted}
            if properties == wanted:
                leaves[key] = form
        return leaves

    def leaf(self, **wanted: bool) -> tuple[str, Form] | None:
        """Return one leaf, rather a late one, as values that were computed tell more than those that were drawn."""
        candidates = list(self.leaves(**wanted).items())
        if candidates:
            return candidates[max(self.integer(0, len(candidates) - 1), self.integer(0, len(candidates) - 1))]
        return None

    def small_shape(self, rank: int) -> list[int]:
        return [0 if self.chance(0.03) else self.integer(1, 3) for _ in range(rank)]

    def form_of(self, value: Any) -> Form:
        if isinstance(value, PerReplica):
            shapes = tuple(tuple(array.shape) for array in value.values)
            return Form(shapes, str(value.values[0].dtype), is_rounded=not self.exact)
        return Form((tuple(value.shape),) * self.n_replicas, str(value.dtype), True, not self.exact)


def draw_program(number: int) -> dict[str, Any]:
    """Return a program by its number: always the same one."""
    draw = ProgramDraw(number)
    steps: list[dict[str, Any]] = []
    n_steps = draw.integer(3, 12)
    if number // len(SIZES) % 4 == 0:
        weights = WEIGHTS
    else:
        weights = WITHOUT_DATASETS
    while len(steps) < n_steps:
        kind = draw.weighted(weights if steps else {"values": 2, "variable": 1, "distribute": weights["distribute"]})
        step = STEPS[kind](draw)
        if step is not None:
            steps.append({"call": kind, **step})
    fields = {"number": number, "n_replicas": draw.n_replicas, "one_device": draw.one_device, "ranks": draw.ranks}
    return {**fields, "steps": steps}


def draw_values(draw: ProgramDraw) -> dict[str, Any]:
    def leaf() -> PerReplica:
        shape = draw.small_shape(draw.weighted({0: 1, 1: 4, 2: 3, 3: 1}))
        dtype = draw.one_of(DTYPES)
        return draw.per_replica(shape, dtype, 0 if shape and draw.chance(0.3) else None)

    how = draw.weighted({"leaf": 97, "tuple": 1, "dict": 1})
    value = {"leaf": leaf, "tuple": lambda: (leaf(), leaf()), "dict": lambda: {"b": leaf(), "a": [leaf()]}}[how]()
    out = draw.name("r")
    draw.forms[out] = map_forms(draw, value)
    return {"value": value, "out": out}


def map_forms(draw: ProgramDraw, nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: map_forms(draw, child) for key, child in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(map_forms(draw, child) for child in nest)
    return draw.form_of(nest)


def draw_constant(draw: ProgramDraw) -> dict[str, Any]:
    value = draw.array(draw.small_shape(draw.integer(0, 2)), draw.one_of(DTYPES))
    out = draw.name("r")
    draw.forms[out] = draw.form_of(value)
    return {"value": value, "out": out}


def draw_reduce(draw: ProgramDraw) -> dict[str, Any] | None:
    if draw.variables and draw.chance(0.03):
        return draw_reduce_of_variable(draw)
    if draw.chance(0.02):
        drawn_leaf = draw.leaf()
    else:
        drawn_leaf = draw.leaf(is_plain=False)
    if drawn_leaf is None:
        return None
    value, form = drawn_leaf
    op = draw.reduce_op()
    axis = fitting_axis(draw, form)
    if draw.chance(0.004):
        return {"op": op, "value": [value, value], "axis": None, "out": None, "exact": False}
    is_mean = op.upper().endswith("MEAN")
    # Graphs, which a list of axes takes, are rewritten so that they multiply by the inverse of a constant divisor.
    step = {"op": op, "value": value, "axis": axis, "exact": not form.is_rounded and not isinstance(axis, list)}
    if not has_result(form, axis) or (is_mean and not form.is_float):
        return {**step, "out": None}
    out = draw.name("r")
    reduced = form if axis is None else form.without(axis)
    draw.forms[out] = replace(reduced, is_plain=True, is_rounded=form.is_rounded or is_mean)
    return {**step, "out": out}


def draw_reduce_of_variable(draw: ProgramDraw) -> dict[str, Any]:
    name = draw.one_of(list(draw.variables))
    exact = not draw.variables[name]["form"].is_rounded
    return {"op": draw.one_of(["SUM", "MEAN"]), "value": name, "axis": None, "out": None, "exact": exact}


def fitting_axis(draw: ProgramDraw, form: Form) -> Any:
    """Return an axis, mostly one along which uneven shapes can be reduced."""
    if not form.is_even and form.rank and draw.chance(0.85):
        other_axes = [axis for axis in range(1, form.rank) if draw.chance(0.4)]
        axes = tuple(axis - (form.rank if draw.chance(0.2) else 0) for axis in (0, *other_axes))
        if other_axes or draw.chance(0.2):
            return as_sequence(draw, axes)[0]
        return axes[0]
    return draw_axis(draw, form.rank)[0]


def has_result(form: Form, axis: Any) -> bool:
    """Whether reducing over an axis probably succeeds."""
    if axis is None:
        axes = ()
    elif isinstance(axis, (tuple, list)):
        axes = axis
    else:
        axes = (axis,)
    if not all(isinstance(dimension, int) and -form.rank <= dimension < form.rank for dimension in axes):
        return False
    if len({dimension % form.rank for dimension in axes}) < len(axes):
        return False
    return (form if axis is None else form.without(axis)).is_even


def draw_gather(draw: ProgramDraw) -> dict[str, Any] | None:
    drawn_leaf = draw.leaf(is_plain=False)
    if drawn_leaf is None or (drawn_leaf[1].rank == 0 and draw.chance(0.9)):
        return None
    value, form = drawn_leaf
    axis, fits = gather_axis(draw, form)
    step = {"value": value, "axis": axis, "exact": not form.is_rounded}
    if not fits:
        return {**step, "out": None}
    out = draw.name("r")
    draw.forms[out] = replace(form.joined(axis), is_plain=True)
    return {**step, "out": out}


def gather_axis(draw: ProgramDraw, form: Form) -> tuple[int, bool]:
    """Return an axis and whether the parts fit; the program is for one device where a collective would hang."""
    if form.rank == 0 or not form.is_even:
        axis = 0
    else:
        axis = draw.integer(0, form.rank - 1)
    if draw.chance(0.05) and form.rank:
        axis = draw.one_of([axis - form.rank, form.rank + 1])
    fits = form.rank > 0 and -form.rank <= axis < form.rank and form.fits_along(axis % form.rank)
    draw.one_device |= not fits or form.is_empty or axis < 0
    return axis, fits


def draw_local_results(draw: ProgramDraw) -> dict[str, Any] | None:
    drawn_leaf = draw.leaf()
    if drawn_leaf is None or (draw.variables and draw.chance(0.2)):
        if draw.variables:
            return {"value": draw.one_of(list(draw.variables)), "exact": False}
        return None
    return {"value": drawn_leaf[0], "exact": not drawn_leaf[1].is_rounded}


def draw_variable(draw: ProgramDraw) -> dict[str, Any]:
    dtype = draw.weighted({"float32": 5, "float64": 3, "int32": 1, "int64": 1})
    synchronization = draw.weighted({"AUTO": 3, "ON_WRITE": 3, "ON_READ": 6, "NONE": 0.2})
    options = {
        "initial_value": draw.array(draw.small_shape(draw.integer(0, 2)), dtype),
        "trainable": draw.weighted({None: 8, False: 3, True: 0.2 if synchronization == "ON_READ" else 1}),
        "synchronization": synchronization,
        "aggregation": draw.weighted({"NONE": 0.7, "SUM": 2, "MEAN": 2, "ONLY_FIRST_REPLICA": 2}),
    }
    if not dtype.startswith("float") and options["aggregation"] == "MEAN" and draw.chance(0.9):
        options["aggregation"] = "SUM"
    fails = synchronization == "NONE" or (synchronization == "ON_READ" and options["trainable"])
    fails = fails or (options["aggregation"] == "MEAN" and not dtype.startswith("float"))
    out = draw.name("v")
    form = replace(
        draw.form_of(options["initial_value"]), is_rounded=not draw.exact or options["aggregation"] == "MEAN"
    )
    if not fails:
        draw.variables[out] = {**options, "form": form}
    return {"options": options, "out": out}


def draw_write(draw: ProgramDraw) -> dict[str, Any] | None:
    if not draw.variables:
        return None
    name = draw.one_of(list(draw.variables))
    variable = draw.variables[name]
    form = variable["form"]
    is_sum = variable["aggregation"] == "SUM"
    is_on_read = variable["synchronization"] == "ON_READ"
    method = draw.one_of(["assign", "assign_add", "assign_sub"])
    if is_on_read and is_sum:
        method = method if draw.chance(0.1) else "assign"
        draw.variables[name]["form"] = replace(form, is_rounded=True)
    if draw.chance(0.03):
        shape = [*form.shapes[0], 2]
    else:
        shape = form.shapes[0]
    value: Any = draw.array(shape, form.dtype)
    if not form.rank and draw.chance(0.2):
        value = 2.0 if form.is_float else 2
    context = "default" if draw.chance(0.1) else "cross"
    return {"method": method, "variable": name, "value": value, "indices": None, "context": context, "exact": False}


def draw_read(draw: ProgramDraw) -> dict[str, Any] | None:
    if not draw.variables:
        return None
    name = draw.one_of(list(draw.variables))
    form = draw.variables[name]["form"]
    out = draw.name("r")
    draw.forms[out] = replace(form, is_plain=True)
    context = "default" if draw.chance(0.1) else "cross"
    return {"variable": name, "context": context, "exact": not form.is_rounded, "out": out}


def draw_state(draw: ProgramDraw) -> dict[str, Any]:
    return {"context": draw.one_of(["default", "cross"]), "exact": True}


def draw_update(draw: ProgramDraw) -> dict[str, Any] | None:
    names = [name for name, variable in draw.variables.items() if variable["synchronization"] != "ON_READ"]
    if not names:
        return None
    name = draw.one_of(names)
    form = draw.variables[name]["form"]
    return {"variable": name, "value": draw.array(form.shapes[0], form.dtype), "exact": False}


def draw_loss(draw: ProgramDraw) -> dict[str, Any]:
    value = draw.array(draw.small_shape(1), draw.one_of(FLOATS))
    return {"value": value, "weight": None, "size": 4, "context": draw.one_of(["cross", "default"]), "exact": False}


def draw_batch_size(draw: ProgramDraw) -> dict[str, Any]:
    if draw.chance(0.3):
        size = draw.integer(0, 40)
    else:
        size = draw.n_replicas * draw.integer(0, 9)
    return {"size": size, "exact": True}


def draw_element_spec(draw: ProgramDraw) -> dict[str, Any] | None:
    if draw.datasets:
        return {"value": draw.one_of(list(draw.datasets)), "exact": True}
    return None


def draw_iterate(draw: ProgramDraw) -> dict[str, Any] | None:
    if not draw.datasets:
        return None
    name = draw.one_of(list(draw.datasets))
    dataset = draw.datasets[name]
    draw.iterators = {
        key: dataset_name for key, dataset_name in draw.iterators.items() if dataset_name != name
    }  # a newer one ends them
    if dataset.is_endless or draw.chance(0.4):
        steps = draw.integer(1, 6)
    else:
        steps = None
    out = draw.name("r")
    element = dataset.element_after(steps)
    if element is not None:
        draw.forms[out] = element
    return {"value": name, "steps": steps, "out": out, "exact": True}


def draw_iter(draw: ProgramDraw) -> dict[str, Any] | None:
    free = [name for name in draw.datasets if name not in draw.iterators.values()]
    if not free:
        return None
    name = draw.one_of(free)
    out = draw.name("i")
    draw.iterators[out] = name
    return {"value": name, "out": out, "exact": True}


def draw_next(draw: ProgramDraw) -> dict[str, Any] | None:
    if not draw.iterators:
        first = draw_iter(draw)
        return first and {"call": "iter", **first}
    return {"value": draw.one_of(list(draw.iterators)), "optional": draw.chance(0.5), "exact": True}


STEPS = {
    "values": draw_values,
    "constant": draw_constant,
    "reduce": draw_reduce,
    "gather": draw_gather,
    "local_results": draw_local_results,
    "variable": draw_variable,
    "write": draw_write,
    "read": draw_read,
    "state": draw_state,
    "distribute": draw_distribute,
    "element_spec": draw_element_spec,
    "iterate": draw_iterate,
    "iter": draw_iter,
    "next": draw_next,
    "batch_size": draw_batch_size,
    "average_loss": draw_loss,
    "regularization_loss": draw_loss,
    "run": draw_run,
    "update": draw_update,
}
