import enum
import json
import math
import types
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple

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
    [
        None,
        True,
        3,
        2**70,
        0.1,
        -math.inf,
        "text",
        [],
        (),
        {},
        {"a": [1, (2, {"b": None})]},
        {0: "zero", "0": "text"},
        Counter({2: 2, 5: 1}),
        OrderedDict([("b", 1), ("a", OrderedDict())]),
        defaultdict(list, {"a": [1]}),
        defaultdict(None),
        deque([1, (2,)], maxlen=3),
        deque(),
        {3, "text", None, (1, 2)},
        frozenset({1.5}),
        np.float64(0.1),
        np.float32(0.1),
        np.int8(-3),
        np.bool_(True),
        np.uint64(2**64 - 1),
        np.complex64(1 - 2j),
        np.float16(-np.inf),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_were_with_their_types(value):
    restored, arrays = round_trip({"x": [value]})
    assert restored == {"x": [value]}
    assert type(restored["x"][0]) is type(value)
    assert arrays == []
    assert getattr(restored["x"][0], "maxlen", 0) == getattr(value, "maxlen", 0)
    assert getattr(restored["x"][0], "default_factory", 0) == getattr(value, "default_factory", 0)


def test_sets_are_written_in_one_order():
    words = [f"word {number}" for number in range(20)]
    assert encode(set(words), "x", refuse, []) == {"set": sorted(words)}


class Mode(enum.IntEnum):
    FIRST = 1


class Text(str):
    pass


class Settings(dict):
    pass


class Rows(list):
    pass


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Mode.FIRST, "Mode"),
        (Text("a"), "Text"),
        (Settings(a=1), "Settings"),
        (Rows([1]), "Rows"),
        (Pair(1, 2), "Pair"),
        (types.MappingProxyType({}), "mappingproxy"),
        (ChainMap(), "ChainMap"),
        (np.str_("a"), "str_"),
        (np.longdouble(1), "longdouble"),
        (defaultdict(lambda: 3), "defaultdict of .*lambda"),
    ],
)
def test_what_would_lose_its_type_is_refused_by_name(value, name):
    with pytest.raises(CheckpointError, match=f"save: expected .*{name}.* in 'x/a'"):
        encode({"a": value}, "x", refuse, [])


@pytest.mark.parametrize(
    "nest",
    [
        lambda inner: {"a": inner},
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: defaultdict(int, {"a": inner}),
        lambda inner: deque([inner]),
    ],
)
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
    state = {"w": np.float32([[1, np.nan], [-0.0, np.inf]]), "n": np.array(7), "e": np.zeros((0, 3), bool)}
    restored, arrays = round_trip(state)
    assert [array.name for array in arrays] == ["x/w", "x/n", "x/e"]
    for key, value in state.items():
        assert restored[key].dtype == value.dtype
        assert restored[key].shape == value.shape
        assert restored[key].tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", [">f8", ">i2", ">u4", ">f2", ">c16", "<f4", "=i8"])
def test_arrays_of_another_byte_order_come_back_with_their_values(dtype):
    value = np.arange(6).reshape(2, 3).astype(dtype)
    restored, arrays = round_trip({"w": value})
    assert (restored["w"] == value).all()
    assert restored["w"].shape == (2, 3)
    assert arrays[0].values.dtype == np.dtype(arrays[0].dtype), "the bytes are what the name says"


def test_arrays_of_our_byte_order_are_not_copied():
    value = np.arange(4.0)
    arrays = []
    encode(value, "x", refuse, arrays)
    assert arrays[0].values is value


@pytest.mark.parametrize(
    "value", [object(), {1.5: 0}, {None: 0}, {True: 0}, {"f": print}, np.array(["text"]), b"bytes"]
)
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
        {"Counter": [[1]]},
        {"defaultdict": [["", "eval"]]},
        {"defaultdict": []},
        {"defaultdict": [["", {"list": []}]]},
        {"set": [{"list": []}]},
        {"deque": ["x"]},
        {"deque": [-1]},
        {"deque": []},
        {"scalar": ["object", 1]},
        {"scalar": ["int8", 1000]},
        {"scalar": [["int8"], 1]},
        {"scalar": ["complex64", [1, 2, 3]]},
        {"scalar": 7},
        {"list": 7},
    ],
)
def test_refuses_what_it_did_not_write(node):
    with pytest.raises(CheckpointDamaged):
        decode(node, refuse, [])
