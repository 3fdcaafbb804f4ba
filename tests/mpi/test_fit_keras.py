"""fit on several ranks gives what Keras gives in one process: recorded programs, some of each kind of truth."""

import pytest
import torch
from oracle.fit_programs import LOSSES
from oracle.fit_replay import CASES, check
from torch import nn

import hpcdist

pytestmark = pytest.mark.mpi

#: Of each kind, this many programs; those that ignore labels apart, as ranks must know what the others ignore.
N_OF_KIND = 2
IGNORING = [case for case in CASES if "ignore_class" in case["program"]["loss_arguments"]][:8]
OTHERS = []
for kind in LOSSES:
    OTHERS += [case for case in CASES if case["program"]["kind"] == kind][:N_OF_KIND]


def name_of(case):
    return str(case["program"]["number"])


@pytest.fixture(scope="module", params=["SUM", "MEAN", "4 replicas"])
def strategy(request):
    if request.param == "4 replicas":
        return hpcdist.MultiWorkerMirroredStrategy(num_replicas=4)
    return hpcdist.MultiWorkerMirroredStrategy(gradient_op=request.param)


@pytest.mark.feature("training.compile-and-fit", "training.metric-averaging")
@pytest.mark.parametrize("case", IGNORING + OTHERS, ids=name_of)
def test_programs_of_keras(comm, strategy, case):
    check(case, strategy)


@pytest.mark.parametrize("case", IGNORING[:3], ids=name_of)
def test_labels_are_counted_over_pieces_and_ranks(comm, case):
    check(case, hpcdist.MultiWorkerMirroredStrategy(), gradient_accumulation_steps=2)


def test_a_rank_may_have_no_label_that_counts(comm):
    """Gradients are those of the rows that count; a batch without any leaves the weights as they are."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(nn.Linear(2, 3))
        loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model.compile(lambda parameters: torch.optim.SGD(parameters, lr=0.5), loss)
    inputs = torch.eye(2).repeat(2 * comm.size, 1)
    labels = torch.zeros(len(inputs), dtype=torch.long)
    before = model.get_weights()
    assert model.train_on_batch(inputs, labels)["loss"] == 0
    assert all((now == then).all() for now, then in zip(model.get_weights(), before, strict=True))
    labels[-1] = 2
    alone = nn.functional.cross_entropy(model.net(inputs[-1:]), labels[-1:])
    assert model.test_on_batch(inputs, labels)["loss"] == pytest.approx(alone.item(), rel=1e-5)
