"""StopRequest: what is known of a request to save and stop, from its source to the ledger."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class StopRequest:
    """A request to save the job and stop it.

    Attributes:
        source: where it comes from, such as "SIGTERM on rank 3", "deadline" or "stop file runs/a/stop".
        is_for_good: whether a person asked that the job is not run again.
        asked_at: time of the request, by time.monotonic on the rank that it came to; None on other ranks.
    """

    source: str
    is_for_good: bool = False
    asked_at: float | None = None

    @property
    def reason(self) -> str:
        """The reason of the stop, for people."""
        if self.is_for_good:
            return f"{self.source}, for good"
        return self.source

    @property
    def may_be_preemption(self) -> bool:
        """Whether it may come from the batch system, which then chose the time."""
        return self.source.startswith("SIGTERM ")

    def to_text(self) -> str:
        """Return the request as a text for other ranks."""
        return json.dumps([self.source, self.is_for_good])

    @classmethod
    def from_text(cls, text: str) -> "StopRequest":
        """Return the request of another rank."""
        source, is_for_good = json.loads(text)
        return cls(source, is_for_good)
