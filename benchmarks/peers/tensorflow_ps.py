"""Time TensorFlow's ParameterServerStrategy: a coordinator, workers and a ps, one process each on this host.

python benchmarks/peers/tensorflow_ps.py --workers 2

The guides' MLP with SGD, batches of 32 rows for each worker, one step a closure, as the guide schedules them.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from clock import free_ports

LIMIT_S = 200


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="of all workers together")
    return parser.parse_args()


def serve():
    """Run a worker or a ps until it is ended."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        resolver.task_type,
        resolver.task_id,
        resolver.rpc_layer or "grpc",
    )
    server.join()


def coordinate(args):
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((784,)),
                tf.keras.layers.Dense(256, activation="relu"),
                tf.keras.layers.Dense(256, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        variables = model.trainable_variables
    images = tf.random.normal((32, 784))
    labels = tf.random.uniform((32,), 0, 10, tf.int32)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, model(images, training=True)
            )
            loss = tf.reduce_sum(losses) / (32 * args.workers)
        for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True):
            variable.assign_sub(0.01 * gradient)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    for n_steps in (60, args.steps):
        since = time.perf_counter()
        for _ in range(n_steps):
            coordinator.schedule(step)
        coordinator.join()
        steps_per_s = n_steps / (time.perf_counter() - since)
    result = {
        "steps_per_s": steps_per_s,
        "workers": args.workers,
        "tensorflow": tf.__version__,
    }
    print(json.dumps(result), flush=True)


def launch(args):
    ports = free_ports(args.workers + 2)
    addresses = [f"localhost:{port}" for port in ports]
    cluster = {
        "worker": addresses[: args.workers],
        "ps": [addresses[-2]],
        "chief": [addresses[-1]],
    }
    workers = [("worker", index) for index in range(args.workers)]
    tasks = [*workers, ("ps", 0), ("chief", 0)]
    threads = {
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    processes = []
    try:
        for kind, index in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
            environ = {
                **os.environ,
                **threads,
                "TF_CONFIG": config,
                "GRPC_FAIL_FAST": "use_caller",
            }
            processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environ))
        code = processes[-1].wait(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
    raise SystemExit(code)


if __name__ == "__main__":
    if "TF_CONFIG" not in os.environ:
        launch(parse_args())
    elif json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "chief":
        coordinate(parse_args())
    else:
        serve()
