"""What the bits of a result on this machine depend on, besides the program."""

import torch


def describe_numerics() -> dict[str, str | int]:
    """Return thread count, instruction set and torch version, as recorded with each checkpoint."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }
