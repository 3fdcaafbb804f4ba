"""`hpcdist logs`: prints the log files of all ranks as one, ordered by time."""

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from hpcdist.checkpoint.read import open_plain
from hpcdist.cli.output import echo
from hpcdist.errors import UsageError

_RANK = re.compile(r"rank-(\d+)\.log$")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}")
_LEVEL = re.compile(r"\S+ ([A-Z]+) \[")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Record(NamedTuple):
    """One record of a rank, with all its lines. Records sort by time, then by rank and by number in the file."""

    time: str
    rank: int
    number: int
    level: str
    text: str


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    help="Of this rank only; may be repeated.",
)
@click.option(
    "--level", type=click.Choice(_LEVELS, case_sensitive=False), help="From this level on."
)
@click.option("--tail", type=click.IntRange(1), metavar="N", help="The last N records only.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON, an object for each record.")
def command(
    folder: Path, ranks: tuple[int, ...], level: str | None, tail: int | None, is_json: bool
) -> None:
    """Print the log files of all ranks, merged by time: those that `hpcdist.log_to(RUN_DIR / "logs")` writes.

    \b
    hpcdist logs runs/train --level warning
    hpcdist logs runs/train --rank 3 --tail 20
    """
    log_folder = folder / "logs"
    if not log_folder.is_dir():
        log_folder = folder
    files = _log_files(log_folder)
    missing_ranks = [rank for rank in ranks if rank not in files]
    if not files or missing_ranks:
        expected_rank = missing_ranks[0] if missing_ranks else 0
        raise UsageError(
            f"hpcdist logs: expected rank-{expected_rank:05d}.log in {log_folder}, got {len(files)} log files; have "
            f"the program call hpcdist.log_to, or correct the folder; what a batch job printed is in the log that "
            f"`hpcdist status` names."
        )
    chosen = [_records(path, rank) for rank, path in files.items() if not ranks or rank in ranks]
    records: Iterable[Record] = heapq.merge(*chosen)
    if level is not None:
        records = _from_level(records, level)
    if tail is not None:
        records = list(records)[-tail:]
    for record in records:
        echo(_as_json(record) if is_json else record.text)


def _log_files(folder: Path) -> dict[int, Path]:
    """Return rank -> path of its log file."""
    files = {}
    for path in sorted(folder.glob("rank-*.log")):
        match = _RANK.search(path.name)
        if match is not None:
            files[int(match[1])] = path
    return files


def _records(path: Path, rank: int) -> Iterator[Record]:
    """Yield the records of a file. Lines without a time, such as a traceback's, belong to the record before them."""
    lines: list[str] = []
    time = ""
    level = ""
    number = 0
    with open_plain(path) as file:
        for line in file:
            head = _head_of(line)
            if head is None:
                lines.append(line)
                continue
            if lines:
                yield Record(time, rank, number, level, "".join(lines).rstrip("\n"))
            time = max(head[0], time)
            level = head[1]
            number += 1
            lines = [line]
    if lines:
        yield Record(time, rank, number, level, "".join(lines).rstrip("\n"))


def _from_level(records: Iterable[Record], level: str) -> Iterator[Record]:
    """Yield the records of a level and of more serious ones, and the records whose level is unknown."""
    least = _LEVELS.index(level.upper())
    for record in records:
        if record.level not in _LEVELS or _LEVELS.index(record.level) >= least:
            yield record


def _as_json(record: Record) -> str:
    return json.dumps(
        {"time": record.time, "rank": record.rank, "level": record.level, "text": record.text}
    )


def _head_of(line: str) -> tuple[str, str] | None:
    """Return time and level of a line that begins a record; None for another line."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
            return str(fields["time"]), str(fields["level"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    time = _TIME.match(line)
    level = _LEVEL.match(line)
    if time is None or level is None:
        return None
    return time[0], level[1]
