"""ParameterServerStrategy on real ranks: what workers see, what servers do, and checkpoints between them."""

import itertools

import numpy as np
import pytest
import torch
from sklearn import datasets as sklearn_datasets
from torch import nn
from torch.nn.utils import parameters_to_vector

import hpcdist
from hpcdist.errors import ConfigurationError, GradientError, NotFiniteError, UsageError
from hpcdist.runtime.step_flags import Request
from hpcdist.strategy import parameter_server
from hpcdist.training import optimizers

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def on_servers(comm):
    """Return run(body, entries, **options): body(strategy) on the workers, while the other ranks serve.

    Of 2 and 3 ranks one serves, of 4 two. With `entries`, the number of the worker entry of each rank, rank 0 serves.
    """
    if comm.size == 1:
        pytest.skip("servers need a rank of their own")
    n_servers = comm.size // 2 if comm.size > 3 else 1

    def run(body, entries=None, **options):
        resolver = hpcdist.MPIClusterResolver(roles=f"ps:{n_servers},worker:*")
        if entries is not None:
            workers = [f"host{number}:1" for number in sorted(set(entries[1:]))]
            spec = hpcdist.ClusterSpec({"ps": ["host0:2"], "worker": workers})
            if comm.rank == 0:
                task = ("ps", 0)
            else:
                task = ("worker", entries[comm.rank])
            resolver = hpcdist.SimpleClusterResolver(spec, *task)
        result = error = left_with = None
        try:
            strategy = hpcdist.ParameterServerStrategy(resolver, **options)
        except SystemExit as server_exit:
            left_with = server_exit.code
        else:
            try:
                result = body(strategy)
            except Exception as caught:  # the servers go on with the test, and would wait for this rank
                error = caught
            strategy._client.leave(0)
        if error is None:
            error_text = None
        else:
            error_text = f"rank {comm.rank}: {error!r}"
        rank_errors = comm.allgather(error_text)
        if error is not None:
            raise error
        assert not any(rank_errors), rank_errors
        assert left_with == (0 if comm.rank < (n_servers if entries is None else 1) else None)
        return result

    run.n_servers = n_servers
    run.n_workers = comm.size - n_servers
    return run


@pytest.fixture(params=["of one node", "of several nodes"])
def across(request, monkeypatch):
    """Let ranks share memory, or all messages go by MPI and pushes in parts of a few rows."""
    if request.param == "of several nodes":
        monkeypatch.setattr(parameter_server, "find_neighbours", lambda comm: [])
        monkeypatch.setattr(parameter_server, "CHUNK_BYTES", 64)
    return request.param


def make_model(strategy, make_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02), seed=4):
    with strategy.scope():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        return model, make_optimizer(model.parameters())


def batch_of(step, rank, size, rows=12):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(step))
    return x[rank::size]


def train(strategy, model, optimizer, steps, scheduler=None):
    for step in steps:
        x = batch_of(step, strategy.rank, strategy.size)
        optimizer.zero_grad()
        losses = (model(x) - x.sum(1, keepdim=True)).square()[:, 0]
        with strategy.scope():  # strategies of other tests may not be gone yet
            loss = hpcdist.compute_average_loss(losses, global_batch_size=12)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return parameters_to_vector(model.parameters()).detach()


OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "AdamW in groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameter, "lr": 0.01 * (1 + number)} for number, parameter in enumerate(parameters)],
        weight_decay=0.1,
    ),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    **{f"{name} of Keras": optimizers.with_rate(name, 0.05) for name in ("adam", "rmsprop", "adamax")},
}


@pytest.mark.feature(
    "parameter-servers.partitioners",
    "parameter-servers.round-robin-placement",
    "parameter-servers.optimizer-on-the-server",
)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("n_shards", [None, 2])
def test_synchronous_training_has_the_bits_of_the_all_reduce(comm, on_servers, across, make_optimizer, n_shards):
    if n_shards is None:
        partitioner = None
    else:
        partitioner = hpcdist.FixedShardsPartitioner(n_shards)

    def body(strategy):
        model, optimizer = make_model(strategy, make_optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(strategy, model, optimizer, range(6), scheduler)
        return weights(model)

    server_weights = on_servers(body, synchronous=True, variable_partitioner=partitioner)
    if server_weights is not None:
        color = 0
    else:
        color = 1
    workers = comm.Split(color, comm.rank)
    if server_weights is not None:  # the same program on the workers alone
        strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles="worker:*", comm=workers))
        assert torch.equal(body(strategy), server_weights)
    workers.Free()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_chunks_of_a_shard_have_the_bits_of_the_all_reduce_also_from_a_checkpoint(
    comm, on_servers, monkeypatch, shared_path, kind
):
    """Between nodes 64 rows of 32 bytes are 32 chunks, each answered by itself; Adafactor needs its variables whole."""

    def body(strategy, steps=range(6), is_saved=False, is_restored=False):
        with strategy.scope():
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
            optimizer = kind(model.parameters(), lr=0.02)
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
        if is_restored:
            manager.restore_or_initialize()
        train(strategy, model, optimizer, steps)
        if is_saved:
            manager.save(steps[-1] + 1)
        return weights(model)

    monkeypatch.setattr(parameter_server, "find_neighbours", lambda comm: [])
    monkeypatch.setattr(parameter_server, "CHUNK_BYTES", 64)
    on_servers(lambda strategy: body(strategy, range(3), is_saved=True), synchronous=True)
    server_weights = on_servers(lambda strategy: body(strategy, range(3, 6), is_restored=True), synchronous=True)
    if server_weights is not None:
        color = 0
    else:
        color = 1
    workers = comm.Split(color, comm.rank)
    if server_weights is not None:
        strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles="worker:*", comm=workers))
        assert torch.equal(body(strategy), server_weights)
    workers.Free()


@pytest.mark.feature("tf.parameterserverstrategy-tensorflow-1", "strategies.parameter-server-each-worker-loops")
def test_one_worker_alone_is_plain_training(comm, on_servers, across):
    """Asynchronous, too: each push is a step of the optimizer."""

    def body(strategy):
        if strategy.size > 1:
            return
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(5))
        plain, own_optimizer = make_model(hpcdist.get_strategy())
        for step in range(5):
            x = batch_of(step, 0, 1)
            own_optimizer.zero_grad()
            ((plain(x) - x.sum(1, keepdim=True)).square().sum() / 12).backward()
            own_optimizer.step()
        torch.testing.assert_close(weights(model), weights(plain))

    on_servers(body)


@pytest.mark.feature(
    "tf.parameterserverstrategy-tensorflow-1",
    "strategies.parameter-server-strategy",
    "strategies.parameter-server-each-worker-loops",
    "parameter-servers.load-aware-placement",
    "parameter-servers.asynchronous-push-and-pull",
    "parameter-servers.staleness-report",
)
@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"placement": "bytes"}], ids=str)
def test_workers_learn_digits_together(on_servers, options):
    images, labels = sklearn_datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images = torch.tensor(images[order] / 16, dtype=torch.float32)
    labels = torch.tensor(labels[order])

    def body(strategy):
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        dataset = hpcdist.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(seed=1).batch(60)
        for _ in range(16):
            for x, y in strategy.experimental_distribute_dataset(dataset):
                optimizer.zero_grad()
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
                with strategy.scope():
                    loss = hpcdist.compute_average_loss(losses)  # of this worker's rows: num_replicas_in_sync is 1
                loss.backward()
                optimizer.step()
        strategy.refresh()
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        return right, strategy.statistics(), strategy.size

    outcome = on_servers(body, **options)
    if outcome is not None:
        right, counts, n_workers = outcome
        print(f"accuracy {right:.3f}, staleness {counts['staleness']}")
        assert counts["pushes"] == 16 * 25 * n_workers
        assert right > 0.94


@pytest.mark.feature("parameter-servers.sharded-variable")
def test_embeddings_push_and_pull_the_rows_that_were_used(on_servers, across):
    """Each worker uses rows of its own; both have all of them in the end."""

    def body(strategy):
        with strategy.scope():
            torch.manual_seed(2)
            table = nn.Embedding(100, 4, sparse=True)
            optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        before = table.weight.detach().clone()
        used = torch.tensor([strategy.rank, 50 + strategy.rank])
        table(used).sum().backward()
        optimizer.step()
        strategy.refresh()
        changed = (table.weight != before).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted([*range(strategy.size), *range(50, 50 + strategy.size)])

    on_servers(body, variable_partitioner=hpcdist.FixedShardsPartitioner(3))


def test_bfloat16_scalars_frozen_and_unused_parameters(on_servers, across):
    def body(strategy):
        with strategy.scope():
            torch.manual_seed(2)
            half = nn.Linear(3, 2).bfloat16()
            scale = nn.Parameter(torch.tensor(2.0))
            frozen = nn.Linear(2, 2)
            unused = nn.Linear(2, 2)
            frozen.requires_grad_(False)
            optimizer = torch.optim.SGD([*half.parameters(), scale, *frozen.parameters(), *unused.parameters()], lr=0.5)
        before = [parameter.detach().clone() for parameter in (half.weight, scale, frozen.weight, unused.weight)]
        (half(torch.ones(1, 3).bfloat16()).float().sum() * scale).backward()
        optimizer.step()
        after = (half.weight, scale, frozen.weight, unused.weight)
        assert [not torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, True, False, False]
        assert half.weight.dtype is torch.bfloat16
        assert unused.weight.grad is None
        assert scale.grad is not None, "gradients stay"

    on_servers(body)


def test_a_second_model_and_optimizer(on_servers):
    def body(strategy):
        first, optimizer = make_model(strategy)
        train(strategy, first, optimizer, range(2))
        second, second_optimizer = make_model(strategy, OPTIMIZERS["SGD with momentum"], seed=9)
        before = weights(first).clone()
        strategy.barrier()
        strategy.refresh()
        before = weights(first).clone()
        train(strategy, second, second_optimizer, range(2))
        strategy.refresh()
        assert torch.equal(weights(first), before), "each optimizer steps its own"

    on_servers(body)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.feature(
    "parameter-servers.sharded-variable", "parameter-servers.other-number-of-shards", "semantics.partition-division"
)
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_checkpoint_is_one_state_and_loads_with_other_shards(comm, on_servers, across, shared_path, synchronous):
    def saved(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(4))
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
        manager.save(4)
        manager.wait()
        return weights(model), optimizer.state_dict()["state"] if strategy.is_chief else None

    def restored(strategy):
        model, optimizer = make_model(strategy, seed=7)
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
        assert manager.restore_or_initialize().endswith("step-00000004-0001.h5")
        model(torch.ones(1, 3))
        before = weights(model)
        optimizer.step()  # without gradients: nothing changes, and servers have the states from here on
        strategy.engine.managed.storage.refresh([optimizer])
        assert torch.equal(weights(model), before)
        manager.check_equal()
        return before, optimizer.state_dict()["state"] if strategy.is_chief else None

    saved_state = on_servers(saved, synchronous=synchronous)
    restored_state = on_servers(
        restored, synchronous=synchronous, variable_partitioner=hpcdist.FixedShardsPartitioner(3)
    )
    if saved_state is not None:
        assert torch.equal(saved_state[0], restored_state[0])
        if saved_state[1] is not None:
            assert saved_state[1].keys() == restored_state[1].keys()
            for number, state in saved_state[1].items():
                assert all(torch.equal(value, restored_state[1][number][name]) for name, value in state.items())


@pytest.mark.feature("parameter-servers.other-number-of-shards")
def test_training_goes_on_from_a_checkpoint_with_the_bits_of_an_unbroken_run(on_servers, across, shared_path):
    def run(strategy, until, first, is_new):
        model, optimizer = make_model(strategy)
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
        if not is_new:
            manager.restore_or_initialize()
        train(strategy, model, optimizer, range(first, until))
        if is_new and until == 3:
            manager.save(3)
            manager.wait()
        return weights(model)

    two = hpcdist.FixedShardsPartitioner(2)
    unbroken = on_servers(lambda strategy: run(strategy, 6, 0, True), synchronous=True)
    on_servers(lambda strategy: run(strategy, 3, 0, True), synchronous=True, variable_partitioner=two)
    resumed = on_servers(lambda strategy: run(strategy, 6, 3, False), synchronous=True)
    if unbroken is not None:
        assert torch.equal(unbroken, resumed)


def test_a_checkpoint_that_is_read_in_training_is_what_servers_have(on_servers, across, shared_path):
    def body(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(2))
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
        path = manager.save(2)
        manager.wait()
        before = weights(model)
        train(strategy, model, optimizer, range(2, 4))
        checkpoint.read(path)
        assert torch.equal(weights(model), before)
        optimizer.zero_grad()
        optimizer.step()
        strategy.refresh()
        assert torch.equal(weights(model), before)
        versions = list(itertools.chain.from_iterable(strategy.statistics()["versions"]))
        assert min(versions) >= 1

    on_servers(body)


def test_all_reduce_runs_load_what_servers_saved(comm, on_servers, shared_path):
    def saved(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(2))
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
        manager.save(2)
        manager.wait()
        return weights(model)

    saved_weights = on_servers(saved)
    path = hpcdist.latest_checkpoint(shared_path / "run")
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    model, optimizer = make_model(strategy, seed=8)
    hpcdist.load_checkpoint(path, model=model, optimizer=optimizer)
    if saved_weights is not None:
        assert torch.equal(weights(model), saved_weights)
    assert optimizer.state[model[0].weight]["step"] > 0


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_values_that_the_program_changes_are_an_error(on_servers):
    def body(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(1))
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        with pytest.raises(GradientError, match=r"'0.weight'"):
            train(strategy, model, optimizer, range(1))

    on_servers(body)


def test_gradients_that_are_not_finite(on_servers):
    def step(model, optimizer, value):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() * value).backward()
        optimizer.step()

    def rejected(strategy):
        model, optimizer = make_model(strategy)
        with pytest.raises(GradientError, match="gradients.*NaN.*infinity"):
            step(model, optimizer, float("nan"))

    def skipped(strategy):
        model, optimizer = make_model(strategy)
        model(torch.ones(1, 3))
        before = weights(model).clone()
        step(model, optimizer, float("inf"))
        strategy.refresh()
        assert torch.equal(weights(model), before)
        assert strategy.statistics()["skipped"] == 1
        strategy.barrier()
        step(model, optimizer, 1.0)
        assert not torch.equal(weights(model), before)

    on_servers(rejected)
    on_servers(skipped, non_finite="skip")


def test_a_loss_that_is_not_scaled_in_synchronous_training(on_servers):
    def body(strategy):
        if strategy.size == 1:
            return
        model, optimizer = make_model(strategy)
        model(torch.ones(1, 3)).mean().backward()
        with pytest.raises(GradientError, match="expected a loss scaled by hpcdist.compute_average_loss, as servers"):
            optimizer.step()

    on_servers(body, synchronous=True)


def test_optimizers_and_steps_that_servers_cannot_make(on_servers):
    def body(strategy):
        model, optimizer = make_model(strategy, lambda parameters: torch.optim.LBFGS(parameters))
        with pytest.raises(GradientError, match="closure.*parameter"):
            optimizer.step(lambda: model(torch.ones(1, 3)).sum())
        with strategy.scope():
            whole = torch.optim.Adafactor(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(UsageError, match="Adafactor.*variable_partitioner"):
            whole.step()
        outside = nn.Parameter(torch.ones(2))
        with strategy.scope():
            mixed = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
        outside.grad = torch.ones(2)
        with pytest.raises(GradientError, match=r"shape.*2.*server"):
            mixed.step()

    on_servers(body, variable_partitioner=hpcdist.FixedShardsPartitioner(2))


def test_parameters_that_an_optimizer_gets_later(on_servers):
    def body(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(1))
        with strategy.scope():
            later = nn.Linear(3, 1)
            optimizer.add_param_group({"params": later.parameters()})
        later(torch.ones(1, 3)).sum().backward()
        with pytest.raises(UsageError, match="Adam.*others"):
            optimizer.step()

    on_servers(body)


def test_a_scaler_and_a_second_strategy_are_refused(on_servers):
    def body(strategy):
        model, optimizer = make_model(strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(GradientError, match="GradScaler"):
            scaler.step(optimizer)
        with pytest.raises(ConfigurationError, match="ranks.*another"):
            strategy._check_cluster()

    on_servers(body)


def test_gradients_of_the_programs_own_are_pushed_as_they_are(on_servers):
    def body(strategy):
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(1, 2))
        before = model.weight.detach().clone()
        optimizer.apply_gradients([(torch.ones(1, 2), model.weight)])
        strategy.refresh()
        torch.testing.assert_close(model.weight.detach(), before - strategy.size)

    on_servers(body)


def test_a_model_alone_is_loaded_and_the_other_one_stays(on_servers, shared_path):
    def body(strategy):
        first, optimizer = make_model(strategy)
        second, second_optimizer = make_model(strategy, OPTIMIZERS["SGD with momentum"], seed=9)
        train(strategy, first, optimizer, range(2))
        train(strategy, second, second_optimizer, range(2))
        manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(model=first, strategy=strategy), shared_path / "run")
        path = manager.save(2)
        manager.wait()
        saved = weights(first).clone()
        train(strategy, first, optimizer, range(2))
        train(strategy, second, second_optimizer, range(2))
        strategy.refresh()
        second_weights = weights(second).clone()
        manager.checkpoint.read(path)
        strategy.refresh()
        assert torch.equal(weights(first), saved)
        assert torch.equal(weights(second), second_weights)
        strategy.engine.managed.storage.client.fetch_state(second_optimizer)
        assert second_optimizer.state[second[0].weight]["momentum_buffer"].abs().sum() > 0, "its state is still there"
        strategy.barrier()

    on_servers(body)


@pytest.mark.feature("parameter-servers.partitioners")
@pytest.mark.parametrize("shard_counts", [[0, 1], [1, 2], "2", [2.0, 1]], ids=str)
def test_partitioners_that_return_nonsense(on_servers, shard_counts):
    def body(strategy):
        model, _ = make_model(strategy)
        with pytest.raises(UsageError, match="variable_partitioner.*numbers.*shards"):
            model(torch.ones(1, 3))

    on_servers(body, variable_partitioner=lambda shape, dtype: shard_counts if len(shape) == 2 else [1])


@pytest.mark.parametrize(
    ("roles", "options", "text"),
    [
        ("worker:*", {}, "expected ps tasks, got worker:"),
        ("ps:*", {}, "expected worker tasks, got ps:"),
        ("ps:1,worker:*", {"max_staleness": -1}, "expected max_staleness of at least 0, got -1"),
        ("ps:1,worker:*", {"max_staleness": float("nan")}, "expected max_staleness of at least 0, got nan"),
        ("ps:1,worker:*", {"max_staleness": 1, "synchronous": True}, "expected max_staleness or synchronous, got both"),
        ("ps:1,worker:*", {"placement": "anywhere"}, "expected round_robin or bytes, got anywhere"),
        ("ps:1,worker:*", {"non_finite": "ignore"}, "expected reject or skip, got ignore"),
    ],
    ids=str,
)
def test_clusters_and_options_that_do_not_add_up(comm, roles, options, text):
    if comm.size == 1 and "ps:1" in roles:
        pytest.skip("two roles need two ranks")
    with pytest.raises(ConfigurationError, match=text):
        hpcdist.ParameterServerStrategy(hpcdist.MPIClusterResolver(roles=roles), **options)


@pytest.mark.feature("parameter-servers.exact-evaluation-beside-servers")
def test_metrics_and_values_are_those_of_all_workers(on_servers):
    def body(strategy):
        with strategy.scope():
            mean = hpcdist.metrics.Mean()
        strategy.run(lambda: mean.update_state([float(strategy.rank)]))
        assert mean.result() == (strategy.size - 1) / 2
        mean.reset_state()
        assert strategy.reduce("mean", torch.tensor(float(strategy.rank)), axis=None) == (strategy.size - 1) / 2
        assert strategy.gather(torch.tensor([strategy.rank]), axis=0).tolist() == [*range(strategy.size)]

    on_servers(body)


@pytest.mark.feature("parameter-servers.exact-evaluation-beside-servers", "semantics.input-of-parameter-servers")
def test_rows_are_divided_as_by_an_all_reduce_strategy(on_servers):
    def body(strategy):
        dataset = hpcdist.Dataset.from_tensor_slices(np.arange(12)).batch(6)
        local_batches = [part.tolist() for part in strategy.experimental_distribute_dataset(dataset)]
        parts = strategy.world.role_comm.allgather(local_batches)
        assert [sorted(sum((part[step] for part in parts), [])) for step in range(2)] == [[*range(6)], [*range(6, 12)]]
        assert strategy.num_replicas_in_sync == 1

    on_servers(body)


# -- several ranks of one worker entry --------------------------------------------------------------------------------


@pytest.fixture
def in_entries(comm, on_servers):
    """Return run(body, **options): of 3 or 4 ranks all but rank 0 are worker 0; of 5, two each are workers 0 and 1."""
    if comm.size < 3:
        pytest.skip("a server and a worker with two ranks")

    def run(body, **options):
        if comm.size == 5:
            entries = [0, 0, 0, 1, 1]
        else:
            entries = [0] * comm.size
        result = on_servers(body, entries=entries, **options)
        comm.Barrier()
        return result

    return run


@pytest.mark.feature("parameter-servers.replicas-of-a-worker")
def test_ranks_of_an_entry_are_one_worker(comm, in_entries, across):
    """Their steps are those of one worker with the rows of both; their values are always the same."""

    def body(strategy):
        model, optimizer = make_model(strategy)
        n_replicas = strategy.num_replicas_in_sync
        if comm.size == 5:
            expected_replicas = 2
        else:
            expected_replicas = comm.size - 1
        assert n_replicas == expected_replicas
        for step in range(5):
            train(strategy, model, optimizer, [step])
            replica_bytes = strategy._entry_comm.allgather(weights(model).numpy().tobytes())
            assert len(set(replica_bytes)) == 1
        strategy.refresh()
        counts = strategy.statistics()
        assert bool(counts) == (strategy._entry_comm.rank == 0)
        if comm.size == 5:
            n_pushes = 10
        else:
            n_pushes = 5
        assert counts.get("pushes", 0) in (0, n_pushes)
        return weights(model), strategy.size

    result = in_entries(body)
    if comm.size == 5 or result is None:
        return
    server_weights, size = result
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(size):
            x = batch_of(step, rank, size)
            ((model(x) - x.sum(1, keepdim=True)).square().sum() / 12).backward()
        optimizer.step()
    torch.testing.assert_close(server_weights, weights(model), rtol=0, atol=1e-6)


def test_an_entry_joins_rows_and_keeps_what_none_of_its_ranks_used(comm, in_entries, across):
    def body(strategy):
        with strategy.scope():
            torch.manual_seed(2)
            table = nn.Embedding(50, 4, sparse=True)
            once = nn.Linear(4, 1)
            never = nn.Linear(4, 1)
            dense_parameters = [*once.parameters(), *never.parameters()]
            optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.1), torch.optim.SGD(dense_parameters, lr=0.1)]
        before = [parameter.detach().clone() for parameter in (table.weight, once.weight, never.weight)]
        rows = table(torch.tensor([strategy.rank, 20 + strategy.rank]))
        loss = once(rows).sum() if strategy.rank == 0 else rows.sum()
        with strategy.scope():
            hpcdist.compute_average_loss(loss[None], global_batch_size=1).backward()
        local_gradients = []
        for parameter in (table.weight, once.weight):
            if parameter.grad is None:
                local_gradients.append(None)
            else:
                local_gradients.append(parameter.grad.to_dense().clone())
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(table.weight.grad.to_dense(), local_gradients[0]), "a replica's own gradients stay"
        assert (once.weight.grad is None) == (strategy.rank != 0)
        strategy.refresh()
        changed = (table.weight != before[0]).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted([*range(strategy.size), *range(20, 20 + strategy.size)])
        assert not torch.equal(once.weight, before[1])
        assert torch.equal(never.weight, before[2])

    in_entries(body, variable_partitioner=hpcdist.FixedShardsPartitioner(2))


@pytest.mark.feature("parameter-servers.replicas-of-a-worker")
def test_one_replicas_error_is_that_of_its_entry(comm, in_entries):
    def body(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, [0])
        if comm.rank == 2:
            with torch.no_grad():
                model[0].weight += 1
        if 2 in strategy._entry_comm.allgather(comm.rank):
            with pytest.raises(GradientError, match="expected '0.weight' as the parameter servers gave it"):
                train(strategy, model, optimizer, [1])

    def of_nan(strategy):
        model, optimizer = make_model(strategy)
        with strategy.scope():
            if comm.rank == 2:
                factor = float("nan")
            else:
                factor = 1.0
            loss = model(torch.ones(1, 3))[:, 0] * factor
            hpcdist.compute_average_loss(loss, global_batch_size=1).backward()
        if 2 in strategy._entry_comm.allgather(comm.rank):
            with pytest.raises(NotFiniteError, match="expected finite gradients"):
                optimizer.step()

    in_entries(body)
    in_entries(of_nan)


def test_ranks_of_an_entry_save_and_load_one_state(comm, in_entries, shared_path):
    def body(strategy):
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(3))
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / "of_entries")
        manager.save(3)
        manager.wait()
        saved = weights(model).clone()
        train(strategy, model, optimizer, range(3, 5))
        assert not torch.equal(weights(model), saved)
        assert manager.restore_or_initialize()
        assert torch.equal(weights(model), saved)
        train(strategy, model, optimizer, [3])
        values = strategy._entry_comm.allgather(weights(model).numpy().tobytes())
        assert len(set(values)) == 1

    in_entries(body)


def test_a_stop_request_to_any_rank_of_an_entry_reaches_all(comm, in_entries):
    class Requester:
        def requested(self):
            if comm.rank == comm.size - 1:
                return Request.STOP
            return Request.NONE

        def note_unsafe_point(self):
            """Nothing waits here."""

    def body(strategy):
        model, optimizer = make_model(strategy)
        requester = Requester()
        flags = strategy.world.step_flags
        flags.attach(requester)
        step_requests = []
        for step in range(4):
            train(strategy, model, optimizer, [step])
            step_requests.append(flags.take())
            strategy.barrier()
        flags.detach(requester)
        assert Request.STOP in step_requests[1], step_requests

    in_entries(body)


def test_statistics_of_batches_are_a_replicas_own(comm, in_entries):
    """An entry's ranks step together, and those of other entries do not."""

    def body(strategy):
        with strategy.scope():
            layer = hpcdist.SyncBatchNorm(2)
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(strategy.rank)) + strategy.rank
        plain = nn.BatchNorm1d(2)
        if comm.size == 5:
            torch.testing.assert_close(layer(x), plain(x))

    in_entries(body)


def test_entries_of_other_sizes_are_refused(comm, on_servers):
    if comm.size != 4:
        pytest.skip("two entries of two ranks and one")
    spec = hpcdist.ClusterSpec({"ps": ["host0:2"], "worker": ["host0:1", "host1:1"]})
    task = [("ps", 0), ("worker", 0), ("worker", 0), ("worker", 1)][comm.rank]
    with pytest.raises(ConfigurationError, match="expected as many ranks in each worker entry, got worker 0 2, worker"):
        hpcdist.ParameterServerStrategy(hpcdist.SimpleClusterResolver(spec, *task))


def test_synchronous_training_takes_each_rank_of_an_entry_as_a_worker(comm, in_entries):
    """So that its bits are those of an all-reduce, in whichever entries ranks are."""

    def body(strategy):
        assert strategy.num_replicas_in_sync == strategy.size == comm.size - 1
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(3))
        return weights(model)

    server_weights = in_entries(body, synchronous=True)
    if server_weights is not None:
        color = 0
    else:
        color = 1
    workers = comm.Split(color, comm.rank)
    if server_weights is not None:
        strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles="worker:*", comm=workers))
        model, optimizer = make_model(strategy)
        train(strategy, model, optimizer, range(3))
        assert torch.equal(server_weights, weights(model))
