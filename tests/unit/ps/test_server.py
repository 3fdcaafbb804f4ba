"""The server's state machine: what is applied when, who waits for whom, and which bytes an answer has."""

import json

import numpy as np
import pytest
import torch

from hpcdist.errors import UsageError
from hpcdist.ps import pickles
from hpcdist.ps.layout import NOTHING, ROWS, WHOLE, Packer, ShardSpec, Unpacker, specs_to_text
from hpcdist.ps.messages import Kind, Message
from hpcdist.ps.server import Rules, Server
from hpcdist.ps.updates import check_optimizer
from hpcdist.runtime.step_flags import Request

SPECS = [
    ShardSpec("w", 0, 0, 3, (3, 2), "float32"),
    ShardSpec("rows", 1, 4, 8, (4, 2), "float32", is_sparse=True),
]


class Serving:
    """A server of two shards, and workers that speak to it by hand."""

    def __init__(self, n_workers=2, kind=torch.optim.SGD, **rules):
        self.server = Server({worker: Packer() for worker in range(n_workers)}, Rules(**rules))
        self.sequences = [0] * n_workers
        self.clocks = [0] * n_workers
        self.known = [[0, 0] for _ in range(n_workers)]
        values = Packer().pack([torch.zeros(3, 2), torch.zeros(4, 2)])
        self.ask(0, Kind.ADOPT, text=specs_to_text(SPECS), payload=values)
        optimizer = kind([torch.zeros(1, requires_grad=True)], lr=1.0)
        settings = {}
        for name, value in optimizer.param_groups[0].items():
            if name != "params":
                settings[name] = value
        pickle = pickles.dumps((kind, optimizer.defaults, [(settings, [0, 1])]))
        payload = Packer().pack([torch.from_numpy(pickle.copy())])
        self.ask(0, Kind.OPTIMIZER, numbers=np.array([0, len(pickle)], np.int64), text="[]", payload=payload)

    def ask(self, worker, kind, **fields):
        self.sequences[worker] += 1
        message = Message(kind, worker, sequence=self.sequences[worker], clock=self.clocks[worker], **fields)
        return self.server.handle(message)

    def push(self, worker, dense=None, rows=None, text="", request=Request.NONE):
        """Push a number for each element of the first shard, or rows {index: number} of the second."""
        self.clocks[worker] += 1
        numbers = [0, 0, 1]
        parts = []
        numbers += [NOTHING if dense is None else WHOLE, 0, self.known[worker][0]]
        if dense is None:
            parts += []
        else:
            parts += [torch.full((3, 2), float(dense))]
        numbers += [NOTHING if rows is None else ROWS, len(rows or ()), self.known[worker][1]]
        if rows is not None:
            parts += [torch.tensor(list(rows)), torch.tensor([[float(row)] * 2 for row in rows.values()])]
        fields = {"numbers": np.array(numbers, np.int64), "text": text, "request": int(request)}
        return self.ask(worker, Kind.STEP, payload=Packer().pack(parts), **fields)

    def values(self):
        first, second = (shard.values.detach() for shard in self.server._shards)
        return first[0, 0].item(), second[:, 0].tolist()


def parts_of(answer):
    """Return what an answer has of each shard: kind, version and tensor."""
    payload = Unpacker(answer.payload)
    parts = []
    for spec, (kind, n_rows, version) in zip(SPECS, answer.numbers[1:].reshape(-1, 3).tolist(), strict=True):
        if kind == ROWS:
            parts.append((kind, version, payload.take((n_rows,), torch.int64).tolist()))
            payload.take((n_rows, 2), torch.float32)
        else:
            parts.append((kind, version, payload.take(spec.shape, torch.float32)[0, 0].item() if kind else None))
    return parts


@pytest.mark.feature("parameter-servers.asynchronous-push-and-pull", "parameter-servers.staleness-report")
def test_each_push_is_applied_as_it_comes_and_answered_with_what_changed():
    serving = Serving()
    (answer,) = serving.push(0, dense=1, rows={1: 2, 3: 4})
    assert answer.kind is Kind.VALUES
    assert parts_of(answer) == [(WHOLE, 1, -1.0), (ROWS, 1, [1, 3])]
    (answer,) = serving.push(1, dense=1)
    assert parts_of(answer) == [(WHOLE, 2, -2.0), (ROWS, 1, [1, 3])]
    assert serving.values() == (-2.0, [0.0, -2.0, 0.0, -4.0])
    assert serving.server.statistics()["staleness"] == {"0": 1, "1": 1}


def test_a_shard_that_has_not_changed_moves_no_bytes():
    serving = Serving()
    serving.push(0, dense=1)
    serving.known[0] = [1, 0]
    (answer,) = serving.push(0)
    assert parts_of(answer) == [(NOTHING, 1, None), (NOTHING, 0, None)]
    assert len(answer.payload) == 0
    (answer,) = serving.ask(0, Kind.PULL, numbers=np.array([0, 0, 1, 0, 0, 0, 0, 0, 0], np.int64))
    assert parts_of(answer) == [(WHOLE, 1, -1.0), (NOTHING, 0, None)]


def test_rows_of_an_optimizer_that_changes_all_of_them_are_all_sent():
    serving = Serving(kind=torch.optim.SGD)
    serving.server._updaters[0].optimizer.param_groups[0]["momentum"] = 0.9
    (answer,) = serving.push(0, rows={1: 2})
    assert parts_of(answer)[1] == (ROWS, 1, [0, 1, 2, 3])


def test_a_push_that_comes_twice_is_applied_once_and_answered_twice():
    serving = Serving()
    first = serving.push(0, dense=1)
    serving.sequences[0] -= 1
    serving.clocks[0] -= 1
    second = serving.push(0, dense=1)
    assert serving.values()[0] == -1.0
    assert [parts_of(answers[0]) for answers in (first, second)] == [parts_of(first[0])] * 2
    assert serving.server.statistics()["duplicates"] == 1


def test_messages_of_a_process_that_was_replaced_are_ignored():
    serving = Serving()
    newer = Message(Kind.PULL, 0, incarnation=1, sequence=1, numbers=np.array([0, 0, 1, 0, 0, 0, 0, 0, 0]))
    assert len(serving.server.handle(newer)) == 1
    assert serving.push(0, dense=1) == []
    assert serving.values()[0] == 0.0


@pytest.mark.feature("parameter-servers.optimizer-on-the-server")
def test_settings_travel_with_the_push_of_each_worker():
    serving = Serving()
    serving.push(0, dense=1, text=json.dumps([{"lr": 0.5}]))
    assert serving.values()[0] == -0.5
    serving.push(1, dense=1, text=json.dumps([{"lr": 2.0}]))
    assert serving.values()[0] == -2.5
    serving.push(0, dense=1)
    assert serving.values()[0] == -3.0


@pytest.mark.feature("parameter-servers.bounded-staleness")
def test_a_worker_that_is_ahead_waits_for_the_others_at_its_pull():
    serving = Serving(max_staleness=1)
    assert len(serving.push(0, dense=1)) == 1
    assert serving.push(0, dense=1) == []
    assert serving.values()[0] == -2.0, "the push is applied at once"
    assert {answer.worker for answer in serving.push(1, dense=1)} == {0, 1}
    assert serving.push(0, dense=1) == []
    (late,) = serving.server.late(5.0)
    assert "expected worker 1 to push step 3 within 5 s" in late.text
    _ = serving.ask(1, Kind.LEAVE, numbers=np.array([-1]))
    released = serving.push(0)
    assert len(released) == 1, "who has left is waited for no more"


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5])
def test_a_synchronous_step_is_one_update_of_the_sum(n_workers):
    serving = Serving(n_workers, is_synchronous=True)
    for worker in range(n_workers - 1, 0, -1):
        assert serving.push(worker, dense=worker + 1) == []
    answers = serving.push(0, dense=1, rows={0: 1})
    assert [answer.worker for answer in answers] == [*range(n_workers - 1, 0, -1), 0]
    assert serving.values() == (-n_workers * (n_workers + 1) / 2, [-1.0, 0.0, 0.0, 0.0])
    assert parts_of(answers[0])[0][:2] == (WHOLE, 1)


def test_an_error_of_a_synchronous_step_is_told_to_all_its_workers():
    """Those that came first would wait for the whole timeout, and name the wrong rank."""
    serving = Serving(n_workers=3, is_synchronous=True)
    serving.server._apply = lambda messages: 1 / 0
    answers = [serving.push(worker, dense=1) for worker in range(3)]
    assert [len(due) for due in answers] == [0, 0, 3]
    assert {message.worker for message in answers[-1]} == {0, 1, 2}
    assert {message.text for message in answers[-1]} == {"ZeroDivisionError: division by zero"}


def test_the_sum_has_the_tree_of_an_all_reduce():
    serving = Serving(3, is_synchronous=True)
    values = [1e8, 1.0, -1e8]
    for worker, value in enumerate(values):
        serving.push(worker, dense=value)
    first_summand, two, three = map(np.float32, values)
    assert serving.values()[0] == -float((first_summand + two) + three)


def test_rows_of_all_workers_are_joined():
    serving = Serving(2, is_synchronous=True)
    serving.push(0, rows={1: 1, 2: 5})
    (answer, _) = serving.push(1, rows={2: 1})
    assert serving.values()[1] == [0.0, -1.0, -6.0, 0.0]
    assert parts_of(answer)[1] == (ROWS, 1, [1, 2])


def test_who_leaves_completes_a_synchronous_step():
    serving = Serving(2, is_synchronous=True)
    assert serving.push(0, dense=1) == []
    answers = serving.ask(1, Kind.LEAVE, numbers=np.array([0]))
    assert [answer.kind for answer in answers] == [Kind.DONE, Kind.VALUES]
    assert not serving.server.is_done
    serving.ask(0, Kind.LEAVE, numbers=np.array([7]))
    assert serving.server.is_done
    assert serving.server.exit_code == 7


def test_requests_of_one_worker_are_due_for_all_after_the_same_step():
    serving = Serving(2)
    serving.push(1)
    serving.push(1)
    (asking,) = serving.push(0, request=Request.STOP)
    assert Request(asking.request) is Request.NONE
    assert [Request(serving.push(0)[0].request) for _ in range(2)] == [Request.NONE, Request.STOP]
    assert Request(serving.push(1)[0].request) is Request.STOP


def test_a_signal_to_the_server_is_told_to_one_worker():
    serving = Serving(2)
    serving.server.note_signal("SIGTERM")
    texts = [serving.push(worker)[0].text for worker in (1, 0, 1)]
    assert (json.loads(texts[0])["signal"], texts[1:]) == ("SIGTERM", ["", ""])


def test_a_push_of_the_wrong_shape_is_an_error_and_changes_nothing():
    serving = Serving()
    bad = Packer().pack([torch.ones(3, 2)])[:8]
    (answer,) = serving.ask(
        0, Kind.STEP, numbers=np.array([0, 0, 1, WHOLE, 0, 0, NOTHING, 0, 0], np.int64), payload=bad
    )
    assert answer.kind is Kind.ERROR
    assert serving.values()[0] == 0.0


class NeedsAllOfIt(torch.optim.SGD):
    pass


def test_optimizers_that_need_whole_variables_are_refused_for_parts():
    check_optimizer(NeedsAllOfIt, is_split=False)
    for kind in (torch.optim.Adam, torch.optim.SparseAdam):
        check_optimizer(kind, is_split=True)
    with pytest.raises(UsageError, match="ASGD.*NeedsAllOfIt"):
        check_optimizer(NeedsAllOfIt, is_split=True)
    with pytest.raises(UsageError, match="closure.*parameter.*LBFGS"):
        check_optimizer(torch.optim.LBFGS, is_split=False)


def test_no_part_of_a_push_is_answered_before_the_bound_on_staleness_holds():
    """Else a worker would begin its step with values that lack what the bound promises."""
    serving = Serving(max_staleness=0)
    ones_payload = Packer().pack([torch.ones(3, 2)])
    serving.clocks[0] += 1
    first = serving.ask(0, Kind.STEP, numbers=np.array([0, 0, 0, WHOLE, 0, 0]), payload=ones_payload)
    last = serving.ask(0, Kind.STEP, numbers=np.array([0, 1, 1, NOTHING, 0, 0]))
    assert (first, last) == ([], [])
    released = serving.push(1, dense=1)
    assert sorted((answer.worker, int(answer.numbers[0])) for answer in released) == [(0, 0), (0, 1), (1, 0)]
    assert serving.values()[0] == -2
    assert serving.server.statistics()["staleness"] == {"0": 1, "1": 1}


def test_parts_that_nobody_is_waited_for_are_answered_at_once_in_memory_of_their_own():
    serving = Serving()
    serving.clocks[0] += 1
    ones_payload = Packer().pack([torch.ones(3, 2)])
    two = Packer().pack([torch.full((4, 2), 2.0)])
    (first,) = serving.ask(0, Kind.STEP, numbers=np.array([0, 0, 0, WHOLE, 0, 0]), payload=ones_payload)
    payload_copy = first.payload.copy()
    (last,) = serving.ask(0, Kind.STEP, numbers=np.array([0, 1, 1, WHOLE, 0, -1]), payload=two)
    assert (first.numbers.tolist(), last.numbers.tolist()) == ([0, WHOLE, 0, 1], [1, WHOLE, 0, 1])
    assert first.payload.tolist() == payload_copy.tolist()  # it may still be under way
    assert Unpacker(last.payload).take((4, 2), torch.float32).tolist() == [[-2.0, -2.0]] * 4
    assert serving.server.statistics()["pushes"] == 1


def test_a_push_is_as_old_as_the_oldest_shard_in_any_of_its_parts():
    serving = Serving()
    for _ in range(3):
        serving.push(1, dense=1)
    serving.clocks[0] += 1
    serving.ask(0, Kind.STEP, numbers=np.array([0, 0, 0, WHOLE, 0, 0]), payload=Packer().pack([torch.ones(3, 2)]))
    serving.ask(0, Kind.STEP, numbers=np.array([0, 1, 1, NOTHING, 0, 0]))
    assert serving.server.statistics()["staleness"]["3"] == 1
