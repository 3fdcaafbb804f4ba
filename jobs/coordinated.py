"""Train an image classifier by a coordinator, which schedules steps on workers. The same command resumes it.

mpirun -n 4 python jobs/coordinated.py --roles 'ps:1,chief:1,worker:*'
srun --mpi=pmi2 python jobs/coordinated.py                  (in an sbatch script, with TF_CONFIG or HPCDIST_ROLES)

The chief runs this program, workers run the functions that it schedules, and ps ranks hold the variables. Each worker
draws batches in another order, and in a new one when the job is started again.
"""

import argparse
import os
from pathlib import Path

import torch
from images import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist

STEPS_PER_CALL = 4


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roles", help="of the ranks; default: TF_CONFIG or HPCDIST_ROLES")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="rows of one step of one worker")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/coordinated"))
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


def make_resolver(roles):
    if "TF_CONFIG" in os.environ and not roles:
        return hpcdist.TFConfigClusterResolver()
    return hpcdist.MPIClusterResolver(roles=roles)


def main():
    args = parse_args()
    resolver = make_resolver(args.roles)
    if resolver.task_type in ("worker", "ps"):
        hpcdist.Server(resolver).join()  # never returns
    strategy = hpcdist.ParameterServerStrategy(resolver)
    torch.manual_seed(1)
    with strategy.scope():
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        mean_loss = hpcdist.metrics.Mean()
        accuracy = hpcdist.metrics.SparseCategoricalAccuracy()
    coordinator = hpcdist.ClusterCoordinator(strategy)

    def make_batches():  # on each worker
        train, _ = load_digits()
        dataset = hpcdist.Dataset.from_tensor_slices(train)
        return dataset.shuffle().batch(args.batch).repeat()

    def load_test():
        _, rows = load_digits()
        return rows

    batches = coordinator.create_per_worker_dataset(make_batches)
    iterator = iter(batches)
    test = coordinator.create_per_worker_resource(load_test)

    def train_steps(iterator, n_steps):
        for _ in range(n_steps):
            images, labels = next(iterator)
            optimizer.zero_grad()
            scores = model(images)
            losses = cross_entropy(scores, labels, reduction="none")
            loss = hpcdist.compute_average_loss(losses)
            loss.backward()
            optimizer.step()
            mean_loss.update_state(losses.detach())

    @torch.no_grad()
    def test_rows(test, start, stop):
        images, labels = test
        rows = slice(start, stop)
        scores = model(images[rows])
        accuracy.update_state(labels[rows], scores)

    def evaluate():
        """Have each row tested once, by any worker; return the accuracy."""
        accuracy.reset_state()
        _, (_, labels) = load_digits()
        n_rows = len(labels)
        for start in range(0, n_rows, 100):
            stop = start + 100
            coordinator.schedule(test_rows, args=(test, start, stop))
        coordinator.join()
        return float(accuracy.result())

    metrics = hpcdist.MetricsFile(args.run_dir / "metrics.jsonl")
    checkpoint = hpcdist.Checkpoint(
        model=model, optimizer=optimizer, strategy=strategy, mean_loss=mean_loss, metrics=metrics
    )
    folder = args.run_dir / "checkpoints"
    manager = hpcdist.CheckpointManager(checkpoint, folder)
    handler = hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=args.save_every)
    start = "new run"
    if handler.restored_path:
        start = f"resuming from {handler.restored_path}"
    print(start, flush=True)
    (_, train_labels), _ = load_digits()
    steps_per_epoch = len(train_labels) // args.batch
    with handler:
        for epoch in range(len(metrics), args.epochs):
            last_step = (epoch + 1) * steps_per_epoch
            while (n_left := last_step - handler.total_run_calls) > 0:
                while n_left > 0:
                    n_steps = min(STEPS_PER_CALL, n_left)
                    coordinator.schedule(train_steps, args=(iterator, n_steps))
                    n_left -= n_steps
                coordinator.join()  # saves, and stops on request
            loss = float(mean_loss.result())
            right = evaluate()
            step = handler.total_run_calls
            number = epoch + 1
            progress = f"epoch {number}/{args.epochs}  step {step}"
            scores = f"loss {loss:.4f}  accuracy {right:.4f}"
            print(f"{progress}  {scores}", flush=True)
            metrics.write(step, epoch=epoch, loss=loss, test_accuracy=right)
            mean_loss.reset_state()
    right = evaluate()
    print(f"accuracy {right:.4f}  checkpoint {handler.latest_path}", flush=True)


if __name__ == "__main__":
    main()
