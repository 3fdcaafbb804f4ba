"""The reductions: what each is called, in MPI, in numpy and in tf.distribute."""

import contextvars
import enum
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcdist.errors import CollectiveError, UsageError


class _Silence(threading.local):
    """A context for each thread in which numpy does not warn of infinity and NaN: in sums they are results, as in MPI.

    Attributes:
        run: function that calls a function, `run(function, *args)`, in 20 ns, where numpy.errstate takes 900. The
            called function must run no Python code.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(lambda: np.seterr(over="ignore", invalid="ignore"))
        self.run: Callable[..., Any] = context.run


#: Made once, as each thread's context takes longer to make than to use.
_silence = _Silence()


def combine(
    ufunc: Any,
    first: Any,
    second: Any,
    out: Any = None,
) -> Any:
    """Return ufunc(first, second, out), without warnings of infinity and NaN."""
    return _silence.run(ufunc, first, second, out=out)


def divide(array: Any, divisor: float) -> None:
    """Divide an array in place."""
    is_power_of_two = math.frexp(divisor)[0] == 0.5
    if is_power_of_two and array.dtype.kind == "f":
        # a product has the same bits, and takes a quarter of the time
        combine(np.multiply, array, 1 / divisor, array)
    else:
        combine(np.divide, array, divisor, array)


@dataclass(frozen=True)
class Op:
    """A reduction.

    Attributes:
        name: name that users write.
        code: a small number, equal on all ranks.
        mpi_name: name in mpi4py, such as "SUM".
        ufunc: numpy's function of two arrays and out.
        title: name of its all-reduce in the journal.
    """

    name: str
    code: int
    mpi_name: str
    ufunc: Any
    title: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", f"all_reduce {self.name}")


SUM = Op("sum", 0, "SUM", np.add)
MEAN = Op("mean", 1, "SUM", np.add)
OPS = {
    op.name: op
    for op in (
        SUM,
        MEAN,
        Op("min", 2, "MIN", np.minimum),
        Op("max", 3, "MAX", np.maximum),
        Op("product", 4, "PROD", np.multiply),
    )
}


def parse_op(op: Any) -> Op:
    """Return the reduction called `op`: its name in any case, or a ReduceOp.

    Raises:
        CollectiveError: for an unknown one.
    """
    reduction = OPS.get(op) if isinstance(op, str) else None
    if reduction is None:
        reduction = OPS.get(str(getattr(op, "value", op)).lower())
    if reduction is None:
        raise CollectiveError(
            f"all_reduce: expected an op of {', '.join(OPS)}, got {op!r}; name one of them."
        )
    return reduction


class ReduceOp(enum.Enum):
    """SUM or MEAN, as in tf.distribute."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, op: Any) -> "ReduceOp":
        """Return the ReduceOp for a member, or for its name in any case.

        Raises:
            UsageError: for anything else.
        """
        name = str(op.value if isinstance(op, cls) else op).upper()
        if name not in cls.__members__:
            raise UsageError(
                f"reduce: expected ReduceOp.SUM or ReduceOp.MEAN, got {op!r}; pass one of them."
            )
        return cls[name]
