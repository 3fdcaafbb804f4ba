"""The inputs of fit, evaluate and predict: arrays and datasets, as batches of this rank's replicas."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.elements import is_torch_data
from hpcdist.errors import DataError, UsageError
from hpcdist.nest import is_nest, leaves, map_nest, with_children, with_leaves
from hpcdist.strategy.base import Strategy

#: Rows of a global batch of arrays, unless told otherwise, as in Keras.
BATCH_SIZE = 32


def distribute(
    strategy: Strategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    call: str = "fit",
) -> DistributedInput:
    """Return batches of a user's arrays or dataset. Collective over chief and workers.

    Args:
        strategy: strategy of the model.
        x: nest of arrays. Or an hpcdist.Dataset with `batch`, a DataLoader, or a distributed dataset, whose elements
            are x, (x, y) or (x, y, sample_weight); then without y and sample_weight.
        y: nest of arrays with the same number of rows as x.
        sample_weight: weight of each row.
        batch_size: rows of a global batch, for arrays.
        shuffle: whether arrays are read in random order, a new one in every epoch; by torch.manual_seed.
        call: name of the calling function, for messages.

    Raises:
        UsageError: for y, batch_size or weights beside a dataset.
        DataError: for data without rows, or of different lengths.
    """
    if isinstance(x, (DistributedInput, Dataset)) or is_torch_data(x):
        extra = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        unexpected_names = [name for name, value in extra.items() if value is not None]
        if unexpected_names:
            raise UsageError(
                f"{call}: expected x alone where it is a dataset, got {', '.join(unexpected_names)} too; a dataset "
                f"has all of them: from_tensor_slices((x, y)).batch(rows)."
            )
        if isinstance(x, DistributedInput):
            return x
        return _distributed(strategy, x, call)
    if x is None or not (is_nest(x) or hasattr(x, "shape")):
        raise UsageError(
            f"{call}: expected arrays, an hpcdist.Dataset or a DataLoader, got {type(x).__name__}; use "
            f"Dataset.from_generator for a generator."
        )
    parts = [part for part in (x, y, sample_weight) if part is not None]
    if y is None and sample_weight is not None:
        raise UsageError(f"{call}: expected y with sample_weight, got none; give it.")
    dataset = Dataset.from_tensor_slices(tuple(parts))
    if not len(dataset):
        raise DataError(f"{call}: expected rows, got arrays without any; give data.")
    if shuffle:
        shuffled = dataset.shuffle()
        dataset = shuffled.with_drawn_seed(int(torch.randint(1 << 62, ())))  # the chief's counts
    if batch_size is None:
        batch_size = BATCH_SIZE
    return _distributed(strategy, dataset.batch(batch_size), call)


def _distributed(
    strategy: Strategy,
    dataset: Any,
    call: str,
) -> DistributedInput:
    distributed_dataset = strategy.experimental_distribute_dataset(dataset)
    # without a strategy it comes back as it is
    if not isinstance(distributed_dataset, DistributedInput):
        raise DataError(f"{call}: expected a dataset with batch(rows), got one without; add it.")
    return distributed_dataset


def split_all(
    x: Any,
    y: Any,
    weight: Any,
    fraction: float,
) -> tuple[tuple[Any, Any, Any], tuple[Any, ...]]:
    """Return (x, y, sample_weight) of all rows but the last `fraction`, and a tuple of the last rows.

    A part that is None is None in the first result, and left out of the second one.

    Raises:
        UsageError: if one of them is without rows.
    """
    n_rows = len(leaves(x)[0])
    first = int(n_rows * (1 - fraction))
    if not 0 < first < n_rows:
        raise UsageError(
            f"fit: expected validation_split that leaves rows for both, got {fraction} of {n_rows} rows; change it."
        )
    first_parts: list[Any] = []
    last_parts: list[Any] = []
    for part in (x, y, weight):
        if part is None:
            first_parts.append(None)
        else:
            first_parts.append(map_nest(lambda array: array[:first], part))
            last_parts.append(map_nest(lambda array: array[first:], part))
    return (first_parts[0], first_parts[1], first_parts[2]), tuple(last_parts)


def rows_of_batches(batches: DistributedInput) -> Iterator[tuple[Any, int | None]]:
    """Yield each batch of a pass, and its number of rows on all replicas. None if each replica knows only its rows.

    Collective over chief and workers where batches are agreed on.
    """
    batches.trust_draws()
    if not batches.has_global_rows:
        for batch in batches:
            yield batch, None
        return
    for batch in batches:
        yield batch, batches.global_rows


def unpack(element: Any) -> tuple[Any, Any, Any]:
    """Return x, y and sample_weight of an element, as `keras.utils.unpack_x_y_sample_weight`; None for a missing part.

    Arrays become tensors, of float64 in torch's default dtype, as Keras' floatx.
    """
    parts = _parts_of(element)
    n_parts = len(parts)
    if n_parts > 3:
        raise UsageError(
            f"batch: expected x, (x, y) or (x, y, sample_weight), got {n_parts} parts; several inputs are a tuple of "
            f"their own: ((a, b), y)."
        )
    x, y, weight = [*parts, None, None][:3]
    x = map_nest(_tensor_of, x)
    if y is not None:
        y = map_nest(_tensor_of, y)
    return x, y, weight


def _parts_of(element: Any) -> list[Any]:
    """Return x, and y and sample_weight where an element has them."""
    if isinstance(element, (tuple, list)):
        return list(element)
    return [element]


def _tensor_of(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return torch.from_numpy(value).to(torch.get_default_dtype())
    return torch.as_tensor(value)


def by_name(outputs: Any) -> dict[str, Any]:
    """Return outputs by the names of datasets: keys, joined by "/", and positions in lists after a "_"."""
    if not is_nest(outputs):
        return {"predictions": outputs}
    outputs_by_key = outputs
    if not isinstance(outputs, dict):
        outputs_by_key = {f"predictions_{n}": output for n, output in enumerate(outputs)}
    named_outputs = {}
    for key, output in outputs_by_key.items():
        for name, value in by_name(output).items():
            full_name = _name_below(key, name)
            if full_name in named_outputs:
                raise UsageError(
                    f"predict: expected outputs with different names, got two of {full_name!r}; rename one."
                )
            named_outputs[full_name] = value
    return named_outputs


def _name_below(key: Any, name: str) -> str:
    """Return the name of an output in a dict or list.

    Args:
        key: key of the dict or list in the outputs.
        name: name of the output among those under the key, by `by_name`.
    """
    suffix = name.removeprefix("predictions")
    if suffix and not suffix.startswith("_"):
        return f"{key}/{suffix}"
    return f"{key}{suffix}"


def is_empty(x: Any) -> bool:
    """Return whether a nest of tensors has no rows."""
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and not len(leaf) for leaf in leaves(x))


def pieces(parts: tuple[Any, Any, Any], n_pieces: int) -> list[tuple[Any, Any, Any]]:
    """Return x, y and sample_weight in at most n_pieces pieces. No piece is empty, unless there are no rows at all."""
    n_pieces = max(1, min(n_pieces, len(leaves(parts[0])[0])))
    if n_pieces == 1:
        return [parts]
    columns = [_split_rows(part, n_pieces) for part in parts]
    return list(zip(*columns, strict=True))


def _split_rows(nest: Any, n_pieces: int) -> list[Any]:
    if nest is None:
        return [None] * n_pieces
    rows = [torch.tensor_split(torch.as_tensor(leaf), n_pieces) for leaf in leaves(nest)]
    return [with_leaves(nest, list(piece)) for piece in zip(*rows, strict=True)]


def weights_of_classes(y: Any, table: Tensor) -> Tensor:
    """Return the weight of each row by its class; of one-hot rows, of the column of their 1."""
    labels = torch.as_tensor(y)
    if labels.dim() > 1:
        labels = labels[..., 0] if labels.shape[-1] == 1 else labels.argmax(-1)
    if labels.dim() > 1:
        raise UsageError(
            f"fit: expected one class for each row with class_weight, got labels of shape {tuple(labels.shape)}; give "
            f"sample_weight instead."
        )
    classes = torch.round(labels.double()).to(table.dtype)
    classes = classes[:, None].to(table.device)
    is_class = classes == table[0]
    weights = (is_class * table[1]).sum(1)
    weights[~is_class.any(1)] = 1
    return weights.float().to(labels.device)


def table_of_classes(class_weight: dict[int, float] | None) -> Tensor | None:
    """Return (2, n) float64: classes, and the weight of each; further classes weigh 1. None without weights.

    Raises:
        UsageError: for classes that are no whole numbers, and weights that are no numbers.
    """
    if class_weight is None:
        return None
    try:
        columns = [list(class_weight), list(class_weight.values())]
        table = torch.tensor(columns, dtype=torch.float64)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        table = torch.zeros(2, 0)
    classes = table[0]
    has_fractions = bool((classes != classes.round()).any())
    if has_fractions or not table.numel():
        raise UsageError(
            f"fit: expected class_weight as a dict of whole numbers and weights, got {class_weight!r}; give "
            f"{{class: weight}}."
        )
    return table


def with_class_weights(element: Any, table: Tensor | None) -> Any:
    """Return an element with the weights of its rows multiplied by the weights of their classes."""
    if table is None:
        return element
    parts = _parts_of(element)
    if len(parts) < 2:
        raise UsageError("fit: expected y with class_weight, got batches of x alone; give labels.")
    weight = weights_of_classes(parts[1], table)
    if len(parts) > 2:
        weight = weight * torch.as_tensor(parts[2]).reshape(-1)
    else:
        element = (*parts, None)
    return with_children(element, [*parts[:2], weight])
