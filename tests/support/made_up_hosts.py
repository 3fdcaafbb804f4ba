"""Groups whose ranks believe that they are on several hosts, to test on one machine what happens between hosts."""

from hpcdist.collectives.group import Group
from hpcdist.runtime.hosts import Hosts

#: Ranks per host; None: ranks alternate between two hosts.
HOSTS = {"1 each": [1] * 9, "2 each": [2] * 9, "3 and rest": [3, 9], "1 and rest": [1, 9], "alternating": None}


def group_on(hosts, comm, world, **options):
    """Return a group of `comm` on made-up hosts: a name of HOSTS, or how many ranks each one has. Collective."""
    if isinstance(hosts, str):
        sizes = HOSTS[hosts]
    else:
        sizes = [hosts] * comm.size
    node_comm = comm.Split(host_numbers(sizes, comm.size)[comm.rank], comm.rank)
    return Group(comm, world, hosts=Hosts(comm, world.wait, node_comm), **options)


def host_numbers(sizes, size):
    if sizes is None:
        return [rank % 2 for rank in range(size)]
    hosts = []
    for host, n_ranks in enumerate(sizes):
        hosts += [host] * n_ranks
    return hosts[:size]
