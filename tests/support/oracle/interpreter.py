"""Runs programs with a library, TensorFlow or hpcdist, whose calls have the same names; program.py lists the steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

from cases import Error
from program import CHANGING, is_reference, leaves_of, map_leaves, references


class Interpreter:
    """One program on its way: its registers, and the library that runs it.

    Args:
        library: what differs between TensorFlow and hpcdist; see library_tensorflow.py.
        program: what is run.
    """

    def __init__(self, library: Any, program: dict[str, Any]) -> None:
        self.library = library
        self.program = program
        self.strategy = library.strategy
        self.registers: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}

    def answers(self) -> Iterator[dict[str, Any] | None]:
        """Yield the answer of each step, as it is asked for."""
        for step in self.program["steps"]:
            yield self._answer(step) if all(name in self.registers for name in references(step)) else None

    def _answer(self, step: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"result": None, "error": None, "copies": None}
        try:
            value = self.step(step, self.registers)
            answer["result"] = self.library.recorded(value)
        except Exception as error:
            answer["error"] = Error(type(error).__name__, self.library.message(error))
            answer["raised"] = error
        else:
            if step.get("out"):
                self.keep(step, value)
        if step["call"] in CHANGING:
            answer["copies"] = {name: self.library.copies(variable) for name, variable in self.variables.items()}
        return answer

    def keep(self, step: dict[str, Any], value: Any) -> None:
        if step["call"] == "iterate":
            if not value:
                return
            value = value[-1]
        if step["call"] == "variable":
            self.variables[step["out"]] = value
        self.registers[step["out"]] = value

    def step(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return getattr(self, f"do_{step['call']}")(step, registers)

    def resolve(self, nest: Any, registers: dict[str, Any]) -> Any:
        """Return a nest with values in place of references, and tensors in place of arrays."""

        def value_of(leaf: Any) -> Any:
            if not is_reference(leaf):
                return self.library.tensor(leaf)
            name, *path = leaf.split(".")
            if name in registers:
                value = registers[name]
            else:
                value = self.registers[name]
            for key in path:
                value = value[int(key) if isinstance(value, (list, tuple)) else key]
            return value

        return map_leaves(value_of, nest)

    # -- cross-replica context -------------------------------------------------------------------------------------

    def do_values(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.values(step["value"])

    def do_constant(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.tensor(step["value"])

    def do_reduce(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.reduce(step["op"], self.resolve(step["value"], registers), step["axis"])

    def do_gather(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.strategy.gather(self.resolve(step["value"], registers), axis=step["axis"])

    def do_local_results(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.local_results(self.resolve(step["value"], registers))

    def do_variable(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        with self.strategy.scope():
            return self.library.variable(**step["options"])

    def do_write(self, step: dict[str, Any], registers: dict[str, Any]) -> None:
        variable = self.resolve(step["variable"], registers)
        value = self.resolve(step["value"], registers)
        if step["indices"] is not None:
            value = self.library.slices(value, step["indices"])
        with self._context(step):
            getattr(variable, step["method"])(value)

    def do_read(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        with self._context(step):
            return self.resolve(step["variable"], registers).read_value()

    def do_update(self, step: dict[str, Any], registers: dict[str, Any]) -> None:
        value = self.resolve(step["value"], registers)

        with self.strategy.scope():
            self.strategy.extended.update(
                self.resolve(step["variable"], registers), self.library.add_to, args=(value,), group=False
            )

    def do_state(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        with self._context(step):
            context = self.library.replica_context()
            return {
                "n": self.strategy.num_replicas_in_sync,
                "has_strategy": self.library.has_strategy(),
                "is_cross": self.library.in_cross_replica_context(),
                "replica": None if context is None else int(context.replica_id_in_sync_group),
            }

    def do_average_loss(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        value, weight, size = (self.resolve(step[name], registers) for name in ("value", "weight", "size"))
        with self._context(step):
            return self.library.average_loss(value, sample_weight=weight, global_batch_size=size)

    def do_regularization_loss(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        value = self.resolve(step["value"], registers)
        with self._context(step):
            return self.library.regularization_loss(value)

    def _context(self, step: dict[str, Any]) -> Any:
        if step.get("context") == "cross":
            return self.strategy.scope()
        return contextlib.nullcontext()

    # -- datasets --------------------------------------------------------------------------------------------------

    def do_distribute(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        if step["as_function"] is None:
            return self.strategy.experimental_distribute_dataset(self.library.dataset(step, None))
        is_default = step["as_function"] == "PER_WORKER"
        if is_default:
            options = None
        else:
            options = self.library.input_options(step["as_function"])
        return self.strategy.distribute_datasets_from_function(
            lambda context: self.library.dataset(step, context), options
        )

    def do_batch_size(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.per_replica_batch_size(step["size"])

    def do_element_spec(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.spec(self.resolve(step["value"], registers).element_spec)

    def do_iter(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return iter(self.resolve(step["value"], registers))

    def do_next(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        iterator = self.resolve(step["value"], registers)
        if not step["optional"]:
            return next(iterator)
        element = iterator.get_next_as_optional()
        if bool(element.has_value()):
            return element.get_value()
        return None

    def do_iterate(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        elements: list[Any] = []
        for element in self.resolve(step["value"], registers):
            elements.append(element)
            if len(elements) == step["steps"]:
                break
        return elements

    # -- replica context -------------------------------------------------------------------------------------------

    def do_run(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        args, kwargs = (self.resolve(step[name], registers) for name in ("args", "kwargs"))
        return self.strategy.run(self._function(step, "replica"), args=args, kwargs=kwargs)

    def _function(self, step: dict[str, Any], kind: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            if kind == "merge":
                arguments = (args[1:], kwargs)
            else:
                arguments = (args, kwargs)
            local_registers = {f"x{number}": leaf for number, leaf in enumerate(leaves_of(arguments))}
            for inner_step in step["body"]:
                if kind == "replica":
                    value = getattr(self, f"in_{inner_step['call']}")(inner_step, local_registers)
                else:
                    value = self.step(inner_step, local_registers)
                if inner_step.get("out"):
                    local_registers[inner_step["out"]] = value
            return self.resolve(step["returns"], local_registers)

        return self.library.plain_function(function)

    def in_constant(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.tensor(step["value"])

    def in_literal(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return step["value"]

    def in_scale(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        value = self.resolve(step["value"], registers)
        factor = step["by"]
        if step["by_replica"]:
            factor = factor * (int(self.library.replica_context().replica_id_in_sync_group) + 1)
        return value * factor

    def in_add(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.resolve(step["value"], registers) + self.resolve(step["other"], registers)

    def in_sum(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.sum(self.resolve(step["value"], registers), step["axis"])

    def in_replica_id(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.number(int(self.library.replica_context().replica_id_in_sync_group))

    def in_all_reduce(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        value = self.resolve(step["value"], registers)
        return self.library.replica_context().all_reduce(self.library.reduce_op(step["op"]), value)

    def in_all_gather(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.library.replica_context().all_gather(self.resolve(step["value"], registers), axis=step["axis"])

    def in_merge(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        args, kwargs = (self.resolve(step[name], registers) for name in ("args", "kwargs"))
        return self.library.replica_context().merge_call(self._function(step, "merge"), args=args, kwargs=kwargs)

    def in_state(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        return self.do_state(step, registers)

    def in_misplaced(self, step: dict[str, Any], registers: dict[str, Any]) -> Any:
        value = self.resolve(step["value"], registers)
        if step["method"] == "reduce":
            return self.strategy.reduce("SUM", value, axis=None)
        if step["method"] == "gather":
            return self.strategy.gather(value, axis=0)
        if step["method"] == "scope":
            with self.strategy.scope():
                return value
        if step["method"] == "local_results":
            return self.strategy.experimental_local_results(value)
        if step["method"] == "values":
            return self.strategy.experimental_distribute_values_from_function(lambda _: value)
        return self.strategy.run(self.library.plain_function(lambda: value))

    def in_write(self, step: dict[str, Any], registers: dict[str, Any]) -> None:
        """Write a value; a plain one times the number of the replica, from 1, so that replicas write different ones."""
        value = self.resolve(step["value"], registers)
        if not is_reference(step["value"]):
            value = value * (int(self.library.replica_context().replica_id_in_sync_group) + 1)
        getattr(self.resolve(step["variable"], registers), step["method"])(value)

    in_read = do_read
    in_average_loss = do_average_loss
    in_regularization_loss = do_regularization_loss
