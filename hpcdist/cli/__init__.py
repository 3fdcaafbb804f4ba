"""The command `hpcdist`. No command starts MPI in its own process."""
