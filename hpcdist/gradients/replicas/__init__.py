"""Several replicas in one process. A job with one replica per rank uses nothing of this folder but the scheduler."""
