"""What kinds of variables there are: when their copies are made one, and how."""

import enum
from typing import Any, TypeVar

from hpcdist.errors import UsageError


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are made one, as in tf.VariableSynchronization; AUTO is ON_WRITE."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How values of several replicas become one, as in tf.VariableAggregation."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


_Member = TypeVar("_Member", bound=enum.Enum)


def parse_member(kind: type[_Member], given: Any) -> _Member:
    """Return the member of an enumeration for itself or its name in any case.

    Raises:
        UsageError: for anything else.
    """
    name = str(given.value if isinstance(given, kind) else given).upper()
    if name not in kind.__members__:
        raise UsageError(
            f"Variable: expected a {kind.__name__} of {', '.join(kind.__members__)}, got {given!r}; pass one of them."
        )
    return kind[name]


def resolve_synchronization(given: Any) -> VariableSynchronization:
    """Return ON_WRITE for AUTO, and what is given otherwise."""
    synchronization = parse_member(VariableSynchronization, given)
    is_auto = synchronization is VariableSynchronization.AUTO
    return VariableSynchronization.ON_WRITE if is_auto else synchronization


def resolve_trainable(synchronization: VariableSynchronization, trainable: bool | None) -> bool:
    """Return whether a variable is trainable: by default unless its copies differ.

    Raises:
        UsageError: for a trainable ON_READ variable.
    """
    is_on_read = synchronization is VariableSynchronization.ON_READ
    if is_on_read and trainable:
        raise UsageError(
            "Variable: expected trainable=False with synchronization=ON_READ, whose copies differ between replicas, "
            "got trainable=True; use ON_WRITE for what is trained."
        )
    return not is_on_read if trainable is None else bool(trainable)
