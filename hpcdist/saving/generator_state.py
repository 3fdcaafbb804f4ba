"""Generators of random numbers that the program's loop draws from, as part of a Checkpoint."""

import json
import random
from typing import Any

import numpy as np

from hpcdist.collectives.objects import all_gather_objects
from hpcdist.runtime.process import make_world


def is_generator(item: Any) -> bool:
    """Return whether an object is a generator of numpy, Python or torch; this layer does not import torch."""
    if isinstance(item, (np.random.Generator, np.random.RandomState, random.Random)):
        return True
    names = ("get_state", "set_state", "initial_seed")
    return all(hasattr(item, name) for name in names)


class GeneratorState:
    """The states of a generator: one for each rank, or a single one if all ranks have the same.

    Args:
        generator: a generator of numpy, Python or torch.

    Attributes:
        generator: the generator.
        checkpoint_kind: name of the generator's class.
    """

    #: All ranks must call `state_dict` together; `CheckpointManager.save` lets them.
    is_state_collective = True

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.checkpoint_kind = type(generator).__name__

    def local_state(self) -> str:
        """Return the state of this rank's generator. Not collective."""
        return _text_of(self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, or a single one if all are equal. Collective over the ranks of the role."""
        comm = make_world().role_comm
        states = [self.local_state()]
        if comm.size > 1:
            states = all_gather_objects(states[0], comm)
        if len(set(states)) == 1:
            states = states[:1]
        return {"states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this rank's state; a rank that did not take part in the save keeps its own. Not collective."""
        states = state["states"]
        rank = 0
        if len(states) > 1:
            rank = make_world().role_comm.rank
        if rank < len(states):
            _set_state(self.generator, states[rank])


def _text_of(generator: Any) -> str:
    state: Any
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    else:
        content: bytes = generator.get_state().numpy().tobytes()
        return content.hex()
    return json.dumps(state, default=np.ndarray.tolist)


def _set_state(generator: Any, text: str) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = json.loads(text)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(text))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = json.loads(text)
        generator.setstate((version, tuple(numbers), gauss))
    else:
        state = generator.get_state()
        content = bytes.fromhex(text)
        state.numpy()[:] = np.frombuffer(content, np.uint8)
        generator.set_state(state)
