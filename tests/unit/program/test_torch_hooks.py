"""What hpcdist relies on in torch beyond its documentation. The names are in two files: hooks, and tensors."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.program import tensor_internals, torch_hooks

PACKAGE = Path(hpcdist.__file__).parent
#: Attributes of torch, or of a module of it, that it does not document.
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+|queue_callback|_execution_engine")


class Watcher:
    def __init__(self):
        self.calls = []

    def begin_backward(self, creates_graph):
        self.calls.append(("begin", creates_graph))

    def end_backward(self, is_whole):
        self.calls.append(("end", is_whole))


@pytest.fixture
def watcher():
    watcher = Watcher()
    torch_hooks.around_gradients(watcher)
    return watcher


def private_names(path):
    """Yield the private names of torch that the code of a file uses as attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(ast.unparse(node)):
            yield ast.unparse(node)


def test_private_names_of_torch_have_doors():
    users = set()
    for path in PACKAGE.rglob("*.py"):
        if any(True for _ in private_names(path)):
            users.add(path.name)
    assert users == {"torch_hooks.py", "tensor_internals.py"}


def test_every_backward_is_seen(watcher):
    weight = nn.Parameter(torch.ones(2))
    (2 * weight).sum().backward()
    with pytest.warns(UserWarning, match="create_graph"):
        torch.autograd.backward((weight * weight).sum(), create_graph=True)
    assert watcher.calls == [("begin", False), ("end", True), ("begin", True), ("end", True)]
    weight.grad = None  # it has a graph, which would keep the parameter


def test_a_reference_taken_before_sees_it_too(watcher):
    backward = torch.autograd.backward
    backward(nn.Parameter(torch.ones(2)).sum())
    assert len(watcher.calls) == 2


def test_what_writes_no_gradients_is_not_seen(watcher):
    weight = nn.Parameter(torch.ones(2))
    torch.autograd.grad(weight.sum(), weight)
    assert watcher.calls == []


def test_a_backward_that_raises_is_seen_to_end(watcher):
    loss = nn.Parameter(torch.ones(2)).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert watcher.calls[2:] == [("begin", False), ("end", False)]


def test_a_watcher_that_is_gone_is_forgotten():
    watcher = Watcher()
    torch_hooks.around_gradients(watcher)
    number = max(torch_hooks._gradient_watchers)
    del watcher
    assert number not in torch_hooks._gradient_watchers


def test_what_runs_inside_a_backward_is_known():
    inside = []
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: inside.append(torch_hooks.is_in_backward()))
    weight.sum().backward()
    assert inside == [True]
    assert not torch_hooks.is_in_backward()


def test_copies_are_made_in_one_call():
    targets = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64)]
    sources = [torch.randn(3, 2).t(), torch.randn(4)]
    tensor_internals.copy_all(targets, sources)
    assert torch.equal(targets[0], sources[0])
    assert torch.equal(targets[1], sources[1].double())
    tensor_internals.copy_all([], [])
    with pytest.raises(RuntimeError):
        tensor_internals.copy_all([torch.zeros(2)], [torch.zeros(2).to_sparse()])
