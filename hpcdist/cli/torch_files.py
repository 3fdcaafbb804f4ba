"""Files of torch and safetensors, for `hpcdist ckpt export` and `import`: the one module of the command with torch."""

import io
import stat
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.tree import NamedArray, encode
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.program.tensors import from_array, is_storable, to_array
from hpcdist.program.wrapped_modules import without_prefixes

#: How much larger the tensors may be than their file: tied weights are in it once.
_MOST_TIMES_LARGER = 4


def write_tensors(target: Path, arrays: Sequence[NamedArray]) -> None:
    """Write arrays under their names: as safetensors, or as a state_dict that torch.load(weights_only=True) reads.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    tensors = {array.name: from_array(array.values, array.dtype).contiguous() for array in arrays}
    try:
        if target.suffix == ".safetensors":
            content = memoryview(_safetensors().save(tensors, {"format": "pt"}))
        else:
            stream = io.BytesIO()
            torch.save(tensors, stream)
            content = stream.getbuffer()
        # in place of a link of that name, not through it
        durable.replace_file(durable.Disk(), target, [(0, content)], len(content))
    except UsageError:
        raise
    except Exception as error:  # safetensors has errors of its own
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"hpcdist ckpt export: expected to write {target}, got {text!r}; choose another folder."
        ) from error


def import_tensors(source: Path, target: Path, name: str, key: str | None) -> int:
    """Write a checkpoint of one module, at step 0, from a file of somebody else's; return how many arrays it has.

    Args:
        source: .safetensors, or what torch.load(weights_only=True) reads.
        target: of the checkpoint.
        name: of the module in it.
        key: under which a file of torch has the state_dict, if it holds more.

    Raises:
        UsageError: for a file that is no state_dict.
    """
    state = _read_tensors(source, key)
    arrays = list[NamedArray]()
    node = encode(state, name, to_array, arrays)
    facts = {
        "step": 0,
        "time_s": time.time(),
        "metrics": {},
        "written": {"imported_from": source.name},
    }
    image = FileImage()
    lay_out(image, facts, {"objects": {name: node}, "kinds": {name: "module"}}, arrays)
    durable.replace_file(durable.Disk(), target, image.blocks(), image.nbytes)
    return len(arrays)


def _read_tensors(source: Path, key: str | None) -> dict[str, torch.Tensor]:
    _require_plain_file(source)
    try:
        state: Any = (
            _safetensors().load_file(source)
            if source.suffix == ".safetensors"
            else torch.load(source, map_location="cpu", weights_only=True)
        )
    except UsageError:
        raise
    except Exception as error:  # whatever torch raises for a file of another kind
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"hpcdist ckpt import: expected a file of safetensors, or of torch without pickled objects, got {text!r} "
            f"from {source}; save its state_dict."
        ) from error
    if key is not None:
        state = state.get(key) if isinstance(state, Mapping) else None
    is_state = isinstance(state, Mapping) and bool(state)
    if not is_state or not all(isinstance(entry, torch.Tensor) for entry in state.values()):
        keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise UsageError(
            f"hpcdist ckpt import: expected a state_dict of tensors in {source}, got {keys[:200]}; name the entry that "
            f"is one by --key."
        )
    for name, tensor in state.items():
        _require_storable(str(name), tensor, source)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    if nbytes > _MOST_TIMES_LARGER * source.stat().st_size:
        raise UsageError(
            f"hpcdist ckpt import: expected tensors of about the size of {source}, got {nbytes} bytes in "
            f"{source.stat().st_size}, as entries are expanded or share one memory; save a copy of each."
        )
    if len({str(name) for name in state}) < len(state):
        raise UsageError(
            f"hpcdist ckpt import: expected names that differ as texts in {source}, got {len(state)} entries of which "
            f"some do not; rename them."
        )
    plain_names = without_prefixes(map(str, state))
    return {
        plain_names[str(name)]: tensor.resolve_conj().resolve_neg().contiguous()
        for name, tensor in state.items()
    }


def _require_plain_file(source: Path) -> None:
    """Raise UsageError for a pipe or device, which would be waited for, and for an archive that swells."""
    try:
        status = source.stat()
        is_archive = stat.S_ISREG(status.st_mode) and zipfile.is_zipfile(source)
        members = _members_of(source) if is_archive else []
    except Exception as error:  # noqa: BLE001  zipfile has many for archives that are none
        raise UsageError(
            f"hpcdist ckpt import: expected to read {source}, got {error}; correct the path."
        ) from None
    nbytes = sum(member.file_size for member in members)
    if not stat.S_ISREG(status.st_mode) or nbytes > _MOST_TIMES_LARGER * status.st_size:
        kind = f"{nbytes} bytes in {status.st_size}" if members else "a pipe, a device or a folder"
        raise UsageError(
            f"hpcdist ckpt import: expected a regular file that is as large as what is in it, got {kind} at {source}; "
            f"copy it, or save it without compression."
        )


def _members_of(source: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(source) as archive:
        return archive.infolist()


def _require_storable(name: str, tensor: torch.Tensor, source: Path) -> None:
    """Raise UsageError for a tensor that a checkpoint cannot hold."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_plain = is_plain and not (tensor.is_quantized or tensor.is_nested)
    kind = f"dtype {str(tensor.dtype).removeprefix('torch.')}"
    if not is_plain:
        kind = f"layout {tensor.layout} on {tensor.device.type}"
    if is_plain and is_storable(tensor.dtype):
        return
    raise UsageError(
        f"hpcdist ckpt import: expected dense tensors of the dtypes that checkpoints hold, got {kind} for {name!r} in "
        f"{source}; convert it, and save the file again."
    )


def _safetensors() -> Any:
    """Return the module that reads and writes safetensors of torch.

    Raises:
        UsageError: where it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "hpcdist ckpt: expected safetensors, got no such package; pip install 'hpcdist[safetensors]', or use .pt."
        ) from error
    return safetensors.torch
