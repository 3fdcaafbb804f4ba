"""notebook_launcher: a function of a notebook's cell, on several ranks."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.cli.launcher import (
    find_launcher,
    launch_command,
    mpi_library,
    request_here,
    require_no_launcher,
)
from hpcdist.cluster.environment import read_environment
from hpcdist.errors import HpcdistError, UsageError
from hpcdist.ps import pickles

#: Grace period for ranks that were asked to end.
_END_S = 30.0


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Call a function on several ranks of this machine, each a new process; return its results, by rank.

    The output of the ranks appears below the cell, as it comes. A cell may be run again: its ranks are gone.
    Interrupting the cell asks them to save and to end, as a stop request does. The notebook itself starts no MPI.

    >>> hpcdist.notebook_launcher(train, (3,), num_processes=4)

    Args:
        function: function of the notebook or of a module. It goes by value, with the objects that it refers to; it
            makes its strategy, model and data itself.
        args: its positional arguments.
        num_processes: number of ranks.

    Raises:
        UsageError: for a number below 1, and in a rank of another launcher.
        HpcdistError: when a rank fails; its report stands below the cell.

    Source: the name and the arguments of accelerate's notebook_launcher.
    """
    environ = read_environment()
    require_no_launcher("notebook_launcher", environ)
    if num_processes < 1:
        raise UsageError(
            f"notebook_launcher: expected 1 process or more, got {num_processes}; correct num_processes."
        )
    with tempfile.TemporaryDirectory(prefix="hpcdist-notebook-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickles.dumps((function, tuple(args))).tobytes())
        code = _launch(folder, num_processes, environ)
        if code != 0:
            raise HpcdistError(
                f"notebook_launcher: expected all {num_processes} ranks to return, got exit code {code}; look at what "
                f"they have printed."
            )
        return [_load(folder / f"result-{rank}") for rank in range(num_processes)]


def _launch(folder: Path, n_ranks: int, environ: Mapping[str, str]) -> int:
    """Run the ranks, and print their output; return the launcher's exit code."""
    launcher = find_launcher(mpi_library(), environ)
    program = (sys.executable, "-u", "-m", "hpcdist.notebook", str(folder))
    line, added = launch_command(launcher, request_here(n_ranks, program, environ), environ)
    process = subprocess.Popen(
        line,
        env={**environ, **added},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt of the cell comes here first
    )
    assert process.stdout is not None, "it is a pipe"
    try:
        for text in process.stdout:
            print(text, end="", flush=True)
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(launcher.save_signal)
        try:
            output, _ = process.communicate(timeout=_END_S)
            print(output, end="", flush=True)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_S)
        raise


def _load(path: Path) -> Any:
    return pickles.loads(np.frombuffer(path.read_bytes(), np.uint8))


def _run_rank(folder: Path) -> None:
    """Call the function on this rank, and leave its result in the folder."""
    from hpcdist.runtime.process import make_world

    world = make_world()  # whose hooks end all ranks if one fails
    function, args = _load(folder / "call")
    result = pickles.dumps(function(*args)).tobytes()
    (folder / f"result-{world.rank}").write_bytes(result)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
