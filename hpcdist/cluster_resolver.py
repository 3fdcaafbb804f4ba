"""The path tf.distribute.cluster_resolver: aliases of public names, resolved at first use."""

from typing import Any

from hpcdist.public_names import ALIASES, resolve_alias

__all__ = sorted(ALIASES["cluster_resolver"])


def __getattr__(name: str) -> Any:
    resolved = globals()[name] = resolve_alias("cluster_resolver", name)
    return resolved


def __dir__() -> list[str]:
    return [*globals(), *__all__]
