"""Training on real GPUs: steps, checkpoints, inputs and collectives of CUDA tensors. Right for any number of ranks.

With a GPU for each rank sums go by NCCL. Where ranks share one they go through the memory of the host, and MPI.
"""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcdist
from hpcdist.errors import CollectiveError, GradientError, UsageError
from hpcdist.runtime.time_spent import time_spent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.*expected NCCL and a GPU for each rank.*"),
]

N_ROWS = 24
N_INPUTS = 16


@pytest.fixture
def gpu(comm, cupy):
    """Return this rank's device for torch."""
    if not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA, or finds no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def make_model(device):
    torch.manual_seed(3)
    with torch.device("cpu"):  # a strategy's scope draws on its own device
        layers = nn.Linear(N_INPUTS, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    return nn.Sequential(*layers).to(device)


def global_batch(step, device):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(N_ROWS, N_INPUTS, generator=generator, dtype=torch.float64).float()
    return inputs.to(device), inputs.sum(1, keepdim=True).sin().to(device)


def rows_of_rank(comm, tensor):
    return tensor.tensor_split(comm.size)[comm.rank]


class Training:
    """A small training by hand, on this rank's rows of each global batch."""

    def __init__(self, comm, device=None, implementation="AUTO"):
        self.comm = comm
        options = hpcdist.CommunicationOptions(implementation=implementation)
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(
            communication_options=options, gradient_op="sum", device=device
        )
        self.device = self.strategy.device
        with self.strategy.scope():
            self.model = make_model(self.device)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.autocast_dtype = None

    def step(self, number):
        inputs, targets = (rows_of_rank(self.comm, tensor) for tensor in global_batch(number, self.device))
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self.autocast_dtype, enabled=self.autocast_dtype is not None):
            loss = (self.model(inputs) - targets).square().sum() / N_ROWS
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, first, stop):
        for number in range(first, stop):
            self.step(number)
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def train_alone(device, n_steps):
    """Return the weights of one process that takes each global batch as a whole."""
    model = make_model(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(n_steps):
        inputs, targets = global_batch(number, device)
        optimizer.zero_grad()
        ((model(inputs) - targets).square().sum() / N_ROWS).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_close(weights, expected, tolerance):
    differences = [float((weight - right).abs().max()) for weight, right in zip(weights, expected, strict=True)]
    assert max(differences) < tolerance


def assert_equal_on_ranks(comm, weights):
    bits = np.concatenate([weight.cpu().numpy().ravel() for weight in weights])
    assert np.array_equal(bits, comm.bcast(bits))


@pytest.mark.parametrize("implementation", ["AUTO", "HIERARCHICAL", "RING"])
def test_steps_equal_those_of_one_process(comm, gpu, implementation):
    training = Training(comm, implementation=implementation)
    assert training.device.type == "cuda"
    weights = training.run(0, 10)
    assert {weight.device.type for weight in weights} == {"cuda"}
    assert_equal_on_ranks(comm, weights)
    assert_close(weights, train_alone(gpu, 10), 1e-4)


def test_buckets_stay_on_the_device(comm, gpu):
    """A copy to the host for each parameter made steps of many small ones five times slower."""
    training = Training(comm, implementation="HIERARCHICAL")
    training.step(0)
    reducer = training.strategy.reducer
    assert reducer.device == gpu
    assert reducer.route.is_on_device == bool(reducer.group.facts.has_nccl)


@pytest.mark.parametrize("is_half_wire", [False, True])
def test_a_hook_of_the_program_sums_buckets(comm, gpu, is_half_wire):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model(strategy.device)

    def hook(state, bucket):
        buffer = bucket.buffer()
        assert buffer.device.type == "cuda"
        values = buffer.bfloat16() if is_half_wire else buffer
        hpcdist.all_reduce(values)
        buffer.copy_(values)
        return buffer

    strategy.register_comm_hook(None, hook)
    inputs, targets = (rows_of_rank(comm, tensor) for tensor in global_batch(0, strategy.device))
    ((model(inputs) - targets).square().sum() / N_ROWS).backward()
    alone = make_model(strategy.device)
    inputs, targets = global_batch(0, strategy.device)
    ((alone(inputs) - targets).square().sum() / N_ROWS).backward()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        if is_half_wire:
            atol = 0.02
        else:
            atol = 1e-4
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0.02, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_with_a_scaler(comm, gpu, dtype):
    training = Training(comm)
    training.autocast_dtype = dtype
    training.scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    weights = training.run(0, 10)
    assert_equal_on_ranks(comm, weights)
    assert_close(weights, train_alone(gpu, 10), 0.05)


def test_many_small_and_one_large_parameter(comm, gpu):
    """Several buckets: some travel while backward runs."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(bytes_per_pack=64 << 10), gradient_op="sum"
    )
    with strategy.scope():
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)), nn.Linear(128, 1 << 14))
    inputs = torch.randn(12 * comm.size, 128, generator=torch.Generator().manual_seed(6)).to(strategy.device)
    (model(rows_of_rank(comm, inputs)).sum() / len(inputs)).backward()
    summed = [parameter.grad.clone() for parameter in model.parameters()]
    torch.manual_seed(5)
    alone = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)), nn.Linear(128, 1 << 14)).to(strategy.device)
    alone.load_state_dict(model.state_dict())
    (alone(inputs).sum() / len(inputs)).backward()
    for gradient, parameter in zip(summed, alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-4)


def test_half_precision_model(comm, gpu):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model(strategy.device).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = (rows_of_rank(comm, tensor.bfloat16()) for tensor in global_batch(0, strategy.device))
    ((model(inputs) - targets).square().sum() / N_ROWS).backward()
    optimizer.step()
    assert_equal_on_ranks(comm, [parameter.detach().float() for parameter in model.parameters()])


def test_a_restart_has_the_bits_of_the_unbroken_run(comm, gpu, shared_path):
    unbroken = Training(comm).run(0, 8)
    first = Training(comm)
    first.run(0, 5)
    saved = hpcdist.Checkpoint(model=first.model, optimizer=first.optimizer, strategy=first.strategy)
    manager = hpcdist.CheckpointManager(saved, shared_path / "run")
    manager.save(5)
    manager.wait()
    second = Training(comm)
    restored = hpcdist.Checkpoint(model=second.model, optimizer=second.optimizer, strategy=second.strategy)
    assert hpcdist.CheckpointManager(restored, shared_path / "run").restore_or_initialize() is not None
    weights = second.run(5, 8)
    assert all(torch.equal(weight, expected) for weight, expected in zip(weights, unbroken, strict=True))


def test_random_numbers_of_the_device_resume(comm, gpu, shared_path):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(N_INPUTS, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, N_INPUTS, device=strategy.device)).sum().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    hpcdist.set_random_seed(11)
    state = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
    step()
    manager = hpcdist.CheckpointManager(state, shared_path / "run")
    manager.save(1)
    manager.wait()
    expected = step()
    hpcdist.CheckpointManager(state, shared_path / "run").restore_or_initialize()
    assert all(torch.equal(resumed, right) for resumed, right in zip(step(), expected, strict=True))


def test_batches_arrive_on_the_device(comm, gpu):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    rows = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(8).prefetch(2)
    received = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        assert batch.device == strategy.device
        received.append(batch.cpu())
    everyone = np.concatenate(comm.allgather(torch.cat(received).numpy()))
    assert sorted(everyone[:, 0].tolist()) == rows[:, 0].tolist()


def test_fit_on_the_device(comm, gpu):
    def history_on(device):
        strategy = hpcdist.MultiWorkerMirroredStrategy(device=device)
        with strategy.scope():
            model = hpcdist.Model(make_model(strategy.device))
            model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        inputs, targets = (tensor.cpu().numpy() for tensor in global_batch(0, "cpu"))
        return model.fit(inputs, targets, batch_size=8, epochs=3, shuffle=False, verbose=0).history

    on_gpu = history_on(None)
    on_cpu = history_on("cpu")
    assert on_gpu.keys() == on_cpu.keys()
    for name, values in on_gpu.items():
        np.testing.assert_allclose(values, on_cpu[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8"])
@pytest.mark.parametrize("count", [1, 1000, 1 << 20])
def test_all_reduce_of_cuda_tensors(comm, gpu, dtype, count):
    values = (torch.arange(count) % 5).to(getattr(torch, dtype))
    tensor = (values + comm.rank).to(gpu)
    hpcdist.all_reduce(tensor)
    expected = values.double() * comm.size + sum(range(comm.size))
    assert torch.equal(tensor.cpu().double(), expected)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_ops_of_cuda_tensors(comm, gpu, op):
    tensor = torch.arange(1.0, 9.0, device=gpu) + comm.rank
    host = tensor.cpu()
    hpcdist.all_reduce(tensor, op)
    hpcdist.all_reduce(host, op)
    assert torch.allclose(tensor.cpu(), host)


def test_moves_of_cuda_tensors(comm, gpu):
    local_rows = torch.full((2, 3), float(comm.rank), device=gpu)
    gathered = hpcdist.all_gather(local_rows)
    assert gathered.device.type == "cuda"
    assert gathered[:, 0].tolist() == np.repeat(np.arange(comm.size, dtype=float), 2).tolist()
    everywhere = torch.full((4,), float(comm.rank + 1), device=gpu)
    hpcdist.broadcast(everywhere)
    assert everywhere.tolist() == [1.0] * 4
    part = hpcdist.reduce_scatter(torch.ones(comm.size * 2, device=gpu))
    assert part.tolist() == [float(comm.size)] * 2


@pytest.mark.parametrize("start", [hpcdist.all_reduce_async, hpcdist.all_gather_async])
def test_what_runs_in_the_background_waits_for_the_side_stream_of_its_tensor(comm, gpu, start):
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1 << 22, device=gpu)
        torch.cuda._sleep(1 << 28)  # a tenth of a second
        tensor += 1
        handle = start(tensor)
        result = handle.wait()
        summed = tensor if result is None else result
        if start is not hpcdist.all_gather_async:
            expected_sum = comm.size
        else:
            expected_sum = 1
        assert (summed == expected_sum).all()


def test_sync_batch_norm(comm, gpu):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        layer = hpcdist.SyncBatchNorm(N_INPUTS)
    inputs, _ = global_batch(1, strategy.device)
    outputs = layer(rows_of_rank(comm, inputs))
    alone = nn.BatchNorm1d(N_INPUTS).to(strategy.device)
    torch.testing.assert_close(outputs, rows_of_rank(comm, alone(inputs)), rtol=1e-4, atol=1e-4)


def test_buffers_are_averaged_on_the_device(comm, gpu):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(nn.BatchNorm1d(N_INPUTS), nn.Linear(N_INPUTS, 4), nn.BatchNorm1d(4))
    inputs, _ = global_batch(1, strategy.device)
    rows = rows_of_rank(comm, inputs)
    (model(rows).square().sum() / N_ROWS).backward()
    statistics = [0.1 * part.mean(0).cpu() for part in inputs.tensor_split(comm.size)]
    torch.testing.assert_close(model[0].running_mean.cpu(), torch.stack(statistics).mean(0), rtol=1e-4, atol=1e-5)
    assert_equal_on_ranks(comm, [buffer for buffer in model.buffers() if buffer.is_floating_point()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scaled_in_float32(comm, gpu, dtype):
    tensor = torch.arange(1, 1001, device=gpu).to(dtype)
    hpcdist.all_reduce(tensor, prescale=1 / 3, postscale=7.0)
    exact = torch.arange(1, 1001).to(dtype).float() / 3 * comm.size * 7
    if comm.size == 1:
        atol = 0
    else:
        atol = 8
    torch.testing.assert_close(tensor.cpu(), exact.to(dtype), rtol=0, atol=atol)


def test_whole_numbers_are_not_scaled(comm, gpu):
    with pytest.raises(CollectiveError, match="expected floats to be scaled, got int64"):
        hpcdist.all_reduce(torch.ones(3, dtype=torch.int64, device=gpu), prescale=0.5)


def test_waiting_for_a_late_rank_counts_as_communication(comm, gpu):
    """On a GPU autograd has threads of its own, in which no time is counted."""
    training = Training(comm)
    training.step(0)
    before_s = time_spent.communication_s
    if comm.rank == 1:
        time.sleep(0.5)
    training.step(1)
    if comm.size > 1 and comm.rank == 0:
        assert time_spent.communication_s - before_s > 0.3


def test_reentrant_activation_checkpointing_is_refused(comm, gpu):
    """Its backward inside a backward runs in autograd's thread of the device."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        before, inside, behind = (nn.Linear(4, 4) for _ in range(3))
        optimizer = torch.optim.SGD([*before.parameters(), *inside.parameters(), *behind.parameters()], lr=0.1)
    inputs = torch.randn(8, 4, device=strategy.device)
    optimizer.zero_grad()
    outputs = behind(checkpoint(inside, before(inputs), use_reentrant=True))
    if comm.size == 1:  # nothing is summed, so torch's own gradients stay
        outputs.square().mean().backward()
        assert all(layer.weight.grad is not None for layer in (before, inside, behind))
        return
    with pytest.raises(GradientError, match="use_reentrant=False"):
        outputs.square().mean().backward()


def test_activation_checkpointing(comm, gpu):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        before, inside, behind = (nn.Linear(N_INPUTS, N_INPUTS) for _ in range(3))
    inputs, _ = global_batch(2, strategy.device)
    outputs = behind(checkpoint(inside, before(rows_of_rank(comm, inputs)), use_reentrant=False))
    (outputs.square().sum() / N_ROWS).backward()
    layers = nn.Sequential(before, inside, behind)
    summed = [parameter.grad.clone() for parameter in layers.parameters()]
    alone = nn.Sequential(*(nn.Linear(N_INPUTS, N_INPUTS) for _ in layers)).to(strategy.device)
    alone.load_state_dict(layers.state_dict())
    (alone(inputs).square().sum() / N_ROWS).backward()
    assert_close(summed, [parameter.grad for parameter in alone.parameters()], 1e-3)


def test_what_computes_on_the_host_only_says_so(comm, gpu):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model(strategy.device)
        optimizer = hpcdist.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def step():
        model(torch.full((2, N_INPUTS), comm.rank + 1.0, device=strategy.device)).sum().backward()
        optimizer.step()

    if comm.size == 1:  # one rank shares nothing
        step()
        return
    with pytest.raises(UsageError, match="keep it on the CPU|device='cpu'"):
        step()
