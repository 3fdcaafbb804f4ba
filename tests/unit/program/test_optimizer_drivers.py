"""Which schedulers drive an optimizer, also where one holds others."""

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, SequentialLR

from hpcdist.program.optimizer_drivers import members_of, schedulers_of


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.filterwarnings("ignore:Detected call")
def test_members_at_any_depth():
    optimizer = make_optimizer()
    schedules = [ConstantLR(optimizer) for _ in range(3)]
    inner = SequentialLR(optimizer, schedules[:2], milestones=[2])
    outer = SequentialLR(optimizer, [inner, schedules[2]], milestones=[4])
    members = members_of(outer)
    assert set(map(id, members)) == set(map(id, [inner, *schedules]))
    assert len(members) == 4


def test_schedulers_that_hold_each_other():
    optimizer = make_optimizer()
    first = ConstantLR(optimizer)
    second = ConstantLR(optimizer)
    first.partner = second
    second.partner = first
    assert members_of(first) == [second]
    reported = schedulers_of([optimizer], is_thorough=False)
    assert list(map(id, reported)) == [id(first), id(second)]


def test_the_oldest_is_reported_first():
    optimizer = make_optimizer()
    schedulers = [ConstantLR(optimizer) for _ in range(20)]
    reported = schedulers_of([optimizer], is_thorough=False)
    assert list(map(id, reported)) == list(map(id, schedulers))


def test_only_the_outermost_are_reported():
    optimizer = make_optimizer()
    inner = ConstantLR(optimizer)
    outer = ConstantLR(optimizer)
    outer.inner = inner
    assert schedulers_of([optimizer], is_thorough=False) == [outer]
