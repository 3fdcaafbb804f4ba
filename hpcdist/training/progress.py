"""The progress of fit as text: a bar on a terminal, a line for each epoch in a batch log, on the chief alone.

Ranks write to a pipe of their launcher. `hpcdist run` passes them the size of the terminal behind the pipe; otherwise
they print lines.
"""

import os
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from hpcdist.cluster.environment import read_environment, terminal_columns
from hpcdist.errors import UsageError
from hpcdist.training.callbacks import Callback, Logs

#: Time until the first report of a long epoch in a batch log, and time between later reports.
_FIRST_REPORT_S = 10.0
_REPORT_S = 60.0
#: Bars that leave room for metrics on 80 columns.
_BAR = "{desc} |{bar}| {n_fmt}/{total_fmt} {remaining} left{postfix}"
_BAR_WITHOUT_END = "{desc} {n_fmt} steps {elapsed}{postfix}"


class Progress(Callback):
    """Prints the progress of fit. Within an epoch values are of the chief's replicas; at its end of all replicas.

    Args:
        verbose: 0: nothing; 1 or "auto": a bar on a terminal, else lines; 2: lines.
        next_save: function that returns when fit saves next, as a text; "" where it does not save.

    Raises:
        UsageError: for something else.
    """

    def __init__(self, verbose: int | str, next_save: Callable[[], str] = lambda: "") -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise UsageError(
                f"fit: expected verbose 0, 1, 2 or 'auto', got {verbose!r}; leave it out for 'auto'."
            )
        self._n_columns = terminal_columns(read_environment())
        has_terminal = sys.stdout.isatty() or (self._n_columns > 0 and _is_pipe(sys.stdout))
        self._verbose = 2
        if verbose == 0:
            self._verbose = 0
        elif verbose in (1, "auto") and has_terminal:
            self._verbose = 1
        self._next_save = next_save
        self._bar: Any = None
        self._is_in_fit = False
        self._began_at = self._reported_at = self._stepped_at = 0.0
        self._has_reported = False
        self._n_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a run that resumes prints its own time."""
        return {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Note that evaluations belong to fit. Where a run resumes in the middle of an epoch, its line begins here."""
        self._is_in_fit = True
        self.on_epoch_begin(0)
        if not self.model.strategy.is_chief:
            self._verbose = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a line."""
        self._began_at = self._reported_at = self._stepped_at = time.monotonic()
        self._n_steps = 0

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Move the bar; report an epoch that takes long."""
        self._n_steps += self.steps_until(batch)
        self._stepped_at = now = time.monotonic()
        if self._verbose == 1:
            if self._bar is None:
                self._bar = self._new_bar(batch)
            self._bar.update(batch + 1 - self._bar.n)
            if now - self._reported_at > 0.5:
                texts = [_text_of(logs), self._next_save()]
                self._bar.set_postfix_str("  ".join(filter(None, texts)), refresh=False)
                self._reported_at = now
        elif self._verbose == 2:
            pause_s = _REPORT_S if self._has_reported else _FIRST_REPORT_S
            if now - self._reported_at > pause_s:
                self._print_report(batch, logs, now)
                self._reported_at = now
                self._has_reported = True

    def _new_bar(self, batch: int) -> Any:
        """Return a bar for an epoch that is at this batch."""
        epoch = f"epoch {self._epoch + 1}/{self.params['epochs']}"
        begun_at = max(0, batch + 1 - self.steps_until(batch))  # not 0 where a run resumes
        bar_format = _BAR
        if self.params["steps"] is None:
            bar_format = _BAR_WITHOUT_END
        return tqdm(
            total=self.params["steps"],
            desc=epoch,
            file=sys.stdout,
            leave=False,
            bar_format=bar_format,
            initial=begun_at,
            ncols=self._n_columns or None,  # None for the terminal that tqdm finds by itself
        )

    def _print_report(
        self,
        batch: int,
        logs: Logs,
        now: float,
    ) -> None:
        """Print a line about an epoch in progress."""
        rate = self._n_steps / (now - self._began_at)
        step = f"step {batch + 1}"
        pace = f"{rate:.3g} steps/s"
        total = self.params["steps"]
        if total:
            remaining_s = (total - batch - 1) / rate
            step += f"/{total}"
            pace += f", {remaining_s:.0f} s left in the epoch"
        epoch = f"epoch {self._epoch + 1}"
        values = f"{_text_of(logs)} (this rank)"
        line = "  ".join([epoch, step, pace, values, self._next_save()])
        self.model.print_once(line.rstrip())

    @property
    def _epoch(self) -> int:
        """The number of the epoch in progress, from 0."""
        ended_epochs: list[int] = self.model.history.epoch
        if ended_epochs:
            return ended_epochs[-1] + 1
        return int(self.params["initial_epoch"])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Print the line of the epoch."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if not self._verbose:
            return
        elapsed_s = time.monotonic() - self._began_at
        step_s = max(0.0, self._stepped_at - self._began_at) / max(1, self._n_steps)
        epoch_text = f"epoch {epoch + 1}/{self.params['epochs']}"
        pace = f"{self._n_steps} steps  {elapsed_s:.1f} s  {step_s * 1e3:.3g} ms/step"
        self.model.print_once(f"{epoch_text}  {pace}  {_text_of(logs)}")
        self._has_reported = True

    def on_test_end(self, logs: Logs) -> None:
        """Print the line of an evaluation that is not fit's."""
        if not self._is_in_fit and self._verbose:
            self.model.print_once(f"evaluation  {_text_of(logs)}")


def _is_pipe(stream: Any) -> bool:
    """Return whether a stream writes to a pipe, as to a launcher, and not to a file that a program has opened."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # it is a stream in memory
        return False


def _text_of(logs: Logs) -> str:
    """Return the names and values of logs in one line."""
    texts = []
    for name in logs:
        value = logs.get(name)
        if isinstance(value, float):
            texts.append(f"{name} {value:.4g}")
        elif value is not None:
            texts.append(f"{name} {value}")
    return "  ".join(texts)
