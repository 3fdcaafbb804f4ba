"""Record how TensorFlow's ParameterServerStrategy splits and places variables: what plan/partitioners.py must do.

    .venv-tensorflow/bin/python tests/support/oracle/record_shards.py

Each number of servers has a process of its own, which starts that many and a worker inside itself.
"""

import gzip
import json
import multiprocessing
import random
import socket
from pathlib import Path
from typing import Any

SHARDS = Path(__file__).resolve().with_name("shards.json.gz")
N_CASES = {1: 100, 2: 200, 3: 200, 4: 150}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int8", "bool", "complex64")


def draw_partitioner(draws: random.Random) -> dict[str, Any] | None:
    kind = draws.choice(["FixedShards", "MinSize", "MaxSize", "function", None])
    if kind == "FixedShards":
        return {"kind": kind, "arguments": {"num_shards": draws.choice([1, 2, 3, 5, 100])}}
    most = draws.choice([1, 2, 3, 7, 50])
    if kind == "MinSize":
        small = draws.choice([1, 4, 7, 64, 1000, 262144])
        return {"kind": kind, "arguments": {"min_shard_bytes": small, **draws.choice([{}, {"max_shards": most}])}}
    if kind == "MaxSize":
        large = draws.choice([1, 4, 7, 24, 64, 1000, 262144])
        return {"kind": kind, "arguments": {"max_shard_bytes": large, **draws.choice([{}, {"max_shards": most}])}}
    if kind == "function":
        return {"kind": kind, "returns": draws.choice([[2], [3, 1], [0, 1], [1, 2], [], [2, 1, 1], [100]])}
    return None


def draw_case(number: int, n_servers: int) -> dict[str, Any]:
    draws = random.Random(1000 * n_servers + number)
    variables = []
    for _ in range(draws.randint(1, 5)):
        rank = draws.choice([0, 1, 1, 2, 2, 3])
        shape = [draws.choice([1, 2, 3, 5, 8, 13, 40]) for _ in range(rank)]
        variables.append({"shape": shape, "dtype": draws.choice(DTYPES)})
    return {"n_servers": n_servers, "partitioner": draw_partitioner(draws), "variables": variables}


def record(n_servers: int, path: str) -> None:
    """Answer the cases of a number of servers in this process."""
    import tensorflow as tf

    chief, worker, *ps = (f"localhost:{port}" for port in free_ports(n_servers + 2))
    cluster = tf.train.ClusterSpec({"chief": [chief], "worker": [worker], "ps": ps})
    tasks = [("worker", 0), *(("ps", index) for index in range(n_servers))]
    servers = [tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc") for job, index in tasks]
    assert servers, "they live as long as this process"
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc", task_type="chief", task_id=0
    )
    answered = []
    for number in range(N_CASES[n_servers]):
        case = draw_case(number, n_servers)
        strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner_of(tf, case["partitioner"]))
        answered.append({**case, "answer": [place(tf, strategy, variable) for variable in case["variables"]]})
    Path(path).write_text(json.dumps(answered))


def free_ports(n_ports: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(n_ports)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def partitioner_of(tf: Any, drawn: dict[str, Any] | None) -> Any:
    if drawn is None:
        return None
    if drawn["kind"] == "function":
        return lambda shape, dtype, **_: drawn["returns"]
    return getattr(tf.distribute.experimental.partitioners, f"{drawn['kind']}Partitioner")(**drawn["arguments"])


def place(tf: Any, strategy: Any, variable: dict[str, Any]) -> Any:
    """Return [rows, server] of each shard of a new variable, or the type of the error."""
    try:
        with strategy.scope():
            created_variable = tf.Variable(tf.zeros(variable["shape"], variable["dtype"]))
    except Exception as error:
        return type(error).__name__
    shards = getattr(created_variable, "variables", [created_variable])
    rows = []
    for shard in shards:
        if shard.shape.rank:
            rows.append(int(shard.shape[0]))
        else:
            rows.append(1)
    servers = [int(tf.DeviceSpec.from_string(shard.device).task) for shard in shards]
    return list(map(list, zip(rows, servers, strict=True)))


def main() -> None:
    records = []
    for n_servers in N_CASES:
        path = SHARDS.with_name(f".shards-{n_servers}.json")
        process = multiprocessing.get_context("spawn").Process(target=record, args=(n_servers, str(path)))
        process.start()
        process.join(900)
        if process.exitcode != 0:
            process.kill()
            raise SystemExit(f"record_shards: expected answers for {n_servers} servers, got {process.exitcode}")
        records += json.loads(path.read_text())
        path.unlink()
    SHARDS.write_bytes(gzip.compress(json.dumps({"tensorflow": "2.21.0", "cases": records}).encode(), mtime=0))


if __name__ == "__main__":
    main()
