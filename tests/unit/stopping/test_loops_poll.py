"""Every loop of the jobs polls: one that does not would keep a job from stopping for as long as it runs.

A loop polls if it goes over a distributed dataset, which polls by itself, or calls the handler or `coordinator.join`. A
loop around such loops need not, nor one that does no work: it calls neither a strategy nor a backward nor a step; nor
one in a function that a coordinator schedules: the coordinator polls.
"""

import ast
from pathlib import Path

import pytest

JOBS = Path(__file__).resolve().parents[3] / "jobs"
DISTRIBUTING = {"experimental_distribute_dataset", "distribute_datasets_from_function"}
POLLING = {"save_checkpoint_if_preempted", "poll"}
WORKING = {"backward", "step", "run", "all_reduce", "broadcast", "gather"}
LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


def calls(node):
    """Yield (name of the object, name of the method) of every call in a tree."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            yield getattr(inner.func.value, "id", ""), inner.func.attr


def distributed_names(tree):
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(name in DISTRIBUTING for _, name in calls(node.value)):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def polls(loop, distributed):
    if isinstance(loop, ast.While):
        sources = [loop.test]
    else:
        if isinstance(loop, ast.For):
            sources = [loop.iter]
        else:
            sources = [part.iter for part in loop.generators]
    used = set()
    for source in sources:
        used |= {inner.id for inner in ast.walk(source) if isinstance(inner, ast.Name)}
    polling = {("handler", "run"), ("coordinator", "join")}
    calls_handler = any(name in POLLING or (receiver, name) in polling for receiver, name in calls(loop))
    return bool(used & distributed) or calls_handler


def scheduled_functions(tree):
    """Return the functions that are passed to `schedule`."""
    schedules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "schedule":
            schedules.append(node)
    names = {node.args[0].id for node in schedules if isinstance(node.args[0], ast.Name)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]


def loops_that_do_not_poll(text):
    """Return the lines of loops that work and neither poll nor consist of loops that do."""
    tree = ast.parse(text)
    distributed = distributed_names(tree)
    line_numbers = []
    of_workers = set()
    for function in scheduled_functions(tree):
        of_workers |= set(map(id, ast.walk(function)))
    for loop in (node for node in ast.walk(tree) if isinstance(node, LOOPS) and id(node) not in of_workers):
        inner = []
        for node in ast.walk(loop):
            if isinstance(node, LOOPS) and node is not loop:
                inner.append(node)
        is_working = any(name in WORKING for _, name in calls(loop))
        if (
            is_working
            and not polls(loop, distributed)
            and not any(polls(inner_loop, distributed) for inner_loop in inner)
        ):
            line_numbers.append(loop.lineno)
    return line_numbers


#: Programs without hpcdist, which nothing stops but a signal.
WITHOUT_HPCDIST = ("own_script_plain.py",)


@pytest.mark.feature("complaints.flag-seen-in-time")
@pytest.mark.parametrize(
    "path", sorted(path for path in JOBS.glob("*.py") if path.name not in WITHOUT_HPCDIST), ids=lambda path: path.name
)
def test_loops_of_the_jobs_poll(path):
    assert loops_that_do_not_poll(path.read_text()) == []


PLAIN = """
data = strategy.experimental_distribute_dataset(dataset)
for epoch in range(3):
    for x in loader:
        loss(model(x)).backward()
while not done:
    strategy.run(step)
losses = [strategy.run(step, args=(x,)) for x in loader]
"""


def test_a_loop_that_does_not_poll_is_found():
    assert loops_that_do_not_poll(PLAIN) == [3, 6, 4, 8]
    assert loops_that_do_not_poll(PLAIN.replace("loader", "data").replace("strategy.run(step)", "handler.poll()")) == []
    assert loops_that_do_not_poll("for x in loader:\n    handler.run(strategy.run, step)") == []
    assert loops_that_do_not_poll("for x in loader:\n    print(x)") == []
    scheduling = "def f():\n    for x in rows:\n        optimizer.step()\n"
    assert loops_that_do_not_poll(scheduling) == [2]
    assert loops_that_do_not_poll(scheduling + "coordinator.schedule(f)") == []
