"""What `hpcdist doctor` concludes from facts about ranks and hosts: one line each, with the cure. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Beginning of the lines that ranks print for doctor: launchers pass on what ranks print, from any host.
MARK = "hpcdist-doctor: "
#: A host with less than this part of the median is slow.
SLOW = 0.6
#: Times of different hosts are compared: checkpoints and logs carry them.
MAX_SKEW_S = 1.0
#: MPI libraries keep their shared memory there; containers have 64 MiB by default.
MIN_SHM_BYTES = 128 << 20
#: What the MPI library says of GPU memory, by `RankFacts.is_cuda_aware`.
_CUDA_ANSWERS = {
    True: "takes GPU memory",
    False: "takes no GPU memory",
    None: "does not say whether it takes GPU memory",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "ok", "warn" or "fail".
        topic: subject that was looked at.
        text: result.
        cure: advice to the user. Empty where all is well.
    """

    level: str
    topic: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.topic:13}  {self.text}"
        if self.cure:
            line += f"; {self.cure}"
        return line


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows.

    Attributes:
        rank: number of the rank in the job.
        host: name of its host.
        task: its role and index, such as "worker 0".
        cores: numbers of the cores that it may use.
        n_host_cores: number of cores of its host.
        omp_threads: value of OMP_NUM_THREADS. 0 where it is not set.
        n_gpus: number of GPUs that it may use.
        copy_bytes_s: bytes per second of a copy in memory, while all ranks make one.
        shm_bytes: bytes that are free in /dev/shm.
        can_share: whether the ranks of its host can share memory.
        skew_s: time of its clock less that of rank 0.
        latency_s: time of a small message between the rank and rank 0, one way. 0 on rank 0's host.
        link_bytes_s: bytes per second of a large message between the rank and rank 0. 0 on rank 0's host.
        folder_error: why it does not see what rank 0 has put into the run folder. Empty where it does.
        pmi: how the launcher tells ranks of each other: "PMI", "PMIx" or "" for neither.
        is_cuda_aware: whether the MPI library says that it takes GPU memory. None where it does not say.
    """

    rank: int
    host: str
    task: str
    cores: tuple[int, ...]
    n_host_cores: int
    omp_threads: int
    n_gpus: int
    copy_bytes_s: float
    shm_bytes: int
    can_share: bool
    skew_s: float = 0.0
    latency_s: float = 0.0
    link_bytes_s: float = 0.0
    folder_error: str = ""
    pmi: str = ""
    is_cuda_aware: bool | None = None


@dataclass(frozen=True)
class _Host:
    """A host and its ranks, of which there is at least one."""

    name: str
    ranks: Sequence[RankFacts]

    @property
    def n_ranks(self) -> int:
        return len(self.ranks)

    @property
    def first_rank(self) -> RankFacts:
        """The rank that has measured the link to rank 0."""
        return self.ranks[0]

    @property
    def n_cores(self) -> int:
        """Cores of the host, usable or not."""
        return self.first_rank.n_host_cores

    @property
    def n_gpus(self) -> int:
        """GPUs that its ranks may use."""
        return max(rank.n_gpus for rank in self.ranks)


def findings_of(ranks: Sequence[RankFacts], folder: str) -> Iterator[Finding]:
    """Yield what follows from the facts of all ranks.

    Args:
        ranks: facts of at least one rank, by rank.
        folder: run folder that was looked for. Empty for none.
    """
    hosts = _hosts_of(ranks)
    yield _world(ranks, hosts)
    yield _roles(ranks)
    yield _launch(ranks)
    for host in hosts:
        yield from _cores(host)
    for host in hosts:
        yield _memory(host)
    yield _gpus(hosts)
    yield from _copies(hosts)
    if len(hosts) > 1:
        remote_hosts = hosts[1:]
        yield from _links(remote_hosts)
        yield _latency(remote_hosts)
        yield from _clocks(remote_hosts)
    if folder:
        yield from _folder(ranks, folder)


def _hosts_of(ranks: Sequence[RankFacts]) -> list[_Host]:
    """Return the hosts in the order of their first ranks: the host of rank 0 is the first."""
    ranks_by_host: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        ranks_by_host.setdefault(rank.host, []).append(rank)
    return [_Host(name, host_ranks) for name, host_ranks in ranks_by_host.items()]


def _world(ranks: Sequence[RankFacts], hosts: Sequence[_Host]) -> Finding:
    per_host = ", ".join(f"{host.n_ranks} on {host.name}" for host in hosts)
    return Finding("ok", "world", f"{len(ranks)} ranks: {per_host}")


def _roles(ranks: Sequence[RankFacts]) -> Finding:
    counts: Counter[str] = Counter()
    for rank in ranks:
        role = rank.task.split()[0]
        counts[role] += 1
    texts = [f"{role} {count}" for role, count in counts.items()]
    return Finding("ok", "roles", ", ".join(texts))


def _launch(ranks: Sequence[RankFacts]) -> Finding:
    """Return how the ranks found each other, and what the MPI library says of GPU memory, which it never gets."""
    kinds = sorted({rank.pmi or "neither PMI nor PMIx" for rank in ranks})
    answer = _CUDA_ANSWERS[ranks[0].is_cuda_aware]
    text = f"{', '.join(kinds)}; the MPI library {answer}, which hpcdist does not need"
    if len(kinds) > 1:
        return Finding("warn", "launch", text, "start all ranks by one launcher")
    return Finding("ok", "launch", text)


# -- cores ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Binding:
    """How the cores of a host are divided among its ranks.

    Attributes:
        n_usable: number of cores that at least one rank may use.
        is_shared: whether a core is shared by several ranks.
        n_per_rank: number of cores for each rank. The smallest number if ranks are bound differently.
    """

    n_usable: int
    is_shared: bool
    n_per_rank: int


def _binding_of(host: _Host) -> _Binding:
    usable_cores: set[int] = set()
    counts: list[int] = []
    for rank in host.ranks:
        usable_cores.update(rank.cores)
        counts.append(len(rank.cores))
    n_usable = len(usable_cores)
    is_shared = sum(counts) > n_usable
    n_per_rank = min(counts)
    if is_shared:
        n_per_rank = n_usable // host.n_ranks
    return _Binding(n_usable, is_shared, n_per_rank)


def _cores(host: _Host) -> Iterator[Finding]:
    binding = _binding_of(host)
    yield _division(host, binding)
    threads = max(rank.omp_threads for rank in host.ranks)
    most_threads = max(1, binding.n_per_rank)
    if threads > most_threads:
        yield Finding(
            "warn",
            "threads",
            f"OMP_NUM_THREADS={threads} for {binding.n_per_rank} cores per rank of {host.name}",
            f"set it to {most_threads}, or leave it out",
        )


def _division(host: _Host, binding: _Binding) -> Finding:
    """Return whether the ranks of a host have the cores that they can have."""
    if host.n_ranks > binding.n_usable:
        return Finding(
            "warn",
            "cores",
            f"{host.n_ranks} ranks on the {binding.n_usable} cores of {host.name} that they may use",
            "start fewer ranks, or ask for more cores (--cpus-per-task)",
        )
    is_bound_to_one = not binding.is_shared and binding.n_per_rank == 1
    if is_bound_to_one and host.n_cores >= 4 * binding.n_usable:
        n_possible = host.n_cores // host.n_ranks
        return Finding(
            "warn",
            "cores",
            f"each rank is bound to 1 of the {host.n_cores} cores of {host.name}",
            f"bind to more (--cpus-per-task={n_possible}, or --bind-to none)",
        )
    kind = "shared by all" if binding.is_shared else "of its own"
    text = f"{binding.n_per_rank} for each rank of {host.name}, {kind}"
    return Finding("ok", "cores", text)


# -- memory and GPUs -----------------------------------------------------------------------------------------------


def _memory(host: _Host) -> Finding:
    if not all(rank.can_share for rank in host.ranks):
        return Finding(
            "warn",
            "shared memory",
            f"ranks of {host.name} cannot share memory",
            "let containers share the host's process ids, or raise the memory limit; sums go by MPI meanwhile",
        )
    free_bytes = min(rank.shm_bytes for rank in host.ranks)
    if free_bytes < MIN_SHM_BYTES:
        free_mib = free_bytes >> 20
        return Finding(
            "warn",
            "shared memory",
            f"{free_mib} MiB are free in /dev/shm of {host.name}, where MPI libraries keep theirs",
            "give the container more (--shm-size), or clean up there",
        )
    return Finding("ok", "shared memory", f"ranks of {host.name} share memory")


def _gpus(hosts: Sequence[_Host]) -> Finding:
    has_gpus = False
    shortages: list[str] = []
    for host in hosts:
        if host.n_gpus == 0:
            continue
        has_gpus = True
        if host.n_gpus < host.n_ranks:
            shortage = f"{host.n_gpus} for {host.n_ranks} ranks of {host.name}"
            shortages.append(shortage)
    if shortages:
        cure = "start as many ranks on a host as it has GPUs"
        return Finding("warn", "GPUs", ", ".join(shortages), cure)
    if not has_gpus:
        return Finding("ok", "GPUs", "none: ranks compute on the host")
    return Finding("ok", "GPUs", "one for each rank")


# -- speeds and clocks ---------------------------------------------------------------------------------------------


def _copies(hosts: Sequence[_Host]) -> Iterator[Finding]:
    speeds: dict[str, float] = {}
    for host in hosts:
        speeds[host.name] = min(rank.copy_bytes_s for rank in host.ranks)
    yield from _speeds("copies", "in memory", speeds)


def _links(remote_hosts: Sequence[_Host]) -> Iterator[Finding]:
    speeds: dict[str, float] = {}
    for host in remote_hosts:
        speeds[host.name] = host.first_rank.link_bytes_s
    yield from _speeds("links", "from rank 0", speeds)


def _speeds(topic: str, transfer: str, speeds: Mapping[str, float]) -> Iterator[Finding]:
    """Yield every host that is much slower than the median, or else the median.

    Args:
        topic: topic of the findings.
        transfer: text that says what was transferred.
        speeds: bytes per second of each host.
    """
    median = statistics.median(speeds.values())
    median_text = f"{median / 1e9:.2f}"
    has_slow = False
    for host, speed in speeds.items():
        if speed < SLOW * median:
            has_slow = True
            speed_text = f"{speed / 1e9:.2f}"
            yield Finding(
                "warn",
                topic,
                f"{speed_text} GB/s {transfer} on {host}, {median_text} on most",
                f"look for other programs there, or leave it out (--exclude={host})",
            )
    if not has_slow:
        yield Finding("ok", topic, f"{median_text} GB/s {transfer} for each rank")


def _latency(remote_hosts: Sequence[_Host]) -> Finding:
    latency_s = statistics.median(host.first_rank.latency_s for host in remote_hosts)
    latency_us = 1e6 * latency_s
    return Finding("ok", "latency", f"{latency_us:.0f} us one way")


def _clocks(remote_hosts: Sequence[_Host]) -> Iterator[Finding]:
    """Yield every host whose clock is wrong, or else the largest difference."""
    has_wrong = False
    largest_s = 0.0
    for host in remote_hosts:
        skew_s = host.first_rank.skew_s
        largest_s = max(largest_s, abs(skew_s))
        if abs(skew_s) > MAX_SKEW_S:
            has_wrong = True
            text = f"that of {host.name} differs by {skew_s:.1f} s"
            yield Finding("warn", "clock", text, "start its time service (chrony)")
    if not has_wrong:
        largest_ms = 1e3 * largest_s
        yield Finding("ok", "clock", f"within {largest_ms:.1f} ms")


def _folder(ranks: Sequence[RankFacts], folder: str) -> Iterator[Finding]:
    errors_by_host: dict[str, str] = {}
    for rank in ranks:
        if rank.folder_error:
            errors_by_host[rank.host] = rank.folder_error
    for host, error in errors_by_host.items():
        text = f"{folder} on {host} {error}"
        yield Finding("fail", "run folder", text, "use a folder that all hosts share")
    if not errors_by_host:
        yield Finding("ok", "run folder", f"{folder}: all hosts see it, and what is renamed there")
