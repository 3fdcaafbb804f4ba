"""How variables are split and placed on parameter servers: as TensorFlow does, in recorded cases."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from hpcdist.errors import UsageError
from hpcdist.plan import partitioners
from hpcdist.plan.partitioners import FixedShardsPartitioner, Shard, VariableSpec, place

RECORDED = json.loads(
    gzip.decompress((Path(__file__).parents[2] / "support" / "oracle" / "shards.json.gz").read_bytes())
)


def partitioner_of(drawn):
    if drawn is None:
        return None
    if drawn["kind"] == "function":
        return lambda shape, dtype: drawn["returns"]
    return getattr(partitioners, f"{drawn['kind']}Partitioner")(**drawn["arguments"])


def answer_of(case):
    """Return [rows, server] of each shard of each variable, or the type of the error, as TensorFlow's was recorded."""
    placed = []
    numbers = []
    answer = []
    for number, variable in enumerate(case["variables"]):
        spec = VariableSpec(f"v{number}", tuple(variable["shape"]), getattr(torch, variable["dtype"]))
        try:
            shards = place([*placed, spec], case["n_servers"], partitioner_of(case["partitioner"]))
        except ValueError:
            answer.append("ValueError")
            continue
        placed.append(spec)
        numbers.append(number)
        answer.append(
            [[shard.stop - shard.start, shard.server] for shard in shards if shard.variable == len(placed) - 1]
        )
    return answer


@pytest.mark.feature("semantics.partition-axis", "semantics.partition-counts", "semantics.partition-division")
def test_shards_are_split_and_placed_as_tensorflow_does():
    cases = RECORDED["cases"]
    assert len(cases) >= 500
    kinds = Counter(case["partitioner"] and case["partitioner"]["kind"] for case in cases)
    assert min(kinds.values()) >= 50
    assert len(kinds) == 5
    assert sum("ValueError" in case["answer"] for case in cases) >= 20
    assert [case for case in cases if answer_of(case) != case["answer"]] == []


def test_by_bytes_a_shard_goes_to_the_server_with_the_fewest():
    sizes = [(100, 4), (10,), (10,), (50, 4), (60, 4), ()]
    variables = [VariableSpec(f"v{number}", shape, torch.float32) for number, shape in enumerate(sizes)]
    assert [shard.server for shard in place(variables, 2)] == [0, 1, 0, 1, 0, 1]
    assert [shard.server for shard in place(variables, 2, is_by_bytes=True)] == [0, 1, 1, 1, 1, 0]
    halves = place(variables[:1], 2, FixedShardsPartitioner(2), is_by_bytes=True)
    assert halves == [Shard(0, 0, 50, 0), Shard(0, 50, 100, 1)]


def test_a_colocated_variable_stays_whole_beside_the_other():
    first, second = (VariableSpec(name, (4, 2), torch.float32) for name in "ab")
    beside = VariableSpec("slot", (4, 2), torch.float32, colocated_with=1)
    shards = place([first, second, beside, first], 3, FixedShardsPartitioner(2))
    assert [(shard.variable, shard.server) for shard in shards] == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 0),
        (2, 2),
        (3, 1),
        (3, 2),
    ]
    assert shards[4] == Shard(2, 0, 4, 2)


@pytest.mark.feature("parameter-servers.partitioners", "semantics.partition-axis")
@pytest.mark.parametrize("returned", [None, 2, "2", [], [0], [-1], [1, 2], [2.0], {2: 1}])
def test_what_a_partitioner_may_not_return(returned):
    variable = VariableSpec("wide", (4, 2), torch.float32)
    with pytest.raises(UsageError, match="variable_partitioner.*'wide'"):
        place([variable], 2, lambda shape, dtype: returned)


@pytest.mark.parametrize(
    "make",
    [
        lambda: partitioners.FixedShardsPartitioner(0),
        lambda: partitioners.MinSizePartitioner(0),
        lambda: partitioners.MinSizePartitioner(max_shards=0),
        lambda: partitioners.MinSizePartitioner(bytes_per_string=0),
        lambda: partitioners.MaxSizePartitioner(0),
        lambda: partitioners.MaxSizePartitioner(1, max_shards=0),
    ],
)
def test_what_a_partitioner_may_not_be_made_with(make):
    with pytest.raises(UsageError, match=r"Partitioner.*1.*0"):
        make()


def test_numpy_dtypes_and_texts():
    assert partitioners.MaxSizePartitioner(8)((6, 1), "float32") == [3, 1]
    assert partitioners.MaxSizePartitioner(32)((6, 1), "O") == [3, 1]
    assert partitioners.MaxSizePartitioner(8)((2, 6), "float32", axis=1) == [1, 6]
    with pytest.raises(UsageError, match="variable.*elements"):
        partitioners.MaxSizePartitioner(8)((0, 6), "float32")
