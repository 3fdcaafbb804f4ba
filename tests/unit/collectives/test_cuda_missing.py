"""What hpcdist says when cupy, NCCL or the GPU is missing, and the parts of the CUDA path that a stand-in can show."""

import subprocess
import sys

import cupy_stand_in
import numpy as np
import pytest
import torch

from hpcdist.cluster.environment import nccl_may_share_devices
from hpcdist.collectives.gpu import cupy_door as cuda
from hpcdist.collectives.gpu.cupy_door import (
    DeviceArray,
    copy_into,
    device_array,
    is_device_buffer,
    padded,
    staged_all_reduce,
)
from hpcdist.errors import CollectiveError, ConfigurationError


@pytest.fixture
def cupy(monkeypatch):
    return cupy_stand_in.install(monkeypatch, cupy_stand_in.make_cupy())


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (cuda.load_cupy, cuda.load_nccl, cuda.visible_devices, lambda: cuda.use_device(0)):
        with pytest.raises(ConfigurationError, match=r"'hpcdist\[cuda\]'"):
            call()


def test_without_nccl(monkeypatch):
    cupy_stand_in.install(monkeypatch, cupy_stand_in.make_cupy(has_nccl=False))
    with pytest.raises(ConfigurationError, match="find.*libnccl"):
        cuda.load_nccl()


def test_without_driver(monkeypatch):
    cupy_stand_in.install(monkeypatch, cupy_stand_in.make_cupy(devices=None))
    with pytest.raises(ConfigurationError, match="GPU.*cudaErrorInsufficientDriver"):
        cuda.visible_devices()


def test_without_a_visible_gpu(monkeypatch):
    cupy_stand_in.install(monkeypatch, cupy_stand_in.make_cupy(devices=()))
    with pytest.raises(ConfigurationError, match="expected a GPU, got none.*CUDA_VISIBLE_DEVICES"):
        cuda.visible_devices()


def test_a_device_that_cannot_be_used(cupy):
    cuda.use_device(0)
    with pytest.raises(ConfigurationError, match="3.*cudaErrorInvalidDevice"):
        cuda.use_device(3)


def test_devices_are_distinguished_by_bus_and_uuid(monkeypatch):
    cupy_stand_in.install(monkeypatch, cupy_stand_in.make_cupy(devices=("0000:01:00.0", "0000:02:00.0")))
    assert cuda.visible_devices() == [f"{bus} (UUID {bus.encode().hex()})" for bus in ("0000:01:00.0", "0000:02:00.0")]


@pytest.mark.feature("gpu.without-gpus")
def test_nothing_imports_cupy_until_a_device_buffer_comes():
    code = """
import sys, numpy, torch
import hpcdist.collectives.gpu.cupy_door, hpcdist.plan.devices, hpcdist
assert not hpcdist.collectives.gpu.cupy_door.is_device_buffer(numpy.ones(3))
assert not hpcdist.collectives.gpu.cupy_door.is_device_buffer(torch.ones(3))
print([name for name in sys.modules if name.split('.')[0] in ('cupy', 'cupyx')])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "[]", ran.stderr


@pytest.mark.parametrize("buffer", [np.ones(3), torch.ones(3), torch.nn.Parameter(torch.ones(3)), [1.0]])
def test_buffers_on_the_host_are_refused(buffer):
    assert not is_device_buffer(buffer)
    with pytest.raises(CollectiveError, match=f"expected a buffer on a GPU, got {type(buffer).__name__} on the host"):
        device_array(buffer)


@pytest.mark.feature("gpu.zero-copy-tensors")
def test_a_cupy_array_is_shared(cupy):
    array = cupy.array(np.arange(6.0).reshape(2, 3))
    assert is_device_buffer(array)
    flat = device_array(array)
    assert (flat.size, flat.dtype, flat.device) == (6, "float64", 0)
    assert flat.address == array.data.ptr
    assert flat[2:4].address == array.data.ptr + 16


def test_gaps_are_refused(cupy):
    with pytest.raises(CollectiveError, match="contiguous.*buffer"):
        device_array(cupy.array(np.ones((4, 4)))[:, ::2])


@pytest.mark.feature("gpu.zero-copy-tensors")
def test_torch_comes_by_dlpack_and_bfloat16_as_bits(cupy):
    values = np.arange(3, dtype=np.float32)
    tensor = cupy_stand_in.CudaTensor(values, "float32")
    assert is_device_buffer(tensor)
    assert device_array(tensor).address == values.ctypes.data
    half = device_array(cupy_stand_in.CudaTensor(cupy_stand_in.bfloat16(values), "bfloat16"))
    assert (half.dtype, half.array.dtype) == ("bfloat16", np.int16)
    assert cupy.seen_dlpack == ["torch.float32", "torch.int16"]


def test_padding_is_zero_and_copies_only_when_needed(cupy):
    array = device_array(cupy.array(np.ones(5, np.float32)))
    assert padded(array, 5) is array
    longer = padded(array, 8)
    assert longer.array.get().tolist() == [1] * 5 + [0] * 3
    assert longer.dtype == "float32"


@pytest.mark.feature("gpu.staged-copies", "complaints.cuda-aware-or-not")
@pytest.mark.parametrize("n_elements", [0, 1, 3, 4, 5, 8, 9, 41])
def test_staged_copies_bring_every_piece_back(cupy, monkeypatch, n_elements):
    monkeypatch.setattr(cuda, "PIECE_BYTES", 32)
    array = cupy.array(np.arange(n_elements, dtype=np.float64))
    seen = []

    def double(host):
        assert type(host) is np.ndarray
        seen.extend(host.tolist())
        host *= 2

    staged_all_reduce(device_array(array), double)
    assert seen == list(range(n_elements))
    assert array.host.tolist() == [2.0 * i for i in range(n_elements)]


@pytest.mark.feature("gpu.staged-copies")
def test_staged_copies_wait_for_what_is_queued(cupy):
    array = cupy.array(np.zeros(3))
    copy_into(device_array(array), device_array(cupy.array(np.ones(3))))
    staged_all_reduce(device_array(array), lambda host: np.add(host, 1, out=host))
    assert array.host.tolist() == [2, 2, 2]


@pytest.mark.feature("complaints.large-and-half-messages")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_reduced_in_float32(cupy, dtype):
    values = np.array([1.5, -2, np.inf, 0], np.float32)
    if dtype == "float16":
        bits = values.astype(np.float16)
    else:
        bits = cupy_stand_in.bfloat16(values)
    array = cupy.array(bits)

    def double(host):
        assert host.dtype == np.float32
        host *= 2

    staged_all_reduce(DeviceArray(array, dtype), double)
    if dtype == "float16":
        doubled = array.host.astype(np.float32)
    else:
        doubled = cupy_stand_in.from_bfloat16(array.host)
    assert doubled.tolist() == [3, -4, np.inf, 0]


def test_bfloat16_is_rounded_as_torch_does(cupy):
    values = np.concatenate([np.random.default_rng(1).normal(size=1000), [1e-40, 3.4e38, -0.0, np.nan, np.inf]])
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F808001], np.uint32).view(np.float32)
    values = np.concatenate([values.astype(np.float32), ties])
    array = cupy.array(np.zeros(values.size, np.int16))
    staged_all_reduce(DeviceArray(array, "bfloat16"), lambda host: np.copyto(host, values))
    wanted = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(cupy_stand_in.from_bfloat16(array.host), wanted, equal_nan=True)


@pytest.mark.parametrize(("text", "allowed"), [(None, False), ("0", False), ("1", True), (" 1 ", True), ("yes", False)])
def test_sharing_a_gpu_is_asked_for_by_nccls_own_variable(text, allowed):
    if text is None:
        environ = {}
    else:
        environ = {"NCCL_MULTI_RANK_GPU_ENABLE": text}
    assert nccl_may_share_devices(environ) is allowed
