"""Time an epoch of the guides' models on 1, 2 and 4 ranks, with the same global batch.

python benchmarks/epochs.py --out out/epochs

Launches with 1, 2 and 4 ranks take turns; the first epoch of each is not counted. A rank has one thread; ranks beyond
the cores share them, and cannot be faster.
"""

import json
import statistics
import time
from pathlib import Path

from command_line import mpirun_command, parser_of, result_of, write_json

BATCH = 128
#: A row of the table: model and ranks, the median of an epoch, the fastest and the slowest one, and the factor.
ROW = "{}, {} ranks: {:.3f} s an epoch ({:.3f} .. {:.3f}), {:.2f} times"


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, help="folder for epochs.json")
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each number of ranks")
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="timed epochs of a launch, after one to warm up",
    )
    parser.add_argument("--steps", type=int, default=128, help="of an epoch")
    parser.add_argument("--job", metavar="MODEL", help="train in this process; what launches do")
    return parser.parse_args()


def train(args):
    """Train in this process, as a rank of a launch, and print the seconds of each epoch."""
    import torch
    from models import adam, build

    import hpcdist

    strategy = hpcdist.MultiWorkerMirroredStrategy()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    n_rows = BATCH * args.steps
    rows = torch.randn(n_rows, 784, generator=generator)
    labels = torch.randint(10, (n_rows,), generator=generator)
    dataset = hpcdist.Dataset.from_tensor_slices((rows, labels))
    with strategy.scope():
        model = hpcdist.Model(build(args.job))
        loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(adam(model), loss)
    batches = strategy.experimental_distribute_dataset(dataset.batch(BATCH))
    times = []
    for _ in range(args.epochs + 1):
        strategy.barrier()
        started = time.perf_counter()
        model.fit(batches, verbose=0)
        strategy.barrier()
        taken_s = time.perf_counter() - started
        times.append(taken_s)
    if strategy.is_chief:
        print(json.dumps(times[1:]), flush=True)


def launch(args, model, n_ranks):
    """Return the seconds of each epoch of one launch."""
    options = ["--job", model, "--epochs", args.epochs, "--steps", args.steps]
    command = mpirun_command(n_ranks, __file__, *options)
    return result_of(command)


def main():
    args = parse_args()
    if args.job:
        train(args)
        return
    counts = list(map(int, args.ranks.split(",")))
    epoch_times = {}
    for model in args.models.split(","):
        times_of = {n_ranks: [] for n_ranks in counts}
        order = list(counts)
        for _ in range(args.rounds):
            order.reverse()
            for n_ranks in order:
                times_of[n_ranks] += launch(args, model, n_ranks)
        epoch_times[model] = times_of
        show(model, times_of)
    if args.out:
        write_json(args.out, "epochs", epoch_times)


def show(model, times_of):
    """Print the times of a model's epochs, and how many times faster they are than on the first number of ranks."""
    first_median = None
    for n_ranks, times in times_of.items():
        median = statistics.median(times)
        if first_median is None:
            first_median = median
        factor = first_median / median
        row = ROW.format(model, n_ranks, median, min(times), max(times), factor)
        print(row)


if __name__ == "__main__":
    main()
