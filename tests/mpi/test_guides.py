"""The lines of TensorFlow's guides that make and use strategies, with hpcdist in place of tf.distribute.

From "Distributed training with TensorFlow", "Custom training with tf.distribute.Strategy", "Multi-worker training with
Keras" and "... with a custom training loop", "Distributed input", "Use TPUs". What the machine lacks is said clearly.
"""

import re
import sys

import pytest
import torch

import hpcdist
from hpcdist.errors import ConfigurationError

pytestmark = pytest.mark.mpi

#: Lines that run on any machine.
LINES = [
    "mirrored_strategy = tf.distribute.MirroredStrategy()",
    "strategy = tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())",
    "strategy = tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice())",
    "strategy = tf.distribute.MultiWorkerMirroredStrategy()",
    "strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()",
    "communication_options = tf.distribute.experimental.CommunicationOptions("
    "implementation=tf.distribute.experimental.CommunicationImplementation.RING)",
    "communication_options = tf.distribute.experimental.CommunicationOptions("
    "implementation=tf.distribute.experimental.CommunicationImplementation.NCCL)",
    "strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options="
    "tf.distribute.experimental.CommunicationOptions("
    "implementation=tf.distribute.experimental.CommunicationImplementation.AUTO))",
    "options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=50 * 1024 * 1024, timeout_seconds=120.0, "
    "implementation=tf.distribute.experimental.CommunicationImplementation.AUTO)",
    "hints = tf.distribute.experimental.CollectiveHints(bytes_per_pack=50 * 1024 * 1024)",
    "strategy = tf.distribute.experimental.CentralStorageStrategy()",
    "central_storage_strategy = tf.distribute.experimental.CentralStorageStrategy()",
    'strategy = tf.distribute.OneDeviceStrategy(device="/cpu:0")',
    "default_strategy = tf.distribute.get_strategy()",
    "in_scope = tf.distribute.has_strategy()",
    "context = tf.distribute.get_replica_context()",
    "is_cross = tf.distribute.in_cross_replica_context()",
    "tf.distribute.experimental_set_strategy(None)",
    "num_replicas = tf.distribute.MirroredStrategy().num_replicas_in_sync",
    "tpu_resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu='')",
    "tf.config.experimental_connect_to_cluster(tf.distribute.cluster_resolver.TPUClusterResolver(tpu='local'))",
    "resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()",
    "resolver = tf.distribute.cluster_resolver.SimpleClusterResolver("
    "tf.train.ClusterSpec({'worker': ['host1:2222', 'host2:2222']}), rpc_layer='grpc')",
    "resolver = tf.distribute.cluster_resolver.UnionResolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())",
    "strategy = tf.distribute.MultiWorkerMirroredStrategy("
    "cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver())",
]

#: Lines that need what a machine may lack -> what the error says then.
LACKING = {
    'strategy = tf.distribute.MirroredStrategy(devices=["/gpu:98", "/gpu:99"])': "one rank for each of 2 devices|GPU",
    'strategy = tf.distribute.MirroredStrategy(["GPU:98"] * n_ranks)': r"expected cuda:98 .* got \d+ GPUs",
    'strategy = tf.distribute.OneDeviceStrategy(device="/gpu:99")': r"expected cuda:99 .* got \d+ GPUs",
    'strategy = tf.distribute.experimental.CentralStorageStrategy(["/gpu:99"] * n_ranks)': "expected cuda:99",
    "strategy = tf.distribute.TPUStrategy(tf.distribute.cluster_resolver.TPUClusterResolver(tpu=''))": "torch_xla",
    "tf.tpu.experimental.initialize_tpu_system(tf.distribute.cluster_resolver.TPUClusterResolver(tpu=''))": "torch_xla",
    "strategy = tf.distribute.experimental.TPUStrategy()": "torch_xla",
    "resolver = tf.distribute.cluster_resolver.SlurmClusterResolver()": "expected SLURM_",
    "parameter_server_strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver."
    "TFConfigClusterResolver(), variable_partitioner=None)": "expected ps tasks",
    "parameter_server_strategy = tf.distribute.experimental.ParameterServerStrategy()": "expected ps tasks",
    "ps_strategy = tf.compat.v1.distribute.experimental.ParameterServerStrategy()": "expected ps tasks",
}

#: TensorFlow's paths outside tf.distribute whose names hpcdist has too.
PATHS = {
    "tf.config.experimental_connect_to_cluster": "hpcdist.experimental_connect_to_cluster",
    "tf.tpu.experimental.initialize_tpu_system": "hpcdist.initialize_tpu_system",
    "tf.train.ClusterSpec": "hpcdist.ClusterSpec",
    "tf.compat.v1.distribute": "hpcdist.compat.v1.distribute",
    "tf.distribute": "hpcdist",
}


def translated(line):
    for tf_path, ours in PATHS.items():
        line = line.replace(tf_path, ours)
    assert "tf." not in line.replace("conf.", "")
    return line


def execute(line, comm):
    names = {"hpcdist": hpcdist, "n_ranks": comm.size}
    exec(translated(line), names)
    return names


@pytest.mark.feature(
    "tf.multiworkermirroredstrategy-cluster-resolver",
    "strategies.multi-worker-mirrored-strategy",
    "collectives.cross-device-ops",
    "collectives.communication-options",
)
@pytest.mark.parametrize("line", LINES)
def test_lines_of_the_guides(line, comm):
    names = execute(line, comm)
    match = re.match(r"(\w*strategy) = ", line)
    if match:
        strategy = names[match[1]]
        with strategy.scope():
            assert hpcdist.get_strategy() is strategy
        assert strategy.run(lambda x: x + 1, args=(1,)) == 2
        if "OneDeviceStrategy" in line or "get_strategy" in line:
            n_replicas = 1
        else:
            n_replicas = comm.size
        assert strategy.num_replicas_in_sync == n_replicas
        assert strategy.reduce(hpcdist.ReduceOp.SUM, 1.0, axis=None) == n_replicas


@pytest.mark.feature("gpu.without-gpus")
@pytest.mark.parametrize("line", LACKING)
def test_lines_that_need_what_is_not_here(line, comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigurationError, match=LACKING[line]) as caught:
        execute(line, comm)
    assert "\n" not in str(caught.value)


@pytest.mark.feature("tf.mirroredstrategy-devices-cross", "tf.reduce-result-same", "training.custom-loops")
def test_the_custom_training_loop(comm):
    """Custom training with tf.distribute.Strategy: dataset, scope, train_step, distributed_train_step, epochs."""
    strategy = hpcdist.MirroredStrategy()
    global_batch_size = 4 * strategy.num_replicas_in_sync
    rows = torch.linspace(-1, 1, 8 * comm.size).reshape(-1, 1)
    train_dataset = hpcdist.Dataset.from_tensor_slices((rows, 2 * rows)).shuffle(8 * comm.size, seed=1)
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset.batch(global_batch_size))
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def compute_loss(labels, predictions):
        return hpcdist.compute_average_loss(((predictions - labels) ** 2)[:, 0], global_batch_size=global_batch_size)

    def train_step(inputs):
        images, labels = inputs
        optimizer.zero_grad()
        loss = compute_loss(labels, model(images))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(hpcdist.ReduceOp.SUM, per_replica_losses, axis=None)

    losses = []
    for _ in range(6):
        total_loss = 0.0
        num_batches = 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        losses.append(float(total_loss / num_batches))
    assert num_batches == 2
    assert losses[-1] < losses[0] / 10
    assert len(set(comm.allgather(losses[-1]))) == 1
