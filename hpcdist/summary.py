"""The path hpcdist.summary, as `tf.summary`: numbers of a custom loop for TensorBoard, each step once.

>>> writer = hpcdist.summary.create_file_writer("runs/loop/tensorboard")
>>> with writer.as_default():
...     hpcdist.summary.scalar("loss", loss, step=step)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.runtime.process import make_world
from hpcdist.strategy.replica_context import get_replica_context
from hpcdist.strategy.values import DistributedValues
from hpcdist.tf_compat.variables import as_tensor
from hpcdist.training.event_file import EventWriter, open_writer

#: The writer and the step of the `as_default` blocks that are entered, the innermost last.
_entered: ContextVar[tuple[tuple["FileWriter", int | None], ...]] = ContextVar(
    "entered", default=()
)


class FileWriter:
    """Writes event files, on the chief alone, and on an evaluator. `create_file_writer` makes one.

    Args:
        logdir: folder of the event files.
    """

    def __init__(self, logdir: Any) -> None:
        self._folder = Path(logdir).absolute()  # the program may change its folder
        self._writer: EventWriter | None = None

    @contextmanager
    def as_default(self, step: int | None = None) -> Iterator["FileWriter"]:
        """Let `scalar` write here in the block; for `step`, where a call has no step."""
        token = _entered.set((*_entered.get(), (self, step)))
        try:
            yield self
        finally:
            _entered.reset(token)

    def write(self, name: str, value: Any, step: int) -> None:
        """Write a number. See `scalar`."""
        tensor = as_tensor(value)
        if tensor.numel() != 1:
            raise UsageError(
                f"scalar: expected one number for {name!r}, got shape {tuple(tensor.shape)}; reduce it."
            )
        world = make_world()  # not before: a strategy that is made meanwhile may bring roles
        if world.is_chief or world.task.type == "evaluator":
            self._writer = self._writer or open_writer(self._folder, step)
            assert self._writer is not None, "it is needed"
            self._writer.add_scalar(name, float(tensor), step)
            # else a restart, which purges later steps, would find earlier ones missing
            self._writer.flush()

    def flush(self) -> None:
        """Do nothing: each number is in the file when `scalar` returns."""

    def close(self) -> None:
        """Close the file; later numbers start a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def create_file_writer(logdir: Any) -> FileWriter:
    """Return a writer of event files. Every rank makes one: the chief writes, and an evaluator.

    The first number that it writes purges older numbers of its step and later ones: where a run resumes from a
    checkpoint, a reader sees each step once.

    Args:
        logdir: folder of the event files.
    """
    return FileWriter(logdir)


def scalar(name: str, data: Any, step: int | None = None) -> bool:
    """Write a number for TensorBoard; return whether there is a writer. Not collective: call it on all ranks.

    Inside `strategy.run` the number of the first replica is written.

    Args:
        name: name of the curve.
        data: a number, or a tensor or variable with one element.
        step: step of the number. Default: step of `as_default`.

    Raises:
        UsageError: without a step; for more than one number, or for values of several replicas.
        ConfigurationError: without the package tensorboard, on the chief.

    A folder that cannot be written is logged and tried again later.

    Cost: about 0.1 ms on the chief; a tensor on a GPU is waited for.
    """
    if not _entered.get():
        return False
    writer, default_step = _entered.get()[-1]
    if step is None:
        step = default_step
    if step is None:
        raise UsageError(
            f"scalar: expected a step for {name!r}, got none; write scalar(name, value, step=step)."
        )
    if isinstance(data, DistributedValues):
        raise UsageError(
            f"scalar: expected one number for {name!r}, got one for each replica; use strategy.reduce."
        )
    replica = get_replica_context()
    if replica is None or replica.replica_id_in_sync_group == 0:
        writer.write(name, data, int(step))
    return True
