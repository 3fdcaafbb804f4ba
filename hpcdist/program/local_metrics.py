"""Finds metrics of torchmetrics that would count the rows of only one rank."""

import gc
import logging
import sys
from typing import Any

import torch

logger = logging.getLogger("hpcdist")


def local_metrics() -> list[Any]:
    """Return the metrics that no `TorchMetric` holds, where torchmetrics does not combine them itself.

    Cost: none in a program without torchmetrics, otherwise a walk over all objects of the process.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return []
    metrics: list[Any] = []
    wrapped_ids: set[int] = set()
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, torchmetrics.Metric):
            metrics.append(item)
        elif kind.__name__ == "TorchMetric":
            wrapped_metric = vars(item)["_metric"]
            wrapped_ids.update(map(id, wrapped_metric.modules()))
    return [
        metric
        for metric in metrics
        if id(metric) not in wrapped_ids and metric.dist_sync_fn is None
    ]


def warn_of_local_metrics() -> None:
    """Log the classes of the metrics that `local_metrics` returns. Not collective."""
    names = sorted({type(metric).__name__ for metric in local_metrics()})
    if names:
        logger.warning(
            "torchmetrics: expected hpcdist.metrics.TorchMetric(metric), which counts the rows of all ranks, got %s, "
            "which counts those of its own rank; wrap it, or leave it if each rank sees all rows.",
            ", ".join(names),
        )
