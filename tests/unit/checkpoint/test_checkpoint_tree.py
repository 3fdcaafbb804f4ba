import json
import math

import numpy as np
import pytest

from hpcdist.checkpoint.tree import MAX_DEPTH, decode, encode, is_too_deep
from hpcdist.errors import CheckpointDamaged, CheckpointError


def refuse(value):
    raise AssertionError("no tensors in these tests")


def round_trip(value):
    arrays = []
    text = json.dumps(encode(value, "x", refuse, arrays))
    return decode(json.loads(text), refuse, arrays), arrays


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2**70, 0.1, -math.inf, "text", [], (), {}, {"a": [1, (2, {"b": None})]}, {0: "zero", "0": "text"}],
)
def test_plain_values_come_back_as_they_were(value):
    found, arrays = round_trip(value)
    assert found == value
    assert type(found) is type(value)
    assert arrays == []


@pytest.mark.parametrize("nest", [lambda inner: {"a": inner}, lambda inner: [inner], lambda inner: (inner,)])
def test_nests_in_nests_come_back_up_to_a_depth(nest):
    value = 1
    for _ in range(MAX_DEPTH):
        value = nest(value)
    assert round_trip(value)[0] == value
    assert not is_too_deep({"state": {"objects": {"x": encode(value, "x", refuse, [])}}})
    with pytest.raises(CheckpointError, match=f"save: expected nesting of at most {MAX_DEPTH} levels, got more in 'x/"):
        encode(nest(value), "x", refuse, [])


def test_a_nest_in_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nesting"):
        encode(value, "x", refuse, [])


def test_arrays_come_back_with_dtype_shape_and_bits():
    state = {"w": np.float32([[1, np.nan], [-0.0, np.inf]]), "n": np.int64(7), "e": np.zeros((0, 3), bool)}
    found, arrays = round_trip(state)
    assert [array.name for array in arrays] == ["x/w", "x/n", "x/e"]
    for key, value in state.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert found[key].tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", [">f8", ">i2", ">u4", ">f2", ">c16", "<f4", "=i8"])
def test_arrays_of_another_byte_order_come_back_with_their_values(dtype):
    value = np.arange(6).reshape(2, 3).astype(dtype)
    found, arrays = round_trip({"w": value})
    assert (found["w"] == value).all()
    assert found["w"].shape == (2, 3)
    assert arrays[0].values.dtype == np.dtype(arrays[0].dtype), "the bytes are what the name says"


def test_arrays_of_our_byte_order_are_not_copied():
    value, arrays = np.arange(4.0), []
    encode(value, "x", refuse, arrays)
    assert arrays[0].values is value


@pytest.mark.parametrize("value", [object(), {1.5: 0}, {None: 0}, [set()], {"f": print}, np.array(["text"]), b"bytes"])
def test_refuses_what_is_no_data(value):
    with pytest.raises(CheckpointError, match="save: expected"):
        encode(value, "x", refuse, [])


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"pickle": "x"},
        {"array": 0},
        {"array": -1},
        {"list": [{"array": "x"}]},
        {"a": 1, "b": 2},
        {"dict": 7},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"list": 7},
    ],
)
def test_refuses_what_it_did_not_write(node):
    with pytest.raises(CheckpointDamaged):
        decode(node, refuse, [])
