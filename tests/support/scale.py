"""How much the tests run: a sample of every sweep, or every case with `pytest --full`."""


class Scale:
    """Set once from the command line, before tests are collected.

    Attributes:
        is_full: whether sweeps run every case.
    """

    def __init__(self):
        self.is_full = False

    def choose(self, sample, full):
        """Return `full` where every case is run, else `sample`."""
        if self.is_full:
            return full
        return sample


SCALE = Scale()
