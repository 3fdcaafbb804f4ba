"""Saves, restores and stops a job: checkpoints of training objects, taken collectively, and what ends an attempt."""
