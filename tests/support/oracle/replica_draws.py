"""Random step functions: what `run` calls on each replica, and what `merge_call` calls for all of them."""

from dataclasses import replace
from typing import Any

from draws import DTYPES
from forms import Form

WEIGHTS = {
    "constant": 1,
    "literal": 0.4,
    "scale": 3,
    "add": 2,
    "sum": 2,
    "replica_id": 1,
    "all_reduce": 5,
    "all_gather": 3,
    "read": 2,
    "write": 4,
    "average_loss": 2.5,
    "regularization_loss": 1,
    "merge": 1.5,
    "state": 0.4,
    "misplaced": 0.08,
}


class BodyDraw:
    """The registers of a step function while it is drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.forms: dict[str, Form | None] = {}
        self.touched: set[str] = set()
        self.n_names = 0

    def name(self) -> str:
        self.n_names += 1
        return f"x{900 + self.n_names}"

    def leaf(self, **wanted: bool) -> tuple[str, Form] | None:
        candidates = []
        for key, form in self.forms.items():
            if form is not None and all(getattr(form, trait) == is_so for trait, is_so in wanted.items()):
                candidates.append((key, form))
        if candidates:
            return self.draw.one_of(candidates)
        return None

    def keys_like(self, form: Form) -> list[str]:
        """Return the registers with the shapes and the dtype of a form."""
        keys = []
        for key, candidate_form in self.forms.items():
            if candidate_form and (candidate_form.shapes, candidate_form.dtype) == (form.shapes, form.dtype):
                keys.append(key)
        return keys

    def take(self, argument_forms: Any) -> None:
        """Name arguments as the interpreter does: by the order of their leaves."""
        for form in argument_forms:
            self.forms[f"x{len(self.forms)}"] = form


def draw_run(draw: Any) -> dict[str, Any] | None:
    if draw.chance(0.01):
        return {"args": 5, "kwargs": {}, "body": [], "returns": None, "out": None, "variables": [], "exact": True}
    body = BodyDraw(draw)
    args, kwargs = draw_arguments(draw, body, draw.leaves())
    steps = draw_steps(body, REPLICA_STEPS, WEIGHTS, draw.integer(1, 4))
    returns, forms = draw_returns(body)
    out = draw.name("r")
    draw.forms[out] = forms
    exact = not any(form is not None and form.is_rounded for form in body.forms.values())
    step = {"args": args, "kwargs": kwargs, "body": steps, "returns": returns, "out": out, "exact": exact}
    return {**step, "variables": sorted(body.touched)}


def draw_arguments(draw: Any, body: BodyDraw, leaves: dict[str, Form]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return references as args and kwargs, and give the body their forms in the order of the interpreter."""
    names = list(leaves)
    if names:
        chosen = [draw.one_of(names) for _ in range(draw.integer(1, 3))]
    else:
        chosen = []
    if chosen:
        how = draw.weighted({"flat": 60, "dict": 10, "list": 10, "kwargs": 15})
    else:
        how = "flat"
    body.take(leaves[name] for name in chosen)
    if how == "dict":
        return ({f"k{number}": name for number, name in enumerate(chosen)},), {}
    if how == "list":
        return (chosen,), {}
    if how == "kwargs":
        return tuple(chosen[:1]), {f"k{number}": name for number, name in enumerate(chosen[1:])}
    return tuple(chosen), {}


def draw_steps(body: BodyDraw, steps: dict[str, Any], weights: dict[str, float], n_steps: int) -> list[dict[str, Any]]:
    drawn_steps: list[dict[str, Any]] = []
    for _ in range(10 * n_steps):
        kind = body.draw.weighted(weights)
        step = steps[kind](body.draw, body)
        if step is not None:
            drawn_steps.append({"call": kind, **step})
        if len(drawn_steps) == n_steps:
            break
    return drawn_steps


def draw_returns(body: BodyDraw) -> tuple[Any, Any]:
    """Return a nest of references that a function returns, and the nest of their forms."""
    draw = body.draw
    names = [name for name, form in body.forms.items()]
    if not names or draw.chance(0.03):
        return None, ()
    last = names[-draw.integer(1, min(4, len(names))) :]
    how = draw.weighted({"one": 4, "tuple": 3, "dict": 3, "deep": 1})
    if how == "one":
        return last[-1], body.forms[last[-1]] or ()
    if how == "tuple":
        return tuple(last), tuple(body.forms[name] or () for name in last)
    nest = {f"{chr(97 + number)}": name for number, name in enumerate(reversed(last))}
    forms = {key: body.forms[name] or () for key, name in nest.items()}
    if how == "dict":
        return (nest, forms)
    return ([nest, None], [forms, ()])


def keep(body: BodyDraw, form: Form | None) -> str:
    name = body.name()
    body.forms[name] = form
    return name


# -- steps of a replica -----------------------------------------------------------------------------------------------


def draw_constant(draw: Any, body: BodyDraw) -> dict[str, Any]:
    value = draw.array(draw.small_shape(draw.integer(0, 2)), draw.one_of(DTYPES))
    return {"value": value, "out": keep(body, replace(draw.form_of(value), is_plain=False))}


def draw_literal(draw: Any, body: BodyDraw) -> dict[str, Any]:
    return {"value": draw.one_of([1.5, -2, None]), "out": keep(body, None)}


def draw_scale(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf()
    if leaf is None:
        return None
    value, form = leaf
    step = {"value": value, "by": draw.one_of([2, -1]), "by_replica": draw.chance(0.7)}
    return {**step, "out": keep(body, replace(form, is_plain=False))}


def draw_add(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf()
    if leaf is None:
        return None
    value, form = leaf
    summand_key = draw.one_of(body.keys_like(form))
    is_rounded = form.is_rounded or body.forms[summand_key].is_rounded  # type: ignore[union-attr]
    return {
        "value": value,
        "other": summand_key,
        "out": keep(body, replace(form, is_plain=False, is_rounded=is_rounded)),
    }


def draw_sum(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf()
    if leaf is None or leaf[1].rank == 0:
        return None
    value, form = leaf
    axis = draw.one_of([None, draw.integer(0, form.rank - 1)])
    return {"value": value, "axis": axis, "out": keep(body, replace(form.without(axis), is_plain=False))}


def draw_replica_id(draw: Any, body: BodyDraw) -> dict[str, Any]:
    return {"out": keep(body, Form(((),) * draw.n_replicas, "int64"))}


def draw_all_reduce(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    if draw.chance(0.05):
        leaf = body.leaf()
    else:
        leaf = body.leaf(is_even=True, is_plain=False)
    if leaf is None:
        return None
    value, form = leaf
    op = draw.reduce_op()
    is_mean = op.upper().endswith("MEAN")
    draw.one_device |= not form.is_even or form.is_empty
    if is_mean and not form.is_float and draw.chance(0.8):
        op = "SUM"
        is_mean = False
    reduced = replace(form, is_plain=False, is_rounded=form.is_rounded or is_mean)
    how = draw.weighted({"leaf": 60, "list": 12, "dict": 12})
    partner_keys = []
    for key, candidate_form in body.forms.items():
        if candidate_form and candidate_form.is_even and candidate_form.is_float and not candidate_form.is_plain:
            partner_keys.append(key)
    if how == "leaf" or not partner_keys or not form.is_float:
        fits = form.is_even and (form.is_float or not is_mean)
        if fits:
            register = reduced
        else:
            register = None
        return {"op": op, "value": value, "out": keep(body, register)}
    partner_key = draw.one_of(partner_keys)
    draw.one_device |= body.forms[partner_key].dtype != form.dtype or body.forms[partner_key].is_empty  # type: ignore[union-attr]
    nest: Any = [value, partner_key] if how == "list" else {"b": value, "a": partner_key}
    return {"op": op, "value": nest, "out": keep(body, None)}


def draw_all_gather(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    if draw.chance(0.04):
        leaf = body.leaf()
    else:
        leaf = body.leaf(is_plain=False)
    if leaf is None or (leaf[1].rank == 0 and draw.chance(0.9)):
        return None
    value, form = leaf
    if form.rank == 0 or not form.is_even:
        axis = 0
    else:
        axis = draw.integer(0, form.rank - 1)
    fits = form.rank > 0 and form.fits_along(axis)
    draw.one_device |= not fits or form.is_empty
    if fits:
        joined = replace(form.joined(axis), is_plain=False)
    else:
        joined = None
    return {"value": value, "axis": axis, "out": keep(body, joined)}


def draw_read(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    if not draw.variables:
        return None
    name = draw.one_of(list(draw.variables))
    body.touched.add(name)
    form = replace(draw.variables[name]["form"], is_plain=False)
    return {"variable": name, "context": "replica", "out": keep(body, form)}


def draw_write(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    if not draw.variables:
        return None
    name = draw.one_of(list(draw.variables))
    body.touched.add(name)
    variable = draw.variables[name]
    form = variable["form"]
    alike = [key for key in body.keys_like(form) if not body.forms[key].is_plain or draw.chance(0.05)]  # type: ignore[union-attr]
    if alike and draw.chance(0.85):
        value = draw.one_of(alike)
    else:
        value = draw.array(form.shapes[0], form.dtype)
    if isinstance(value, str):
        is_rounded = value in body.forms and body.forms[value].is_rounded
    else:
        is_rounded = False
    if is_rounded or variable["aggregation"] == "MEAN":
        variable["form"] = replace(form, is_rounded=True)
    method = draw.one_of(["assign", "assign_add", "assign_sub"])
    return {"method": method, "variable": name, "value": value, "indices": None, "context": "replica"}


def draw_average_loss(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf(is_float=True)
    if leaf is None or leaf[1].rank == 0:
        return None
    value, form = leaf
    weight = draw.weighted({None: 5, draw.one_of(body.keys_like(form)): 3, 0.5: 1})
    size = draw.weighted({None: 5, draw.integer(1, 40): 5, 0: 0.3, -3: 0.2})
    form = replace(form.without(None), is_plain=False, is_rounded=True)
    return {"value": value, "weight": weight, "size": size, "context": "replica", "out": keep(body, form)}


def draw_regularization_loss(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf(is_float=True)
    if leaf is None:
        return None
    form = replace(leaf[1].without(None), is_plain=False, is_rounded=True)
    return {"value": leaf[0], "context": "replica", "out": keep(body, form)}


def draw_state(draw: Any, body: BodyDraw) -> dict[str, Any]:
    return {"context": "replica", "out": keep(body, None)}


def draw_misplaced(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf()
    method = draw.one_of(["reduce", "gather", "scope", "local_results", "values", "run"])
    if leaf is None:
        return None
    return {"value": leaf[0], "method": method, "out": keep(body, None)}


# -- merge_call -------------------------------------------------------------------------------------------------------


def draw_merge(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaves = {name: form for name, form in body.forms.items() if form is not None}
    if not leaves:
        return None
    inner = BodyDraw(draw)
    inner.n_names = 50
    args, kwargs = draw_arguments(draw, inner, leaves)
    steps = draw_steps(inner, MERGE_STEPS, {"reduce": 3, "gather": 2, "write": 1, "read": 1}, draw.integer(1, 2))
    body.touched |= inner.touched
    returns, forms = draw_returns(inner)
    form = forms if isinstance(forms, Form) else None
    out = keep(body, form)
    return {"args": args, "kwargs": kwargs, "body": steps, "returns": returns, "out": out}


def merge_reduce(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf(is_plain=False)
    if leaf is None or not (leaf[1].is_even or leaf[1].rank):
        return None
    value, form = leaf
    op = draw.one_of(["SUM", "MEAN"]) if form.is_float else "SUM"
    if (form.is_even and draw.chance(0.6)) or not form.rank:
        axis = None
    else:
        axis = 0
    is_rounded = form.is_rounded or op == "MEAN"
    reduced = replace(form if axis is None else form.without(axis), is_plain=True, is_rounded=is_rounded)
    return {"op": op, "value": value, "axis": axis, "out": keep(body, reduced)}


def merge_gather(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    leaf = body.leaf(is_plain=False)
    if leaf is None or leaf[1].rank == 0 or not leaf[1].fits_along(0):
        return None
    draw.one_device |= leaf[1].is_empty
    return {"value": leaf[0], "axis": 0, "out": keep(body, replace(leaf[1].joined(0), is_plain=True))}


def merge_write(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    if not draw.variables:
        return None
    name = draw.one_of(list(draw.variables))
    body.touched.add(name)
    form = draw.variables[name]["form"]
    value = draw.array(form.shapes[0], form.dtype)
    draw.variables[name]["form"] = replace(form, is_rounded=True)
    return {"method": "assign", "variable": name, "value": value, "indices": None, "context": "merge"}


def merge_read(draw: Any, body: BodyDraw) -> dict[str, Any] | None:
    step = draw_read(draw, body)
    if step is not None:
        body.forms[step["out"]] = replace(body.forms[step["out"]], is_plain=True)  # type: ignore[type-var]
    return step


MERGE_STEPS = {"reduce": merge_reduce, "gather": merge_gather, "write": merge_write, "read": merge_read}
REPLICA_STEPS = {
    "constant": draw_constant,
    "literal": draw_literal,
    "scale": draw_scale,
    "add": draw_add,
    "sum": draw_sum,
    "replica_id": draw_replica_id,
    "all_reduce": draw_all_reduce,
    "all_gather": draw_all_gather,
    "read": draw_read,
    "write": draw_write,
    "average_loss": draw_average_loss,
    "regularization_loss": draw_regularization_loss,
    "merge": draw_merge,
    "state": draw_state,
    "misplaced": draw_misplaced,
}
