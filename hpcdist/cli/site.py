"""hpcdist.toml: a site's defaults for commands, here or in ~/.config."""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdist.errors import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Table -> its keys, and their types.
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "run": {
        "roles": (str,),
        "timeout_s": (int, float),
        "debug": (str,),
        "log": (str,),
        "trace": (str,),
    },
    "submit": {
        "system": (str,),
        "sbatch": (list,),
        "pbs": (list,),
        "lsf": (list,),
        "setup": (list,),
        "launcher": (str,),
        "library": (str,),
        "time": (str,),
    },
}
#: Most characters of a value that are quoted.
_MAX_SAID = 60
_VALUES = {
    "system": ("slurm", "pbs", "lsf"),
    "launcher": ("srun", "mpirun"),
    "library": ("mpich", "openmpi"),
    "log": ("text", "json"),
    "trace": ("some", "all", "off"),
}


def site_defaults(table: str) -> dict[str, Any]:
    """Return what the files say in the table of a command: of each key the first one, here before ~/.config.

    Their lines are run as this user. So a file is refused that is not this user's or root's, or that others can write.

    Raises:
        ConfigurationError: if a file is another user's, is not TOML, or says something else.
    """
    defaults: dict[str, Any] = {}
    for path in (Path("hpcdist.toml"), Path(os.path.expanduser("~/.config/hpcdist.toml"))):
        if path.is_file():
            defaults = {**_table_of(path, table), **defaults}
    return defaults


def _text_of(path: Path, table: str) -> str:
    """Return the text of a file that no other user can have written.

    Raises:
        OSError: if it cannot be read.
        ConfigurationError: for a file of another user, or one that others can write.
    """
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"hpcdist {table}: expected {path.absolute()} to be a file of yours that nobody else can write, as its "
                f"lines are run as you, got user {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}; "
                f"chown or chmod go-w it, or remove it."
            )
        return file.read()


def _table_of(path: Path, table: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(_text_of(path, table))
        entries = content.get(table, {})
        wrong = [name for name in content if name not in _KEYS] or _wrong_keys(
            entries, _KEYS[table]
        )
    except ConfigurationError:
        raise
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        text = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigurationError(
            f"hpcdist {table}: expected TOML in {path}, got {text}; correct the file, or move it away."
        ) from error
    if wrong:
        raise ConfigurationError(
            f"hpcdist {table}: expected tables {', '.join(_KEYS)}, and {', '.join(_KEYS[table])} under [{table}] in "
            f"{path}, got {wrong[0]!r} as {_quoted_value(content, entries, wrong[0])}; "
            f"see docs/command.md for what each takes."
        )
    return dict(entries)


def _quoted_value(content: Mapping[str, Any], entries: Mapping[str, Any], name: str) -> str:
    """Return what a file says under a name, cut to the length of a line."""
    text = repr(entries.get(name, content.get(name)))
    return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}..."


def _wrong_keys(entries: Mapping[str, Any], keys: Mapping[str, tuple[type, ...]]) -> list[str]:
    """Return the keys that there are not, and those with a value of another type or choice."""
    return [
        key
        for key, value in entries.items()
        if not isinstance(value, keys.get(key, ()))
        or isinstance(value, bool)
        or value not in _VALUES.get(key, (value,))
        or (isinstance(value, int | float) and not 0 < value < float("inf"))
        or (isinstance(value, list) and not all(isinstance(element, str) for element in value))
    ]
