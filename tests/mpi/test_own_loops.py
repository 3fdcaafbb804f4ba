"""Loops that programs write themselves: they save, stop and resume exactly, weigh gradients exactly, or are refused."""

import contextlib
import itertools
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import hpcdist
from hpcdist.errors import DataError, DesyncError, GradientError, UsageError
from hpcdist.runtime.process import call_when_done

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import loops
import weighed_loops

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("no_handler_left")]
ROWS = 24
BATCH = 6


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_script_resumes_with_the_bits_of_its_unbroken_run(comm, shared_path, seed):
    _, why = loops.check(loops.draw(seed), str(shared_path / "run"), random.Random(seed))
    assert why == ""


@pytest.mark.parametrize("seed", range(30))
def test_a_drawn_loop_weighs_its_gradients_or_is_refused(comm, seed):
    _, why = weighed_loops.run(seed)
    assert why in ("", "refused")
    assert len(set(comm.allgather(why))) == 1


def rows_of(n_rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_rows, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(n_rows, 1, generator=generator, dtype=torch.float64))


class Program:
    """A model and an optimizer, and what a loop does with a batch."""

    def __init__(self, make_model=lambda: nn.Linear(3, 1), rate=0.1):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
        torch.manual_seed(3)
        with self.strategy.scope():
            self.model = make_model().double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.objects = {"model": self.model, "optimizer": self.optimizer, "strategy": self.strategy}

    def handler(self, folder, **objects):
        checkpoint = hpcdist.Checkpoint(**self.objects, **objects)
        return hpcdist.PreemptionCheckpointHandler(None, checkpoint, folder / "checkpoints", save_every_steps=2)

    def step(self, x, y):
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def distributed(self):
        return self.strategy.experimental_distribute_dataset(DataLoader(rows_of(), batch_size=BATCH))


def stop(rank, comm):
    """Ask for a stop by a signal to one rank."""
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGTERM)


def weights(program):
    return parameters_to_vector(program.model.parameters()).detach()


# -- loaders of the program's own --------------------------------------------------------------------------------------


def train_on_own_loader(program, handler, sampler, seen, stop_at=None, comm=None):
    """Train for 3 epochs, and note in `seen` what each step is made of."""
    loader = DataLoader(rows_of(), batch_size=2, sampler=sampler)
    for epoch in range(sampler.epoch, 3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            program.step(x, y)
            seen.append(x[:, 0].tolist())
            if handler.step == stop_at:
                stop(comm.size - 1, comm)


def make_dropout():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def test_a_loader_of_the_programs_own_resumes_at_the_exact_batch_twice_in_an_epoch(comm, shared_path):
    """With dropout: what a loader draws at the start of a pass must not shift the numbers of a resumed one."""
    unbroken = Program(make_dropout, rate=0.01)
    sampler = hpcdist.DistributedSampler(rows_of(), seed=5)
    seen = []
    parts = []
    with unbroken.handler(shared_path / "unbroken", data=sampler) as handler:
        train_on_own_loader(unbroken, handler, sampler, seen)
        n_steps = handler.step
    for stop_at in (1, n_steps // 3 - 1, n_steps // 3 + 1, None):  # the second stop is at the end of an epoch
        program = Program(make_dropout, rate=0.01)
        sampler = hpcdist.DistributedSampler(rows_of(), seed=5)
        handler = program.handler(shared_path / "stopped", data=sampler)
        with contextlib.suppress(SystemExit), handler:
            train_on_own_loader(program, handler, sampler, parts, stop_at, comm)
        handler.close()
    assert handler.step == n_steps
    assert torch.equal(weights(program), weights(unbroken))
    assert parts == seen


def test_a_loader_that_a_generator_draws_from_is_no_loader_of_the_loop(comm, shared_path):
    program = Program()
    loader = DataLoader(rows_of(), batch_size=None)
    rows = hpcdist.Dataset.from_generator(lambda: iter(loader)).batch(BATCH)
    batches = program.strategy.experimental_distribute_dataset(rows)
    with program.handler(shared_path / "run", data=batches) as handler:
        for _ in range(7):
            for x, y in batches:
                program.step(x * 2, y)
        assert handler.step == 28
    assert Path(handler.latest_path).name.startswith("step-00000028")


def test_two_loaders_that_train_by_one_sampler_are_refused(comm, shared_path):
    """One position cannot be that of both."""
    program = Program()
    sampler = hpcdist.DistributedSampler(rows_of())
    loaders = [DataLoader(rows_of(), batch_size=2, sampler=sampler) for _ in range(2)]
    handler = program.handler(shared_path / "run", data=sampler)

    def train():
        for _ in loaders[0]:  # read for something else: this one is followed
            pass
        for _ in range(20):
            for x, y in loaders[1]:
                program.step(x, y)

    with pytest.raises(UsageError, match="position in the data"):
        train()
    handler.close()


def test_another_epoch_than_the_restored_one_is_refused(shared_path):
    sampler = hpcdist.DistributedSampler(rows_of())
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "n_used": 1})
    assert sampler.epoch == 2
    with pytest.raises(DataError, match=r"range\(sampler.epoch"):
        sampler.set_epoch(0)
    sampler.set_epoch(2)
    assert len(list(sampler)) == len(sampler) - 1
    with pytest.raises(DataError, match="got another way"):
        sampler.state_dict()
    with pytest.raises(DataError, match="n_rows"):
        hpcdist.DistributedSampler(rows_of(2 * ROWS)).load_state_dict(
            hpcdist.DistributedSampler(rows_of()).state_dict()
        )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(
    "kind",
    [
        "torch's sampler",
        "torchdata",
        "torchdata, kept workers",
        "not in the Checkpoint",
        "index loop",
        "copies drawn ahead",
    ],
)
def test_a_loop_that_cannot_be_saved_is_refused_within_20_steps_with_its_cure(comm, shared_path, kind):
    program = Program()
    sampler = hpcdist.DistributedSampler(rows_of())
    if kind == "torch's sampler":
        sampler = torch.utils.data.distributed.DistributedSampler(rows_of(), comm.size, comm.rank)
    batches = DataLoader(rows_of(), batch_size=2, sampler=sampler)
    if kind.startswith("torchdata"):
        n_workers = 2 if kind.endswith("workers") else 0
        batches = StatefulDataLoader(rows_of(), 2, num_workers=n_workers, persistent_workers=n_workers > 0)
    cure = "experimental_distribute_dataset.*Checkpoint"
    if kind == "index loop":
        x, y = rows_of().tensors
        batches = [(x[start : start + 4], y[start : start + 4]) for start in range(0, ROWS, 4)]
        cure = r"handler.poll\(\)"
    if kind == "copies drawn ahead":
        batches = [program.distributed()]
        cure = "as they were drawn"
    handler = program.handler(shared_path / "run")
    n_steps = []

    def train():
        for _ in range(40):
            for batch in loops.Job.ahead(batches[0], 1) if kind == "copies drawn ahead" else batches:
                program.step(*[tensor.clone() for tensor in batch])
                n_steps.append(1)

    with pytest.raises(UsageError, match=cure):
        train()
    handler.close()
    assert len(n_steps) <= 20


def test_a_loop_that_polls_by_itself_is_not_refused(comm, shared_path):
    program = Program()
    x, y = rows_of().tensors
    with program.handler(shared_path / "run") as handler:
        for step in range(handler.step, 30):
            first = step % 6 * 4
            program.step(x[first : first + 4], y[first : first + 4])
            handler.poll()
        assert handler.step == 30


# -- passes and epochs -----------------------------------------------------------------------------------------------


def test_a_peek_consumes_nothing_and_is_no_epoch(comm, shared_path):
    program = Program()
    batches = program.distributed()
    with program.handler(shared_path / "run", data=batches):
        for epoch in range(2):
            first = next(iter(batches))
            second_peek = next(iter(batches))
            assert all(
                torch.equal(first_tensor, second_tensor)
                for first_tensor, second_tensor in zip(first, second_peek, strict=True)
            )
            for number, (x, y) in enumerate(batches):
                if number == 0:
                    assert torch.equal(x, first[0])
                program.step(x, y)
            assert batches.epoch == epoch + 1


def test_passes_that_are_left_go_on_with_other_rows_where_nothing_is_saved(comm):
    program = Program()
    order = hpcdist.Dataset.from_tensor_slices(rows_of().tensors).shuffle(seed=1).batch(BATCH)
    batches = program.strategy.experimental_distribute_dataset(order)
    parts = []
    for _ in range(3):
        for x, y in itertools.islice(batches, 2):
            program.step(x, y)
            parts.append(x.tolist())
    assert batches.epoch == 0, "no pass has ended"
    passes = [str(parts[first : first + 2]) for first in (0, 2, 4)]
    assert len(set(passes)) == 3


def test_a_pass_that_is_left_is_refused_where_it_is_saved_and_take_is_the_cure(comm, shared_path):
    program = Program()
    batches = program.distributed()
    handler = program.handler(shared_path / "refused", data=batches)

    def train():
        for _ in range(2):
            for x, y in itertools.islice(batches, 2):
                program.step(x, y)

    with pytest.raises(DataError, match=r"take\(2\)"):
        train()
    handler.close()
    n_batches = []
    for attempt in range(2):
        program = Program()
        batches = program.distributed()
        handler = program.handler(shared_path / "taken", data=batches)
        with contextlib.suppress(SystemExit), handler:
            for epoch in range(batches.epoch, 3):
                for x, y in batches.take(2):
                    program.step(x, y)
                    n_batches.append((epoch, handler.step))
                    if handler.step == 3 and attempt == 0:
                        stop(0, comm)
        handler.close()
    assert handler.step == 6
    assert [epoch for epoch, _ in n_batches[-3:]] in ([1, 2, 2], [2, 2], [1, 1, 2])
    with pytest.raises(DataError, match="at least 1"):
        batches.take(0)


def test_a_batch_that_one_rank_alone_has_drawn_is_found_at_the_next_sum(comm):
    program = Program()
    batches = program.distributed()
    if comm.rank == 0:
        next(iter(batches))  # for a plot
    for x, y in batches:
        program.step(x, y)
    if comm.rank == 0:
        for _ in batches:
            pass
    if comm.size == 1:
        return

    def train():
        for _ in range(3):
            for x, y in batches:
                program.step(x, y)

    with pytest.raises(GradientError, match="same global batch"):
        train()


def test_a_batch_that_one_rank_alone_has_drawn_is_found_at_the_end_too(comm, shared_path):
    program = Program()
    batches = program.distributed()

    def train():
        with program.handler(shared_path / "run", data=batches):
            for x, y in batches:
                program.step(x, y)
            if comm.rank == 0:
                batches._source.move("elsewhere")  # as a pass would that nobody else makes

    if comm.size == 1:
        train()
        return
    with pytest.raises(DesyncError, match="same batches"):
        train()


def test_len_is_the_number_of_batches(comm):
    batches = Program().distributed()
    assert len(batches) == len(list(batches)) == ROWS // BATCH
    assert bool(batches)


def test_a_peek_in_each_epoch_resumes_at_the_end_of_an_epoch(comm, shared_path):
    """There a peek would find no batch: the job stops when the next epoch begins."""
    n_steps = []
    for attempt in range(3):
        program = Program()
        batches = program.distributed()
        handler = program.handler(shared_path / "run", data=batches)
        with contextlib.suppress(SystemExit), handler:
            for _ in range(batches.epoch, 4):
                next(iter(batches))
                for x, y in batches:
                    if handler.step == 4 * attempt + 3 and attempt < 2:
                        stop(comm.size - 1, comm)  # its step carries the request
                    program.step(x, y)
        handler.close()
        n_steps.append(handler.step)
    assert n_steps == [4, 8, 16]


def test_what_a_program_evaluates_at_its_end_is_not_saved_as_its_last_step(comm, shared_path):
    """The best weights are loaded and tested on a distributed dataset, whose draws are points of the loop, too."""
    program = Program()
    batches = program.distributed()
    test_batches = program.distributed()
    handler = program.handler(shared_path / "run", data=batches)
    for x, y in batches.take(3):
        program.step(x, y)
    saved = handler.latest_path
    program.model.load_state_dict({name: value * 0 for name, value in program.model.state_dict().items()})
    for x, _ in test_batches:
        program.model(x)
    handler.record_end()
    call_when_done(None)
    handler.close()
    assert handler.latest_path == saved


@pytest.mark.parametrize("is_in_run", [True, False])
def test_the_last_steps_are_saved_at_the_exit_however_they_are_made(comm, shared_path, is_in_run):
    program = Program()
    batches = program.distributed()
    handler = program.handler(shared_path / "run", data=batches)
    for x, y in batches.take(3):
        if is_in_run:
            handler.run(program.step, x, y)
        else:
            program.step(x, y)
    handler.record_end()
    call_when_done(None)
    handler.close()
    assert Path(handler.latest_path).name.startswith("step-00000003")


def test_polls_before_the_step_are_refused(comm, shared_path):
    """At none of them anything could be saved."""
    program = Program()
    x, y = rows_of().tensors
    handler = program.handler(shared_path / "run")

    def train():
        for _ in range(40):
            program.optimizer.zero_grad()
            nn.functional.mse_loss(program.model(x[:4]), y[:4]).backward()
            handler.poll()
            program.optimizer.step()

    with pytest.raises(UsageError, match=r"after optimizer.step\(\)"):
        train()
    handler.close()


def test_a_loop_that_never_steps_is_refused(comm, shared_path):
    program = Program()
    batches = program.distributed()
    handler = program.handler(shared_path / "run", data=batches)

    def accumulate():
        for _ in range(400):
            for x, y in batches:
                with program.strategy.no_sync():
                    nn.functional.mse_loss(program.model(x), y).backward()

    with pytest.raises(UsageError, match=r"optimizer.step\(\)"):
        accumulate()
    handler.close()


# -- stops -----------------------------------------------------------------------------------------------------------


def advance(kind, item):
    """Change an object of the Checkpoint as a program does between two passes."""
    if kind == "schedule":
        item.step()
    elif kind == "generator":
        item.random()
    elif kind == "array":
        item += 1
    else:
        item.update_state(2.0)


def value_of(kind, item):
    """Return a number that tells how often an object was advanced."""
    if kind == "schedule":
        return item.last_epoch
    if kind == "generator":
        fresh = np.random.default_rng(5)
        return [fresh.random() for _ in range(9)].index(item.random())
    if kind == "array":
        return int(item[0])
    return int(item.result()) // (2 * hpcdist.get_strategy().num_replicas_in_sync)


KINDS = {
    "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "generator": lambda optimizer: np.random.default_rng(5),
    "array": lambda optimizer: np.zeros(3),
    "metric": lambda optimizer: hpcdist.metrics.Sum(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_stop_in_a_validation_saves_the_end_of_the_pass_or_waits(comm, shared_path, kind, is_changed):
    """What advances after it advances in the next attempt; what has advanced must not do so twice."""

    def attempt(stops):
        program = Program()
        batches = program.distributed()
        validation = program.distributed()
        with program.strategy.scope():
            item = KINDS[kind](program.optimizer)
        handler = program.handler(shared_path / f"{is_changed}", data=batches, item=item)
        with contextlib.suppress(SystemExit), handler:
            for epoch in range(batches.epoch, 3):
                for x, y in batches:
                    program.step(x, y)
                if is_changed:
                    advance(kind, item)
                with torch.no_grad():
                    for number, (x, _) in enumerate(validation):
                        program.model(x)
                        if stops and epoch == 1 and number == 0:
                            stop(0, comm)
                            comm.Barrier()
                if not is_changed:
                    advance(kind, item)
        handler.close()
        with program.strategy.scope():
            return handler.step, value_of(kind, item)

    assert attempt(stops=True)[0] == 8
    assert attempt(stops=False) == (12, 3)


def test_without_with_the_last_steps_are_saved_when_all_ranks_have_left(comm, shared_path):
    program = Program()
    batches = program.distributed()
    handler = program.handler(shared_path / "run", data=batches)
    for x, y in itertools.islice(batches, 3):
        program.step(x, y)
    handler.record_end()  # as the exit of the program calls it
    call_when_done(None)
    handler.close()
    assert Path(handler.latest_path).name.startswith("step-00000003")


# -- weights ---------------------------------------------------------------------------------------------------------


def test_a_weight_that_the_program_gives_counts(comm):
    """Rows that no dataset has handed out, not as many on all ranks: an index loop."""
    program = Program()
    x, y = rows_of().tensors
    n_rows = sum(range(1, comm.size + 1))
    first = sum(range(1, comm.rank + 1))
    with pytest.raises(UsageError, match="at least 0"):
        program.strategy.set_row_count(-1)
    program.strategy.set_row_count(comm.rank + 1)
    owned_rows = slice(first, first + comm.rank + 1)
    nn.functional.mse_loss(program.model(x[owned_rows]), y[owned_rows]).backward()
    plain = nn.Linear(3, 1).double()
    plain.load_state_dict(program.model.state_dict())
    nn.functional.mse_loss(plain(x[:n_rows]), y[:n_rows]).backward()
    torch.testing.assert_close(program.model.weight.grad, plain.weight.grad)


def test_rows_that_nobody_has_planned_must_be_as_many_on_all_ranks(comm):
    """The last batch of an index loop: found at the second backward, from which on forwards are watched."""
    program = Program()
    x, y = rows_of().tensors
    nn.functional.mse_loss(program.model(x[:2]), y[:2]).backward()
    loss = nn.functional.mse_loss(program.model(x[: comm.rank + 1]), y[: comm.rank + 1])
    if comm.size == 1:
        loss.backward()
        return
    with pytest.raises(GradientError, match="set_row_count"):
        loss.backward()


class Ragged(torch.utils.data.Dataset):
    """Sequences of different length."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1 + index * 7 % 5, 3, generator=generator, dtype=torch.float64), index % 2


def time_major(rows):
    padded = nn.utils.rnn.pad_sequence([sequence for sequence, _ in rows])
    return padded, torch.tensor([[float(label)] for _, label in rows], dtype=torch.float64)


def nodes_of_graphs(rows):
    sizes = torch.tensor([len(sequence) for sequence, _ in rows])
    return (
        torch.cat([sequence for sequence, _ in rows]),
        sizes,
        torch.tensor([[float(label)] for _, label in rows], dtype=torch.float64),
    )


@pytest.mark.parametrize("collate", [time_major, nodes_of_graphs])
def test_the_plan_knows_the_rows_whatever_a_batch_looks_like(comm, collate):
    def loss_of(model, batch):
        first, *sizes, labels = batch
        values = model(first)
        is_padding = (first == 0).all(-1, keepdim=True)
        if not sizes:
            sums = values.masked_fill(is_padding, 0).sum(0)
        else:
            sums = torch.stack([part.sum(0) for part in values.split(sizes[0].tolist())])
        return nn.functional.mse_loss(sums, labels)

    loader = DataLoader(Ragged(), batch_size=8, collate_fn=collate)
    program = Program()
    plain = nn.Linear(3, 1).double()
    batches = program.strategy.experimental_distribute_dataset(loader)
    for number, (part, batch) in enumerate(zip(batches, loader, strict=True)):
        program.model.zero_grad()
        plain.zero_grad()
        loss_of(program.model, part).backward()
        if number == 0:
            plain.load_state_dict(program.model.state_dict())
        loss_of(plain, batch).backward()
        torch.testing.assert_close(program.model.weight.grad, plain.weight.grad)


# -- what ordinary programs do beside ----------------------------------------------------------------------------------


def test_what_the_chief_alone_does_keeps_no_rank_waiting(comm, shared_path):
    """A validation by a loader of its own, a peek, a sample in train mode, a backward of its own."""
    if comm.size == 1:
        pytest.skip("a rank keeps no other one waiting")
    program = Program()
    batches = program.distributed()
    chief_batches = program.distributed()
    chief_tensor = torch.ones(3, requires_grad=True)
    with program.handler(shared_path / "run", data=batches) as handler:
        if comm.rank == 0:
            next(iter(batches))
        for _ in range(batches.epoch, 3):
            for x, y in loops.Job.ahead(batches, 1):
                program.step(x, y)
                if comm.rank == 0:
                    with torch.no_grad():
                        program.model(torch.zeros(2, 3, dtype=torch.float64))
                    chief_tensor.square().sum().backward()
            if comm.rank == 0:
                next(iter(chief_batches))
                with torch.no_grad():
                    for x, _ in DataLoader(rows_of(), batch_size=4):
                        program.model(x)
        assert handler.step == 12


def test_two_optimizers_and_a_line_of_preprocessing_are_a_plain_loop(comm, shared_path):
    program = Program()
    with program.strategy.scope():
        encoder = nn.Linear(3, 3).double()
        second = torch.optim.SGD(encoder.parameters(), lr=0.1)
    batches = program.distributed()
    with program.handler(shared_path / "run", data=batches, encoder=encoder, second=second) as handler:
        for _ in range(7):
            for x, y in batches:
                second.zero_grad()
                program.optimizer.zero_grad()
                nn.functional.mse_loss(program.model(encoder(x * 2 - 1)), y).backward()
                program.optimizer.step()
                second.step()
        assert handler.step == 56, "each optimizer's step counts"
        assert Path(handler.latest_path).name != "step-00000000-0001.h5"


def test_transforms_of_torch_work_on_models_whose_loops_are_watched(comm):
    program = Program()
    next(iter(program.distributed()))
    rows = torch.ones(4, 3, dtype=torch.float64)
    program.model(rows)
    assert torch.func.vmap(program.model)(rows).shape == (4, 1)
    assert torch.func.jacrev(program.model)(rows[0]).shape == (1, 3)


def test_batches_that_a_generator_draws_without_gradients_are_weighed(comm):
    @torch.no_grad()
    def changed(batches):
        for x, y in batches:
            yield x * 2, y

    program = Program()
    loader = DataLoader(rows_of(13), batch_size=8)
    plain = nn.Linear(3, 1).double()
    whole = list(changed(loader))
    batches = program.strategy.experimental_distribute_dataset(loader)
    for number, (part, batch) in enumerate(zip(changed(batches), whole, strict=True)):
        program.model.zero_grad()
        plain.zero_grad()
        nn.functional.mse_loss(program.model(part[0]), part[1]).backward()
        if number == 0:
            plain.load_state_dict(program.model.state_dict())
        nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
        torch.testing.assert_close(program.model.weight.grad, plain.weight.grad)


def test_loaders_of_the_programs_own_draw_other_random_numbers_in_each_pass(comm):
    Program().distributed()  # from here on loaders are followed
    loader = DataLoader(torch.arange(50), batch_size=50, shuffle=True)
    orders = [next(iter(loader)).tolist() for _ in range(3)]
    assert len(set(map(str, orders))) == 3
    first, second = zip(
        *zip(loader, DataLoader(torch.arange(50), batch_size=50, shuffle=True), strict=True), strict=True
    )
    assert first[0].tolist() != second[0].tolist()


def test_what_is_changed_after_the_last_step_is_not_saved_at_the_exit(comm, shared_path, caplog):
    program = Program()
    batches = program.distributed()
    handler = program.handler(shared_path / "run", data=batches)
    for x, y in batches.take(3):
        program.step(x, y)
    saved = handler.latest_path
    with torch.no_grad():
        program.model.weight.zero_()  # as load_state_dict of the best weights, to test them
    handler.record_end()
    call_when_done(None)
    handler.close()
    assert handler.latest_path == saved
