import threading

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.errors import ConfigurationError
from hpcdist.strategy import context, multi_worker

pytestmark = pytest.mark.mpi


def make_data(n_rows=10, batch=4):
    rows = torch.arange(float(n_rows)).reshape(-1, 1)
    return hpcdist.Dataset.from_tensor_slices((rows, rows * 2)).batch(batch)


# -- contexts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def strategy():
    return hpcdist.MultiWorkerMirroredStrategy()


@pytest.fixture
def everywhere(strategy):
    hpcdist.experimental_set_strategy(strategy)
    yield strategy
    hpcdist.experimental_set_strategy(None)


@pytest.mark.feature(
    "tf.another-strategy-inside",
    "tf.experimental-set-strategy",
    "tf.experimental-set-strategy-refused",
    "semantics.strategy-for-all-code",
)
def test_a_strategy_may_be_set_for_all_code(everywhere):
    assert hpcdist.get_strategy() is everywhere
    assert hpcdist.has_strategy()
    assert hpcdist.in_cross_replica_context()
    assert hpcdist.get_replica_context() is None
    thread_strategies = []
    thread = threading.Thread(target=lambda: thread_strategies.append(hpcdist.get_strategy()))
    thread.start()
    thread.join()
    assert thread_strategies == [everywhere]
    model = torch.nn.Linear(2, 1)
    assert everywhere.extended.variable_created_in_scope(model.weight)
    with everywhere.scope():
        assert hpcdist.get_strategy() is everywhere
        with pytest.raises(RuntimeError, match="MultiWorker"):
            hpcdist.experimental_set_strategy(None)
    with pytest.raises(RuntimeError, match="OneDeviceStrategy"):
        with hpcdist.OneDeviceStrategy("cpu").scope():
            pass
    assert everywhere.run(lambda: hpcdist.get_replica_context().num_replicas_in_sync) == everywhere.num_replicas_in_sync


@pytest.mark.feature("tf.experimental-set-strategy")
def test_another_strategy_replaces_the_one_set(everywhere):
    one_device = hpcdist.OneDeviceStrategy("cpu")
    hpcdist.experimental_set_strategy(one_device)
    assert hpcdist.get_strategy() is one_device
    model = torch.nn.Linear(2, 1)
    assert one_device.extended.variable_created_in_scope(model.weight)
    assert not everywhere.extended.variable_created_in_scope(model.weight)
    hpcdist.experimental_set_strategy(None)
    assert not hpcdist.has_strategy()
    assert not one_device.extended.variable_created_in_scope(torch.nn.Linear(2, 1).weight)


@pytest.mark.feature("tf.experimental-set-strategy-refused", "semantics.strategy-for-all-code")
def test_a_strategy_is_not_set_inside_run(strategy):
    with pytest.raises(RuntimeError, match="outside.*strategy"):
        strategy.run(lambda: hpcdist.experimental_set_strategy(None))


@pytest.mark.feature(
    "tf.default-strategy-object",
    "tf.has-strategy-false",
    "strategies.default-strategy",
    "semantics.strategy-for-all-code",
)
def test_only_the_pass_through_strategy_is_none():
    default = hpcdist.get_strategy()
    assert default is hpcdist.get_strategy()
    assert not hpcdist.has_strategy()
    with default.scope():
        assert not hpcdist.has_strategy()
    with hpcdist.OneDeviceStrategy("cpu").scope():
        assert hpcdist.has_strategy()


@pytest.mark.feature("tf.scope-may-entered", "semantics.wrong-context")
def test_a_scope_may_be_entered_again_in_itself(strategy):
    with strategy.scope(), strategy.scope():
        pass
    with strategy.scope():
        with strategy.scope():
            pass
        assert hpcdist.get_strategy() is strategy
        model = torch.nn.Linear(2, 1)
    assert not hpcdist.has_strategy()
    assert strategy.extended.variable_created_in_scope(model.weight)


@pytest.mark.feature("tf.default-strategy-object", "tf.calls-wrong-context", "strategies.default-strategy")
def test_the_replica_outside_all_strategies_reduces_with_itself():
    replica = hpcdist.get_replica_context()
    assert replica.replica_id_in_sync_group == 0
    assert replica.all_reduce("sum", torch.ones(2)).tolist() == [1, 1]
    assert replica.all_gather(np.ones((2, 1)), axis=0).shape == (2, 1)
    assert replica.merge_call(lambda strategy, x: (type(strategy).__name__, x + 1), args=(1,)) == ("Strategy", 2)
    with hpcdist.OneDeviceStrategy("cpu").scope(), pytest.raises(RuntimeError, match="replica.*context"):
        replica.all_reduce("sum", 1.0)


@pytest.mark.feature("tf.thread-begins-only", "semantics.contexts")
def test_a_thread_begins_outside_all_strategies(strategy):
    thread_state = []
    with strategy.scope():
        thread = threading.Thread(
            target=lambda: thread_state.extend([hpcdist.get_replica_context(), hpcdist.has_strategy()])
        )
        thread.start()
        thread.join()
    assert thread_state == [hpcdist.get_replica_context(), False]
    assert (thread_state[0].replica_id_in_sync_group, thread_state[0].num_replicas_in_sync) == (0, 1)


@pytest.mark.feature("tf.plain-model-x", "semantics.models-know-their-strategy")
def test_a_plain_call_of_a_model_does_not_enter_its_strategy(strategy):
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    active_strategies = []
    model.register_forward_hook(lambda *_: active_strategies.append(hpcdist.get_strategy()))
    model(torch.ones(1, 2))
    strategy.run(lambda: model(torch.ones(1, 2)))
    assert active_strategies == [hpcdist.get_strategy(), strategy]


@pytest.mark.feature("tf.calls-wrong-context", "semantics.wrong-context")
@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.scope().__enter__(),
        lambda s: s.reduce("sum", 1.0, axis=None),
        lambda s: s.gather(torch.ones(1), axis=0),
        lambda s: s.experimental_distribute_values_from_function(lambda c: 1),
        lambda s: s.extended.update(torch.ones(1), lambda v: v),
        lambda s: s.extended.reduce_to("sum", 1.0, None),
        lambda s: s.extended.batch_reduce_to("sum", []),
        lambda s: s.extended.broadcast_to(1.0, None),
    ],
)
def test_what_belongs_in_cross_replica_context_says_so(strategy, call):
    for tested_strategy in (strategy, hpcdist.OneDeviceStrategy("cpu")):
        with pytest.raises(RuntimeError, match="replica.*context"):
            tested_strategy.run(call, args=(tested_strategy,))
        with pytest.raises(RuntimeError, match="extended.update"):
            tested_strategy.extended.update(torch.ones(1), lambda _, s=tested_strategy: call(s))


# -- extended ----------------------------------------------------------------------------------------------------------


@pytest.mark.feature("tf.extended-update-third", "strategies.extended", "semantics.contexts")
def test_update_is_a_third_context(strategy):
    with strategy.scope():
        weight = torch.nn.Linear(2, 1, bias=False).weight

        def add(variable, by, *, times):
            assert hpcdist.get_replica_context() is None
            assert context.updated_copy() == 0
            variable.add_(by * times)
            return "done"

        before = weight.detach().clone()
        assert strategy.extended.update(weight, add, args=(torch.ones(()),), kwargs={"times": 2}) == "done"
        assert strategy.extended.update(weight, add, (1,), {"times": 0}, group=False) == ("done",)
    assert torch.equal(weight.detach(), before + 2)
    assert context.updated_copy() is None
    parts = hpcdist.PerReplica([torch.zeros(1), torch.ones(1)])
    results = strategy.extended.update(parts, lambda v, w: (v + w).item(), args=(hpcdist.PerReplica([5.0, 7.0]),))
    assert results.values == (5.0, 8.0)


def test_a_copy_that_replicas_share_is_updated_once(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=3 * comm.size)
    with strategy.scope():
        weight = torch.nn.Linear(1, 1).weight
        variable = hpcdist.Variable(1.0)
    torch.nn.init.ones_(weight)

    def add(copy, by):
        return copy.add_(by)

    def merged(strategy, by):
        strategy.extended.update(weight, add, args=(by,))
        strategy.extended.update(variable, lambda v, by: v.assign_add(by), args=(by,))

    strategy.run(lambda: hpcdist.get_replica_context().merge_call(merged, args=(torch.tensor(2.0),)))
    assert weight.item() == 3
    assert variable.numpy() == 3
    shared = torch.ones(())
    strategy.extended.update(hpcdist.PerReplica([shared] * 3), add, args=(hpcdist.PerReplica([2.0] * 3),))
    assert shared == 3
    with pytest.raises(ValueError, match="arguments.*replicas"):
        strategy.extended.update(weight, add, args=(hpcdist.PerReplica([1.0, 1.0, 2.0]),))
    strategy.extended.update(weight, add, args=(hpcdist.PerReplica([torch.tensor([[float("nan")]])] * 3),))
    apart = [torch.ones(()) for _ in range(3)]
    strategy.extended.update(hpcdist.PerReplica(apart), add, args=(hpcdist.PerReplica([1.0, 2.0, 3.0]),))
    assert [copy.item() for copy in apart] == [2, 3, 4]


@pytest.mark.feature("strategies.extended")
def test_values_are_reduced_and_sent_to_devices(strategy, comm):
    total = comm.size * (comm.size + 1) / 2
    local_tensor = torch.full((2,), comm.rank + 1.0)
    extended = strategy.extended
    assert extended.reduce_to("sum", local_tensor, None).tolist() == [total] * 2
    assert extended.reduce_to("mean", local_tensor, "/cpu:0").tolist() == [total / comm.size] * 2
    assert extended.reduce_to("sum", local_tensor, torch.empty(0, device="meta")).device.type == "meta"
    assert extended.batch_reduce_to("sum", [(local_tensor, None), (1.0, None)])[1] == comm.size
    assert extended.broadcast_to(local_tensor, local_tensor).tolist() == [1, 1]
    assert extended.broadcast_to(float(comm.rank), None) == 0.0
    assert local_tensor.tolist() == [comm.rank + 1] * 2
    assert (
        hpcdist.get_strategy().extended.broadcast_to(local_tensor, hpcdist.PerReplica([local_tensor])).tolist()
        == local_tensor.tolist()
    )


@pytest.mark.feature("tf.variables-models-remember", "strategies.extended", "semantics.models-know-their-strategy")
def test_variables_know_their_strategy(strategy):
    outside = torch.nn.Linear(2, 1)
    with strategy.scope():
        inside = torch.nn.BatchNorm1d(2)
    assert strategy.extended.variable_created_in_scope(inside.weight)
    assert strategy.extended.variable_created_in_scope(inside.running_mean)
    assert not strategy.extended.variable_created_in_scope(outside.weight)
    default = hpcdist.get_strategy().extended
    assert default.variable_created_in_scope(outside.weight)
    assert not default.variable_created_in_scope(inside.weight)
    with strategy.extended.colocate_vars_with(inside.weight):
        assert torch.ones(1).device == inside.weight.device
    with pytest.raises(ValueError, match="MultiWorkerMirroredStrategy.*Parameter"):
        with strategy.extended.colocate_vars_with(outside.weight):
            pass


@pytest.mark.feature("strategies.extended")
def test_colocated_means_on_the_same_device():
    meta_strategy = hpcdist.OneDeviceStrategy("meta")
    with meta_strategy.scope():
        model = torch.nn.Linear(2, 1)
    with meta_strategy.extended.colocate_vars_with(model.weight):
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.feature("tf.save-called-all", "semantics.save-on-all-ranks", "semantics.worker-numbers")
def test_devices_and_who_writes(strategy, comm):
    device = "cuda:" if torch.cuda.is_available() else "cpu"
    assert strategy.extended.worker_devices[0].startswith(device)
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.extended.should_checkpoint == strategy.extended.should_save_summary == (comm.rank == 0)
    meta_extended = hpcdist.OneDeviceStrategy("meta").extended
    assert meta_extended.worker_devices == ("meta",)
    assert meta_extended.should_checkpoint


# -- one device --------------------------------------------------------------------------------------------------------


def train(strategy):
    torch.manual_seed(3)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = strategy.experimental_distribute_dataset(make_data(12, 4))

    def step(x, y):
        optimizer.zero_grad()
        hpcdist.compute_average_loss((model(x) - y) ** 2, global_batch_size=4).backward()
        optimizer.step()

    for batch in batches:
        strategy.run(step, args=batch)
    return model, optimizer, batches


@pytest.mark.feature("tf.onedevicestrategy-device-what", "strategies.one-device-strategy")
def test_one_device_places_modules_and_what_run_makes():
    strategy = hpcdist.OneDeviceStrategy("meta")
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        assert torch.nn.Linear(2, 1).weight.device.type == "meta"
    assert torch.nn.Linear(2, 1).weight.device.type == "cpu"
    assert strategy.run(lambda: torch.ones(1).device.type) == "meta"
    assert strategy.run(lambda: hpcdist.get_replica_context().replica_id_in_sync_group) == 0
    assert torch.ones(1).device.type == "cpu"


def test_one_device_needs_no_other_rank(comm):
    strategy = hpcdist.OneDeviceStrategy("cpu")
    assert strategy.num_replicas_in_sync == 1
    assert strategy.is_chief
    assert strategy.reduce("sum", comm.rank + 1, axis=None) == comm.rank + 1
    if comm.rank == 0:
        train(strategy)


def test_one_device_equals_one_mirrored_replica(comm):
    if comm.size > 1:
        pytest.skip("one rank is one replica")
    ours = train(hpcdist.OneDeviceStrategy("cpu"))[0].state_dict()
    mirrored = train(hpcdist.MirroredStrategy())[0].state_dict()
    assert all(torch.equal(ours[name], mirrored[name]) for name in ours)


def test_one_device_resumes_with_the_same_random_numbers():
    strategy = hpcdist.OneDeviceStrategy("cpu")
    train(strategy)
    state = strategy.state_dict()
    assert state["step"] == 3
    expected = torch.rand(3)
    resumed_strategy = hpcdist.OneDeviceStrategy("cpu")
    torch.rand(5)
    resumed_strategy.load_state_dict(state)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("/gpu:99", "expected cuda:99 in this process, got .* GPUs"),
        ("/tpu:0", "expected xla:0 in this process"),
        ("/job:worker/task:0", "such as 'cpu', '/gpu:0' .* got '/job:worker/task:0'"),
        ("nothing:0", "got 'nothing:0'; correct the name"),
    ],
)
def test_a_device_that_is_not_there(device, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        hpcdist.OneDeviceStrategy(device)
    assert "\n" not in str(caught.value)


def test_a_single_rank_that_sees_several_gpus_says_so(comm, gpus, caplog):
    gpus(4)
    hpcdist.MirroredStrategy()
    assert ("got 1 rank and 4 visible GPUs" in caplog.text) == (comm.size == 1)


def test_a_cell_that_makes_a_strategy_runs_again():
    """As in a notebook: the names are bound anew, and the old strategy is gone or idle."""
    cell = {"hpcdist": hpcdist, "torch": torch}
    code = """
strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
with strategy.scope():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
model(torch.ones(2, 3)).mean().backward()
optimizer.step()
weights = model.weight.detach().clone()
"""
    exec(code, cell)
    first = cell["weights"]
    exec(code, cell)
    assert torch.equal(cell["weights"], first)


@pytest.mark.feature("tf.onedevicestrategy-device-inputs", "strategies.one-device-strategy")
def test_inputs_are_moved():
    strategy = hpcdist.OneDeviceStrategy("meta")
    data = make_data()
    host_options = hpcdist.InputOptions(experimental_fetch_to_device=False)
    for batches, kind in (
        (strategy.experimental_distribute_dataset(data), "meta"),
        (strategy.distribute_datasets_from_function(lambda context: data), "meta"),
        (strategy.experimental_distribute_dataset(data, host_options), "cpu"),
    ):
        assert next(iter(batches))[0].device.type == kind


@pytest.mark.feature("strategies.mirrored-strategy")
def test_several_host_devices_of_one_process_are_as_many_replicas(comm):
    if comm.size > 1:
        with pytest.raises(ConfigurationError, match=f"{comm.size + 1} devices.*{comm.size} ranks"):
            hpcdist.MirroredStrategy([f"/cpu:{index}" for index in range(comm.size + 1)])
        return
    strategy = hpcdist.MirroredStrategy(["/cpu:0", "/cpu:1"])
    assert strategy.num_replicas_in_sync == 2
    ids = strategy.run(lambda: hpcdist.get_replica_context().replica_id_in_sync_group)
    assert strategy.experimental_local_results(ids) == (0, 1)


@pytest.mark.feature("strategies.multi-worker-mirrored-strategy")
def test_the_algorithm_as_older_guides_write_it(comm):
    ring = hpcdist.CollectiveCommunication.RING
    for strategy in (
        hpcdist.experimental.MultiWorkerMirroredStrategy(ring),
        hpcdist.experimental.MultiWorkerMirroredStrategy(communication=ring),
    ):
        if comm.size > 1:
            assert strategy.reducer.route.name == "RING"
        assert strategy.reduce("sum", 1, axis=None) == comm.size
    mirrored = hpcdist.MirroredStrategy(cross_device_ops=hpcdist.ReductionToOneDevice("/cpu:0"), gradient_op="sum")
    with mirrored.scope():
        model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[comm.size, comm.size]]


def test_functions_of_the_guides_run_as_they_are(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()

    @hpcdist.function
    def step(value):
        return strategy.reduce("sum", strategy.run(lambda: value), axis=None)

    @hpcdist.function(jit_compile=False)
    def twice(value):
        return 2 * step(value)

    assert twice(torch.ones(2)).tolist() == [2 * comm.size] * 2


@pytest.fixture
def gpus(monkeypatch):
    """Let torch seem to see as many GPUs as asked for; return those that became the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def see(n_gpus):
        if n_gpus:
            monkeypatch.setattr(multi_worker, "require_device", lambda device, name: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
        return chosen

    return see


@pytest.mark.parametrize("requested_device", [None, "cuda"])
def test_each_rank_takes_its_own_gpu(comm, gpus, requested_device):
    chosen = gpus(comm.size)
    expected_device = torch.device("cuda", comm.rank)
    strategy = hpcdist.MultiWorkerMirroredStrategy(device=requested_device)
    assert strategy.device == expected_device
    assert chosen == [expected_device]
    with strategy.scope():
        assert torch.get_default_device() == expected_device
    assert strategy.run(torch.get_default_device) == expected_device
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(np.zeros(8)).batch(4))
    assert batches._device() == expected_device


def test_the_host_when_it_is_asked_for(comm, gpus):
    chosen = gpus(comm.size)
    strategy = hpcdist.MultiWorkerMirroredStrategy(device="cpu")
    assert (strategy.device, chosen) == (torch.device("cpu"), [])
    with strategy.scope():
        assert torch.nn.Linear(1, 1).weight.device.type == "cpu"


def test_a_gpu_that_is_not_there_is_an_error_on_every_rank(comm, gpus):
    gpus(0)
    with pytest.raises(ConfigurationError, match=r"0.*0.*GPUs.*'cpu'") as caught:
        hpcdist.MultiWorkerMirroredStrategy(device="cuda")
    assert caught.value.is_agreed


def test_ranks_with_several_replicas_stay_on_the_host(comm, gpus):
    gpus(comm.size)
    assert hpcdist.MultiWorkerMirroredStrategy(num_replicas=comm.size + 1).device == torch.device("cpu")
    assert hpcdist.MultiWorkerMirroredStrategy(num_replicas=comm.size).device == torch.device("cuda", comm.rank)


def test_fewer_gpus_than_ranks_are_shared_with_a_warning(comm, gpus, caplog):
    gpus(1)
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    assert strategy.device == torch.device("cuda", 0)
    assert ("expected NCCL and a GPU for each rank, got neither on some" in caplog.text) is (comm.rank == 0)


def test_a_strategy_prints_what_it_is(comm):
    rank_summary = f"this is rank {comm.rank} (worker {comm.rank}) on cpu; gradients are summed by"
    many = "s" if comm.size > 1 else ""
    text = str(hpcdist.MultiWorkerMirroredStrategy())
    assert text.startswith(
        f"MultiWorkerMirroredStrategy: {comm.size} replica{many}, {comm.size} rank{many} on 1 host; {rank_summary}"
    )
    assert str(hpcdist.MultiWorkerMirroredStrategy(num_replicas=8)).startswith(
        "MultiWorkerMirroredStrategy: 8 replicas, "
    )
    assert str(hpcdist.OneDeviceStrategy("cpu")) == "OneDeviceStrategy: 1 replica on cpu"
