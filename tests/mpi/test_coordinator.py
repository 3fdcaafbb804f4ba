"""ClusterCoordinator on real ranks: what functions see and leave behind, results, errors, resources of workers."""

import functools
import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import hpcdist
from hpcdist.errors import ClosureCancelledError, ClosureInputError, ConfigurationError, GradientError, UsageError
from hpcdist.strategy.base import live_strategies

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture(autouse=True)
def nothing_alive():
    """Check that strategies end with their tests: losses of other tests look for those that are alive."""
    yield
    gc.collect()
    assert not [strategy for strategy in live_strategies() if isinstance(strategy, hpcdist.ParameterServerStrategy)]


@pytest.fixture
def coordinated(comm):
    """Return run(body, **options): body(coordinator) on one rank; one serves variables, the others functions."""
    if comm.size < 3:
        pytest.skip("a coordinator needs a parameter server and a worker")

    def run(body, **options):
        resolver = hpcdist.MPIClusterResolver(roles="ps:1,chief:1,worker:*")
        error = result = left_with = None
        if resolver.task_type == "chief":
            coordinator = hpcdist.ClusterCoordinator(hpcdist.ParameterServerStrategy(resolver, **options))
            try:
                result = body(coordinator)
            except Exception as caught:  # the others go on with the test, and would wait for this rank
                error = caught
            coordinator.leave(0)
        else:
            try:
                hpcdist.Server(resolver).join()
            except SystemExit as server_exit:
                left_with = server_exit.code
        if error is None:
            error_text = None
        else:
            error_text = repr(error)
        rank_errors = comm.allgather(error_text)
        if error is not None:
            raise error
        assert not any(rank_errors), rank_errors
        if comm.rank == 1:
            expected_code = None
        else:
            expected_code = 0
        assert left_with == expected_code
        return result

    run.n_workers = comm.size - 2
    return run


def make_model(strategy, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), layers=None):
    with strategy.scope():
        torch.manual_seed(4)
        model = nn.Sequential(*(layers() if layers else (nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))))
        return model, make_optimizer(model.parameters())


def rows(number, n=12):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(number))


def step_of(model, optimizer):
    """Return a function of a number: one step of training on the rows of that number."""

    def step(number):
        x = rows(number)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def weights(model):
    return parameters_to_vector(model.parameters()).detach()


# -- the guide -------------------------------------------------------------------------------------------------------


@pytest.mark.feature(
    "tf.parameterserverstrategy-cluster-resolver",
    "strategies.parameter-server-strategy",
    "parameter-servers.cluster-coordinator",
    "semantics.coordinator-is-one",
)
def test_the_guides_custom_loop_runs(coordinated):
    """ "Parameter server training with ParameterServerStrategy": a custom training loop, but for torch's modules."""
    feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]

    def body(coordinator):
        strategy = coordinator.strategy
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Embedding(len(feature_vocab) + 1, 16), nn.Flatten(), nn.Linear(48, 1), nn.Sigmoid()
            )
            optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003)
            accuracy = hpcdist.metrics.Accuracy()

        def dataset_fn(_):
            random = np.random.default_rng(1)
            features = random.integers(1, len(feature_vocab) + 1, (64, 3))
            labels = (features == 1).any(1, keepdims=True).astype(np.int64)
            dataset = hpcdist.Dataset.from_tensor_slices((torch.from_numpy(features), torch.from_numpy(labels)))
            return dataset.shuffle(64).batch(32).repeat()

        def step_fn(iterator):
            def replica_fn(batch_data, labels):
                optimizer.zero_grad()
                pred = model(batch_data)
                per_example_loss = nn.functional.binary_cross_entropy(pred, labels.float(), reduction="none")
                loss = hpcdist.compute_average_loss(per_example_loss)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                optimizer.apply_gradients(zip(gradients, model.parameters(), strict=True))
                actual_pred = torch.greater(pred, 0.5).to(torch.int64)
                accuracy.update_state(labels, actual_pred)
                return loss

            batch_data, labels = next(iterator)
            losses = strategy.run(replica_fn, args=(batch_data, labels))
            return strategy.reduce(hpcdist.ReduceOp.SUM, losses, axis=None)

        assert hpcdist.coordinator.ClusterCoordinator(strategy) is coordinator
        assert hpcdist.experimental.coordinator.ClusterCoordinator(strategy) is coordinator

        def per_worker_dataset_fn():
            return strategy.distribute_datasets_from_function(dataset_fn)

        per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
        per_worker_iterator = iter(per_worker_dataset)
        num_epochs = 4
        steps_per_epoch = 40
        accuracies = []
        for _ in range(num_epochs):
            accuracy.reset_states()
            for _ in range(steps_per_epoch):
                coordinator.schedule(step_fn, args=(per_worker_iterator,))
            coordinator.join()
            accuracies.append(accuracy.result().numpy())
        loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
        assert f"{loss.fetch():f}".startswith("0.")
        assert strategy.statistics()["pushes"] == 161
        assert accuracies[-1] > max(0.95, accuracies[0])

    coordinated(body)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.feature("parameter-servers.remote-values", "semantics.fetch-and-worker-datasets")
def test_results_are_tensors_by_get_and_arrays_by_fetch(coordinated):
    def body(coordinator):
        wide = torch.arange(1000.0)
        result = coordinator.schedule(
            lambda x, y: {"sum": x + y, "half": x.bfloat16(), "text": "a"}, (wide[:2],), {"y": 1}
        )
        outputs = result.get()
        assert torch.equal(outputs["sum"], torch.tensor([1.0, 2.0]))
        assert outputs["half"].dtype is torch.bfloat16
        fetched = coordinator.fetch((result, 7))
        assert isinstance(fetched[0]["sum"], np.ndarray)
        assert fetched[0]["half"].dtype == np.float32
        assert fetched[0]["text"] == "a"
        assert fetched[1] == 7
        assert coordinator.schedule(lambda: None).fetch() is None
        coordinator.join()
        assert coordinator.done()

    coordinated(body)


@pytest.mark.feature("parameter-servers.remote-values")
def test_as_many_functions_run_at_once_as_there_are_workers(coordinated):
    def body(coordinator):
        def slow():
            import time

            time.sleep(0.5)
            return hpcdist.current_worker_index()

        indices = [coordinator.schedule(slow) for _ in range(coordinated.n_workers)]
        assert sorted(coordinator.fetch(indices)) == list(range(coordinated.n_workers))
        with pytest.raises(RuntimeError, match="in a scheduled function"):
            hpcdist.coordinator.experimental_get_current_worker_index()

    coordinated(body)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.feature("semantics.join-and-errors")
@pytest.mark.parametrize("call", ["join", "schedule", "done"])
def test_the_first_error_is_raised_once_and_what_has_not_begun_is_cancelled(coordinated, call):
    def fail():
        raise KeyError("of the function")

    def body(coordinator):
        gate = coordinator.create_per_worker_resource(dict)

        def wait(_):
            import time

            time.sleep(1.0)

        for _ in range(coordinated.n_workers):
            coordinator.schedule(wait, (gate,))
        failing = coordinator.schedule(fail)
        queued_results = [coordinator.schedule(wait, (gate,)) for _ in range(4 * coordinated.n_workers)]
        with pytest.raises(KeyError, match="of the function"):
            failing.get()
        with pytest.raises(KeyError, match="of the function") as caught:
            coordinator.schedule(wait, (gate,)) if call == "schedule" else getattr(coordinator, call)()
        assert "in fail" in str(caught.value.__cause__)
        assert "worker " in str(caught.value.__cause__)
        assert coordinator.done()
        with pytest.raises(ClosureCancelledError, match="schedule it again"):
            queued_results[-1].fetch()
        assert coordinator.schedule(lambda: 5).fetch() == 5
        coordinator.join()

    coordinated(body)


def test_errors_that_cannot_travel_and_exits_are_told_as_text(coordinated):
    class Odd(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    def odd():
        raise Odd(1, 2)

    def leave():
        raise SystemExit(3)

    def body(coordinator):
        coordinator.schedule(odd)
        with pytest.raises(hpcdist.errors.HpcdistError, match="Odd: 1 and 2"):
            coordinator.join()
        coordinator.schedule(leave)
        with pytest.raises(UsageError, match="exits: 3"):
            coordinator.join()
        result = coordinator.schedule(threading.Lock)
        with pytest.raises(TypeError, match="pickle"):
            result.get()
        with pytest.raises(TypeError, match="pickle"):
            coordinator.join()

    coordinated(body)


@pytest.mark.feature("semantics.schedule-rules")
def test_what_cannot_be_sent_is_refused_by_schedule(coordinated):
    def body(coordinator):
        _, optimizer = make_model(coordinator.strategy)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        unscoped_layer = nn.Linear(2, 2)
        lock = threading.Lock()
        result = coordinator.schedule(lambda: 1)
        distributed = coordinator.strategy.experimental_distribute_dataset(
            hpcdist.Dataset.from_tensor_slices(np.arange(4)).batch(2)
        )
        refused = {
            "fetch it first": (lambda x: x, (result,)),
            "step it on the coordinator": (lambda: scheduler.step(), ()),
            "make it in the scope": (lambda: unscoped_layer(torch.zeros(2)), ()),
            "cannot pickle": (lambda: lock, ()),
            "create_per_worker_dataset": (lambda: next(iter(distributed)), ()),
        }
        for text, (function, args) in refused.items():
            with pytest.raises(UsageError, match=text):
                coordinator.schedule(function, args)
        with pytest.raises(UsageError, match="expected a function, got int"):
            coordinator.schedule(3)
        with pytest.raises(ValueError, match="RemoteValue"):
            coordinator.schedule(lambda x: x, kwargs={"x": [result]})
        coordinator.join()

    coordinated(body)


def test_what_a_failed_function_wrote_to_variables_does_not_stay(coordinated):
    def body(coordinator):
        model, _ = make_model(coordinator.strategy)

        def overwrite():
            with torch.no_grad():
                model[0].weight.fill_(7)
            return "done"

        coordinator.schedule(overwrite)
        with pytest.raises(GradientError, match="0.weight"):
            coordinator.join()
        before = model[0].weight.detach().clone()
        remote_values = [
            coordinator.schedule(lambda: model[0].weight.detach()) for _ in range(2 * coordinated.n_workers)
        ]
        assert all(torch.equal(remote_value.get(), before) for remote_value in remote_values)

    coordinated(body)


@pytest.mark.parametrize("non_finite", ["reject", "skip"])
def test_gradients_that_are_not_finite(coordinated, non_finite):
    def body(coordinator):
        model, optimizer = make_model(coordinator.strategy)

        def step():
            model(torch.full((1, 3), float("nan"))).sum().backward()
            optimizer.step()

        coordinator.schedule(step)
        if non_finite == "reject":
            with pytest.raises(GradientError, match="finite gradients"):
                coordinator.join()
        else:
            coordinator.join()
        assert bool(torch.isfinite(weights(model)).all())

    coordinated(body, non_finite=non_finite)


# -- functions ---------------------------------------------------------------------------------------------------------


def test_functions_are_as_the_program_has_them_whenever_they_are_scheduled(coordinated):
    """Also where they, or functions that they use, are sent once: from their second use on, if nothing changed."""

    def body(coordinator):
        scale = 1.0
        table = [0]
        calls = {"n": 0}

        def helper(x):
            return x * scale

        def by_helper(x):
            return helper(x) + table[0]

        def counting():
            calls["n"] += 1
            return calls["n"]

        def factorial(n):
            if n < 2:
                return 1
            return n * factorial(n - 1)

        for scale in (1.0, 2.0, 3.0):
            for value in (0, 10):
                table[0] = value
                outputs = coordinator.fetch([coordinator.schedule(by_helper, (2,)) for _ in range(4)])
                assert outputs == [2 * scale + value] * 4
                outputs = coordinator.fetch([coordinator.schedule(helper, (2,)) for _ in range(4)])
                assert outputs == [2 * scale] * 4
        assert coordinator.fetch([coordinator.schedule(counting) for _ in range(6)]) == [1] * 6
        assert coordinator.fetch([coordinator.schedule(factorial, (5,)) for _ in range(4)]) == [120] * 4

    coordinated(body)


# -- variables, modules, optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", [None, hpcdist.partitioners.FixedShardsPartitioner(2)])
def test_steps_one_after_another_have_the_bits_of_one_process(coordinated, partitioner):
    """Whichever workers make them; rates that a schedule sets on the coordinator travel with the functions."""

    def body(coordinator):
        model, optimizer = make_model(coordinator.strategy, lambda parameters: torch.optim.Adam(parameters, lr=0.02))
        alone, its_own = make_model(hpcdist.get_strategy(), lambda parameters: torch.optim.Adam(parameters, lr=0.02))
        schedules = [torch.optim.lr_scheduler.StepLR(each_optimizer, 2, 0.5) for each_optimizer in (optimizer, its_own)]
        step = step_of(model, optimizer)
        plain_step = step_of(alone, its_own)
        for number in range(8):
            loss = coordinator.schedule(step, (number,))
            coordinator.join()
            assert torch.equal(loss.get(), plain_step(number).detach())
            for schedule in schedules:
                schedule.step()
        assert torch.equal(weights(model), weights(alone))

    coordinated(body, variable_partitioner=partitioner)


@pytest.mark.feature("tf.parameterserverstrategy-cluster-resolver")
def test_every_push_is_applied_once_and_seen_after_join(coordinated):
    """Whole numbers add up exactly, in any order."""

    def body(coordinator):
        with coordinator.strategy.scope():
            counts = nn.ParameterList([nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(()))])
            optimizer = torch.optim.SGD(counts.parameters(), lr=1.0)

        def push(number):
            optimizer.zero_grad()
            ((counts[0] * -number).sum() - counts[1]).backward()
            optimizer.step()

        for first in (0, 50):
            for number in range(first, first + 50):
                coordinator.schedule(push, (number,))
            coordinator.join()
            total = sum(range(first + 50))
            assert counts[0].detach().tolist() == [total] * 7
            assert counts[1].item() == first + 50
            seen = [coordinator.schedule(lambda: counts[0][0].detach()) for _ in range(3 * coordinated.n_workers)]
            assert [float(remote_value.get()) for remote_value in seen] == [total] * len(seen)

    coordinated(body)


def test_modules_made_later_and_their_mode_travel(coordinated):
    def body(coordinator):
        strategy = coordinator.strategy
        first, _ = make_model(strategy, layers=lambda: (nn.Linear(3, 3), nn.Dropout(0.5)))
        assert coordinator.schedule(lambda: first.training).get()
        first.eval()
        later, optimizer = make_model(strategy)
        first_is_training = [coordinator.schedule(lambda: first.training) for _ in range(4)]
        assert not any(coordinator.fetch(first_is_training))
        first.train()
        assert coordinator.schedule(lambda: first[1].training).get()
        first.eval()
        assert not coordinator.schedule(lambda: first[1].training).get()
        coordinator.schedule(step_of(later, optimizer), (1,))
        coordinator.join()
        with strategy.scope():
            whole = nn.Sequential(first, nn.Linear(3, 1))
        assert coordinator.schedule(lambda: whole[0] is first).get()

    coordinated(body)


def test_random_numbers_follow_the_number_of_the_function_and_go_on_after_a_restart(coordinated, tmp_path, comm):
    folder = comm.bcast(str(tmp_path))

    def draw(coordinator, has_restored=False):
        model, optimizer = make_model(coordinator.strategy)
        checkpoint = hpcdist.Checkpoint(strategy=coordinator.strategy, model=model)
        manager = hpcdist.CheckpointManager(checkpoint, folder)
        if has_restored:
            manager.restore_or_initialize()

        def step(number):
            drawn = torch.rand(3)
            step_of(model, optimizer)(number)
            return drawn

        drawn = coordinator.fetch([coordinator.schedule(step, (number,)) for number in range(12)])
        coordinator.join()
        if not has_restored:
            manager.save(12)
        return set(map(tuple, drawn))

    first, second = (coordinated(draw) for _ in range(2))
    later = coordinated(lambda coordinator: draw(coordinator, has_restored=True))
    if comm.rank == 1:
        assert first == second
        assert len(first | later) == 24


def test_freezing_travels_and_unfreezing_what_workers_have_is_refused(coordinated):
    def body(coordinator):
        model, optimizer = make_model(coordinator.strategy)
        with coordinator.strategy.scope():
            teacher = nn.Linear(3, 1)
            teacher.requires_grad_(False)
        step = step_of(model, optimizer)
        coordinator.schedule(step, (0,))
        coordinator.join()
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone(), model[2].weight.detach().clone()
        for number in range(4):
            coordinator.schedule(step, (number,))
        coordinator.join()
        assert torch.equal(model[0].weight, before[0])
        assert not torch.equal(model[2].weight, before[1])

        def follow():
            with torch.no_grad():
                teacher.weight.mul_(0.5)

        with torch.no_grad():
            teacher.weight.fill_(8)
        for _ in range(2):
            coordinator.schedule(follow)
            coordinator.join()
        assert teacher.weight.tolist() == [[2.0] * 3]
        seen = [coordinator.schedule(lambda: teacher.weight) for _ in range(4)]
        assert all(remote_value.get().tolist() == [[2.0] * 3] for remote_value in seen)
        teacher.requires_grad_(True)
        with pytest.raises(UsageError, match="unfreeze it in the scope before"):
            coordinator.schedule(follow)

    coordinated(body)


# -- state that no server holds ----------------------------------------------------------------------------------------


def test_buffers_metrics_and_variables_add_up(coordinated):
    def body(coordinator):
        strategy = coordinator.strategy
        model, optimizer = make_model(strategy, layers=lambda: (nn.BatchNorm1d(3), nn.Linear(3, 1)))
        with strategy.scope():
            mean = hpcdist.metrics.Mean()
            counter = hpcdist.Variable(5, aggregation="ONLY_FIRST_REPLICA")
            largest = hpcdist.Variable(0.0, aggregation="MEAN", trainable=False)

        def step(number):
            x = rows(number)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            mean.update_state(torch.full((2,), float(number)))
            counter.assign_add(2)
            return counter.read_value()

        alone = nn.BatchNorm1d(3)
        for number in range(30):
            coordinator.schedule(step, (number,))
        coordinator.join()
        for number in range(30):
            alone(rows(number))
        assert int(model[0].num_batches_tracked) == 30
        assert float(mean.result()) == sum(range(30)) / 30
        assert int(counter.read_value()) == 65
        if coordinated.n_workers == 1:  # else some functions begin before others have ended
            assert torch.allclose(model[0].running_mean, alone.running_mean)
        mean.reset_state()
        counter.assign(0)
        last = coordinator.schedule(step, (3,))
        coordinator.schedule(lambda: largest.assign(2.5))
        coordinator.join()
        assert int(last.get()) == 2
        assert float(mean.result()) == 3
        assert float(largest.read_value()) == 2.5

    coordinated(body)


def test_statistics_of_modules_made_before_the_scope_stay_near_those_of_one_process(coordinated):
    """Many steps in each function, on all workers at once: differences that were added would grow without bound."""

    def body(coordinator):
        torch.manual_seed(3)
        backbone = nn.Sequential(nn.BatchNorm1d(3, affine=False))
        with coordinator.strategy.scope():
            model = nn.Sequential(backbone, nn.Linear(3, 1))

        def forward(first):
            for number in range(first, first + 20):
                model(5 + 3 * rows(number, 50))

        for first in range(0, 600, 20):
            coordinator.schedule(forward, (first,))
        coordinator.join()
        assert torch.allclose(backbone[0].running_mean, torch.full((3,), 5.0), atol=1)
        assert torch.allclose(backbone[0].running_var, torch.full((3,), 9.0), atol=3)
        assert int(backbone[0].num_batches_tracked) == 600
        model.eval()
        before = backbone[0].running_mean.clone()
        coordinator.schedule(forward, (0,))
        coordinator.join()
        assert torch.equal(backbone[0].running_mean, before)

    coordinated(body)


def test_blocks_that_share_a_module_keep_their_own_statistics(coordinated):
    """What has neither tensors nor children, as an activation, travels with each block that has it."""

    class Block(nn.Module):
        def __init__(self, act, scale):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.bn = nn.BatchNorm1d(3)
            self.act = act
            self.scale = scale

        def forward(self, x):
            return self.act(self.bn(x + self.scale))

    def body(coordinator):
        with coordinator.strategy.scope():
            act = nn.Dropout(0.5)
            blocks = [Block(act, 10.0 * number) for number in range(3)]

        def forward(number):
            for block in blocks:
                block(rows(number))
            return [block.act.training for block in blocks]

        for number in range(150):
            coordinator.schedule(forward, (number,))
        coordinator.join()
        for number, block in enumerate(blocks):
            assert torch.allclose(block.bn.running_mean, torch.full((3,), 10.0 * number), atol=1)
            assert set(block.fc._buffers) == set()
        act.eval()
        assert coordinator.schedule(forward, (0,)).get() == [False] * 3
        coordinator.join()

    coordinated(body)


def test_what_is_assigned_is_the_value_and_what_a_failed_function_changed_is_forgotten(coordinated):
    def body(coordinator):
        with coordinator.strategy.scope():
            best = hpcdist.Variable(1e9, aggregation="MEAN", trainable=False)
            model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        def fail():
            best.assign(7.0)
            model(rows(1))
            raise KeyError("after the changes")

        coordinator.schedule(lambda: best.assign(0.25))
        coordinator.join()
        assert float(best.read_value()) == 0.25
        coordinator.schedule(fail)
        with pytest.raises(KeyError):
            coordinator.join()
        assert float(best.read_value()) == 0.25
        snapshots = coordinator.fetch(
            [coordinator.schedule(lambda: (best.read_value(), model[1].running_mean)) for _ in range(6)]
        )
        assert all(float(value) == 0.25 and not mean.any() for value, mean in snapshots)

    coordinated(body)


def test_metrics_of_torchmetrics_add_up(coordinated):
    torchmetrics = pytest.importorskip("torchmetrics")

    def body(coordinator):
        with coordinator.strategy.scope():
            score = hpcdist.metrics.TorchMetric(torchmetrics.classification.MulticlassF1Score(3, average="macro"))
        alone = torchmetrics.classification.MulticlassF1Score(3, average="macro")

        def update(number):
            drawn = torch.randint(0, 3, (2, 20), generator=torch.Generator().manual_seed(number))
            score.update_state(drawn[0], drawn[1])

        for number in range(10):
            coordinator.schedule(update, (number,))
            alone.update(*torch.randint(0, 3, (2, 20), generator=torch.Generator().manual_seed(number)))
        coordinator.join()
        assert torch.equal(score.result(), alone.compute())

    coordinated(body)


# -- datasets and resources --------------------------------------------------------------------------------------------


def numbers_dataset():
    return hpcdist.Dataset.from_tensor_slices(np.arange(6)).batch(2)


@pytest.mark.feature(
    "tf.under-parameter-servers",
    "parameter-servers.cluster-coordinator",
    "semantics.schedule-rules",
    "semantics.fetch-and-worker-datasets",
)
@pytest.mark.parametrize("kind", ["function", "dataset", "distributed", "from function", "distributed in function"])
def test_each_worker_has_all_of_a_dataset(coordinated, kind):
    def body(coordinator):
        strategy = coordinator.strategy
        dataset_or_fn = {
            "function": numbers_dataset,
            "dataset": numbers_dataset(),
            "distributed": strategy.experimental_distribute_dataset(numbers_dataset()),
            "from function": strategy.distribute_datasets_from_function(lambda context: numbers_dataset()),
            "distributed in function": lambda: strategy.experimental_distribute_dataset(numbers_dataset()),
        }[kind]
        iterator = iter(coordinator.create_per_worker_dataset(dataset_or_fn))

        def read(iterator):
            return hpcdist.current_worker_index(), next(iterator)

        seen = {}
        for _ in range(3):  # of each worker at least one, as it has no more than three
            worker, batch = coordinator.schedule(read, (iterator,)).fetch()
            seen.setdefault(worker, []).append(np.asarray(batch).tolist())
        for batches in seen.values():
            assert batches == [[0, 1], [2, 3], [4, 5]][: len(batches)]
        with pytest.raises(NotImplementedError, match="pass the iterator to schedule"):
            next(iterator)

    coordinated(body)


@pytest.mark.feature("tf.under-parameter-servers")
def test_the_input_pipeline_of_a_worker_is_the_only_one(coordinated):
    def body(coordinator):
        strategy = coordinator.strategy

        def make():
            contexts = []

            def dataset_fn(context):
                contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
                return numbers_dataset()

            strategy.distribute_datasets_from_function(dataset_fn)
            return contexts

        assert coordinator.schedule(
            lambda contexts: contexts, (coordinator.create_per_worker_resource(make),)
        ).get() == [(1, 0, 1)]
        assert coordinator.schedule(lambda: strategy.num_replicas_in_sync).get() == 1

    coordinated(body)


def test_a_dataset_without_a_seed_has_an_order_on_each_worker(coordinated):
    def body(coordinator):
        iterator = iter(
            coordinator.create_per_worker_dataset(
                hpcdist.Dataset.from_tensor_slices(np.arange(64)).shuffle(64).batch(64)
            )
        )
        first = coordinator.create_per_worker_resource(lambda: next(iterator).tolist())
        orders_by_worker = {}
        for worker, order in coordinator.fetch(
            [coordinator.schedule(lambda x: (hpcdist.current_worker_index(), x), (first,)) for _ in range(40)]
        ):
            orders_by_worker.setdefault(worker, set()).add(tuple(order))
        assert all(len(orders) == 1 for orders in orders_by_worker.values())
        assert len(set.union(*orders_by_worker.values())) == len(orders_by_worker)

    coordinated(body)


@pytest.mark.feature("semantics.closure-errors")
def test_a_resource_that_cannot_be_made(coordinated):
    def body(coordinator):
        def make():
            raise OSError("no such file")

        iterator = iter(coordinator.create_per_worker_dataset(make))
        coordinator.schedule(lambda it: next(it), (iterator,))
        with pytest.raises(ClosureInputError, match="OSError: no such file") as caught:
            coordinator.join()
        assert isinstance(caught.value.original_exception, OSError)
        nested = ClosureInputError("again", caught.value)
        assert isinstance(nested.original_exception, OSError)
        coordinator.schedule(lambda it: next(it), (iter(coordinator.create_per_worker_dataset(lambda: 3)),))
        with pytest.raises(ClosureInputError, match="returns a dataset"):
            coordinator.join()
        with pytest.raises(UsageError, match="a function that returns one"):
            coordinator.create_per_worker_dataset(3)

    coordinated(body)


def test_resources_end_with_the_programs_last_reference(coordinated):
    class Thing:
        pass

    def body(coordinator):
        def make():
            import sys
            import types
            import weakref

            registry = sys.modules.setdefault("things of the test", types.SimpleNamespace(alive=weakref.WeakSet()))
            thing = Thing()
            registry.alive.add(thing)
            return thing

        def n_alive(thing):
            import sys

            return len(sys.modules["things of the test"].alive)

        for _ in range(5):
            resource = coordinator.create_per_worker_resource(make)
            alive_counts = [coordinator.schedule(n_alive, (resource,)) for _ in range(3 * coordinated.n_workers)]
            assert max(coordinator.fetch(alive_counts)) <= 2
            coordinator.join()

    coordinated(body)


def test_large_arguments_and_results_of_short_functions(coordinated):
    def body(coordinator):
        batches = [torch.full((1 << 18,), float(number)) for number in range(12)]
        results = [coordinator.schedule(lambda x: x + 1, (batch,)) for batch, _ in itertools.product(batches, range(4))]
        for number, result in enumerate(results):
            assert torch.equal(result.get(), batches[number // 4] + 1)
        coordinator.join()

    coordinated(body)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_leaving_without_join(coordinated):
    def body(coordinator):
        def slow():
            import time

            time.sleep(0.3)
            return torch.zeros(1 << 18)

        results = [coordinator.schedule(slow) for _ in range(6 * coordinated.n_workers)]
        assert len(results[0].get()) == 1 << 18
        coordinator.leave(0)
        with pytest.raises(ClosureCancelledError, match="join before that"):
            results[-1].get()
        for call in (lambda: coordinator.schedule(slow), coordinator.join):
            with pytest.raises(UsageError, match="has let them leave"):
                call()

    coordinated(body)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_coordinator_resumes_with_the_same_bits(coordinated, tmp_path, comm):
    folder = comm.bcast(str(tmp_path))

    def train(coordinator, numbers, has_restored):
        model, optimizer = make_model(coordinator.strategy, lambda parameters: torch.optim.Adam(parameters, lr=0.02))
        checkpoint = hpcdist.Checkpoint(strategy=coordinator.strategy, model=model, optimizer=optimizer)
        manager = hpcdist.CheckpointManager(checkpoint, folder)
        step = step_of(model, optimizer)
        assert (manager.restore_or_initialize() is not None) == has_restored
        for number in numbers:
            coordinator.schedule(step, (number,))
            coordinator.join()
        manager.save(numbers[-1] + 1)
        return weights(model)

    whole, own = make_model(hpcdist.get_strategy(), lambda own: torch.optim.Adam(own, lr=0.02))
    for number in range(6):
        step_of(whole, own)(number)
    coordinated(lambda coordinator: train(coordinator, range(3), False))
    resumed_weights = coordinated(
        lambda coordinator: train(coordinator, range(3, 6), True),
        variable_partitioner=hpcdist.partitioners.FixedShardsPartitioner(2),
    )
    if comm.rank == 1:
        assert torch.equal(resumed_weights, weights(whole))


def test_a_restore_between_functions_reaches_the_workers(coordinated, tmp_path):
    def body(coordinator):
        model, optimizer = make_model(coordinator.strategy, lambda parameters: torch.optim.Adam(parameters, lr=0.02))
        checkpoint = hpcdist.Checkpoint(strategy=coordinator.strategy, model=model, optimizer=optimizer)
        manager = hpcdist.CheckpointManager(checkpoint, tmp_path / "run")
        step = step_of(model, optimizer)
        weights_by_attempt = []
        for attempt in range(2):
            if attempt:
                manager.restore_or_initialize()
            for number in range(4):
                coordinator.schedule(step, (number,))
                coordinator.join()
                if not attempt and number == 1:
                    manager.save(2)
            weights_by_attempt.append(weights(model))
        manager.restore_or_initialize()
        for number in range(2, 4):
            coordinator.schedule(step, (number,))
            coordinator.join()
        assert torch.equal(weights(model), weights_by_attempt[0])
        assert not torch.equal(weights_by_attempt[0], weights_by_attempt[1])

    coordinated(body)


# -- set-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.feature("semantics.coordinator-is-one")
def test_other_strategies_have_no_coordinator(comm):
    with pytest.raises(UsageError, match="ParameterServerStrategy.*Strategy"):
        hpcdist.ClusterCoordinator(hpcdist.get_strategy())
    with pytest.raises(UsageError, match="got MirroredStrategy"):
        hpcdist.ClusterCoordinator(hpcdist.MirroredStrategy())


def test_workers_that_run_the_program_have_no_coordinator(comm):
    if comm.size < 2:
        pytest.skip("servers need a rank of their own")
    try:
        strategy = hpcdist.ParameterServerStrategy(hpcdist.MPIClusterResolver(roles="ps:1,worker:*"))
    except SystemExit:
        return
    try:
        with pytest.raises(ConfigurationError, match="program.*themselves"):
            hpcdist.ClusterCoordinator(strategy)
    finally:
        strategy.served.client.leave(0)


@pytest.mark.parametrize("options", [{"max_staleness": 2}, {"synchronous": True}])
def test_rules_that_wait_for_all_workers_are_refused(comm, options):
    if comm.size < 3:
        pytest.skip("a coordinator needs a parameter server and a worker")
    resolver = hpcdist.MPIClusterResolver(roles="ps:1,chief:1,worker:*")
    server = hpcdist.Server(resolver)
    if comm.rank == 1:
        start = functools.partial(hpcdist.ParameterServerStrategy, resolver, **options)
    else:
        start = server.join
    with pytest.raises(ConfigurationError, match="neither max_staleness nor synchronous"):
        start()


def test_two_programs_beside_workers_that_serve_are_refused(comm):
    if comm.size < 3:
        pytest.skip("a coordinator needs a parameter server and a worker")
    resolver = hpcdist.MPIClusterResolver(roles="ps:1,worker:*")
    is_program = comm.rank == comm.size - 1 or (comm.rank == 1 and comm.size > 3)
    if is_program:
        start = functools.partial(hpcdist.ParameterServerStrategy, resolver)
    else:
        start = hpcdist.Server(resolver).join
    with pytest.raises(
        ConfigurationError, match=r"the chief alone to run the program, got the program on ranks \[.*\]"
    ):
        start()


def test_a_server_needs_its_task():
    with pytest.raises(UsageError, match="task_type.*resolver.task_id"):
        hpcdist.Server({"worker": ["a:1"], "ps": ["b:1"]})
    cluster = hpcdist.ClusterSpec({"worker": ["a:1"], "ps": ["b:1"], "chief": ["c:1"]})
    server = hpcdist.Server(cluster, job_name="worker", task_index=0, protocol="grpc")
    assert server.target == "mpi://"
