"""The batches that a sampler of the program draws: the same on all ranks, and the same after a restart.

The numbers that a sampler draws at random are seeded anew for each pass, by the seed of the loader and the number of
the pass. While nothing is drawn from a sampler its random state is put away, so that it and the program do not disturb
each other.
"""

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, Sampler

from hpcdist.data.row_numbers import (
    GENERATORS,
    RandomState,
    seed_generator,
    seed_random_numbers,
)

#: Batches that are drawn at a time: a sampler may have no end.
_CHUNK_BATCHES = 4096
#: A longer list of a sampler holds keys of items, not samplers.
_MAX_SAMPLERS = 64


class SamplerOrder:
    """The batches of one pass, in their order.

    Args:
        loader: DataLoader whose batch_sampler yields lists of keys of items.
        seed: seed of the loader, equal on all ranks.
        n_passes: number of passes before this one.

    Attributes:
        n_passes: number of passes before this one.
        batches: keys of the items of each batch that was drawn so far.
        digests: digest of all keys up to the end of each batch.
        is_whole: whether the sampler has no more batches.
    """

    def __init__(self, loader: "DataLoader[Any]", seed: int, n_passes: int) -> None:
        self.batches: list[list[Any]] = []
        self.digests: list[int] = []
        self.is_whole = False
        self._digest = xxhash.xxh3_64()
        self._batch_sampler: Any = loader.batch_sampler
        seed_text = f"{seed} {n_passes}"
        self._seed = xxhash.xxh3_64_intdigest(seed_text.encode()) >> 1
        self.n_passes = n_passes
        self._iterator: Iterator[Any] | None = None
        self._random_state: RandomState | None = None

    def draw(self, n_batches: int) -> None:
        """Draw until there are at least `n_batches` batches, or the sampler has no more. Not collective."""
        if self.is_whole or len(self.batches) >= n_batches:
            return
        n_batches = -(-n_batches // _CHUNK_BATCHES) * _CHUNK_BATCHES
        program_state = RandomState()
        try:
            iterator = self._begin_or_go_on()
            while len(self.batches) < n_batches and not self.is_whole:
                self._draw_batch(iterator)
        except BaseException:
            self._forget_draws()  # a generator that has raised would seem to be at its end
            raise
        finally:
            self._random_state = RandomState()
            program_state.restore()

    def _begin_or_go_on(self) -> Iterator[Any]:
        """Return the iterator over the batches, with its random numbers set as it has left them."""
        if self._iterator is not None and self._random_state is not None:
            self._random_state.restore()
            return self._iterator
        seed_random_numbers(self._seed)
        samplers = samplers_of(self._batch_sampler)
        _seed_generators(samplers, self._seed)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.n_passes)
        self._iterator = iter(self._batch_sampler)
        return self._iterator

    def _forget_draws(self) -> None:
        """Begin the pass anew at the next draw."""
        self._iterator = None
        self._digest.reset()
        self.batches.clear()
        self.digests.clear()

    def _draw_batch(self, iterator: Iterator[Any]) -> None:
        keys = next(iterator, None)
        if keys is None:
            self.is_whole = True
            return
        batch = list(keys)
        self._digest.update(f"{batch};".encode())
        self.batches.append(batch)
        self.digests.append(self._digest.intdigest() >> 1)

    def digest_of(self, n_batches: int) -> int:
        """Return the digest of the first batches; 0 for none."""
        if not n_batches:
            return 0
        return self.digests[n_batches - 1]


def samplers_of(batch_sampler: Any) -> list[Any]:
    """Return a batch sampler and the samplers that it holds, such as its `sampler`, each once.

    Samplers are found among attributes, and in short lists, tuples and dicts among them.
    """
    samplers = [batch_sampler]
    seen_ids = {id(batch_sampler)}
    for sampler in samplers:
        for value in _held_by(sampler):
            if isinstance(value, Sampler) and id(value) not in seen_ids:
                seen_ids.add(id(value))
                samplers.append(value)
    return samplers


def _held_by(sampler: Any) -> list[Any]:
    """Return the attributes of a sampler, and what short lists, tuples and dicts among them hold."""
    held: list[Any] = []
    for value in _attributes_of(sampler).values():
        held.append(value)
        if isinstance(value, dict) and len(value) <= _MAX_SAMPLERS:
            held += value.values()
        elif isinstance(value, (list, tuple)) and len(value) <= _MAX_SAMPLERS:
            held += value
    return held


def _attributes_of(sampler: Any) -> dict[str, Any]:
    """Return the attributes of a sampler; none of a list of batches."""
    return getattr(sampler, "__dict__", {})


def _seed_generators(samplers: list[Any], seed: int) -> None:
    """Seed the generators that samplers hold: each gets another seed, the same in every process."""
    seen_ids: set[int] = set()
    for sampler in samplers:
        for value in _held_by(sampler):
            if isinstance(value, GENERATORS) and id(value) not in seen_ids:
                seen_ids.add(id(value))
                # not `seed` itself, which is the seed of the process's own generators
                seed_generator(value, seed + len(seen_ids))


def drawn_seed(loader: "DataLoader[Any]") -> int:
    """Return a seed for the passes of a loader, drawn from its sampler's generator, else the loader's, else torch's."""
    generator = _first_generator(samplers_of(loader.batch_sampler))
    if generator is None:
        generator = loader.generator
    seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(seed)


def _first_generator(samplers: list[Any]) -> torch.Generator | None:
    """Return the first generator of torch that one of the samplers holds; None if there is none."""
    for sampler in samplers:
        for value in _held_by(sampler):
            if isinstance(value, torch.Generator):
                return value
    return None
