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
    return [
        [piece for number, piece in enumerate(pieces) if piece not in pieces[:number]]
        for pieces in zip(*answers, strict=True)
    ]
