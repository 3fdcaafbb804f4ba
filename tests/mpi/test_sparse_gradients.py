"""Sparse gradients of embeddings: the rows of all replicas are added, and the weights are those of one process."""

import pytest
import torch
from local_replicas import Strategy
from torch import nn

import hpcdist
from hpcdist.collectives import library
from hpcdist.errors import GradientError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch's own Adagrad makes it
]

N_ROWS = 40
WIDTH = 3


class Table(nn.Module):
    """An embedding and a dense layer; `reuse` multiplies by the whole embedding too, so that its gradient is dense."""

    def __init__(self, is_sparse=True, kind=nn.Embedding, dtype=torch.float64, reuse=False):
        super().__init__()
        self.table = kind(N_ROWS, WIDTH, sparse=is_sparse, dtype=dtype)
        self.dense = nn.Linear(WIDTH, 1, dtype=dtype)
        self.reuse = reuse

    def forward(self, numbers):
        rows = self.table(numbers)
        outputs = self.dense(rows.reshape(len(numbers), -1, WIDTH).sum(1))[:, 0]
        if self.reuse:
            return outputs + (rows.sum(1) @ self.table.weight.T).sum(1)
        return outputs


def make(strategy, optimizer, lr=0.1, **options):
    torch.manual_seed(5)
    with strategy.scope():
        model = Table(**options)
        sparse = list(model.table.parameters())
        dense = list(model.dense.parameters())
        if optimizer is torch.optim.SparseAdam:
            return model, [optimizer(sparse, lr=lr), torch.optim.SGD(dense, lr=lr)]
        return model, [optimizer(model.parameters(), lr=lr)]


def numbers_of(step, n=8):
    """Return the same numbers of rows on every rank, some of them twice."""
    return torch.randint(N_ROWS, (n, 2), generator=torch.Generator().manual_seed(step))


def numbers_without_repeats(n):
    """Return rows of which three in a row have six different numbers: half precision adds repeated ones otherwise."""
    generator = torch.Generator().manual_seed(2)
    return torch.cat([torch.randperm(N_ROWS, generator=generator)[:6].view(3, 2) for _ in range(-(-n // 3))])[:n]


def alone(optimizer, n_steps, loss_of, **options):
    """Return the weights of one process that has the whole batch."""
    model, optimizers = make(hpcdist.get_strategy(), optimizer, **options)
    for step in range(n_steps):
        model.zero_grad()
        loss_of(model(numbers_of(step)), step).backward()
        for model_optimizer in optimizers:
            model_optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def mean_square(outputs, step):
    return (outputs - step).square().mean()


@pytest.mark.feature("collectives.sparse-gradients", "semantics.transport-of-gradients")
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("hosts", [None, "1 each", "2 each"])
def test_weights_are_those_of_one_process(comm, over_hosts, optimizer, hosts):
    over_hosts(hosts)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, optimizers = make(strategy, optimizer)
    for step in range(6):
        model.zero_grad()
        local_numbers = numbers_of(step)[comm.rank :: comm.size]
        if len(local_numbers):
            ((model(local_numbers) - step).square().sum() / 8).backward()
        else:
            (model(numbers_of(step)[:1]).sum() * 0).backward()
        for model_optimizer in optimizers:
            model_optimizer.step()
    for parameter, expected in zip(model.parameters(), alone(optimizer, 6, mean_square), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


def test_gradient_has_the_rows_that_ranks_have_used_and_no_others(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, _ = make(strategy, torch.optim.SGD)
    model(torch.tensor([[1, 2 + comm.rank]])).sum().backward()
    gradient = model.table.weight.grad
    if comm.size == 1:
        gradient = gradient.coalesce()
    assert gradient.is_sparse
    assert gradient.is_coalesced()
    assert gradient.indices()[0].tolist() == [1, *range(2, 2 + comm.size)]
    torch.testing.assert_close(gradient.values()[0], comm.size * model.dense.weight.detach()[0])


def test_only_some_ranks_have_a_gradient(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, (optimizer,) = make(strategy, torch.optim.SGD)
    model(numbers_of(0))
    for step in range(3):
        optimizer.zero_grad()
        rank = step % comm.size
        if comm.rank == rank:
            loss = model(torch.tensor([[7, 7]])).sum()
        else:
            loss = model.dense.weight.sum()
        loss.backward()
        gradient = model.table.weight.grad.coalesce()
        assert gradient.indices().tolist() == [[7]]
        torch.testing.assert_close(gradient.values()[0], 2 * model.dense.weight.detach()[0])
    optimizer.zero_grad()
    model.dense.weight.sum().backward()
    assert model.table.weight.grad is None


@pytest.mark.feature("collectives.sparse-gradients")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_are_those_of_dense_gradients_on_any_number_of_ranks(comm, kind, dtype):
    def gradients(is_sparse):
        strategy = Strategy(num_replicas=6)
        model, (optimizer,) = make(strategy, torch.optim.SGD, is_sparse=is_sparse, kind=kind, dtype=dtype)

        def step(numbers):
            optimizer.zero_grad()
            (model(numbers).square().sum() / 18).backward()

        if dtype is torch.bfloat16:
            rows = numbers_without_repeats(70)
        else:
            rows = numbers_of(3, 70)
        data = hpcdist.Dataset.from_tensor_slices(rows).batch(18)  # the last batch, of 16, leaves replica 5 one row
        batch_gradients = []
        for part in strategy.experimental_distribute_dataset(data):
            strategy.run(step, args=(part,))
            assert model.table.weight.grad.is_sparse == is_sparse
            batch_gradients.append(model.table.weight.grad.to_dense().clone())
        return batch_gradients

    sparse_gradients = gradients(is_sparse=True)
    for gradient, expected in zip(sparse_gradients, gradients(is_sparse=False), strict=True):
        assert torch.equal(gradient, expected)
    digests = comm.allgather([gradient.view(torch.uint8).numpy().tobytes() for gradient in sparse_gradients])
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize("num_replicas", [None, 4])
def test_mean_is_weighted_by_rows(comm, num_replicas):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean", num_replicas=num_replicas)
    model, (optimizer,) = make(strategy, torch.optim.SGD)

    def step(numbers):
        optimizer.zero_grad()
        if len(numbers):
            loss = model(numbers).square().mean()
        else:
            loss = model(numbers_of(0)).sum() * float("nan")
        loss.backward()
        optimizer.step()

    data = hpcdist.Dataset.from_tensor_slices(numbers_of(4, 7)).batch(7)
    for part in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=(part,))
    plain_model, (plain,) = make(hpcdist.get_strategy(), torch.optim.SGD)
    plain_model(numbers_of(4, 7)).square().mean().backward()
    plain.step()
    torch.testing.assert_close(model.table.weight.detach(), plain_model.table.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hosts", [None, "1 each"])
def test_where_the_table_is_used_densely_too_the_sum_is_dense(comm, over_hosts, hosts):
    """One rank alone uses the whole table: what the others have is added to its dense gradient."""
    over_hosts(hosts)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, (optimizer,) = make(strategy, torch.optim.SGD, reuse=True)
    model.reuse = comm.rank == comm.size - 1
    for step in range(2):
        optimizer.zero_grad()
        model(numbers_of(step)).sum().backward()
        optimizer.step()
    assert not model.table.weight.grad.is_sparse
    plain_model, (plain,) = make(hpcdist.get_strategy(), torch.optim.SGD, reuse=True)
    for step in range(2):
        plain.zero_grad()
        for rank in range(comm.size):
            plain_model.reuse = rank == comm.size - 1
            plain_model(numbers_of(step)).sum().backward()
        plain.step()
    torch.testing.assert_close(model.table.weight.detach(), plain_model.table.weight.detach(), rtol=1e-12, atol=1e-12)


def test_backwards_accumulate(comm):
    """Sums of two backwards, and local gradients of two under no_sync, are added row by row."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, (optimizer,) = make(strategy, torch.optim.SGD)
    model(numbers_of(0)).sum().backward()
    model((numbers_of(1) + comm.rank) % N_ROWS).sum().backward()
    twice = model.table.weight.grad.to_dense()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.table.weight += 0.1 * twice
        model.dense.weight.copy_(make(hpcdist.get_strategy(), torch.optim.SGD)[0].dense.weight)
    with strategy.no_sync():
        model(numbers_of(0)).sum().backward()
    model((numbers_of(1) + comm.rank) % N_ROWS).sum().backward()
    torch.testing.assert_close(model.table.weight.grad.to_dense(), twice, rtol=1e-12, atol=1e-12)
    expected = torch.zeros_like(twice)
    for rank in range(comm.size):
        for numbers in (numbers_of(0), (numbers_of(1) + rank) % N_ROWS):
            expected.index_add_(0, numbers.reshape(-1), model.dense.weight.detach().expand(numbers.numel(), -1))
    torch.testing.assert_close(twice, expected, rtol=1e-12, atol=1e-12)


def test_a_step_on_a_local_sparse_gradient_is_refused(comm):
    if comm.size == 1:
        return
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, (optimizer,) = make(strategy, torch.optim.SGD)
    model(numbers_of(0))
    with strategy.no_sync():
        model(numbers_of(0)).sum().backward()
    with pytest.raises(GradientError, match="gradients.*replicas"):
        optimizer.step()


def test_a_sparse_gradient_of_a_layer_that_does_not_say_so_is_refused(comm):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(N_ROWS, WIDTH))

        def forward(self, numbers):
            return nn.functional.embedding(numbers, self.weight, sparse=True)

    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = Hidden()
    if comm.size > 1:
        with pytest.raises(GradientError, match="attribute.*sparse.*True"):
            model(numbers_of(0)).sum().backward()
    with strategy.scope():
        model = Hidden()
        model.sparse = True
    model(numbers_of(0)).sum().backward()
    assert model.weight.grad.is_sparse


def test_replicas_may_change_their_gradients_in_a_merge(comm):
    strategy = Strategy(num_replicas=2 * comm.size)
    model, (optimizer,) = make(strategy, torch.optim.SGD, lr=1.0)
    before = model.table.weight.detach().clone()

    def step(numbers):
        optimizer.zero_grad()
        model(numbers).sum().backward()
        context = hpcdist.get_replica_context()
        context.merge_call(lambda strategy, _: model.table.weight.grad.mul_(0.5), args=(numbers,))
        optimizer.step()

    slope = model.dense.weight.detach()[0].clone()
    strategy.run(step, args=(torch.tensor([[4, 4]]),))
    torch.testing.assert_close(before[4] - model.table.weight.detach()[4], 2 * comm.size * slope)


def test_large_rows_go_in_pieces(comm, monkeypatch):
    monkeypatch.setattr(library, "PIECE_BYTES", 64)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, _ = make(strategy, torch.optim.SGD)
    local_numbers = numbers_of(comm.rank)
    model(local_numbers).sum().backward()
    expected = torch.zeros(N_ROWS, WIDTH, dtype=torch.float64)
    for rank in range(comm.size):
        numbers = numbers_of(rank).reshape(-1)
        expected.index_add_(0, numbers, model.dense.weight.detach().expand(len(numbers), -1))
    torch.testing.assert_close(model.table.weight.grad.to_dense(), expected, rtol=1e-12, atol=1e-12)
