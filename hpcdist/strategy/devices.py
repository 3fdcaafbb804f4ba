"""Devices of torch by their names, as TensorFlow or torch writes them."""

import re
from typing import Any

import torch

from hpcdist.errors import ConfigurationError

_NAME = re.compile(
    r"(?:/?job:[\w.-]+)?(?:/?replica:\d+)?(?:/?task:\d+)?/?(?:device:)?(?P<kind>[a-z_]+)(?::(?P<index>\d+|\*))?",
    re.IGNORECASE,
)
#: TensorFlow's names that torch has others for.
_TORCH_KINDS = {"gpu": "cuda", "tpu": "xla"}


def parse_device(name: Any, caller: str = "device") -> torch.device:
    """Return the device for a name such as "/gpu:0", "/job:worker/task:0/device:CPU:0" or "cuda:1".

    Does not check that the device exists. There is one host device, whatever its number; GPU without a number is
    the first one.

    Args:
        name: text, or a torch.device.
        caller: name of the caller, for messages.

    Raises:
        ConfigurationError: for anything else.
    """
    match = _NAME.fullmatch(str(name))
    try:
        kind = str(match and match["kind"]).lower()
        device = torch.device(_TORCH_KINDS.get(kind, kind))
    except RuntimeError:
        raise ConfigurationError(
            f"{caller}: expected a device such as 'cpu', '/gpu:0' or '/job:worker/task:0/device:GPU:0', got {name!r}; "
            f"correct the name."
        ) from None
    if device.type in ("cpu", "meta") or match is None:
        return device
    return torch.device(device.type, int((match["index"] or "0").replace("*", "0")))


def require_device(device: torch.device, caller: str) -> None:
    """Raise ConfigurationError unless torch can use a device here; on this rank only."""
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        has_gpu_build = torch.version.cuda or torch.version.hip
        build = "" if has_gpu_build else " with a build of torch for CPUs only"
        raise ConfigurationError(
            f"{caller}: expected {device} in this process, got {torch.cuda.device_count()} GPUs{build}; run where "
            f"there is that GPU, look at CUDA_VISIBLE_DEVICES, or pass 'cpu'."
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        text = " ".join(str(error).split())[:160]
        raise ConfigurationError(
            f"{caller}: expected {device} in this process, got {text!r}; run where torch can use it, or pass 'cpu'."
        ) from None
