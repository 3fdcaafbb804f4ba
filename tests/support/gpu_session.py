"""Run the tests and benchmarks of GPUs with the packages that a machine has, and write one report.

    python3 tests/support/gpu_session.py --report out/gpu/report.md --find-links wheels

Runs without a package index: the interpreter that starts this is used with its own torch, cupy, NCCL and MPI. What is
missing beside them is installed into an environment of its own, from the folders of wheels alone if any are named.
Needs the standard library only. The whole session ends within 8 minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-gpu"
#: What builds hpcdist's editable install, and runs its tests; the rest follows from pyproject.toml.
TOOLS = ["hatchling>=1.26", "editables>=0.5", "pytest>=8.0", "pytest-mpi>=0.6", "pytest-timeout>=2.3"]
#: Seconds for the whole session, of which the benchmarks leave some for the report.
SESSION_S = 460
#: Lines of a step's output that the report shows.
N_LINES = 60
#: Open MPI refuses root, and more ranks than cores, unless told otherwise.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
DESCRIBE = """
import importlib.metadata as metadata, platform, torch
print("Python", platform.python_version())
cuda = ("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
for name in ("torch", "numpy", "mpi4py", "h5py", *cuda):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
print("CUDA of torch:", torch.version.cuda)
for index in range(torch.cuda.device_count()):
    print("GPU", index, torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)[1] >> 20, "MiB")
"""


@dataclass(frozen=True)
class Step:
    """One command of the session.

    Attributes:
        title: heading in the report.
        command: arguments, the program first.
        limit_s: seconds after which the command is ended.
        needs_gpu: whether it is left out where torch finds no GPU.
    """

    title: str
    command: list[str]
    limit_s: int
    needs_gpu: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        step: the step.
        verdict: "passed", "failed with N", "ended after N s", or the reason why it did not run.
        seconds: time it took.
        output: text of stdout and stderr together.
    """

    step: Step
    verdict: str
    seconds: float
    output: str

    @property
    def is_failure(self) -> bool:
        """Whether the session fails for it."""
        return self.verdict.startswith(("failed", "ended"))


def main() -> int:
    """Run the session; return 1 if a step failed."""
    args = parse_args()
    args.report.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + SESSION_S
    outcomes = []
    for step in steps_of_install(args.find_links):
        if not any(outcome.is_failure for outcome in outcomes):
            outcomes.append(run_step(step, deadline))
    if not any(outcome.is_failure for outcome in outcomes):
        described = run_step(Step("machine", [python(), "-c", DESCRIBE], 60), deadline)
        outcomes.append(described)
        has_gpu = "\nGPU 0" in described.output
        for step in steps_of_session(args.report.parent):
            if step.needs_gpu and not has_gpu:
                outcomes.append(Outcome(step, "not run: torch finds no GPU on this machine", 0.0, ""))
            else:
                outcomes.append(run_step(step, deadline))
            args.report.write_text(report_of(outcomes))  # a session that is cut off leaves what it has
    args.report.write_text(report_of(outcomes))
    print(summary_of(outcomes), f"report: {args.report}", sep="\n")
    return int(any(outcome.is_failure for outcome in outcomes))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--report", type=Path, default=ROOT / "out" / "gpu" / "report.md", help="Markdown file to write"
    )
    parser.add_argument(
        "--find-links", nargs="*", default=[], metavar="FOLDER", help="folders of wheels, instead of a package index"
    )
    return parser.parse_args()


def python() -> str:
    """Return the path of the environment's interpreter."""
    return str(ENVIRONMENT / "bin" / "python")


def steps_of_install(wheel_folders: list[str]) -> list[Step]:
    """Return what makes the environment: it sees the packages of this interpreter, and gets what is missing."""
    see_packages = (
        "import site, sys, sysconfig; from pathlib import Path; "
        "lines = [f'import site; site.addsitedir({path!r})' for path in sys.argv[1:]]; "
        "Path(sysconfig.get_path('purelib'), 'first.pth').write_text('\\n'.join(lines))"
    )
    if wheel_folders:
        offline = ["--no-index", *(f"--find-links={folder}" for folder in wheel_folders)]
    else:
        offline = []
    pip = [python(), "-m", "pip", "install", "--quiet", *offline]
    launcher = [] if found_mpirun() else ["mpich>=5.0"]
    return [
        Step("environment", [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], 60),
        # Python 3.11 and older give a new environment an old setuptools, which would hide the interpreter's.
        Step("no old setuptools", [python(), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], 30),
        Step("packages of this interpreter", [python(), "-c", see_packages, *site_folders()], 30),
        Step("missing packages", [*pip, *TOOLS, *launcher], 120),
        Step("hpcdist", [*pip, "--no-build-isolation", "--editable", str(ROOT)], 120),
    ]


def site_folders() -> list[str]:
    """Return the folders that this interpreter imports packages from."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def steps_of_session(folder: Path) -> list[Step]:
    """Return the tests and benchmarks, the tests first."""
    steps = [Step(f"tests/gpu, {n_ranks(count)}", [*mpirun(count), *pytest()], 120) for count in (1, 2)]
    benchmarks = str(ROOT / "benchmarks")
    step = [python(), f"{benchmarks}/step.py", "--device", "cuda", "--rounds", "4"]
    all_reduce = [python(), f"{benchmarks}/allreduce.py", "--device", "cuda", "--rounds", "4", "--seconds", "4"]
    for model in ("mlp", "deep"):
        single = [*step, "--single", "--model", model, "--out", str(folder / "single")]
        steps.append(Step(f"step of {model}, 1 rank", single, 60, needs_gpu=True))
        pair = [*mpirun(2), *step, "--model", model, "--steps", "20", "--out", str(folder / "pair")]
        steps.append(Step(f"step of {model}, 2 ranks", pair, 60, needs_gpu=True))
    for count in (1, 2):
        sizes = ["--sizes", "4K,256K,4M", "--out", str(folder / f"ranks-{count}")]
        steps.append(Step(f"all-reduce, {n_ranks(count)}", [*mpirun(count), *all_reduce, *sizes], 60, needs_gpu=True))
    return steps


def n_ranks(count: int) -> str:
    """Return a number of ranks in words."""
    if count == 1:
        return f"{count} rank"
    return f"{count} ranks"


def mpirun(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks."""
    return [found_mpirun() or "mpirun", "-n", str(ranks)]


def found_mpirun() -> str | None:
    """Return the launcher beside this interpreter, in the environment, or on the PATH."""
    folders = [Path(sys.executable).parent, ENVIRONMENT / "bin"]
    beside = [str(folder / "mpirun") for folder in folders if (folder / "mpirun").exists()]
    if beside:
        return beside[0]
    return shutil.which("mpirun")


def variables() -> dict[str, str]:
    """Return the environment of a step: mpi4py loads the MPI library that is beside the launcher."""
    libraries = sorted(Path(found_mpirun() or "/", "..", "..", "lib").resolve().glob("libmpi.so.[0-9]*"))
    if libraries:
        library = {"MPI4PY_LIBMPI": str(libraries[0])}
    else:
        library = {}
    return {**os.environ, **OPEN_MPI, **library, "OMP_NUM_THREADS": "1"}


def pytest() -> list[str]:
    """Return the command of the tests."""
    return [python(), "-m", "pytest", "--quiet", "--color=no", "--with-mpi", "tests/gpu", "--durations=5"]


def run_step(step: Step, deadline: float) -> Outcome:
    """Run a step in a session of its own, which ends with it."""
    limit_s = min(step.limit_s, deadline - time.monotonic())
    if limit_s < 1:
        return Outcome(step, f"ended before it began: the session has {SESSION_S} s", 0.0, "")
    print(f"== {step.title}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        if process.returncode:
            verdict = f"failed with {process.returncode}"
        else:
            verdict = "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        verdict = f"ended after {limit_s:.0f} s"
    seconds = time.monotonic() - started
    print(*output.splitlines()[-N_LINES:], f"{step.title}: {verdict}, {seconds:.0f} s", sep="\n", flush=True)
    return Outcome(step, verdict, seconds, output)


def summary_of(outcomes: list[Outcome]) -> str:
    """Return a line for each step."""
    return "\n".join(f"{outcome.seconds:5.0f} s  {outcome.step.title}: {outcome.verdict}" for outcome in outcomes)


def report_of(outcomes: list[Outcome]) -> str:
    """Return the report in Markdown."""
    parts = ["# hpcdist on GPUs", "", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "", "```"]
    parts += [summary_of(outcomes), "```"]
    for outcome in outcomes:
        lines = outcome.output.splitlines()[-N_LINES:]
        parts += ["", f"## {outcome.step.title}: {outcome.verdict}", "", "```", " ".join(outcome.step.command)[:400]]
        parts += [*lines, "```"]
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    sys.exit(main())
