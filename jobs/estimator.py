"""Train and evaluate by an Estimator: roles come from TF_CONFIG, HPCDIST_ROLES or --roles. Stop or kill it; it resumes.

mpirun -n 4 python jobs/estimator.py --model-dir runs/estimator
mpirun -n 4 python jobs/estimator.py --roles 'worker:3,evaluator:1'         (evaluates beside training)
mpirun -n 4 python jobs/estimator.py --roles 'ps:1,chief:1,worker:*'        (asynchronous parameter servers)
mpirun -n 4 python jobs/estimator.py --roles 'ps:1,worker:*' --synchronous

On scikit-learn's digits about 0.97 of the test rows are right after 600 steps. An evaluator writes into eval/ of the
folder; without one the last line is

    global step 600  accuracy 0.97
"""

import argparse

import torch
from images import load_digits
from torch import nn

import hpcdist
from hpcdist import estimator
from hpcdist.losses import SparseCategoricalCrossentropy

BATCH = 32  # of each replica


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", default="runs/estimator")
    parser.add_argument(
        "--max-steps",
        type=int,
        default=600,
        help="of all workers together, where each makes its own",
    )
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--roles", help="of the ranks; default: TF_CONFIG or HPCDIST_ROLES")
    parser.add_argument(
        "--synchronous", action="store_true", help="servers wait for all workers at each step"
    )
    return parser.parse_args()


def model_fn(params):
    """Return a compiled model; called once on each worker."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    model = hpcdist.Model(network)
    model.compile(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=params["lr"], momentum=0.9),
        loss=SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train_fn(input_context):
    """Return the rows without end, in another order on each worker."""
    rows, _ = load_digits()
    dataset = hpcdist.Dataset.from_tensor_slices(rows)
    return dataset.shuffle(seed=input_context.input_pipeline_id).repeat().batch(BATCH)


def eval_fn():
    """Return the rows to test on."""
    _, rows = load_digits()
    return hpcdist.Dataset.from_tensor_slices(rows).batch(BATCH)


def make_strategy(args):
    if args.synchronous:
        resolver = hpcdist.MPIClusterResolver(roles=args.roles) if args.roles else None
        return hpcdist.ParameterServerStrategy(resolver, synchronous=True)
    if args.roles is None:
        return None  # the Estimator chooses by the cluster
    resolver = hpcdist.MPIClusterResolver(roles=args.roles)
    if "ps:" in args.roles:
        return hpcdist.ParameterServerStrategy(resolver)
    return hpcdist.MultiWorkerMirroredStrategy(resolver)


def main():
    args = parse_args()
    config = estimator.RunConfig(
        model_dir=args.model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=args.save_every,
        train_distribute=make_strategy(args),
    )
    classifier = estimator.Estimator(model_fn, config=config, params={"lr": 0.05})
    results = estimator.train_and_evaluate(
        classifier,
        estimator.TrainSpec(train_fn, max_steps=args.max_steps),
        estimator.EvalSpec(eval_fn, steps=None),
    )
    if results is not None and classifier.strategy.is_chief:
        metrics, _ = results
        step = metrics["global_step"]
        accuracy = metrics["accuracy"]
        print(f"global step {step}  accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
