"""From objects to a checkpoint and back: what is saved, when, by whom, and what a restart restores."""
