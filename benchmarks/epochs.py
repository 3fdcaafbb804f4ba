"""Time an epoch of the guides' models on 1, 2 and 4 ranks, with the same global batch.

python benchmarks/epochs.py --out out/epochs

The numbers of ranks take turns, each launch with a warm-up epoch. A rank has one thread; ranks beyond the cores share
them, and cannot be faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BATCH = 128


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for epochs.json")
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each number of ranks")
    parser.add_argument("--epochs", type=int, default=3, help="of a launch, after the first")
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
    rows = torch.randn(BATCH * args.steps, 784, generator=generator)
    labels = torch.randint(10, (BATCH * args.steps,), generator=generator)
    dataset = hpcdist.Dataset.from_tensor_slices((rows, labels)).batch(BATCH)
    with strategy.scope():
        model = hpcdist.Model(build(args.job))
        model.compile(adam(model), hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = strategy.experimental_distribute_dataset(dataset)
    times = []
    for _ in range(args.epochs + 1):
        strategy.barrier()
        started = time.perf_counter()
        model.fit(batches, verbose=0)
        strategy.barrier()
        times.append(time.perf_counter() - started)
    if strategy.is_chief:
        print(json.dumps(times[1:]), flush=True)


def launch(args, model, n_ranks):
    """Return the seconds of each epoch of one launch."""
    mpirun = Path(sys.executable).with_name("mpirun")
    options = ["--job", model, "--epochs", args.epochs, "--steps", args.steps]
    command = [mpirun, "-n", n_ranks, sys.executable, __file__, *options]
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(
            f"epochs: expected the launch to end with 0, got {done.returncode}:\n{done.stderr}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    args = parse_args()
    if args.job:
        train(args)
        return
    counts = list(map(int, args.ranks.split(",")))
    epoch_times = {}
    for model in args.models.split(","):
        times_of = {n_ranks: [] for n_ranks in counts}
        for number in range(args.rounds):
            for n_ranks in counts if number % 2 else reversed(counts):
                times_of[n_ranks] += launch(args, model, n_ranks)
        epoch_times[model] = times_of
        first_median = statistics.median(times_of[counts[0]])
        for n_ranks, times in times_of.items():
            median = statistics.median(times)
            spread = f"{min(times):.3f} .. {max(times):.3f}"
            factor = first_median / median
            print(
                f"{model}, {n_ranks} ranks: {median:.3f} s an epoch ({spread}), {factor:.2f} times"
            )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "epochs.json").write_text(json.dumps(epoch_times, indent=1))


if __name__ == "__main__":
    main()
