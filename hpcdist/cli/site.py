"""Reads hpcdist.toml: defaults for commands, in this folder, in ~/.config, or for a whole site in /etc."""

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

#: Table -> key -> types that its value may have.
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
#: Defaults for all users of a machine.
SITE_PATH = Path("/etc/hpcdist.toml")
#: Longest part of a value that an error quotes, in characters.
_MAX_QUOTED = 60
#: Key -> its valid values. Of a key that is not listed only the type is checked.
_VALUES = {
    "system": ("slurm", "pbs", "lsf"),
    "launcher": ("srun", "mpirun"),
    "library": ("mpich", "openmpi"),
    "log": ("text", "json"),
    "trace": ("some", "all", "off"),
}


def site_defaults(table: str) -> dict[str, Any]:
    """Return the defaults in the table of a command. A value in this folder counts before the one in ~/.config.

    Last comes the value in /etc/hpcdist.toml, for all users of a machine.

    Lines of the files are run as this user. So a file must belong to this user or to root, and must not be writable by
    other users.

    Raises:
        ConfigurationError: if a file belongs to another user, is not TOML, or has unknown keys or values.
    """
    defaults: dict[str, Any] = {}
    own_path = Path(os.path.expanduser("~/.config/hpcdist.toml"))
    for path in (Path("hpcdist.toml"), own_path, SITE_PATH):
        if path.is_file():
            defaults = {**_table_of(path, table), **defaults}
    return defaults


def _text_of(path: Path, table: str) -> str:
    """Return the text of a file that no other user can have written.

    Raises:
        OSError: if the file cannot be read.
        ConfigurationError: if the file belongs to another user, or other users can write it.
    """
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"hpcdist {table}: expected {path.absolute()} to be a file of yours or root's that nobody else can "
                f"write, as its lines are run as you, got user {status.st_uid} and mode "
                f"{stat.S_IMODE(status.st_mode):o}; chown or chmod go-w it, or remove it; one in /etc is your "
                f"administrator's."
            )
        return file.read()


def _table_of(path: Path, table: str) -> dict[str, Any]:
    """Return the table of a command in a file.

    Raises:
        ConfigurationError: as `site_defaults` does.
    """
    try:
        content = tomllib.loads(_text_of(path, table))
        entries = content.get(table, {})
        unknown_tables = [name for name in content if name not in _KEYS]
        wrong = unknown_tables or _wrong_keys(entries, _KEYS[table])
    except ConfigurationError:
        raise
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        text = str(error)
        if isinstance(error, RecursionError):
            text = "values nested too deeply"
        raise ConfigurationError(
            f"hpcdist {table}: expected TOML in {path}, got {text}; correct the file, or move it away."
        ) from error
    if wrong:
        raise ConfigurationError(
            f"hpcdist {table}: expected tables {', '.join(_KEYS)}, and {', '.join(_KEYS[table])} under [{table}] in "
            f"{path}, got {wrong[0]!r} as {_quoted_value(content, entries, wrong[0])}; "
            f"see docs/reference/command.md for what each takes."
        )
    return dict(entries)


def _quoted_value(content: Mapping[str, Any], entries: Mapping[str, Any], name: str) -> str:
    """Return the value under a name in a file, cut to the length of a line."""
    text = repr(entries.get(name, content.get(name)))
    if len(text) > _MAX_QUOTED:
        return f"{text[:_MAX_QUOTED]}..."
    return text


def _wrong_keys(entries: Mapping[str, Any], keys: Mapping[str, tuple[type, ...]]) -> list[str]:
    """Return the keys of `entries` that are unknown, or whose value is not valid.

    Args:
        entries: content of a table.
        keys: key -> types that its value may have.
    """
    return [key for key, value in entries.items() if not _is_valid(key, value, keys.get(key, ()))]


def _is_valid(key: str, value: Any, types: tuple[type, ...]) -> bool:
    """Return whether a key may have a value: of one of its types, and one of its choices."""
    if isinstance(value, bool) or not isinstance(value, types):
        return False
    if key in _VALUES:
        return value in _VALUES[key]
    if isinstance(value, int | float):
        return 0 < value < float("inf")
    if isinstance(value, list):
        return all(isinstance(element, str) for element in value)
    return True
