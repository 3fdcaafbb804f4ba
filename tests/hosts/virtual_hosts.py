"""Several hosts on one machine: namespaces joined by rate-limited links, and MPI jobs that run in them.

A host has a network, hostname, /dev/shm, System V memory and process numbers of its own; files are shared, as on a
cluster. Each has `eth0`, one end of a veth pair whose other end is on one bridge, and the bridge is in a namespace
too: nothing has a name outside, so two runs cannot collide. A host lives as long as its first process, which ends
when the pipe from this process closes, and the kernel then ends everything in it: nothing is left even if this
process is killed.

    with VirtualHosts(2, rate_bits_per_s=1e9) as hosts:
        usable = hosts.calibrate()
        outcome = hosts.run([sys.executable, "program.py"], ranks_per_host=2, timeout_s=60)
        print(outcome.result, outcome.bytes_sent)

Only the standard library is used, so that benchmarks can import this too.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from host_job import Job, Outcome
from virtual_host import Host, path_with_sbin

HERE = Path(__file__).resolve().parent
BRIDGE = "br0"
SWITCH_ADDRESS = "10.77.0.254"
#: Every library is told to use the link between hosts: MPICH's UCX and libfabric, and torch's gloo.
_NETWORK = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
}
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
}


class VirtualHosts:
    """Hosts `host-0` to `host-(n-1)` at 10.77.0.1 and up, each on a link of its own to one switch. A context manager.

    Args:
        n_hosts: 1 to 200.
        rate_bits_per_s: of each link, in each direction, Ethernet headers included. A token bucket of `burst_bytes`
            on both ends of the link; what an idle link lets pass at once is `burst_bytes`, so messages of less than
            16 times that are flattered.
        burst_bytes: at least one packet of the kernel; more than 32 KiB flatters messages, less costs processor time.
        environ: for everything that is started; default: this process's.

    Raises:
        RuntimeError: when a host or a link cannot be made; `virtual_host.why_not()` says beforehand.
    """

    def __init__(
        self,
        n_hosts: int,
        rate_bits_per_s: float = 1e9,
        burst_bytes: int = 32 * 1024,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.environ = {**environ, "PATH": path_with_sbin(environ)}
        self.rate_bits_per_s = rate_bits_per_s
        self.burst_bytes = burst_bytes
        self.hosts: list[Host] = []
        self._jobs: list[Job] = []
        try:
            self.switch = Host("switch", SWITCH_ADDRESS, self.environ)
            self.hosts += [Host(f"host-{i}", f"10.77.0.{i + 1}", self.environ) for i in range(n_hosts)]
            self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "VirtualHosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self) -> None:
        """Make the bridge and the links, and limit both ends of each link.

        TCP hands the device units of up to 64 KiB. A bucket must hold two, else a late timer leaves the link idle: at
        32 KiB and the default unit a stream reached 0.75 of its rate, at 16 KiB units 0.956, which is all but headers.
        """
        units = f"gso_max_size {self.burst_bytes // 2}"
        bridge = [f"link add {BRIDGE} type bridge", f"address add {SWITCH_ADDRESS}/24 dev {BRIDGE}"]
        for number, host in enumerate(self.hosts):
            bridge.append(f"link add port{number} type veth peer name eth0 netns {host.pid}")
            bridge.append(f"link set port{number} master {BRIDGE} up")
            bridge.append(f"link set port{number} {units}")
        self.switch.batch("ip", [*bridge, f"link set {BRIDGE} up"])
        self.switch.batch("tc", [self._limit(f"port{number}") for number in range(len(self.hosts))])
        for host in self.hosts:
            host.batch("ip", [f"address add {host.address}/24 dev eth0", f"link set eth0 up {units}"])
            host.batch("tc", [self._limit("eth0")])

    def _limit(self, device: str) -> str:
        rate = int(self.rate_bits_per_s)
        burst = self.burst_bytes
        return f"qdisc add dev {device} root tbf rate {rate}bit burst {burst}b latency 100ms"

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each host has sent over its link since it was made.

        Counted by the kernel at the switch's end of the link. A host's traffic within itself is not in it; the few
        kilobytes by which the launcher starts and watches the ranks are. Headers are counted once per unit of up to
        `burst_bytes` / 2, not per packet: 1.005 times the payload of a stream. The rate limit counts every packet's.
        """
        counters = self.switch.counters()
        return [counters[f"port{number}"][0] for number in range(len(self.hosts))]

    def calibrate(self, seconds: float = 0.5) -> float:
        """Return the bytes/s of payload that one TCP stream carries from the first host to the second.

        Measured by the receiver after a fifth of `seconds`, when the stream has reached its rate.
        """
        first = self.hosts[0]
        second = self.hosts[1]
        program = [sys.executable, str(HERE / "stream.py")]
        receiver = subprocess.Popen(
            [*second.enter(), *program, "receive", second.address, str(seconds)],
            env=self.environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        with receiver:
            try:
                port = receiver.stdout.readline().strip()
                send = [*first.enter(), *program, "send", second.address, port]
                subprocess.run(send, env=self.environ, check=True, timeout=seconds + 30)
                return float(receiver.communicate(timeout=10)[0])
            finally:
                receiver.kill()

    def run(
        self,
        command: Sequence[object],
        ranks_per_host: int | Sequence[int],
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        mpirun: Path | None = None,
    ) -> Outcome:
        """Run an MPI job and return what became of it. Arguments as `start`.

        Raises:
            TimeoutError: when it has not ended within `timeout_s`; it was ended.
        """
        return self.start(command, ranks_per_host, environ, mpirun).wait(timeout_s)

    def start(
        self,
        command: Sequence[object],
        ranks_per_host: int | Sequence[int],
        environ: Mapping[str, str] | None = None,
        mpirun: Path | None = None,
    ) -> Job:
        """Start an MPI job. One at a time: ending it ends all that runs in the hosts.

        Args:
            command: what each rank runs.
            ranks_per_host: one number for all hosts, or one for each; 0 leaves a host out. Ranks are numbered by host.
            environ: added to the environment, before what makes MPI use the links.
            mpirun: of MPICH or of Open MPI 5; default: beside this Python.
        """
        if isinstance(ranks_per_host, int):
            counts = [ranks_per_host] * len(self.hosts)
        else:
            counts = ranks_per_host
        placed = []
        for host, count in zip(self.hosts, counts, strict=True):
            if count:
                placed.append((host, count))
        mpirun = mpirun or Path(sys.executable).parent / "mpirun"
        if _is_openmpi(mpirun):
            options = _openmpi_options
        else:
            options = _mpich_options
        pids = " ".join(f"{host.address}={host.pid}" for host in self.hosts)
        job = Job(
            [*self.switch.enter("net"), *map(str, (mpirun, *options(placed), *command))],
            {**self.environ, **_OPENMPI, **_NETWORK, **(environ or {}), "VIRTUAL_HOSTS": pids},
            self,
        )
        self._jobs.append(job)
        return job

    def processes(self, *hosts: Host) -> list[int]:
        """Return the pids of what runs in `hosts` (default: all, and the switch), but for what keeps them alive."""
        namespaces = {host.namespace for host in hosts or self._all()}
        keepers = set(itertools.chain.from_iterable(host.keepers for host in self._all()))
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.readlink(entry / "ns" / "net") in namespaces:
                    pids.append(int(entry.name))
            except OSError:  # it ended while we looked
                continue
        return sorted(set(pids) - keepers)

    def kill_processes(self) -> None:
        """End everything that runs in the hosts; the hosts stay."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """End every job, and take the hosts and their links away."""
        try:
            for job in self._jobs:
                job.kill()
        finally:
            for host in self._all():
                host.close()

    def _all(self) -> list[Host]:
        return [*self.hosts, *([self.switch] if hasattr(self, "switch") else [])]


def _is_openmpi(mpirun: Path) -> bool:
    version_query = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=True)
    return "Open MPI" in version_query.stdout


def _mpich_options(placed: Sequence[tuple[Host, int]]) -> list[object]:
    hosts = ",".join(f"{host.address}:{count}" for host, count in placed)
    n_ranks = sum(count for _, count in placed)
    agent = ["-launcher", "ssh", "-launcher-exec", HERE / "in_host.sh"]
    return [*agent, "-localhost", SWITCH_ADDRESS, "-iface", BRIDGE, "-hosts", hosts, "-n", n_ranks]


def _openmpi_options(placed: Sequence[tuple[Host, int]]) -> list[object]:
    hosts = ",".join(f"{host.address}:{count}" for host, count in placed)
    n_ranks = sum(count for _, count in placed)
    agent = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", HERE / "in_host.sh"]
    return [*agent, "--bind-to", "none", "--host", hosts, "-n", n_ranks]
