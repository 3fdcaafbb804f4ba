"""The only door to mpi4py: finds the MPI library, refuses a launcher it cannot talk to, then starts it.

Everything else imports `MPI` from here. MPI is started when this module is first imported; in a process that a rank has
started, which may only import the program's file, when it is first used.
"""

import faulthandler
import sys
import warnings
from collections.abc import Mapping
from types import TracebackType

from hpcdist.cluster.environment import (
    has_lost_launcher,
    is_child_of_rank,
    launcher_of,
    leave_launch,
    mark_rank,
    read_environment,
    timeout_s,
)
from hpcdist.errors import ConfigurationError, report_agreed
from hpcdist.runtime import mpich_shm

__all__ = ["MPI", "check_launcher", "library_name", "refuse", "start", "start_timeout_s"]

#: How the MPICH wheel names itself. It cannot be started over PMIx, which is all that Open MPI's mpirun offers.
_MPICH_WHEEL = "/p/mpich/"
#: A rank waits at least this long for the others to start MPI: all load their programs from one slow file system.
MIN_START_S = 60.0
#: The limit where HPCDIST_TIMEOUT_S is not a number.
START_S = 600.0
#: Whether `start` is done, as MPI starts once in a process. The program may have started MPI itself.
_is_started = False


def _load() -> None:
    """Load the MPI library without starting it."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True


def start_timeout_s() -> float:
    """Return how long to wait for all ranks to start, in seconds."""
    try:
        return max(timeout_s(read_environment()), MIN_START_S)
    except ConfigurationError:  # all ranks report it together, once they have started
        return START_S


def _start_with_all_ranks() -> None:
    """Start MPI; a rank that waits too long for the others prints its stack and exits."""
    # MPI holds the interpreter lock meanwhile: only a thread that needs no lock can end the process
    faulthandler.dump_traceback_later(start_timeout_s(), exit=True, file=2)
    try:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    finally:
        faulthandler.cancel_dump_traceback_later()


def refuse(error: ConfigurationError, environ: Mapping[str, str]) -> None:
    """Raise an error that every process raises on its own; if uncaught, the launcher's rank 0 alone prints it."""
    launcher = launcher_of(environ)
    is_reporter = launcher is None or launcher.rank == 0
    previous_hook = sys.excepthook

    def report(
        kind: type[BaseException],
        caught: BaseException,
        trace: TracebackType | None,
    ) -> None:
        report_agreed(caught, is_reporter)
        previous_hook(kind, caught, trace)

    sys.excepthook = report
    error.is_agreed = True
    raise error


def check_launcher(environ: Mapping[str, str], library: str) -> None:
    """Raise ConfigurationError when `library` (its version text) does not fit the launcher of this process."""
    has_only_pmix = "PMIX_RANK" in environ and "PMI_RANK" not in environ
    if has_only_pmix and _MPICH_WHEEL in library:
        raise ConfigurationError(
            "world: expected a launcher that speaks PMI, got one that speaks PMIx only, for the MPICH wheel; start by "
            "the mpirun of the environment that mpich is installed in, or by srun --mpi=pmi2."
        )
    if _MPICH_WHEEL in library and has_lost_launcher(environ):
        error = ConfigurationError(
            f"world: expected the connection to the launcher that PMI_FD={environ['PMI_FD']} names, got none that is "
            f"open: the launcher's variables are inherited from another program; unset PMI_FD, PMI_RANK and PMI_SIZE."
        )
        error.is_reporter = True  # there may be no rank 0
        raise error


_load()
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as _error:
    _text = " ".join(str(_error).split())
    refuse(
        ConfigurationError(
            f"world: expected an MPI library, got none ({_text}); load your site's MPI module or pip install mpich."
        ),
        read_environment(),
    )


def start() -> None:
    """Start MPI with all ranks, unless it has been started. A child of a rank starts it as a separate program.

    Raises:
        ConfigurationError: where a worker process imports the program's file, and for a launcher that does not fit.
    """
    global _is_started
    if _is_started:
        return
    if not MPI.Is_initialized():
        _initialize()
    mark_rank()
    mpich_shm.unlink_own()
    mpich_shm.remove_stale()
    _is_started = True


def _initialize() -> None:
    environ = read_environment()
    if is_child_of_rank(environ):
        _check_main_guard()
        leave_launch()
    try:
        check_launcher(read_environment(), MPI.Get_library_version())
    except ConfigurationError as error:
        refuse(error, environ)
    with warnings.catch_warnings():
        # mpi4py's own hint at a foreign launcher; world.py refuses it and says what to do
        warnings.filterwarnings("ignore", message="suspicious MPI execution environment")
        _start_with_all_ranks()


def _check_main_guard() -> None:
    """Raise ConfigurationError where a worker process, which imports the program's file, runs its program too."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__":
            error = ConfigurationError(
                f"world: expected the program under if __name__ == '__main__', as each worker process of a DataLoader "
                f"imports its file, got a call of hpcdist at the top level, in line {frame.f_lineno} of "
                f"{frame.f_code.co_filename}; put what runs below that line."
            )
            refuse(error, read_environment())
        frame = frame.f_back  # type: ignore[assignment]


def library_name() -> str:
    """Return the name and version of the MPI library in use."""
    return " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")


if not is_child_of_rank(read_environment()):
    start()
