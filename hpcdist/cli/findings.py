"""What `hpcdist doctor` concludes from facts about ranks and hosts: one line each, with the cure. Pure."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: What the lines that ranks print for doctor begin with: launchers pass on what ranks print, from any host.
MARK = "hpcdist-doctor: "
#: A host with less than this part of the median is slow.
SLOW = 0.6
#: Times of different hosts are compared: checkpoints and logs carry them.
MAX_SKEW_S = 1.0
#: MPI libraries keep their shared memory there; containers have 64 MiB by default.
MIN_SHM_BYTES = 128 << 20


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        level: "ok", "warn" or "fail".
        topic: what was looked at.
        text: what was found.
        cure: what to do; empty where all is well.
    """

    level: str
    topic: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.topic:13}  {self.text}" + (
            f"; {self.cure}" if self.cure else ""
        )


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows.

    Attributes:
        rank: in the job. host: name of its host. task: its role.
        cores: numbers of the cores that it may use.
        n_host_cores: how many its host has.
        omp_threads: OMP_NUM_THREADS; 0 where it is not set.
        n_gpus: GPUs that it may use.
        copy_bytes_s: bytes per second of a copy in memory, while all ranks make one.
        shm_bytes: free in /dev/shm.
        can_share: whether the ranks of its host can share memory.
        skew_s: its clock less that of rank 0.
        latency_s: one way of a small message between it and rank 0. link_bytes_s: of a large one; 0 on rank 0's host.
        pmi: how the launcher tells ranks of each other: "PMI", "PMIx" or "" for none.
        is_cuda_aware: whether the MPI library says that it takes GPU memory; None where it does not say.
        folder_error: why it does not see what rank 0 has put into the run folder; empty where it does.
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


def findings_of(ranks: Sequence[RankFacts], folder: str) -> Iterator[Finding]:
    """Yield what follows from the facts of all ranks, by rank.

    Args:
        ranks: at least one.
        folder: the run folder that was looked for; empty for none.
    """
    hosts: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    per_host = ", ".join(f"{len(host_ranks)} on {host}" for host, host_ranks in hosts.items())
    yield Finding("ok", "world", f"{len(ranks)} ranks: {per_host}")
    yield _roles(ranks)
    yield _launch(ranks)
    for host, host_ranks in hosts.items():
        yield from _cores(host, host_ranks)
    yield from _memory(hosts)
    yield _gpus(hosts)
    yield from _speeds(
        "copies", "in memory", {host: _least_copy(host_ranks) for host, host_ranks in hosts.items()}
    )
    if len(hosts) > 1:
        yield from _between_hosts(hosts)
    if folder:
        yield from _folder(ranks, folder)


def _roles(ranks: Sequence[RankFacts]) -> Finding:
    counts: dict[str, int] = {}
    for rank in ranks:
        role = rank.task.split()[0]
        counts[role] = counts.get(role, 0) + 1
    return Finding("ok", "roles", ", ".join(f"{role} {count}" for role, count in counts.items()))


def _launch(ranks: Sequence[RankFacts]) -> Finding:
    """Return how the ranks found each other, and what the MPI library says of GPU memory, which it never gets."""
    kinds = sorted({rank.pmi or "neither PMI nor PMIx" for rank in ranks})
    words = {
        True: "takes GPU memory",
        False: "takes no GPU memory",
        None: "does not say whether it takes GPU memory",
    }
    text = f"{', '.join(kinds)}; the MPI library {words[ranks[0].is_cuda_aware]}, which hpcdist does not need"
    if len(kinds) > 1:
        return Finding("warn", "launch", text, "start all ranks by one launcher")
    return Finding("ok", "launch", text)


def _cores(host: str, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    used = {core for rank in ranks for core in rank.cores}
    least = min(len(rank.cores) for rank in ranks)
    is_shared = sum(len(rank.cores) for rank in ranks) > len(used)
    share = len(used) // len(ranks) if is_shared else least
    threads = max(rank.omp_threads for rank in ranks)
    if len(ranks) > len(used):
        yield Finding(
            "warn",
            "cores",
            f"{len(ranks)} ranks on the {len(used)} cores of {host} that they may use",
            "start fewer ranks, or ask for more cores (--cpus-per-task)",
        )
    elif not is_shared and least == 1 and ranks[0].n_host_cores >= 4 * len(used):
        yield Finding(
            "warn",
            "cores",
            f"each rank is bound to 1 of the {ranks[0].n_host_cores} cores of {host}",
            f"bind to more (--cpus-per-task={ranks[0].n_host_cores // len(ranks)}, or --bind-to none)",
        )
    else:
        kind = "shared by all" if is_shared and len(ranks) > 1 else "of its own"
        yield Finding("ok", "cores", f"{share} for each rank of {host}, {kind}")
    if threads > max(1, share):
        yield Finding(
            "warn",
            "threads",
            f"OMP_NUM_THREADS={threads} for {share} cores per rank of {host}",
            f"set it to {max(1, share)}, or leave it out",
        )


def _memory(hosts: dict[str, list[RankFacts]]) -> Iterator[Finding]:
    for host, ranks in hosts.items():
        if not all(rank.can_share for rank in ranks):
            cure = "let containers share the host's process ids, or raise the memory limit; sums go by MPI meanwhile"
            yield Finding("warn", "shared memory", f"ranks of {host} cannot share memory", cure)
        elif (free := min(rank.shm_bytes for rank in ranks)) < MIN_SHM_BYTES:
            text = (
                f"{free >> 20} MiB are free in /dev/shm of {host}, where MPI libraries keep theirs"
            )
            yield Finding(
                "warn",
                "shared memory",
                text,
                "give the container more (--shm-size), or clean up there",
            )
        else:
            yield Finding("ok", "shared memory", f"ranks of {host} share memory")


def _gpus(hosts: dict[str, list[RankFacts]]) -> Finding:
    lacking = [
        f"{max(rank.n_gpus for rank in ranks)} for {len(ranks)} ranks of {host}"
        for host, ranks in hosts.items()
        if 0 < max(rank.n_gpus for rank in ranks) < len(ranks)
    ]
    if lacking:
        return Finding(
            "warn", "GPUs", ", ".join(lacking), "start as many ranks on a host as it has GPUs"
        )
    if all(rank.n_gpus == 0 for ranks in hosts.values() for rank in ranks):
        return Finding("ok", "GPUs", "none: ranks compute on the host")
    return Finding("ok", "GPUs", "one for each rank")


def _least_copy(ranks: Sequence[RankFacts]) -> float:
    return min(rank.copy_bytes_s for rank in ranks)


def _speeds(topic: str, transfer: str, speeds: dict[str, float]) -> Iterator[Finding]:
    """Yield the median speed, and every host that is much slower."""
    median = statistics.median(speeds.values())
    slow = {host: speed for host, speed in speeds.items() if speed < SLOW * median}
    for host, speed in slow.items():
        text = f"{speed / 1e9:.2f} GB/s {transfer} on {host}, {median / 1e9:.2f} on most"
        yield Finding(
            "warn",
            topic,
            text,
            f"look for other programs there, or leave it out (--exclude={host})",
        )
    if not slow:
        yield Finding("ok", topic, f"{median / 1e9:.2f} GB/s {transfer} for each rank")


def _between_hosts(hosts: dict[str, list[RankFacts]]) -> Iterator[Finding]:
    remote_ranks = {host: ranks[0] for host, ranks in list(hosts.items())[1:]}
    yield from _speeds(
        "links", "from rank 0", {host: rank.link_bytes_s for host, rank in remote_ranks.items()}
    )
    latency_s = statistics.median(rank.latency_s for rank in remote_ranks.values())
    yield Finding("ok", "latency", f"{1e6 * latency_s:.0f} us one way")
    skewed = {
        host: rank.skew_s for host, rank in remote_ranks.items() if abs(rank.skew_s) > MAX_SKEW_S
    }
    for host, skew_s in skewed.items():
        yield Finding(
            "warn",
            "clock",
            f"that of {host} differs by {skew_s:.1f} s",
            "start its time service (chrony)",
        )
    if not skewed:
        yield Finding(
            "ok",
            "clock",
            f"within {max(abs(rank.skew_s) for rank in remote_ranks.values()) * 1e3:.1f} ms",
        )


def _folder(ranks: Sequence[RankFacts], folder: str) -> Iterator[Finding]:
    wrong = {rank.host: rank.folder_error for rank in ranks if rank.folder_error}
    for host, error in wrong.items():
        yield Finding(
            "fail", "run folder", f"{folder} on {host} {error}", "use a folder that all hosts share"
        )
    if not wrong:
        yield Finding("ok", "run folder", f"{folder}: all hosts see it, and what is renamed there")
