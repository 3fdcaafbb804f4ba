"""tf.distribute for batch clusters: roles, strategies and exact restarts on MPI.

Public names are resolved at first use, so that `import hpcdist` starts neither MPI nor torch; see public_names.py.
"""

from typing import Any

from hpcdist.public_names import MODULES, NAMES, resolve

__version__ = "0.3.0"
__all__ = sorted({**NAMES, **MODULES})


def __getattr__(name: str) -> Any:
    resolved = globals()[name] = resolve(name)
    return resolved


def __dir__() -> list[str]:
    return [*globals(), *__all__]
