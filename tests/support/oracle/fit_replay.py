"""Run the recorded programs of fit by hpcdist, and compare what comes with what Keras 3 gave."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle.fit_programs import Program, draw_data, fit_and_evaluate
from torch import nn

import hpcdist

CASES = json.loads(gzip.decompress(Path(__file__).with_name("fits.json.gz").read_bytes()))["programs"]
ACTIVATIONS = {"softmax": lambda: nn.Softmax(-1), "sigmoid": nn.Sigmoid}


def check(case: dict[str, Any], strategy: Any = None, **options: Any) -> None:
    """Raise AssertionError unless a program gives what Keras gave.

    Args:
        case: a program with Keras' answers.
        strategy: whose ranks share the work; None: this process alone.
        options: of compile.
    """
    program = Program(**case["program"])
    layer, history, evaluated = run(program, strategy or hpcdist.get_strategy(), options)
    due = _as_numbers(case["history"], case["evaluated"], case["kernel"], case["bias"])
    actual = _as_numbers(history, evaluated, layer.weight.detach().numpy().T, layer.bias.detach().numpy())
    assert actual.keys() == due.keys(), program
    for name, values in due.items():
        np.testing.assert_allclose(actual[name], values, rtol=2e-4, atol=2e-5, err_msg=f"{name} of {program}")


def run(program: Program, strategy: Any, options: dict[str, Any]) -> tuple[nn.Linear, Any, Any]:
    """Return the layer after fit, the history, and an evaluation."""
    data = draw_data(program)
    with strategy.scope():
        layer = nn.Linear(*data.kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(data.kernel.T))
            layer.bias.zero_()
        if program.activation is None:
            activation = []
        else:
            activation = [ACTIVATIONS[program.activation]()]
        model = hpcdist.Model(nn.Sequential(layer, *activation))
        metrics = [getattr(hpcdist.metrics, name)(name=name.lower()) for name in program.metrics]
        weighted = [getattr(hpcdist.metrics, name)(name=f"weighted_{name}") for name in program.weighted_metrics]
        loss = getattr(hpcdist.losses, program.loss)(**program.loss_arguments)
        model.compile(program.optimizer, loss, metrics, weighted_metrics=weighted, **options)
    model.learning_rate = program.rate
    history, evaluated = fit_and_evaluate(model, program, data, hpcdist)
    return layer, history, evaluated


def _as_numbers(history: Any, evaluated: Any, kernel: Any, bias: Any) -> dict[str, Any]:
    named = {name: np.asarray(values, np.float64) for name, values in history.items()}
    named |= {f"evaluated {name}": np.asarray(value, np.float64) for name, value in evaluated.items()}
    return {**named, "kernel": np.asarray(kernel), "bias": np.asarray(bias)}
