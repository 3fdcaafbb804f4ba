"""Objects to named arrays and back, saved and restored by all ranks together."""
