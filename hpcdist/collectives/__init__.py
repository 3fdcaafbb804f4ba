"""Collectives on buffers: the calls, the choice of an algorithm, and one short file for each algorithm."""
