"""Tensors name their part: also those of the part that was drawn before forwards were watched."""

import numpy as np
import pytest
import torch

from hpcdist.program.loop_watch import LoopWatch
from hpcdist.program.part_tensors import PartTensors
from hpcdist.runtime.parts import Part
from hpcdist.runtime.step_flags import StepFlags


def part_of(source, number=1):
    return Part(source, number, (2,), 4, True, number, number, True)


@pytest.fixture
def source():
    return StepFlags().loop.add_source()


def test_the_part_before_forwards_are_watched_is_known_too():
    flags = StepFlags()
    watch = LoopWatch(flags)
    loop = flags.loop
    source = loop.add_source()
    for _ in range(150):
        loop.note_step()
    assert not loop.needs_identity
    rows = torch.ones(2, 3)
    first = part_of(source)
    second = part_of(source, 2)
    loop.hand_out(first)
    watch.hand_out(first, [(rows,)])
    assert watch.tensors.parts_of(rows) == []
    loop.hand_out(second)
    watch.hand_out(second, [(torch.zeros(2, 3),)])
    assert loop.needs_identity
    assert watch.tensors.parts_of([rows[:1]]) == [first]


@pytest.mark.parametrize(
    "derived",
    [
        lambda rows: rows,
        lambda rows: rows[1:],
        lambda rows: rows.T,
        lambda rows: rows.float(),
        lambda rows: rows.to("cpu"),
        lambda rows: {"x": [rows.view(-1)]},
        lambda rows: torch.utils.data.default_convert((rows,)),
    ],
)
def test_views_have_the_memory_of_their_part(source, derived):
    tensors = PartTensors()
    part = part_of(source)
    rows = torch.ones(4, 3)
    tensors.add(part, [rows])
    assert tensors.parts_of(derived(rows)) == [part]


@pytest.mark.parametrize("derived", [torch.clone, torch.Tensor.double, lambda rows: torch.cat([rows, rows])])
def test_copies_do_not(source, derived):
    tensors = PartTensors()
    rows = torch.ones(4, 3)
    tensors.add(part_of(source), [rows])
    assert tensors.parts_of(derived(rows)) == []


def test_windows_of_one_memory_and_arrays_are_told_apart(source):
    tensors = PartTensors()
    recording = torch.arange(100.0)
    rows = np.ones((4, 3))
    first, second, third = (part_of(source, number) for number in (1, 2, 3))
    tensors.add(first, [recording[:10]])
    tensors.add(second, [recording[10:20]])
    tensors.add(third, [rows])
    assert tensors.parts_of([recording[2:5], recording[12:13]]) == [first, second]
    assert tensors.parts_of(recording[50:60]) == []
    assert tensors.parts_of(torch.from_numpy(rows)[1:]) == [third]


def test_memory_that_was_freed_names_no_part(source):
    """Also where the allocator gives its address to the next tensor."""
    tensors = PartTensors()
    for number in range(1, 2000):
        rows = torch.ones(1000)
        tensors.add(part_of(source, number), [rows])
        del rows
        assert tensors.parts_of(torch.ones(1000)) == []
    assert len(tensors._of_tensors) < 600


def test_parts_without_rows_are_known(source):
    tensors = PartTensors()
    part = part_of(source)
    rows = torch.ones(1, 3)[:0]
    tensors.add(part, [rows])
    assert tensors.parts_of(rows) == [part]
    assert tensors.parts_of(torch.ones(1, 3)[:0]) == []
