"""Several replicas on each rank, for tests: a strategy with a number of replicas, their numbers, their answers."""

import functools

import hpcdist

Strategy = functools.partial(hpcdist.MultiWorkerMirroredStrategy, gradient_op="sum")


def ids(strategy):
    """Return the numbers of the local replicas as a PerReplica value."""
    return strategy.experimental_distribute_values_from_function(lambda of: of.replica_id_in_sync_group)


def collect(strategy, fn):
    """Return what fn returns, piece by piece, once for each different answer of the local replicas."""
    answers = []
    strategy.run(lambda replica: answers.append(fn(replica)), args=(ids(strategy),))
    return list(map(without_repeats, zip(*answers, strict=True)))


def without_repeats(pieces):
    different = []
    for piece in pieces:
        if piece not in different:
            different.append(piece)
    return different
