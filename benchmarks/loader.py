"""Time epochs of a distributed DataLoader beside those of torch's own, in one launch, in turn.

mpirun -n 2 python benchmarks/loader.py

Both read as many rows on each rank. The first epoch, in which workers start, is not counted.
"""

import statistics
import time

import torch
from command_line import parser_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hpcdist

#: A row of the table: workers, whether they are persistent, milliseconds of torch and of hpcdist, and their ratio.
ROW = "{:7d}  {:10s}  {:8.1f}  {:10.1f}  {:5.3f}"


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
        values = torch.full((16,), float(row))
        return values, row


def parse_args():
    parser = parser_of(__doc__)
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
    distributed_loader = strategy.experimental_distribute_dataset(loader)
    torch_times_s = []
    hpcdist_times_s = []
    sides = [(torch_loader, torch_times_s), (distributed_loader, hpcdist_times_s)]
    for epoch in range(arguments.epochs + 1):
        sides.reverse()
        for batches, times_s in sides:
            seconds = epoch_s(batches)
            if epoch:
                times_s.append(seconds)
    return statistics.median(torch_times_s), statistics.median(hpcdist_times_s)


def main():
    arguments = parse_args()
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    if strategy.is_chief:
        n_ranks = strategy.world.size
        print(f"{n_ranks} ranks, {arguments.rows} rows each, {arguments.row_ms} ms a row")
        print("workers  persistent  torch ms  hpcdist ms  ratio")
    settings = []
    for n_workers in arguments.workers:
        settings.append((n_workers, False))
        if n_workers:
            settings.append((n_workers, True))
    for n_workers, is_persistent in settings:
        torch_s, hpcdist_s = compare(strategy, arguments, n_workers, is_persistent)
        if strategy.is_chief:
            ratio = hpcdist_s / torch_s
            setting = (n_workers, str(is_persistent))
            row = ROW.format(*setting, 1000 * torch_s, 1000 * hpcdist_s, ratio)
            print(row, flush=True)


if __name__ == "__main__":
    main()
