import pytest
import torch

from hpcdist.strategy.devices import parse_device


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", "cpu"),
        ("CPU:0", "cpu"),
        ("/cpu:1", "cpu"),
        ("/device:CPU:0", "cpu"),
        ("/job:worker/task:0/cpu:0", "cpu"),
        ("/job:localhost/replica:0/task:3/device:GPU:2", "cuda:2"),
        ("GPU", "cuda:0"),
        ("/gpu:1", "cuda:1"),
        ("/gpu:*", "cuda:0"),
        ("cuda:3", "cuda:3"),
        (torch.device("cuda", 1), "cuda:1"),
        ("TPU:0", "xla:0"),
        ("meta", "meta"),
    ],
)
def test_names_of_devices(name, expected):
    assert parse_device(name) == torch.device(expected)


@pytest.mark.parametrize("name", ["", "gpu:x", "/job:worker", "cpu:0:1", None, 3])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="device.*'cpu'"):
        parse_device(name)
