"""Several replicas in one process. With one replica per rank the scheduler never waits."""
