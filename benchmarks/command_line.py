"""Command lines of benchmarks: options that several of them have, and commands that print a line of JSON."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

_UNITS = {"K": 1 << 10, "M": 1 << 20}


def parser_of(doc):
    """Return a parser of options, described by the first line of a script's docstring."""
    title, _, _ = doc.partition("\n")
    return argparse.ArgumentParser(description=title)


def add_report_options(parser, files, n_rounds):
    """Add the options of a benchmark that publishes a report.

    Args:
        parser: parser of the benchmark's options.
        files: name of the report's files, without a suffix.
        n_rounds: number of rounds by default.
    """
    out_help = f"folder for {files}.json and {files}.png"
    parser.add_argument("--out", type=Path, required=True, help=out_help)
    rounds_help = "pairs of blocks of every contender"
    parser.add_argument("--rounds", type=int, default=n_rounds, help=rounds_help)


def add_merge_options(parser):
    """Add the options of a benchmark whose launches can be merged."""
    parser.add_argument(
        "--label",
        default="",
        help="what this launch is called when several are merged",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="time nothing, merge these reports",
    )


def parse_bytes(text):
    """Return the number of bytes of a text such as 4M, 64K or 4."""
    factor = _UNITS.get(text[-1], 1)
    digits = text.rstrip("KM")
    return int(digits) * factor


def mpirun_command(n_ranks, script, *options):
    """Return the command that runs a script on ranks, by the mpirun beside this Python."""
    mpirun = Path(sys.executable).with_name("mpirun")
    return [mpirun, "-n", n_ranks, sys.executable, script, *options]


def result_of(command, environ=None):
    """Return the value of the last line of JSON that a command prints; ranks have one thread each."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    arguments = list(map(str, command))
    done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=600)
    if done.returncode:
        output = done.stdout + done.stderr
        raise SystemExit(f"{arguments}: expected exit code 0, got {done.returncode}:\n{output}")
    last_line = ""
    for line in done.stdout.splitlines():
        if line.startswith(("{", "[")):
            last_line = line
    return json.loads(last_line)


def write_json(folder, name, value):
    """Write a file of JSON to a folder, which is made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(value, indent=1))
    return path


def virtual_hosts(*args, **options):
    """Return `VirtualHosts` of tests/hosts, which need root, namespaces and tc."""
    tests = Path(__file__).resolve().parent.parent / "tests"
    sys.path.insert(0, str(tests / "hosts"))
    from virtual_hosts import VirtualHosts

    return VirtualHosts(*args, **options)
