"""The store of torch.distributed over MPI: no port is opened, so nobody but the ranks of the job can write to it.

Rank 0 holds the keys. A thread there answers the other ranks, by messages on a separate communicator, so that the
program of rank 0 need not take part.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from hpcdist.forks import make_condition, make_lock
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import wait_until
from hpcdist.runtime.world import World

_REQUEST_TAG = 1
_REPLY_TAG = 2
#: Pauses of the thread between two looks for requests: right after one, and the longest.
_LOOK_S = 2e-4
_LONGEST_LOOK_S = 5e-3
#: Time for which an answer is waited for beyond the limit of its request.
_SLACK_S = 30.0


class KeyTable:
    """Keys and values. Any thread may call; threads that wait for keys wait here.

    It has the methods of torch's Store.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = make_condition()

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; return the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def append(self, key: str, value: bytes) -> None:
        """Append to the value of a key."""
        with self._changed:
            self._values[key] = self._values.get(key, b"") + value
            self._changed.notify_all()

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it has the expected value; return its value then."""
        with self._changed:
            current = self._values.get(key)
            if current == expected or (current is None and not expected):
                self._values[key] = current = desired
                self._changed.notify_all()
            if current is None:
                return expected
            return current

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """Return the value of a key; KeyError without one."""
        with self._changed:
            return self._values[key]

    def num_keys(self) -> int:
        """Return the number of keys."""
        with self._changed:
            return len(self._values)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Wait until all keys are there; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self.check(keys), timeout_s)


class _Parked(NamedTuple):
    """A rank that waits for keys.

    Attributes:
        rank: rank that waits.
        number: number of its request.
        keys: keys that it waits for.
        until_s: time at which it gives up, by time.monotonic.
    """

    rank: int
    number: int
    keys: Sequence[str]
    until_s: float


class _Server:
    """Answers the requests of other ranks, in a thread.

    Args:
        comm: communicator of the store.
        table: table of the keys.
    """

    def __init__(self, comm: MPI.Comm, table: KeyTable) -> None:
        self._comm = comm
        self._table = table
        self._parked: list[_Parked] = []
        self._sends: list[MPI.Request] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread: no rank asks any more."""
        self._is_over.set()
        self._thread.join(_SLACK_S)

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._is_over.wait(pause_s) and not MPI.Is_finalized():
            has_answered = self._answer_requests()
            self._wake_parked()
            self._sends = [request for request in self._sends if not request.Test()]
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
            if has_answered:
                pause_s = _LOOK_S

    def _answer_requests(self) -> bool:
        status = MPI.Status()
        has_answered = False
        while self._comm.Iprobe(tag=_REQUEST_TAG, status=status):
            rank = status.Get_source()
            number, operation, arguments = self._comm.recv(source=rank, tag=_REQUEST_TAG)
            has_answered = True
            if operation == "wait":
                keys, timeout_s = arguments
                until_s = time.monotonic() + timeout_s
                self._parked.append(_Parked(rank, number, keys, until_s))
            else:
                result = _result_of(self._table, operation, arguments)
                self._reply(rank, number, result)
        return has_answered

    def _wake_parked(self) -> None:
        now = time.monotonic()
        waiting = []
        for parked in self._parked:
            if self._table.check(parked.keys):
                self._reply(parked.rank, parked.number, True)
            elif now > parked.until_s:
                self._reply(parked.rank, parked.number, False)
            else:
                waiting.append(parked)
        self._parked = waiting

    def _reply(self, rank: int, number: int, value: Any) -> None:
        self._sends.append(self._comm.isend((number, value), rank, _REPLY_TAG))


def _result_of(table: KeyTable, operation: str, arguments: Sequence[Any]) -> Any:
    """Return the result of an operation, or its error."""
    try:
        return getattr(table, operation)(*arguments)
    except (KeyError, ValueError) as error:
        return error


class MPIStore(dist.Store):  # type: ignore[name-defined, misc]
    """A torch.distributed.Store of all ranks of a world.

    Collective over all ranks of the world. The methods of torch's Store are not collective.

    Args:
        world: world of the ranks.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        world.agree(None)  # all have come: making a communicator blocks on nobody
        self._comm = world.comm.Dup()
        self._is_holder = world.rank == 0
        self._table = KeyTable()
        self._number = 0
        self._asking = make_lock()
        if self._is_holder and world.size > 1:
            server = _Server(self._comm, self._table)
            server.start()
            world.call_before_free(server.stop)
        world.call_before_free(self._comm.Free)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", key, _bytes_of(value))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; return the sum."""
        return int(self._ask("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", key, _bytes_of(value))

    def compare_set(
        self,
        key: str,
        expected: str | bytes,
        desired: str | bytes,
    ) -> bytes:
        """Set a key if it has the expected value, or if it is absent and none is expected; return its value then."""
        return bytes(self._ask("compare_set", key, _bytes_of(expected), _bytes_of(desired)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            torch.distributed.DistStoreError: after the timeout; default: the timeout of the store.
        """
        if timeout is None:
            timeout = self.timeout
        limit_s = timeout.total_seconds()
        if not self._ask("wait", list(keys), limit_s, limit_s=limit_s):
            raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(keys)}")

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("num_keys"))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return bool(self._ask("delete_key", key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys, and return their values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return that `append`, `multi_get` and `multi_set` are there."""
        return True

    # torch's C++ calls overrides by the names that these methods have there
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815
    compareSet = compare_set  # noqa: N815
    multiGet = multi_get  # noqa: N815
    multiSet = multi_set  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815

    def _ask(self, operation: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        """Return the result of an operation on the table, which rank 0 holds.

        Raises:
            torch.distributed.DistStoreError: if rank 0 does not answer.
        """
        if self._is_holder:
            result = _result_of(self._table, operation, arguments)
        else:
            with self._asking:
                result = self._ask_holder(operation, arguments, limit_s + _SLACK_S)
        if isinstance(result, Exception):
            raise dist.DistStoreError(f"{operation}: {result}")
        return result

    def _ask_holder(
        self,
        operation: str,
        arguments: Sequence[Any],
        limit_s: float,
    ) -> Any:
        self._number += 1
        request = self._comm.isend((self._number, operation, arguments), 0, _REQUEST_TAG)
        until_s = time.monotonic() + limit_s
        while True:
            has_come = wait_until(
                lambda: self._comm.Iprobe(source=0, tag=_REPLY_TAG),
                until_s - time.monotonic(),
            )
            if not has_come:
                raise dist.DistStoreError(
                    f"{operation}: expected an answer of rank 0 within {limit_s:g} s, got none"
                )
            number, result = self._comm.recv(source=0, tag=_REPLY_TAG)
            if number == self._number:  # an earlier number answers a request that was given up
                request.wait()
                return result


def _bytes_of(value: str | bytes) -> bytes:
    """Return a value as the table holds it."""
    if isinstance(value, str):
        return value.encode()
    return bytes(value)
