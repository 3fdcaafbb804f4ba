"""Compares the calls of all ranks before each collective, for HPCDIST_DEBUG=collectives.

Every rank sends rank 0 a small message that says what it is about to do. A collective of MPI's would not do: rank 0
must know which ranks have arrived, so that it can name those that have not.
"""

import os
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hpcdist.errors import CollectiveTimeoutError, DesyncError, HpcdistError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import wait_until
from hpcdist.runtime.world import World

Bytes = npt.NDArray[np.uint8]
#: Bytes of one rank's message, and of a rank's name.
CALL_BYTES = 512
NAME_BYTES = 64
#: Characters of a file name with a line, from its end. Names of ranks in one message.
SITE_LENGTH = 100
MAX_NAMES = 8
#: Answers of rank 0.
_SAME = 0
_DIFFERENT = 1
_MISSING = 2
#: Rank 0 answers at most this long after it gave up waiting.
ANSWER_S = 5.0
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_FOLDER) + os.sep
#: Folders of code that is not the user's program: hpcdist, and torch, which is installed beside numpy.
_INNER = (
    _PACKAGE,
    os.path.dirname(np.__path__[0]) + os.sep + "torch" + os.sep,
)
#: Tags of messages.
_CALLS = 1
_ANSWER = 2


class CallCheck:
    """Compares what the ranks of a communicator are about to do, for one thread.

    Collective over `comm`.

    Args:
        comm: communicator of the ranks; it is cloned.
        world: world of this rank, which bounds waits and has the rank's name.
        timeout_s: longest wait for a rank to arrive. Default: timeout of the world.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        world: World,
        timeout_s: float | None = None,
    ) -> None:
        self._comm: MPI.Comm = comm.Dup()
        self._world = world
        self._timeout_s = timeout_s or world.timeout_s
        self._n_checked = 0
        self._dropped: list[MPI.Request] = []
        local_name = _padded(str(world), NAME_BYTES)
        names = np.zeros((self._comm.size, NAME_BYTES), np.uint8)
        world.wait(self._comm.Iallgather(local_name, names))
        self._names = [_text(row) for row in names]

    def check(
        self,
        op: str,
        dtype: str,
        n_elements: int,
        shape: Sequence[int] | None = None,
        site: str | None = None,
    ) -> None:
        """Return when all ranks are about to do the same, else raise on all of them.

        Collective over the communicator. Blocking, bounded by the time limit.

        Args:
            op: operation, such as "all_reduce sum".
            dtype: name of the dtype of the elements.
            n_elements: number of elements in this rank's buffer.
            shape: shape of this rank's buffer, if it has to be equal on all ranks.
            site: place of the call in the user's program. Default: innermost caller outside hpcdist.

        Raises:
            DesyncError: when a rank is about to do something else; on every rank, with one text that names the rank.
            CollectiveTimeoutError: when a rank does not arrive; on the ranks that did, with one text that names it.

        Cost: two small messages per rank; P of them one after the other on rank 0.
        """
        if self._comm.size == 1:
            return
        self._n_checked += 1
        size = f"x {n_elements}"
        if shape is not None:
            size += f" {tuple(shape)}"
        place = site or call_site()
        place = place[-SITE_LENGTH:]
        call = _padded(f"{op} {dtype} {size} at {place}", CALL_BYTES)
        if self._comm.rank == 0:
            verdict, text = self._judge(call)
        else:
            verdict, text = self._ask(call)
        if verdict == _SAME:
            return
        # not agreed: the ranks that did not come have to be ended
        error: HpcdistError = CollectiveTimeoutError(text)
        if verdict == _DIFFERENT:
            error = DesyncError(text)
            error.is_agreed = True
        if self._world.size > 1:
            error.is_reporter = self._comm.rank == 0
        raise error

    def free(self) -> None:
        """Free the communicator. Collective over the communicator."""
        self._comm.Free()

    def _judge(self, local_call: Bytes) -> tuple[int, str]:
        """Collect all calls, compare them, and answer the ranks that arrived."""
        n_ranks = self._comm.size
        calls = np.zeros((n_ranks, CALL_BYTES), np.uint8)
        calls[0] = local_call
        requests = {}
        for rank in range(1, n_ranks):
            requests[rank] = self._comm.Irecv(calls[rank], rank, _CALLS)
        missing = self._missing(requests, self._timeout_s)
        arrived = [rank for rank in range(n_ranks) if rank not in missing]
        texts = {rank: _text(calls[rank]) for rank in arrived}
        verdict = _SAME
        text = ""
        if missing:
            verdict = _MISSING
            text = self._late(texts[0], missing)
        elif len(set(texts.values())) > 1:
            verdict = _DIFFERENT
            difference = odd_ones(texts, self._names)
            text = f"collective {self._n_checked}: {difference}"
        self._answer(arrived[1:], verdict, text)  # all but this rank, which is rank 0
        return verdict, text

    def _answer(
        self,
        ranks: list[int],
        verdict: int,
        text: str,
    ) -> None:
        """Send the verdict, the length of the text and the text to the ranks that arrived."""
        data = np.frombuffer(text.encode(), np.uint8)
        head = np.array([verdict, len(data)], np.int64)
        requests = [self._comm.Isend(head, rank, _ANSWER) for rank in ranks]
        if len(data):
            requests += [self._comm.Isend(data, rank, _ANSWER) for rank in ranks]
        self._missing(dict(enumerate(requests)), ANSWER_S)

    def _ask(self, call: Bytes) -> tuple[int, str]:
        """Send rank 0 what this rank is about to do, and return its verdict."""
        head = np.zeros(2, np.int64)
        requests = {
            0: self._comm.Irecv(head, 0, _ANSWER),
            1: self._comm.Isend(call, 0, _CALLS),
        }
        if self._missing(requests, self._timeout_s + ANSWER_S):
            text = self._late(_text(call), [0])
            return _MISSING, text
        verdict, length = map(int, head)
        data = np.empty(length, np.uint8)
        if length:
            self._world.wait(self._comm.Irecv(data, 0, _ANSWER))
        return verdict, data.tobytes().decode()

    def _missing(
        self,
        requests: Mapping[int, MPI.Request],
        limit_s: float,
    ) -> list[int]:
        """Wait for requests, at most `limit_s`, and return the keys of those that are not complete."""
        pending = dict(requests)

        def is_done() -> bool:
            for key, request in list(pending.items()):
                if request.Test():
                    del pending[key]
            return not pending

        wait_until(is_done, limit_s, max_sleep_s=0.005)
        for request in pending.values():
            self._drop(request)
        return list(pending)

    def _drop(self, request: MPI.Request) -> None:
        """Cancel a message; its buffer stays, as a late one may still use it."""
        self._dropped.append(request)
        request.Cancel()

    def _late(self, call: str, missing: list[int]) -> str:
        """Return an error message that names the ranks that did not arrive."""
        missing_names = [self._names[rank] for rank in missing]
        names = _names(missing_names)
        return (
            f"collective {self._n_checked}: expected every rank within {self._timeout_s:g} s for {call}, got no answer "
            f"from {names}; look whether it took another path or stopped (HPCDIST_TIMEOUT_S or timeout_seconds sets "
            f"the limit)."
        )


def odd_ones(calls: Mapping[int, str], names: Sequence[str]) -> str:
    """Return an error message that names the ranks that differ from most. At equal counts the lowest rank is right.

    Args:
        calls: call of each rank.
        names: names of the ranks.
    """
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    # the first of equal counts, which holds the lowest rank
    usual = max(by_call, key=lambda call: len(by_call[call]))
    usual_ranks = by_call.pop(usual)
    where = f"{len(usual_ranks)} of {len(calls)} ranks"
    if len(usual_ranks) == 1:
        where = names[usual_ranks[0]]
    odd = []
    for call, ranks in by_call.items():
        odd_names = [names[rank] for rank in ranks]
        odd.append(f"{call} on {_names(odd_names)}")
    deviating_calls = ", ".join(odd[:MAX_NAMES])
    advice = "let all ranks call the same collectives in the same order"
    return f"expected {usual} as on {where}, got {deviating_calls}; {advice}."


def call_site() -> str:
    """Return file:line of the innermost caller outside hpcdist and torch; in a thread of ours, where it was started."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    file_name = os.path.basename(frame.f_code.co_filename)
    return f"{file_name}:{frame.f_lineno}"


def _names(names: Sequence[str]) -> str:
    """Return the names in one text; if there are many, the first ones and the number of further ones."""
    text = ", ".join(names[:MAX_NAMES])
    n_more = len(names) - MAX_NAMES
    if n_more > 0:
        text += f" and {n_more} more"
    return text


def _padded(text: str, n_bytes: int) -> Bytes:
    """Return the text as a fixed number of bytes."""
    padded: Bytes = np.zeros(n_bytes, np.uint8)
    encoded = text.encode()[:n_bytes]
    data = np.frombuffer(encoded, np.uint8)
    padded[: len(data)] = data
    return padded


def _text(row: Bytes) -> str:
    """Return the text that `_padded` has made bytes of."""
    return row.tobytes().rstrip(b"\0").decode(errors="replace")
