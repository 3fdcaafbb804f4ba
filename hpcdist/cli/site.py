"""hpcdist.toml: a site's defaults for commands, here or in ~/.config."""

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
    "run": {"roles": (str,), "timeout_s": (int, float), "debug": (str,), "log": (str,), "trace": (str,)},
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
_VALUES = {
    "system": ("slurm", "pbs", "lsf"),
    "launcher": ("srun", "mpirun"),
    "library": ("mpich", "openmpi"),
    "log": ("text", "json"),
    "trace": ("some", "all", "off"),
}


def site_defaults(table: str) -> dict[str, Any]:
    """Return what the file says in the table of a command; empty without a file.

    Raises:
        ConfigurationError: for a file that is no TOML, or says something else.
    """
    paths = [Path("hpcdist.toml"), Path.home() / ".config" / "hpcdist.toml"]
    path = next((one for one in paths if one.is_file()), None)
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text()).get(table, {})
        wrong = _wrong_keys(found, _KEYS[table])
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"hpcdist {table}: expected TOML in {path}, got {error}; correct it.") from error
    if wrong:
        raise ConfigurationError(
            f"hpcdist {table}: expected {', '.join(_KEYS[table])} under [{table}] in {path}, lists as lists of texts, "
            f"got {wrong[0]!r}; correct it."
        )
    return dict(found)


def _wrong_keys(found: Mapping[str, Any], keys: Mapping[str, tuple[type, ...]]) -> list[str]:
    """Return the keys that there are not, and those with a value of another type or choice."""
    return [
        key
        for key, value in found.items()
        if not isinstance(value, keys.get(key, ()))
        or isinstance(value, bool)
        or value not in _VALUES.get(key, (value,))
        or (isinstance(value, list) and not all(isinstance(one, str) for one in value))
    ]
