"""Time training steps of TensorFlow's MultiWorkerMirroredStrategy with its RING, one process per worker on this host.

python benchmarks/peers/tensorflow_ring.py --model mlp --out out/peers/tensorflow.json
"""

import json
import os
import subprocess
import sys
import time

from clock import free_ports, parser, time_rounds, write

N_BATCHES = 32
LIMIT_S = 300


#: Model of `models.py` -> widths of its layers.
LAYERS = {"mlp": [784, 256, 256, 10], "wide": [784, 2048, 2048, 10]}


def parse_args():
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=2)
    return options.parse_args()


def launch(args):
    """Start one process per worker and wait for all; end them if one fails or the time is up."""
    addresses = [f"localhost:{port}" for port in free_ports(args.workers)]
    workers = [start_worker(addresses, index) for index in range(args.workers)]
    try:
        codes = wait_for(workers)
    finally:
        for worker in workers:
            worker.kill()
    if codes != [0] * len(codes):
        raise SystemExit(f"tensorflow_ring: expected all workers to end with 0, got {codes}.")


def wait_for(workers):
    """Return the exit codes once all workers have ended, one has failed or the time is up: None for one that runs."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.1)


def start_worker(addresses, index):
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    threads = {
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    environ = {**os.environ, **threads, "TF_CONFIG": json.dumps(config)}
    return subprocess.Popen([sys.executable, *sys.argv], env=environ)


def make_train(args):
    """Return a function that takes a number of steps with all workers and returns the last loss."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    sizes = LAYERS[args.model]
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [tf.keras.layers.Dense(size, activation="relu") for size in sizes[1:-1]]
        inputs = tf.keras.Input((sizes[0],))
        outputs = tf.keras.layers.Dense(sizes[-1])
        model = tf.keras.Sequential([inputs, *hidden, outputs])
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, model(images, training=True)
            )
            loss = tf.reduce_sum(losses) / args.batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(images, labels):
        return strategy.run(replica_step, args=(images, labels))

    rows = args.batch // args.workers
    tf.random.set_seed(2 + task_index())
    data = []
    for _ in range(N_BATCHES):
        images = tf.random.normal((rows, sizes[0]))
        labels = tf.random.uniform((rows,), 0, sizes[-1], tf.int32)
        data.append((images, labels))

    def train(n_steps):
        for number in range(n_steps):
            loss = step(*data[number % N_BATCHES])
        return float(loss)

    return train


def work(args):
    """Time this worker's steps; worker 0 writes them."""
    import tensorflow as tf

    rounds = time_rounds(make_train(args), args, args.workers)
    if task_index() == 0:
        environment = {"tensorflow": tf.__version__, "workers": args.workers}
        write("TensorFlow MWMS RING", rounds, args, environment, is_baseline=True)


def task_index():
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work(parse_args())
    else:
        launch(parse_args())
