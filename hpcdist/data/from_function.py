"""Distributed datasets that a function makes for each rank: their batches are the parts of the replicas."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcdist.data.batches import DividedBatches, after_batches, in_parts, start_of_pass
from hpcdist.data.counted_steps import CountedPart, CountedSteps
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import as_dataset
from hpcdist.data.iterator import Delivery, PipelineReader
from hpcdist.data.options import InputContext, InputOptions, InputReplicationMode
from hpcdist.data.prefetch import Items
from hpcdist.data.row_numbers import program_seed
from hpcdist.errors import DataError
from hpcdist.nest import Nest

DatasetFunction = Callable[[InputContext], Dataset]


def sharded_dataset(dataset: Dataset, n_replicas: int) -> Dataset:
    """Return a dataset that holds this rank's rows only, with the batch of one replica in place of the global batch.

    Raises:
        DataError: for a dataset without a batch size.
    """
    if not _has_batches(dataset) or dataset.holds_batches:
        raise DataError(
            "experimental_distribute_dataset: expected a dataset of rows with batch(global_batch) for is_sharded=True, "
            "got one without; add batch as the last call."
        )
    return replace(dataset, order=in_parts(dataset.order, n_replicas))


def _has_batches(dataset: Any) -> bool:
    """Return whether something is a Dataset with a batch size."""
    return isinstance(dataset, Dataset) and dataset.order.batch_rows is not None


def contexts_of(
    options: InputOptions | None,
    replicas: range,
    worker: tuple[int, int],
    n_replicas: int,
) -> list[InputContext]:
    """Return a context for every dataset of this rank: one, or one per local replica with PER_REPLICA.

    Args:
        options: options of the input.
        replicas: replicas of this rank.
        worker: this rank and the number of ranks.
        n_replicas: number of replicas on all ranks.
    """
    mode = (options or InputOptions()).experimental_replication_mode
    if mode is InputReplicationMode.PER_REPLICA:
        return [InputContext(n_replicas, replica, n_replicas) for replica in replicas]
    rank, n_ranks = worker
    return [InputContext(n_ranks, rank, n_replicas)]


def datasets_of(dataset_fn: DatasetFunction, contexts: list[InputContext]) -> list[Dataset]:
    """Return the dataset that the function returns for each context.

    Raises:
        DataError: when one is not a Dataset with a batch size; on this rank only.
    """
    datasets: list[Any] = []
    for context in contexts:
        datasets.append(as_dataset(dataset_fn(context)))
    for dataset in datasets:
        if not _has_batches(dataset):
            actual = type(dataset).__name__
            if isinstance(dataset, Dataset):
                actual += " without batch"
            raise DataError(
                f"distribute_datasets_from_function: expected an hpcdist.Dataset with batch(per_replica_batch), got "
                f"{actual}; return one."
            )
        dataset.check_hint(is_placed=False)
    return datasets


class DistributedFromFunction(CountedSteps):
    """Batches of datasets that this rank alone has, one for each of its replicas at every step.

    Every `iter()` is one pass, except that the first after `load_state_dict` resumes the pass of the state.

    Each rank alone knows which rows it reads: a restart needs the same number of input pipelines and the same batches.
    Cost: nothing for rows with random access; of streams, the batches that were used are drawn and dropped.

    Args:
        datasets: datasets of this rank: one whose batches its replicas take in turn, or one per replica. With
            drop_remainder in all, which promises whole parts, a pass ends when one replica is out of data.
        replicas: replicas of this rank.
        n_replicas: number of replicas on all ranks.
        delivery: connections to the strategy.
        options: options of the input.

    Attributes:
        datasets: datasets that are read, with the number of batches that are read ahead.
    """

    def __init__(
        self,
        datasets: list[Dataset],
        replicas: range,
        n_replicas: int,
        delivery: Delivery | None = None,
        options: InputOptions | None = None,
    ) -> None:
        ends_with_first = all(dataset.order.drop_remainder for dataset in datasets)
        super().__init__(replicas, n_replicas, ends_with_first, delivery or Delivery(), options)
        self.datasets = [self._prefetched(dataset) for dataset in datasets]
        self._pipeline_readers: list[PipelineReader] = []
        self.set_seed(program_seed() >> 1)

    def set_seed(self, seed: int) -> None:
        """Derive the seed of every order with a drawn seed from one, so that a checkpoint stores one seed.

        Args:
            seed: seed that is equal on all ranks. Each dataset of the job gets another seed from it.
        """
        super().set_seed(seed)
        readers: list[PipelineReader] = []
        for number, dataset in enumerate(self.datasets):
            own_seed = seed + self._first_replica + number
            if dataset.has_drawn_seed:
                dataset = dataset.with_drawn_seed(own_seed)
                self.datasets[number] = dataset
            readers.append(PipelineReader(dataset, DividedBatches(dataset.order), own_seed))
        self._pipeline_readers = readers

    @property
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: a row is read."""
        return self.datasets[0].element_spec

    def _readers(self) -> list[Items]:
        """Return readers from the cursor on. Cost: the used batches of a stream are read and dropped."""
        n_used = self._n_steps * (self._n_local // len(self.datasets))
        readers: list[Items] = []
        streams: list[Items] = []
        for dataset, pipeline_reader in zip(self.datasets, self._pipeline_readers, strict=True):
            cursor = start_of_pass(dataset.order, self._n_passes)  # each pass has other epochs
            if not dataset.is_stream:
                cursor = after_batches(dataset.order, cursor, n_used)
            reader = pipeline_reader.stages(cursor, self._device())
            readers.append(reader)
            if dataset.is_stream:
                streams.append(reader)
        self._drop(streams, n_used)
        return readers

    def _next_local_parts(self, readers: list[Items]) -> list[CountedPart]:
        local_parts: list[CountedPart] = []
        for replica in range(self._n_local):
            batch = next(readers[replica % len(readers)], None)
            if batch is None:
                local_parts.append(None)
                continue
            cursor, [nest] = batch
            local_parts.append((cursor.part_rows[0], nest))
        return local_parts

    def _part_without_rows(self, local_replica: int) -> Nest:
        return self.datasets[local_replica % len(self.datasets)].part_without_rows()
