"""Torch gradients to flat buckets and back; the only door to torch's hooks."""
