"""Time training steps of TensorFlow's MultiWorkerMirroredStrategy with its RING, one process per worker on this host.

python benchmarks/peers/tensorflow_ring.py --layers 784,256,256,10 --case mlp --out out/peers
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

N_BATCHES = 32
LIMIT_S = 300


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for tensorflow-CASE.json")
    parser.add_argument("--layers", default="784,256,256,10")
    parser.add_argument("--case", default="mlp", help="what the model is called")
    parser.add_argument("--batch", type=int, default=64, help="rows of one step on all workers together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps of a block; two blocks a round")
    return parser.parse_args()


def launch(args):
    """Start one process per worker and wait for all; end them if one fails or the time is up."""
    addresses = [f"localhost:{port}" for port in free_ports(args.workers)]
    workers = [start_worker(addresses, index) for index in range(args.workers)]
    try:
        codes = [worker.wait(LIMIT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(codes):
        raise SystemExit(f"tensorflow_ring: expected all workers to end with 0, got {codes}.")


def start_worker(addresses, index):
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **threads, "TF_CONFIG": json.dumps(config)})


def free_ports(n_ports):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(n_ports)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def make_step(args):
    """Return a function that takes a number of steps with all workers and returns the last loss."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    sizes = [int(size) for size in args.layers.split(",")]
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [tf.keras.layers.Dense(size, activation="relu") for size in sizes[1:-1]]
        model = tf.keras.Sequential([tf.keras.Input((sizes[0],)), *hidden, tf.keras.layers.Dense(sizes[-1])])
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / args.batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(images, labels):
        return strategy.run(replica_step, args=(images, labels))

    rows = args.batch // args.workers
    tf.random.set_seed(2 + int(json.loads(os.environ["TF_CONFIG"])["task"]["index"]))
    data = [
        (tf.random.normal((rows, sizes[0])), tf.random.uniform((rows,), 0, sizes[-1], tf.int32))
        for _ in range(N_BATCHES)
    ]

    def train(n_steps):
        for number in range(n_steps):
            loss = step(*data[number % N_BATCHES])
        return float(loss)

    return train


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def work(args):
    """Time this worker's steps; worker 0 writes them, with its CPU-seconds times the number of workers."""
    train = make_step(args)
    first = train(1)

    def block():
        started, cpu_before = time.perf_counter(), cpu_s()
        loss = train(args.steps)
        assert loss < first, f"tensorflow_ring: expected a loss below the first, {first}, got {loss}"
        return (time.perf_counter() - started) / args.steps, (cpu_s() - cpu_before) / args.steps * args.workers

    train(args.steps)
    rounds = [(block(), block()) for _ in range(args.rounds)]
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        write(args, rounds)


def write(args, rounds):
    import tensorflow as tf

    name = "TensorFlow MWMS RING"
    one = {"case": args.case, "bytes": None, "baselines": [name]}
    one["samples"] = {name: [(first[0], second[0]) for first, second in rounds]}
    one["cpu"] = {name: [(first[1], second[1]) for first, second in rounds]}
    environment = {"tensorflow": tf.__version__, "workers": args.workers}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"tensorflow-{args.case}.json"
    path.write_text(json.dumps({"label": "tensorflow", "environment": environment, "cases": [one]}, indent=1))


if __name__ == "__main__":
    work(parse_args()) if "TF_CONFIG" in os.environ else launch(parse_args())
