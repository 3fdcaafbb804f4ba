"""Train an image classifier on all ranks. Stop or kill it at any time; the same command resumes it.

python jobs/train.py
mpirun -n 4 python jobs/train.py --run-dir runs/digits
python jobs/train.py --replicas 8                         (the same bits on any number of ranks)
mpirun -n 5 python jobs/train.py --strategy ps --roles 'ps:2,worker:*'         (parameter servers)
srun --mpi=pmi2 python jobs/train.py --model cnn --data /datasets/mnist      (in an sbatch script)

Default data: the 1,797 handwritten digits that come with scikit-learn. The run folder holds checkpoints/, train.log,
metrics.jsonl, and what docs/reference/command.md lists; the last checkpoint has the final weights.
"""

import argparse
from pathlib import Path

import torch
from images import build_cnn, load_digits, load_mnist
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="mlp")
    add("--data", type=Path, help="folder with MNIST's four IDX files, gzipped or not")
    add("--epochs", type=positive, default=20)
    add("--batch", type=positive, default=64, help="rows of one step on all ranks together")
    add("--replicas", type=positive, help="on any number of ranks; default: one per rank")
    add("--strategy", choices=["all-reduce", "ps", "ps-synchronous"], default="all-reduce")
    add("--roles", help="of the ranks, such as ps:2,worker:*; default: TF_CONFIG or HPCDIST_ROLES")
    add("--max-staleness", type=int, help="steps that a worker on ps may be ahead of others")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU, if any")
    add("--seed", type=int, default=1)
    add("--run-dir", type=Path, default=Path("runs/train"))
    add("--save-every", type=positive, default=100, metavar="STEPS")
    add("--copy-every", type=positive, metavar="STEPS", help="copy the state to nodes' memory")
    return parser.parse_args()


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return int(text)


def build_mlp(height, width):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(height * width, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def make_strategy(args):
    is_all_reduce = args.strategy == "all-reduce"
    options = {"device": None if args.device == "auto" else args.device}
    resolver = hpcdist.MPIClusterResolver(roles=args.roles) if args.roles else None
    if is_all_reduce and args.max_staleness is None:
        options["num_replicas"] = args.replicas
        return hpcdist.MultiWorkerMirroredStrategy(resolver, **options)
    if is_all_reduce or args.replicas:
        raise SystemExit("train.py: --replicas is for all-reduce, and --max-staleness for ps")
    options.update(max_staleness=args.max_staleness, synchronous=args.strategy != "ps")
    return hpcdist.ParameterServerStrategy(resolver, **options)


MODELS = {"mlp": build_mlp, "cnn": build_cnn}


def append(path, line):
    with open(path, "a") as file:
        file.write(line + "\n")


def main():
    args = parse_args()
    strategy = make_strategy(args)  # ps ranks serve in it, and end there
    torch.manual_seed(args.seed)
    train, test = load_mnist(args.data) if args.data else load_digits()

    with strategy.scope():
        images, _ = train
        _, _, height, width = images.shape
        model = MODELS[args.model](height, width)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        mean_loss = hpcdist.metrics.Mean()
        accuracy = hpcdist.metrics.SparseCategoricalAccuracy()
    dataset = hpcdist.Dataset.from_tensor_slices(train).shuffle(seed=args.seed).batch(args.batch)
    batches = strategy.experimental_distribute_dataset(dataset)
    test_dataset = hpcdist.Dataset.from_tensor_slices(test).batch(512)
    test_batches = strategy.experimental_distribute_dataset(test_dataset)

    metrics = hpcdist.MetricsFile(args.run_dir / "metrics.jsonl")
    progress = {"data": batches, "strategy": strategy, "mean_loss": mean_loss, "metrics": metrics}
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, **progress)
    memory = "/dev/shm" if args.copy_every else None
    folder = args.run_dir / "checkpoints"
    manager = hpcdist.CheckpointManager(checkpoint, folder, fast_directory=memory)
    saves = {"every_steps": args.save_every, "in_memory_every_steps": args.copy_every}
    schedule = hpcdist.SaveSchedule(**saves)
    resolver = strategy.cluster_resolver
    handler = hpcdist.PreemptionCheckpointHandler(resolver, manager, schedule=schedule)

    def report(text):
        if strategy.is_chief:
            print(text, flush=True)
            append(args.run_dir / "train.log", text)

    beginning = f"resuming from {handler.restored_path}" if handler.restored_path else "new run"
    n_replicas = strategy.num_replicas_in_sync
    report(f"{n_replicas} replicas; {beginning}, on {strategy.device.type}")

    def train_step(images, labels):
        optimizer.zero_grad()
        scores = model(images)
        losses = cross_entropy(scores, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=args.batch)
        loss.backward()
        optimizer.step()
        mean_loss.update_state(losses.detach())

    @torch.no_grad()
    def test_step(images, labels):
        accuracy.update_state(labels, model(images))

    def evaluate():
        accuracy.reset_state()
        if args.strategy != "all-reduce":
            strategy.refresh()  # all workers evaluate the same values
        model.eval()
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        model.train()
        return float(accuracy.result())

    with handler:  # saves periodically, on a stop request, and at the end
        for epoch in range(len(metrics), args.epochs):
            # otherwise a stop came after its last step and before its record
            if epoch == batches.epoch:
                for batch in batches:
                    handler.run(strategy.run, train_step, args=batch)
            loss = float(mean_loss.result())
            right = evaluate()
            step = handler.total_run_calls
            place = f"epoch {epoch + 1}/{args.epochs}  step {step}"
            report(f"{place}  loss {loss:.4f}  test accuracy {right:.4f}")
            metrics.write(step, epoch=epoch, loss=loss, test_accuracy=right)
            mean_loss.reset_state()
        right = evaluate()
    report(f"test accuracy {right:.4f}  checkpoint {handler.latest_path}")


if __name__ == "__main__":
    main()
