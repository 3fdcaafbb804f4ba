"""DataLoaders that the program has made, as sources of parts: the rows of a batch, and the position of a pass.

Only `hpcdist.DistributedSampler` can restore the position of a pass. A loader with another sampler is followed all the
same, so that a program which trains on it is refused instead of being saved at a wrong position.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from hpcdist.errors import DataError, agreed
from hpcdist.program.part_tensors import length_of
from hpcdist.runtime.parts import NOTHING, Part
from hpcdist.runtime.step_flags import StepFlags


class OwnLoader:
    """A DataLoader that the program has made.

    Args:
        loader: loader that the program iterates over.
        flags: step flags of the world.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        flags: StepFlags,
    ) -> None:
        self._sampler: Any = _positioned_sampler(loader)
        self._flags = flags
        keeper = NOTHING
        self._rows_of_batch: int | None = None
        if self._sampler is not None:
            keeper = id(self._sampler)
            self._rows_of_batch = self._sampler_batch_size(loader)
        self._source = flags.loop.add_source(keeper=keeper)
        self._first_row = 0
        self._n_batches = 0
        self._n_complete_at_begin = 0
        self._is_following = False
        weakref.finalize(loader, self._source.abandon)

    @staticmethod
    def _sampler_batch_size(loader: "DataLoader[Any]") -> int | None:
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int):
            return None
        return size

    def begin_pass(self, loader: "DataLoader[Any]") -> AbstractContextManager[None]:
        """Note that a pass begins; a pass that was left in its middle ends here.

        Returns:
            A context in which the loader must begin the pass. If its position is kept, a restart has the same random
            numbers.

        Raises:
            DataError: on all ranks, if a restart could not know where the program leaves its passes.
        """
        self._flags.poll_at_draw(self._source, torch.is_grad_enabled(), is_last=False)
        if self._source.has_pass:
            if self._source.n_complete == self._n_complete_at_begin:
                self._source.note_peek()
            self._require_end()
        self._n_batches = 0
        self._n_complete_at_begin = self._source.n_complete
        if (
            self._sampler is not None
            and self._flags.requester is not None
            and not self._is_following
        ):
            # only here: another world, without a handler, may watch the loader too
            self._is_following = self._sampler.follow(self._source)
            if not self._is_following:  # another loader draws by the same sampler
                self._source.lose_position()
        if self._sampler is not None:
            self._first_row = self._sampler.begin_pass()
            self._source.move(self._sampler.position_after(self._first_row))
        self._source.settle()
        self._source.begin_pass()
        beginning: AbstractContextManager[None] = nullcontext()
        if self._is_following:
            beginning = self._sampler.beginning_pass(loader)
        return beginning

    def _require_end(self) -> None:
        """Raise DataError on all ranks if a pass was left in its middle, and a restart would count it anew."""
        is_trained = self._source.n_complete > self._n_complete_at_begin
        if (
            self._flags.requester is None
            or self._sampler is None
            or not is_trained
            or self._has_all_rows
        ):
            return
        raise agreed(
            DataError(
                f"DataLoader: expected the last pass over hpcdist.DistributedSampler to end by itself, got it left "
                f"after {self._n_batches} batches, which a restart in its middle would count anew; give the loader "
                f"fewer rows, as by torch.utils.data.Subset, or call "
                f"strategy.experimental_distribute_dataset(loader) and iterate over batches.take({self._n_batches})."
            )
        )

    @property
    def _has_all_rows(self) -> bool:
        """Whether all rows of the pass were drawn."""
        return self._sampler is not None and self._drawn_rows() >= len(self._sampler)

    def _drawn_rows(self) -> int:
        return self._first_row + self._n_batches * (self._rows_of_batch or 0)

    def before_draw(self) -> None:
        """Act on requests if the program is between two iterations.

        Collective over the ranks of the role in that case.
        """
        is_last = self._n_batches > 0 and self._has_all_rows
        self._flags.poll_at_draw(self._source, torch.is_grad_enabled(), is_last)
        self._source.settle()

    def part_of(self, batch: Any) -> Part:
        """Return a batch that the program gets now as a part."""
        n_rows = self._planned_rows()
        self._n_batches += 1
        if self._sampler is not None:
            self._source.move(self._sampler.position_after(self._drawn_rows()))
        rows: tuple[int, ...] | None = None
        likely_rows: int | None = None
        if n_rows is None:
            likely_rows = length_of(batch)
        else:
            rows = (n_rows,)
        part = Part(
            source=self._source,
            number=self._source.n_handed_out + 1,
            rows=rows,
            total_rows=None,
            is_everywhere=n_rows is not None,
            key=None,
            position=self._source.now,
            is_for_training=torch.is_grad_enabled(),
            likely_rows=likely_rows,
        )
        self._flags.loop.hand_out(part)
        return part

    def _planned_rows(self) -> int | None:
        """Return the rows of the next batch, by the length of the sampler; None where nobody knows."""
        if self._rows_of_batch is None or self._sampler is None:
            return None
        remaining_rows = len(self._sampler) - self._drawn_rows()
        return max(0, min(self._rows_of_batch, remaining_rows))

    def end_pass(self) -> None:
        """Note that there were no more batches."""
        self._source.end_pass()
        # the program has read the rows for another purpose, such as their mean; tensors still name their part
        if not self._source.is_trained:
            self._source.drop_open()
        if self._is_following:
            self._source.move(self._sampler.end_pass())
        self._source.settle()
        self._flags.loop.forget_last_used(self._source)


def _positioned_sampler(loader: "DataLoader[Any]") -> Any:
    """Return the sampler of a loader if it knows its position."""
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    if not hasattr(sampler, "position_after"):
        return None
    return sampler
