"""Names of dtypes, the same for numpy, torch and cupy, none of which it imports; and the dtypes of sums."""

from typing import Any

#: Half precisions: 16 bits that MPI has no type for.
HALF = ("float16", "bfloat16")
#: The dtypes that gradients and statistics may have, with the dtype that each is summed in.
SUM_DTYPES = {
    "float32": "float32",
    "float64": "float64",
    "float16": "float32",
    "bfloat16": "float32",
}


def dtype_name(array: Any) -> str:
    """Return the name of an array's or tensor's dtype, such as "float32", without byte order; empty if it has none.

    >>> import numpy
    >>> dtype_name(numpy.zeros(3, "f4")), dtype_name("no array")
    ('float32', '')
    """
    dtype = getattr(array, "dtype", "")
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")
