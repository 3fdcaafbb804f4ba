"""DataLoaders that pin memory and have workers, beside a GPU in use. Right for any number of ranks and GPUs."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import hpcdist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.*expected NCCL and a GPU for each rank.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a launcher may bind each rank to one core
]

N_ROWS = 24


class Rows(Dataset):
    """Rows that hold their number, read without CUDA."""

    def __len__(self):
        return N_ROWS

    def __getitem__(self, row):
        return torch.tensor([float(row), 1.0]), row


@pytest.fixture
def strategy(comm, cupy):
    if not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA, or finds no GPU")
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    torch.ones(8, device=strategy.device).sum().item()  # what a worker is forked beside
    return strategy


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
    ],
    ids=["no workers", "workers", "persistent", "forkserver"],
)
def test_pinned_parts_arrive_on_the_device(comm, strategy, settings):
    loader = DataLoader(Rows(), 8, shuffle=True, pin_memory=True, **settings)
    batches = strategy.experimental_distribute_dataset(loader)
    for _ in range(2):
        own_rows = []
        for inputs, rows in batches:
            assert inputs.device == rows.device == strategy.device
            assert torch.equal(inputs[:, 0], rows.float())
            own_rows += rows.tolist()
        assert sorted(sum(comm.allgather(own_rows), [])) == list(range(N_ROWS))


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_weighted_sampler_resumes_with_the_same_rows(comm, strategy, shared_path, n_workers):
    def run():
        sampler = WeightedRandomSampler(torch.arange(N_ROWS) + 1.0, N_ROWS)
        loader = DataLoader(Rows(), 4, sampler=sampler, num_workers=n_workers, pin_memory=True)
        with strategy.scope():
            model = torch.nn.Linear(2, 1).to(strategy.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = strategy.experimental_distribute_dataset(loader)
        saved = hpcdist.Checkpoint(model=model, optimizer=optimizer, batches=batches, strategy=strategy)
        return model, optimizer, batches, hpcdist.CheckpointManager(saved, shared_path / "run")

    def train(pieces, saved_after=None):
        """Return the rows of each step of a pass, and the weights at its end."""
        model, optimizer, batches, manager = pieces
        rows = []
        for inputs, numbers in batches:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            rows.append(numbers.tolist())
            if len(rows) == saved_after:
                manager.save(saved_after)
        return rows, [parameter.detach().clone() for parameter in model.parameters()]

    hpcdist.set_random_seed(7)
    unbroken = run()
    rows, weights = train(unbroken, saved_after=2)
    unbroken[3].wait()
    resumed = run()
    resumed[3].restore_or_initialize()
    resumed_rows, resumed_weights = train(resumed)
    assert resumed_rows == rows[2:]
    assert all(torch.equal(weight, right) for weight, right in zip(resumed_weights, weights, strict=True))


def test_the_programs_own_loader_reads_beside_the_gpu(comm, strategy):
    sampler = hpcdist.DistributedSampler(Rows(), seed=3)
    loader = DataLoader(Rows(), 4, sampler=sampler, num_workers=2, pin_memory=True)
    rows = []
    for inputs, numbers in loader:
        assert inputs.is_pinned()
        on_device = inputs.to(strategy.device, non_blocking=True)
        assert torch.equal(on_device[:, 0].cpu(), numbers.float())
        rows += numbers.tolist()
    assert set(sum(comm.allgather(rows), [])) == set(range(N_ROWS))
