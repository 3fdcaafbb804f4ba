"""Strategies: one file each over one interface."""
