"""Which part of the parameters a sum compares, and the digests."""

import pytest
import torch
from torch import nn

from hpcdist.program.drift import SUMS_PER_SLICE, StateDigests, odd_ranks, plan_slices


@pytest.mark.parametrize(
    ("sizes", "itemsizes"),
    [([], []), ([0, 3], [4, 4]), ([10], [8]), ([100_000, 7, 40_000], [4, 2, 8]), ([1] * 300, [4] * 300)],
)
def test_slices_cover_every_element_once(sizes, itemsizes):
    slices = plan_slices(sizes, itemsizes)
    seen = [[] for _ in sizes]
    for pieces in slices:
        assert pieces
        for piece in pieces:
            seen[piece.number] += range(piece.low, piece.high)
    assert seen == [list(range(size)) for size in sizes]
    assert len(slices) <= 64


def test_slices_have_about_as_many_bytes_each():
    slices = plan_slices([1_000_000, 5_000_000], [4, 4])
    sizes = [sum(4 * (piece.high - piece.low) for piece in pieces) for pieces in slices]
    assert len(slices) == 64
    assert max(sizes) - min(sizes[:-1]) <= 8


def watched(model):
    digests = StateDigests()
    digests.watch(list(model.named_parameters()))
    return digests


def a_model(layout=torch.contiguous_format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(200, 300)).to(memory_format=layout)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.feature("semantics.ranks-that-drift")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_any_element_is_compared_within_a_rotation(layout, name):
    model, _ = a_model(layout)
    digests = watched(model)
    n_sums = digests.n_sums_of_rotation
    before = list(map(digests.digest_at, range(n_sums)))
    assert before == list(map(digests.digest_at, range(n_sums)))
    with torch.no_grad():
        parameter = dict(model.named_parameters())[name]
        parameter[tuple(size - 1 for size in parameter.shape)] += 1
    changed = []
    for number in range(n_sums):
        if digests.digest_at(number) != before[number]:
            changed.append(number)
    assert len(changed) == 1
    assert changed[0] % SUMS_PER_SLICE == 0
    assert name in digests.describe(changed[0]) or "to" in digests.describe(changed[0])


def test_settings_are_compared_often():
    model, optimizer = a_model()
    digests = watched(model)
    digests.note_step(optimizer)
    before = digests.digest_at(4)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    digests.note_step(optimizer)
    assert list(map(digests.digest_at, (5, 6, 7))) == [0] * 3
    assert digests.digest_at(8) != before


def test_settings_of_an_optimizer_that_makes_no_more_steps_do_not_count():
    model, optimizer = a_model()
    digests = watched(model)
    digests.note_step(optimizer)
    digests.digest_at(4)
    second_optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    digests.note_step(second_optimizer)
    before = digests.digest_at(8)
    assert digests.n_compared == 1
    optimizer.param_groups[0]["lr"] = 0.2
    digests.note_step(second_optimizer)
    assert digests.digest_at(12) == before


def test_what_is_kept_is_compared_and_the_rest_is_not():
    model, _ = a_model()
    digests = watched(model)
    parameters = digests.hold()
    assert [parameter is not None for parameter in parameters] == [True] * 4
    digests.keep(parameters, [1, 1, 0, 1])
    assert digests.n_parameters == 3
    before = digests.digest_of_all()
    with torch.no_grad():
        model[1].weight += 1
    assert digests.digest_of_all() == before
    with torch.no_grad():
        model[1].bias += 1
    assert digests.digest_of_all() != before


def test_parameters_that_are_gone_are_left_out():
    model, _ = a_model()
    digests = StateDigests()
    digests.watch(list(model.named_parameters()))
    del model, _
    assert digests.parameters() == []
    assert isinstance(digests.digest_of_all(), int)


def test_a_change_after_the_last_step_is_known():
    model, optimizer = a_model()
    digests = watched(model)
    model[1](torch.ones(2, 200)).sum().backward()
    optimizer.step()
    digests.note_step(optimizer)
    assert digests.is_changed_since_step is (model[0].weight._version != digests.n_changes)
    model.load_state_dict(model.state_dict())
    assert digests.is_changed_since_step


@pytest.mark.parametrize(
    ("digests", "odd"), [([1, 1], []), ([1, 2], [1]), ([2, 1, 1], [0]), ([5, 5, 7, 5], [2]), ([3, 4, 3, 4], [1, 3])]
)
def test_the_odd_ranks_are_those_that_differ_from_most(digests, odd):
    assert odd_ranks(digests) == odd
