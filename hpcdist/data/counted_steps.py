"""Passes over batches that each rank alone knows: the cursor counts steps, and ranks agree where a pass ends."""

import time
from abc import abstractmethod
from typing import Any

from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.iterator import Delivery
from hpcdist.data.options import InputOptions
from hpcdist.data.prefetch import Items, on_device
from hpcdist.errors import DataError, agreed
from hpcdist.nest import Nest
from hpcdist.runtime.parts import Part

#: How long a rank reads the parts that a restart drops, before it tells the other ranks that it still reads.
_DROP_S = 2.0
#: A local replica's part of a step and its rows; None for a replica that is out of data.
CountedPart = tuple[int, Nest] | None


class CountedSteps(DistributedInput):
    """Passes that end on all ranks at the same step, when all are out of data.

    A replica without data gets parts with 0 rows, shaped as its other parts. Where parts are promised to be whole, a
    pass ends when one replica is out of data.

    A restart needs the same number of replicas, and input that gives the same parts again.

    Args:
        replicas: replicas of this rank.
        n_replicas: number of replicas on all ranks.
        ends_with_first: whether a pass ends when one replica is out of data; equal on all ranks.
        delivery: connections to the strategy.
        options: options of the input.

    Attributes:
        ends_with_first: whether a pass ends when one replica is out of data.
    """

    def __init__(
        self,
        replicas: range,
        n_replicas: int,
        ends_with_first: bool,
        delivery: Delivery,
        options: InputOptions | None,
    ) -> None:
        super().__init__(len(replicas), delivery, options)
        self.ends_with_first = ends_with_first
        self._n_local = len(replicas)
        self._n_replicas = n_replicas
        self._first_replica = replicas.start
        self._n_passes = 0
        self._n_steps = 0
        self._part_rows: tuple[int, ...] = ()
        self._seed = 0

    @property
    def epoch(self) -> int:
        """The epoch in progress; between passes, the next one."""
        return self._n_passes

    def set_seed(self, seed: int) -> None:
        """Derive all random numbers from one seed, so that a checkpoint stores it alone.

        Args:
            seed: seed that is equal on all ranks.
        """
        self._seed = seed

    @abstractmethod
    def _next_local_parts(self, readers: list[Items]) -> list[CountedPart]:
        """Return the next part of each local replica."""

    @abstractmethod
    def _part_without_rows(self, local_replica: int) -> Nest:
        """Return a part with 0 rows, on the host."""

    # -- passes -------------------------------------------------------------------------------------------------

    @property
    def _n_in_pass(self) -> int:
        return self._n_steps

    @property
    def _knows_end(self) -> bool:
        return False

    @property
    def _is_at_end(self) -> bool:
        return False

    @property
    def _beginning(self) -> tuple[int, int]:
        return 0, 0

    def _position(self) -> tuple[int, int]:
        return self._n_passes, self._n_steps

    def _restore(self, position: tuple[int, int]) -> None:
        self._n_passes, self._n_steps = position

    def _begin_pass(self) -> None:
        if self._n_steps:
            self._end_pass()

    def _end_pass(self) -> None:
        self._n_passes += 1
        self._n_steps = 0

    def _drop(self, readers: list[Items], n_parts: int) -> None:
        """Read the parts of each reader that were used before a restart.

        Ranks may take unequally long: they tell each other every few seconds that they still read. Collective over the
        ranks of the strategy if there are such parts.
        """
        n_left = n_parts
        is_everybody_done = n_parts == 0
        while not is_everybody_done:
            deadline_s = time.monotonic() + _DROP_S
            while n_left and time.monotonic() < deadline_s:
                n_left -= 1
                for reader in readers:
                    next(reader, None)
            is_done = n_left == 0
            agree_end = self._delivery.agree_end
            is_everybody_done = is_done
            if agree_end is not None:
                is_everybody_done = agree_end(is_done, False)

    def _next_parts(self, readers: list[Items]) -> list[Nest] | None:
        local_parts = self._next_local_parts(readers)
        are_out = [part is None for part in local_parts]
        is_out = all(are_out)
        if self.ends_with_first:
            is_out = any(are_out)
        if self._delivery.agree_end is not None:
            is_out = self._delivery.agree_end(is_out, self.ends_with_first)
        if is_out:
            self._require_whole_parts(local_parts)
            return None
        self._n_steps += 1
        self._part_rows = tuple(0 if part is None else part[0] for part in local_parts)
        return [self._nest_of(replica, part) for replica, part in enumerate(local_parts)]

    def _require_whole_parts(self, local_parts: list[CountedPart]) -> None:
        """Raise DataError on all ranks if a pass ends before its first step, although some rank has a part.

        Collective over the ranks of the strategy in that case.
        """
        agree_end = self._delivery.agree_end
        if self._n_steps or not self.ends_with_first or agree_end is None:
            return
        has_no_part = all(part is None for part in local_parts)
        if not agree_end(has_no_part, False):
            raise agreed(
                DataError(
                    "iter: expected a whole part for each replica in the first step, got none on some ranks, so that "
                    "nothing would be read; give each rank rows, or leave out drop_last and drop_remainder."
                )
            )

    def _nest_of(self, local_replica: int, part: CountedPart) -> Nest:
        if part is not None:
            return part[1]
        empty_part = self._part_without_rows(local_replica)
        device = self._device()
        if device is None:
            return empty_part
        return on_device(empty_part, device)

    def _part(self, is_for_training: bool) -> Part:
        return Part(
            source=self._source,
            number=self._source.n_handed_out + 1,
            rows=self._part_rows,
            total_rows=None,
            is_everywhere=False,
            key=hash((self._source.number, self._n_passes, self._n_steps)),
            position=self._position(),
            is_for_training=is_for_training,
        )

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: passes, steps of this one, the number of replicas and the seed. Equal on all ranks."""
        n_passes, n_steps = self._saved_position()
        return {
            "passes": n_passes,
            "steps": n_steps,
            "n_replicas": self._n_replicas,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a cursor.

        Raises:
            DataError: when it is of another number of replicas.
        """
        if state["n_replicas"] != self._n_replicas:
            raise DataError(
                f"restore: expected {state['n_replicas']} replicas as in the checkpoint, got {self._n_replicas}; only "
                f"experimental_distribute_dataset resumes with another number."
            )
        self.set_seed(state["seed"])
        self._n_passes = state["passes"]
        self._n_steps = state["steps"]
        self._resume()
