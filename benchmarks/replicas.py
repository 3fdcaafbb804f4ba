"""Time what `num_replicas`, which gives the same bits on any number of ranks, costs beside one replica per rank.

mpirun -n 2 python benchmarks/replicas.py --out out/replicas

Plain: one replica per rank, and the fastest sum. Counted as ranks: the same work, but sums in the order of replicas and
random numbers keyed by replica. Eight counted: eight parts of the same global batch, divided over the ranks; each rank
works on its parts one after another.
"""

import itertools
from functools import partial

import torch
from command_line import add_report_options, parser_of
from measure import Environment, timed_block
from models import MODELS, adam, batches, build
from report import compare
from step_contenders import watches, with_watches
from torch.nn.functional import cross_entropy

import hpcdist
from hpcdist.runtime.process import make_world

BATCH = 64
PLAIN = "one replica per rank"


def parse_args():
    parser = parser_of(__doc__)
    add_report_options(parser, "replicas", n_rounds=10)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    return parser.parse_args()


class Trainer:
    """One way to split the global batch: its strategy, model, optimizer and data."""

    def __init__(self, model, comm, num_replicas):
        self._comm = comm
        before = watches()
        self._strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=num_replicas)
        torch.manual_seed(0)
        with self._strategy.scope():
            self._model = build(model)
            self._optimizer = adam(self._model)
        images, labels = zip(*batches(BATCH, 0, 1), strict=True)
        rows = (torch.cat(images), torch.cat(labels))
        dataset = hpcdist.Dataset.from_tensor_slices(rows)
        dataset = dataset.batch(BATCH).repeat()
        inputs = self._strategy.experimental_distribute_dataset(dataset)
        first_batches = list(itertools.islice(inputs, 16))
        self._data = itertools.cycle(first_batches)
        self._watches = watches() - before

    def _step(self, inputs, labels):
        self._optimizer.zero_grad()
        outputs = self._model(inputs)
        losses = cross_entropy(outputs, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=BATCH)
        loss.backward()
        self._optimizer.step()

    def block(self, n_steps):
        """Return wall and CPU-seconds per step of a block."""

        def run():
            with with_watches(self._watches):
                for batch in itertools.islice(self._data, n_steps):
                    self._strategy.run(self._step, args=batch)

        return timed_block(self._comm, run, n_steps)


def main():
    args = parse_args()
    comm = make_world().role_comm
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    environment = Environment(comm)
    trainers = {
        PLAIN: Trainer(args.model, comm, None),
        f"counted as ranks, {comm.size} replicas": Trainer(args.model, comm, comm.size),
        "counted, 8 replicas": Trainer(args.model, comm, 8),
    }
    blocks = {}
    for name, trainer in trainers.items():
        block = partial(trainer.block, args.steps)
        block()
        blocks[name] = block
    title = f"{args.model}, {comm.size} ranks"
    case = compare(title, blocks, [PLAIN], args.rounds)
    environment.publish([case], args.out, "replicas", "replicas")


if __name__ == "__main__":
    main()
