"""The manifest beside each checkpoint file: a file is committed if a manifest names it and matches it."""

import json
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from hpcdist.checkpoint.layout import FORMAT
from hpcdist.checkpoint.safe_open import check_format, digest_file, read_patiently, read_text
from hpcdist.errors import CheckpointDamaged

#: Largest manifest that is read; real ones have some lines.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Manifest:
    """The description of a committed checkpoint.

    Attributes:
        step: optimizer steps taken.
        file: name of the HDF5 file, in the manifest's folder.
        nbytes, xxh3_128: size and digest of the whole HDF5 file.
        written: its provenance: versions, ranks, threads.
        time_s: time of the save, in seconds since 1970.
        metrics: the program's metrics of the model at this step.
        format: number of the file format.
    """

    step: int
    file: str
    nbytes: int
    xxh3_128: str
    written: dict[str, Any]
    time_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    format: int = FORMAT

    def to_text(self) -> str:
        """Return the manifest as JSON with its own digest."""
        body = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"manifest": asdict(self), "xxh3_128": _digest(body)}, sort_keys=True, indent=1)

    def verify(self, path: Path, on_block: Callable[[], None] = lambda: None) -> None:
        """Raise CheckpointDamaged unless the file at `path` is, byte for byte, what was committed.

        Args:
            path: path of the file.
            on_block: called after each block that was read.

        Raises:
            CheckpointDamaged: see above.
            CheckpointError: if the file cannot be read, which is no evidence of damage.

        Cost: reads the whole file.
        """

        def read() -> tuple[int, str]:
            status = path.stat()
            is_read = stat.S_ISREG(status.st_mode) and status.st_size == self.nbytes
            return digest_file(path, on_block) if is_read else (status.st_size, "")

        found = read_patiently(path, read)
        if found != (self.nbytes, self.xxh3_128):
            what = f"{found[0]} bytes" if found[0] != self.nbytes else "other bytes"
            raise CheckpointDamaged(
                f"restore: expected {self.nbytes} bytes as committed in {path}, got {what}; use another."
            )


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`.

    Raises:
        CheckpointDamaged: if its text is not exactly what was committed.
        CheckpointError: if a newer hpcdist wrote it, or it cannot be read.
    """
    try:
        content = json.loads(read_patiently(path, lambda: read_text(path, _MAX_BYTES)))
        body, digest = content["manifest"], content["xxh3_128"]
        check_format(body["format"], path)
        own = {part.name: body[part.name] for part in fields(Manifest)}
        body_text = json.dumps(body, sort_keys=True)
        _check_types(own)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"restore: expected a manifest in {path}, got {type(error).__name__}; use another."
        ) from None
    if _digest(body_text) != digest:
        raise CheckpointDamaged(
            f"restore: expected the manifest as committed in {path}, got a changed one; use another checkpoint."
        )
    return Manifest(**own)


def _check_types(own: dict[str, Any]) -> None:
    """Raise TypeError unless all parts have the committed types: the digest is not a signature."""
    counts, texts = (own["step"], own["nbytes"]), (own["file"], own["xxh3_128"])
    if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
        raise TypeError("step, nbytes")
    if not all(type(text) is str and "\0" not in text for text in texts) or type(own["written"]) is not dict:
        raise TypeError("file, xxh3_128, written")
    if type(own["metrics"]) is not dict or not all(map(_is_number, (own["time_s"], *own["metrics"].values()))):
        raise TypeError("time_s, metrics")


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
