import itertools

import pytest

from hpcdist.plan.devices import equal_part, piece_bounds, plan_devices, shared_devices


@pytest.mark.feature("gpu.device-binding", "complaints.gpu-binding")
def test_ranks_take_devices_in_turn():
    assert plan_devices(4, 4) == [0, 1, 2, 3]
    assert plan_devices(2, 3) == [0, 1]
    assert plan_devices(5, 2) == [0, 1, 0, 1, 0]
    assert plan_devices(0, 1) == []


def test_no_device_is_an_error():
    with pytest.raises(ValueError, match="device"):
        plan_devices(1, 0)


def test_as_many_ranks_as_devices_share_none():
    devices = ["a", "b", "c"]
    for n_local in range(1, 8):
        used = [devices[index] for index in plan_devices(n_local, len(devices))]
        assert bool(shared_devices(used)) == (n_local > len(devices))


def test_shared_devices_name_all_their_ranks():
    assert shared_devices(["a", "b", "a", "c", "b", "a"]) == {"a": [0, 2, 5], "b": [1, 4]}
    assert shared_devices([]) == {}


def test_equal_parts_hold_everything_with_the_least_padding():
    for n_elements, n_parts, multiple in itertools.product([0, 1, 7, 8, 9, 1000], range(1, 9), [1, 4, 16]):
        part = equal_part(n_elements, n_parts, multiple)
        assert part % multiple == 0
        assert part * n_parts >= n_elements
        assert part == 0 or (part - multiple) * n_parts < n_elements


def test_counts_beyond_32_bits():
    assert equal_part(10**13 + 1, 8) == 1250000000001


def test_pieces_tile_the_whole():
    for n_elements, n_piece in itertools.product([0, 1, 5, 6, 7], [1, 2, 3, 100]):
        pieces = piece_bounds(n_elements, n_piece)
        elements = itertools.chain.from_iterable(range(start, stop) for start, stop in pieces)
        assert list(elements) == list(range(n_elements))
        assert all(0 < stop - start <= n_piece for start, stop in pieces)
