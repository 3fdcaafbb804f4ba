"""Datasets: where rows come from, their order, the sizes of batches, and the functions mapped over them."""

import glob
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hpcdist.data.batches import EveryNth, EveryNthFile, Shard
from hpcdist.data.cache import CachedSource, FileStore, MemoryStore, cached_stream
from hpcdist.data.elements import Elements
from hpcdist.data.hdf5 import (
    Hdf5Source,
    Paths,
    datasets_in,
    expand,
    is_h5py_dataset,
    paths_and_names,
)
from hpcdist.data.options import SHARD_HINT, AutoShardPolicy, Options
from hpcdist.data.row_numbers import program_seed
from hpcdist.data.rows import Function, TensorSpec, as_array, fitted, spec_of
from hpcdist.data.sources import ArraySource, RowSource, ShardSource, mapped
from hpcdist.data.streams import Stream
from hpcdist.data.torch_source import ItemsSource, check_loader, stream_of
from hpcdist.errors import DataError
from hpcdist.nest import Nest, children_of, is_nest, leaves, map_nest, with_children
from hpcdist.plan.sample_order import UNKNOWN, Mixing, SampleOrder

_CORRECT = "correct the calls that build the dataset"


@dataclass(frozen=True)
class Dataset(Elements):
    """Rows with an order and a batch size, as in tf.data. Every method returns a new dataset.

    The order of rows is a pure function of (seed, epoch, position), so a run can resume from any sample: at once where
    rows can be read in any order (arrays, HDF5 files, torch's map-style datasets), else by drawing and dropping the
    earlier rows of the epoch (generators, torch's iterable datasets).

    >>> dataset = hpcdist.Dataset.from_tensor_slices(torch.arange(10)).shuffle(seed=1).batch(4)
    >>> [len(batch) for batch in dataset]
    [4, 4, 2]
    """

    options: Options | None = None
    _passes: Iterator[int] = field(
        default_factory=itertools.count, init=False, compare=False, repr=False
    )

    @classmethod
    def from_tensors(cls, tensors: Nest) -> "Dataset":
        """Return a dataset of one row: the nest of arrays itself."""
        values = _lists_as_arrays("from_tensors", tensors)
        arrays = map_nest(lambda value: as_array(value)[None], values)
        return cls(ArraySource(arrays, 1), SampleOrder(1))

    @classmethod
    def from_tensor_slices(cls, tensors: Nest) -> "Dataset":
        """Return a dataset whose row i is row i of every array in a nest.

        Args:
            tensors: torch tensors or numpy arrays with equal first dimensions, in tuples or dicts. A list is an array,
                as in tf.data. Datasets of an open h5py file are read from its path as `from_hdf5` does; a file is
                the dict of its datasets. Arrays of cupy are copied to the host.

        Raises:
            DataError: when there is no array, one has no rows dimension, or the numbers of rows differ.
        """
        tensors = map_nest(datasets_in, tensors)
        if any(is_h5py_dataset(leaf) for leaf in leaves(tensors)):
            return cls.from_source(Hdf5Source(*paths_and_names(tensors)))
        tensors = _lists_as_arrays("from_tensor_slices", tensors)
        counts = [_n_rows(array) for array in leaves(tensors)]
        if len(set(counts)) != 1:
            raise DataError(
                f"from_tensor_slices: expected arrays with the same number of rows, got {counts}; check the first "
                "dimension."
            )
        n_rows = counts[0]
        return cls(ArraySource(tensors, n_rows), SampleOrder(n_rows))

    @classmethod
    def range(cls, *bounds: int) -> "Dataset":
        """Return a dataset of whole numbers, int64, from, to and by the same arguments as Python's range."""
        return cls.from_tensor_slices(np.arange(*bounds, dtype=np.int64))

    @classmethod
    def list_files(
        cls,
        file_pattern: str | Sequence[str],
        shuffle: bool | None = None,
        seed: int | None = None,
    ) -> "Dataset":
        """Return a dataset of the names of files, as numpy texts.

        Args:
            file_pattern: pattern such as "part-*.h5", or several patterns; matches are sorted.
            shuffle: whether the names come in random order, a new one in every epoch; default True, as in tf.data.
            seed: seed of the random order; see `shuffle`.

        Raises:
            DataError: when there is no such file; on this rank only.
        """
        names = _matching_files(file_pattern)
        _check(names, "list_files", f"files of the name {file_pattern}", "none")
        dataset = cls.from_tensor_slices(np.array(names))
        if shuffle or shuffle is None:
            return dataset.shuffle(len(names), seed)
        return dataset

    @classmethod
    def from_hdf5(cls, paths: Paths, datasets: Nest) -> "Dataset":
        """Return a dataset whose row i is row i of every named HDF5 dataset, as numpy arrays.

        Only the rows of a batch are read, so files may be larger than memory. Cost: one read per array for rows in
        order; for shuffled rows, one per run of consecutive rows, or per chunk: see `shuffle`. Open files hold a
        shared lock.

        Args:
            paths: path of a file, pattern such as "part-*.h5", or list of files, whose rows are concatenated; or an
                open h5py file, which is read from its path.
            datasets: names of the datasets, such as "images" or ("train/images", "train/labels") or {"x": "images"}.

        Raises:
            DataError: when a file is missing, not HDF5 or locked by a writer; when a dataset is missing, a link, or not
                of numbers; when files or datasets differ in rows, shape or dtype. On this rank only.
        """
        return cls.from_source(Hdf5Source(expand(paths), datasets))

    @classmethod
    def from_source(cls, source: RowSource) -> "Dataset":
        """Return the rows of a source of your own; see `hpcdist.RowSource`.

        Raises:
            DataError: when `source` is not a RowSource.
        """
        _check(
            isinstance(source, RowSource),
            "from_source",
            "an hpcdist.RowSource",
            type(source).__name__,
        )
        return cls(source, SampleOrder(source.n_rows))

    @classmethod
    def from_torch(cls, data: Any) -> "Dataset":
        """Return the rows of a torch dataset, or the batches of a DataLoader, as tensors.

        A DataLoader gives its dataset, batch_size (here the global batch), drop_last, collate_fn and worker processes;
        shuffle=True becomes `shuffle()` with a seed that is drawn as the loader itself would, from its generator or
        torch's, so that it follows torch.manual_seed; when the dataset is distributed, the chief's seed counts.
        An IterableDataset is a stream: see `from_generator` for the cost.

        Raises:
            DataError: for a DataLoader with a sampler or batch_sampler of the program, which
                `experimental_distribute_dataset` takes; for an IterableDataset with workers; for anything but a dataset
                or DataLoader.
        """
        if isinstance(data, torch.utils.data.DataLoader):
            return cls._from_loader(data)
        if isinstance(data, torch.utils.data.IterableDataset):
            return cls(stream_of(data), SampleOrder(UNKNOWN))
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise DataError(
                f"from_torch: expected a torch dataset or DataLoader, got {type(data).__name__}; for other iterables "
                f"use from_generator."
            )
        return cls.from_source(ItemsSource(data))

    @classmethod
    def _from_loader(cls, loader: Any) -> "Dataset":
        check_loader(loader)
        source: RowSource | Stream
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            source = stream_of(loader.dataset)
        else:
            source = ItemsSource(loader.dataset, loader)
        dataset = cls(source, SampleOrder(source.n_rows))
        if isinstance(loader.sampler, torch.utils.data.RandomSampler):
            seed = torch.empty((), dtype=torch.int64).random_(generator=loader.sampler.generator)
            dataset = dataset.shuffle().with_drawn_seed(int(seed))
        if loader.batch_size is None:
            return dataset
        return dataset.batch(loader.batch_size, loader.drop_last)

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        output_signature: Nest = None,
        args: tuple[Any, ...] = (),
    ) -> "Dataset":
        """Return the rows of the iterable that `generator(*args)` returns; it is called for every epoch.

        Every rank draws all rows and keeps its own. Cost of resuming from a checkpoint: the used rows of the epoch are
        drawn and dropped, so the generator must yield the same rows again.

        Args:
            generator: function that returns an iterable of rows: nests of arrays or numbers of equal shapes.
            output_signature: form of a row: a nest of anything with a shape and a dtype; a dimension that varies is
                None. Rows are converted to its dtypes. Needed only where a rank has no row at all.
            args: arguments of the generator.

        Raises:
            DataError: when `generator` cannot be called; at a row that has another form or shape than the signature, or
                a dtype of another kind, such as floats where it has whole numbers.
        """
        _check(
            callable(generator),
            "from_generator",
            "a function that returns an iterable",
            type(generator).__name__,
        )

        def draw(_: int) -> Iterator[Nest]:
            rows: Iterator[Nest] = iter(generator(*args))
            if output_signature is None:
                return rows
            return (fitted(output_signature, row) for row in rows)

        return cls(Stream(draw, output_signature), SampleOrder(UNKNOWN))

    def map(self, function: Function, num_parallel_calls: int | None = None) -> "Dataset":
        """Apply a function to every row; after `batch`, to this replica's part of every batch.

        A tuple is passed as several arguments. Functions after `batch` are called with 0 rows for an empty part.

        Args:
            function: function of a row, or of a nest of (rows, ...) arrays.
            num_parallel_calls: number that is accepted as in tf.data, and not used; `prefetch` runs functions in
                parallel with the training step.
        """
        if self.order.batch_rows is None:
            return replace(self, row_maps=(*self.row_maps, function))
        return replace(self, batch_maps=(*self.batch_maps, function))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> "Dataset":
        """Visit the rows in random order, a new one in every epoch.

        Args:
            buffer_size: number of rows of a stream that are mixed at a time. Where rows can be read in any order all
                are mixed, except rows that are read by chunks, as of compressed HDF5 files: the chunks come in random
                order, and the rows of `buffer_size // chunk_rows` chunks, at least one, are mixed at a time. Each rank
                keeps that number of rows, and reads each chunk once in an epoch; without a buffer_size it may read a
                chunk for each row.
            seed: seed of the order. None draws one, and ranks agree on it when the dataset is distributed.
            reshuffle_each_iteration: whether each epoch has another random order. False gives all epochs the same one.

        After `batch`, `repeat` or `take` of shuffled rows, `buffer_size` elements are mixed at a time, as in tf.data: a
        stream. To mix rows before they are batched costs less, and mixes better.

        Raises:
            DataError: for a buffer_size below 1, or for a stream without one; after another shuffle without a seed.
        """
        if not self._can_be_shuffled:
            elements = self._over(self._stream("shuffle"))
            return elements.shuffle(buffer_size, seed, reshuffle_each_iteration)
        _check(
            buffer_size is None or buffer_size >= 1,
            "shuffle",
            "a buffer_size of at least 1",
            buffer_size,
        )
        _check(
            buffer_size or not self.is_stream,
            "shuffle",
            "a buffer_size for rows that come one by one",
            buffer_size,
        )
        buffered = replace(self, buffer_rows=buffer_size or 0)
        shuffled = buffered._ordered(is_reshuffled=reshuffle_each_iteration)
        if buffer_size:
            shuffled = shuffled._mixed_by_chunks(buffer_size)
        if seed is None:
            return shuffled.with_drawn_seed(program_seed())
        return shuffled.with_seed(seed)

    def _mixed_by_chunks(self, buffer_size: int) -> "Dataset":
        """Return the dataset with rows mixed a few chunks at a time, if its rows are read by chunks."""
        source = self.source
        if isinstance(source, Stream) or source.chunk_rows == 1 or buffer_size >= source.n_rows:
            return self
        mixing = Mixing(source.chunk_rows, buffer_size)
        kept_source = source.keeping(buffer_size)
        return replace(self, source=kept_source)._ordered(mixing=mixing)

    @property
    def _can_be_shuffled(self) -> bool:
        """Whether an order of the source's rows, or of the batches that it gives, is an order of the elements."""
        order = self.order
        if self.batch_maps or not math.isinf(order.epoch_limit):
            return False
        if order.inner_epochs != 1 or order.outer_epochs != 1:
            return False
        if order.batch_rows is None:
            return True
        return self.holds_batches and self._is_unlimited

    def with_seed(self, seed: int) -> "Dataset":
        """Return the dataset with another seed for its order."""
        return self._ordered(seed=seed)

    def with_drawn_seed(self, seed: int) -> "Dataset":
        """Return the dataset with a seed that loading a checkpoint replaces."""
        return replace(self.with_seed(seed), has_drawn_seed=True)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> "Dataset":
        """Group rows into batches; for a distributed dataset, `batch_size` is the global batch.

        Raises:
            DataError: when it is batched already or `batch_size` is below 1.
        """
        _check(self.order.batch_rows is None, "batch", "one call of batch", "a second one")
        _check(batch_size >= 1, "batch", "a batch_size of at least 1", batch_size)
        return self._ordered(batch_rows=batch_size, drop_remainder=drop_remainder)

    def repeat(self, count: int | None = None) -> "Dataset":
        """Visit the dataset `count` times; None or -1: without end. Batches cross epochs when `batch` comes later.

        Raises:
            DataError: for a count of 0 or below -1, or after `take` of a repeated dataset.
        """
        times = float(count or 0)
        if count in (None, -1):
            times = math.inf
        _check(times >= 1, "repeat", "a count of at least 1, or None", count)
        order = self.order
        is_batched = order.batch_rows is not None
        limit = order.run_limit
        if is_batched:
            limit = order.pass_limit
        _check(math.isinf(limit), "repeat", "a call before take", "one after repeat and take")
        if is_batched:
            return self._ordered(outer_epochs=order.outer_epochs * times)
        return self._ordered(inner_epochs=order.inner_epochs * times)

    def take(self, count: int) -> "Dataset":
        """Visit the first `count` rows, or batches once there is a batch size; -1: all.

        Raises:
            DataError: below -1, or for a stream after `batch` and `repeat`.
        """
        _check(count >= -1, "take", "a count of at least 0, or -1", count)
        order = self.order
        is_late = self.is_stream and order.batch_rows is not None and order.outer_epochs > 1
        _check(
            not is_late,
            "take",
            "a call before repeat where rows come one by one",
            "one after batch and repeat",
        )
        if count == -1:
            return self
        if self.holds_batches:
            return self._of_passes("take", lambda elements: itertools.islice(elements, count))
        if isinstance(self.source, Stream) and order.batch_rows is None and order.seed is None:
            if order.inner_epochs == 1:
                return replace(self, source=self.source.limited(count))
        elif order.seed is None and order.batch_rows is None and order.inner_epochs == 1:
            return self._ordered(n_rows=min(order.n_rows, count))
        return replace(self, order=order.taking(count))

    def shard(self, num_shards: int, index: int) -> "Dataset":
        """Keep one of `num_shards` parts of the rows: every n-th row, or by the `AutoShardPolicy` of the options.

        SHARD_HINT for both arguments only marks where AutoShardPolicy.HINT puts the real ones.

        Raises:
            DataError: after shuffle, batch or repeat; for an index out of range; for FILE with fewer files than shards;
                for SHARD_HINT alone, twice, or with rows that come one by one.
        """
        _check(
            self.order == SampleOrder(self.source.n_rows),
            "shard",
            "a call before shuffle, batch, repeat and take",
            "one after them",
        )
        if num_shards == index == SHARD_HINT:
            _check(not self.has_shard_hint, "shard", "one marked shard", "a second one")
            _check(
                not self.is_stream,
                "shard",
                "rows that can be read in any order for SHARD_HINT",
                "a stream",
            )
            return replace(self, has_shard_hint=True)
        _check(0 <= index < num_shards, "shard", f"an index from 0 to {num_shards - 1}", index)
        policy = self.policy
        if policy is AutoShardPolicy.AUTO:
            policy = AutoShardPolicy.DATA
            has_files = isinstance(self.source, RowSource) and len(self.source.rows_of_files) > 0
            if has_files and self.options is not None:
                policy = AutoShardPolicy.FILE
        if policy is AutoShardPolicy.OFF:
            return self
        if isinstance(self.source, Stream) and policy is not AutoShardPolicy.FILE:
            return replace(self, source=self.source.shard(num_shards, index))
        shard = self._shard_of(policy, num_shards, index)
        assert not isinstance(self.source, Stream), "streams have no files"
        source = ShardSource(self.source, shard)
        return replace(self, source=source, order=SampleOrder(shard.n_rows))

    @property
    def policy(self) -> AutoShardPolicy:
        """How the dataset is divided among input pipelines."""
        if self.options:
            return self.options.experimental_distribute.auto_shard_policy
        return AutoShardPolicy.AUTO

    def check_hint(self, is_placed: bool = True) -> None:
        """Raise DataError for a marked shard that nothing replaces, and for HINT without a marked shard.

        Args:
            is_placed: whether the dataset is used where HINT is obeyed.
        """
        is_hint = is_placed and self.policy is AutoShardPolicy.HINT
        if is_hint == self.has_shard_hint:
            return
        actual = "the shard"
        advice = "use both, or pass the numbers to shard"
        if is_hint:
            actual = "the policy"
            advice = "mark the shard, or use another policy"
        raise DataError(
            f"shard: expected shard(SHARD_HINT, SHARD_HINT) in a dataset with AutoShardPolicy.HINT that is given to "
            f"experimental_distribute_dataset, got {actual} alone; {advice}."
        )

    def shard_of(self, num_shards: int, index: int) -> Shard:
        """Return which rows belong to one shard: every n-th file with AutoShardPolicy.FILE, else every n-th row.

        Raises:
            DataError: when there are fewer files than shards.
        """
        return self._shard_of(self.policy, num_shards, index)

    def _shard_of(self, policy: AutoShardPolicy, num_shards: int, index: int) -> Shard:
        if policy is not AutoShardPolicy.FILE:
            return EveryNth(self.source.n_rows, num_shards, index)
        rows_of_files: tuple[int, ...] = ()
        if not isinstance(self.source, Stream):
            rows_of_files = self.source.rows_of_files
        if len(rows_of_files) < num_shards:
            raise DataError(
                f"shard: expected at least {num_shards} files, one per input pipeline, got {len(rows_of_files)}; use "
                f"more files or AutoShardPolicy.DATA."
            )
        return EveryNthFile(rows_of_files, num_shards, index)

    def cache(self, filename: str | os.PathLike[str] = "", key: str = "") -> "Dataset":
        """Keep rows after they were read and mapped for the first time.

        A `shuffle` after it gives a new order in every epoch; one before it gives one order for all epochs, as in
        tf.data.

        Every process keeps the rows that it has read. With a filename they are kept in files, FILENAME.*.rows, which
        other processes and later ones read too. Each process writes its own files, at the end of a pass and as soon
        as it has all rows; no file is ever seen half written. Rows that are in no file are read anew, and so are the
        rows of a file that was cut.

        A file records the description of its source and the key; files of that name with another description or key are
        refused. The description is the kind of the source and its number of rows, the shapes and dtypes of arrays, and
        the absolute path, size and time of change of HDF5 files. **These changes are not noticed: a changed function of
        `map`, a changed generator or its arguments, changed values of arrays, and changed data that a torch dataset or
        a source of your own reads, unless it overrides `describe`. Change the key or the filename then, or remove the
        files.**
        A process that is killed while it writes may leave a hidden file behind, which the next process removes.

        Args:
            filename: beginning of the names of the files. By default, rows are kept in the memory of this process.
            key: text of your choice, such as a version of the mapped functions.

        Raises:
            DataError: after a `map` that follows `batch`; when there can be no file, or files have another description
                or key; later, for rows that no file can hold and rows of a damaged file. On this rank only.
        """
        _check(
            not self.batch_maps,
            "cache",
            "a call before the maps of whole batches",
            "one after them",
        )
        name = os.fspath(filename)
        if name:
            name = os.path.join(os.getcwd(), name)  # the program may change its folder
        dataset = self
        if self.order.seed is not None:
            dataset = self._ordered(is_reshuffled=False)
        source: RowSource | Stream
        if isinstance(self.source, Stream):
            stream = self.source.mapped(self.row_maps)
            source = cached_stream(stream, _make_store(name, stream, key))
        else:
            rows = mapped(self.source, self.row_maps)
            source = CachedSource(rows, _make_store(name, rows, key))
        return replace(dataset, source=source, row_maps=())

    def prefetch(self, buffer_size: int = -1) -> "Dataset":
        """Read and map up to `buffer_size` batches ahead in a thread; -1: two. The cursor counts yielded batches only.

        Tensors are copied to pinned memory if torch uses a GPU already, so that copies to the GPU are asynchronous.

        Raises:
            DataError: below -1.
        """
        _check(buffer_size >= -1, "prefetch", "a buffer_size of at least 0, or -1", buffer_size)
        n_batches = buffer_size
        if buffer_size == -1:
            n_batches = 2
        return replace(self, prefetch_batches=n_batches)

    def with_options(self, options: Options) -> "Dataset":
        """Return the dataset with options; see `AutoShardPolicy`."""
        return replace(self, options=options)

    @property
    def element_spec(self) -> Nest:
        """The nest of an element with a TensorSpec of shape and dtype for every array.

        Cost: the first row is read, or drawn from a new iterator, and mapped.
        """
        part = self.part_without_rows()
        if self.order.batch_rows is None:
            return map_nest(_row_spec, part)
        n_rows: int | None = None
        if self.order.drop_remainder:
            n_rows = self.order.batch_rows
        return spec_of(part, n_rows)

    def __iter__(self) -> Generator[Nest, None, None]:
        """Yield the batches (or single rows) of one pass on this process alone; the next pass has other epochs."""
        self.check_hint(is_placed=False)
        yield from self.elements(next(self._passes))

    def _ordered(self, **changes: Any) -> "Dataset":
        return replace(self, order=replace(self.order, **changes))


def _check(is_right: object, operation: str, expected: str, actual: object) -> None:
    if not is_right:
        raise DataError(f"{operation}: expected {expected}, got {actual}; {_CORRECT}.")


def _row_spec(array: Any) -> TensorSpec:
    """Return the specification of a row of an array."""
    shape = tuple(array.shape[1:])
    return TensorSpec(shape, array.dtype)


def _matching_files(file_pattern: str | Sequence[str]) -> list[str]:
    """Return the names of the files that match a pattern, or one of several patterns, each once and sorted."""
    patterns: list[Any] = [file_pattern]
    if not isinstance(file_pattern, (str, os.PathLike)):
        patterns = list(file_pattern)
    names: set[str] = set()
    for pattern in patterns:
        names.update(glob.glob(os.fspath(pattern)))
    return sorted(names)


def _make_store(name: str, source: RowSource | Stream, key: str) -> FileStore | MemoryStore:
    """Return a store for rows in files whose names begin with `name`, or in memory if there is no name."""
    if name:
        return FileStore(name, source.describe(), key)
    return MemoryStore()


def _n_rows(array: Any) -> int:
    """Return the number of rows of an array; raise DataError if it has no dimension."""
    shape = getattr(array, "shape", None)
    if not shape:
        raise DataError(
            f"from_tensor_slices: expected arrays with at least one dimension, got {type(array).__name__}; "
            f"pass torch tensors or numpy arrays."
        )
    return int(shape[0])


def _lists_as_arrays(call: str, nest: Nest) -> Nest:
    """Return the nest with an array in place of every list, as in tf.data; arrays of cupy come to the host."""
    if not is_nest(nest):
        return _on_host(nest)
    if not isinstance(nest, list):
        children = [_lists_as_arrays(call, child) for child in children_of(nest)]
        return with_children(nest, children)
    try:
        array = _array_of(nest)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{call}: expected lists that are arrays, got one that numpy does not take ({error}); use a tuple for "
            f"several arrays, from_generator for rows of different shapes."
        ) from error
    _check(array.dtype != object, call, "lists of numbers or texts", "one of other objects")
    return array


def _on_host(value: Any) -> Any:
    """Return an array of cupy as an array of numpy; anything else as it is."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "__cuda_array_interface__"):
        return value
    return value.get()


def _array_of(elements: list[Any]) -> Any:
    """Return a list as a tensor if it holds one, else as a numpy array."""
    if any(isinstance(element, torch.Tensor) for element in elements):
        return torch.stack([torch.as_tensor(element) for element in elements])
    return np.array(elements)
