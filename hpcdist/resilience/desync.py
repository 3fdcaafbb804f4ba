"""Check that all ranks hold the same state: models and optimizers must be equal bit for bit."""

from collections import Counter
from typing import Any

import numpy as np
import xxhash

from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import DesyncError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.world import World

#: Most ranks that an error lists.
_MAX_NAMED = 8


def digest_of(state: Any, arrays: list[NamedArray]) -> int:
    """Return a 63-bit digest of a state. Cost: reads every byte of the arrays once, at memory speed."""
    digest = xxhash.xxh3_64(repr(state).encode())
    for array in arrays:
        digest.update(f"{array.name} {array.dtype} {array.values.shape}".encode())
        digest.update(np.ascontiguousarray(array.values).reshape(-1).view(np.uint8).data)
    return digest.intdigest() >> 1


def require_equal(digest: int, world: World) -> None:
    """Raise DesyncError on all ranks unless all hold the same digest.

    Collective: chief and workers; bounded by the timeout.

    Raises:
        DesyncError: names the ranks that differ from the majority; "do not requeue", as a restart would not help.

    Cost: two all-reduces of 8 bytes, and one all-gather if digests differ.
    """
    comm = world.role_comm
    highest = world.all_reduce_int(digest, MPI.MAX, comm)
    if world.all_reduce_int(digest, MPI.MIN, comm) == highest:
        return
    digests = np.empty(comm.size, np.int64)
    world.wait(comm.Iallgather(np.array([digest], np.int64), digests))
    odd = odd_ranks([int(one) for one in digests])
    named = ", ".join(str(rank) for rank in odd[:_MAX_NAMED]) + (" and more" if len(odd) > _MAX_NAMED else "")
    error = DesyncError(
        f"desync check: expected equal models and optimizers on all {comm.size} ranks, got different ones on rank "
        f"{named}; "
        f"look for code that changes parameters on some ranks only, and for faulty hardware there. The last checkpoint "
        f"is untouched."
    )
    error.is_agreed = True
    raise error


def odd_ranks(digests: list[int]) -> list[int]:
    """Return the ranks that differ from the majority; in a tie, the digest of the lowest rank wins."""
    common = Counter(digests).most_common(1)[0][0]
    return [rank for rank, digest in enumerate(digests) if digest != common]
