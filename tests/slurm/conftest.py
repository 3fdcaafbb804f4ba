"""A private Slurm on this machine: munged, slurmctld and four slurmds from Debian, in one folder, ended by pid.

Jobs in the partition `high` take the nodes of jobs in `low` and `cancelled`, which have ten seconds to leave; those in
`low` are requeued.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from real_jobs import final_state

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
N_NODES = 4
ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
NodeName=n[1-{n_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=20
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/tmp-%n
"""


def free_ports(count):
    """Return the first of so many ports in a row that nobody has now: below those that connections are given."""
    for first in random.sample(range(10000, 32000, count), 100):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    pytest.fail(f"expected {count} free ports in a row, got none")


def environ_of(pid):
    """Return NAME=VALUE of a process; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_time_of(pid):
    """Return when a process started, in ticks since the machine did; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def kill_all(pids, number):
    """Send a signal to processes, some of which may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def name_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


class Slurm:
    """The daemons, and the clients that talk to them."""

    def __init__(self, folder, environ):
        self.folder = folder
        self.environ = {**environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = []
        for name in ("state", *(f"tmp-n{node}" for node in range(1, N_NODES + 1))):
            (folder / name).mkdir()
        first = free_ports(N_NODES + 1)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=folder,
                port=first,
                first=first + 1,
                last=first + N_NODES,
                n_nodes=N_NODES,
            )
        )
        self._start_munge()
        self._daemon("slurmctld", "-D", "-f", folder / "slurm.conf")
        self.nodes = {f"n{node}": self._start_node(f"n{node}") for node in range(1, N_NODES + 1)}
        self.wait_for_nodes()

    def _start_munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.wait_for("munge", (self.folder / "munge.socket").exists)

    def _start_node(self, name):
        return self._daemon("slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", name)

    def wait_for_nodes(self):
        """Return when all nodes are idle: what earlier jobs left there is gone."""
        count = ("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D")
        self.wait_for("idle nodes", lambda: self.client(*count).strip() == str(N_NODES))

    def silence_node(self, name):
        """Stop all that runs on a node, as if its network was cut; return the pids, parents before their children."""
        ranks = []
        for pid in self.processes():
            if f"SLURMD_NODENAME={name}" in environ_of(pid):
                ranks.append(pid)
        shepherds = set(map(parent_of, ranks)) - set(ranks)
        assert all(name_of(pid).startswith("slurmstepd") for pid in shepherds), shepherds
        pids = [self.nodes[name].pid, *sorted({*shepherds, *ranks}, key=start_time_of)]
        kill_all(pids, signal.SIGSTOP)
        return pids

    def kill_node(self, name):
        """Kill all that runs on a node, as if its plug was pulled; return the pids.

        Stopped first, that none may see another one die; and children before their parents, as the kernel continues
        stopped children when their parent dies, if they are a process group of their own.
        """
        pids = self.silence_node(name)
        kill_all(reversed(pids), signal.SIGKILL)
        self.nodes[name].wait(10)
        return pids

    def restart_node(self, name):
        self.daemons.remove(self.nodes[name])
        self.nodes[name] = self._start_node(name)

    def processes(self):
        """Return the pids of what runs in jobs of this Slurm."""
        needle = f"SLURM_CONF={self.folder}/slurm.conf"
        return [int(entry.name) for entry in Path("/proc").iterdir() if needle in environ_of(entry.name)]

    def _daemon(self, *command):
        log = open(self.folder / f"{command[0]}-{len(self.daemons)}.out", "w")
        with log:
            daemon = subprocess.Popen(
                list(map(str, command)), env=self.environ, stdout=log, stderr=log, cwd=self.folder
            )
        self.daemons.append(daemon)
        return daemon

    def client(self, *command, cwd=None, environ=None, timeout_s=60):
        """Run a client command and return what it prints. One that only asks is repeated: slurmctld may be busy."""
        if command[0] in ("sinfo", "squeue") or "show" in command:
            n_tries = 5
        else:
            n_tries = 1
        for _ in range(n_tries):
            done = subprocess.run(
                list(map(str, command)),
                env={**self.environ, **(environ or {})},
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            if done.returncode == 0:
                return done.stdout
        pytest.fail(f"{command}: {done.stderr}{self.logs()}")

    def fact(self, job, name):
        """Return what Slurm says of a job, such as JobState: RUNNING, COMPLETED..."""
        text = self.client("scontrol", "--oneliner", "show", "job", job)
        return text.split(f" {name}=")[1].split()[0]

    def wait_for(self, awaited_event, is_true, timeout_s=60, describe=str):
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout_s} s for {awaited_event}: {describe()}{self.logs()}")
            time.sleep(0.1)

    def logs(self):
        return "".join(f"\n-- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def stop(self):
        """End the daemons, and what slurmd started, by pid."""
        for job in subprocess.run(
            ["squeue", "-h", "-o", "%A"], env=self.environ, capture_output=True, text=True
        ).stdout.split():
            subprocess.run(["scancel", "--signal=KILL", "--full", job], env=self.environ, check=False)
        time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        deadline = time.monotonic() + 20
        for daemon in self.daemons:
            try:
                daemon.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # a slurmd waits for its threads, which may wait for a node that is gone
                daemon.kill()
                daemon.wait(10)
        kill_all(self.processes(), signal.SIGKILL)


class Job:
    """A batch job, submitted with one of the repository's recipes from a folder that stands for the repository."""

    def __init__(self, slurm, folder, recipe, sbatch, options, environ):
        names = []
        for option in sbatch:
            if option.startswith("--job-name="):
                names.append(option.partition("=")[2])
        self.slurm = slurm
        self.folder = folder
        self.name = (names or [f"hpcdist-{recipe}"])[0]
        self.run_dir = folder / environ.get("RUN_DIR", f"runs/{self.name}")
        command = ("sbatch", "--parsable", *sbatch, f"slurm/{recipe}.sbatch", *options)
        self.id = slurm.client(*command, cwd=folder, environ=environ).strip()

    @property
    def state(self):
        return self.slurm.fact(self.id, "JobState")

    @property
    def log(self):
        path = self.folder / f"{self.name}-{self.id}.log"
        if path.exists():
            return path.read_text(errors="replace")
        return ""

    @property
    def n_restarts(self):
        return int(self.slurm.fact(self.id, "Restarts"))

    @property
    def nodes(self):
        return self.slurm.client("scontrol", "show", "hostnames", self.slurm.fact(self.id, "NodeList")).split()

    @property
    def decision(self):
        return json.loads((self.run_dir / "decision.json").read_text())

    def wait_for(self, awaited_event, is_true, timeout_s=60):
        """Wait; a job that ends meanwhile fails the test."""

        def is_true_or_ended():
            return is_true() or (self.state in ENDS and self._fail(awaited_event, is_true))

        self.slurm.wait_for(awaited_event, is_true_or_ended, timeout_s, lambda: self.log[-3000:])

    def _fail(self, awaited_event, is_true):
        if not is_true():
            pytest.fail(f"job {self.id} is {self.state} without {awaited_event}:\n{self.log[-3000:]}")
        return True

    def wait_for_text(self, text, count=1, timeout_s=60):
        self.wait_for(repr(text), lambda: self.log.count(text) >= count, timeout_s)

    def end(self, timeout_s=120):
        """Wait for the job's end; return its state and its exit code."""
        self.slurm.wait_for(
            f"the end of job {self.id}", lambda: self.state in ENDS, timeout_s, lambda: self.log[-3000:]
        )
        return self.state, int(self.slurm.fact(self.id, "ExitCode").split(":")[0])

    def wait_for_restart(self, count):
        self.wait_for(f"restart {count}", lambda: self.n_restarts == count)

    def wait_for_training(self, attempt=1):
        """Return when an attempt has made some steps and saved some of them."""

        def is_training():
            return any(self.run_dir.glob(f"checkpoints/step-*-{attempt:04d}.h5"))

        self.wait_for(f"a checkpoint of attempt {attempt}", is_training, 120)

    def final_state(self):
        return final_state(self.run_dir)

    def finish(self, timeout_s=120):
        """Wait until the job has finished well; return its log."""
        assert self.end(timeout_s) == ("COMPLETED", 0), self.log[-3000:]
        assert self.decision["decision"] == "finished"
        return self.log


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return a folder with a small MNIST: four steps of 16 rows are an epoch."""
    folder = tmp_path_factory.mktemp("data")
    numbers = np.random.default_rng(0)
    for name, count in (("train", 64), ("t10k", 16)):
        for kind, array in (
            ("images-idx3", numbers.integers(0, 256, (count, 8, 8), np.uint8)),
            ("labels-idx1", numbers.integers(0, 10, count, np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return folder


@pytest.fixture(scope="session")
def options(data):
    """Return options of jobs/train.py: 240 steps, four replicas whatever the number of ranks."""
    return ("--data", data, "--batch", 16, "--epochs", 60, "--save-every", 20, "--replicas", 4)


@pytest.fixture(scope="session")
def run_unbroken(slurm, root, options, tmp_path_factory):
    """Return run_unbroken(): what a run leaves that is never stopped, of one process, without Slurm."""
    state_by_epochs = {}

    def run_unbroken(epochs):
        if epochs not in state_by_epochs:
            run_dir = tmp_path_factory.mktemp("unbroken")
            more = ("--epochs", epochs, "--run-dir", run_dir)
            slurm.client(sys.executable, root / "jobs" / "train.py", *options, *more, timeout_s=240)
            state_by_epochs[epochs] = final_state(run_dir)
        return state_by_epochs[epochs]

    return run_unbroken


@pytest.fixture(scope="session")
def unbroken(run_unbroken):
    """Return what an unbroken run with `options` leaves."""
    return run_unbroken(60)


@pytest.fixture
def folder(root, tmp_path):
    """Return a folder that stands for the repository: logs and run folders of the test are in it."""
    for name in ("slurm", "jobs"):
        (tmp_path / name).symlink_to(root / name)
    return tmp_path


@pytest.fixture
def submit(slurm, folder):
    """Return submit(): it starts a job, by default on two nodes with a rank on each. Its remains are ended."""
    jobs = []

    def submit(recipe, *options, nodes=2, ranks=1, sbatch=(), environ=None):
        placement = ("--exclusive", f"--nodes={nodes}", f"--ntasks-per-node={ranks}")
        environ = {"PROBE_PACE_S": "0.05", **(environ or {})}
        jobs.append(Job(slurm, folder, recipe, (*placement, *sbatch), options, environ))
        return jobs[-1]

    yield submit
    for job in jobs:
        subprocess.run(["scancel", "--quiet", job.id], env=slurm.environ, check=False, timeout=30, capture_output=True)
    slurm.wait_for_nodes()


@pytest.fixture
def preempt(slurm, folder):
    """Return preempt(job): a job of more importance takes all nodes, until the job is in the queue again.

    It returns what the job had decided.
    """

    def preempt(job):
        n_restarts = job.n_restarts
        options = ("--partition=high", "--exclusive", f"--nodes={N_NODES}", "--time=1", "--output=/dev/null")
        slurm.client("sbatch", *options, "--wrap", "true", cwd=folder)
        job.wait_for_text("to be requeued: ", n_restarts + 1)
        decision = job.decision
        job.wait_for_restart(n_restarts + 1)
        return decision

    return preempt


@pytest.fixture(scope="session")
def slurm(clean_environ, root):
    missing = []
    for program in PROGRAMS:
        if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin"):
            missing.append(program)
    if missing:
        reason = f"{', '.join(missing)} not installed"
    elif os.geteuid():
        reason = "it takes root"
    else:
        reason = ""
    if reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI runs a real Slurm: {reason}")
        pytest.skip(f"a private Slurm cannot be started: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-slurm-"))
    folder.chmod(0o755)
    running = None
    try:
        path = f"{clean_environ['PATH']}:/usr/sbin"
        modules = os.pathsep.join([str(root / "tests" / "slurm" / "probe"), str(root)])
        slurm_environ = {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
        running = Slurm(folder, {**clean_environ, **slurm_environ})
        yield running
    finally:
        if running is not None:
            running.stop()
        shutil.rmtree(folder)
