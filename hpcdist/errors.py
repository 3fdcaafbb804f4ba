"""Exceptions and exit codes: what can go wrong, and what the batch script sees.

HpcdistError                70  an internal fault, and the base of all below
├── UsageError               2  a call or command that makes no sense
├── ConfigurationError      78  roles, TF_CONFIG, launcher or options that do not add up
├── DataError               78  data of the wrong kind, shape or size
│   └── WorkerDied           1  a process of a DataLoader died or hung; another attempt may pass
├── GradientError            2  gradients that would differ between ranks
│   └── NotFiniteError      70  gradients that are not finite
├── DesyncError             76  ranks that no longer run the same program; do not requeue
├── NoProgressError         76  attempts of a job made no progress; do not requeue
├── CollectiveError          2  a collective called with what it cannot carry
│   └── CollectiveFailed    70  a collective that failed on the way: a peer, a network, memory
├── CollectiveTimeoutError  70  a rank did not arrive in time
│   └── PSUnavailable       70  a parameter server does not answer
├── ClosureInputError       70  a resource that a closure needs cannot be built on its worker
├── ClosureCancelledError   70  a closure was not run, as another one failed
├── ClosureTimeoutError     70  a closure ran longer than closure_timeout_s
└── CheckpointError         74  a checkpoint cannot be written or read
    ├── CheckpointDamaged   74  the file is not what was committed
    │   └── CheckpointMissing 74  the file is not there
    ├── CheckpointMismatch  78  the file is of another model, other objects or a newer format
    └── AttemptReplaced     76  a later attempt of the job writes now; do not requeue
"""

import contextlib
import enum
import sys


class ExitCode(enum.IntEnum):
    """Process exit codes. Stable: batch scripts rely on them. A rank killed by signal n leaves with 128 + n."""

    DONE = 0
    UNCAUGHT = 1
    USAGE = 2
    INTERNAL = 70
    CHECKPOINT_IO = 74
    RUN_AGAIN = 75
    DO_NOT_REQUEUE = 76
    BAD_CONFIGURATION = 78


class HpcdistError(Exception):
    """Base of every error raised by hpcdist.

    Attributes:
        exit_code: code that the process leaves with when nobody catches the error.
        is_agreed: whether every rank raises this same error, so that no rank needs to abort the job.
        is_reporter: whether this rank prints the error. None if rank 0 does.
    """

    exit_code = ExitCode.INTERNAL
    is_agreed = False
    is_reporter: bool | None = None


class UsageError(HpcdistError, ValueError):
    """A call or command that makes no sense."""

    exit_code = ExitCode.USAGE


class ConfigurationError(HpcdistError, ValueError):
    """Roles, TF_CONFIG, launcher or options that do not add up."""

    exit_code = ExitCode.BAD_CONFIGURATION


class DataError(HpcdistError, ValueError):
    """Data of the wrong kind, shape or size."""

    exit_code = ExitCode.BAD_CONFIGURATION


class WorkerDied(DataError):
    """A process of a DataLoader died, as when memory is short, or hung. Another attempt may pass."""

    exit_code = ExitCode.UNCAUGHT


class GradientError(HpcdistError, RuntimeError):
    """Gradients that would differ between ranks."""

    exit_code = ExitCode.USAGE


class NotFiniteError(GradientError):
    """Gradients that are not finite: the data, the rate or a node may be the reason."""

    exit_code = ExitCode.INTERNAL


class DesyncError(HpcdistError, RuntimeError):
    """Ranks that no longer run the same program."""

    exit_code = ExitCode.DO_NOT_REQUEUE


class NoProgressError(HpcdistError, RuntimeError):
    """Several attempts of a job in a row made no progress: another one would make none either."""

    exit_code = ExitCode.DO_NOT_REQUEUE


class CollectiveError(HpcdistError, ValueError):
    """A collective called with what it cannot carry."""

    exit_code = ExitCode.USAGE


class CollectiveFailed(CollectiveError):
    """A collective that failed on the way: another try may succeed."""

    exit_code = ExitCode.INTERNAL


class CollectiveTimeoutError(HpcdistError, TimeoutError):
    """A rank did not arrive in time."""


class PSUnavailable(CollectiveTimeoutError):
    """A parameter server does not answer. Its shards are lost: the job must start again from a checkpoint."""


class ClosureInputError(HpcdistError, RuntimeError):
    """A resource that a closure needs, such as its dataset, cannot be built on the worker.

    Args:
        text: message, as of any error.
        original_exception: exception of its function. If this is a ClosureInputError, its original exception counts.
    """

    def __init__(self, text: str, original_exception: BaseException | None = None) -> None:
        super().__init__(text)
        if isinstance(original_exception, ClosureInputError):
            original_exception = getattr(original_exception, "original_exception", None)
        self.original_exception: BaseException | None = original_exception


class ClosureCancelledError(HpcdistError, RuntimeError):
    """A closure was not run, as another one had failed: schedule it again."""


class ClosureTimeoutError(HpcdistError, TimeoutError):
    """A closure ran longer than `closure_timeout_s` of its coordinator."""


class CheckpointError(HpcdistError, RuntimeError):
    """A checkpoint cannot be written or read."""

    exit_code = ExitCode.CHECKPOINT_IO


class CheckpointDamaged(CheckpointError):
    """The file is not what was committed: truncated, changed, or incomplete."""


class CheckpointMissing(CheckpointDamaged):
    """The file is not there: it was lost, or pruned since its folder was listed."""


class CheckpointMismatch(CheckpointError):
    """The file is sound, and of another model, other objects or a newer format: to run again would not help."""

    exit_code = ExitCode.BAD_CONFIGURATION


class AttemptReplaced(CheckpointError):
    """A later attempt of the same job has begun to write: this one must end."""

    exit_code = ExitCode.DO_NOT_REQUEUE


def error_class(name: str) -> type[HpcdistError]:
    """Return the class of this module called `name`; `HpcdistError` when there is none."""
    candidate = globals().get(name)
    if isinstance(candidate, type) and issubclass(candidate, HpcdistError):
        return candidate
    return HpcdistError


def agreed(error: HpcdistError) -> HpcdistError:
    """Return an error, marked as agreed: every rank raises it, as it follows from what all ranks know."""
    error.is_agreed = True
    return error


def report_agreed(error: BaseException, is_reporter: bool) -> None:
    """Leave with the exit code of an uncaught error that all ranks share; one of them prints it, as one line.

    Returns if ranks do not share the error.

    Raises:
        SystemExit: with the error's exit code.
    """
    if isinstance(error, HpcdistError) and error.is_agreed:
        if error.is_reporter is not None:
            is_reporter = error.is_reporter
        if is_reporter:
            log(str(error))
        sys.exit(int(error.exit_code))


def log(text: str) -> None:
    """Print a line on standard error, in one piece. One that cannot be written is dropped: it must not end a job."""
    if sys.stderr is not None:  # the process may have been started without
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"hpcdist: {text}\n")
            sys.stderr.flush()
