"""Groups whose ranks believe to be on several hosts: what happens between hosts, on one machine."""

from hpcdist.collectives.group import Group

#: Ranks per host; None: ranks take turns.
HOSTS = {"1 each": [1] * 9, "2 each": [2] * 9, "3 and rest": [3, 9], "1 and rest": [1, 9], "dealt": None}


def kind_of_group(hosts, size):
    """Return a class of groups of `size` ranks on made-up hosts: a name of HOSTS, or how many ranks each one has."""
    sizes = HOSTS[hosts] if isinstance(hosts, str) else [hosts] * size

    class MadeUpHosts(Group):
        def _split_node(self):
            return self.comm.Split(host_numbers(sizes, size)[self.rank], self.rank)

    return MadeUpHosts


def host_numbers(sizes, size):
    if sizes is None:
        return [rank % 2 for rank in range(size)]
    return [host for host, n_ranks in enumerate(sizes) for _ in range(n_ranks)][:size]
