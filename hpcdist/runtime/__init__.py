"""The job at run time: MPI, the ranks and their roles, waiting, shared memory, and how the job ends."""
