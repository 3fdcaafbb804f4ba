"""Time epochs of a distributed DataLoader beside those of torch's own, in one launch, in turn.

mpirun -n 2 python benchmarks/loader.py

Both read as many rows on each rank. The first epoch, in which workers start, is not counted.
"""

import argparse
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hpcdist


class SlowRows(Dataset):
    """Rows that take a time to read.

    Args:
        n_rows: number of rows.
        row_s: seconds for a row.
    """

    def __init__(self, n_rows, row_s):
        self.n_rows = n_rows
        self.row_s = row_s

    def __len__(self):
        return self.n_rows

    def __getitem__(self, row):
        time.sleep(self.row_s)
        return torch.full((16,), float(row)), row


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512, help="rows of an epoch for each rank")
    parser.add_argument("--batch", type=int, default=32, help="rows of a batch for each rank")
    parser.add_argument("--row-ms", type=float, default=1.0, help="time that reading a row takes")
    parser.add_argument(
        "--epochs", type=int, default=8, help="epochs of each side that are counted"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    return parser.parse_args()


def epoch_s(batches):
    """Return how long an epoch takes, from the first draw to the end."""
    hpcdist.barrier()
    start_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start_s


def compare(strategy, arguments, n_workers, is_persistent):
    """Return the median seconds of an epoch by torch, and by hpcdist. Collective over all ranks."""
    world = strategy.world
    data = SlowRows(arguments.rows * world.size, arguments.row_ms / 1000)
    settings = {"num_workers": n_workers, "persistent_workers": is_persistent}
    sampler = DistributedSampler(data, world.size, world.rank)
    torch_loader = DataLoader(data, arguments.batch, sampler=sampler, **settings)
    loader = DataLoader(data, arguments.batch * world.size, shuffle=True, **settings)
    sides = {"torch": torch_loader, "hpcdist": strategy.experimental_distribute_dataset(loader)}
    times_s = {"torch": [], "hpcdist": []}
    for epoch in range(arguments.epochs + 1):
        order = list(sides) if epoch % 2 else list(reversed(sides))
        for side in order:
            seconds = epoch_s(sides[side])
            if epoch:
                times_s[side].append(seconds)
    torch_s = statistics.median(times_s["torch"])
    hpcdist_s = statistics.median(times_s["hpcdist"])
    return torch_s, hpcdist_s


def main():
    arguments = parse_args()
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    if strategy.is_chief:
        print(
            f"{strategy.world.size} ranks, {arguments.rows} rows each, {arguments.row_ms} ms a row"
        )
        print("workers  persistent  torch ms  hpcdist ms  ratio")
    for n_workers in arguments.workers:
        for is_persistent in (False, True) if n_workers else (False,):
            torch_s, hpcdist_s = compare(strategy, arguments, n_workers, is_persistent)
            if strategy.is_chief:
                setting = f"{n_workers:7d}  {is_persistent!s:10s}"
                times = f"{1000 * torch_s:8.1f}  {1000 * hpcdist_s:10.1f}"
                ratio = hpcdist_s / torch_s
                print(f"{setting}  {times}  {ratio:5.3f}", flush=True)


if __name__ == "__main__":
    main()
