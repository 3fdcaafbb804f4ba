"""Several replicas in one process.

With one replica per rank the scheduler never waits, `ReplicaState` only watches merges, and `sum_rows` sums one row.
"""
