"""What orders sums of buckets on a GPU behind the streams that fill them, and how often buffers are waited for."""

import threading

import pytest
import torch
from torch import nn

from hpcdist.gradients.buffers import BufferRecord, find_changed
from hpcdist.gradients.device_staging import ProducerStreams
from hpcdist.program.model_plan import ModelBuffer
from hpcdist.program.tensors import differ_in_bits


class FakeStream:
    def __init__(self, name):
        self.name = name
        self.waited_for = []

    def wait_stream(self, stream):
        self.waited_for.append(stream.name)


@pytest.fixture
def streams(monkeypatch):
    """Return three streams, and a function that makes one the current one."""
    fake_streams = list(map(FakeStream, "abc"))
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.stream)
    return fake_streams, lambda stream: setattr(current, "stream", stream)


def test_a_sum_waits_for_every_stream_that_has_taken_a_gradient(streams):
    (first, second, third), use = streams
    producers = ProducerStreams(torch.device("cuda", 0))
    for stream in (first, second, second, third):
        use(stream)
        producers.note()
    producers.order_sum()
    assert third.waited_for == ["a", "b"]
    use(first)
    producers.note()
    producers.order_sum()
    assert (first.waited_for, second.waited_for) == ([], [])


def test_the_host_has_no_streams(streams):
    producers = ProducerStreams(torch.device("cpu"))
    producers.note()  # would raise without a current stream
    producers.order_sum()


def test_buffers_of_a_device_are_waited_for_once(monkeypatch):
    """The meta device stands for a GPU: nothing there can be compared on the host."""
    module = nn.BatchNorm1d(4, device="meta")
    names = ["running_mean", "running_var"]
    records = [BufferRecord(ModelBuffer(name, module, name), getattr(module, name)) for name in names]
    waits = []

    class Answers:
        def tolist(self):
            waits.append(True)
            return [False, True]

    monkeypatch.setattr(torch, "stack", lambda flags: Answers())
    assert find_changed(records) == [False, True]
    assert waits == [True]


@pytest.mark.parametrize(
    ("left", "right", "is_other"),
    [
        ([1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, 3.0], True),
        ([0.0], [-0.0], True),
        ([float("nan")],) * 2 + (False,),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_is_compared_on_a_device_is_bits(left, right, is_other, dtype):
    tensors = [torch.tensor(values, dtype=dtype) for values in (left, right)]
    assert differ_in_bits(*tensors).item() is is_other


def test_buffers_of_the_host_are_compared_bit_by_bit():
    module = nn.BatchNorm1d(4)
    names = ["running_mean", "running_var"]
    records = [BufferRecord(ModelBuffer(name, module, name), getattr(module, name)) for name in names]
    assert find_changed(records) == [False, False]
    module.running_var[2] = float("nan")
    assert find_changed(records) == [False, True]
    module.running_mean = torch.zeros(5)
    assert find_changed(records) == [True, True]
