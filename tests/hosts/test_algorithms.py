"""Algorithms over real links: right sums, bytes on the wire as in the formula, bits that no placement changes."""

import pytest

pytestmark = pytest.mark.timeout(120)
N_ELEMENTS = 1 << 20
#: Payload over TCP: headers, and messages that announce others.
OVERHEAD = 1.05


@pytest.mark.feature("collectives.hierarchical-all-reduce", "collectives.half-precision-wire")
@pytest.mark.parametrize("ranks_per_host", [[2, 2], [3, 1]], ids=["2 + 2", "3 + 1"])
def test_sums_and_bytes_between_hosts(hosts, library, ranks_per_host):
    report = library.run(hosts, "algorithms.py", N_ELEMENTS, ranks_per_host=ranks_per_host).result
    assert report["n_hosts"] == 2
    # 2(m-1)/m * n for m = 2
    ways = report["ways"]
    bound = report["nbytes"]
    for name, way in ways.items():
        assert way["n_wrong"] == 0, name
        assert len(way["bits"]) == 1, name
    assert max(ways["unordered"]["sent"]) <= OVERHEAD * bound
    assert max(ways["bfloat16"]["sent"]) <= OVERHEAD * bound / 2
    if ranks_per_host == [2, 2]:  # aligned: the ordered sum sends no more
        assert max(ways["ordered"]["sent"]) <= OVERHEAD * bound
    else:  # the host of ranks 0 to 2 has two partial sums, (0, 1) and 2
        assert max(ways["ordered"]["sent"]) <= OVERHEAD * bound * 3 / 2
    assert min(min(way["sent"]) for way in ways.values()) >= bound / 2


@pytest.mark.feature("collectives.layout-independent-sums")
def test_the_ordered_sum_has_the_bits_of_one_host(hosts, mpich):
    bits = []
    for ranks in ([2, 2], [3, 1], [4, 0]):
        bits.append(mpich.run(hosts, "algorithms.py", 100_003, ranks_per_host=ranks).result["ways"]["ordered"]["bits"])
    assert bits[0] == bits[1] == bits[2]


def test_the_torch_backend_sums_while_the_program_goes_on(hosts, library):
    """The last rank comes a second late: the first one has gone on."""
    report = library.run(hosts, "torch_backend.py").result
    assert report["returned_s"] < 0.5
    assert not report["was_done"]
    assert report["is_right"]
    assert report["future"]
    assert "all_reduce: expected the same call and sizes" in report["failed"]
    assert report["is_trained_alike"]
