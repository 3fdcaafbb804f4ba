"""Arithmetic of sums: division, which must have the bits of a division."""

import numpy as np
import pytest

from hpcdist.collectives.ops import divide

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.0, 1e-42, 3e38]


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 64.0, 96.0, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_division_has_the_bits_of_a_division(dtype, divisor):
    random = np.random.default_rng(0)
    values = np.concatenate([random.standard_normal(1000), SPECIAL]).astype(dtype)
    if values.dtype.kind == "c":
        values.imag = np.resize(SPECIAL, len(values))
    with np.errstate(all="ignore"):
        expected = values / np.asarray(divisor, values.real.dtype)
    divide(values, divisor)
    assert values.tobytes() == expected.tobytes()
