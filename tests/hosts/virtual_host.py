"""One host of `virtual_hosts.py`: a set of namespaces, and the process that keeps them."""

import os
import select
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
#: Seconds for what takes milliseconds: making links, starting a shell.
_SETUP_LIMIT_S = 20
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
#: What the first process of a host does. Ignored SIGCHLD: the kernel then reaps what is orphaned in the host. IPv6
#: would send its own packets over the links. UCX looks for network devices in /sys. Open MPI's daemons name folders in
#: TMPDIR by their process numbers, which hosts have in common: /run/tmp is a host's own.
_FIRST_PROCESS = """set -e
hostname "$0"
mount -t sysfs sysfs /sys
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/tmp
if [ -e /proc/sys/net/ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6; fi
ip link set lo up
trap '' CHLD
echo ready
exec cat
"""
_PROBE = """ip link add veth1 type veth peer name veth2 && ip link add br0 type bridge &&
mount -t tmpfs tmpfs /dev/shm && tc qdisc add dev veth1 root tbf rate 1gbit burst 32kb latency 10ms"""


def path_with_sbin(environ: Mapping[str, str]) -> str:
    """Return PATH with the folders that hold `ip` and `tc`, which a user's PATH may lack."""
    return f"{environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str:
    """Return why hosts cannot be made here, or an empty text."""
    path = path_with_sbin(os.environ)
    missing = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    if os.geteuid():
        return "it takes root"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", _PROBE], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=20
    )
    if tried.returncode == 0:
        return ""
    return f"namespaces or rate limits are refused: {tried.stderr.strip()}"


class Host:
    """A set of namespaces, kept by its first process, `pid`; `address` is where the others reach it."""

    def __init__(self, name: str, address: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self.address = address
        self._environ = environ
        self._keeper = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _FIRST_PROCESS, name],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            readable, _, _ = select.select([self._keeper.stdout], [], [], _SETUP_LIMIT_S)
            if not readable or self._keeper.stdout.readline() != b"ready\n":
                self._keeper.kill()
                raise RuntimeError(f"virtual hosts: {name} did not start: {self._keeper.stderr.read().decode()}")
            children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text()
            self.pid = int(children)
            self.keepers = (self._keeper.pid, self.pid)
            self.namespace = os.readlink(f"/proc/{self.pid}/ns/net")
        except BaseException:
            self.close()
            raise

    def enter(self, *namespaces: str) -> list[str]:
        """Return the beginning of a command that runs in this host, or in some of its namespaces."""
        chosen = namespaces or ("net", "uts", "ipc", "mount", "pid")
        return ["nsenter", "--target", str(self.pid), *(f"--{name}" for name in chosen)]

    def batch(self, program: str, lines: Sequence[str]) -> None:
        """Run lines of `ip` or `tc` in this host's network."""
        command = [*self.enter("net"), program, "-batch", "-"]
        done = subprocess.run(
            command,
            env=dict(self._environ),
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=_SETUP_LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(f"virtual hosts: {program} in {self.name}: {done.stderr}")

    def counters(self) -> dict[str, tuple[int, int]]:
        """Return (bytes received, bytes sent) of each network device of this host, since it was made."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]
        rows = []
        for name, numbers in (line.split(":") for line in lines):
            rows.append((name.strip(), numbers.split()))
        return {name: (int(numbers[0]), int(numbers[8])) for name, numbers in rows}

    def shared_memory(self) -> list[str]:
        """Return the names in this host's /dev/shm."""
        return sorted(os.listdir(f"/proc/{self.pid}/root/dev/shm"))

    def close(self) -> None:
        """End everything in the host, and so the host."""
        self._keeper.stdin.close()
        try:
            self._keeper.wait(5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # --kill-child: takes the first process along, and that all others
            self._keeper.wait(5)
        self._keeper.stdout.close()
        self._keeper.stderr.close()
