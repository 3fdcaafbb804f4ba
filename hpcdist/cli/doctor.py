"""`hpcdist doctor`: what is wrong with this machine, launcher or allocation, one line each with the cure."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from hpcdist.cli.findings import Finding, RankFacts, findings_of
from hpcdist.cli.launcher import Request, as_text, find_launcher, launch_command, mpi_library, n_cores
from hpcdist.cluster.environment import check_names, launcher_of, read_environment, visible_gpus
from hpcdist.errors import ConfigurationError, ExitCode

#: Longest time for the ranks to start, to measure and to end.
LIMIT_S = 180.0
#: A signal that has not reached all ranks by then does not reach them.
_SIGNAL_S = 5.0
#: What batch systems and `hpcdist run` send to have a job saved.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PACKAGES = ("hpcdist", "mpi4py", "numpy", "h5py", "torch")
_GPU_PROBE = (
    "import cupy; from cupy.cuda import nccl\n"
    "print('cupy', cupy.__version__, 'CUDA', cupy.cuda.runtime.runtimeGetVersion(), 'NCCL', nccl.get_version())"
)


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(1), help="Ranks to start; default: 2, or the tasks of the allocation."
)
@click.option("--hosts", metavar="LIST", help="Hosts and their ranks, such as n1:4,n2:4.")
@click.option("--run-dir", default="", help="Also look whether all hosts see this folder, and what is renamed there.")
@click.option("--signals", "has_signals", is_flag=True, help="Also look which signals reach the ranks.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def command(ranks: int | None, hosts: str | None, run_dir: str, has_signals: bool, is_json: bool) -> int:
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
        findings = [*_look_here(environ), *_look_at_new_ranks(environ, ranks, hosts, run_dir, has_signals)]
    for finding in findings:
        click.echo(json.dumps(vars(finding)) if is_json else str(finding))
    return ExitCode.BAD_CONFIGURATION if any(finding.level == "fail" for finding in findings) else ExitCode.DONE


def _look_here(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what this process alone can find out."""
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
    done = subprocess.run(
        [sys.executable, "-c", _GPU_PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode == 0:
        yield Finding("ok", "NCCL", done.stdout.strip())
    else:
        text = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Finding("warn", "NCCL", f"gradients are summed in host memory: {text}", "pip install 'hpcdist[cuda]'")


def _look_at_own_ranks(run_dir: str, rank: int) -> list[Finding]:
    """Return findings of the ranks that a launcher has started, of whom this is one; on rank 0 alone.

    A child process starts MPI in place of this one: it inherits what the launcher gave.
    """
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder, "facts.json")
        done = subprocess.run(_probe("facts", facts, run_dir), close_fds=False, timeout=LIMIT_S)
        if done.returncode:
            cure = "start as many ranks as the launcher says by the mpirun or srun of the MPI library of mpi4py"
            return [Finding("fail", "world", f"the probe ended with code {done.returncode}", cure)]
        return list(findings_of(_read_facts(facts), run_dir)) if rank == 0 else []


def _look_at_new_ranks(
    environ: Mapping[str, str], n_ranks: int | None, hosts: str | None, run_dir: str, has_signals: bool
) -> Iterator[Finding]:
    """Yield findings of ranks that are started for that."""
    try:
        library = mpi_library()
        launcher = find_launcher(library, environ)
    except ConfigurationError as error:
        yield Finding("fail", "MPI", str(error))
        return
    yield Finding("ok", "MPI", f"{library}, started by {launcher.path}")
    tasks = environ.get("SLURM_NTASKS", "")
    n_ranks = n_ranks or (int(tasks) if tasks.isdecimal() else 2)
    is_in_allocation = "SLURM_JOB_ID" in environ
    request = Request(
        n_ranks,
        (),
        hosts or "",
        True,
        0 if hosts or is_in_allocation else n_cores(),
        os.geteuid() == 0,
        is_in_allocation,
    )
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder, "facts.json")
        line, added = launch_command(launcher, request, environ)
        code, printed = _run([*line, *_probe("facts", facts, run_dir)], {**environ, **added})
        if code != 0 or not facts.exists():
            text = next((one for one in printed.splitlines() if one.startswith("hpcdist:")), f"exit code {code}")
            yield Finding("fail", "world", f"{n_ranks} ranks did not start: {text}", f"try it: {as_text(line, added)}")
            return
        yield from findings_of(_read_facts(facts), run_dir)
        for number in _SIGNALS if has_signals else ():
            inner = Path(folder, number.name)
            inner.mkdir()
            yield _look_at_signal(number, [*line, *_probe("signals", inner)], {**environ, **added}, inner, n_ranks)


def _look_at_signal(
    number: signal.Signals, line: Sequence[str], environ: Mapping[str, str], folder: Path, n_ranks: int
) -> Finding:
    """Return whether a signal that is sent to the launcher reaches all ranks, of which each notes it in a folder."""
    process = subprocess.Popen(
        line, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        if _count(folder, "ready", n_ranks, process, LIMIT_S) < n_ranks:
            return Finding("fail", "signals", f"the ranks to signal did not start within {LIMIT_S:g} s", "try without")
        started = time.monotonic()
        process.send_signal(number)
        n_reached = _count(folder, number.name, n_ranks, process, _SIGNAL_S)
        took_s = time.monotonic() - started
    finally:
        (folder / "done").write_text("")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    if n_reached == n_ranks:
        return Finding("ok", "signals", f"{number.name} to the launcher reaches all ranks in {took_s:.2f} s")
    text = f"{number.name} to the launcher reaches {n_reached} of {n_ranks} ranks"
    return Finding("warn", "signals", text, "use another one, or the file `stop` in the run folder, to save and end")


def _count(folder: Path, name: str, n_expected: int, process: "subprocess.Popen[bytes]", limit_s: float) -> int:
    """Return how many ranks have noted something: once all have, after the limit, or when the launcher has ended."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        if len(list(folder.glob(f"{name}-*"))) == n_expected:
            break
        time.sleep(0.02)
    return len(list(folder.glob(f"{name}-*")))


def _probe(kind: str, path: Path, run_dir: str = "") -> list[str]:
    command = [sys.executable, "-m", "hpcdist.cli.probe", kind, str(path)]
    return [*command, run_dir] if run_dir else command


def _run(line: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            line, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return 1, f"hpcdist: no end within {LIMIT_S:g} s"
    return done.returncode, done.stdout + done.stderr


def _read_facts(path: Path) -> list[RankFacts]:
    return [RankFacts(**{**found, "cores": tuple(found["cores"])}) for found in json.loads(path.read_text())]
