"""Names of dtypes are the same for numpy and torch."""

import numpy as np
import torch

from hpcdist.dtypes import HALF, SUM_DTYPES, dtype_name


def test_names_are_those_of_both_libraries():
    for name in SUM_DTYPES:
        assert dtype_name(torch.zeros(1, dtype=getattr(torch, name))) == name
    for name in ("float16", "float32", "float64", "int64", "bool"):
        assert dtype_name(np.zeros(1, name)) == dtype_name(torch.zeros(1, dtype=getattr(torch, name))) == name
    assert dtype_name(3) == dtype_name(None) == ""


def test_half_precisions_are_summed_in_single():
    assert {SUM_DTYPES[name] for name in HALF} == {"float32"}


def test_names_are_without_byte_order():
    assert dtype_name(np.zeros(1, ">f4")) == dtype_name(np.zeros(1, "<f4")) == "float32"
