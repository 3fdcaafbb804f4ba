"""`hpcdist logs`: the log files of all ranks as one, in the order of time."""

import heapq
import json
import re
from collections.abc import Iterator
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
    """One record of a rank, with all of its lines; they sort by time."""

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
    inner = folder / "logs"
    inner = inner if inner.is_dir() else folder
    files = {
        int(match[1]): path
        for path in sorted(inner.glob("rank-*.log"))
        if (match := _RANK.search(path.name))
    }
    missing = [rank for rank in ranks if rank not in files]
    if not files or missing:
        wanted = f"rank-{missing[0]:05d}.log" if missing else "rank-00000.log"
        raise UsageError(
            f"hpcdist logs: expected {wanted} in {inner}, got {len(files)} log files; have the program call "
            f"hpcdist.log_to, or correct the folder."
        )
    chosen = [_records(path, rank) for rank, path in files.items() if not ranks or rank in ranks]
    least = _LEVELS.index(level.upper()) if level else 0
    matching_records = (
        log_record
        for log_record in heapq.merge(*chosen)
        if log_record.level not in _LEVELS or _LEVELS.index(log_record.level) >= least
    )
    for record in matching_records if tail is None else list(matching_records)[-tail:]:
        facts = {
            "time": record.time,
            "rank": record.rank,
            "level": record.level,
            "text": record.text,
        }
        echo(json.dumps(facts) if is_json else record.text)


def _records(path: Path, rank: int) -> Iterator[Record]:
    """Yield the records of a file: lines without a time, such as those of a traceback, belong to the one before."""
    lines: list[str] = []
    head = ("", "")
    number = 0
    with open_plain(path) as file:
        for line in file:
            following = _head_of(line)
            if following is None:
                lines.append(line)
                continue
            if lines:
                yield Record(head[0], rank, number, head[1], "".join(lines).rstrip("\n"))
            head = (max(following[0], head[0]), following[1])
            number = number + 1
            lines = [line]
    if lines:
        yield Record(head[0], rank, number, head[1], "".join(lines).rstrip("\n"))


def _head_of(line: str) -> tuple[str, str] | None:
    """Return time and level of a line that begins a record; None for another one."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
            return str(fields["time"]), str(fields["level"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    time = _TIME.match(line)
    level = _LEVEL.match(line)
    return (time[0], level[1]) if time and level else None
