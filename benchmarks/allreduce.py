"""Time hpcdist's all-reduce beside MPI_Allreduce and torch gloo, in one launch, block by block in turn.

mpirun -n 2 python benchmarks/allreduce.py --out out/allreduce
mpirun -n 4 python benchmarks/allreduce.py --out out/allreduce-4 --sizes 64M
mpirun -n 4 python benchmarks/allreduce.py --out out/algorithms --algorithms RING,HALVING,HIERARCHICAL,SHARED_MEMORY
mpirun -n 2 python benchmarks/allreduce.py --device cuda --out out/gpu
python benchmarks/allreduce.py --merge out/a/allreduce.json out/b/allreduce.json --out out/both

Every block fills all its buffers with fresh random values, which is not timed, calls once per buffer, and checks every
result. The buffers of a rank are larger than twice the last cache together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from buffers import RandomSets
from command_line import (
    add_merge_options,
    add_report_options,
    parse_bytes,
    parser_of,
)
from gloo import start_gloo
from measure import Environment, last_cache_bytes, timed_block
from report import compare, publish_merged

import hpcdist
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world

SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
QUICK_SIZES = "1K,256K,4M"
MPI_IN_PLACE = "MPI_Allreduce in place"
#: For buffers on a GPU, without NCCL.
COPY_AND_MPI = "copy to the host, MPI_Allreduce, copy back"
BASELINES = [
    MPI_IN_PLACE,
    "MPI_Allreduce",
    COPY_AND_MPI,
    "torch gloo",
    "torch nccl",
]


@dataclass
class Contender:
    """One way to sum.

    Attributes:
        call: function of the number of a set, which sums that set of `sources` into the same set of `results`.
        sources: sets that are summed.
        results: sets that hold the sums.
        on_device: buffers on a GPU that are summed in place of `sources`: they are filled from `sources` before, and
            copied to `results` after.
    """

    call: Callable[[int], object]
    sources: list[np.ndarray]
    results: list[np.ndarray]
    on_device: list[torch.Tensor] | None = None

    def upload(self) -> None:
        """Copy the sources to the GPU, if they are summed there."""
        for tensor, array in zip(self.on_device or (), self.sources, strict=False):
            on_host = torch.from_numpy(array)
            tensor.copy_(on_host)
        self.synchronize()

    def download(self) -> None:
        """Copy the sums on the GPU to the results."""
        for tensor, array in zip(self.on_device or (), self.results, strict=False):
            on_host = torch.from_numpy(array)
            on_host.copy_(tensor)

    def synchronize(self) -> None:
        """Wait for the GPU, if it has been used."""
        if self.on_device:
            torch.cuda.synchronize()


def parse_args():
    parser = parser_of(__doc__)
    add_report_options(parser, "allreduce", n_rounds=10)
    add_merge_options(parser)
    parser.add_argument("--sizes", help=f"bytes per rank, default {SIZES}")
    parser.add_argument("--seconds", type=float, default=30.0, help="rough limit for one size")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few small sizes, for a look whether all works",
    )
    parser.add_argument(
        "--algorithms",
        help="built-in algorithms to time beside AUTO, such as RING,HALVING,HIERARCHICAL",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="memory that the buffers are in",
    )
    return parser.parse_args()


def name_bytes(nbytes):
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            number = nbytes / factor
            return f"{number:g} {unit}"
    return f"{nbytes} B"


def private_sets(n_elements, n_sets):
    """Return sets of zeros, one behind the other in memory."""
    sets = np.zeros((n_sets, n_elements), np.float32)
    return list(sets)


def make_contenders(comm, nbytes, n_sets, algorithms):
    """Return the calls on private buffers: name -> contender."""
    n_elements = nbytes // 4
    sets = private_sets(n_elements, n_sets)
    received = private_sets(n_elements, n_sets)
    tensors = [torch.from_numpy(array) for array in sets]
    parameter = torch.nn.Parameter(torch.zeros(n_elements))

    def reduce_in_place(number):
        comm.Allreduce(MPI.IN_PLACE, sets[number])

    def reduce(number):
        comm.Allreduce(sets[number], received[number])

    def sum_by_gloo(number):
        torch.distributed.all_reduce(tensors[number])

    def sum_array(number):
        hpcdist.all_reduce(sets[number])

    def sum_tensor(number):
        hpcdist.all_reduce(tensors[number])

    def sum_gradient(number):
        hpcdist.all_reduce(sets[number], implementation="SHARED_MEMORY")
        parameter.grad = tensors[number]

    contenders = {
        MPI_IN_PLACE: Contender(reduce_in_place, sets, sets),
        "MPI_Allreduce": Contender(reduce, sets, received),
        "torch gloo": Contender(sum_by_gloo, sets, sets),
        "hpcdist AUTO": Contender(sum_array, sets, sets),
        "hpcdist AUTO, torch tensor": Contender(sum_tensor, sets, sets),
        "hpcdist gradient to p.grad": Contender(sum_gradient, sets, sets),
    }
    for algorithm in algorithms:
        call = partial(sum_by, sets, algorithm)
        contenders[f"hpcdist {algorithm}"] = Contender(call, sets, sets)
    return contenders


def make_device_contenders(comm, nbytes, n_sets):
    """Return the calls on buffers in device memory: name -> contender."""
    n_elements = nbytes // 4
    sets = private_sets(n_elements, n_sets)
    tensors = [torch.zeros(n_elements, device="cuda") for _ in sets]

    def sum_on_host(number):
        on_host = tensors[number].cpu()
        comm.Allreduce(MPI.IN_PLACE, on_host.numpy())
        tensors[number].copy_(on_host)

    def sum_by_torch(number):
        torch.distributed.all_reduce(tensors[number])

    def sum_tensor(number):
        hpcdist.all_reduce(tensors[number])

    backend = torch.distributed.get_backend()
    return {
        COPY_AND_MPI: Contender(sum_on_host, sets, sets, tensors),
        f"torch {backend}": Contender(sum_by_torch, sets, sets, tensors),
        "hpcdist AUTO": Contender(sum_tensor, sets, sets, tensors),
    }


def sum_by(sets, algorithm, number):
    hpcdist.all_reduce(sets[number], implementation=algorithm)


def run_block(comm, contender, values, numbers):
    """Fill all sets, time a call on each set of `numbers`, and check the results; return the times of `timed_block`."""
    values.fill(contender.sources)
    contender.upload()
    call = contender.call

    def run():
        for number in numbers:
            call(number)
        contender.synchronize()

    times = timed_block(comm, run, len(numbers))
    contender.download()
    for number in numbers:
        values.check(number, contender.results[number])
    return times


def calls_per_block(comm, contender, values, n_sets, limit_s):
    """Return the numbers of the sets that a block uses: all, or evenly spread ones if calls are slow.

    It runs two blocks, which are the warm-up. All ranks get the same numbers. Collective over `comm`.
    """
    all_sets = range(n_sets)
    first_sets = all_sets[:3]
    run_block(comm, contender, values, first_sets)
    wall, _ = run_block(comm, contender, values, all_sets[:10])
    n_calls = min(n_sets, int(limit_s / wall))
    n_calls = max(n_calls, len(first_sets))
    stride = max(1, n_sets // n_calls)
    return all_sets[::stride]


def time_size(comm, nbytes, args):
    """Return the case of one size. Collective over `comm`."""
    is_on_device = args.device == "cuda"
    most_sets = 4096
    if args.quick or is_on_device:
        most_sets = 64
    n_sets = max(3, 2 * last_cache_bytes() // nbytes + 1)
    n_sets = min(n_sets, most_sets)
    if is_on_device:
        contenders = make_device_contenders(comm, nbytes, n_sets)
    else:
        algorithms = args.algorithms.split(",") if args.algorithms else []
        contenders = make_contenders(comm, nbytes, n_sets, algorithms)
    values = RandomSets(comm, nbytes // 4, seed=nbytes)
    n_sides = len(contenders) + 1
    n_blocks = 2 * args.rounds * n_sides
    limit_s = args.seconds / n_blocks
    blocks = {}
    for name, contender in contenders.items():
        numbers = calls_per_block(comm, contender, values, n_sets, limit_s)
        blocks[name] = partial(run_block, comm, contender, values, numbers)
    return compare(name_bytes(nbytes), blocks, BASELINES, args.rounds, nbytes)


def time_all(args):
    comm = make_world().role_comm  # with it, a rank that fails ends all
    torch.set_num_threads(1)
    if args.quick:
        args.rounds = min(args.rounds, 3)
        args.seconds = min(args.seconds, 2.0)
    environment = Environment(comm)
    stem = "allreduce"
    backend = "gloo"
    if args.device == "cuda":
        stem = "allreduce-cuda"
        n_devices = torch.cuda.device_count()
        torch.cuda.set_device(comm.rank % n_devices)
        if n_devices >= comm.size:
            backend = "nccl"
    sizes = args.sizes
    if not sizes:
        sizes = QUICK_SIZES if args.quick else SIZES
    cases = []
    with start_gloo(comm, backend):
        for size in sizes.split(","):
            nbytes = parse_bytes(size)
            cases.append(time_size(comm, nbytes, args))
    environment.publish(cases, args.out, stem, args.label)


def main():
    args = parse_args()
    if args.merge:
        publish_merged(args.merge, args.out, "allreduce")
    else:
        time_all(args)


if __name__ == "__main__":
    main()
