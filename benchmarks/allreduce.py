"""Time hpcdist's all-reduce beside MPI_Allreduce and torch gloo, in one launch, block by block in turn.

mpirun -n 2 python benchmarks/allreduce.py --out out/allreduce
mpirun -n 4 python benchmarks/allreduce.py --out out/allreduce-4 --sizes 64M
mpirun -n 4 python benchmarks/allreduce.py --out out/algorithms --algorithms RING,HALVING,HIERARCHICAL,SHARED_MEMORY
mpirun -n 2 python benchmarks/allreduce.py --device cuda --out out/gpu
python benchmarks/allreduce.py --merge out/a/allreduce.json out/b/allreduce.json --out out/both

Every block fills all its buffers with fresh random values, which is not timed, calls once per buffer, and checks every
result. The buffers of a rank are larger than twice the last cache together.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from buffers import RandomSets
from gloo import start_gloo
from harness import AGAIN, run_rounds
from measure import Environment, last_cache_bytes, timed_block
from report import case, merge, publish

import hpcdist
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world

SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
QUICK_SIZES = "1K,256K,4M"
MPI_IN_PLACE = "MPI_Allreduce in place"
#: For buffers on a GPU, without NCCL.
COPY_AND_MPI = "copy to the host, MPI_Allreduce, copy back"
BASELINES = [MPI_IN_PLACE, "MPI_Allreduce", COPY_AND_MPI, "torch gloo", "torch nccl"]


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
            tensor.copy_(torch.from_numpy(array))
        self.synchronize()

    def download(self) -> None:
        """Copy the sums on the GPU to the results."""
        for tensor, array in zip(self.on_device or (), self.results, strict=False):
            torch.from_numpy(array).copy_(tensor)

    def synchronize(self) -> None:
        """Wait for the GPU, if it has been used."""
        if self.on_device:
            torch.cuda.synchronize()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for allreduce.json and allreduce.png"
    )
    parser.add_argument("--sizes", help=f"bytes per rank, default {SIZES}")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of blocks of every contender")
    parser.add_argument("--seconds", type=float, default=30.0, help="rough limit for one size")
    parser.add_argument(
        "--quick", action="store_true", help="few small sizes, for a look whether all works"
    )
    parser.add_argument(
        "--algorithms",
        help="built-in algorithms to time beside AUTO, such as RING,HALVING,HIERARCHICAL",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="memory that the buffers are in"
    )
    parser.add_argument(
        "--label", default="", help="what this launch is called when several are merged"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="JSON", help="time nothing, merge these reports"
    )
    return parser.parse_args()


def parse_bytes(text):
    """Return the number of bytes of a text such as 4M, 64K or 4."""
    shifts = {"K": 10, "M": 20}
    unit = text[-1]
    if unit in shifts:
        return int(text[:-1]) << shifts[unit]
    return int(text)


def name_bytes(nbytes):
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
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

    def sum_gradient(number):
        hpcdist.all_reduce(sets[number], implementation="SHARED_MEMORY")
        parameter.grad = tensors[number]

    contenders = {
        MPI_IN_PLACE: Contender(
            lambda number: comm.Allreduce(MPI.IN_PLACE, sets[number]), sets, sets
        ),
        "MPI_Allreduce": Contender(
            lambda number: comm.Allreduce(sets[number], received[number]), sets, received
        ),
        "torch gloo": Contender(
            lambda number: torch.distributed.all_reduce(tensors[number]), sets, sets
        ),
        "hpcdist AUTO": Contender(lambda number: hpcdist.all_reduce(sets[number]), sets, sets),
        "hpcdist AUTO, torch tensor": Contender(
            lambda number: hpcdist.all_reduce(tensors[number]), sets, sets
        ),
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

    backend = torch.distributed.get_backend()
    calls = {
        COPY_AND_MPI: sum_on_host,
        f"torch {backend}": lambda number: torch.distributed.all_reduce(tensors[number]),
        "hpcdist AUTO": lambda number: hpcdist.all_reduce(tensors[number]),
    }
    return {name: Contender(call, sets, sets, tensors) for name, call in calls.items()}


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
    run_block(comm, contender, values, range(min(3, n_sets)))
    wall, _ = run_block(comm, contender, values, range(min(10, n_sets)))
    n_calls = max(min(3, n_sets), min(n_sets, int(limit_s / wall)))
    return range(0, n_sets, max(1, n_sets // n_calls))


def time_size(comm, nbytes, args):
    """Return the case of one size. Collective over `comm`."""
    n_sets = max(3, 2 * last_cache_bytes() // nbytes + 1)
    n_sets = min(n_sets, 64 if args.quick else 4096)
    if args.device == "cuda":
        n_sets = min(n_sets, 64)
        contenders = make_device_contenders(comm, nbytes, n_sets)
        reference = COPY_AND_MPI
    else:
        algorithms = args.algorithms.split(",") if args.algorithms else []
        contenders = make_contenders(comm, nbytes, n_sets, algorithms)
        reference = MPI_IN_PLACE
    values = RandomSets(comm, nbytes // 4, seed=nbytes)
    limit_s = args.seconds / (2 * args.rounds * (len(contenders) + 1))
    blocks = {}
    for name, contender in contenders.items():
        numbers = calls_per_block(comm, contender, values, n_sets, limit_s)
        blocks[name] = partial(run_block, comm, contender, values, numbers)
    blocks[reference + AGAIN] = blocks[reference]
    wall, cpu = run_rounds(blocks, args.rounds)
    return case(name_bytes(nbytes), wall, cpu, BASELINES, nbytes)


def time_all(args):
    comm = make_world().role_comm  # with it, a rank that fails ends all
    torch.set_num_threads(1)
    if args.quick:
        args.rounds = min(args.rounds, 3)
        args.seconds = min(args.seconds, 2.0)
    environment = Environment(comm)
    is_nccl = args.device == "cuda" and torch.cuda.device_count() >= comm.size
    if args.device == "cuda":
        torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    texts = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    sizes = [parse_bytes(text) for text in texts.split(",")]
    with start_gloo(comm, "nccl" if is_nccl else "gloo"):
        cases = [time_size(comm, size, args) for size in sizes]
    record = environment.record()
    if comm.rank == 0:
        stem = "allreduce"
        if args.device != "cpu":
            stem += f"-{args.device}"
        label = args.label or record["mpi"]
        publish({"label": label, "environment": record, "cases": cases}, args.out, stem)


def main():
    args = parse_args()
    if args.merge:
        reports = [json.loads(path.read_text()) for path in args.merge]
        merged = {"label": "merged", "environment": [report["environment"] for report in reports]}
        publish({**merged, "cases": merge(reports)}, args.out, "allreduce")
    else:
        time_all(args)


if __name__ == "__main__":
    main()
