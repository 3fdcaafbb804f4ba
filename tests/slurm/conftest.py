"""A private Slurm on this machine: munged, slurmctld and two slurmds from Debian, in one folder, ended by pid."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
N_NODES = 2
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
NodeName=n[1-{n_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES State=UP
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
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
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """The daemons, and the clients that talk to them."""

    def __init__(self, folder, environ):
        self.folder = folder
        self.environ = {**environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = []
        for name in ("state", *(f"tmp-n{node}" for node in range(1, N_NODES + 1))):
            (folder / name).mkdir()
        first = next(port for port in free_ports(20) if port + N_NODES < 65536)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=folder,
                port=free_ports(1)[0],
                first=first,
                last=first + N_NODES - 1,
                n_nodes=N_NODES,
            )
        )
        self._start_munge()
        self._daemon("slurmctld", "-D", "-f", folder / "slurm.conf")
        for node in range(1, N_NODES + 1):
            self._daemon("slurmd", "-D", "-f", folder / "slurm.conf", "-N", f"n{node}")
        self.wait_for(
            "idle nodes", lambda: self.client("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(N_NODES)
        )

    def _start_munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.wait_for("munge", (self.folder / "munge.socket").exists)

    def _daemon(self, *command):
        log = open(self.folder / f"{command[0]}-{len(self.daemons)}.out", "w")
        with log:
            self.daemons.append(
                subprocess.Popen(
                    [str(part) for part in command], env=self.environ, stdout=log, stderr=log, cwd=self.folder
                )
            )

    def client(self, *command, cwd=None, environ=None):
        """Run a client command and return what it prints."""
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.environ, **(environ or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout

    def state(self, job):
        """Return a job's state, such as RUNNING or COMPLETED."""
        text = self.client("scontrol", "--oneliner", "show", "job", job)
        return text.split("JobState=")[1].split()[0]

    def wait_for(self, what, is_true, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout_s} s for {what}{self.logs()}")
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
        for daemon in self.daemons:
            daemon.wait(20)


@pytest.fixture(scope="session")
def slurm(clean_environ):
    missing = [program for program in PROGRAMS if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin")]
    reason = f"{', '.join(missing)} not installed" if missing else "it takes root" if os.geteuid() else ""
    if reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI runs a real Slurm: {reason}")
        pytest.skip(f"a private Slurm cannot be started: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-slurm-"))
    folder.chmod(0o755)
    running = None
    try:
        path = f"{clean_environ['PATH']}:/usr/sbin"
        running = Slurm(folder, {**clean_environ, "PATH": path, "OMP_NUM_THREADS": "1"})
        yield running
    finally:
        if running is not None:
            running.stop()
        shutil.rmtree(folder)
