"""Checkpoints that were changed: by accident, which the digest reveals, or on purpose, with a digest that fits."""

import functools
import json
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
import xxhash

from hpcdist.checkpoint.header import HEADER_BYTES, Header, parse_header
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.run.ledger import Launch, Ledger
from hpcdist.saving.checkpoint import Checkpoint

SEED = 20261123
DATA = str(Saved(1, 4))
LAUNCH = Launch(None, ("n1",), None, is_vouched=False)
DEEP = 100_000


@dataclass
class Case:
    """A change to a folder of checkpoints.

    Attributes:
        kind: "damage" (a digest reveals it), "lie" (a hostile file with digests that fit), "structure" (HDF5 structures
            that lie, with digests that fit: nobody looks at them), "noise" (random changes with digests that fit, to be
            read or refused: an attacker may choose them), "ledger" (of an attempt).
        name: what is changed.
        make: makes the change in a folder.
    """

    kind: str
    name: str
    make: Callable[[Path], None]


def objects(seed):
    """Return a Checkpoint of a module, an optimizer and an array, with an array of each dtype: float32 comes first."""
    numbers = np.random.RandomState(seed)
    model = torch.nn.Linear(10, 40, bias=False)
    model.load_state_dict({"weight": torch.from_numpy(numbers.standard_normal((40, 10)).astype("f4"))})
    model.register_buffer("b", torch.from_numpy(np.arange(9) % 2 == seed % 2))
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.from_numpy(numbers.standard_normal(3))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    optimizer.step()
    return Checkpoint(model=model, optimizer=optimizer, n=np.arange(50) + seed)


class Original:
    """A sound checkpoint of attempt 1; a later attempt left its ledger."""

    def __init__(self, path):
        self.path = path
        ledger = Ledger(Store(path))
        image = FileImage()
        ledger.begin(LAUNCH)
        facts = {"step": 4, "time_s": 1.5, "metrics": {"loss": 0.5}, "written": {"by": "test"}}
        lay_out(image, facts, *objects(SEED).collect({}))
        ledger._store.commit(4, image)
        later = Ledger(Store(path))
        later.begin(LAUNCH)
        later.resume(4)
        self.data = (path / DATA).read_bytes()


# -- damage ------------------------------------------------------------------------------------------------------


def put(name, content):
    def make(path):
        (path / name).write_bytes(content)

    return make


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def spliced(content, chance):
    """Return content with a piece of itself or of noise put in, left out or put over another."""
    start = chance.randrange(len(content))
    length = chance.choice([1, 8, 64, 512])
    piece = chance.choice([content[-length:], chance.randbytes(length), b"", bytes(length)])
    end = start + chance.choice([0, length])
    changed = content[:start] + piece + content[end:]
    if changed != content:
        return changed
    return content + piece + b"x"


def damages(original, name, content):
    """Yield every sort of damage to one file; of the bits, one of 11."""
    for bit in range(0, 8 * len(content), 11):
        yield Case("damage", f"{name}: bit {bit}", put(name, flipped(content, bit)))
    for length in range(0, len(content), 512):
        yield Case("damage", f"{name}: cut to {length}", put(name, content[:length]))
    chance = random.Random(SEED)
    for number in range(600):
        yield Case("damage", f"{name}: splice {number}", put(name, spliced(content, chance)))


def noises(original):
    """Yield random changes behind the header, with digests that fit."""
    chance = random.Random(SEED + 1)
    for number in range(1500):
        changed = original.data
        for _ in range(chance.choice([1, 2, 8])):
            start = HEADER_BYTES + chance.randrange(
                min(len(changed) - HEADER_BYTES, chance.choice([64, 1024, 1 << 20]))
            )
            changed = changed[:start] + chance.choice([b"\0", b"\xff", chance.randbytes(2)]) + changed[start + 1 :]
        yield Case("noise", f"noise {number}", both(put(DATA, original.data[:HEADER_BYTES] + changed[HEADER_BYTES:])))


# -- lies --------------------------------------------------------------------------------------------------------


def sealed(data, index_offset, index_nbytes):
    """Return a file whose header fits the bytes behind it."""
    digests = list(map(xxhash.xxh3_128_hexdigest, (data[HEADER_BYTES:index_offset], data[index_offset:])))
    return Header(len(data), index_offset, index_nbytes, *digests).to_bytes() + data[HEADER_BYTES:]


def both(change):
    """Return a change that is followed by a header that fits the changed file."""

    def make(path):
        old = header_of(path)
        change(path)
        data = (path / DATA).read_bytes()
        (path / DATA).write_bytes(sealed(data, old.index_offset, old.index_nbytes))

    return make


def header_of(path):
    return parse_header((path / DATA).read_bytes()[:HEADER_BYTES], path)


def in_file(change):
    def make(path):
        with h5py.File(path / DATA, "r+") as file:
            change(file)

    return both(make)


def in_index(change):
    def make(path):
        old = header_of(path)
        data = (path / DATA).read_bytes()
        index = json.loads(data[old.index_offset :][: old.index_nbytes])
        text = change(index)
        if isinstance(text, str):
            new = text.encode("utf-8", "surrogateescape")
        else:
            new = json.dumps(index).encode()
        (path / DATA).write_bytes(sealed(data[: old.index_offset] + new, old.index_offset, len(new)))

    return make


def in_header(line):
    """Return a change of the header's line, with its own digest."""

    def make(path):
        fields = json.loads((path / DATA).read_bytes().split(b"\n")[0])
        text = line(fields) or json.dumps(fields)
        header = f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n".encode().ljust(HEADER_BYTES, b"\0")
        (path / DATA).write_bytes(header + (path / DATA).read_bytes()[HEADER_BYTES:])

    return make


def replace(name, *arguments, **named):
    """Return a change of a file that puts a made dataset in the place of one that is there."""

    def change(file):
        del file[name]
        file.create_dataset(name, *arguments, **named)

    return change


def virtual(file, source="/proc/self/mem", shape=(400,), most=None):
    layout = h5py.VirtualLayout(shape, "f4", maxshape=most)
    layout[:] = h5py.VirtualSource(source, "x", shape, maxshape=most)
    del file["model/weight"]
    file.create_virtual_dataset("model/weight", layout)


def deep_groups(file):
    group = file["model"]
    for _ in range(2000):
        group = group.create_group("a")


def many_links(file):
    for number in range(2000):
        file[f"model/x{number}"] = file["model/weight"]


def huge_attribute(file):
    file.attrs.create("a", np.zeros(8000), dtype="f8")
    file["model"].attrs["b"] = "x" * 60000
    file["model/evil"] = h5py.SoftLink("/")


def link(name, target):
    def change(file):
        if name in file:
            del file[name]
        file[name] = target(file) if callable(target) else target

    return change


def big_array(dtype, n_elements, **more):
    return replace("model/weight", (n_elements,), dtype, **more)


def link_to_same(file):
    """Move an array into another file, and leave a link to it."""
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as linked_file:
        file.copy("model/weight", linked_file, "x")
    link("model/weight", h5py.ExternalLink("other.h5", "/x"))(file)


#: Changes of the HDF5 structures: nobody looks at them.
STRUCTURES = {
    "external link": link("model/weight", h5py.ExternalLink("/etc/passwd", "/x")),
    "external link to the same data": link_to_same,
    "soft link in a circle": link("model/weight", h5py.SoftLink("/model/weight")),
    "cyclic hard link": link("model/evil", lambda file: file["/"]),
    "model is the index": link("model", lambda file: file["index"]),
    "no index": lambda file: file.__delitem__("index"),
    "one dataset under many names": many_links,
    "virtual": virtual,
    "virtual without end": functools.partial(virtual, shape=(400,), most=(None,)),
    "external storage": replace("model/weight", (400,), "f4", external=[("/etc/passwd", 0, 1600)]),
    "gzip bomb": replace("model/weight", data=np.zeros(1 << 22, "f4"), chunks=(1 << 20,), compression="gzip"),
    "contiguous bomb": big_array("f8", 1 << 47),
    "references": replace("model/weight", (400,), h5py.ref_dtype),
    "deep groups": deep_groups,
    "huge attributes": huge_attribute,
}


def set_row(row, *values):
    return lambda index: index["arrays"].__setitem__(row, list(values))


def set_part(name, value):
    return lambda index: index.__setitem__(name, value)


def nested(depth):
    facts = '{"step": 4, "time_s": 0, "metrics": {}, "written": {}, "arrays": [], "state": '
    return facts + '{"list": [' * depth + "]}" * depth + "}"


def set_node(name, node):
    """Return a change of the node of one object."""
    return lambda index: index["state"]["objects"].__setitem__(name, node)


def set_item(name, key, node):
    """Return a change of one item of an object's dict; the order stays."""

    def change(index):
        for pair in index["state"]["objects"][name]["dict"]:
            if pair[0] == key:
                pair[1] = node

    return change


def without_state(part):
    return lambda index: index["state"].__delitem__(part)


def group(*pairs):
    """Return a change that leaves the optimizer one group of these items."""
    return set_item("optimizer", "param_groups", {"list": [{"dict": list(pairs)}]})


#: Changes of the state, which only those who load it can tell.
STATES = {
    "a number": set_part("state", 7),
    "null": set_part("state", None),
    "a list": set_part("state", [["objects", {}], ["kinds", {}]]),
    "without objects": without_state("objects"),
    "without kinds": without_state("kinds"),
    "objects a list": lambda index: index["state"].update(objects=["model", "optimizer", "n"]),
    "kinds a list": lambda index: index["state"].update(kinds=["module", "SGD", "ndarray"]),
    "kinds of lists": lambda index: index["state"].update(kinds={"model": [], "optimizer": [], "n": []}),
    "an object less": lambda index: index["state"]["objects"].__delitem__("n"),
    "an object more": set_node("more", {"dict": []}),
    "nothing for a module": set_node("model", None),
    "a list for a module": set_node("model", {"list": [{"tensor": 0}]}),
    "a tensor for a module": set_node("model", {"tensor": 0}),
    "weights under a number": set_node("model", {"dict": [[0, {"tensor": 0}], ["b", {"tensor": 1}]]}),
    "weights and a number": set_node("model", {"dict": [["weight", {"tensor": 0}], ["b", {"tensor": 1}], [0, 0]]}),
    "weights that are a number": set_item("model", "weight", 7),
    "weights that are no tensor": set_item("model", "weight", {"array": 0}),
    "weights of another tensor": set_item("model", "weight", {"tensor": 1}),
    "a number for an optimizer": set_node("optimizer", 7),
    "a list for an optimizer": set_node("optimizer", {"list": []}),
    "nothing in an optimizer": set_node("optimizer", {"dict": []}),
    "groups null": set_item("optimizer", "param_groups", None),
    "groups a dict": set_item("optimizer", "param_groups", {"dict": []}),
    "groups none": set_item("optimizer", "param_groups", {"list": []}),
    "groups of numbers": set_item("optimizer", "param_groups", {"list": [0]}),
    "group without parameters": group(["lr", 0.1]),
    "parameters a number": group(["params", 1]),
    "parameters of lists": group(["params", {"list": [{"list": []}]}]),
    "parameters too many": group(["params", {"list": [0, 1]}]),
    "optimizer's state null": set_item("optimizer", "state", None),
    "optimizer's state a list": set_item("optimizer", "state", {"list": []}),
    "optimizer's state of numbers": set_item("optimizer", "state", {"dict": [[0, 7]]}),
    "an array that is a number": set_node("n", 7),
    "an array that is a dict": set_node("n", {"dict": []}),
    "an array of another shape": set_node("n", {"array": 0}),
    "an array that is not there": set_node("n", {"array": 9}),
    "an array of truth": set_node("n", {"array": True}),
    "an array of a negative number": set_node("n", {"array": -1}),
    "the same array often": set_node("n", {"list": [{"array": 0}] * 1_000_000}),
    "deep nests": set_node("n", json.loads('{"list": [' * 300 + "]}" * 300)),
    "a pickle": set_node("n", {"pickle": "gASVAA=="}),
}

#: Changes of the index.
INDICES = {
    "nested JSON": lambda index: nested(DEEP),
    "lists": lambda index: "[" * DEEP + "]" * DEEP,
    "nested state": lambda index: nested(450),
    "state nested so that Python can just read it": lambda index: nested(480),
    "state nested deeper than is saved": lambda index: nested(160),
    "a number of many digits": lambda index: json.dumps(index).replace('"step": 4', '"step": ' + "9" * 100_000),
    "not JSON": lambda index: "{",
    "not UTF-8": lambda index: "\udcff",
    "a list": lambda index: "[1]",
    "arrays infinite": set_part("arrays", float("inf")),
    "rows that are numbers": set_part("arrays", [1, 2]),
    "rows that are dicts": set_part("arrays", [{"a": 1, "b": 2, "c": 3, "d": 4}]),
    "shape NaN": set_row(0, "w", "float32", [float("nan")], 0),
    "shape infinite": set_row(0, "w", "float32", [float("inf")], 0),
    "shape with 0 and more": set_row(0, "w", "float32", [0, 2**62], 5000),
    "shape of many digits": set_row(0, "w", "float32", [10**4000] * 200, 0),
    "shape of many ones": set_row(0, "w", "float32", [1] * 1000 + [400], 0),
    "shape of huge numbers": set_row(0, "w", "float32", [10**4000] * 3000, 0),
    "shape negative": set_row(0, "w", "float32", [-40, -10], 0),
    "shape true": set_row(0, "w", "float32", [True, 400], 0),
    "shape None": set_row(0, "w", "float32", None, 0),
    "shape text": set_row(0, "w", "float32", "400", 0),
    "shape dict": set_row(0, "w", "float32", {"400": 1}, 0),
    "offset in the header": set_row(0, "w", "float32", [40, 10], 0),
    "offset in another array": lambda index: index["arrays"][0].__setitem__(3, index["arrays"][1][3]),
    "offset beyond": lambda index: index["arrays"][0].__setitem__(3, 10**6),
    "offset huge": set_row(0, "w", "float32", [0], 10**30),
    "offset float": set_row(0, "w", "float32", [40, 10], 0.0),
    "dtype list": set_row(0, "w", ["float32"], [40, 10], 0),
    "dtype None": set_row(0, "w", None, [40, 10], 0),
    "dtype of objects": set_row(0, "w", "object", [40, 10], 0),
    "dtype index": set_row(0, "w", "index", [10], 0),
    "name list": set_row(0, ["w"], "float32", [40, 10], 0),
    "the same array often": set_part("arrays", [["w", "float32", [40, 10], 0]] * 10_000),
}

#: Changes of the facts in the index.
FACTS = {
    "step text": {"step": "4"},
    "step float": {"step": 4.0},
    "step true": {"step": True},
    "step NaN": {"step": float("nan")},
    "step huge": {"step": 10**300},
    "another step": {"step": 5},
    "written number": {"written": 7},
    "written list": {"written": ["ranks"]},
    "metrics number": {"metrics": 7},
    "metrics text": {"metrics": {"loss": "low"}},
    "metrics None": {"metrics": {"loss": None}},
    "metrics nested": {"metrics": {"loss": [1]}},
    "metrics huge": {"metrics": {"loss": 10**400}},
    "metrics list": {"metrics": ["loss"]},
    "time text": {"time_s": "now"},
    "time None": {"time_s": None},
    "time huge": {"time_s": 10**400},
    **{f"no {name}": {name: ...} for name in ("step", "time_s", "metrics", "written", "arrays", "state")},
}

#: Changes of the line of the header.
HEADERS = {
    "nested": lambda fields: "[" * 900 + "]" * 900,
    "a list": lambda fields: "[1]",
    "digits": lambda fields: "9" * 3000,
    "size text": lambda fields: fields.update(nbytes="1"),
    "size huge": lambda fields: fields.update(nbytes=10**300),
    "size negative": lambda fields: fields.update(nbytes=-1),
    "size NaN": lambda fields: fields.update(nbytes=float("nan")),
    "size less": lambda fields: fields.update(nbytes=fields["nbytes"] - 1),
    "size float": lambda fields: fields.update(nbytes=float(fields["nbytes"])),
    "index of floats": lambda fields: fields.update(index=list(map(float, fields["index"]))),
    "digest None": lambda fields: fields.update(xxh3_128=[None, None]),
    "digest list": lambda fields: fields.update(xxh3_128=[[], []]),
    "one digest": lambda fields: fields.update(xxh3_128=fields["xxh3_128"][:1]),
    "index beyond": lambda fields: fields.update(index=[fields["nbytes"] - 1, 100]),
    "index in the header": lambda fields: fields.update(index=[0, 100]),
    "index negative": lambda fields: fields.update(index=[-5, 100]),
    "index huge": lambda fields: fields.update(index=[10**300, 1]),
    "index of all": lambda fields: fields.update(index=[4096, fields["nbytes"] - 4096]),
    "format text": lambda fields: fields.update(format="1"),
    "format huge": lambda fields: fields.update(format=10**300),
    "format list": lambda fields: fields.update(format=[1]),
    "format of many digits": lambda fields: fields.update(format=10**3000),
}


class Payload:
    """Would write a file if it were unpickled."""

    def __reduce__(self):
        return os.system, ("touch /tmp/hpcdist-was-here",)


def is_link_to(name, target):
    def make(path):
        (path / name).unlink()
        (path / name).symlink_to(target)

    return make


def is_pipe(name):
    def make(path):
        (path / name).unlink()
        os.mkfifo(path / name)

    return make


def is_folder(name):
    def make(path):
        (path / name).unlink()
        (path / name).mkdir()

    return make


#: Changes of what is in the folder.
OTHERS = {
    "a pickle": put(DATA, pickle.dumps(Payload())),
    "a pickle behind a header": both(lambda path: put(DATA, bytes(HEADER_BYTES) + pickle.dumps(Payload()) * 999)(path)),
    "nothing": put(DATA, b""),
    "zeros": put(DATA, bytes(9000)),
    "a signature alone": put(DATA, b"\x89HDF\r\n\x1a\n"),
    "lines": put(DATA, b"\n" * 9000),
    "not UTF-8": put(DATA, b"\xff\xfe\n\n" * 5000),
    "file without end": is_link_to(DATA, "/dev/zero"),
    "a pipe": is_pipe(DATA),
    "a folder": is_folder(DATA),
    "linked to itself": is_link_to(DATA, DATA),
}

#: Lines in the ledger of an attempt: the checkpoint is sound, and must be read.
LEDGERS = {
    "nested": b"[" * DEEP,
    "list": b'{"event": "begin", "base": [], "nodes": []}',
    "dict": b'{"event": {"a": 1}}',
    "digits": b'{"event": "resume", "step": ' + b"9" * 10_000 + b"}",
    "negative": b'{"event": "resume", "step": -7}',
    "nodes": b'{"event": "begin", "base": 4, "job": "1", "program": null, "nodes": 7, "is_new_try": 0}',
    "null": b"null",
    "empty": b"",
    "not UTF-8": b"\xff",
}


def set_facts(parts):
    def change(index):
        for name, value in parts.items():
            index.__delitem__(name) if value is ... else index.__setitem__(name, value)

    return change


def lies():
    """Yield every hostile file whose digests fit, or that needs none."""
    for name, change in STRUCTURES.items():
        yield Case("structure", f"structure: {name}", in_file(change))
    for name, change in INDICES.items():
        yield Case("lie", f"index: {name}", in_index(change))
    for name, change in STATES.items():
        yield Case("lie", f"state: {name}", in_index(change))
    for name, parts in FACTS.items():
        yield Case("lie", f"facts: {name}", in_index(set_facts(parts)))
    for name, change in HEADERS.items():
        yield Case("lie", f"header: {name}", in_header(change))
    for name, make in OTHERS.items():
        yield Case("lie", f"folder: {name}", make)
    for name, content in LEDGERS.items():
        yield Case("ledger", f"ledger: {name}", put("attempts/0002.jsonl", content))


def all_cases(original):
    """Return every case: lies first."""
    return [*lies(), *noises(original), *damages(original, DATA, original.data)]


def cases(original, first, last, every):
    """Return (number, case) of every nth case from `first` to `last`."""
    return list(enumerate(all_cases(original)))[first:last:every]
