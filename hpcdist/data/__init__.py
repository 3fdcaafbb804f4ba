"""Datasets, their order, and each replica's part of the global batch."""
