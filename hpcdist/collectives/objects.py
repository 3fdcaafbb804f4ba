"""The public collectives on Python objects: pickles that travel inside the job only. Meant for small values.

Each takes any communicator and blocks; the watchdog ends the job when a rank does not come.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcdist.collectives.group import group_of
from hpcdist.errors import CollectiveError
from hpcdist.plan.blocks import block_bounds
from hpcdist.runtime.mpi import MPI


def broadcast_object(value: Any = None, root: int = 0, comm: MPI.Comm | None = None) -> Any:
    """Return root's object on every rank.

    Collective: `comm`.

    Args:
        value: anything that pickles; not looked at except on root.
        root: the rank of `comm` whose object is taken.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: when ranks name other roots; on every rank.

    Cost: the MPI library's Bcast of the pickle, and of its size.
    """
    group = group_of(comm)
    with group.recorded("broadcast_object", None):
        group.require_same_call("broadcast_object", f"root {root}")
        return group.comm.bcast(value, root)


def gather_objects(value: Any, root: int = 0, comm: MPI.Comm | None = None) -> list[Any] | None:
    """Return every rank's object in a list on root, None elsewhere.

    Collective: `comm`.

    Args:
        value: anything that pickles.
        root: the rank of `comm` that receives.
        comm: as `broadcast_object`.

    Cost: root receives all pickles.
    """
    group = group_of(comm)
    with group.recorded("gather_objects", None):
        group.require_same_call("gather_objects", f"root {root}")
        return group.comm.gather(value, root)


def all_gather_objects(value: Any, comm: MPI.Comm | None = None) -> list[Any]:
    """Return every rank's object, in the order of the ranks, on every rank.

    Collective: `comm`.

    Args:
        value: anything that pickles.
        comm: as `broadcast_object`.

    Cost: every rank receives all pickles.
    """
    group = group_of(comm)
    with group.recorded("all_gather_objects", None):
        return group.comm.allgather(value)


def scatter_objects(
    values: Sequence[Any] | None = None, root: int = 0, comm: MPI.Comm | None = None
) -> Any:
    """Return this rank's object of those that root gives.

    Collective: `comm`.

    Args:
        values: on root, an object that pickles for each rank; not looked at elsewhere.
        root: the rank of `comm` whose objects are taken.
        comm: as `broadcast_object`.

    Raises:
        CollectiveError: when root gives another number of objects, or ranks name other roots; on every rank.
    """
    group = group_of(comm)
    with group.recorded("scatter_objects", None):
        root_values = list(values or ()) if group.rank == root else []
        group.require_same_call("scatter_objects", f"root {root}")
        group.agree(
            _refusal("scatter_objects", len(root_values), group.size)
            if group.rank == root
            else None
        )
        return group.comm.scatter(root_values if group.rank == root else None, root)


def alltoall_objects(values: Sequence[Any], comm: MPI.Comm | None = None) -> list[Any]:
    """Send an object to each rank, and return what came from each.

    Collective: `comm`.

    Args:
        values: an object that pickles for each rank.
        comm: as `broadcast_object`.

    Raises:
        CollectiveError: when a rank gives another number of objects; on every rank.
    """
    group = group_of(comm)
    with group.recorded("alltoall_objects", None):
        group.agree(_refusal("alltoall_objects", len(values), group.size))
        return group.comm.alltoall(list(values))


def create_multi_node_evaluator(
    evaluate: Callable[..., Any],
    aggregate: Callable[[list[Any]], Any] | None = None,
    comm: MPI.Comm | None = None,
) -> Callable[..., Any]:
    """Return a function that calls `evaluate` on every rank, on its part of the data, and returns one result for all.

    Not collective; the function that it returns is: `comm`. An error of `evaluate` on one rank ends the job.

    Args:
        evaluate: returns an object that pickles.
        aggregate: called on every rank with the results of all, in the order of the ranks; returns the one result.
            Default: the mean over the ranks of each number in dicts, as in ChainerMN. It is exact only if all ranks
            evaluate as many rows: `hpcdist.metrics` are exact for any, and so are sums and counts with an `aggregate`.
        comm: as `broadcast_object`.

    Cost: every rank receives the pickles of all.
    Source: chainermn.create_multi_node_evaluator and its GenericMultiNodeEvaluator.
    """

    def on_all_ranks(*args: Any, **kwargs: Any) -> Any:
        results = all_gather_objects(evaluate(*args, **kwargs), comm)
        return (aggregate or _means)(results)

    return on_all_ranks


def _means(results: list[Any]) -> dict[str, float]:
    keys = [
        sorted(result) if isinstance(result, dict) else type(result).__name__ for result in results
    ]
    if not isinstance(results[0], dict) or any(names != keys[0] for names in keys):
        raise CollectiveError(
            f"create_multi_node_evaluator: expected dicts with the same keys from all ranks, got {keys[0]} from rank 0 "
            f"and {next((names for names in keys if names != keys[0]), 'the same')} from another; pass aggregate=."
        )
    return {key: float(sum(result[key] for result in results)) / len(results) for key in results[0]}


def scatter_dataset(
    dataset: Any = None,
    root: int = 0,
    comm: MPI.Comm | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    force_equal_length: bool = True,
) -> list[Any]:
    """Return this rank's share of a dataset that only root has, as a list of its items.

    For data that only one rank can read. Where every rank can, `experimental_distribute_dataset` reads each row once
    and sends none.

    Collective: `comm`.

    Args:
        dataset: on root, what has a length and items that pickle, by number; not looked at elsewhere.
        root: the rank of `comm` that has it.
        comm: as `broadcast_object`.
        shuffle: whether items are dealt out in random order.
        seed: of that order, on root; None draws one.
        force_equal_length: give all ranks as many items, some of them twice if they do not divide evenly.

    Raises:
        CollectiveError: when root's dataset has no length or no items; on every rank.

    Cost: root reads all items and pickles those of all ranks at once.
    """
    group = group_of(comm)
    shares: list[list[Any]] | None = None
    with group.recorded("scatter_dataset", None):
        is_root = group.rank == root
        error = None
        if is_root and not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)
        ):
            error = CollectiveError(
                f"scatter_dataset: expected items by number on root, got {type(dataset).__name__} without any; pass a "
                f"list, an array or a torch dataset with items."
            )
        group.agree(error)
        if is_root:
            order = (
                np.random.default_rng(seed).permutation(len(dataset))
                if shuffle
                else np.arange(len(dataset))
            )
            bounds = shares_of(len(dataset), group.size, force_equal_length)
            shares = [
                [dataset[int(order[position % len(order)])] for position in range(*pair)]
                for pair in bounds
            ]
        local_share: list[Any] = group.comm.scatter(shares, root)
    return local_share


def shares_of(n_items: int, n_ranks: int, is_equal: bool) -> list[tuple[int, int]]:
    """Return (start, stop) of each rank's items; with `is_equal` of one length, so that the last may pass the end.

    >>> shares_of(5, 2, False), shares_of(5, 2, True)
    ([(0, 3), (3, 5)], [(0, 3), (3, 6)])
    """
    if not is_equal:
        return [block_bounds(n_items, n_ranks, rank) for rank in range(n_ranks)]
    size = -(-n_items // n_ranks)
    return [(rank * size, (rank + 1) * size) for rank in range(n_ranks)]


def _refusal(call: str, n_given: int, n_ranks: int) -> CollectiveError | None:
    if n_given == n_ranks:
        return None
    return CollectiveError(
        f"{call}: expected an object for each of {n_ranks} ranks, got {n_given}; give one for each."
    )
