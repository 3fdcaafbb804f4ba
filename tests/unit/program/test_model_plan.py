"""Sets of objects that are held weakly."""

import torch

from hpcdist.program.model_plan import IdentitySet


def test_objects_that_are_gone_take_no_room():
    tensors = IdentitySet()
    for _ in range(3):
        live_tensor = torch.zeros(1)
        tensors.add(torch.ones(1))
        tensors.add(live_tensor)
    assert [item is live_tensor for item in tensors] == [True]
    assert len(tensors._references) == 1


def test_objects_are_compared_by_identity_in_their_order():
    first = torch.zeros(2)
    second = torch.zeros(2)
    tensors = IdentitySet([second, first, second])
    assert [item is second for item in tensors] == [True, False]
    assert first in tensors
    assert torch.zeros(2) not in tensors
