"""Batches of a strategy's replicas: all rows for a single replica, or for each rank its part of every global batch."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hpcdist.collectives.objects import all_gather_objects
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset, as_dataset, check_distributable
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.distributed_loader import DistributedLoader, has_own_sampler
from hpcdist.data.distributed_stream import DistributedStream, has_stream_in_workers
from hpcdist.data.from_function import (
    DatasetFunction,
    DistributedFromFunction,
    contexts_of,
    datasets_of,
    sharded_dataset,
)
from hpcdist.data.iterator import Delivery
from hpcdist.data.options import AutoShardPolicy, InputContext, InputOptions
from hpcdist.data.row_numbers import program_seed
from hpcdist.data.same_rows import RANDOM, are_random, describe_rows
from hpcdist.data.sampler_order import drawn_seed
from hpcdist.data.sources import RowSource
from hpcdist.data.stream_worker import Shares
from hpcdist.data.torch_source import ItemsSource, describe_sampler
from hpcdist.errors import DataError, UsageError, agreed
from hpcdist.gradients.engine import GradientEngine
from hpcdist.program.loop_watch import watch_loop
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.step_flags import single_rank_flags
from hpcdist.runtime.world import World
from hpcdist.strategy.replicas import Replicas
from hpcdist.strategy.values import regroup

#: Owner number of parts whose gradients nobody weighs.
_NOBODY = 0
#: Number of leaves of a row for which ranks compare whether they are random; one bit of an int64 each.
_MAX_LEAVES = 62


class Inputs(Protocol):
    """Makes the batches of a strategy's replicas; arguments and errors are as in `Strategy`."""

    def distribute(
        self,
        dataset: Any,
        options: InputOptions | None,
        is_sharded: bool,
    ) -> DistributedInput | Dataset:
        """Return this process's parts of a dataset whose batches are global batches."""

    def distribute_function(
        self,
        dataset_fn: DatasetFunction,
        options: InputOptions | None,
    ) -> DistributedFromFunction:
        """Return the batches of the dataset that a function makes for this input pipeline."""


class OneInput:
    """`Inputs` of a single replica, which reads all rows.

    Args:
        device: device where batches arrive. None for the host.
        takes_unbatched: whether a dataset without a batch size is returned as it is.
    """

    def __init__(self, device: torch.device | None = None, takes_unbatched: bool = False) -> None:
        self._device = device
        self._takes_unbatched = takes_unbatched

    def distribute(
        self,
        dataset: Any,
        options: InputOptions | None,
        is_sharded: bool,
    ) -> DistributedInput | Dataset:
        """Return the batches of a dataset."""
        if has_own_sampler(dataset):
            return self._distribute_loader(dataset, options)
        if has_stream_in_workers(dataset):
            return self._distribute_stream(dataset, options, is_sharded)
        dataset = as_dataset(dataset)
        if (
            self._takes_unbatched
            and isinstance(dataset, Dataset)
            and dataset.order.batch_rows is None
        ):
            return dataset
        return DistributedDataset(dataset, range(1), 1, self._delivery(), options)

    def _distribute_loader(self, loader: Any, options: InputOptions | None) -> DistributedLoader:
        """Return the batches of a DataLoader that has a sampler."""
        distributed = DistributedLoader(
            loader,
            drawn_seed(loader),
            range(1),
            1,
            lambda order, refusal: None,
            self._delivery(),
            options,
        )
        distributed.check_order()
        return distributed

    def _distribute_stream(
        self,
        loader: Any,
        options: InputOptions | None,
        is_sharded: bool,
    ) -> DistributedStream:
        """Return the parts of a stream, all of which the workers of this process draw."""
        shares = Shares(0, 1, loader.num_workers, is_sharded)
        distributed = DistributedStream(
            loader, shares, range(1), 1, lambda value: [value], self._delivery(), options
        )
        distributed.set_seed(drawn_seed(loader))
        return distributed

    def distribute_function(
        self,
        dataset_fn: DatasetFunction,
        options: InputOptions | None,
    ) -> DistributedFromFunction:
        """Return the batches of the dataset that a function makes."""
        datasets = datasets_of(dataset_fn, [InputContext()])
        return DistributedFromFunction(datasets, range(1), 1, self._delivery(), options)

    def _delivery(self) -> Delivery:
        """Return the calls and flags that a new distributed dataset is connected to."""
        watch = watch_loop(single_rank_flags)
        return Delivery(single_rank_flags, _NOBODY, on_part=watch.hand_out, device=self._device)


class RankInputs:
    """`Inputs` of replicas on several ranks: each rank reads its part of every global batch.

    Args:
        world: world of the job; the ranks of this rank's role take part.
        replicas: replicas of this rank, and their number on all ranks.
        engine: weighs gradients by the rows of the parts.
        device: device where batches arrive. None for the host.
    """

    def __init__(
        self,
        world: World,
        replicas: Replicas,
        engine: GradientEngine,
        device: torch.device | None,
    ) -> None:
        self._world = world
        self._comm = world.role_comm
        self._replicas = replicas
        self._engine = engine
        self._device = device

    def distribute(
        self,
        dataset: Any,
        options: InputOptions | None,
        is_sharded: bool,
    ) -> DistributedInput:
        """Return this rank's parts of a dataset. Collective over the ranks of the role."""
        self._world.agree(None, self._comm, "experimental_distribute_dataset")
        if is_sharded and has_own_sampler(dataset):
            raise UsageError(
                f"experimental_distribute_dataset: expected a stream for is_sharded=True, got a DataLoader with "
                f"{describe_sampler(dataset)}; leave the sampler out, or train on the loader itself with "
                f"hpcdist.DistributedSampler."
            )
        if has_stream_in_workers(dataset):
            return self._distribute_stream(dataset, options, is_sharded)
        if is_sharded:
            n_replicas = self._replicas.n_replicas
            return self.distribute_function(
                lambda context: sharded_dataset(as_dataset(dataset), n_replicas), options
            )
        if has_own_sampler(dataset):
            return self._distribute_loader(dataset, options)
        with self._world.agreed(self._comm):
            dataset = as_dataset(dataset)
            check_distributable(dataset, self._replicas.n_replicas)
        seeds = f"{dataset.order.seed} {program_seed()}"
        chiefs_seed, random_seed = self._world.broadcast_text(seeds, 0, self._comm).split()
        if dataset.has_drawn_seed and chiefs_seed != "None":
            dataset = dataset.with_drawn_seed(int(chiefs_seed))
        seed_kind = "drawn" if dataset.has_drawn_seed else "given"
        description = f"{dataset.order} with a {seed_kind} seed and {dataset.policy}"
        self._world.require_same(
            description,
            self._comm,
            lambda chiefs: DataError(
                f"experimental_distribute_dataset: expected the dataset of the chief, {chiefs}, got {description}; "
                f"give every rank the same rows, batch and seed."
            ),
        )
        # with OFF each rank may have another shard
        if isinstance(dataset.source, RowSource) and dataset.policy is not AutoShardPolicy.OFF:
            self._require_same_rows(dataset.source)
        delivery = self._delivery()
        return DistributedDataset(
            dataset,
            self._replicas.local,
            self._replicas.n_replicas,
            delivery,
            options,
            random_seed=int(random_seed),
        )

    def _distribute_loader(self, loader: Any, options: InputOptions | None) -> DistributedLoader:
        """Return this rank's parts of a DataLoader that has a sampler. Collective over the ranks of the role."""
        seed = int(self._world.broadcast_text(str(drawn_seed(loader)), 0, self._comm))
        with self._world.agreed(self._comm):
            distributed = DistributedLoader(
                loader,
                seed,
                self._replicas.local,
                self._replicas.n_replicas,
                lambda order, refusal: self._world.require_same(order, self._comm, refusal),
                self._delivery(),
                options,
            )
        distributed.check_order()
        if hasattr(loader.dataset, "__len__"):
            self._require_same_rows(ItemsSource(loader.dataset, loader))
        return distributed

    def _distribute_stream(
        self,
        loader: Any,
        options: InputOptions | None,
        is_sharded: bool,
    ) -> DistributedStream:
        """Return this rank's share of a stream that workers draw. Collective over the ranks of the role."""
        settings = f"{loader.num_workers} workers, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        self._world.require_same(
            settings,
            self._comm,
            lambda chiefs: DataError(
                f"experimental_distribute_dataset: expected the loader of the chief, {chiefs}, got {settings}; make "
                f"the same one on every rank."
            ),
        )
        shares = Shares(self._comm.rank, self._comm.size, loader.num_workers, is_sharded)
        seed = int(self._world.broadcast_text(str(drawn_seed(loader)), 0, self._comm))
        with self._world.agreed(self._comm):
            distributed = DistributedStream(
                loader,
                shares,
                self._replicas.local,
                self._replicas.n_replicas,
                self._gather,
                self._delivery(),
                options,
            )
        distributed.set_seed(seed)
        return distributed

    def _gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks. Collective over the ranks of the role."""
        return all_gather_objects(value, self._comm)

    def _require_same_rows(self, source: RowSource) -> None:
        """Raise DataError on all ranks unless a sample of the rows is the same on all ranks, or random on one of them.

        Collective over the ranks of the role.
        """
        if self._comm.size == 1:
            return
        rows = describe_rows(source)
        if self._world.all_equal(rows, self._comm):
            return
        # a random transform may have done nothing twice
        is_random = RANDOM in rows or are_random(source)
        if self._world.all_reduce_int(int(is_random), MPI.MAX, self._comm):
            rows = f"{source.n_rows} rows"
        self._world.require_same(
            rows,
            self._comm,
            lambda chiefs: DataError(
                f"experimental_distribute_dataset: expected the same rows on every rank, as each reads a part of every "
                f"batch: {chiefs} on the chief, got {rows}; draw them by a seeded generator, as by torch.randn(..., "
                f"generator=torch.Generator().manual_seed(1)) and random_split(..., generator=...), or use "
                f"distribute_datasets_from_function."
            ),
        )

    def distribute_function(
        self,
        dataset_fn: DatasetFunction,
        options: InputOptions | None,
    ) -> DistributedFromFunction:
        """Return batches of the dataset that the function makes here. Collective over the ranks of the role."""
        self._world.agree(None, self._comm, "distribute_datasets_from_function")
        local = self._replicas.local
        n_replicas = self._replicas.n_replicas
        comm = self._comm
        with self._world.agreed(comm):
            datasets = datasets_of(
                dataset_fn, contexts_of(options, local, (comm.rank, comm.size), n_replicas)
            )
        seed = int(self._world.broadcast_text(str(program_seed() >> 1), 0, comm))
        distributed = DistributedFromFunction(
            datasets, local, n_replicas, self._delivery(), options
        )
        distributed.set_seed(seed)
        ending = f"drop_remainder={distributed.ends_with_first}"
        self._world.require_same(
            ending,
            comm,
            lambda chiefs: DataError(
                f"distribute_datasets_from_function: expected {chiefs} in batch, as on the chief, got {ending}; make "
                f"batches alike on every rank."
            ),
        )
        return distributed

    def _delivery(self) -> Delivery:
        """Return the calls and flags that a new distributed dataset is connected to."""
        flags = self._world.step_flags
        as_per_replica = functools.partial(regroup, has_no_plain=True)
        return Delivery(
            flags=flags,
            owner=self._engine.sums.number,
            on_batch=self._note_batch,
            on_part=watch_loop(flags).hand_out,
            wrap=as_per_replica if self._replicas.is_fixed else None,
            device=self._device,
            agree_rows=self._agree_rows,
            agree_first_rows=self._agree_first_rows,
            agree_end=self._agree_end,
        )

    def _note_batch(self, rows: list[int] | None) -> None:
        """Note that a step on a batch is expected, or, with None, that no step is expected any more."""
        self._engine.steps.note_batch(is_over=rows is None)

    def _agree_end(self, is_out: bool, ends_with_first: bool) -> bool:
        """Return whether all ranks have run out of data; with `ends_with_first`, whether any rank has.

        Collective over the ranks of the role; bounded.
        """
        op = MPI.MAX if ends_with_first else MPI.MIN
        return self._world.all_reduce_int(int(is_out), op, self._comm) == 1

    def _agree_rows(self, n_rows: int) -> None:
        """Raise on all ranks unless their streams gave batches of the same length.

        Collective over the ranks of the role; bounded.
        """
        least = self._world.all_reduce_int(n_rows, MPI.MIN, self._comm)
        most = self._world.all_reduce_int(n_rows, MPI.MAX, self._comm)
        if least != most:
            raise agreed(
                DataError(
                    f"experimental_distribute_dataset: expected the same rows on every rank, got global batches of "
                    f"{least} to {most} rows at one step; let generators yield the same everywhere, or use "
                    f"distribute_datasets_from_function."
                )
            )

    def _agree_first_rows(self, digest: int, describe: Callable[[], list[int | None]]) -> bool:
        """Raise on all ranks unless their streams begin with the same rows, as far as these are not random.

        Collective over the ranks of the role; bounded.

        Args:
            digest: digest of all leaves of the first rows of this rank.
            describe: returns a digest of each leaf, and None for a leaf that is random.

        Returns:
            Whether `describe` was called.
        """
        if self._world.all_equal(str(digest), self._comm):
            return False
        leaf_digests = describe()
        random_leaves = 0
        for number, leaf_digest in enumerate(leaf_digests):
            is_random = leaf_digest is None
            random_leaves |= is_random << number % _MAX_LEAVES
        random_leaves = self._world.all_reduce_int(random_leaves, MPI.BOR, self._comm)
        same_rows: list[int | None] = []
        for number, leaf_digest in enumerate(leaf_digests):
            is_random_anywhere = random_leaves >> number % _MAX_LEAVES & 1
            same_rows.append(None if is_random_anywhere else leaf_digest)
        are_same = self._world.all_equal(str(same_rows), self._comm)
        if are_same and any(leaf is not None for leaf in same_rows):
            return True
        raise agreed(
            DataError(
                "experimental_distribute_dataset: expected streams that yield the same rows on every rank, as each "
                "keeps its part of every batch, got others at the beginning of a pass; pass is_sharded=True if the "
                "dataset itself gives each rank other rows, or draw random numbers from seeded generators."
            )
        )
