"""Checkpoint files: HDF5 format, safe open, commit protocol. Knows named arrays and files, not ranks."""
