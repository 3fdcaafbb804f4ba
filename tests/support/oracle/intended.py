"""Where hpcdist means to differ from TensorFlow: a reason, and a predicate as narrow as it can be, for each."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from cases import PerReplica
from program import is_reference, leaves_of


class Meeting(NamedTuple):
    """A difference that was met.

    Attributes:
        step: of the program. program: all of it.
        found, expected: hpcdist's answer and TensorFlow's; see program.py.
        text: how they differ. own: the replicas of this rank.
    """

    step: dict[str, Any]
    program: dict[str, Any]
    found: Any
    expected: Any
    text: str
    own: range

    @property
    def error(self) -> str:
        """The message of hpcdist's error."""
        if self.found and self.found["error"]:
            return self.found["error"].message
        return ""

    @property
    def tensorflow_error(self) -> str:
        """The class and message of TensorFlow's error."""
        error = self.expected["error"] if self.expected else None
        if error:
            return f"{error.type}: {error.message}"
        return ""

    def calls(self, *names: str) -> list[dict[str, Any]]:
        """Return the steps of these kinds: this one, or those inside it."""
        return [step for step in steps_within(self.step) if step["call"] in names]

    def options_of(self, step: dict[str, Any]) -> dict[str, Any]:
        """Return how the variable of a step was made."""
        creating_steps = []
        for candidate in self.program["steps"]:
            if candidate.get("out") == step["variable"]:
                creating_steps.append(candidate)
        return creating_steps[0]["options"]

    def writes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each write of the step with the options of its variable."""
        return [(call, self.options_of(call)) for call in self.calls("write", "update")]


def steps_within(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for inner in step.get("body", ()):
        yield from steps_within(inner)


def is_plain(meeting: Meeting, name: str) -> bool:
    """Return whether a reference of the main program is one value for all replicas in TensorFlow's answers."""
    register, *path = name.split(".")
    for step, answer in zip(meeting.program["steps"], meeting.program["answer"], strict=True):
        if step.get("out") == register and answer is not None:
            if step["call"] == "iterate":
                value = answer["result"][-1]
            else:
                value = answer["result"]
            for key in path:
                value = value[int(key) if isinstance(value, (list, tuple)) else key]
            return isinstance(value, np.ndarray)
    return False


def contributes_one_object(meeting: Meeting) -> bool:
    """Return whether replicas contribute an argument of `run` that is one value for all of them."""
    if meeting.step["call"] != "run" or meeting.program["n_replicas"] == 1:
        return False
    if meeting.error and not meeting.error.startswith("gather: expected values with at least one dimension"):
        return False
    argument_leaves = leaves_of((meeting.step["args"], meeting.step["kwargs"]))
    plain = set()
    for number, name in enumerate(argument_leaves):
        if is_reference(name) and is_plain(meeting, name):
            plain.add(f"x{number}")
    contributing = meeting.calls("all_reduce", "all_gather", "merge")
    contributing += [
        write
        for write, options in meeting.writes()
        if write["call"] == "write" and options["synchronization"] != "ON_READ"
    ]
    merged = {call["out"] for call in meeting.calls("merge")}  # may be one value for all of them
    used = []
    for contribution in contributing:
        used.append(leaves_of([contribution.get("value"), contribution.get("args"), contribution.get("kwargs")]))
    used_names = set()
    for leaf in itertools.chain.from_iterable(used):
        if isinstance(leaf, str):
            used_names.add(leaf)
    return bool((plain | merged) & used_names)


def reads_one_value_alone(meeting: Meeting) -> bool:
    """Return whether one value for all replicas is reduced or gathered, and this rank holds one replica."""
    if meeting.step["call"] not in ("reduce", "gather") or meeting.program["n_replicas"] == 1:
        return False
    return len(meeting.own) == 1 and is_plain(meeting, str(meeting.step["value"]))


def gathers_one_value(meeting: Meeting) -> bool:
    is_refused = "expected a PerReplica value of this rank's" in meeting.error
    return meeting.step["call"] == "gather" and is_refused and is_plain(meeting, str(meeting.step["value"]))


def has_mean_of_whole_numbers(meeting: Meeting) -> bool:
    means = []
    for call in meeting.calls("reduce", "all_reduce"):
        if call["op"].upper().endswith("MEAN"):
            means.append(call)
    return bool(means) and "dtype: float64" in meeting.text and "TensorFlow: int" in meeting.text


def is_mean_of_nothing(meeting: Meeting) -> bool:
    means = []
    for call in meeting.calls("reduce"):
        if call["op"].upper().endswith("MEAN") and call["axis"] is not None:
            means.append(call)
    return bool(means) and meeting.expected is not None and has_nan(meeting.expected["result"])


def has_nan(nest: Any) -> bool:
    leaves = leaves_of(nest.values if isinstance(nest, PerReplica) else nest)
    return any(
        has_nan(leaf) if isinstance(leaf, PerReplica) else isinstance(leaf, np.ndarray) and bool(np.isnan(leaf).any())
        for leaf in leaves
    )


def is_gather_on_one_device(meeting: Meeting) -> bool:
    is_alone = meeting.program["n_replicas"] == 1 and meeting.program["one_device"]
    return is_alone and bool(meeting.calls("gather", "all_gather")) and meeting.error.startswith(("gather", "reduce"))


def writes_without_aggregation(meeting: Meeting) -> bool:
    """Return whether a variable without aggregation is written where the two libraries disagree."""

    def is_one(step: dict[str, Any], options: dict[str, Any]) -> bool:
        is_on_read = options["synchronization"] == "ON_READ"
        return options["aggregation"] == "NONE" and (step.get("context") == "replica") != is_on_read

    return any(is_one(*write) for write in meeting.writes())


def policy_of(meeting: Meeting) -> str | None:
    """Return the auto-shard policy of the dataset that a step looks at."""
    if meeting.step["call"] not in ("element_spec", "next", "iterate"):
        return None
    steps_by_output = {step["out"]: step for step in meeting.program["steps"] if step.get("out")}
    producing_step = steps_by_output[meeting.step["value"]]
    return (steps_by_output[producing_step["value"]] if producing_step["call"] == "iter" else producing_step)["policy"]


def is_optional_of_whole_parts(meeting: Meeting) -> bool:
    """Return whether an optional element is taken from datasets of a function that drop what fills no part."""
    if meeting.step["call"] != "next" or not meeting.step["optional"]:
        return False
    steps_by_output = {step["out"]: step for step in meeting.program["steps"] if step.get("out")}
    dataset_step = steps_by_output[steps_by_output[meeting.step["value"]]["value"]]
    return bool(dataset_step["as_function"]) and any(stage[-1] is True for stage in dataset_step["stages"])


def is_variable_returned(meeting: Meeting) -> bool:
    return meeting.expected is not None and meeting.expected["error"] is None and meeting.expected["result"] is None


def divides_whole_numbers(meeting: Meeting) -> bool:
    """Return whether the total of an ON_READ variable of whole numbers is assigned outside of replicas."""

    def is_one(step: dict[str, Any], options: dict[str, Any]) -> bool:
        is_sum = (options["synchronization"], options["aggregation"]) == ("ON_READ", "SUM")
        return is_sum and step.get("context") != "replica" and options["initial_value"].dtype.kind == "i"

    return any(is_one(*write) for write in meeting.writes())


INTENDED: dict[str, tuple[str, Callable[[Meeting], bool]]] = {
    "mean of whole numbers": ("a mean of whole numbers is a float; TensorFlow truncates it", has_mean_of_whole_numbers),
    "mean of nothing": (
        "the mean over no elements is 0, not NaN, so that an empty part harms no sum",
        is_mean_of_nothing,
    ),
    "one object": (
        "what replicas contribute counts once for each of them; TensorFlow looks at the identity of the object, and"
        " counts one that all replicas of a worker share once for each worker",
        contributes_one_object,
    ),
    "one value on a rank with one replica": (
        "where a rank holds one replica, a plain value is that replica's, as without num_replicas",
        reads_one_value_alone,
    ),
    "gather of one value": (
        "refused, as it is not known whose value it is; TensorFlow returns it as it is on one worker",
        gathers_one_value,
    ),
    "values made inside a replica": (
        "experimental_distribute_values_from_function is refused inside run; TensorFlow makes all replicas' values",
        lambda meeting: (
            any(call["method"] == "values" for call in meeting.calls("misplaced"))
            and meeting.error.startswith("experimental_distribute_values_from_function: expected cross-replica context")
        ),
    ),
    "an axis named twice": (
        "refused for every value; TensorFlow overlooks it where there is one replica or no element",
        lambda meeting: (
            meeting.step["call"] == "reduce" and meeting.error.startswith("reduce: expected each axis once")
        ),
    ),
    "gather on one device": (
        "gather checks axis and rank on any number of replicas; ReductionToOneDevice does not with a single one",
        is_gather_on_one_device,
    ),
    "trainable ON_READ": (
        "refused, as the documentation of tf.Variable says; tf.Variable accepts it",
        lambda meeting: (
            meeting.step["call"] == "variable"
            and meeting.step["options"]["synchronization"] == "ON_READ"
            and bool(meeting.step["options"]["trainable"])
        ),
    ),
    "MEAN of a variable of whole numbers": (
        "refused where the variable is made, as its mean would lose digits",
        lambda meeting: (
            meeting.step["call"] == "variable"
            and meeting.step["options"]["aggregation"] == "MEAN"
            and meeting.step["options"]["initial_value"].dtype.kind == "i"
        ),
    ),
    "writes without aggregation": (
        "replicas may not let copies of a mirrored variable drift apart; a copy per replica may be set from outside",
        writes_without_aggregation,
    ),
    "total of whole numbers": (
        "the parts of a total of whole numbers add up to it, where TensorFlow drops the rest",
        divides_whole_numbers,
    ),
    "losses outside of replicas": (
        "the loss helpers also work in scopes and in bare loops, where TensorFlow refuses, or takes one replica",
        lambda meeting: meeting.step["call"] in ("average_loss", "regularization_loss"),
    ),
    "after an error": (
        "what replicas wrote before an error in run: those of one process stop at the first error, other ranks' do not",
        lambda meeting: (
            meeting.step["call"] == "run"
            and bool(meeting.error and meeting.tensorflow_error)
            and meeting.text.startswith("copies of")
        ),
    ),
    "reduce of a mirrored variable": (
        "a mirrored variable is every replica's value; TensorFlow's collectives fail an assertion without a message,"
        " and on one device the variable itself is returned",
        lambda meeting: (
            meeting.step["call"] == "reduce"
            and str(meeting.step["value"])[0] == "v"
            and (meeting.tensorflow_error == "AssertionError: " or is_variable_returned(meeting))
        ),
    ),
    "adding to a copy outside of run": (
        "without num_replicas a loop outside of run is the code of the rank's replica, which adds to its own copy",
        lambda meeting: (
            len(meeting.own) == 1
            and not meeting.error
            and "SyncOnReadVariable does not support" in meeting.tensorflow_error
        ),
    ),
    "optional elements of whole parts": (
        "with drop_remainder a pass ends with the first replica that is out of data, in any iteration; TensorFlow's"
        " optional elements go on with empty parts",
        is_optional_of_whole_parts,
    ),
    "a pass of nothing": (
        "a pass that ends before its first step, though some replica has a whole part, is refused; TensorFlow reads"
        " nothing without a word",
        lambda meeting: "so that nothing would be read" in str(meeting.error) and not meeting.tensorflow_error,
    ),
    "OFF": (
        "with OFF every replica is an input pipeline that reads all rows; here TensorFlow has one pipeline",
        lambda meeting: meeting.program["n_replicas"] > 1 and policy_of(meeting) == "OFF",
    ),
}


def reason_of(meeting: Meeting) -> str | None:
    """Return the name of the listed difference that this is; None when it is none."""
    return next((name for name, (_, is_it) in INTENDED.items() if is_it(meeting)), None)
