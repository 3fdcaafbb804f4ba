"""Record what Keras 3 makes of random programs of fit: what `hpcdist.Model` must make of them.

    KERAS_BACKEND=torch .venv-keras/bin/python tests/support/oracle/record_fits.py

Recorded are the history, the weights and an evaluation of each program; `fit_programs.py` draws them.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from fit_programs import N_INPUTS, Program, draw_data, draw_program, fit_and_evaluate

RECORDED = Path(__file__).resolve().with_name("fits.json.gz")
N_PROGRAMS = 500


def run(program: Program) -> dict[str, Any]:
    """Return what Keras makes of a program."""
    import keras

    data = draw_data(program)
    keras.utils.set_random_seed(1)
    if program.n_steps_of_row:
        shape = (program.n_steps_of_row, N_INPUTS)
    else:
        shape = (N_INPUTS,)
    layer = keras.layers.Dense(program.n_outputs, activation=program.activation)
    model = keras.Sequential([keras.Input(shape), layer])
    layer.set_weights([data.kernel, np.zeros(program.n_outputs, np.float32)])
    optimizer = keras.optimizers.get(program.optimizer)
    optimizer.learning_rate = program.rate
    model.compile(
        optimizer=optimizer,
        loss=getattr(keras.losses, program.loss)(**program.loss_arguments),
        metrics=[getattr(keras.metrics, name)(name=name.lower()) for name in program.metrics],
        weighted_metrics=[getattr(keras.metrics, name)(name=f"weighted_{name}") for name in program.weighted_metrics],
        run_eagerly=True,
    )
    history, evaluated = fit_and_evaluate(model, program, data, keras)
    kernel, bias = layer.get_weights()
    return {
        "history": {name: np.asarray(values, np.float64).tolist() for name, values in history.items()},
        "kernel": kernel.tolist(),
        "bias": bias.tolist(),
        "evaluated": {name: float(value) for name, value in evaluated.items()},
    }


def main() -> None:
    import keras

    recorded = []
    for number in range(N_PROGRAMS):
        program = draw_program(number)
        recorded.append({"program": program.as_json(), **run(program)})
    text = json.dumps({"keras": keras.__version__, "programs": recorded})
    RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
