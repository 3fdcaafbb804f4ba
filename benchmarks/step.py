"""Time whole training steps: hpcdist beside torch DDP and beside no synchronization, in one launch, block by block.

mpirun -n 2 python benchmarks/step.py --model mlp --out out/step
python benchmarks/step.py --single --model mlp --out out/single     (what wrapping a single rank costs)
python benchmarks/step.py --single --device cuda --out out/gpu      (models on the rank's GPU)
python benchmarks/step.py --merge out/step/step-mlp.json out/peers/*.json --out out/all

Before any timing, the contenders train side by side for some steps and must agree with plain torch. After every block
the replicas of a contender must be equal, bit for bit.
"""

from functools import partial

import numpy as np
import torch
from command_line import add_merge_options, add_report_options, parser_of
from gloo import start_gloo
from measure import Environment, timed_block
from models import MODELS, N_BATCHES, adam, batches, build, train_step
from report import compare, publish_merged
from step_contenders import (
    ALL,
    BARE,
    BASELINES,
    CEILING,
    CONTENDERS,
    DDP_NCCL,
    HPCDIST,
    ON_GPUS,
    SHARDED,
    SHARED_FLOOR,
    SINGLE,
    watches,
    with_watches,
    without_watches,
)

from hpcdist.runtime.process import make_world

#: Steps before any timing, after which contenders must agree with plain torch on whole batches; and how closely.
N_CHECKED_STEPS = 10
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3
#: Largest error of a gradient, as a part of the largest gradient.
GRADIENT_TOLERANCE = 0.02


def parse_args():
    parser = parser_of(__doc__)
    add_report_options(parser, "step-MODEL", n_rounds=10)
    add_merge_options(parser)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument(
        "--batch",
        type=int,
        default=64,
        help="rows of one step on all ranks together",
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of a block")
    parser.add_argument(
        "--single", action="store_true", help="one rank: hpcdist against bare torch"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where models compute",
    )
    parser.add_argument(
        "--only",
        choices=CONTENDERS,
        nargs="+",
        metavar="NAME",
        help="these contenders alone",
    )
    return parser.parse_args()


class Trainer:
    """One contender: its model, its optimizer, and its position in the data."""

    def __init__(self, name, args, comm, data):
        self.name = name
        self._comm = comm
        self._data = data
        self._n_taken = 0
        before = watches()
        make = ALL[name]
        self.model, self._optimizer = make(args.model, args.device, comm)
        self._guard = without_watches
        if name in (HPCDIST, SHARDED):
            added_watches = watches() - before
            self._guard = partial(with_watches, added_watches)

    def train(self, n_steps):
        """Take steps; return the last loss."""
        with self._guard():
            for _ in range(n_steps):
                batch = self._data[self._n_taken % N_BATCHES]
                loss = train_step(self.model, self._optimizer, batch)
                self._n_taken += 1
        if loss.is_cuda:
            torch.cuda.synchronize()
        return loss

    def block(self, n_steps):
        """Return wall and CPU-seconds per step of a block, and check its outcome."""
        times = timed_block(self._comm, lambda: self.train(n_steps), n_steps)
        self.check_equal_replicas()
        return times

    def check_equal_replicas(self):
        """Raise AssertionError unless all ranks hold the same finite weights. Collective over the ranks."""
        weights, _ = flat(self.model)
        chief_weights = self._comm.bcast(weights)
        is_finite = np.isfinite(weights).all()
        is_equal = self.name == CEILING or np.array_equal(weights, chief_weights)
        if not is_finite or not is_equal:
            raise AssertionError(
                f"step: expected equal finite replicas of {self.name!r}, got others; see its sums."
            )


def check_against(reference, trainer, loss):
    """Raise AssertionError unless a contender's loss, weights and gradients agree with the reference.

    Gradients are compared too, as Adam takes the same step for twice the gradient.

    Args:
        reference: loss, weights and gradients of `reference_training`.
        trainer: the contender.
        loss: last loss of the contender.
    """
    trainer.check_equal_replicas()
    due_loss, due_weights, due_gradients = reference
    weights, gradients = flat(trainer.model)
    loss_error = abs(loss - due_loss)
    weight_error = largest_difference(weights, due_weights)
    gradient_error = 0.0
    if len(gradients) or trainer.name not in (SHARDED, SHARED_FLOOR):
        gradient_error = largest_difference(gradients, due_gradients)
    errors = np.array([loss_error, weight_error, gradient_error])
    largest_gradient = np.abs(due_gradients).max()
    gradient_tolerance = GRADIENT_TOLERANCE * largest_gradient
    limits = np.array([LOSS_TOLERANCE, WEIGHT_TOLERANCE, gradient_tolerance])
    if not (errors <= limits).all():
        raise AssertionError(
            f"step: expected loss, weights and gradients of {trainer.name!r} within {limits} of plain torch, got "
            f"{errors}; do not use its timings."
        )


def largest_difference(values, due):
    """Return the largest difference of two arrays."""
    return float(np.abs(values - due).max())


def flat(model):
    """Return all weights in one array, and all gradients; no gradients if each rank has a share of them only."""
    weights = [torch.empty(0)]
    gradients = [torch.empty(0)]
    for parameter in model.parameters():
        weights.append(parameter.detach().reshape(-1).cpu())
        if type(parameter.grad) is torch.Tensor:
            gradients.append(parameter.grad.reshape(-1).cpu())
    flat_weights = torch.cat(weights)
    flat_gradients = torch.cat(gradients)
    return flat_weights.numpy(), flat_gradients.numpy()


def reference_training(args, comm, n_steps):
    """Return loss on this rank's rows, weights and gradients, after steps on whole global batches in plain torch."""
    model = build(args.model, args.device)
    rows = batches(args.batch, 0, 1, args.device)
    optimizer = adam(model)
    rank_rows = batches(args.batch, comm.rank, comm.size, args.device)
    with without_watches():
        for number in range(n_steps):
            images, labels = rank_rows[number]
            with torch.no_grad():
                outputs = model(images)
                loss = torch.nn.functional.cross_entropy(outputs, labels)
            train_step(model, optimizer, rows[number])
    weights, gradients = flat(model)
    return loss.item(), weights, gradients


def time_contenders(names, baselines, args, comm):
    """Return the case of one model. Collective over `comm`."""
    data = batches(args.batch, comm.rank, comm.size, args.device)
    trainers = {name: Trainer(name, args, comm, data) for name in names}
    reference = reference_training(args, comm, N_CHECKED_STEPS)
    blocks = {}
    for name, trainer in trainers.items():
        loss = trainer.train(N_CHECKED_STEPS)
        if name != CEILING:
            check_against(reference, trainer, loss.item())
        trainer.train(args.steps)
        blocks[name] = partial(trainer.block, args.steps)
    title = args.model
    if args.single:
        title += ", one rank"
    if args.device == "cuda":
        title += f", {torch.cuda.get_device_name()}"
    return compare(title, blocks, baselines, args.rounds)


def time_all(args):
    comm = make_world().role_comm  # with it, a rank that fails ends all
    if args.single and comm.size > 1:
        raise SystemExit(
            f"step: expected one rank with --single, got {comm.size}; start without mpirun."
        )
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # Adam on random labels meets them after some thousand steps
    environment = Environment(comm)
    is_on_device = args.device == "cuda"
    stem = f"step-{args.model}"
    if is_on_device:
        stem += "-cuda"
    if args.single and not is_on_device:
        case = time_contenders(SINGLE, [BARE], args, comm)
    elif args.single:
        with start_gloo(comm, "nccl"):
            names = [*SINGLE, DDP_NCCL]
            case = time_contenders(names, [BARE, DDP_NCCL], args, comm)
    else:
        with start_gloo(comm):
            names = args.only
            if not names:
                names = ON_GPUS if is_on_device else CONTENDERS
            baselines = [name for name in BASELINES if name in names]
            case = time_contenders(names, baselines or names[:1], args, comm)
    environment.publish([case], args.out, stem, args.label)


def main():
    args = parse_args()
    if args.merge:
        publish_merged(args.merge, args.out, "step")
    else:
        time_all(args)


if __name__ == "__main__":
    main()
