"""Load a state into a Checkpoint as a restore does, without a file and without ranks: for tests of single objects."""

from hpcdist.checkpoint.header import Header
from hpcdist.checkpoint.read import Index, StoredArray


def load(checkpoint, state, arrays, source):
    """Load what `collect` returned, or something made of it."""
    stored = tuple(StoredArray(array.name, array.dtype, array.values.shape, 0) for array in arrays)
    index = Index(Header(0, 0, 0, "", ""), 0, 0.0, {}, {}, stored, state)
    prepared = checkpoint.prepare(index, source)
    for array, target in zip(arrays, prepared.arrays, strict=True):
        if array.dtype == "bool":
            target[...] = array.values.view("u1")
        else:
            target[...] = array.values
    checkpoint.load(index, prepared)
