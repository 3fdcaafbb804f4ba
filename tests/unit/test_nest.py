"""Nests: one implementation for rows of data and for what replicas return."""

from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from hpcdist.nest import children_of, form_of, leaves, map_nest, with_children

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "nest",
    [
        5,
        (),
        (1, [2, (3,)], {"b": 4, "a": []}),
        Pair(1, Pair(2, 3)),
        OrderedDict(b=1, a=2),
        {1: "one", "two": 2},
        defaultdict(list, {"a": [1]}),
    ],
)
def test_types_and_the_order_of_keys_are_kept(nest):
    same = map_nest(lambda leaf: leaf, nest)
    assert (type(same), same) == (type(nest), nest)
    if isinstance(nest, dict):
        assert list(same) == list(nest)
        assert getattr(same, "default_factory", None) is getattr(nest, "default_factory", None)
    if isinstance(nest, (tuple, dict)):
        assert with_children(nest, children_of(nest)) == nest


@pytest.mark.parametrize("leaf", [Counter(a=3, b=1), torch.Size([2, 3]), pack_sequence([torch.ones(2)])])
def test_what_holds_nothing_but_numbers_is_a_leaf(leaf):
    assert map_nest(lambda element: [element], (leaf,)) == ([leaf],)
    assert form_of([leaf]) == "[*]"


def test_dicts_are_visited_by_their_sorted_keys():
    first = {"b": [1, 2], "a": 0}
    second = {"a": 0, "b": [1, 2]}
    assert leaves(first) == leaves(second) == [0, 1, 2]
    assert form_of(first) == form_of(second) == "{'a': *, 'b': [*, *]}"
    assert form_of({"a": 0, "b": [1]}) != form_of(first)


def test_several_nests_are_mapped_together():
    assert map_nest(lambda *values: sum(values), (1, {"x": 2}), (10, {"x": 20}), (100, {"x": 200})) == (111, {"x": 222})
    with pytest.raises(ValueError, match="shorter"):
        map_nest(max, (1, 2), (1,))
    with pytest.raises(KeyError):
        map_nest(max, {"x": 1}, {"y": 1})
