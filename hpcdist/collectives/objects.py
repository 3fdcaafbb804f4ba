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


def broadcast_object(
    value: Any = None,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> Any:
    """Return root's object on every rank.

    Collective over `comm`.

    Args:
        value: anything that pickles; ignored except on root.
        root: the rank of `comm` whose object is taken.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: when ranks name different roots; on every rank.

    Cost: the MPI library's Bcast of the pickle, and of its size.
    """
    group = group_of(comm)
    with group.recorded("broadcast_object", None):
        group.require_same_call("broadcast_object", f"root {root}")
        return group.comm.bcast(value, root)


def gather_objects(
    value: Any,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> list[Any] | None:
    """Return every rank's object in a list on root, None elsewhere.

    Collective over `comm`.

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

    Collective over `comm`.

    Args:
        value: anything that pickles.
        comm: as `broadcast_object`.

    Cost: every rank receives all pickles.
    """
    group = group_of(comm)
    with group.recorded("all_gather_objects", None):
        return group.comm.allgather(value)


def scatter_objects(
    values: Sequence[Any] | None = None,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> Any:
    """Return the object that root gives for this rank.

    Collective over `comm`.

    Args:
        values: on root, an object that pickles for each rank; ignored on the other ranks.
        root: the rank of `comm` whose objects are taken.
        comm: as `broadcast_object`.

    Raises:
        CollectiveError: when root gives another number of objects, or ranks name different roots; on every rank.
    """
    group = group_of(comm)
    with group.recorded("scatter_objects", None):
        root_values: list[Any] | None = None
        error = None
        if group.rank == root:
            root_values = list(values or ())
            error = _refusal("scatter_objects", len(root_values), group.size)
        group.require_same_call("scatter_objects", f"root {root}")
        group.agree(error)
        return group.comm.scatter(root_values, root)


def alltoall_objects(values: Sequence[Any], comm: MPI.Comm | None = None) -> list[Any]:
    """Send an object to each rank, and return the objects received, in the order of the ranks.

    Collective over `comm`.

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

    Not collective. The returned function is collective over `comm`. An error of `evaluate` on one rank ends the job.

    Args:
        evaluate: function that returns an object that pickles.
        aggregate: function that is called on every rank with the results of all ranks, in their order, and returns the
            single result. Default: the mean over the ranks of each number in dicts, as in ChainerMN. It is exact only
            if all ranks evaluate the same number of rows. `hpcdist.metrics` are exact for any numbers of rows, and so
            are sums and counts with an `aggregate`.
        comm: as `broadcast_object`.

    Cost: every rank receives the pickles of all.
    Source: chainermn.create_multi_node_evaluator and its GenericMultiNodeEvaluator.
    """

    def on_all_ranks(*args: Any, **kwargs: Any) -> Any:
        local_result = evaluate(*args, **kwargs)
        results = all_gather_objects(local_result, comm)
        aggregate_results = aggregate or _means
        return aggregate_results(results)

    return on_all_ranks


def _means(results: list[Any]) -> dict[str, float]:
    """Return the mean over the ranks of each number in their dicts.

    Raises:
        CollectiveError: when a result is no dict, or the keys differ; on every rank.
    """
    forms = list(map(_form_of, results))
    root_form = forms[0]
    differing_forms = [form for form in forms if form != root_form]
    if differing_forms or not isinstance(results[0], dict):
        differing_form = differing_forms[0] if differing_forms else "the same"
        raise CollectiveError(
            f"create_multi_node_evaluator: expected dicts with the same keys from all ranks, got {root_form} from "
            f"rank 0 and {differing_form} from another; pass aggregate=."
        )
    means: dict[str, float] = {}
    for key in results[0]:
        total = sum(result[key] for result in results)
        means[key] = float(total) / len(results)
    return means


def _form_of(result: Any) -> list[Any] | str:
    """Return the sorted keys of a dict; the name of its type for any other object."""
    if isinstance(result, dict):
        return sorted(result)
    return type(result).__name__


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

    This is for data that only one rank can read. Where every rank can read the data, `experimental_distribute_dataset`
    reads each row once and sends none.

    Collective over `comm`.

    Args:
        dataset: on root, an object with a length and with items that pickle, by number; ignored on the other ranks.
        root: the rank of `comm` that has the dataset.
        comm: as `broadcast_object`.
        shuffle: whether items are dealt out in random order.
        seed: seed of the random order, on root; None draws one.
        force_equal_length: whether all ranks get the same number of items, some of them twice if they do not divide
            evenly.

    Raises:
        CollectiveError: when root's dataset has no length or no items, or ranks name different roots; on every rank.

    Cost: root reads all items and pickles those of all ranks at once.
    """
    group = group_of(comm)
    shares: list[list[Any]] | None = None
    with group.recorded("scatter_dataset", None):
        is_root = group.rank == root
        error = None
        group.require_same_call("scatter_dataset", f"root {root}")
        if is_root and not _has_items(dataset):
            error = CollectiveError(
                f"scatter_dataset: expected items by number on root, got {type(dataset).__name__} without any; pass a "
                f"list, an array or a torch dataset with items."
            )
        group.agree(error)
        if is_root:
            order = np.arange(len(dataset))
            if shuffle:
                order = np.random.default_rng(seed).permutation(len(dataset))
            shares = []
            for start, stop in shares_of(len(dataset), group.size, force_equal_length):
                numbers = [int(order[position % len(order)]) for position in range(start, stop)]
                shares.append([dataset[number] for number in numbers])
        local_share: list[Any] = group.comm.scatter(shares, root)
    return local_share


def _has_items(dataset: Any) -> bool:
    """Return whether a dataset has a length and items by number, and is not empty."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return False
    return len(dataset) > 0


def shares_of(
    n_items: int,
    n_ranks: int,
    is_equal: bool,
) -> list[tuple[int, int]]:
    """Return (start, stop) of each rank's items. With `is_equal` all have one length, and the last may pass the end.

    >>> shares_of(5, 2, False), shares_of(5, 2, True)
    ([(0, 3), (3, 5)], [(0, 3), (3, 6)])
    """
    if not is_equal:
        return [block_bounds(n_items, n_ranks, rank) for rank in range(n_ranks)]
    size = -(-n_items // n_ranks)
    return [(rank * size, (rank + 1) * size) for rank in range(n_ranks)]


def _refusal(
    call: str,
    n_given: int,
    n_ranks: int,
) -> CollectiveError | None:
    """Return the error for a number of objects that is not the number of ranks; None if it is."""
    if n_given == n_ranks:
        return None
    return CollectiveError(
        f"{call}: expected an object for each of {n_ranks} ranks, got {n_given}; give one for each."
    )
