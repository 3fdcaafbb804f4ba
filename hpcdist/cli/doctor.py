"""`hpcdist doctor`: prints each fault of this machine, launcher or allocation as one line, with the cure."""

import importlib.metadata
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import click

from hpcdist.cli.findings import MARK, Finding, RankFacts, findings_of
from hpcdist.cli.launcher import as_text, find_launcher, launch_command, mpi_library, request_here
from hpcdist.cli.output import echo
from hpcdist.cluster.environment import (
    check_names,
    launcher_of,
    read_environment,
    slurm_tasks,
    visible_gpus,
)
from hpcdist.errors import ConfigurationError, ExitCode

#: Longest time for the ranks to start, to measure and to end.
LIMIT_S = 180.0
#: Longest time for a signal to reach all ranks.
_SIGNAL_S = 5.0
#: Longest time for the ranks to end. Ranks that no signal has reached end by themselves.
_END_S = 20.0
#: Signals that batch systems and `hpcdist run` send to have a job saved.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PACKAGES = ("hpcdist", "mpi4py", "numpy", "h5py", "torch")
_GPU_PROBE = (
    "import cupy; from cupy.cuda import nccl\n"
    "print('cupy', cupy.__version__, 'CUDA', cupy.cuda.runtime.runtimeGetVersion(), 'NCCL', nccl.get_version())"
)


@click.command()
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1),
    help="Ranks to start; default: 2, or the tasks of the allocation.",
)
@click.option("--hosts", metavar="LIST", help="Hosts and their ranks, such as n1:4,n2:4.")
@click.option(
    "--run-dir",
    default="",
    help="Also look whether all hosts see this folder, and what is renamed there.",
)
@click.option(
    "--signals", "has_signals", is_flag=True, help="Also look which signals reach the ranks."
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def command(
    ranks: int | None, hosts: str | None, run_dir: str, has_signals: bool, is_json: bool
) -> int:
    """Look for what is wrong: MPI library and launcher, world, roles, cores, GPUs, memory, links, clocks, folders.

    Alone, it starts a few ranks itself, as `hpcdist run` does. Under mpirun or srun it looks at the ranks that these
    have started: `srun hpcdist doctor`. The exit code is 78 if anything fails.

    \b
    hpcdist doctor --run-dir runs/train --signals
    """
    environ = read_environment()
    started_by = launcher_of(environ)
    if started_by is not None and started_by.size > 1:
        findings = _look_at_own_ranks(run_dir, started_by.rank)
    else:
        findings = [
            *_look_here(environ),
            *_look_at_new_ranks(environ, ranks, hosts, run_dir, has_signals),
        ]
    for finding in findings:
        echo(json.dumps(vars(finding)) if is_json else str(finding))
    if any(finding.level == "fail" for finding in findings):
        return ExitCode.BAD_CONFIGURATION
    return ExitCode.DONE


def _look_here(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings that need no other process than this one."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", "packages", f"{name} is not installed", f"pip install {name}")
    yield Finding("ok", "packages", f"Python {sys.version.split()[0]}, {', '.join(versions)}")
    try:
        check_names(environ)
    except ConfigurationError as error:
        yield Finding("fail", "environment", str(error))
    if not visible_gpus(environ):
        return
    code, printed = _run([sys.executable, "-c", _GPU_PROBE], environ)
    last_line = (printed.strip().splitlines() or ["no answer"])[-1]
    if code == 0:
        yield Finding("ok", "NCCL", last_line)
    else:
        text = f"gradients are summed in host memory: {last_line}"
        yield Finding("warn", "NCCL", text, "pip install 'hpcdist[cuda]'")


def _look_at_own_ranks(run_dir: str, rank: int) -> list[Finding]:
    """Return the findings of the ranks that a launcher has started, on rank 0; other ranks return failures only.

    A child process starts MPI in place of this one, as it inherits the launcher's variables and connections.

    Args:
        run_dir: run folder to look for; empty for none.
        rank: rank of this process.
    """
    code, printed = _run(_probe("facts", run_dir), dict(read_environment()), close_fds=False)
    if code:
        text = f"the probe ended with code {code}: {_reason(printed)}"
        cure = "start as many ranks as the launcher says by the mpirun or srun of the MPI library of mpi4py"
        return [Finding("fail", "world", text, cure)]
    if rank:
        return []
    return list(findings_of(_facts_in(printed), run_dir))


def _look_at_new_ranks(
    environ: Mapping[str, str],
    n_ranks: int | None,
    hosts: str | None,
    run_dir: str,
    has_signals: bool,
) -> Iterator[Finding]:
    """Start ranks, and yield their findings."""
    try:
        launcher = find_launcher(mpi_library(), environ)
    except ConfigurationError as error:
        yield Finding("fail", "MPI", str(error))
        return
    yield Finding("ok", "MPI", f"{launcher.kind}, started by {launcher.path}")
    if n_ranks is None:
        n_ranks = slurm_tasks(environ) or 2
    request = request_here(n_ranks, (), environ, hosts or "")
    line, added = launch_command(launcher, request, environ)
    code, printed = _run([*line, *_probe("facts", run_dir)], {**environ, **added})
    facts = _facts_in(printed)
    if code != 0 or not facts:
        reason = _reason(printed) or f"exit code {code}"
        text = f"{n_ranks} ranks did not start: {reason}"
        yield Finding("fail", "world", text, f"try it: {as_text(line, added)} true")
        return
    yield from findings_of(facts, run_dir)
    if not has_signals:
        return
    for number in _SIGNALS:
        yield _look_at_signal(number, [*line, *_probe("signals")], {**environ, **added}, n_ranks)


def _look_at_signal(
    number: signal.Signals, line: Sequence[str], environ: Mapping[str, str], n_ranks: int
) -> Finding:
    """Start ranks, send a signal to their launcher, and return the finding: whether all ranks print the signal."""
    process = subprocess.Popen(
        line,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    printed = _Printed(process)
    try:
        if printed.count("ready", n_ranks, LIMIT_S) < n_ranks:
            text = f"the ranks to signal did not start within {LIMIT_S:g} s"
            return Finding("fail", "signals", text, "try without")
        started = time.monotonic()
        process.send_signal(number)
        n_reached = printed.count(number.name, n_ranks, _SIGNAL_S)
        took_s = time.monotonic() - started
    finally:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)
    if n_reached == n_ranks:
        text = f"{number.name} to the launcher reaches all ranks in {took_s:.2f} s"
        return Finding("ok", "signals", text)
    text = f"{number.name} to the launcher reaches {n_reached} of {n_ranks} ranks"
    cure = "use another one, or the file `stop` in the run folder, to save and end"
    return Finding("warn", "signals", text, cure)


class _Printed:
    """Lines that the ranks of a launcher print for doctor, read by a thread.

    Args:
        process: launcher, whose output is a pipe.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._lines = list[str]()
        threading.Thread(target=self._read, name="hpcdist-doctor", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.append(line.decode(errors="replace"))

    def count(self, name: str, n_expected: int, limit_s: float) -> int:
        """Return how many ranks have printed a name.

        It returns once all ranks have, after the limit, or when the process has ended.

        Args:
            name: text that the ranks print behind `MARK`.
            n_expected: number of ranks.
            limit_s: longest wait, in seconds.
        """
        deadline = time.monotonic() + limit_s
        is_last = False
        while True:
            n_found = sum(MARK + name in line for line in self._lines)
            if n_found == n_expected or time.monotonic() > deadline or is_last:
                return n_found
            # the thread may not have read the last lines of a process that has ended
            is_last = self._process.poll() is not None
            time.sleep(0.2 if is_last else 0.02)


def _probe(kind: str, run_dir: str = "") -> list[str]:
    """Return the command of one rank: see probe.py."""
    command = [sys.executable, "-m", "hpcdist.cli.probe", kind]
    if run_dir:
        command.append(run_dir)
    return command


def _run(
    line: Sequence[str], environ: Mapping[str, str], close_fds: bool = True
) -> tuple[int, str]:
    """Return exit code and output of a command; a command that does not end in time is killed."""
    try:
        done = subprocess.run(
            line,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            close_fds=close_fds,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return 1, f"hpcdist: no end within {LIMIT_S:g} s"
    except OSError as error:
        return 1, f"hpcdist: {line[0]} does not start: {error.strerror}"
    return done.returncode, done.stdout + done.stderr


def _reason(printed: str) -> str:
    """Return the first error of hpcdist in what ranks have printed; "" if there is none."""
    return next((line for line in printed.splitlines() if line.startswith("hpcdist:")), "")


def _facts_in(printed: str) -> list[RankFacts]:
    """Return the facts of all ranks, which rank 0 has printed; an empty list if it has not."""
    payloads = [line.partition(MARK)[2] for line in printed.splitlines() if MARK + "[" in line]
    if not payloads:
        return []
    facts = []
    for fields in json.loads(payloads[0]):
        fields["cores"] = tuple(fields["cores"])
        facts.append(RankFacts(**fields))
    return facts
