"""ReduceOp: how values of several replicas become one."""

import enum
from typing import Any

from hpcdist.errors import UsageError


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
            raise UsageError(f"reduce: expected ReduceOp.SUM or ReduceOp.MEAN, got {op!r}; pass one of them.")
        return cls[name]
