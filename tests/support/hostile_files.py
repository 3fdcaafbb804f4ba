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

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.safe_open import digest_file
from hpcdist.resilience.checkpoint import Checkpoint

SEED = 20261123
DATA, MANIFEST = "gen-0001/step-00000004.h5", "gen-0001/step-00000004.json"
DEEP = 100_000


@dataclass
class Case:
    """A change to a folder of checkpoints.

    Attributes:
        kind: "damage" (the digest reveals it), "lie" (a hostile file with a digest that fits), "noise" (random changes
            with a digest that fits, to be read or refused: an attacker may choose them), "notes" (of an attempt).
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
    """A sound checkpoint, in generation 1; a later attempt left its records."""

    def __init__(self, path):
        self.path = path
        folder, image = CheckpointFolder(path), FileImage()
        folder.begin()
        lay_out(image, *objects(SEED).collect({}))
        folder.commit(4, folder.new_data_path(4), image, {"by": "test"}, metrics={"loss": 0.5})
        later = CheckpointFolder(path)
        later.begin()
        later.note_attempt("gen-0001/step-00000004", has_ended=False)
        self.data, self.manifest = (path / DATA).read_bytes(), (path / MANIFEST).read_bytes()


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
    start, length = chance.randrange(len(content)), chance.choice([1, 8, 64, 512])
    piece = chance.choice([content[-length:], chance.randbytes(length), b"", bytes(length)])
    end = start + chance.choice([0, length])
    changed = content[:start] + piece + content[end:]
    return changed if changed != content else content + piece + b"x"


def damages(original, name, content):
    """Yield every sort of damage to one file; of the bits, one of 11 in the file of arrays, and one of 3 in others."""
    for bit in range(0, 8 * len(content), 11 if name == DATA else 3):
        yield Case("damage", f"{name}: bit {bit}", put(name, flipped(content, bit)))
    for length in range(0, len(content), 512 if name == DATA else 16):
        yield Case("damage", f"{name}: cut to {length}", put(name, content[:length]))
    chance = random.Random(SEED)
    for number in range(600):
        yield Case("damage", f"{name}: splice {number}", put(name, spliced(content, chance)))


def noises(original):
    """Yield random changes to the file of arrays, with a manifest that fits."""
    chance = random.Random(SEED + 1)
    for number in range(1500):
        changed = original.data
        for _ in range(chance.choice([1, 2, 8])):
            start = chance.randrange(min(len(changed), chance.choice([64, 1024, 1 << 20])))
            changed = changed[:start] + chance.choice([b"\0", b"\xff", chance.randbytes(2)]) + changed[start + 1 :]
        yield Case("noise", f"noise {number}", both(put(DATA, changed)))


# -- lies --------------------------------------------------------------------------------------------------------


def seal(body):
    """Return the text of a manifest whose digest fits whatever it says."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({"manifest": body, "xxh3_128": digest})


def both(change):
    """Return a change that is followed by a manifest that fits the changed file."""

    def make(path):
        change(path)
        body = json.loads((path / MANIFEST).read_text())["manifest"]
        nbytes, digest = digest_file(path / DATA)
        (path / MANIFEST).write_text(seal({**body, "nbytes": nbytes, "xxh3_128": digest}))

    return make


def in_file(change):
    def make(path):
        with h5py.File(path / DATA, "r+") as file:
            change(file)

    return both(make)


def in_index(change):
    def within(file):
        index = json.loads(file["index"][()].tobytes())
        text = change(index)
        del file["index"]
        file["index"] = np.frombuffer((text or json.dumps(index)).encode(), np.uint8)

    return in_file(within)


def in_manifest(**parts):
    def make(path):
        body = json.loads((path / MANIFEST).read_text())["manifest"]
        (path / MANIFEST).write_text(seal({**body, **parts}))

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
    del file["arrays/float32"]
    file.create_virtual_dataset("arrays/float32", layout)


def deep_groups(file):
    group = file["arrays"]
    for _ in range(2000):
        group = group.create_group("a")


def many_links(file):
    for number in range(2000):
        file[f"arrays/x{number}"] = file["arrays/float32"]


def huge_attribute(file):
    file.attrs.create("a", np.zeros(8000), dtype="f8")
    file["arrays"].attrs["b"] = "x" * 60000
    file["arrays/evil"] = h5py.SoftLink("/")


def link(name, target):
    def change(file):
        if name in file:
            del file[name]
        file[name] = target(file) if callable(target) else target

    return change


def big_array(dtype, n_elements, **more):
    return replace("arrays/float32", (n_elements,), dtype, **more)


def compound(file):
    replace("arrays/float32", (400,), np.dtype([("a", "f4"), ("b", "f4", (1 << 16,))]))(file)


def copies(file):
    """Many datasets, each as large as the file."""
    nbytes = file.id.get_filesize()
    file.create_dataset("arrays/uint8x", data=np.zeros(nbytes // 2, "u1"))
    for number in range(3000):
        file[f"arrays/y{number}"] = file["arrays/uint8x"]


def link_to_same(file):
    """Move an array into another file, and leave a link to it."""
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        file.copy("arrays/float32", other, "x")
    link("arrays/float32", h5py.ExternalLink("other.h5", "/x"))(file)


def named_objects(dtype, name):
    """Add a dataset of objects under numpy's name for them, and a row of the index for it."""

    def change(file):
        file.create_dataset(f"arrays/{name}", (4,), dtype)
        index = json.loads(file["index"][()].tobytes())
        index["arrays"].append(["o", name, [4], 0])
        replace("index", data=np.frombuffer(json.dumps(index).encode(), np.uint8))(file)

    return change


#: Changes of the HDF5 file.
FILES = {
    "external link": link("arrays/float32", h5py.ExternalLink("/etc/passwd", "/x")),
    "external link to the same data": link_to_same,
    "external link to itself": link("arrays/float32", h5py.ExternalLink("step-00000004.h5", "/index")),
    "soft link": link("arrays/float32", h5py.SoftLink("/index")),
    "soft link in a circle": link("arrays/float32", h5py.SoftLink("/arrays/float32")),
    "dangling link": link("index", h5py.SoftLink("/nothing")),
    "index elsewhere": link("index", h5py.ExternalLink("/etc/passwd", "/x")),
    "cyclic hard link": link("arrays/evil", lambda file: file["/"]),
    "arrays is the root": link("arrays", lambda file: file["/"]),
    "index is the arrays": link("index", lambda file: file["arrays"]),
    "arrays is the index": link("arrays", lambda file: file["index"]),
    "index among the arrays": link("arrays/index", lambda file: file["index"]),
    "one dataset under many names": many_links,
    "more data than the file": copies,
    "virtual": virtual,
    "virtual without end": functools.partial(virtual, shape=(400,), most=(None,)),
    "virtual of itself": functools.partial(virtual, source="."),
    "external storage": replace("arrays/float32", (400,), "f4", external=[("/etc/passwd", 0, 1600)]),
    "external storage without end": replace(
        "arrays/float32", (400,), "f4", external=[("/dev/zero", 0, h5py.h5f.UNLIMITED)]
    ),
    "chunks": big_array("f4", 400, chunks=(10,)),
    "gzip": big_array("f4", 400, chunks=(400,), compression="gzip"),
    "shuffle and checksum": big_array("f4", 400, chunks=(400,), shuffle=True, fletcher32=True),
    "scale-offset": big_array("i4", 400, chunks=(400,), scaleoffset=4),
    "bomb": big_array("f8", 1 << 50, chunks=(1 << 10,)),
    "gzip bomb": replace("arrays/float32", data=np.zeros(1 << 22, "f4"), chunks=(1 << 20,), compression="gzip"),
    "contiguous bomb of the right type": big_array("f4", 1 << 47),
    "contiguous bomb": big_array("f8", 1 << 47),
    "two dimensions": replace("arrays/float32", (20, 20), "f4"),
    "32 dimensions": replace("arrays/float32", (1,) * 32, "f4"),
    "a scalar": replace("arrays/float32", (), "f4"),
    "null space": replace("arrays/float32", data=h5py.Empty("f4")),
    "text": replace("arrays/float32", data=["a", "b"]),
    "fixed text": replace("arrays/float32", data=np.array([b"abc"] * 9)),
    "variable length": replace("arrays/float32", (400,), h5py.vlen_dtype(np.float32)),
    "references": replace("arrays/float32", (400,), h5py.ref_dtype),
    "region references": replace("arrays/float32", (400,), h5py.regionref_dtype),
    "objects called so": named_objects(h5py.vlen_dtype(np.float32), "object"),
    "a compound called so": named_objects(np.dtype("f4,f4"), "f4,f4"),
    "a name that numpy cannot parse": named_objects("f4", "(2,f4"),
    "a name that is no number to Python": named_objects("f4", "01f4"),
    "another name of a dtype": named_objects("f4", "f4"),
    "compound": compound,
    "opaque": replace("arrays/float32", (400,), "V8"),
    "subarrays": replace("arrays/float32", (4,), np.dtype(("f4", (1 << 10,)))),
    "another type": replace("arrays/float32", (400,), "f8"),
    "other bytes of a number": replace("arrays/float32", (400,), ">f4"),
    "other bytes of a whole number": replace("arrays/int64", (50,), ">i8"),
    "an enumeration": replace("arrays/float32", (400,), h5py.enum_dtype({"a": 1}, "i4")),
    "truth of floats": replace("arrays/bool", (9,), "f8"),
    "truth of 7": replace("arrays/bool", data=np.full(9, 7, np.uint8)),
    "a named type": link("arrays/float32", lambda file: np.dtype("f4")),
    "a group": lambda file: file.create_group("arrays/evil/a/b/c"),
    "deep groups": deep_groups,
    "huge attributes": huge_attribute,
    "another dataset": replace("index", (9,), "u1"),
    "no index": lambda file: file.__delitem__("index"),
    "no arrays": lambda file: file.__delitem__("arrays"),
    "an array less": lambda file: file.__delitem__("arrays/float32"),
    "more at the root": lambda file: file.create_dataset("more", (3,), "f4"),
    "more than the index tells": lambda file: file.create_dataset("arrays/float16", (3,), "f2"),
}


def set_row(row, *values):
    return lambda index: index["arrays"].__setitem__(row, list(values))


def set_part(name, value):
    return lambda index: index.__setitem__(name, value)


def nested(depth):
    return '{"format": 1, "arrays": [], "state": ' + '{"list": [' * depth + "]}" * depth + "}"


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
    "a number of many digits": lambda index: '{"format": 1, "arrays": [], "state": ' + "9" * 100_000 + "}",
    "a format of many digits": set_part("format", 10**400),
    "format NaN": set_part("format", float("nan")),
    "format list": set_part("format", [1]),
    "not JSON": lambda index: "{",
    "not UTF-8": lambda index: "\udcff".encode("utf-8", "surrogatepass").decode("latin1"),
    "a list": lambda index: "[1]",
    "arrays infinite": set_part("arrays", float("inf")),
    "rows that are numbers": set_part("arrays", [1, 2]),
    "rows that are dicts": set_part("arrays", [{"a": 1, "b": 2, "c": 3, "d": 4}]),
    "shape NaN": set_row(0, "w", "float32", [float("nan")], 0),
    "shape infinite": set_row(0, "w", "float32", [float("inf")], 0),
    "shape with 0 and more": set_row(0, "w", "float32", [0, 10**30], 0),
    "shape of many digits": set_row(0, "w", "float32", [10**4000] * 200, 0),
    "shape of many ones": set_row(0, "w", "float32", [1] * 1000 + [400], 0),
    "shape of huge numbers": set_row(0, "w", "float32", [10**4000] * 3000, 0),
    "shape negative": set_row(0, "w", "float32", [-40, -10], 0),
    "shape true": set_row(0, "w", "float32", [True, 400], 0),
    "shape None": set_row(0, "w", "float32", None, 0),
    "shape text": set_row(0, "w", "float32", "400", 0),
    "shape dict": set_row(0, "w", "float32", {"400": 1}, 0),
    "offset beyond": set_row(0, "w", "float32", [40, 10], 1),
    "offset huge": set_row(0, "w", "float32", [0], 10**30),
    "offset float": set_row(0, "w", "float32", [40, 10], 0.0),
    "dtype list": set_row(0, "w", ["float32"], [40, 10], 0),
    "dtype None": set_row(0, "w", None, [40, 10], 0),
    "dtype of objects": set_row(0, "w", "object", [40, 10], 0),
    "dtype index": set_row(0, "w", "index", [10], 0),
    "name list": set_row(0, ["w"], "float32", [40, 10], 0),
    "the same array often": set_part("arrays", [["w", "float32", [40, 10], 0]] * 10_000),
}

#: Changes of the manifest.
MANIFESTS = {
    "file elsewhere": {"file": "../../../../etc/passwd"},
    "file absolute": {"file": "/etc/passwd"},
    "file with a line": {"file": "step-00000004.h5\n"},
    "file with a null": {"file": "step-00000004.h5\0"},
    "file up and back": {"file": "../gen-0001/step-00000004.h5"},
    "file number": {"file": 7},
    "file None": {"file": None},
    "file list": {"file": ["step-00000004.h5"]},
    "file of another step": {"file": "step-00000005.h5"},
    "file is the manifest": {"file": "step-00000004.json"},
    "step text": {"step": "4"},
    "step float": {"step": 4.0},
    "step true": {"step": True},
    "step NaN": {"step": float("nan")},
    "step huge": {"step": 10**300},
    "size text": {"nbytes": "1"},
    "size huge": {"nbytes": 10**300},
    "size negative": {"nbytes": -1},
    "size NaN": {"nbytes": float("nan")},
    "digest None": {"xxh3_128": None},
    "digest list": {"xxh3_128": []},
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
    "format text": {"format": "1"},
    "format huge": {"format": 10**300},
    "format list": {"format": [1]},
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


def endless_of_no_bytes(path):
    in_manifest(nbytes=0)(path)
    is_link_to(DATA, "/dev/zero")(path)


def is_folder(name):
    def make(path):
        (path / name).unlink()
        (path / name).mkdir()

    return make


def json_bomb(depth):
    return put(MANIFEST, ('{"manifest": ' * depth + "1" + "}" * depth).encode())


#: Changes of what is in the folder.
OTHERS = {
    "a pickle": both(put(DATA, pickle.dumps(Payload()))),
    "nothing": both(put(DATA, b"")),
    "zeros": both(put(DATA, bytes(5000))),
    "a signature alone": both(put(DATA, b"\x89HDF\r\n\x1a\n")),
    "manifest nested": json_bomb(DEEP),
    "manifest nested less": json_bomb(980),
    "manifest of lists": put(MANIFEST, b"[" * DEEP + b"]" * DEEP),
    "manifest of digits": put(MANIFEST, b'{"manifest": ' + b"9" * 100_000 + b', "xxh3_128": 1}'),
    "manifest null": put(MANIFEST, b"null"),
    "manifest text": put(MANIFEST, b'"text"'),
    "manifest not UTF-8": put(MANIFEST, b"\xff\xfe\0"),
    "manifest without end": is_link_to(MANIFEST, "/dev/zero"),
    "file without end": is_link_to(DATA, "/dev/zero"),
    "file without end, of no bytes": endless_of_no_bytes,
    "manifest a pipe": is_pipe(MANIFEST),
    "file a pipe": is_pipe(DATA),
    "manifest a folder": is_folder(MANIFEST),
    "file a folder": is_folder(DATA),
    "manifest linked to itself": is_link_to(MANIFEST, "step-00000004.json"),
}

#: Changes of the notes of an attempt: the checkpoint is sound, and must be read.
NOTES = {
    "nested": b"[" * DEEP,
    "list": b'{"restored": [], "has_ended": false}',
    "dict": b'{"restored": {"a": 1}, "has_ended": false}',
    "digits": b'{"restored": ' + b"9" * 10_000 + b', "has_ended": 1}',
    "null": b"null",
    "empty": b"",
    "not UTF-8": b"\xff",
}


def lies():
    """Yield every hostile file whose digest fits."""
    for name, change in FILES.items():
        yield Case("lie", f"file: {name}", in_file(change))
    for name, change in INDICES.items():
        yield Case("lie", f"index: {name}", in_index(change))
    for name, change in STATES.items():
        yield Case("lie", f"state: {name}", in_index(change))
    for name, parts in MANIFESTS.items():
        yield Case("lie", f"manifest: {name}", in_manifest(**parts))
    for name, make in OTHERS.items():
        yield Case("lie", f"folder: {name}", make)
    for name, content in NOTES.items():
        yield Case("notes", f"notes: {name}", put("gen-0002/attempt.json", content))


def all_cases(original):
    """Return every case: lies first."""
    found = [*lies(), *noises(original), *damages(original, DATA, original.data)]
    return [*found, *damages(original, MANIFEST, original.manifest)]


def cases(original, first, last, every):
    """Return (number, case) of every nth case from `first` to `last`."""
    return list(enumerate(all_cases(original)))[first:last:every]
