"""Ways to keep replicas equal: each gives a model with its optimizer; the training step is the same for all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import floors
import torch
import torch.distributed as dist
from models import Trainee, adam, build
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

import hpcdist
import hpcdist.torch_backend
from hpcdist.program import torch_hooks
from hpcdist.runtime.mpi import MPI

HPCDIST = "hpcdist"
#: With the optimizer's work divided over the ranks.
SHARDED = "hpcdist, ZeroRedundancyOptimizer"
#: No synchronization at all: what no contender can be faster than.
CEILING = "no synchronization (the ceiling)"
#: What whole sums, and sums and steps by shares, cost at least in Python: without a check.
FLOOR = "floor of whole sums"
SHARED_FLOOR = "floor of shares"
#: The same where there is one rank.
BARE = "torch alone"
DDP = "DDP gloo"
DDP_STATIC = "DDP gloo, static graph, bucket views"
DDP_MPI = "DDP, hook: MPI_Allreduce in place"
DDP_NCCL = "DDP nccl"


def replicated(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return the model of a strategy of ours; losses are means over the local batch, as with DDP."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN, device=device)
    with strategy.scope():
        model = build(name, device)
        return model, adam(model)


def sharded(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return the same with an optimizer that steps this rank's share."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN, device=device)
    with strategy.scope():
        model = build(name, device)
        optimizer = hpcdist.optim.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=1e-3, fused=True
        )
        return model, optimizer


def alone(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return a model that knows of no other."""
    model = build(name, device)
    return model, adam(model)


def ddp(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return torch's own as it comes."""
    model = DistributedDataParallel(build(name, device))
    return model, adam(model)


def ddp_static(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return torch's own with the options that make it fastest."""
    model = DistributedDataParallel(
        build(name, device), static_graph=True, gradient_as_bucket_view=True
    )
    return model, adam(model)


def ddp_mpi(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return torch's own with its buckets summed by MPI_Allreduce, in place."""
    model = DistributedDataParallel(build(name, device), gradient_as_bucket_view=True)
    model.register_comm_hook(comm, _sum_by_mpi)
    return model, adam(model)


def ddp_backend(name: str, device: str, comm: MPI.Comm) -> Trainee:
    """Return torch's own over our collectives, as a backend of torch.distributed."""
    group = dist.new_group(backend="hpcdist")
    model = DistributedDataParallel(
        build(name, device), process_group=group, gradient_as_bucket_view=True
    )
    return model, adam(model)


def _sum_by_mpi(comm: MPI.Comm, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    flat = bucket.buffer()
    flat.div_(comm.size)
    on_host = flat.cpu()
    comm.Allreduce(MPI.IN_PLACE, on_host.numpy())
    if on_host is not flat:
        flat.copy_(on_host)
    done: Future[torch.Tensor] = Future()
    done.set_result(flat)
    return done


#: Name -> function that makes the model and its optimizer.
ALL: dict[str, Callable[[str, str, MPI.Comm], Trainee]] = {
    DDP: ddp,
    DDP_STATIC: ddp_static,
    DDP_MPI: ddp_mpi,
    "DDP, backend hpcdist": ddp_backend,
    HPCDIST: replicated,
    SHARDED: sharded,
    FLOOR: floors.whole_sums,
    SHARED_FLOOR: floors.shares,
    CEILING: alone,
    BARE: alone,
    DDP_NCCL: ddp,
}
#: The contenders for models on the host, on several ranks.
CONTENDERS = [name for name in ALL if name not in (BARE, DDP_NCCL)]
BASELINES = [DDP, DDP_STATIC, DDP_MPI]
#: The contenders for models on GPUs; the others compute on the host only.
ON_GPUS = [*BASELINES, HPCDIST, CEILING]
#: What is compared on one rank.
SINGLE = [BARE, HPCDIST]


#: Where our strategies see the steps and the backwards of the process, each by a number.
_WATCHES = (
    torch_hooks._before_steps,
    torch_hooks._after_steps,
    torch_hooks._gradient_watchers,
)
#: Where the world sees the program's loop, for all strategies.
_LOOP_WATCHES = (torch_hooks._loop_watchers, torch_hooks._outer_watchers)


def watches() -> set[tuple[int, int]]:
    """Return the places and numbers of all watches of our strategies."""
    numbers: set[tuple[int, int]] = set()
    for place, table in enumerate(_WATCHES):
        numbers.update((place, number) for number in table)
    return numbers


@contextmanager
def with_watches(shown_watches: set[tuple[int, int]]) -> Iterator[None]:
    """Hide, for a block, steps and backwards from our other strategies: a program has one."""
    saved_tables = [dict(table) for table in _WATCHES]
    try:
        for place, number in watches() - shown_watches:
            del _WATCHES[place][number]
        yield
    finally:
        for table, before in zip(_WATCHES, saved_tables, strict=True):
            table.update(before)


@contextmanager
def without_watches() -> Iterator[None]:
    """Take away, for a block, what our strategies see of steps, backwards and forwards."""
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    tables = (*hooks, *_LOOP_WATCHES)
    saved_tables = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        torch_hooks._choose_call()
        with with_watches(set()):
            yield
    finally:
        for table, before in zip(tables, saved_tables, strict=True):
            table.update(before)
        torch_hooks._choose_call()
