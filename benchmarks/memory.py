"""Measure the memory of a training step: a plain Adam on every rank, and shares of it by ZeroRedundancyOptimizer.

mpirun -n 4 python benchmarks/memory.py
mpirun -n 4 python benchmarks/memory.py --sharded

Printed is the proportional set size (shared pages counted once in all) summed over the ranks, less what it was after a
step of a tiny model: the most during a step, from samples, and after zero_grad. Layers have 41 MB: the C library keeps
smaller blocks that are freed (set MALLOC_MMAP_THRESHOLD_=1048576 against that).
"""

import threading
from functools import partial
from pathlib import Path

import torch
from command_line import parser_of

import hpcdist
from hpcdist.runtime.process import make_world

INTERVAL_S = 0.02
WIDTH = 3200


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--sharded", action="store_true", help="with ZeroRedundancyOptimizer")
    parser.add_argument(
        "--parameters",
        type=float,
        default=102.4,
        help="millions, in layers of 10.24",
    )
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def pss_bytes():
    """Return the proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            _, kilobytes, _ = line.split()
            return int(kilobytes) << 10
    raise SystemExit("memory: expected Pss in /proc/self/smaps_rollup, got none")


class Sampler:
    """Samples the memory of this process during a block, and keeps the most."""

    def __init__(self):
        self.most = 0

    def __enter__(self):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        while not self._stop.wait(INTERVAL_S):
            self.most = max(self.most, pss_bytes())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def build(width, n_layers, is_sharded):
    """Return a model and its optimizer."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = torch.nn.Sequential()
        for _ in range(n_layers):
            layer = torch.nn.Linear(width, width, bias=False)
            model.append(layer)
        kind = torch.optim.Adam
        if is_sharded:
            kind = partial(hpcdist.optim.ZeroRedundancyOptimizer, optimizer_class=kind)
        return model, kind(model.parameters(), lr=1e-3, fused=True)


def take_step(model, optimizer, comm):
    """Take a training step on made-up rows. Collective over `comm`."""
    n_features = model[0].in_features
    rows = torch.full((2, n_features), 1.0 + comm.rank)
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    comm.Barrier()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    comm = make_world().comm
    tiny_model, tiny_optimizer = build(32, 1, args.sharded)
    take_step(tiny_model, tiny_optimizer, comm)
    before = comm.allreduce(pss_bytes())
    n_layers = max(1, round(args.parameters / 10.24))
    model, optimizer = build(WIDTH, n_layers, args.sharded)
    with Sampler() as sampler:
        for step in range(args.steps):
            if step == args.steps - 1:  # earlier steps make the memory that stays
                comm.Barrier()
                sampler.most = 0
            take_step(model, optimizer, comm)
            if step < args.steps - 1:
                optimizer.zero_grad()
    peak = comm.allreduce(sampler.most)
    optimizer.zero_grad()
    comm.Barrier()
    after = comm.allreduce(pss_bytes())
    if comm.rank == 0:
        name = "ZeroRedundancyOptimizer" if args.sharded else "Adam on every rank"
        n_parameters = WIDTH * WIDTH * n_layers
        millions = n_parameters / 1e6
        peak_mb = round((peak - before) / 1e6)
        after_mb = round((after - before) / 1e6)
        setting = f"{name}, {millions:g} M parameters, {comm.size} ranks"
        most = f"at most {peak_mb} MB in a step"
        print(f"{setting}: {most}, {after_mb} MB after zero_grad")


if __name__ == "__main__":
    main()
