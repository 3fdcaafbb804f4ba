"""Histories of pushes over a network that repeats, loses and delays: a sample; ps_history.py has the sweep."""

import dataclasses
import re

import pytest
from ps_history import History

from hpcdist.ps.messages import Kind
from hpcdist.ps.server import Rules, Server


@pytest.mark.feature("parameter-servers.asynchronous-push-and-pull", "parameter-servers.bounded-staleness")
@pytest.mark.parametrize(("seed", "max_staleness"), [(1, 0), (2, 3), (3, None)])
def test_each_push_is_applied_once_whatever_the_network_does(seed, max_staleness):
    history = History(seed, max_staleness=max_staleness)
    assert history.run(600) == []
    assert history.summary()["duplicates that were not applied"] > 100


class WithoutNumbers(Server):
    """Applies what comes, however often."""

    def handle(self, message):
        self._received.clear()
        return super().handle(message)


class WithoutClocks(Server):
    """Lets every worker begin at once."""

    def __init__(self, packers, rules):
        super().__init__(packers, Rules())


class WithoutOwnWrites(Server):
    """Answers with values of before the push."""

    def handle(self, message):
        if message.kind is not Kind.STEP or message.worker != 1:
            return super().handle(message)
        before = self._values(message)
        before = dataclasses.replace(before, payload=before.payload.copy())  # the next answer takes its memory
        after = super().handle(message)
        return [before if reply.worker == 1 else reply for reply in after]


@pytest.mark.parametrize(
    ("make_server", "found"),
    [
        (WithoutNumbers, "acknowledged and"),
        (WithoutClocks, "begins step"),
        (WithoutOwnWrites, "changed nothing|acknowledged and"),
    ],
)
def test_the_checker_finds_servers_that_are_wrong(make_server, found):
    violations = History(1, max_staleness=1, make_server=make_server).run(3000)
    assert violations
    assert any(re.search(found, violation) for violation in violations), violations[:3]
