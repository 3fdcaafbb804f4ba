"""Fixtures for tests of the command."""

import pytest

from hpcdist.cli import main


@pytest.fixture
def hpcdist(capfd):
    """Return hpcdist(*arguments): exit code, and what was printed on both streams."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.main(list(map(str, arguments)))
        return ended.value.code, *capfd.readouterr()

    return run
