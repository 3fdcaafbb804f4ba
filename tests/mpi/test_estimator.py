"""Estimators on real ranks: train, evaluate, predict in a folder, under each strategy, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import hpcdist
from hpcdist import estimator
from hpcdist.errors import DataError, UsageError
from hpcdist.estimator import Estimator, LinearRegressor, RunConfig, numeric_column
from hpcdist.saving.manager import CheckpointManager
from hpcdist.training import optimizers

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("no_handler_left")]


def draws(n_rows=24):
    x = np.random.default_rng(5).normal(size=(n_rows, 3)).astype(np.float32)
    return x, (x @ np.array([1.0, -2.0, 0.5], np.float32))[:, None]


def endless(batch=4):
    return hpcdist.Dataset.from_tensor_slices(draws()).repeat().batch(batch)


def once(batch=4):
    return hpcdist.Dataset.from_tensor_slices(draws()).batch(batch)


def linear(params=None):
    torch.manual_seed(3)
    model = hpcdist.Model(nn.Linear(3, 1))
    model.compile(lambda p: torch.optim.SGD(p, lr=(params or {}).get("lr", 0.1)), "mse", ["mae"])
    return model


def batches_of(step, n_local, is_endless=True):
    """Return the rows of each replica of a rank at a step: its input's batches go to one replica after the other."""
    x, y = map(torch.from_numpy, draws())
    batches = []
    for replica in range(n_local):
        first_row = 4 * (step * n_local + replica)
        rows = np.arange(first_row, first_row + 4)
        if is_endless:
            rows %= 24
        rows = rows[rows < 24]
        batches.append((x[rows], y[rows]))
    return batches


def by_hand(n_steps, ranks=(1,), lr=0.1, weights=None, is_endless=True):
    """Return the weights of one process after n_steps steps, each on the batches of all replicas.

    Args:
        n_steps: of SGD.
        ranks: replicas of each rank.
        lr: of SGD.
        weights: to begin with; default: those of `linear`.
        is_endless: whether the input is repeated.
    """
    torch.manual_seed(3)
    net = nn.Linear(3, 1)
    if weights is not None:
        net.load_state_dict(dict(zip(("weight", "bias"), weights, strict=True)))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(n_steps):
        optimizer.zero_grad()
        for n_local in ranks:
            for x, y in batches_of(step, n_local, is_endless):
                if len(x):
                    ((net(x) - y).square().mean() / sum(ranks)).backward()
        optimizer.step()
    return net.weight.detach(), net.bias.detach()


@pytest.fixture(params=["one replica a rank", "four replicas"])
def config(request, shared_path):
    if request.param.startswith("one"):
        num_replicas = None
    else:
        num_replicas = 4
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=num_replicas)
    return RunConfig(shared_path, train_distribute=strategy, save_checkpoints_steps=4, log_step_count_steps=0)


@pytest.fixture
def ranks(comm, config):
    """Return the number of replicas of each rank."""
    return comm.allgather(len(config.train_distribute.own_replicas))


def close(trained, expected):
    for weight, expected_weight in zip(trained.model.get_weights(), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(weight), expected_weight, rtol=1e-4, atol=1e-6)


@pytest.mark.feature("training.estimator")
def test_the_guides_regressor(config):
    """As in the guide, but for its features' key: rows of ones, SGD with rate 0.2, weights from 0."""
    regressor = LinearRegressor([numeric_column("feats")], optimizer="SGD", config=config)

    def input_fn():
        features = {"feats": np.ones((10, 1), np.float32)}
        return hpcdist.Dataset.from_tensor_slices((features, np.ones(10, np.float32))).repeat(1000).batch(10)

    assert regressor.train(input_fn=input_fn, steps=3) is regressor
    weight = 0.0
    bias = 0.0
    for _ in range(3):
        error = weight + bias - 1
        weight = weight - 0.2 * 2 * error
        bias = bias - 0.2 * 2 * error
    metrics = regressor.evaluate(input_fn=input_fn, steps=10)
    assert metrics["loss"] == metrics["average_loss"] == pytest.approx((weight + bias - 1) ** 2, rel=1e-4)
    assert metrics["label/mean"] == 1.0
    assert metrics["prediction/mean"] == pytest.approx(weight + bias, rel=1e-5)
    assert metrics["global_step"] == regressor.global_step == 3
    for row in itertools.islice(regressor.predict(input_fn), 3):
        assert row["predictions"] == pytest.approx(weight + bias, rel=1e-5)


@pytest.mark.feature("training.estimator")
@pytest.mark.core
def test_every_worker_sees_its_own_input_whole(config, ranks):
    seen = []

    def input_fn(input_context, params, config):
        seen.append((input_context.num_replicas_in_sync, params["lr"], config.keep_checkpoint_max))
        return endless()

    trained = Estimator(linear, config=config, params={"lr": 0.1}).train(input_fn, steps=5)
    close(trained, by_hand(5, ranks))
    assert set(seen) == {(config.train_distribute.num_replicas_in_sync, 0.1, 5)}


def test_the_next_estimator_resumes_from_the_folder(config, shared_path, ranks):
    Estimator(linear, config=config).train(endless, steps=5)
    resumed = Estimator(linear, config=config)
    assert resumed.global_step == 5
    resumed.train(endless, max_steps=8)
    assert resumed.global_step == 8
    close(resumed, by_hand(3, ranks, weights=by_hand(5, ranks)))  # a new call begins its input anew
    resumed.train(lambda: pytest.fail("not called: the steps are made"), max_steps=8)
    checkpoint_names = sorted(path.name[:13] for path in (shared_path / "checkpoints").glob("step-*.h5"))
    assert checkpoint_names == ["step-00000004", "step-00000005", "step-00000008"]


def test_training_ends_with_the_data(config, ranks):
    """Where ranks have as many replicas; else it ends with the last of them, and the others get nothing meanwhile."""
    trained = Estimator(linear, config=config).train(once)
    assert trained.global_step == -(-6 // min(ranks))
    close(trained, by_hand(trained.global_step, ranks, is_endless=False))


@pytest.mark.core
def test_evaluation_and_predictions(config, shared_path, ranks):
    untrained = Estimator(linear, config=config)
    x, y = map(torch.from_numpy, draws())
    weight, bias = by_hand(0)
    outputs = x @ weight.T + bias
    metrics = untrained.evaluate(once, name="test")
    assert metrics["loss"] == pytest.approx((outputs - y).square().mean().item(), rel=1e-5)
    assert metrics["mae"] == pytest.approx((outputs - y).abs().mean().item(), rel=1e-5)
    assert metrics["global_step"] == 0
    losses = []
    for n_local in ranks:
        losses += [(x @ weight.T + bias - y).square() for x, y in batches_of(0, n_local)]
    assert untrained.evaluate(once, steps=1)["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    predicted = [row["predictions"] for row in untrained.predict(once)]
    np.testing.assert_allclose(predicted, outputs.numpy(), rtol=1e-5, atol=1e-6)
    if config.train_distribute.is_chief:
        events = EventAccumulator(str(shared_path / "eval_test")).Reload()
        assert events.Scalars("loss")[0].value == pytest.approx(metrics["loss"], rel=1e-5)


def test_losses_of_training_are_written(config, shared_path, comm):
    some = RunConfig(shared_path, train_distribute=config.train_distribute, save_summary_steps=2)
    Estimator(linear, config=some).train(endless, steps=6)
    comm.barrier()
    events = EventAccumulator(str(shared_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6]


def test_a_model_becomes_an_estimator(config, shared_path):
    model = linear()
    model.set_weights([np.zeros((1, 3), np.float32), np.ones(1, np.float32)])
    converted = estimator.model_to_estimator(keras_model=model, config=config)
    later_weights = [np.ones((1, 3), np.float32), np.ones(1, np.float32)]
    model.set_weights(later_weights)
    close(converted, (torch.zeros(1, 3), torch.ones(1)))
    converted.train(endless, steps=2)
    assert model.get_weights()[1] == 1.0, "a copy is trained"
    model.add_regularizer(hpcdist.regularizers.L2(0.5), model.net.weight)
    model.learning_rate = 0.03
    regularized_config = RunConfig(shared_path / "regularized", train_distribute=config.train_distribute)
    copied = estimator.model_to_estimator(keras_model=model, config=regularized_config).model
    assert [weight.shape for _, weight in copied.regularizers] == [(1, 3)]
    assert copied.regularizers[0][1] is copied.net.weight
    assert copied.learning_rate == 0.03
    model.compile("adamw", "mse")
    adamw_config = RunConfig(shared_path / "adamw", train_distribute=config.train_distribute)
    copied = estimator.model_to_estimator(keras_model=model, config=adamw_config).model
    assert type(copied.optimizer) is type(model.optimizer)
    assert copied.optimizer.defaults == model.optimizer.defaults
    zero = hpcdist.optim.ZeroRedundancyOptimizer(nn.Linear(3, 1).parameters(), torch.optim.SGD, lr=0.3, momentum=0.5)
    divided = optimizers.maker_like(zero)(nn.Linear(3, 1).parameters())
    assert divided.optimizer_class is torch.optim.SGD
    assert divided.defaults == zero.defaults
    model.add_loss(lambda: torch.zeros(()))
    with pytest.raises(UsageError, match="add_loss"):
        estimator.model_to_estimator(model)
    with pytest.raises(UsageError, match="hpcdist.Model.*Linear"):
        estimator.model_to_estimator(nn.Linear(3, 1))


@pytest.mark.feature("training.estimator")
@pytest.mark.core
@pytest.mark.parametrize("synchronous", [False, True])
def test_parameter_servers(comm, shared_path, synchronous):
    """Asynchronous workers make half of the steps each, and all of them are counted."""
    if comm.size < 2:
        pytest.skip("a server needs a rank of its own")
    metrics = error = left_with = None
    try:
        resolver = hpcdist.MPIClusterResolver(roles="ps:1,worker:*")
        strategy = hpcdist.ParameterServerStrategy(resolver, synchronous=synchronous)
    except SystemExit as server_exit:
        left_with = server_exit.code
    else:
        try:
            config = RunConfig(shared_path, train_distribute=strategy, save_checkpoints_steps=8, log_step_count_steps=0)
            worker_estimator = Estimator(lambda: linear({"lr": 0.05}), config=config)
            first = worker_estimator.evaluate(once)
            worker_estimator.train(endless, max_steps=24 * (1 if synchronous else comm.size - 1))
            metrics = worker_estimator.evaluate(once)
            assert worker_estimator.global_step == metrics["global_step"] == 24 * (1 if synchronous else comm.size - 1)
            assert metrics["loss"] < 0.2 * first["loss"]
            if synchronous:
                close(worker_estimator, by_hand(24, [1] * (comm.size - 1), lr=0.05))
            assert len(list(worker_estimator.predict(once))) == 24
        except Exception as caught:  # the server goes on with the test, and would wait for this rank
            error = caught
        strategy._client.leave(0)
    everywhere = comm.allgather((left_with, metrics and str(metrics), error and repr(error)))
    assert not [failure for _, _, failure in everywhere if failure], everywhere
    assert everywhere[0][0] == 0
    assert len({metrics_text for _, metrics_text, _ in everywhere[1:]}) == 1


def test_what_is_refused(config):
    with pytest.raises(UsageError, match=r"numeric_column"):
        LinearRegressor(["x"])
    with pytest.raises(UsageError, match="known.*optimizer.*'Sdg'"):
        LinearRegressor([numeric_column("x")], optimizer="Sdg", config=config).train(endless, steps=1)
    with pytest.raises(UsageError, match="model_fn.*hpcdist.Model.*Linear"):
        Estimator(lambda: nn.Linear(3, 1), config=config).train(endless, steps=1)
    linear_estimator = Estimator(linear, config=config)
    for options in ({"steps": 0}, {"steps": 1, "max_steps": 2}, {"max_steps": -1}):
        with pytest.raises(UsageError, match="expected (max_)?steps of at least 1|expected steps or max_steps"):
            linear_estimator.train(endless, **options)
    regressor = LinearRegressor([numeric_column("z")], config=config)
    features = {"x": np.ones((4, 1), np.float32)}
    rows = hpcdist.Dataset.from_tensor_slices((features, np.ones(4, np.float32))).batch(2)
    with pytest.raises(UsageError, match=r"features"):
        regressor.evaluate(lambda: rows)


def test_a_column_of_several_numbers_is_normalized(config):
    columns = [numeric_column("a", (2, 2), normalizer_fn=lambda x: x / 10), numeric_column("b")]
    regressor = LinearRegressor(columns, config=config, label_dimension=2)
    features = {"a": np.full((4, 2, 2), 10.0, np.float32), "b": np.ones(4, np.float32)}
    rows = hpcdist.Dataset.from_tensor_slices((features, np.ones((4, 2), np.float32)))
    regressor.train(lambda: rows.repeat().batch(4), steps=30)
    assert regressor.model.net.linear.weight.shape == (2, 5)
    assert regressor.evaluate(lambda: rows.batch(4))["loss"] < 0.01


def test_workers_with_the_same_rows_are_no_warning(config, caplog):
    """Input of estimators is not sharded; in a loop of one's own the same first batch on all ranks is a warning."""
    rows = tuple(map(torch.from_numpy, draws()))
    Estimator(linear, config=config).evaluate(lambda: hpcdist.Dataset.from_tensor_slices(rows).batch(4))
    assert not [record for record in caplog.records if "the same first batch" in record.getMessage()]


def test_a_run_that_was_killed_at_the_end_of_its_data(config, shared_path, monkeypatch):
    """Its last checkpoint is of the last step, in the call: nothing is left, and that is no error."""
    every = RunConfig(shared_path, train_distribute=config.train_distribute, save_checkpoints_steps=1)
    save = CheckpointManager.save
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", lambda *args, if_changed=False, **kw: if_changed or save(*args, **kw))
        first = Estimator(linear, config=every).train(once)
    resumed = Estimator(linear, config=every)
    assert resumed.global_step == first.global_step
    assert resumed._call.is_running
    resumed.train(once)
    assert resumed.global_step == first.global_step
    assert not resumed._call.is_running


def test_evaluations_are_no_attempts_to_train(comm, config, shared_path):
    """Nor does one that trains no more leave its run unfinished."""

    def attempts():
        """Return the names as rank 0 sees them when all ranks are here, without files that renew a listing."""
        folder = shared_path / "checkpoints" / "attempts"
        comm.Barrier()
        return comm.bcast(sorted(path.name for path in folder.glob("*.jsonl")) if comm.rank == 0 else None)

    Estimator(linear, config=config).train(endless, steps=5)
    names = attempts()
    for _ in range(4):
        evaluation_estimator = Estimator(linear, config=config)
        assert evaluation_estimator.evaluate(once)["global_step"] == 5
        assert next(evaluation_estimator.predict(once))["predictions"].shape == (1,)
    assert attempts() == names
    assert Estimator(linear, config=config).train(endless, max_steps=7).global_step == 7


def test_after_a_call_that_raised_the_next_one_is_its_own(config, shared_path):
    """Also where the failed one had saved: it begins at that save, on its own rows, with its own steps."""
    every = RunConfig(
        shared_path, train_distribute=config.train_distribute, save_checkpoints_steps=5, log_step_count_steps=0
    )
    linear_estimator = Estimator(linear, config=every)
    n_rows = 0

    def failing():
        def note(x, y):
            nonlocal n_rows
            n_rows += 1
            if n_rows == 12 * 4 * len(config.train_distribute.own_replicas):
                raise ValueError("of the program")
            return x, y

        return hpcdist.Dataset.from_tensor_slices(draws()).map(note).repeat().batch(4)

    with pytest.raises(ValueError, match="of the program"):
        linear_estimator.train(failing, steps=50)
    linear_estimator.train(endless, steps=7)
    assert linear_estimator.global_step == 17
    resumed = Estimator(linear, config=every)
    assert resumed.global_step == 17


def test_two_estimators_in_one_program(config, shared_path):
    second_config = RunConfig(shared_path / "other", train_distribute=config.train_distribute, log_step_count_steps=0)
    first = Estimator(linear, config=config)
    second = Estimator(linear, config=second_config)
    first.train(endless, steps=3)
    second.train(endless, steps=4)
    first.train(endless, steps=3)
    assert (first.global_step, second.global_step) == (6, 4)
    for trained, folder, step in ((first, shared_path, 6), (second, shared_path / "other", 4)):
        trained.train(endless, max_steps=step)  # nothing to do
        newest = sorted((folder / "checkpoints").glob("step-*.h5"))[-1]
        assert newest.name.startswith(f"step-{step:08d}")


def test_a_call_that_raised_is_not_resumed(config):
    linear_estimator = Estimator(linear, config=config)
    wrong = hpcdist.Dataset.from_tensor_slices(np.ones((8, 2), np.float32)).batch(4)
    with pytest.raises(UsageError, match=r"expected batches of \(x, y\)|expected inputs that fit"):
        linear_estimator.train(lambda: wrong, steps=2)
    linear_estimator.train(endless, steps=5)
    assert linear_estimator.global_step == 5


def test_plain_settings(config, shared_path):
    some = RunConfig(shared_path, train_distribute=config.train_distribute, save_summary_steps=0)
    Estimator(linear, config=some).train(endless, steps=1)
    empty = hpcdist.Dataset.from_tensor_slices(draws()).take(0).batch(4)
    with pytest.raises(DataError, match="train.*batches.*none"):
        Estimator(linear, config=some).train(lambda: empty)
    with pytest.raises(UsageError, match="model_fn.*hpcdist.Model"):
        Estimator(lambda features, labels, mode: None, config=some).train(endless, steps=1)
    regressor = LinearRegressor([numeric_column("x")], shared_path / "linear", config=some)
    with pytest.raises(UsageError, match="arrays.*return"):
        regressor.evaluate(once)


def test_an_evaluator_does_not_train(comm, shared_path):
    if comm.size < 2:
        pytest.skip("an evaluator needs a rank of its own")
    strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles="evaluator:1,worker:*"))
    config = RunConfig(shared_path, train_distribute=strategy, log_step_count_steps=0)
    linear_estimator = Estimator(linear, config=config)
    if strategy.cluster_resolver.task_type == "evaluator":
        with pytest.raises(UsageError, match="expected chief or worker, got evaluator; call train_and_evaluate"):
            linear_estimator.train(endless, steps=2)
    else:
        assert linear_estimator.train(endless, steps=2).global_step == 2
    with pytest.raises(UsageError, match="model_dir.*none"):
        Estimator(linear, config=RunConfig(train_distribute=strategy))
