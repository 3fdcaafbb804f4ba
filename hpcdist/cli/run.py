"""`hpcdist run`: start a program on several ranks, wait for it, and start it again if it dies."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hpcdist.checkpoint.read import read_text
from hpcdist.cli.launcher import (
    Launcher,
    as_text,
    find_launcher,
    launch_command,
    mpi_library,
    request_here,
    require_no_launcher,
)
from hpcdist.cli.output import echo, printable
from hpcdist.cli.site import site_defaults
from hpcdist.cluster.environment import check_names, read_environment
from hpcdist.cluster.slurm import node_names
from hpcdist.errors import ConfigurationError, ExitCode, UsageError
from hpcdist.restart_rule import RESTART, RUN, Launch, Situation, action_after, is_of_signal

#: Longest wait, once the launcher has ended, for what it has printed.
_COPY_S = 5.0
#: Longest decision.json that is read.
_MAX_DECISION_BYTES = 1 << 20


@dataclass(frozen=True)
class Decision:
    """What `decision.json` says, and when it was written."""

    verdict: str
    reason: str
    stamp: tuple[int, int]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks; default: the tasks of the allocation, or 1.",
)
@click.option("--roles", metavar="MAP", help="Roles for the ranks in order, such as ps:2,worker:*.")
@click.option(
    "--hosts", metavar="LIST", help="Hosts and their ranks, such as n1:4,n2:4; default: this one."
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Start again if it dies.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Run folder; default: the program's --run-dir.",
)
@click.option(
    "--bind/--no-bind", default=True, show_default=True, help="Give each rank cores of its own."
)
@click.option("--dry-run", is_flag=True, help="Print the command, and do not run it.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    roles: str | None,
    hosts: str | None,
    restarts: int,
    run_dir: Path | None,
    bind: bool,
    dry_run: bool,
    is_module: bool,
    program: tuple[str, ...],
) -> int:
    """Start PROGRAM, with its arguments, on several ranks, by the launcher of the MPI library that mpi4py loads.

    A program that ends in .py is run by this Python. The command is printed. Scripts written for torchrun find RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Launchers change exit codes, so decision.json in the run folder
    counts where this run has written one: docs/slurm.md has the rule.

    \b
    hpcdist run -n 4 train.py --epochs 3
    hpcdist run -n 5 --roles ps:2,worker:* --restarts 2 train.py --run-dir runs/a
    """
    environ = read_environment()
    check_names(environ)
    require_no_launcher("hpcdist run", environ)
    n_on_hosts = n_ranks_on(hosts or "")
    tasks = environ.get("SLURM_NTASKS", "")
    if ranks is None:
        ranks = (
            int(tasks)
            if "SLURM_JOB_ID" in environ and not hosts and tasks.isdecimal()
            else n_on_hosts
        )
    request = request_here(ranks, command_of(program, is_module), environ, hosts or "", bind)
    launcher = find_launcher(mpi_library(), environ)
    added = {**_rendezvous(hosts, environ), **_settings(roles, environ)}
    line, guards = launch_command(launcher, request, {**environ, **added})
    added |= guards
    if dry_run:
        echo(as_text(line, added))
        return ExitCode.DONE
    folder = (
        run_dir
        or run_dir_of(program)
        or (Path(environ["RUN_DIR"]) if environ.get("RUN_DIR") else None)
    )
    return _run(
        launcher, line, {**environ, **added, **_terminal()}, as_text(line, added), folder, restarts
    )


def n_ranks_on(hosts: str) -> int:
    """Return how many ranks a list of hosts names; 1 for none.

    Raises:
        UsageError: for a list that is none.
    """
    n_ranks = 0
    for entry in hosts.split(",") if hosts else ["this:1"]:
        name, _, count = entry.partition(":")
        if not name or not (count or "1").isdecimal() or int(count or 1) < 1:
            raise UsageError(
                f"hpcdist run: expected --hosts as n1:4,n2:4, got {hosts!r}; name hosts and their ranks."
            )
        n_ranks += int(count or 1)
    return n_ranks


def command_of(program: Sequence[str], is_module: bool) -> tuple[str, ...]:
    """Return the command of one rank.

    Raises:
        UsageError: for a program that is not there.
    """
    name, *arguments = program
    if is_module:
        return (sys.executable, "-m", name, *arguments)
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UsageError(
                f"expected a program, got {name!r}, which is not there; look at its path."
            )
        return (sys.executable, name, *arguments)
    if shutil.which(name) is None:
        raise UsageError(
            f"expected a program that ends in .py, or one that can be run, got {name!r}; look at its path and mode."
        )
    return tuple(program)


def _settings(roles: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks get, for roles of the command line and what hpcdist.toml sets.

    The command line comes before TF_CONFIG, that and HPCDIST_* before the file.
    """
    added = {} if roles is None else {"HPCDIST_ROLES": roles}
    if roles is not None and environ.get("TF_CONFIG"):
        added["TF_CONFIG"] = ""
    of_file = {f"HPCDIST_{key.upper()}": f"{value}" for key, value in site_defaults("run").items()}
    of_file = {
        name: value
        for name, value in of_file.items()
        if name not in added and not environ.get(name)
    }
    if of_file:
        added["HPCDIST_FROM_FILE"] = ",".join(of_file)
    return {**added, **of_file}


def _terminal() -> dict[str, str]:
    """Return what tells ranks of the terminal behind their pipes; of none, also where one was inherited."""
    columns = f"{shutil.get_terminal_size().columns}" if sys.stdout.isatty() else ""
    return {"HPCDIST_TERMINAL_COLUMNS": columns}


def _rendezvous(hosts: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return where rank 0 of torch.distributed is to be found, unless it is set."""
    nodes = node_names(environ)
    first = (hosts or "").split(",")[0].partition(":")[0] or (nodes[0] if nodes else "127.0.0.1")
    with socket.socket() as free:
        free.bind(("", 0))
        defaults = {"MASTER_ADDR": first, "MASTER_PORT": str(free.getsockname()[1])}
    return {name: value for name, value in defaults.items() if name not in environ}


def run_dir_of(program: Sequence[str]) -> Path | None:
    """Return what the arguments of a program give for --run-dir; None if it is not among them."""
    for argument, following in zip(program, [*program[1:], ""], strict=True):
        if argument == "--run-dir" and following:
            return Path(following)
        if argument.startswith("--run-dir="):
            return Path(argument.partition("=")[2])
    return None


def _run(
    launcher: Launcher,
    line: Sequence[str],
    environ: Mapping[str, str],
    text: str,
    folder: Path | None,
    n_restarts: int,
) -> int:
    """Run a command, again while it dies, at most `n_restarts` times; return the exit code."""
    for n_left in range(n_restarts, -1, -1):
        _say(f"+ {text}")
        before = None if folder is None else read_decision(folder)
        code, is_interrupted = _launch(launcher, line, environ)
        after = None if folder is None else read_decision(folder)
        launch = launch_of(code, launcher.path, None if after == before else after, before)
        action = action_after(launch, Situation(RUN, may_restart=n_left > 0 and not is_interrupted))
        is_again = action.verb == RESTART
        if action.why:
            restart_note = f"; starting again, {n_left} restarts left" if is_again else ""
            _say(f"hpcdist run: exit code {action.code}: {action.why}{restart_note}")
        if not is_again:
            break
    return action.code


def _launch(
    launcher: Launcher, line: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, bool]:
    """Run a command; a signal that comes here asks it to save and to end. Return its exit code, and whether one came.

    It has a session of its own, so that neither Ctrl-C nor the end of a terminal reaches it by itself: Open MPI's
    mpirun and srun end the ranks at once for SIGINT and SIGTERM, and pass SIGUSR1 on. A second signal ends them; not a
    second SIGHUP, as one terminal that goes sends several. What is printed on a terminal goes through a pipe, so that
    the launcher does not meet one that is gone.
    """
    process: subprocess.Popen[bytes] | None = None
    seen: list[int] = []

    def pass_on(number: int) -> None:
        if process is None:
            return
        if len(seen) == 1 or number in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(
                number if number in (signal.SIGUSR1, signal.SIGUSR2) else launcher.save_signal
            )
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM if len(seen) == 2 else signal.SIGKILL)

    def note(number: int, _: Any) -> None:
        if number == signal.SIGHUP and seen:
            return
        seen.append(number)
        if len(seen) == 1:
            _say_what_came(number)
        pass_on(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, note) for number in numbers}
    try:
        pipes = [subprocess.PIPE if os.isatty(descriptor) else None for descriptor in (1, 2)]
        process = subprocess.Popen(
            line, env=dict(environ), start_new_session=True, stdout=pipes[0], stderr=pipes[1]
        )
        copying = _copy_on(process)
        for number in seen:  # before it had started
            pass_on(number)
        code = process.wait()
        for thread in copying:
            thread.join(_COPY_S)
        return code, bool(seen)
    except OSError as error:
        raise ConfigurationError(
            f"hpcdist run: expected {line[0]} to start, got {error.strerror}; look at it, or at PATH."
        ) from error
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _copy_on(process: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Copy what a launcher writes to its pipes to the terminal, in threads.

    What a terminal that is gone does not take is dropped.
    """
    threads: list[threading.Thread] = []
    for stream, descriptor in ((process.stdout, 1), (process.stderr, 2)):
        if stream is not None:
            thread = threading.Thread(target=_copy, args=(stream.fileno(), descriptor), daemon=True)
            thread.start()
            threads.append(thread)
    return threads


def _copy(source: int, target: int) -> None:
    while piece := os.read(source, 1 << 16):
        with contextlib.suppress(OSError):
            while piece:
                piece = piece[os.write(target, piece) :]


def _say_what_came(number: int) -> None:
    """Say which signal came: the ranks get another one. Called in a signal handler."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the terminal is gone (SIGHUP)"}
    name = names.get(signal.Signals(number), signal.Signals(number).name)
    _say(
        f"hpcdist run: {name}: the ranks are asked to save and to end; Ctrl-C now ends them at once"
    )


def _say(text: str) -> None:
    """Print a line on stderr, at once; on a terminal that is gone nothing, and the job goes on."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text)}\n".encode(errors="backslashreplace"))


def read_decision(folder: Path) -> Decision | None:
    """Return what `decision.json` in a run folder says; None where it says nothing."""
    path = folder / "decision.json"
    try:
        fields = json.loads(read_text(path, _MAX_DECISION_BYTES))
        status = path.stat()
        return Decision(
            str(fields["decision"]), str(fields["reason"]), (status.st_mtime_ns, status.st_ino)
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def launch_of(
    code: int, launcher: str, decision: Decision | None, earlier: Decision | None
) -> Launch:
    """Return how a launch ended, as the rule of restarts takes it.

    Args:
        code: exit code of the launcher; if a signal ended it, the signal's negative number.
        launcher: path of the launcher.
        decision: what this launch has written; None if nothing.
        earlier: what an earlier one had written; None if nothing.
    """
    code = 128 - code if code < 0 else code
    is_signalled = is_of_signal(code, launcher)
    if decision is not None:
        return Launch(code, decision.verdict, decision.reason, is_signalled=is_signalled)
    return Launch(
        code, earlier="none" if earlier is None else earlier.verdict, is_signalled=is_signalled
    )
