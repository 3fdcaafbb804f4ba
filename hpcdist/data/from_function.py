"""Batches of datasets that a function made, one per input pipeline: nothing is divided here, ends are agreed on."""

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hpcdist.data.dataset import Dataset
from hpcdist.data.iterators import DistributedIterator, HandOut, OnBatch, Wrap
from hpcdist.data.options import InputContext, InputOptions, InputReplicationMode
from hpcdist.data.reading import after_batches, read_pass, start_of_pass
from hpcdist.errors import DataError
from hpcdist.nest import Nest

DatasetFunction = Callable[[InputContext], Dataset]


def contexts_of(
    options: InputOptions | None, replicas: range, worker: tuple[int, int], n_replicas: int
) -> list[InputContext]:
    """Return a context for every dataset of this rank: one, or one per local replica with PER_REPLICA.

    Args:
        options: of the input.
        replicas: of this rank.
        worker: this rank and the number of ranks.
        n_replicas: of all ranks.
    """
    mode = (options or InputOptions()).experimental_replication_mode
    if mode is InputReplicationMode.PER_REPLICA:
        return [InputContext(n_replicas, replica, n_replicas) for replica in replicas]
    return [InputContext(worker[1], worker[0], n_replicas)]


def datasets_of(dataset_fn: DatasetFunction, contexts: list[InputContext]) -> list[Dataset]:
    """Return what the function makes of each context.

    Raises:
        DataError: when that is no Dataset with a batch size; on this rank only.
    """
    made = [dataset_fn(context) for context in contexts]
    for dataset in made:
        if not isinstance(dataset, Dataset) or dataset.order.batch_rows is None:
            raise DataError(
                f"distribute_datasets_from_function: expected an hpcdist.Dataset with batch(per_replica_batch), got "
                f"{type(dataset).__name__}{' without batch' if isinstance(dataset, Dataset) else ''}; return one."
            )
        dataset.check_hint(is_placed=False)
    return made


class DistributedFromFunction:
    """Batches of this rank's own datasets, one for each of its replicas at every step.

    Every `iter()` is one pass, except the first after `load_state_dict`. A pass ends on all ranks at the same step,
    when all are out of data; a replica that is out before gets parts with 0 rows, shaped as its others.

    The cursor counts steps, as what the ranks hold is theirs to know: it goes on with the same number of input
    pipelines and batches. Cost: nothing for rows with random access; of streams, the batches that were used are drawn
    and dropped.

    Args:
        datasets: of this rank: one whose batches its replicas take in turn, or one per replica.
        replicas, n_replicas: the replicas of this rank, of how many.
        on_batch, wrap, options: as for `DistributedDataset`.
        agree_end: told whether this rank is out of data, returns whether all are. Collective; None for one rank.

    Attributes:
        poll: as of `DistributedDataset`.
    """

    def __init__(
        self,
        datasets: list[Dataset],
        replicas: range,
        n_replicas: int,
        on_batch: OnBatch | None = None,
        wrap: Wrap | None = None,
        options: InputOptions | None = None,
        agree_end: Callable[[bool], bool] | None = None,
    ) -> None:
        self._hand_out = HandOut(on_batch, wrap, options or InputOptions())
        self._hand_out.check(len(replicas))
        self._datasets = [
            replace(one, prefetch_batches=self._hand_out.n_ahead(one.prefetch_batches)) for one in datasets
        ]
        self._n_local, self._n_replicas, self._first = len(replicas), n_replicas, replicas.start
        self.set_seed(secrets.randbits(62))
        self._agree_end = agree_end or bool
        self._n_passes = self._n_steps = 0
        self._goes_on = False
        self.poll: Callable[[], None] | None = None

    def set_seed(self, seed: int) -> None:
        """Give every order that has a drawn seed one that follows from `seed`, so that a checkpoint stores one seed.

        Args:
            seed: equal on all ranks. The datasets of the job get different ones from it.
        """
        self._seed = seed
        for number, dataset in enumerate(self._datasets):
            if dataset.has_drawn_seed:
                self._datasets[number] = dataset.with_drawn_seed(seed + self._first + number)

    @property
    def element_spec(self) -> Nest:
        """What a part looks like: the nest with a TensorSpec for every array. Cost: a row is read."""
        return self._datasets[0].element_spec

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over one pass. Its steps are collective: all ranks."""
        return DistributedIterator(self._pass(), lambda: self.element_spec, self.poll)

    def _pass(self) -> Iterator[Any]:
        if self._n_steps and not self._goes_on:
            self._n_passes, self._n_steps = self._n_passes + 1, 0
        self._goes_on = False
        per_step = self._n_local // len(self._datasets)
        sources = [self._batches(dataset, self._n_steps * per_step) for dataset in self._datasets]
        while True:
            parts = [next(sources[number % len(sources)], None) for number in range(self._n_local)]
            if self._agree_end(all(part is None for part in parts)):
                break
            self._n_steps += 1
            yield self._hand_out.hand([self._filled(number, part) for number, part in enumerate(parts)])
        self._n_passes, self._n_steps = self._n_passes + 1, 0
        self._hand_out.end()

    def _batches(self, dataset: Dataset, n_skipped: int) -> Iterator[Nest]:
        """Yield the batches of this pass: each pass begins with other epochs, so that it has another order."""
        cursor = start_of_pass(dataset, self._n_passes)
        if not dataset.is_stream:
            cursor, n_skipped = after_batches(dataset, cursor, n_skipped), 0
        for _, (part,) in itertools.islice(read_pass(dataset, cursor, lambda n_rows: [(0, n_rows)]), n_skipped, None):
            yield part

    def _filled(self, number: int, part: Nest | None) -> Nest:
        if part is not None:
            return part
        return self._datasets[number % len(self._datasets)].part_without_rows()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: passes, steps of this one, the number of replicas and the seed. Equal on all ranks."""
        return {
            "passes": self._n_passes,
            "steps": self._n_steps,
            "n_replicas": self._n_replicas,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor.

        Raises:
            DataError: when it is of another number of replicas.
        """
        if state["n_replicas"] != self._n_replicas:
            raise DataError(
                f"restore: expected {state['n_replicas']} replicas as in the checkpoint, got {self._n_replicas}; only "
                f"experimental_distribute_dataset goes on with another number."
            )
        self.set_seed(state["seed"])
        self._n_passes, self._n_steps = state["passes"], state["steps"]
        self._goes_on = True
