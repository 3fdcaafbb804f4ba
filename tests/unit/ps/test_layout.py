import itertools

import numpy as np
import pytest
import torch

from hpcdist.plan.partitioners import FixedShardsPartitioner, VariableSpec, place
from hpcdist.ps.layout import (
    Packer,
    Unpacker,
    specs_of,
    specs_of_text,
    specs_to_text,
    state_of_text,
    state_to_text,
)
from hpcdist.ps.messages import PIECE_BYTES, Kind, Message, answer


def test_a_message_survives_its_envelope():
    payload = np.arange(10, dtype=np.uint8)
    numbers = np.array([3, -1], np.int64)
    sent = Message(Kind.STEP, 2, 1, 7, 9, 3, numbers, "text: ä", payload)
    received = Message.of_envelope(sent.envelope())
    received.payload[:] = payload
    assert (
        received.kind,
        received.worker,
        received.incarnation,
        received.sequence,
        received.clock,
        received.request,
    ) == (Kind.STEP, 2, 1, 7, 9, 3)
    assert received.numbers.tolist() == [3, -1]
    assert (received.text, received.payload.tolist()) == ("text: ä", payload.tolist())
    back = answer(received, Kind.DONE, text="x")
    assert (back.worker, back.incarnation, back.sequence, back.kind, back.text) == (2, 1, 7, Kind.DONE, "x")


def test_an_envelope_says_where_a_payload_is():
    memory = np.arange(100, dtype=np.uint8)
    memory_requests = []

    def memory_for(nbytes, path):
        memory_requests.append((nbytes, path))
        return memory[:nbytes]

    sent = Message(Kind.STEP, 0, text="text", payload=np.zeros(10, np.uint8))
    received = Message.of_envelope(sent.envelope("/somewhere"), memory_for)
    assert memory_requests == [(10, "/somewhere")]
    assert (received.text, received.payload.tolist()) == ("text", [*range(10)])


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1])
def test_payloads_travel_in_pieces(nbytes):
    pieces = Message(Kind.STEP, 0, payload=np.zeros(nbytes, np.uint8)).pieces()
    assert sum(map(len, pieces)) == nbytes
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]


def test_tensors_are_packed_and_read_again():
    tensors = [(torch.arange(size) % 2).to(dtype) for dtype, size in itertools.product(DTYPES, (0, 1, 5))]
    tensors += [torch.tensor(2.5), torch.ones(3, 4).t(), torch.ones(4, 3)[1:3]]
    packer = Packer()
    for _ in range(2):
        payload = Unpacker(packer.pack(tensors).copy())
        assert all(torch.equal(payload.take(tensor.shape, tensor.dtype), tensor) for tensor in tensors)


@pytest.mark.feature("parameter-servers.round-robin-placement")
def test_specs_of_the_shards_of_each_server():
    variables = [VariableSpec("w", (5, 2), torch.float32), VariableSpec("b", (), torch.bfloat16)]
    shards = place(variables, 2, FixedShardsPartitioner(2))
    specs = specs_of(variables, shards, frozenset([0]))
    placed_specs = []
    for server in specs:
        for spec in specs[server]:
            placed_specs.append((server, spec.name, spec.start, spec.stop, spec.shape, spec.dtype))
    assert placed_specs == [
        (0, "w", 0, 3, (3, 2), "float32"),
        (0, "b", 0, 1, (), "bfloat16"),
        (1, "w", 3, 5, (2, 2), "float32"),
    ]
    assert [spec.nbytes for spec in specs[0]] == [24, 2]
    assert [spec.is_sparse for spec in specs[0]] == [True, False]
    assert specs_of_text(specs_to_text(specs[0])) == specs[0]


def test_states_of_optimizers_are_packed():
    states = {(0, 0): {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}, (1, 0): {"n": 5, "name": "x"}}
    text, tensors = state_to_text(states)
    unpacked_states = state_of_text(text, Unpacker(Packer().pack(tensors)))
    assert torch.equal(unpacked_states[0, 0]["exp_avg"], torch.ones(2, 3))
    assert (unpacked_states[0, 0]["step"].item(), unpacked_states[1, 0]) == (3.0, {"n": 5, "name": "x"})
