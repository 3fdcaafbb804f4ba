"""The one bounded wait, for everything that another rank has to do first.

With more ranks than cores, a rank that spins keeps the rank it waits for from running; one that sleeps at once pays 50
microseconds for each wake-up. So a wait yields the core first, then sleeps, longer each time.
"""

import os
import time
from collections.abc import Callable

from hpcdist.errors import CollectiveTimeoutError

#: Times that the core is yielded before the first sleep, about a millisecond in all.
YIELDS = 2000
#: First and longest sleep. At 1 Gbit/s half a millisecond is 64 KiB, which sockets hold.
SLEEP_S = 20e-6
MAX_SLEEP_S = 5e-4
#: A longer pause between two looks counts as this long: the process was suspended.
AWAKE_S = 1.0


def wait_until(
    is_done: Callable[[], object],
    timeout_s: float,
    yields: int = YIELDS,
    max_sleep_s: float = MAX_SLEEP_S,
) -> bool:
    """Poll `is_done` until it is true, at most for `timeout_s`; return whether it is.

    Time in which this process was suspended does not count.

    Args:
        is_done: function to poll, which must be cheap; MPI advances messages while it is called.
        timeout_s: longest wait.
        yields: number of looks before the first sleep. 0 to sleep from the start, as a background thread must: it would
            otherwise hold the interpreter lock.
        max_sleep_s: longest sleep. Messages inside a host advance at each look only, some 10 KiB at a time.
    """
    for _ in range(yields):
        if is_done():
            return True
        os.sched_yield()
    waited_s = 0.0
    sleep_s = SLEEP_S
    last = time.monotonic()
    while not is_done():
        if waited_s > timeout_s:
            return False
        time.sleep(sleep_s)
        now = time.monotonic()
        waited_s = waited_s + min(now - last, AWAKE_S)
        last = now
        sleep_s = min(2 * sleep_s, max_sleep_s)
    return True


def late(call: str, timeout_s: float, missing: str, rank: object) -> CollectiveTimeoutError:
    """Return the error of a wait for other ranks that took too long.

    Args:
        call: name of the call that waited, such as "all_reduce".
        timeout_s: the limit.
        missing: names of the ranks that did not come, such as "rank 1 (worker 1)".
        rank: the rank that waited.
    """
    return CollectiveTimeoutError(
        f"{call}: expected every rank within {timeout_s:g} s, got no answer from {missing} on {rank}; look for a rank "
        f"that took another path or stopped (HPCDIST_TIMEOUT_S or timeout_seconds sets the limit)."
    )
