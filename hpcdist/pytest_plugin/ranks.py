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

#: Exit code of a run that a test has ended by its time, as from the command `timeout`.
_TOO_LATE = 124
#: Time in which each rank reports, one after the other.
_TURN_S = 0.2
#: A wrapper of the hook that makes a report: it gets the report, and returns it.
_Reporting = Generator[None, pytest.TestReport, pytest.TestReport]


class RankReports:
    """Hooks of pytest for a run on several ranks. Collective over all ranks, which run the same tests.

    Every rank gets the same outcome of every phase of a test, so that all run, or all leave out, the next one; rank 0
    alone reports. A test that takes too long ends the run: ranks that wait for each other cannot be interrupted.

    Args:
        config: configuration of the run. Each rank gets separate temporary folders, as the first rank would clean
            pytest's shared folders.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._comm: MPI.Comm = MPI.COMM_WORLD.Dup()
        self._folder = tempfile.mkdtemp(prefix="hpcdist-tests-")
        config.option.basetemp = self._folder
        self._limit_s = float(config.getini("mpi_timeout"))
        self._silence: Any = None
        self._timer: threading.Timer | None = None
        self._failed: list[tuple[str, str]] = []
        self._path: Path | None = None  # file of the test that runs

    def pytest_report_header(self) -> str:
        """Name the library and the rank."""
        version_lines = MPI.Get_library_version().splitlines()
        library = version_lines[0].strip()
        return f"{library}, rank {self._comm.rank} of {self._comm.size}"

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
    def pytest_runtest_makereport(self) -> _Reporting:
        """Give every rank the same outcome."""
        report = yield
        local_text = ""
        if report.failed:
            local_text = report.longreprtext
        results = self._comm.allgather((report.outcome, local_text))
        outcomes = [outcome for outcome, _ in results]
        failed_ranks = []
        for rank, outcome in enumerate(outcomes):
            if outcome == "failed":
                failed_ranks.append(rank)
        if failed_ranks:
            ranks = ", ".join(map(str, failed_ranks))
            first = failed_ranks[0]
            _, first_text = results[first]
            title = f"failed on rank {ranks} of {self._comm.size}; report of rank {first}"
            text = f"{title}:\n{first_text}"
            report.outcome = "failed"
            report.longrepr = text
            self._failed.append((report.nodeid, text))
        elif len(set(outcomes)) > 1:
            report.outcome = "failed"
            report.longrepr = f"ranks disagree: {outcomes}"
        return report

    # -- the time limit -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self,
        item: pytest.Item,
    ) -> Generator[None, Any, Any]:
        """Limit the time of a test; pytest-timeout, where it has a limit, replaces this one."""
        limit_s = self._limit_s
        mark = item.get_closest_marker("timeout")
        if mark is not None and mark.args:
            limit_s = float(mark.args[0])
        self._start(item, limit_s)
        try:
            return (yield)
        finally:
            self._stop()

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(
        self,
        item: pytest.Item,
        settings: Any,
    ) -> bool:
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
            report = self._report_of_hang(item, limit_s)
            os.write(2, report.encode())
            # the first rank that ends lets the launcher kill the others
            time.sleep(self._comm.size * _TURN_S)
            os._exit(_TOO_LATE)

        self._stop()
        self._timer = threading.Timer(limit_s, end)
        self._timer.daemon = True
        self._timer.start()

    def _report_of_hang(self, item: pytest.Item, limit_s: float) -> str:
        """Return where this rank is; on rank 0 also the earlier failures, as the run ends without a summary."""
        rank = self._comm.rank
        lines = []
        if rank == 0:
            for name, text in self._failed:
                lines.append(f"\n{name} failed before:\n{text}\n")
        limit = f"more than {limit_s:g} s on rank {rank}"
        lines.append(f"\n{item.nodeid}: {limit}, which is here:\n")
        main_thread = threading.main_thread().ident or 0
        main_frame = sys._current_frames()[main_thread]
        frames = traceback.extract_stack(main_frame)
        first = 0  # the first frame of the test's file, if there is one
        for number, frame in enumerate(frames):
            if frame.filename == str(item.path):
                first = number
                break
        lines += traceback.format_list(frames[first:])
        return "".join(lines)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
