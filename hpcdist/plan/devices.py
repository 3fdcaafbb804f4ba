"""Which rank uses which GPU, and how a device buffer is cut. Pure arithmetic: nothing here looks at a device."""

from collections.abc import Sequence

from hpcdist.plan.blocks import Bounds


def plan_devices(n_local: int, n_devices: int) -> list[int]:
    """Return the device index of each rank of a host: one after another, from the first one again after the last.

    Args:
        n_local: number of ranks on the host, >= 0.
        n_devices: number of GPUs that they see, >= 1.

    Raises:
        ValueError: without devices.

    >>> plan_devices(3, 2)
    [0, 1, 0]
    """
    if not n_devices:
        raise ValueError("plan_devices: expected at least one device, got none.")
    return [rank % n_devices for rank in range(n_local)]


def shared_devices(devices_of_ranks: Sequence[str]) -> dict[str, list[int]]:
    """Return the devices that more than one rank uses, each with the indices of these ranks.

    >>> shared_devices(["a", "b", "a"])
    {'a': [0, 2]}
    """
    ranks_of_devices: dict[str, list[int]] = {}
    for rank, device in enumerate(devices_of_ranks):
        ranks_of_devices.setdefault(device, []).append(rank)
    shared: dict[str, list[int]] = {}
    for device, ranks in ranks_of_devices.items():
        if len(ranks) > 1:
            shared[device] = ranks
    return shared


def equal_part(
    n_elements: int,
    n_parts: int,
    multiple: int = 1,
) -> int:
    """Return the elements per part when all parts are equal, a multiple of `multiple`, and hold `n_elements` together.

    NCCL's reduce-scatter and all-gather take one count for all ranks. Elements beyond `n_elements` are padding.

    >>> equal_part(13, 4), equal_part(13, 4, multiple=4), equal_part(0, 4)
    (4, 4, 0)
    """
    part = -(-n_elements // n_parts)
    return -(-part // multiple) * multiple


def piece_bounds(n_elements: int, n_piece: int) -> list[Bounds]:
    """Return (start, stop) of pieces of at most `n_piece` elements, in order.

    >>> piece_bounds(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    pieces = []
    for start in range(0, n_elements, n_piece):
        stop = min(start + n_piece, n_elements)
        pieces.append((start, stop))
    return pieces
