"""What tells functions and data from others: the same in every process, and no two values have one."""

import collections
import dataclasses
import enum
import functools
import logging
import operator
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcdist.data.dataset import Dataset
from hpcdist.data.identity import digest_of
from hpcdist.errors import DataError


def compiled(source, name="f", **names):
    """Return what a piece of source calls `name`, as an edited file would."""
    exec(source, names)
    return names[name]


def with_element(number):
    array = np.arange(2000.0)
    array[1000] = number
    return array


def closing_over(held):
    return lambda x: (x, held)


class F:
    def __init__(self, held):
        self.held = held

    def __call__(self, x):
        return x * self.held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


@dataclasses.dataclass
class Data:
    held: object = 1


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Pair = collections.namedtuple("Pair", "a b")


class Module(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.layer.weight, held)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return self.layer(x)


def looped(held):
    found = [held]
    found.append(found)
    return found


def with_object_in(kind, **parts):
    return type(kind, (), parts)()


#: Pairs of values that are not to be taken for each other.
OTHERS = {
    "closures over long arrays": (closing_over(with_element(1)), closing_over(with_element(2))),
    "closures over near tensors": (closing_over(torch.tensor(0.12341)), closing_over(torch.tensor(0.12344))),
    "near numpy numbers": (np.array(1.00000000001), np.array(1.00000000002)),
    "numbers one by one": (list(range(2000)), [*range(1000), 0, *range(1001, 2000)]),
    "callable objects": (F(1), F(2)),
    "objects with slots": (Slotted(1), Slotted(2)),
    "data classes": (Data(1), Data(2)),
    "members of an enum": (Color.RED, Color.BLUE),
    "modules": (Module(1), Module(2)),
    "named tuples": (Pair(1, 2), (1, 2)),
    "methods": (F(1).__call__, F(2).__call__),
    "tensor datasets": (TensorDataset(torch.zeros(2)), TensorDataset(torch.ones(2))),
    "dtypes": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "dtypes of torch": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "tensors and arrays": (torch.zeros(2), np.zeros(2, np.float32)),
    "empty tensors": (torch.zeros(0, 2), torch.zeros(2, 0)),
    "half precision": (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.01, dtype=torch.bfloat16)),
    "complex numbers": (torch.tensor(1 + 1j), torch.tensor(1 + 1j).conj()),
    "arrays of objects": (np.array(["a", None], object), np.array(["b", None], object)),
    "dates": (np.array(["2026-11-21"], "M8[D]"), np.array(["2026-11-22"], "M8[D]")),
    "types of numbers": (1, True),
    "negative zero": (0.0, -0.0),
    "where parts end": (["ab", "c"], ["a", "bc"]),
    "depth": ([1, [2]], [[1], 2]),
    "loops": (looped(1), looped(2)),
    "partial": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "builtins": (len, sum),
    "ufuncs": (np.sin, np.cos),
    "torch functions": (torch.sin, torch.cos),
    "operators": (operator.itemgetter(1), operator.itemgetter(2)),
    "random numbers": (np.random.default_rng(1), np.random.default_rng(2)),
    "default dicts": (collections.defaultdict(list, a=1), collections.defaultdict(list, a=2)),
    "bodies": (compiled("def f(x): return x + 1"), compiled("def f(x): return x + 2")),
    "operations": (compiled("def f(x): return x + 1"), compiled("def f(x): return x - 1")),
    "names of attributes": (compiled("def f(x): return x.a"), compiled("def f(x): return x.b")),
    "inner functions": (
        compiled("def f(x): return (lambda y: y + 1)(x)"),
        compiled("def f(x): return (lambda y: y + 2)(x)"),
    ),
    "defaults": (compiled("def f(x, n=1): return n"), compiled("def f(x, n=2): return n")),
    "keyword defaults": (compiled("def f(x, *, n=1): return n"), compiled("def f(x, *, n=2): return n")),
    "order of arguments": (compiled("def f(a, b): return a - b"), compiled("def f(b, a): return b - a")),
    "globals": (compiled("def f(x): return x * n", n=[1]), compiled("def f(x): return x * n", n=[2])),
    "globals of inner functions": (
        compiled("def f(x): return [x * n for _ in x]", n=1),
        compiled("def f(x): return [x * n for _ in x]", n=2),
    ),
    "functions that are called": (
        compiled("def g(x): return 1\ndef f(x): return g(x)"),
        compiled("def g(x): return 2\ndef f(x): return g(x)"),
    ),
    "methods of classes": (
        compiled("class C:\n  def __call__(self, x): return 1\nf = C()"),
        compiled("class C:\n  def __call__(self, x): return 2\nf = C()"),
    ),
    "properties": (
        compiled("class C:\n  @property\n  def x(self): return 1\nf = C()"),
        compiled("class C:\n  @property\n  def x(self): return 2\nf = C()"),
    ),
    "bases": (
        compiled("class B:\n  def x(self): return 1\nclass C(B): pass\nf = C()"),
        compiled("class B:\n  def x(self): return 2\nclass C(B): pass\nf = C()"),
    ),
    "attributes of classes": (with_object_in("C", n=1), with_object_in("C", n=2)),
    "functions with a wrapped one": (
        compiled("import functools\n@functools.wraps(len)\ndef f(x): return 1"),
        compiled("import functools\n@functools.wraps(len)\ndef f(x): return 2"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_have_other_digests(name):
    one, other = OTHERS[name]
    assert digest_of(one) != digest_of(other)
    assert digest_of(one) == digest_of(one)
    assert digest_of(other) == digest_of(other)


ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_later_process_finds_the_same(tmp_path):
    code = "import sys; sys.path.insert(0, {!r}); import test_identity as t; print(t.digests())"
    call = [sys.executable, "-c", code.format(str(Path(__file__).parent))]
    # with other hashes of text: sets come in another order
    found = subprocess.run(call, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "1", **ENVIRONMENT})
    assert found.stdout.strip() == str(digests())


def digests():
    names = {"alpha", "beta", "gamma", "delta"}
    return [digest_of(value) for pair in OTHERS.values() for value in pair] + [digest_of([names, frozenset(names)])]


def test_equal_values_have_one_digest():
    assert digest_of(np.arange(6).reshape(2, 3)) == digest_of(np.array([[0, 3], [1, 4], [2, 5]]).T)
    assert digest_of(np.arange(10)[::2]) == digest_of(np.arange(10)[::2].copy())
    assert digest_of(torch.arange(10)[::2]) == digest_of(torch.arange(10)[::2].clone())
    shared = np.ones(2)
    assert digest_of([shared, shared]) == digest_of([np.ones(2), np.ones(2)])


def test_a_module_of_ones_own_is_looked_into(monkeypatch):
    def with_number(number):
        module = type(sys)("helpers")
        exec(f"import math\ndef g(x): return {number}\ndef h(x): return {number}", vars(module))
        monkeypatch.setitem(sys.modules, "helpers", module)
        return [digest_of(compiled(f"def f(x): return {used}", m=module)) for used in ("m.g(x)", "m.math.e")]

    one, other = with_number(1), with_number(2)
    assert one[0] != other[0]
    assert one[1] == other[1]


def test_what_is_used_by_name_is_taken():
    assert digest_of(logging.getLogger("a")) != digest_of(logging.getLogger("b"))
    assert digest_of(torch.nn.functional.relu) == digest_of(torch.nn.functional.relu)
    assert digest_of(np.float32) != digest_of(torch.float32)
    digest_of(compiled("import hpcdist\ndef f(x): return hpcdist.Dataset"))  # which holds what cannot be told


@functools.lru_cache
def remembered(x):
    return x


def test_a_wrapped_function_is_looked_into(monkeypatch):
    before = digest_of(remembered)
    monkeypatch.setattr(remembered, "__wrapped__", lambda x: x + 1)
    assert digest_of(remembered) != before


def deep():
    found = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: open(__file__),
        threading.Lock,
        lambda: (x for x in range(3)),
        lambda: torch.zeros(2).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        lambda: np.frompyfunc(lambda x: x, 1, 1),
        lambda: np.zeros(2, [("a", object)]),
        lambda: F(threading.Lock()),
        deep,
    ],
)
def test_what_cannot_be_told_from_others_is_refused(make):
    value = make()
    with pytest.raises(DataError, match=r"^cache: expected functions and data .*; leave the filename out[^\n]*$"):
        digest_of(value)
    if hasattr(value, "close"):
        value.close()


def first_rows(dataset):
    return [np.asarray(row).tolist() for row in dataset]


def generated(numbers):
    return iter(numbers)


def times(function):
    return Dataset.from_tensor_slices(np.arange(3.0)).map(function)


def picking(array):
    return lambda x: x * array[1000]


def adding(tensor):
    return lambda x: x + tensor.item()


def rows_in_the_middle(number):
    return Dataset.from_tensor_slices(with_element(number)[:1100])


PAIRS = [
    [times(picking(with_element(number))) for number in (1, 2)],
    [times(adding(torch.tensor(number))) for number in (0.12341, 0.12344)],
    [Dataset.from_generator(generated, args=(with_element(number).tolist(),)) for number in (1, 2)],
    [Dataset.from_generator(generated, args=(with_element(number),)) for number in (1, 2)],
    [times(F(number)) for number in (1, 2)],
    [Dataset.from_torch(TensorDataset(make(2))).map(torch.clone) for make in (torch.zeros, torch.ones)],
    [Dataset.from_torch([1, 2]), Dataset.from_torch([1, 3])],
    [Dataset.from_torch(DataLoader([1, 2], batch_size=None, collate_fn=None)), Dataset.from_torch([1, 3])],
    [times(compiled(f"def f(x): return (lambda y: y + {number})(x)")) for number in (1, 2)],
    [Dataset.from_generator(compiled(f"def f(): yield {number}")) for number in (1, 2)],
    [rows_in_the_middle(number) for number in (1, 2)],
]


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_no_rows_of_another_dataset_are_handed_out(index, tmp_path):
    one, other = PAIRS[index]
    expected = first_rows(one), first_rows(other)
    assert expected[0] != expected[1]
    assert [first_rows(dataset.cache(tmp_path / "c")) for dataset in (one, other)] == list(expected)
    assert [first_rows(dataset.cache(tmp_path / "c")) for dataset in (one, other)] == list(expected)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    for number in range(2):
        with h5py.File(tmp_path / "new.h5", "w") as file:
            file["x"] = np.arange(3) + 10 * number
        (tmp_path / "new.h5").replace(tmp_path / "x.h5")
        rows = Dataset.from_hdf5(tmp_path / "x.h5", "x").cache(tmp_path / "c")
        assert first_rows(rows) == [10 * number + one for one in range(3)]


def test_only_a_filename_asks_for_more(tmp_path):
    with open(__file__) as file:
        rows = times(closing_over(file))
        rows.cache()
        with pytest.raises(DataError, match=r"got a TextIOWrapper \(TypeError: cannot pickle.*leave the filename out"):
            rows.cache(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
