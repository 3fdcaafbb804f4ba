"""`hpcdist run`: start a program on several ranks, wait for it, and start it again if it dies."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
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
from hpcdist.cluster.environment import check_names, read_environment, slurm_tasks
from hpcdist.cluster.slurm import node_names
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import ConfigurationError, ExitCode, UsageError
from hpcdist.restart_rule import (
    HAND_BACK,
    RESTART,
    RUN,
    Action,
    Launch,
    Situation,
    action_after,
    is_of_signal,
)

#: Longest wait, once the launcher has ended, for what it has printed.
_COPY_S = 5.0
#: Longest path that is read.
_MAX_PATH_BYTES = 1 << 14
#: Longest decision.json that is read.
_MAX_DECISION_BYTES = 1 << 20


@dataclass(frozen=True)
class Decision:
    """The content of `decision.json`, and a stamp that changes when the file is written."""

    verdict: str
    reason: str
    stamp: tuple[int, int]


@dataclass(frozen=True)
class RunFolder:
    """The run folder of a program, which may be fixed in it.

    Attributes:
        note: file in which the chief names the folder when an attempt begins: the last one, of several.
        expected: folder by the command line, which counts where it has a decision; None if it says nothing.
    """

    note: Path
    expected: Path | None

    def decision(self) -> Decision | None:
        """Return the decision in the folder; None without one, or as long as the folder is unknown."""
        if self.expected is not None:
            decision = read_decision(self.expected)
            if decision is not None:
                return decision
        with contextlib.suppress(OSError, ValueError):
            folder = Path(read_text(self.note, _MAX_PATH_BYTES))
            return read_decision(folder)
        return None


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
    counts where this run has written one: docs/reference/restarts.md has the rule.

    \b
    hpcdist run -n 4 train.py --epochs 3
    hpcdist run -n 5 --roles ps:2,worker:* --restarts 2 train.py --run-dir runs/a
    """
    environ = read_environment()
    check_names(environ)
    require_no_launcher("hpcdist run", environ)
    n_on_hosts = n_ranks_on(hosts or "")
    if ranks is None:
        ranks = n_on_hosts
        if "SLURM_JOB_ID" in environ and not hosts:
            ranks = slurm_tasks(environ) or n_on_hosts
    request = request_here(ranks, command_of(program, is_module), environ, hosts or "", bind)
    launcher = find_launcher(mpi_library(), environ)
    added = {**_rendezvous(hosts, environ), **_settings(roles, environ)}
    line, guards = launch_command(launcher, request, {**environ, **added})
    added |= guards
    if dry_run:
        echo(as_text(line, added))
        return ExitCode.DONE
    folder = run_dir or run_dir_of(program)
    if folder is None and environ.get("RUN_DIR"):
        folder = Path(environ["RUN_DIR"])
    with tempfile.TemporaryDirectory(prefix="hpcdist-run-") as note_folder:
        note = Path(note_folder, "run-folder")
        launch_variables = {**_terminal(), "HPCDIST_RUN_NOTE": str(note)}
        rank_environ = {**environ, **added, **launch_variables}
        run_folder = RunFolder(note, folder)
        return _run(launcher, line, rank_environ, as_text(line, added), run_folder, restarts)


def n_ranks_on(hosts: str) -> int:
    """Return the number of ranks on a list of hosts such as "n1:4,n2:4"; 1 for an empty list.

    Raises:
        UsageError: if the text is no list of hosts.
    """
    if not hosts:
        return 1
    n_ranks = 0
    for entry in hosts.split(","):
        name, _, count = entry.partition(":")
        n_ranks_here = whole_number(count or "1")
        if not name or not n_ranks_here:
            raise UsageError(
                f"hpcdist run: expected --hosts as n1:4,n2:4, got {hosts!r}; name hosts and their ranks."
            )
        n_ranks += n_ranks_here
    return n_ranks


def command_of(program: Sequence[str], is_module: bool) -> tuple[str, ...]:
    """Return the command of one rank.

    Raises:
        UsageError: if the program does not exist, or cannot be run.
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
    """Return the variables for the roles of the command line and for the settings in hpcdist.toml.

    Roles of the command line take precedence over TF_CONFIG. TF_CONFIG and HPCDIST_* take precedence over the file.
    """
    added = {}
    if roles is not None:
        added["HPCDIST_ROLES"] = roles
        if environ.get("TF_CONFIG"):
            added["TF_CONFIG"] = ""
    from_file = {}
    for key, value in site_defaults("run").items():
        name = f"HPCDIST_{key.upper()}"
        if name not in added and not environ.get(name):
            from_file[name] = str(value)
    if from_file:
        added["HPCDIST_FROM_FILE"] = ",".join(from_file)
    return {**added, **from_file}


def _terminal() -> dict[str, str]:
    """Return the variable that tells ranks how wide the terminal behind their pipes is.

    It is empty without a terminal, and then replaces an inherited value.
    """
    columns = ""
    if sys.stdout.isatty():
        columns = str(shutil.get_terminal_size().columns)
    return {"HPCDIST_TERMINAL_COLUMNS": columns}


def _rendezvous(hosts: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the address and port of rank 0 for torch.distributed, without the variables that are set already."""
    first_host = (hosts or "").split(",")[0].partition(":")[0]
    if not first_host:
        first_host = next(iter(node_names(environ)), "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("", 0))
        port = unused.getsockname()[1]
    defaults = {"MASTER_ADDR": first_host, "MASTER_PORT": str(port)}
    return {name: value for name, value in defaults.items() if name not in environ}


def run_dir_of(program: Sequence[str]) -> Path | None:
    """Return the value of --run-dir in the arguments of a program; None if it is not among them."""
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
    folder: RunFolder,
    n_restarts: int,
) -> int:
    """Run a command, and run it again while it dies; return the exit code.

    Args:
        launcher: program that the command begins with.
        line: the command.
        environ: its environment.
        text: the command as it is printed.
        folder: run folder, as far as it is known.
        n_restarts: how often the command may be run again.
    """
    for n_left in range(n_restarts, -1, -1):
        _say(f"+ {text}")
        earlier = folder.decision()
        code, is_interrupted = _launch(launcher, line, environ)
        decision = folder.decision()
        if decision == earlier:
            decision = None
        launch = launch_of(code, launcher.path, decision, earlier)
        action = action_after(launch, Situation(RUN, may_restart=n_left > 0 and not is_interrupted))
        if action.why:
            end = action.why
            if not end.startswith("exit code "):
                end = f"exit code {action.code}: {end}"
            _say(f"hpcdist run: {end}{_what_follows(action, n_left)}")
        if action.verb != RESTART:
            break
    return action.code


def _what_follows(action: Action, n_left: int) -> str:
    """Return what follows a launch, as the end of a line."""
    if action.verb == RESTART:
        return f"; starting again, {n_left - 1} restarts left"
    if action.verb == HAND_BACK:
        return "; the same command resumes it"
    return ""


def _launch(
    launcher: Launcher, line: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, bool]:
    """Run a command; return its exit code, and whether a signal came meanwhile.

    A signal to this process asks the ranks to save and to end. The command runs in a new session, so that neither
    Ctrl-C nor the end of a terminal reaches it directly: Open MPI's mpirun and srun end the ranks at once for SIGINT
    and SIGTERM, and pass SIGUSR1 on. A second signal ends the ranks. A second SIGHUP does not, as a terminal that
    closes sends several. Output for a terminal goes through a pipe, so that the launcher does not write to a terminal
    that is gone.
    """
    process: subprocess.Popen[bytes] | None = None
    seen: list[int] = []

    def pass_on(number: int) -> None:
        if process is None:
            return
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        elif len(seen) == 1:
            process.send_signal(launcher.save_signal)
        else:
            end_signal = signal.SIGTERM if len(seen) == 2 else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, end_signal)

    def note(number: int, _: Any) -> None:
        if number == signal.SIGHUP and seen:
            return
        seen.append(number)
        if len(seen) == 1:
            _report_signal(number)
        pass_on(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, note) for number in numbers}
    try:
        process = subprocess.Popen(
            line,
            env=dict(environ),
            start_new_session=True,
            stdout=_pipe_for(1),
            stderr=_pipe_for(2),
        )
        copying_threads = _copy_output(process)
        for number in seen:  # signals that came before the process had started
            pass_on(number)
        code = process.wait()
        for thread in copying_threads:
            thread.join(_COPY_S)
        return code, bool(seen)
    except OSError as error:
        raise ConfigurationError(
            f"hpcdist run: expected {line[0]} to start, got {error.strerror}; look at it, or at PATH."
        ) from error
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _pipe_for(descriptor: int) -> int | None:
    """Return `subprocess.PIPE` if a descriptor belongs to a terminal; None, which inherits it, otherwise."""
    if os.isatty(descriptor):
        return subprocess.PIPE
    return None


def _copy_output(process: "subprocess.Popen[bytes]") -> list[threading.Thread]:
    """Start threads that copy the output of a launcher from its pipes to the terminal, and return them.

    Output that a terminal does not accept, as it is gone, is dropped.
    """
    threads: list[threading.Thread] = []
    for stream, descriptor in ((process.stdout, 1), (process.stderr, 2)):
        if stream is not None:
            thread = threading.Thread(target=_copy, args=(stream.fileno(), descriptor), daemon=True)
            thread.start()
            threads.append(thread)
    return threads


def _copy(source: int, target: int) -> None:
    """Copy all bytes from one descriptor to another."""
    while piece := os.read(source, 1 << 16):
        with contextlib.suppress(OSError):
            while piece:
                piece = piece[os.write(target, piece) :]


def _report_signal(number: int) -> None:
    """Print which signal came, as the ranks receive another one. Called in a signal handler."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the terminal is gone (SIGHUP)"}
    name = names.get(signal.Signals(number), signal.Signals(number).name)
    _say(
        f"hpcdist run: {name}: the ranks are asked to save and to end; Ctrl-C now ends them at once"
    )


def _say(text: str) -> None:
    """Print a line on stderr at once. If the terminal is gone, nothing is printed, and the job continues."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text)}\n".encode(errors="backslashreplace"))


def read_decision(folder: Path) -> Decision | None:
    """Return the content of `decision.json` in a run folder; None if there is none, or if it cannot be read."""
    path = folder / "decision.json"
    try:
        fields = json.loads(read_text(path, _MAX_DECISION_BYTES))
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_ino)
        return Decision(str(fields["decision"]), str(fields["reason"]), stamp)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def launch_of(
    code: int, launcher: str, decision: Decision | None, earlier: Decision | None
) -> Launch:
    """Return how a launch ended, as the rule of restarts takes it.

    Args:
        code: exit code of the launcher; if a signal ended it, the signal's negative number.
        launcher: path of the launcher.
        decision: decision that this launch has written; None if it has written none.
        earlier: decision of an earlier launch; None if there is none.
    """
    if code < 0:
        code = 128 - code
    is_signalled = is_of_signal(code, launcher)
    if decision is not None:
        return Launch(code, decision.verdict, decision.reason, is_signalled=is_signalled)
    if earlier is None:
        return Launch(code, is_signalled=is_signalled)
    reason = ""
    if earlier.verdict == "stop":
        reason = earlier.reason
    return Launch(code, reason=reason, earlier=earlier.verdict, is_signalled=is_signalled)
