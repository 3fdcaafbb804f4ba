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

#: The tensors may be this many times larger than their file: tied weights are in it once.
_MOST_TIMES_LARGER = 4


def write_tensors(target: Path, arrays: Sequence[NamedArray]) -> None:
    """Write arrays under their names: as safetensors, or as a state_dict that torch.load(weights_only=True) reads.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    for array in arrays:
        tensors[array.name] = from_array(array.values, array.dtype).contiguous()
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
    except Exception as error:  # safetensors has own classes of errors
        text = _first_line(error)
        raise CheckpointError(
            f"hpcdist ckpt export: expected to write {target}, got {text!r}; choose another folder."
        ) from error


def import_tensors(source: Path, target: Path, name: str, key: str | None) -> int:
    """Write a checkpoint of one module, at step 0, from a file of another program. Return its number of arrays.

    Args:
        source: file of safetensors, or a file that torch.load(weights_only=True) reads.
        target: path of the checkpoint.
        name: name of the module in the checkpoint.
        key: key of the state_dict in a file of torch that holds more. None if the file is a state_dict.

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
    checkpoint_state = {"objects": {name: node}, "kinds": {name: "module"}}
    image = FileImage()
    lay_out(image, facts, checkpoint_state, arrays)
    durable.replace_file(durable.Disk(), target, image.blocks(), image.nbytes)
    return len(arrays)


def _read_tensors(source: Path, key: str | None) -> dict[str, torch.Tensor]:
    _require_plain_file(source)
    try:
        content = _load(source)
    except UsageError:
        raise
    except Exception as error:  # whatever torch raises for a file of another kind
        text = _first_line(error)
        raise UsageError(
            f"hpcdist ckpt import: expected a file of safetensors, or of torch without pickled objects, got {text!r} "
            f"from {source}; save its state_dict."
        ) from error
    if key is not None:
        content = content.get(key) if isinstance(content, Mapping) else None
    state = _require_state_dict(content, source)
    for name, tensor in state.items():
        _require_storable(str(name), tensor, source)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    if nbytes > _MOST_TIMES_LARGER * source.stat().st_size:
        raise UsageError(
            f"hpcdist ckpt import: expected tensors of about the size of {source}, got {nbytes} bytes in "
            f"{source.stat().st_size}, as entries are expanded or share one memory; save a copy of each."
        )
    names = list(map(str, state))
    if len(set(names)) < len(state):
        raise UsageError(
            f"hpcdist ckpt import: expected names that differ as texts in {source}, got {len(state)} entries of which "
            f"some do not; rename them."
        )
    plain_names = without_prefixes(names)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        plain_name = plain_names[str(name)]
        tensors[plain_name] = tensor.resolve_conj().resolve_neg().contiguous()
    return tensors


def _load(source: Path) -> Any:
    if source.suffix == ".safetensors":
        return _safetensors().load_file(source)
    return torch.load(source, map_location="cpu", weights_only=True)


def _first_line(error: Exception) -> str:
    """Return the first line of the text of an error. Its class if it has no text."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _require_state_dict(content: Any, source: Path) -> Mapping[Any, torch.Tensor]:
    """Return the content of a file, which has to be a state_dict.

    Raises:
        UsageError: for anything else.
    """
    keys = type(content).__name__
    if isinstance(content, Mapping):
        if content and all(isinstance(entry, torch.Tensor) for entry in content.values()):
            return content
        keys = ", ".join(map(str, content))
    raise UsageError(
        f"hpcdist ckpt import: expected a state_dict of tensors in {source}, got {keys[:200]}; name the entry that "
        f"is one by --key."
    )


def _require_plain_file(source: Path) -> None:
    """Raise UsageError for a pipe or device, which would be waited for, and for an archive that swells."""
    members: list[zipfile.ZipInfo] = []
    try:
        status = source.stat()
        is_regular = stat.S_ISREG(status.st_mode)
        if is_regular and zipfile.is_zipfile(source):
            members = _members_of(source)
    except Exception as error:  # noqa: BLE001  zipfile has many for archives that are none
        raise UsageError(
            f"hpcdist ckpt import: expected to read {source}, got {error}; correct the path."
        ) from None
    nbytes = sum(member.file_size for member in members)
    if not is_regular or nbytes > _MOST_TIMES_LARGER * status.st_size:
        kind = "a pipe, a device or a folder"
        if members:
            kind = f"{nbytes} bytes in {status.st_size}"
        raise UsageError(
            f"hpcdist ckpt import: expected a regular file that is as large as what is in it, got {kind} at {source}; "
            f"copy it, or save it without compression."
        )


def _members_of(source: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(source) as archive:
        return archive.infolist()


def _require_storable(name: str, tensor: torch.Tensor, source: Path) -> None:
    """Raise UsageError for a tensor that a checkpoint cannot hold."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_plain = is_dense and not (tensor.is_quantized or tensor.is_nested)
    if is_plain and is_storable(tensor.dtype):
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = f"dtype {dtype}"
    if not is_plain:
        kind = f"layout {tensor.layout} on {tensor.device.type}"
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
