"""A backend of torch.distributed over hpcdist's collectives, for DistributedDataParallel scripts as they are.

>>> import hpcdist.torch_backend
>>> torch.distributed.init_process_group("hpcdist", init_method="hpcdist://")

The ranks are the processes that mpirun or srun started. Under torchrun they are the processes of torchrun, on one host,
and share memory without MPI. Tensors must be on the host; other tensors are refused, also with "cpu:hpcdist,cuda:nccl".
"""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hpcdist.cluster.environment import read_environment, timeout_s, torchrun_sizes
from hpcdist.errors import CollectiveTimeoutError, ConfigurationError, agreed
from hpcdist.torch_backend.process_group import HpcdistProcessGroup, leave_uncompiled
from hpcdist.torch_backend.ranks import Ranks


def _make_group(options: Any, _: Any) -> HpcdistProcessGroup:
    """Return a group of ranks, for init_process_group and new_group. Collective over these ranks.

    MPI is imported, and so started, where torchrun did not start the ranks.
    """
    environ = read_environment()
    limit_s = min(options.timeout.total_seconds(), timeout_s(environ))
    numbers = list(options.global_ranks_in_group) or list(range(options.group_size))
    # torchrun's store outlives groups, and a group that is made again has the name of the first one
    n_made = options.store.add(f"made/{options.group_rank}", 1)
    store = dist.PrefixStore(f"{n_made}/", options.store)
    under_torchrun = torchrun_sizes(environ)
    ranks: Ranks
    if under_torchrun is None:
        from hpcdist.torch_backend.mpi_ranks import MPIRanks, require_rank

        require_rank(numbers, options.group_rank)
        _wait_for_members(store, options.group_rank, options.group_size, limit_s)
        ranks = MPIRanks.of_numbers(numbers, limit_s)
    else:
        from hpcdist.torch_backend.node_ranks import NodeRanks

        size, n_local = under_torchrun
        if n_local != size:
            raise agreed(
                ConfigurationError(
                    f"torch_backend: expected all ranks on one host under torchrun, got {n_local} of {size} here; "
                    f"start the program by srun or mpirun, which join hosts."
                )
            )
        _wait_for_members(store, options.group_rank, options.group_size, limit_s)
        names = [f"rank {number}" for number in numbers]
        is_crowded = n_local > len(os.sched_getaffinity(0))
        ranks = NodeRanks(store, options.group_rank, names, limit_s, is_crowded)
    leave_uncompiled()
    return HpcdistProcessGroup(ranks)


def _wait_for_members(store: Any, rank: int, size: int, limit_s: float) -> None:
    """Wait until all ranks of a group are making it: MPI would wait without a limit.

    Raises:
        CollectiveTimeoutError: when a rank does not come in time; on the ranks that came, and on any that come later.
    """
    ranks = range(size)
    store.set(f"here/{rank}", "1")
    cause = None
    verdict = "all are here"
    keys = [f"here/{member}" for member in ranks]
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except RuntimeError as error:
        absent = [member for member in ranks if not store.check([keys[member]])]
        cause = error
        verdict = f"no answer from {absent} of its ranks"
    verdict = store.compare_set("verdict", "", verdict).decode()  # the first verdict holds
    if verdict != "all are here":
        raise CollectiveTimeoutError(
            f"new_group: expected all of {size} ranks within {limit_s:g} s, got {verdict}; let all of "
            f"them make it, in the same order."
        ) from cause


def _rendezvous(
    url: str,
    timeout: timedelta = timedelta(minutes=30),
    **_: Any,
) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and number of ranks, of MPI or of torchrun. Collective over all ranks."""
    if torchrun_sizes(read_environment()) is not None:
        yield from rendezvous("env://", timeout=timeout)
    else:
        from hpcdist.torch_backend.mpi_ranks import rendezvous as rendezvous_by_mpi

        yield from rendezvous_by_mpi(timeout)


dist.Backend.register_backend("hpcdist", _make_group, extended_api=True, devices="cpu")
dist.register_rendezvous_handler("hpcdist", _rendezvous)
