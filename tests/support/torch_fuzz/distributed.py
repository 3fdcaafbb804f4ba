"""The same program with hpcdist, on all ranks of the job."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from made_up_hosts import group_on
from mpi4py import MPI
from torch import Tensor, nn

import hpcdist
from hpcdist.gradients import reducer
from hpcdist.plan import runs
from hpcdist.runtime.process import make_world
from hpcdist.strategy import multi_worker
from torch_fuzz.models import Rows, make_rows
from torch_fuzz.program import ClusterSpec, Program
from torch_fuzz.training import Training

#: The gradient_op for each way to scale a loss.
_OPS = {"average": "sum", "sum": "sum", "mean": "mean", "settled": None, "unsaid": None}


class Distributed:
    """The backend of hpcdist.

    Collective: all ranks of the job.

    Args:
        program: to be run.
        comm: the ranks, for the program's own files.

    Attributes:
        strategy: of the program.
        numbers: of this rank's rows, batch by batch.
    """

    def __init__(self, program: Program, comm: MPI.Comm) -> None:
        self._program = program
        self._comm = comm
        self.strategy = make_strategy(program)
        self.numbers: list[list[int]] = []

    def scope(self) -> AbstractContextManager[Any]:
        return self.strategy.scope()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.strategy.no_sync()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._program.cluster.uses_run:
            return self.strategy.run(step, args=args)
        return step(*args)

    def merge(self, change: Callable[[], Any]) -> None:
        hpcdist.get_replica_context().merge_call(lambda strategy: change())

    def batches(self, rows: Rows) -> Iterator[tuple[Any, int]]:
        data = self._program.data
        dataset = hpcdist.Dataset.from_tensor_slices(rows)
        if data.is_shuffled:
            dataset = dataset.shuffle(seed=self._program.seed)
        dataset = dataset.batch(data.batch, drop_remainder=data.drops_remainder)
        if data.prefetch:
            dataset = dataset.prefetch(data.prefetch)
        distributed = self.strategy.experimental_distribute_dataset(dataset)
        while True:
            for step, part in enumerate(distributed):
                numbers = []
                for column in self.strategy.experimental_local_results(part["number"]):
                    numbers += column.tolist()
                self.numbers.append(numbers)
                yield part, min(data.batch, data.n_rows - step * data.batch)

    def scale(self, losses: Tensor, weights: Tensor | None, divisor: int) -> Tensor:
        if self._program.combine in ("settled", "average"):
            return hpcdist.compute_average_loss(losses, sample_weight=weights, global_batch_size=divisor)
        weighted = losses if weights is None else losses * weights
        if self._program.combine == "sum":
            return weighted.sum() / divisor
        return weighted.mean()

    def regularize(self, loss: Tensor) -> Tensor:
        return hpcdist.scale_regularization_loss(loss)

    def total(self, value: Any) -> float:
        return float(self.strategy.reduce("sum", value, axis=None))

    def total_inside(self, value: Tensor) -> Tensor:
        if not self._program.cluster.uses_run:
            return self.strategy.reduce("sum", value, axis=None)
        return hpcdist.get_replica_context().all_reduce("sum", value)

    def sums(self, gradients: list[Tensor]) -> list[Tensor]:
        return hpcdist.get_replica_context().all_reduce("sum", gradients)

    def make_optimizer(self, optimizer_class: Any, groups: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
        if self._program.cluster.divides_steps:
            return hpcdist.optim.ZeroRedundancyOptimizer(groups, optimizer_class, **options)
        optimizer: torch.optim.Optimizer = optimizer_class(groups, **options)
        return optimizer

    def clip_norm(self, optimizer: Any, parameters: list[Tensor], max_norm: float) -> None:
        if self._program.cluster.divides_steps:
            optimizer.clip_grad_norm_(max_norm)
        else:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_value(self, optimizer: Any, parameters: list[Tensor], limit: float) -> None:
        if self._program.cluster.divides_steps:
            optimizer.clip_grad_value_(limit)
        else:
            nn.utils.clip_grad_value_(parameters, limit)

    def apply(self, optimizer: torch.optim.Optimizer, pairs: list[Any], is_method: bool) -> None:
        if is_method and hasattr(optimizer, "apply_gradients"):
            optimizer.apply_gradients(pairs)
        else:
            self.strategy.apply_gradients(optimizer, pairs)

    def synchronize_statistics(self, model: nn.Module) -> nn.Module:
        return hpcdist.convert_sync_batchnorm(model)

    def save_and_restore(self, objects: dict[str, Any], disturb: Callable[[], None]) -> None:
        with self._folder() as folder:
            drivers = [torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.optim.swa_utils.AveragedModel]
            checkpoint = hpcdist.Checkpoint(**objects, strategy=self.strategy, leave_out=drivers)
            manager = hpcdist.CheckpointManager(checkpoint, folder)
            path = manager.save(1)
            if not self._program.cluster.has_one_copy:
                disturb()
            checkpoint.read(path or manager.latest_path)
            manager.wait()
            self._comm.Barrier()

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        name = self._comm.bcast(tempfile.mkdtemp(prefix="hpcdist-fuzz-") if self._comm.rank == 0 else None, 0)
        yield Path(name)
        if self._comm.rank == 0:
            shutil.rmtree(name, ignore_errors=True)


def make_strategy(program: Program) -> Any:
    """Return the strategy of a program. Collective: all ranks."""
    cluster = program.cluster
    if cluster.extra_replicas is None:
        n_replicas = None
    else:
        n_replicas = MPI.COMM_WORLD.size + cluster.extra_replicas
    options = {"num_replicas": n_replicas, "gradient_op": _OPS[program.combine]}
    if cluster.strategy == "central":
        return hpcdist.CentralStorageStrategy(**options)
    if cluster.strategy == "mirrored":
        return hpcdist.MirroredStrategy(num_replicas=n_replicas, gradient_op=options["gradient_op"])
    communication = hpcdist.CommunicationOptions(
        implementation=cluster.implementation, bytes_per_pack=cluster.bucket_bytes
    )
    return hpcdist.MultiWorkerMirroredStrategy(communication_options=communication, **options)


@contextmanager
def cluster_of(spec: ClusterSpec) -> Iterator[None]:
    """Let strategies made in the block believe in other hosts, and sum small gradients as they would large ones."""
    group_of = multi_worker.group_of
    direct_bytes = reducer.DIRECT_BYTES
    joined_elements = runs.JOINED_ELEMENTS
    groups: list[Any] = []

    def make(role_comm: MPI.Comm, timeout_s: float | None = None, world: Any = None) -> Any:
        if not groups:
            groups.append(group_on(spec.hosts, role_comm, world or make_world(), timeout_s=timeout_s))
        return groups[0]

    multi_worker.group_of = make if spec.hosts else group_of
    reducer.DIRECT_BYTES = spec.direct_bytes or direct_bytes
    runs.JOINED_ELEMENTS = 1  # small parameters are joined, too, though last bits may differ then
    try:
        yield
    finally:
        multi_worker.group_of = group_of
        reducer.DIRECT_BYTES = direct_bytes
        runs.JOINED_ELEMENTS = joined_elements
        for group in groups:
            group.free()


def run_distributed(program: Program, comm: MPI.Comm) -> tuple[dict[str, Any], list[list[int]]]:
    """Return what the program leaves on this rank, and the numbers of the rows of each batch here."""
    torch.manual_seed(program.seed + comm.rank)  # the chief's weights win
    rows = make_rows(program.data.n_rows, program.seed, getattr(torch, program.dtype))
    backend = Distributed(program, comm)
    training = Training(program, backend)
    training.run(rows)
    return training.state(), backend.numbers
