"""How the ranks of a test run report together."""

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  which torch imports at the first plan of a model otherwise

from hpcdist.runtime.mpi import MPI

#: Exit code of a run that a test has ended by its time, as of the command `timeout`.
_TOO_LATE = 124
#: Ranks report one after the other, in this time each.
_TURN_S = 0.2


class RankReports:
    """Hooks of pytest for a run on several ranks. Collective over all ranks, which run the same tests.

    Every rank gets the same outcome of every phase of a test, so that all run, or all leave out, the next one; rank 0
    alone reports. A test that takes too long ends the run: ranks that wait for each other cannot be interrupted.

    Args:
        config: of the run. Each rank gets temporary folders of its own, as pytest's shared ones are cleaned by whoever
            comes first.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._comm: MPI.Comm = MPI.COMM_WORLD.Dup()
        self._folder = config.option.basetemp = tempfile.mkdtemp(prefix="hpcdist-tests-")
        self._limit_s = float(config.getini("mpi_timeout"))
        self._silence: Any = None
        self._timer: threading.Timer | None = None
        self._failed: list[tuple[str, str]] = []
        self._path: Path | None = None  # file of the test that runs

    def pytest_report_header(self) -> str:
        """Name the library and the rank."""
        return f"{MPI.Get_library_version().splitlines()[0].strip()}, rank {self._comm.rank} of {self._comm.size}"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Let rank 0 alone report."""
        if self._comm.rank > 0:
            self._silence = open(os.devnull, "w")  # noqa: SIM115  it is closed with the session
            session.config.get_terminal_writer()._file = self._silence

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Freeze the objects of earlier test files, so that garbage collection skips them.

        Each plan of a model runs it. With 2,800 tests on two ranks, that took 180 s of 310.
        """
        if item.path != self._path:
            self._path = item.path
            gc.collect()
            gc.freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Clean up, once all ranks are here."""
        self._comm.Barrier()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._silence is not None:
            self._silence.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give every rank the same outcome."""
        report = yield
        outcomes = self._comm.allgather(
            (report.outcome, report.longreprtext if report.failed else "")
        )
        failed = [
            (rank, text) for rank, (outcome, text) in enumerate(outcomes) if outcome == "failed"
        ]
        if failed:
            ranks = ", ".join(str(rank) for rank, _ in failed)
            report.outcome = "failed"
            text = f"failed on rank {ranks} of {self._comm.size}; report of rank {failed[0][0]}:\n{failed[0][1]}"
            report.longrepr = text
            self._failed.append((report.nodeid, text))
        elif len({outcome for outcome, _ in outcomes}) > 1:
            report.outcome = "failed"
            report.longrepr = f"ranks disagree: {[outcome for outcome, _ in outcomes]}"
        return report

    # -- the time limit -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Limit the time of a test; pytest-timeout, where it has a limit, replaces this one."""
        mark = item.get_closest_marker("timeout")
        self._start(item, float(mark.args[0]) if mark is not None and mark.args else self._limit_s)
        try:
            return (yield)
        finally:
            self._stop()

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """Take the place of pytest-timeout's timers, which end one rank only."""
        self._start(item, settings.timeout)
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        """Stop the timer."""
        self._stop()
        return True

    def _start(self, item: pytest.Item, limit_s: float) -> None:
        def end() -> None:
            capture: Any = item.config.pluginmanager.getplugin("capturemanager")
            capture.suspend_global_capture()
            time.sleep(self._comm.rank * _TURN_S)  # so that the reports of ranks do not mix
            os.write(2, self._report_of_hang(item, limit_s).encode())
            # the first rank that ends lets the launcher kill the others
            time.sleep(self._comm.size * _TURN_S)
            os._exit(_TOO_LATE)

        self._stop()
        self._timer = threading.Timer(limit_s, end)
        self._timer.daemon = True
        self._timer.start()

    def _report_of_hang(self, item: pytest.Item, limit_s: float) -> str:
        """Return where this rank is; on rank 0 also what has failed before, as the run ends without a summary."""
        lines = (
            [f"\n{name} failed before:\n{text}\n" for name, text in self._failed]
            if self._comm.rank == 0
            else []
        )
        lines += [
            f"\n{item.nodeid}: more than {limit_s:g} s on rank {self._comm.rank}, which is here:\n"
        ]
        main_thread = threading.main_thread().ident
        frames = traceback.extract_stack(sys._current_frames()[main_thread or 0])
        first = next(
            (number for number, frame in enumerate(frames) if frame.filename == str(item.path)), 0
        )
        return "".join([*lines, *traceback.format_list(frames[first:])])

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
