"""In-place all-reduce over any buffer, one short file per algorithm."""
