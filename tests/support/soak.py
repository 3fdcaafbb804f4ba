"""Kill one job again and again, on another number of ranks each time: it must end with the bits of an unbroken one.

python tests/support/soak.py --restarts 500 --seed 20261121 --out soak.json

Each attempt runs the main job with 8 replicas on 2 to 8 ranks, and does one harm at a random moment: SIGKILL, SIGTERM
or SIGSTOP of the chief, a worker or mpirun; a rank that is suspended for a while, raises, or makes a collective of its
own. Half of the attempts copy their state to memory. After each: all processes are gone within a bound, the exit code
is one that the harm allows, nothing is left in shared memory (but copies for the next attempt) or the folder for
temporary files, and the next attempt goes on from the newest committed checkpoint and sweeps what was half written.
When a run is finished its weights, optimizer, cursor and metrics are compared with those of an unbroken run; then a new
run begins. 500 attempts take an hour and more on two cores.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from real_jobs import MPIRUN, PYTHON, Job, final_state
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]
RANKS = (2, 2, 2, 3, 3, 4, 4, 5, 6, 8)
#: Harm -> (how often, seconds until all is over). A stuck rank is found by the watchdog after LIMIT_S.
LIMIT_S = 10.0
#: How long hpcdist waits for all ranks to start MPI, and some time to end.
START_S = 75.0
#: Age at which a segment that MPICH left must be gone: hpcdist's STALE_S, and the longest time to the next start.
SEGMENT_S = 700
HARMS = {
    "kill": (8, 15.0),
    "term": (4, 30.0),
    "raise": (2, 15.0),
    "mismatch": (2, LIMIT_S + 15.0),
    "stop": (2, LIMIT_S + 15.0),
    "suspend": (2, 60.0),
}
OPTIONS = ("--replicas", "8", "--epochs", "5", "--save-every", "4")
#: What an attempt may end with when it was not harmed in time, or was asked to stop.
CLEAN = (0, 75)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--harms", nargs="+", choices=list(HARMS), default=list(HARMS))
    parser.add_argument("--out", type=Path, help="JSON with every attempt")
    return parser.parse_args()


class Folder:
    """Where one soak happens: run folders, logs, and the jobs' own temporary files."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="hpcdist-soak-"))
        (self.path / "tmp").mkdir()
        write_digits(self.path / "data")
        self.segments = set()
        self.shared_before = set(os.listdir("/dev/shm"))
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI", "HPCDIST_"))},
            "OMP_NUM_THREADS": "1",
            "HPCDIST_TIMEOUT_S": str(LIMIT_S),
            "TMPDIR": str(self.path / "tmp"),
        }

    def start(self, n_ranks, run_dir, *more):
        program = [ROOT / "tests" / "support" / "harmed_job.py", ROOT / "jobs" / "train.py"]
        command = [
            MPIRUN,
            "-n",
            n_ranks,
            PYTHON,
            *program,
            "--run-dir",
            run_dir,
            "--data",
            self.path / "data",
            *OPTIONS,
            *more,
        ]
        return Job(command, self.environ, self.path)

    def left_overs(self, job):
        shared = set()
        for name in set(os.listdir("/dev/shm")) - self.shared_before:
            if not self.is_young_segment(name):
                shared.add(name)
        # torch's cache
        temporary_files = []
        for name in os.listdir(self.path / "tmp"):
            if not name.startswith("torchinductor"):
                temporary_files.append(name)
        return [*map(str, job.processes()), *shared, *temporary_files]

    def is_young_segment(self, name):
        """Return whether MPICH made it in a start that was cut short; a later start removes it when it is old."""
        is_young = time.time() - os.stat(f"/dev/shm/{name}").st_mtime < SEGMENT_S
        if name.startswith("mpich_shm_") and is_young:
            self.segments.add(name)
            return True
        return False


def write_digits(folder):
    """Write scikit-learn's digits as MNIST's files: ranks then need not import it, which takes a second each."""
    folder.mkdir()
    digits = load_digits()
    for name, rows in (("train", slice(1437)), ("t10k", slice(1437, None))):
        for kind, values in (("images-idx3", digits.images[rows] * 15), ("labels-idx1", digits.target[rows])):
            header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + values.astype(np.uint8).tobytes())


def copies(run_dir):
    """Return the folder in memory with copies of the state of a run; None if it never had one."""
    path = run_dir / "checkpoints" / "run-id"
    if path.exists():
        return Path(f"/dev/shm/hpcdist-{os.getuid()}-0-{path.read_text().split()[0]}")
    return None


def half_written(run_dir):
    """Return files that are being written, or were being written when their writer died."""
    return set(run_dir.rglob("*.tmp-*"))


def newest_step(run_dir):
    """Return the step of the newest committed checkpoint: of the latest attempt that has one. -1 without any."""
    checkpoint_paths = sorted(run_dir.glob("checkpoints/step-*.h5"), key=lambda path: path.stem.split("-")[::-1])
    if checkpoint_paths:
        return int(checkpoint_paths[-1].stem.split("-")[1])
    return -1


class Attempt:
    """One attempt: started, harmed, and looked at when it is over."""

    def __init__(self, folder, run_dir, chance, harms):
        self.harm = chance.choices(harms, [HARMS[harm][0] for harm in harms])[0]
        self.n_ranks = chance.choice(RANKS)
        self.victim = chance.choice(["chief", "worker", "worker", "mpirun"])
        if self.harm in ("raise", "mismatch") and self.victim == "mpirun":
            self.victim = "worker"
        in_training = chance.random() < 0.8
        self.delay_s = chance.uniform(0, 2.0)
        self.has_copies = chance.random() < 0.5
        self.committed_before = newest_step(run_dir)
        self.half_written_before = half_written(run_dir)
        self.faults = []
        self.was_done = False
        if self.has_copies:
            copy_options = ("--copy-every", "3")
        else:
            copy_options = ()
        self.job = folder.start(self.n_ranks, run_dir, *copy_options)
        self._wait_for_training(in_training)
        time.sleep(self.delay_s)
        self.was_running = self.job.process.poll() is None
        self.was_training = "replicas;" in self._output
        harmed_at = time.monotonic()
        if self.was_running:
            self._do_harm()
        self._wait_for_end()
        self.seconds = time.monotonic() - harmed_at
        self._look(folder, run_dir)

    def _wait_for_training(self, in_training):
        deadline = time.monotonic() + 60
        while in_training and "replicas;" not in self._output and self.job.process.poll() is None:
            if time.monotonic() > deadline:
                self.faults.append("did not begin to train in 60 s")
                return
            time.sleep(0.01)

    @property
    def _output(self):
        return self.job.log.read_text()

    def _pid(self):
        """Return the victim's pid: ranks are told apart by the order in which mpirun's proxy started them."""
        ranks = sorted(self.job.ranks())
        if not ranks:
            self.victim = "mpirun"
        if self.victim == "mpirun":
            return self.job.process.pid
        if self.victim == "chief":
            return ranks[0]
        return ranks[-1]

    def _do_harm(self):
        signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "raise": signal.SIGRTMIN}
        signals |= {"mismatch": signal.SIGRTMIN + 1, "stop": signal.SIGSTOP, "suspend": signal.SIGSTOP}
        pid = self.pid = self._pid()
        self._send(pid, signals[self.harm])
        if self.harm == "suspend" or (self.harm == "stop" and pid == self.job.process.pid):
            time.sleep(1.0)
            self._send(pid, signal.SIGCONT)

    def _send(self, pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.was_running = False

    def _wait_for_end(self):
        bound_s = HARMS[self.harm][1] if self.was_running else 60.0
        if self.harm in ("stop", "raise") and not self.was_training:
            bound_s = START_S  # before MPI has started: mpirun kills the others only where a signal ended the rank
        if self.harm in ("suspend", "stop") and self.victim == "mpirun":
            bound_s = 60.0  # it goes on, and may finish
        if not self._is_over_in(bound_s) and self.harm == "stop" and re.search(r"^test accuracy", self._output, re.M):
            self._send(self.pid, signal.SIGCONT)  # who has finished is waited for, for a day: it may be busy
            self.was_done = True
        if not self._is_over_in(LIMIT_S if self.was_done else 0.0):
            self.faults.append(f"not over after {bound_s:g} s")
            self.job.kill()

    def _is_over_in(self, bound_s):
        """Return whether the job has ended with all its processes, after waiting for that."""
        deadline = time.monotonic() + bound_s
        while is_there := self.job.process.poll() is None or self.job.processes():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return not is_there

    def _look(self, folder, run_dir):
        output = self._output
        self.code = self.job.process.returncode
        is_removed = self.has_copies and self.code in CLEAN
        copies_folder = None if is_removed else copies(run_dir)
        if leftovers := [
            name for name in folder.left_overs(self.job) if copies_folder is None or name != copies_folder.name
        ]:
            self.faults.append(f"left {leftovers}")
        came_from = re.search(r"resuming from \S+/step-(\d+)(?:-\d+)?\.h5", output)
        if came_from and int(came_from[1]) < self.committed_before and "restore: skips step" not in output:
            self.faults.append(f"went on from {came_from[1]}, but {self.committed_before} was committed")
        if "new run" in output and self.committed_before >= 0:
            self.faults.append("began anew")
        self.committed = newest_step(run_dir)
        if self.committed < self.committed_before:
            self.faults.append(f"{self.committed_before} was committed and is gone, the newest is {self.committed}")
        leftovers = half_written(run_dir) & self.half_written_before
        if not (self.code in CLEAN and self.committed > self.committed_before):  # only checkpoints are swept at once
            leftovers = {path for path in leftovers if "checkpoints" in path.parts and self.was_training}
        if leftovers:
            self.faults.append(f"left since an attempt before {sorted(path.name for path in leftovers)}")
        decision = run_dir / "decision.json"
        is_finished = decision.exists() and "finished" in decision.read_text()
        if self.code == 0 and not is_finished:
            self.faults.append("code 0, but the decision is not finished")
        allowed = self._allowed_codes(is_finished)
        if allowed and self.code not in allowed:
            self.faults.append(f"code {self.code}, not one of {allowed}")
        may_differ = self.harm == "mismatch"  # calls that do not fit together are found at once, and not tried again
        if self.code == 76 and not may_differ and "expected attempts that make progress" not in output:
            self.faults.append("code 76 without three attempts that died")
        self.tail = output[-3000:] if self.faults else ""

    def _allowed_codes(self, is_finished):
        """Return the codes that it may end with; none for any, as launchers report dead ranks differently."""
        before_training = () if self.was_training else (76,)  # three died before a checkpoint
        if not self.was_running:
            return (*CLEAN, 76)
        if self.harm == "suspend" or (self.harm == "stop" and self.victim == "mpirun"):
            return (0, *before_training)
        if self.harm == "term" and self.victim != "mpirun" and self.was_training and not is_finished:
            return CLEAN  # before training a signal kills, and also when the handler is done
        return ()

    def record(self):
        keys = (
            "harm",
            "victim",
            "n_ranks",
            "has_copies",
            "delay_s",
            "was_running",
            "was_training",
            "was_done",
            "code",
            "seconds",
        )
        keys += ("committed", "faults", "tail")
        return {key: getattr(self, key) for key in keys}


class Soak:
    """Attempt after attempt, run after run."""

    def __init__(self, seed, harms):
        self.folder = Folder()
        self.chance = random.Random(seed)
        self.harms = harms
        self.attempts = []
        self.n_runs = 0
        self.wrong = []
        job = self.folder.start(2, self.folder.path / "unbroken")
        assert job.wait(300).code == 0, job.log.read_text()[-3000:]
        self.expected = final_state(self.folder.path / "unbroken")

    def one_run(self, n_restarts):
        """Run one job to its end, or until there were enough restarts."""
        run_dir = self.folder.path / f"run-{self.n_runs}"
        while len(self.attempts) < n_restarts:
            attempt = Attempt(self.folder, run_dir, self.chance, self.harms)
            self.attempts.append(attempt)
            self.tell(attempt)
            if attempt.code == 76:  # three died before a checkpoint: as the message says
                (run_dir / "decision.json").unlink(missing_ok=True)
            if attempt.code == 0:
                break
        else:
            code = self.folder.start(2, run_dir).wait(300).code
            if code == 76:
                (run_dir / "decision.json").unlink(missing_ok=True)
                code = self.folder.start(2, run_dir).wait(300).code
            assert code == 0
        if copies_folder := copies(run_dir):  # by an attempt that died before one without copies
            shutil.rmtree(copies_folder, ignore_errors=True)
        self.n_runs += 1
        if final_state(run_dir) != self.expected:
            self.wrong.append(run_dir.name)
        else:
            shutil.rmtree(run_dir)

    def tell(self, attempt):
        harm_summary = f"{attempt.harm} {attempt.victim} of {attempt.n_ranks}"
        print(
            f"{len(self.attempts):4d} {harm_summary:24s} code {attempt.code} {attempt.seconds:5.1f} s {attempt.faults}",
            flush=True,
        )

    def summary(self):
        harmed = [attempt for attempt in self.attempts if attempt.was_running]
        lines = [f"{len(harmed)} harms in {len(self.attempts)} attempts of {self.n_runs} runs on 2-8 ranks"]
        for harm in HARMS:
            seconds = sorted(attempt.seconds for attempt in harmed if attempt.harm == harm)
            if seconds:
                lines.append(
                    f"{harm}: {len(seconds)}, over after {statistics.median(seconds):.1f} s (at most {seconds[-1]:.1f})"
                )
        lines.append(
            f"{len(self.folder.segments)} segments of MPICH left for a while by ranks that were killed in MPI_Init"
        )
        lines.append(f"codes {dict(Counter(attempt.code for attempt in self.attempts))}")
        faults = list(itertools.chain.from_iterable(attempt.faults for attempt in self.attempts))
        lines.append(f"{len(faults)} faults {faults[:5]}; runs with other bits: {self.wrong}")
        return "\n".join(lines), not faults and not self.wrong


def main():
    args = parse_args()
    soak = Soak(args.seed, args.harms)
    while len(soak.attempts) < args.restarts:
        soak.one_run(args.restarts)
        text, is_good = soak.summary()
        if args.out:  # after each run, should it be cut short
            records = [attempt.record() for attempt in soak.attempts]
            args.out.write_text(json.dumps({"seed": args.seed, "summary": text, "attempts": records}))
    print(text)
    if is_good:
        shutil.rmtree(soak.folder.path)
    sys.exit(0 if is_good else f"faults: see {soak.folder.path}")


if __name__ == "__main__":
    main()
