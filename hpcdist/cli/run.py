"""`hpcdist run`: start a program on several ranks, wait for it, and start it again if it dies."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hpcdist.cli.launcher import Request, as_text, find_launcher, launch_command, mpi_library, n_cores
from hpcdist.cluster.environment import check_names, read_environment
from hpcdist.cluster.slurm import node_names
from hpcdist.errors import ExitCode, UsageError

#: Codes after which another launch would end likewise.
_FINAL = (ExitCode.DONE, ExitCode.USAGE, ExitCode.DO_NOT_REQUEUE, ExitCode.BAD_CONFIGURATION)


@dataclass(frozen=True)
class Decision:
    """What `decision.json` says, and when it was written."""

    verdict: str
    reason: str
    stamp: tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: the exit code to leave with, and whether it died, so that another one may go on."""

    code: int
    has_died: bool
    reason: str = ""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--ranks", type=click.IntRange(1), help="Number of ranks; default: the tasks of the allocation, or 1."
)
@click.option("--roles", metavar="MAP", help="Roles for the ranks in order, such as ps:2,worker:*.")
@click.option("--hosts", metavar="LIST", help="Hosts and their ranks, such as n1:4,n2:4; default: this one.")
@click.option("--restarts", type=click.IntRange(0), default=0, show_default=True, help="Start again if it dies.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where its decision.json is; default: its --run-dir.")
@click.option("--bind/--no-bind", default=True, show_default=True, help="Give each rank cores of its own.")
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
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The exit code is that of the job: launchers change codes, so
    decision.json in its run folder counts where this run has written one.

    \b
    hpcdist run -n 4 train.py --epochs 3
    hpcdist run -n 5 --roles ps:2,worker:* --restarts 2 train.py --run-dir runs/a
    """
    environ = read_environment()
    check_names(environ)
    request = _request(ranks, hosts, bind, command_of(program, is_module), environ)
    launcher = find_launcher(mpi_library(), environ)
    added = {**_rendezvous(hosts, environ), **({} if roles is None else {"HPCDIST_ROLES": roles})}
    line, guards = launch_command(launcher, request, {**environ, **added})
    added |= guards
    if dry_run:
        click.echo(as_text(line, added))
        return ExitCode.DONE
    folder = run_dir or run_dir_of(program) or (Path(environ["RUN_DIR"]) if environ.get("RUN_DIR") else None)
    return _run(line, {**environ, **added}, as_text(line, added), folder, restarts)


def _request(
    ranks: int | None, hosts: str | None, is_bound: bool, program: tuple[str, ...], environ: Mapping[str, str]
) -> Request:
    is_in_allocation = "SLURM_JOB_ID" in environ
    if ranks is None:
        tasks = environ.get("SLURM_NTASKS", "")
        ranks = int(tasks) if is_in_allocation and tasks.isdecimal() else _n_ranks_on(hosts or "")
    return Request(
        n_ranks=ranks,
        program=program,
        hosts=hosts or "",
        is_bound=is_bound,
        n_cores=0 if hosts or is_in_allocation else n_cores(),
        is_root=os.geteuid() == 0,
        is_in_allocation=is_in_allocation,
    )


def _n_ranks_on(hosts: str) -> int:
    """Return how many ranks a list of hosts names; 1 for none.

    Raises:
        UsageError: for a list that is none.
    """
    n_ranks = 0
    for entry in hosts.split(",") if hosts else ["this:1"]:
        name, _, count = entry.partition(":")
        if not name or not (count or "1").isdecimal() or int(count or 1) < 1:
            raise UsageError(f"hpcdist run: expected --hosts as n1:4,n2:4, got {hosts!r}; name hosts and their ranks.")
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
            raise UsageError(f"hpcdist run: expected a program, got {name!r}, which is not there; correct its path.")
        return (sys.executable, name, *arguments)
    if shutil.which(name) is None:
        raise UsageError(
            f"hpcdist run: expected a program that ends in .py, or one that can be run, got {name!r}; correct its path."
        )
    return tuple(program)


def _rendezvous(hosts: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return where rank 0 of torch.distributed is to be found, unless it is set."""
    nodes = node_names(environ)
    first = (hosts or "").split(",")[0].partition(":")[0] or (nodes[0] if nodes else "127.0.0.1")
    with socket.socket() as free:
        free.bind(("", 0))
        found = {"MASTER_ADDR": first, "MASTER_PORT": str(free.getsockname()[1])}
    return {name: value for name, value in found.items() if name not in environ}


def run_dir_of(program: Sequence[str]) -> Path | None:
    """Return what the arguments of a program give for --run-dir; None if it is not among them."""
    for argument, following in zip(program, [*program[1:], ""], strict=True):
        if argument == "--run-dir" and following:
            return Path(following)
        if argument.startswith("--run-dir="):
            return Path(argument.partition("=")[2])
    return None


def _run(line: Sequence[str], environ: Mapping[str, str], text: str, folder: Path | None, n_restarts: int) -> int:
    """Run a command, again while it dies, at most `n_restarts` times; return the exit code."""
    for n_left in range(n_restarts, -1, -1):
        click.echo(f"+ {text}", err=True)
        before = None if folder is None else read_decision(folder)
        code, is_signalled = _launch(line, environ)
        after = None if folder is None else read_decision(folder)
        outcome = outcome_of(code, None if after == before else after)
        is_again = outcome.has_died and n_left > 0 and not is_signalled
        if outcome.reason or is_again:
            reason = f": {outcome.reason}" if outcome.reason else ""
            again = f"; starting again, {n_left} restarts left" if is_again else ""
            click.echo(f"hpcdist run: exit code {outcome.code}{reason}{again}", err=True)
        if not is_again:
            break
    return outcome.code


def _launch(line: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bool]:
    """Run a command, and send it the signals that this process gets; return its exit code, and whether there were any.

    Ctrl-C reaches it without us. So the program saves and ends, and this process stays until it has.
    """
    process: subprocess.Popen[bytes] | None = None
    seen: list[int] = []

    def forward(number: int, _: Any) -> None:
        seen.append(number)
        if process is not None and number != signal.SIGINT:
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    earlier = {number: signal.signal(number, forward) for number in numbers}
    try:
        process = subprocess.Popen(line, env=dict(environ))
        for number in [one for one in seen if one != signal.SIGINT]:  # before it had started
            process.send_signal(number)
        return process.wait(), bool(seen)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def read_decision(folder: Path) -> Decision | None:
    """Return what `decision.json` in a run folder says; None where it says nothing."""
    path = folder / "decision.json"
    try:
        said, status = json.loads(path.read_text()), path.stat()
        return Decision(str(said["decision"]), str(said["reason"]), (status.st_mtime_ns, status.st_ino))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def outcome_of(code: int, decision: Decision | None) -> Outcome:
    """Return how a launch ended. Pure.

    | decision of this run   | launcher | code                              | died |
    |------------------------|----------|-----------------------------------|------|
    | finished               | any      | 0                                 | no   |
    | stop                   | 76, 78   | the launcher's                    | no   |
    | stop                   | other    | 76                                | no   |
    | requeue, died          | 0        | 1                                 | yes  |
    | requeue, died          | other    | the launcher's                    | yes  |
    | requeue, stopped       | any      | 75                                | no   |
    | none                   | any      | the launcher's                    | if it is none of 0, 2, 76, 78 |

    Args:
        code: the launcher's; of one that a signal ended, its negative number.
        decision: what this run has written; None if nothing.
    """
    code = 128 - code if code < 0 else code
    if decision is None:
        return Outcome(code, code not in _FINAL)
    if decision.verdict == "finished":
        return Outcome(ExitCode.DONE, False)
    if decision.verdict == "stop":
        is_said = code in (ExitCode.DO_NOT_REQUEUE, ExitCode.BAD_CONFIGURATION)
        return Outcome(code if is_said else ExitCode.DO_NOT_REQUEUE, False, decision.reason)
    if decision.reason.startswith("died"):
        return Outcome(code or ExitCode.UNCAUGHT, True, decision.reason)
    return Outcome(ExitCode.RUN_AGAIN, False, decision.reason)
