"""Check that all ranks hold the same state: parameters and optimizers must be equal bit for bit."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointError, DesyncError
from hpcdist.program.drift import odd_ranks
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import wait_until
from hpcdist.runtime.world import World

#: Largest number of ranks that an error lists.
_MAX_NAMED = 8
#: At least as large as any digest.
_NO_DIGEST = (1 << 63) - 1
#: Longest time between two looks for the digest of the others.
_LOOK_S = 0.01
#: The bytes of an array.
Content = memoryview


def contents_of(arrays: Sequence[NamedArray]) -> list[Content]:
    """Return the bytes of arrays, copied where they are not contiguous."""
    contents = []
    for array in arrays:
        values = np.ascontiguousarray(array.values).reshape(-1)
        contents.append(values.view(np.uint8).data)
    return contents


def digest_of(
    parts: Mapping[str, Any], arrays: Sequence[NamedArray], contents: Sequence[Content]
) -> int:
    """Return a 63-bit digest of parts of a state.

    Args:
        parts: nodes of JSON, as `tree.encode` returns them. The indexes by which
            they refer to arrays do not change the digest.
        arrays: arrays that the nodes refer to.
        contents: the bytes of each array.

    Cost: reads every byte of the arrays once, at memory speed.
    """
    digest = xxhash.xxh3_64()

    def add(node: Any) -> None:
        if not isinstance(node, (dict, list)):
            digest.update(f"{node!r},".encode())
        elif isinstance(node, list):
            digest.update(f"[{len(node)}".encode())
            for part in node:
                add(part)
        else:
            ((kind, value),) = node.items()  # a node of a state has one key
            digest.update(kind.encode())
            if kind in ("tensor", "array"):
                array = arrays[value]
                digest.update(f"{array.dtype} {array.values.shape}".encode())
                digest.update(contents[value])
            else:
                add(value)

    for name, node in parts.items():
        digest.update(name.encode())
        add(node)
    return digest.intdigest() >> 1


@dataclass(frozen=True)
class Comparison:
    """The state that the chief is about to save, to be compared with the state of the other ranks.

    While the other ranks compute their digests, the chief copies its state. `expected` is set next; then a background
    thread of the chief computes the chief's digest from the copy.

    Attributes:
        parts: nodes of the state that are equal on all ranks.
        arrays: arrays that the nodes refer to.
        n_ranks: number of ranks that are compared.
        expected: the digest of all other ranks.
    """

    parts: Mapping[str, Any]
    arrays: Sequence[NamedArray]
    n_ranks: int
    expected: "Future[int]"

    def require(self, contents: Sequence[Content], timeout_s: float) -> None:
        """Raise an error unless the copies of the arrays have the digest of the other ranks; on the chief.

        Raises:
            DesyncError: if the digests differ.
            CheckpointError: if the digest of the others is not there within `timeout_s` seconds in which the job runs.
        """
        if not wait_until(self.expected.done, timeout_s, yields=0, max_sleep_s=_LOOK_S):
            raise CheckpointError(
                f"checkpoint: expected the digest of the other ranks within {timeout_s:g} s, got none; look for a rank "
                f"that hangs."
            )
        expected = self.expected.result()
        chief_digest = digest_of(self.parts, self.arrays, contents)
        if chief_digest != expected:
            raise difference([chief_digest] + [expected] * (self.n_ranks - 1))


def digest_of_others(local_digest: int | None, world: World) -> int | None:
    """Return the digest that all ranks but the chief hold; None if they differ.

    Collective over chief and workers; bounded by the timeout.

    Args:
        local_digest: digest of this rank; None on the chief.
        world: the ranks.

    Cost: two all-reduces of 8 bytes.
    """
    # the chief contributes the least number to the maximum and the largest to the minimum, so it decides neither
    lower_bound = -1
    upper_bound = _NO_DIGEST
    if local_digest is not None:
        lower_bound = local_digest
        upper_bound = local_digest
    highest = world.all_reduce_int(lower_bound, MPI.MAX, world.role_comm)
    lowest = world.all_reduce_int(upper_bound, MPI.MIN, world.role_comm)
    if lowest != highest:
        return None
    return lowest


def require_equal(digest: int, world: World) -> None:
    """Raise DesyncError on all ranks unless all hold the same digest.

    Collective over chief and workers; bounded by the timeout.

    Raises:
        DesyncError: names the ranks without the most frequent digest. Its exit code means "do not requeue", as a
            restart would not help.

    Cost: two all-reduces of 8 bytes, and one all-gather if digests differ.
    """
    comm = world.role_comm
    highest = world.all_reduce_int(digest, MPI.MAX, comm)
    if world.all_reduce_int(digest, MPI.MIN, comm) == highest:
        return
    error = difference(gather_digests(digest, world))
    error.is_agreed = True
    raise error


def gather_digests(local_digest: int, world: World) -> list[int]:
    """Return the digests of all ranks. Collective over chief and workers; bounded by the timeout."""
    local_digests = np.array([local_digest], np.int64)
    digests = np.empty(world.role_comm.size, np.int64)
    world.wait(world.role_comm.Iallgather(local_digests, digests))
    return [int(digest) for digest in digests]


def difference(digests: list[int]) -> DesyncError:
    """Return the error of ranks with these digests, which differ."""
    odd = odd_ranks(digests)
    named = ", ".join(map(str, odd[:_MAX_NAMED]))
    if len(odd) > _MAX_NAMED:
        named += " and more"
    return DesyncError(
        f"desync check: expected equal models and optimizers on all {len(digests)} ranks, got different ones on rank "
        f"{named}; look for models made outside of strategy.scope(), settings such as a learning rate that differ "
        f"between ranks, code that changes parameters on some ranks only, and faulty hardware there. The last "
        f"checkpoint is untouched."
    )
