"""Errors beside training, in the run folder: what an evaluator, TensorBoard or a metrics file could not do.

They end no run, so `hpcdist status` and `hpcdist report` show them: `errors/evaluator-0.json` and so on.
"""

import json
import time
from pathlib import Path

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.read import read_text
from hpcdist.errors import log
from hpcdist.retries import Retries

_FOLDER = "errors"
_MAX_BYTES = 1 << 20


class SideErrors:
    """Records the last error of one part of the job beside training.

    Args:
        run_folder: the run folder. It is made if an evaluator fails before the chief has made it.
        name: name of the part, such as "evaluator-0".
    """

    def __init__(self, run_folder: Path, name: str) -> None:
        self._path = run_folder.absolute() / _FOLDER / f"{name}.json"
        self._is_recorded: bool | None = None  # unknown: an earlier attempt may have recorded one

    def update(self, retries: Retries) -> None:
        """Record the last error or, without one, that an earlier one is over."""
        if retries.failure is None:
            self.record_recovery()
        else:
            self.record(retries.failure, retries.n_failures)

    def record(self, error: str, n_failures: int) -> None:
        """Record an error. Where that cannot be written, the log has to do.

        Args:
            error: the error, in one line.
            n_failures: number of failures in a row.
        """
        self._write(error, n_failures, is_over=False)

    def record_recovery(self) -> None:
        """Record that the error is over, if there was one."""
        if self._is_recorded is None:
            earlier = _content_of(self._path)
            self._is_recorded = bool(earlier) and not earlier.get("is_over")
        if self._is_recorded:
            self._write("", 0, is_over=True)

    def _write(self, error: str, n_failures: int, is_over: bool) -> None:
        try:
            earlier = _content_of(self._path) if is_over else {}
            content = {
                "error": error,
                "n_failures": n_failures,
                "time_s": time.time(),
                **earlier,
                "is_over": is_over,
            }
            text = json.dumps(content) + "\n"
            durable.make_folders(Disk(), self._path.parent)
            durable.replace_text(Disk(), self._path, text)
            self._is_recorded = not is_over
        except OSError as failure:
            log(f"expected to record an error in {self._path}, got {failure.strerror}; see the log")


def _content_of(path: Path) -> dict[str, object]:
    try:
        content = json.loads(read_text(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return content
    return {}
