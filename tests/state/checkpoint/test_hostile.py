"""Hostile checkpoints: none may execute code or change the process, and each error names the file."""

import builtins
import copyreg
import json
import os
import pathlib
import pickle
import shutil
import struct
import sys
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from lightning_ups.commands import export
from lightning_ups.state.checkpoint import (
    SavedWeights,
    Saver,
    consolidated,
    damaged,
    folder,
    load,
    load_weights,
    named_state,
    resolve,
    rest_of,
    save_sharded,
)
from lightning_ups.state.checkpoint.checksums import checksum

CANARY = "lightning_ups_canary"  # a module whose import leaves a file of that name
OF_PYTHON = ("torch", "encodings", "tracemalloc", "_tracemalloc")  # which these import by themselves, as for a warning
WATCHED = (
    builtins,
    os,
    pathlib.Path,
    pathlib.PurePath,
    pathlib.PosixPath,
    torch.Size,
    torch.Tensor,
    torch.serialization,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp._MEM_FORMAT_ENCODING,
    _StorageInfo,
    dict,
)


def attributes_of(watched):
    """Return the attributes except for the registry in which Python keeps the warnings of a module."""
    return {name: value for name, value in vars(watched).items() if name != "__warningregistry__"}


class Attack:
    """Opens a checkpoint in every way, and says what came of it."""

    def __init__(self, path, canary):
        self.path, self.canary = path, canary

    def __call__(self):
        """Return the errors of all readers; fail if one executed code, changed the process or hid the file's name."""
        before = [attributes_of(each) for each in WATCHED]
        modules = {*sys.modules}
        readers = READERS if self.path.is_dir() else OF_FILES
        errors = [error for open_ in readers if (error := self._error(open_))]
        assert not self.canary.exists(), "code was executed"
        assert CANARY not in sys.modules
        assert {name for name in {*sys.modules} - modules if not name.startswith(OF_PYTHON)} == set()
        for each, attributes in zip(WATCHED, before, strict=True):
            assert attributes_of(each) == attributes, f"{each} was changed"
        for error in errors:
            assert isinstance(error, ValueError | FileNotFoundError) or "more memory" in str(error), repr(error)
            assert str(self.path) in str(error)
            assert len(str(error)) < 1000
        return errors

    def _error(self, open_):
        try:
            open_(self.path)
        except Exception as error:  # noqa: BLE001
            return error
        return None


def model():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def into_module(path):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    load(resolve(path), module=module, optimizers=[optimizer], needless=("hyper_parameters",))


READERS = (
    into_module,
    lambda path: load_weights(model(), path),
    lambda path: rest_of(resolve(path)),
    lambda path: [SavedWeights(resolve(path))[name] for name in SavedWeights(resolve(path))],
    lambda path: consolidated(resolve(path)),
)
OF_FILES = READERS[:-1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint as a run saves it."""
    path = tmp_path_factory.mktemp("saved") / "kept.ckpt"
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept = {
        "state_dict": module.state_dict(),
        "optimizer_states": [named_state(module, optimizer)],
        "hyper_parameters": {"width": 3},
        "callbacks": {},
    }
    save_sharded(Saver(asynchronous=False), kept, path, apart=("hyper_parameters",))
    return path


@pytest.fixture
def attack(saved, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{CANARY}.py").write_text(f"open({str(canary)!r}, 'x')\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("CANARY", str(canary))
    path = tmp_path / "kept.ckpt"
    shutil.copytree(saved, path)
    return Attack(path, canary)


def test_the_checkpoint_itself_is_read(attack):
    assert attack() == []


# Pickles


def text(value):
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def globals_(name):
    module, _, attribute = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def by_stack(module, attribute):
    return text(module) + text(attribute) + pickle.STACK_GLOBAL


PROTO = pickle.PROTO + b"\x04"
COMMAND = text("open(__import__('os').environ['CANARY'], 'x')")
EVIL = COMMAND + pickle.TUPLE1 + pickle.REDUCE
SLOTS = pickle.NONE + pickle.EMPTY_DICT + text("unlink") + pickle.NONE + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD
POSIX = globals_("pathlib.PosixPath")
DCP = "torch.distributed.checkpoint.metadata."


def new(name):
    return globals_(DCP + name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ


def state(**fields):
    return (
        pickle.EMPTY_DICT
        + b"".join(text(name) + value + pickle.SETITEM for name, value in fields.items())
        + pickle.BUILD
    )


def setting(owner, **fields):
    """Give an object a state of slots, which pickle sets as attributes."""
    pairs = b"".join(text(name) + value + pickle.SETITEM for name, value in fields.items())
    return owner + pickle.NONE + pickle.EMPTY_DICT + pairs + pickle.TUPLE2 + pickle.BUILD


PICKLES = {
    "global": globals_("builtins.exec") + EVIL,
    "global of the system": globals_("os.system") + text("touch $CANARY") + pickle.TUPLE1 + pickle.REDUCE,
    "global of posix": globals_("posix.system") + text("touch $CANARY") + pickle.TUPLE1 + pickle.REDUCE,
    "stack global": by_stack("builtins", "exec") + EVIL,
    "stack global, dotted": by_stack(DCP[:-1], "Metadata.__init__.__globals__") + EVIL,
    "stack global, no text": pickle.EMPTY_DICT + pickle.EMPTY_DICT + pickle.STACK_GLOBAL,
    "stack global, nested": pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000 + text("x") + pickle.STACK_GLOBAL,
    "import": globals_(f"{CANARY}.X"),
    "import by stack": by_stack(CANARY, "X"),
    "import of a part of torch": globals_("torch._dynamo.config"),
    "lazy attribute of torch": globals_("torch.onnx"),
    "inst": pickle.MARK + COMMAND + pickle.INST + b"builtins\nexec\n",
    "obj": pickle.MARK + globals_("builtins.exec") + COMMAND + pickle.OBJ,
    "newobj": globals_("subprocess.Popen") + text("touch $CANARY") + pickle.TUPLE1 + pickle.NEWOBJ,
    "newobj of type": globals_("builtins.type") + text("X") + pickle.TUPLE1 + pickle.NEWOBJ,
    "newobj_ex": globals_("builtins.exec") + COMMAND + pickle.TUPLE1 + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
    "ext1": pickle.EXT1 + b"\xf7" + EVIL,
    "ext2": pickle.EXT2 + b"\xf7\x00" + EVIL,
    "ext4": pickle.EXT4 + b"\xf7\x00\x00\x00" + EVIL,
    "persistent id": pickle.PERSID + b"x\n",
    "persistent id, binary": text("x") + pickle.BINPERSID,
    "getattr": globals_("builtins.getattr") + POSIX + text("unlink") + pickle.TUPLE2 + pickle.REDUCE,
    "getattr of a class": globals_("builtins.getattr")
    + globals_(DCP + "Metadata")
    + text("__init__")
    + pickle.TUPLE2
    + pickle.REDUCE,
    "eval": globals_("builtins.eval") + EVIL,
    "import function": globals_("builtins.__import__") + text(CANARY) + pickle.TUPLE1 + pickle.REDUCE,
    "torch.load": globals_("torch.load") + text("x") + pickle.TUPLE1 + pickle.REDUCE,
    "copyreg": globals_("copyreg._reconstructor") + POSIX + POSIX + pickle.NONE + pickle.TUPLE3 + pickle.REDUCE,
    "build of slots of a class of paths": POSIX + SLOTS,
    "build of slots of a class of DCP": globals_(DCP + "Metadata") + SLOTS,
    "build of slots of a dtype": globals_("torch.float32") + SLOTS,
    "build of slots of a function": globals_("torch.serialization._get_layout") + SLOTS,
    "build of slots of a list": pickle.EMPTY_LIST + SLOTS,
    "build of slots of an enumeration": globals_(DCP + "_MEM_FORMAT_ENCODING") + SLOTS,
    "build of a state of a class": POSIX
    + pickle.EMPTY_DICT
    + text("unlink")
    + pickle.NONE
    + pickle.SETITEM
    + pickle.BUILD,
    "build of slots of the size": globals_("torch.Size") + SLOTS,
    "build of another path": setting(POSIX + text("x") + pickle.TUPLE1 + pickle.REDUCE, _str=text("/tmp")),
    "build of another class": setting(new("Metadata"), **{"__class__": globals_("pathlib.PosixPath")}),
    "build twice": new("Metadata") + state() + state(),
    "build of nothing": pickle.NONE + pickle.EMPTY_DICT + pickle.BUILD,
    "put far away": pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff",
    "put very far away": pickle.NONE + pickle.PUT + b"99999999999\n",
    "get of nothing": pickle.LONG_BINGET + b"\xff\xff\xff\xff",
    "text without end": pickle.BINUNICODE8 + b"\xff" * 7 + b"\x7f" + b"x",
    "bytes without end": pickle.BINBYTES8 + b"\xff" * 7 + b"\x7f" + b"x",
    "frame without end": pickle.FRAME + b"\xff" * 8 + b"x",
    "a large number": pickle.LONG4 + b"\xff\xff\xff\x7f",
    "a number of many digits": pickle.INT + b"9" * 100_000 + b"\n",
    "nested lists": pickle.EMPTY_LIST * 30_000 + pickle.APPEND * 29_999,
    "nested tuples": pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000,
    "nested tuples as a key": pickle.EMPTY_DICT
    + pickle.EMPTY_TUPLE
    + pickle.TUPLE1 * 100_000
    + pickle.NONE
    + pickle.SETITEM,
    "nested frozen sets": pickle.MARK + pickle.FROZENSET + (pickle.MARK + pickle.FROZENSET) * 1000,
    "a list within itself": pickle.EMPTY_LIST + pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.APPEND,
    "marks": pickle.MARK * 100_000,
    "pop of nothing": pickle.POP * 10,
    "buffers": pickle.NEXT_BUFFER + pickle.READONLY_BUFFER,
    "bytearray": pickle.BYTEARRAY8 + b"\xff" * 7 + b"\x7f",
    "nothing": b"",
    "zeros": b"\0" * 100,
    "no pickle": b"PK\x03\x04" + b"x" * 100,
    "text of shell": b"#!/bin/sh\ntouch $CANARY\n",
    "a plain list": pickle.EMPTY_LIST,
    "an empty object": new("Metadata"),
    "an object without fields": new("Metadata") + state(),
    "a class as the whole": globals_(DCP + "Metadata"),
    "names that are a list": new("Metadata") + state(state_dict_metadata=pickle.EMPTY_LIST),
    "an entry that is none": new("Metadata")
    + state(state_dict_metadata=pickle.EMPTY_DICT + text("state_dict.0.weight") + pickle.NONE + pickle.SETITEM),
    "fields by numbers": new("Metadata")
    + pickle.EMPTY_DICT
    + pickle.BININT1
    + b"\1"
    + pickle.NONE
    + pickle.SETITEM
    + pickle.BUILD,
}


@pytest.mark.parametrize("name", PICKLES)
def test_metadata_of_strange_opcodes(attack, name, monkeypatch):
    monkeypatch.setattr(copyreg, "_inverted_registry", {0xF7: ("builtins", "exec")})
    monkeypatch.setattr(copyreg, "_extension_cache", {0xF7: exec})
    (attack.path / ".metadata").write_bytes(PROTO + PICKLES[name] + pickle.STOP)
    resize(attack.path, ".metadata")
    assert len(attack()) == len(READERS) - 1, "all but the one that does not look there refuse it"


def resize(path, *names):
    """Let the marker of the folder at ``path`` agree with its files, as an attacker would."""
    marker = json.loads((path / "complete.json").read_text())
    for key in ("checksums", "checksum"):
        marker.pop(key, None)
    if ".metadata" in names:  # which is only read if this file is missing, as in a folder that torch wrote
        (path / "tensors.json").unlink(missing_ok=True)
        marker["files"].pop("tensors.json", None)
    for name in names:
        marker["files"][name] = (path / name).stat().st_size
    (path / "complete.json").write_text(json.dumps(marker))


# What the metadata says


def metadata(path):
    return pickle.loads((path / ".metadata").read_bytes())


def entry(found, name="state_dict.0.weight"):
    return found.state_dict_metadata[name]


def place(found, name="state_dict.0.weight"):
    return next(place for index, place in found.storage_data.items() if index.fqn == name)


def set_in(found, get, **fields):
    for name, value in fields.items():
        object.__setattr__(get(found), name, value)


def chunk(found):
    return entry(found).chunks[0]


LIES = {
    "the parent": lambda m: set_in(m, place, relative_path="../other.distcp"),
    "an absolute path": lambda m: set_in(m, place, relative_path="/etc/passwd"),
    "a path with a detour": lambda m: set_in(m, place, relative_path="x/../../other.distcp"),
    "a path of zeros": lambda m: set_in(m, place, relative_path="x\0y"),
    "a long path": lambda m: set_in(m, place, relative_path="x" * 5000),
    "no path": lambda m: set_in(m, place, relative_path=""),
    "the folder": lambda m: set_in(m, place, relative_path="."),
    "a path of bytes": lambda m: set_in(m, place, relative_path=b"x"),
    "a path object": lambda m: set_in(m, place, relative_path=pathlib.PosixPath("/etc/passwd")),
    "a surrogate": lambda m: set_in(m, place, relative_path="\udcff"),
    "a file that is not there": lambda m: set_in(m, place, relative_path="other.distcp"),
    "a place before the file": lambda m: set_in(m, place, offset=-1),
    "a place behind the file": lambda m: set_in(m, place, offset=2**62),
    "a place too far for the system": lambda m: set_in(m, place, offset=2**70),
    "a length of nothing": lambda m: set_in(m, place, length=0),
    "a negative length": lambda m: set_in(m, place, length=-5),
    "an endless length": lambda m: set_in(m, place, length=2**62),
    "a length that is text": lambda m: set_in(m, place, length="3"),
    "an unknown compression": lambda m: set_in(m, place, transform_descriptors=["stream.nothing/1"]),
    "a compression that is an object": lambda m: set_in(m, place, transform_descriptors=[Exception]),
    "an absurd size": lambda m: set_in(m, entry, size=torch.Size([2**60])),
    "an absurd size with its part": lambda m: (
        set_in(m, entry, size=torch.Size([2**40])),
        set_in(m, chunk, sizes=torch.Size([2**40]), offsets=torch.Size([0])),
    ),
    "a product that overflows": lambda m: set_in(m, entry, size=torch.Size([2**62, 2**62])),
    "a negative size": lambda m: set_in(m, entry, size=torch.Size([-1, -1])),
    "a size that is a list": lambda m: set_in(m, entry, size=[2, 3]),
    "a size of fractions": lambda m: set_in(m, entry, size=(2.5, 3)),
    "no parts": lambda m: set_in(m, entry, chunks=[]),
    "parts of more dimensions": lambda m: set_in(m, chunk, sizes=torch.Size([2, 3, 1])),
    "a part outside": lambda m: set_in(m, chunk, offsets=torch.Size([5, 0])),
    "a part twice": lambda m: entry(m).chunks.append(entry(m).chunks[0]),
    "properties of another class": lambda m: set_in(m, entry, properties=m.storage_meta),
    "a dtype that is text": lambda m: set_in(m, lambda m: entry(m).properties, dtype="torch.float32"),
    "no names": lambda m: set_in(m, lambda m: m, planner_data=None),
    "names that are text": lambda m: set_in(m, lambda m: m, planner_data=dict.fromkeys(m.planner_data, "optimizer_0")),
    "names of names": lambda m: set_in(m, lambda m: m, planner_data=dict.fromkeys(m.planner_data, (("a",),))),
    "equal names": lambda m: set_in(m, lambda m: m, planner_data=dict.fromkeys(m.planner_data, ("state_dict", "x"))),
    "names within names": lambda m: m.planner_data.update({"state_dict.0.weight": ("state_dict", "0.bias", "x")}),
    "names many levels deep": lambda m: m.planner_data.update({"state_dict.0.weight": ("state_dict",) * 50_000}),
    "names that are numbers": lambda m: set_in(m, lambda m: m, planner_data=dict.fromkeys(m.planner_data, (0, 1))),
    "names of unknown entries": lambda m: m.planner_data.update({"other": ("state_dict", "other")}),
    "no places": lambda m: set_in(m, lambda m: m, storage_data=None),
    "places that are a list": lambda m: set_in(m, lambda m: m, storage_data=[1]),
    "an entry that is a value": lambda m: m.state_dict_metadata.update(
        {"state_dict.0.weight": dcp.BytesStorageMetadata()}
    ),
    "a value that is an entry": lambda m: m.state_dict_metadata.update(
        {name: entry(m) for name, kept in m.state_dict_metadata.items() if isinstance(kept, dcp.BytesStorageMetadata)}
    ),
    "another dtype": lambda m: set_in(m, lambda m: entry(m).properties, dtype=torch.complex128),
    "a quantized dtype": lambda m: set_in(m, lambda m: entry(m).properties, dtype=torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies(attack, name):
    found = metadata(attack.path)
    LIES[name](found)
    (attack.path / ".metadata").write_bytes(pickle.dumps(found))
    resize(attack.path, ".metadata")
    attack()


def nested(depth):
    return "[" * depth + "]" * depth


def stored(tree, **fields):
    """Change where the first chunk of a tensor is stored, in JSON."""
    [chunk] = tree["entries"]["state_dict.0.weight"]["chunks"]
    for place, name in enumerate(("offsets", "sizes", "file", "offset", "length")):
        chunk[place] = fields.get(name, chunk[place])


def described(tree, **fields):
    tree["entries"]["state_dict.0.weight"].update(fields)


LIES_IN_JSON = {
    "the parent": lambda t: stored(t, file="../other.distcp"),
    "an absolute path": lambda t: stored(t, file="/etc/passwd"),
    "a path with a detour": lambda t: stored(t, file="x/../../other.distcp"),
    "a path of zeros": lambda t: stored(t, file="x\0y"),
    "a long path": lambda t: stored(t, file="x" * 5000),
    "no path": lambda t: stored(t, file=""),
    "the folder": lambda t: stored(t, file="."),
    "a path that is a number": lambda t: stored(t, file=1),
    "a path that is a list": lambda t: stored(t, file=["x"]),
    "a surrogate": lambda t: stored(t, file="\udcff"),
    "a file that is not there": lambda t: stored(t, file="other.distcp"),
    "a place before the file": lambda t: stored(t, offset=-1),
    "a place behind the file": lambda t: stored(t, offset=2**62),
    "a place too far for the system": lambda t: stored(t, offset=2**70),
    "a place that is a fraction": lambda t: stored(t, offset=0.5),
    "a place that is not a number": lambda t: stored(t, offset=float("nan")),
    "a place that is true": lambda t: stored(t, offset=True),
    "a length of nothing": lambda t: stored(t, length=0),
    "a negative length": lambda t: stored(t, length=-5),
    "an endless length": lambda t: stored(t, length=2**62),
    "a length that is text": lambda t: stored(t, length="3"),
    "an absurd size": lambda t: described(t, size=[2**60]),
    "a product that overflows": lambda t: described(t, size=[2**62, 2**62]),
    "a size too large for torch": lambda t: (described(t, size=[2**70]), stored(t, offsets=[0], sizes=[2**70])),
    "a negative size": lambda t: (described(t, size=[-1, -1]), stored(t, sizes=[-1, -1])),
    "a size of fractions": lambda t: described(t, size=[2.5, 3]),
    "a size of lists": lambda t: described(t, size=[[2], [3]]),
    "a size that is text": lambda t: described(t, size="23"),
    "a size of names": lambda t: described(t, size={"2": 3}),
    "no parts": lambda t: described(t, chunks=[]),
    "parts that are text": lambda t: described(t, chunks="abcde"),
    "parts of more dimensions": lambda t: stored(t, offsets=[0, 0, 0], sizes=[2, 3, 1]),
    "a part outside": lambda t: stored(t, offsets=[5, 0]),
    "a part twice": lambda t: described(t, chunks=t["entries"]["state_dict.0.weight"]["chunks"] * 2),
    "a part of too few fields": lambda t: described(t, chunks=[[[0, 0], [2, 3]]]),
    "a part of too many fields": lambda t: t["entries"]["state_dict.0.weight"]["chunks"][0].append(["torch.save"]),
    "a dtype that is a function": lambda t: described(t, dtype="torch.load"),
    "a dtype to import": lambda t: described(t, dtype=f"{CANARY}.X"),
    "a dtype that is a list": lambda t: described(t, dtype=["torch.float32"]),
    "no dtype": lambda t: described(t, dtype=None),
    "no names": lambda t: t.update(keys={}),
    "names that are none": lambda t: t.update(keys=None),
    "names that are text": lambda t: t.update(keys=dict.fromkeys(t["keys"], "optimizer_0")),
    "names of names": lambda t: t.update(keys={key: [["a"]] for key in t["keys"]}),
    "equal names": lambda t: t.update(keys={key: ["state_dict", "x"] for key in t["keys"]}),
    "names many levels deep": lambda t: t["keys"].update({"state_dict.0.weight": ["state_dict"] * 50_000}),
    "names of unknown entries": lambda t: t["keys"].update({"other": ["state_dict", "other"]}),
    "no entries": lambda t: t.update(entries={}),
    "entries that are a list": lambda t: t.update(entries=[1]),
    "entries that are none": lambda t: t.update(entries=dict.fromkeys(t["entries"])),
    "entries that are text": lambda t: t.update(entries=dict.fromkeys(t["entries"], "stored")),
    "an entry that is a value": lambda t: described(t, stored=["__0_0.distcp", 0, 10]),
    "a value that is nowhere": lambda t: described(t, stored=["__0_0.distcp"]),
    "nothing": lambda t: t.clear(),
}
BYTES_OF_JSON = {
    "nested": nested(100_000).encode(),
    "nested in a field": b'{"keys": {}, "entries": {"a": ' + nested(100_000).encode() + b"}}",
    "a list": b"[]",
    "null": b"null",
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "a pickle": pickle.PROTO + b"\x04" + globals_("builtins.exec") + EVIL + pickle.STOP,
    "a number of many digits": b'{"keys": {}, "entries": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", [*LIES_IN_JSON, *BYTES_OF_JSON])
def test_descriptions_in_json_that_lie(attack, name):
    file = attack.path / "tensors.json"
    if name in BYTES_OF_JSON:
        file.write_bytes(BYTES_OF_JSON[name])
    else:
        tree = json.loads(file.read_text())
        LIES_IN_JSON[name](tree)
        file.write_text(json.dumps(tree))
    resize(attack.path, "tensors.json")
    assert attack()


# The marker and the checksums


MARKERS = {
    "nested": nested(100_000),
    "nested in a field": '{"format": 2, "saved_at_ns": 1, "files": ' + nested(100_000) + "}",
    "nested mappings": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "no text": b"\xff\xfe\x00",
    "empty": "",
    "a list": "[]",
    "null": "null",
    "no files": '{"format": 2, "saved_at_ns": 1}',
    "files that are a list": '{"format": 2, "saved_at_ns": 1, "files": ["meta.pt"]}',
    "files that are text": '{"format": 2, "saved_at_ns": 1, "files": "meta.pt"}',
    "files of no size": '{"format": 2, "saved_at_ns": 1, "files": {"meta.pt": null}}',
    "files of fractions": '{"format": 2, "saved_at_ns": 1, "files": {"meta.pt": NaN}}',
    "files outside": '{"format": 2, "saved_at_ns": 1, "files": {"../../etc/passwd": 1}}',
    "an absolute path": '{"format": 2, "saved_at_ns": 1, "files": {"/dev/zero": 0}}',
    "a path of zeros": '{"format": 2, "saved_at_ns": 1, "files": {"a\\u0000b": 1}}',
    "a long path": '{"format": 2, "saved_at_ns": 1, "files": {"' + "a" * 5000 + '": 1}}',
    "a time that is text": '{"format": 2, "saved_at_ns": "1", "files": {}}',
    "a number of many digits": '{"format": 2, "saved_at_ns": ' + "9" * 100_000 + ', "files": {}}',
    "checksums that are a list": '{"format": 2, "saved_at_ns": 1, "files": {"meta.pt": 1}, "checksums": []}',
}


@pytest.mark.parametrize("name", MARKERS)
def test_markers_that_no_save_writes(attack, name):
    text = MARKERS[name]
    (attack.path / "complete.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert len(attack()) == len(READERS)


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_beside_it_does_not_keep_a_run_from_resuming(attack, saved, name):
    (attack.path / "complete.json").unlink()
    sibling = attack.path.with_name("sibling.ckpt")
    shutil.copytree(saved, sibling)
    text = MARKERS[name]
    (sibling / "complete.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    shutil.copytree(saved, attack.path.with_name("whole.ckpt"))
    for error in attack():
        assert "whole.ckpt" in str(error), "the newest whole one is named"


@pytest.mark.parametrize("found", [0, 3, 999, -1, "1", None, 1.0, True, [1], "x" * 10_000])
def test_a_format_of_a_later_version_is_refused_by_its_number(attack, found):
    marker = json.loads((attack.path / "complete.json").read_text())
    (attack.path / "complete.json").write_text(json.dumps(marker | {"format": found}))
    resize(attack.path)
    errors = attack()
    assert len(errors) == len(READERS) - 1, "hyperparameters alone are read from any"
    assert all(f"of format {str(found)[:5]}" in str(error).replace("'", "") for error in errors)
    assert (attack.path / "meta.pt").exists()


SUMS = {
    "nested": nested(100_000),
    "a list": "[1]",
    "text": '{"__0_0.distcp": "x"}',
    "too few numbers": '{"__0_0.distcp": [[0, 1]]}',
    "no chunk": '{"__0_0.distcp": [[0, 9, 1, 1, 0, [1]]]}',
    "negative": '{"__0_0.distcp": [[0, 9, -1, -1, 5, [1]]]}',
    "endless": '{"__0_0.distcp": [[0, 4611686018427387904, 4611686018427387904, 0, 1, [1, 2]]]}',
    "sums that are text": '{"__0_0.distcp": [[0, 9, 1, 1, 5, "abc"]]}',
}


@pytest.mark.parametrize("name", SUMS)
def test_checksums_that_no_save_writes(attack, name):
    (attack.path / "checksums.json").write_text(SUMS[name])
    marker = json.loads((attack.path / "complete.json").read_text())
    marker["files"]["checksums.json"] = len(SUMS[name])
    marker["checksums"]["checksums.json"] = checksum(SUMS[name].encode())
    del marker["checksum"]
    marker["checksum"] = folder._sum_of(marker)
    (attack.path / "complete.json").write_text(json.dumps(marker))
    assert len(attack()) == len(READERS) - 1, "hyperparameters are no tensors"


def sealed(path, **checksums):
    """Write a marker that fits the files, as an attacker would, with ``checksums`` of further files."""
    marker = json.loads((path / "complete.json").read_text())
    for name in marker["files"]:
        marker["files"][name] = (path / name).stat().st_size
    known = {name: folder.checksum_of_file(path / name) for name in marker["checksums"]}
    marker["checksums"] = known | checksums
    del marker["checksum"]
    marker["checksum"] = folder._sum_of(marker)
    (path / "complete.json").write_text(json.dumps(marker))


def test_the_marker_does_not_name_files_outside_to_verify(attack, tmp_path):
    (tmp_path / "outside").write_bytes(b"x")
    sealed(attack.path)
    assert damaged(resolve(attack.path)) == []
    sealed(attack.path, **{"../outside": checksum(b"x")})
    with pytest.raises(FileNotFoundError, match=r"complete\.json is damaged"):
        damaged(resolve(attack.path))
    assert len(attack()) == len(READERS)


@pytest.mark.parametrize("name", ["../outside", "/dev/zero", "..", "", "x\0y", "other.distcp"])
def test_checksums_do_not_name_files_outside_to_verify(attack, tmp_path, name):
    (tmp_path / "outside").write_bytes(b"x" * 9)
    sums = json.loads((attack.path / "checksums.json").read_text())
    (attack.path / "checksums.json").write_text(json.dumps(sums | {name: [[0, 9, 9, 0, 1, [checksum(b"x" * 9), 0]]]}))
    sealed(attack.path)
    with pytest.raises(ValueError, match=r"checksums\.json cannot be read"):
        damaged(resolve(attack.path))
    assert len(attack()) == len(READERS) - 1


def test_checksums_of_more_bytes_than_there_are_need_no_memory(attack):
    endless = '{"__0_0.distcp": [[0, 4611686018427387904, 4611686018427387904, 0, 1, [1, 2]]]}'
    (attack.path / "checksums.json").write_text(endless)
    sealed(attack.path)
    with pytest.raises(ValueError, match="more bytes than there are"):
        damaged(resolve(attack.path))
    assert len(attack()) == len(READERS) - 1, "hyperparameters are no tensors"


# Files that are no files


def pipe(path):
    os.mkfifo(path)


def link_to(target):
    return lambda path: path.symlink_to(target)


ODD = {
    "pipe": pipe,
    "zeros without end": link_to("/dev/zero"),
    "nothing": link_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "folder": pathlib.Path.mkdir,
    "text": link_to("/etc/passwd"),
    "the root": link_to("/"),
}


@pytest.mark.parametrize(
    "file", ["complete.json", "tensors.json", ".metadata", "meta.pt", "apart.pt", "__0_0.distcp", "checksums.json"]
)
@pytest.mark.parametrize("name", ODD)
def test_files_that_are_none(attack, file, name):
    resize(attack.path, *([file] if file == ".metadata" else []))
    target = attack.path / file
    target.unlink()
    ODD[name](target)
    marker = attack.path / "complete.json"
    if file != marker.name:
        known = json.loads(marker.read_text())
        known["files"] = {"meta.pt": 0} if file == "meta.pt" else {"meta.pt": known["files"]["meta.pt"]}
        marker.write_text(json.dumps(known))
    attack()


@pytest.mark.parametrize(
    "file", ["tensors.json", ".metadata", "meta.pt", "apart.pt", "__0_0.distcp", "complete.json", "checksums.json"]
)
@pytest.mark.parametrize("kept", [0, 1, 30, 0.5, 0.99])
def test_files_that_were_cut(attack, file, kept):
    path = attack.path / file
    os.truncate(path, int(kept * path.stat().st_size) if isinstance(kept, float) else kept)
    assert attack()
    if file != "complete.json":
        resize(attack.path, file)
        attack()


# What torch.save writes


def repacked(path, data):
    """Replace the pickle in a file of ``torch.save``, which is a zip archive."""
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, piece in content.items():
            archive.writestr(name, data if name.endswith("data.pkl") else piece)


ALSO = {
    "a call with everything trusted": globals_("torch._utils._rebuild_tensor_v2") + EVIL,
    "a storage that is none": globals_("torch._utils._rebuild_tensor_v2") + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "slots of a class that is trusted": globals_("collections.OrderedDict") + SLOTS,
    "state of a class that is trusted": globals_("torch.nn.parameter.Parameter") + SLOTS,
    "a dict within itself": pickle.EMPTY_DICT
    + pickle.BINPUT
    + b"\0"
    + text("a")
    + pickle.BINGET
    + b"\0"
    + pickle.SETITEM,
    "nested dicts": pickle.EMPTY_DICT + (text("a") + pickle.EMPTY_DICT) * 5_000 + pickle.SETITEM * 5_000,
    "an object that is not trusted": pickle.EMPTY_DICT + text("state_dict") + globals_(f"{CANARY}.X") + pickle.SETITEM,
}


# Torch's reader hashes what is a key, however deeply it is nested, and that crashes the process: no code is executed.
OF_TORCH = [*(name for name in PICKLES if name != "nested tuples as a key"), *ALSO]


@pytest.mark.parametrize("file", ["meta.pt", "apart.pt"])
@pytest.mark.parametrize("name", OF_TORCH)
def test_strange_opcodes_in_what_torch_saved(attack, file, name, monkeypatch):
    monkeypatch.setattr(copyreg, "_inverted_registry", {0xF7: ("builtins", "exec")})
    monkeypatch.setattr(copyreg, "_extension_cache", {0xF7: exec})
    repacked(attack.path / file, pickle.PROTO + b"\x02" + (PICKLES | ALSO)[name] + pickle.STOP)
    resize(attack.path, file)
    attack()


@pytest.mark.parametrize("name", OF_TORCH)
def test_strange_opcodes_in_one_file(attack, tmp_path, name):
    path = tmp_path / "kept.pt"
    torch.save({"state_dict": model().state_dict(), "optimizer_states": []}, path)
    repacked(path, pickle.PROTO + b"\x02" + (PICKLES | ALSO)[name] + pickle.STOP)
    attack.path = path
    assert len(attack()) >= len(OF_FILES) - 1, "of the rest, what is not trusted is left out"


@pytest.mark.parametrize("name", ["global", "import", "newobj", "build of slots of a class of paths"])
def test_strange_opcodes_without_an_archive(attack, tmp_path, name):
    attack.path = tmp_path / "kept.pt"
    attack.path.write_bytes(PROTO + PICKLES[name] + pickle.STOP)
    assert len(attack()) == len(OF_FILES)


def several_disks(content):
    end = content.rindex(b"PK\x05\x06")
    return content[:end] + b"PK\x06\x07" + struct.pack("<LQL", 1, 0, 7) + content[end:]


def other_records(content):
    return content.replace(b"PK\x01\x02", b"PK\x01\x03")


def encrypted(content):
    start = content.index(b"PK\x01\x02")
    return content[: start + 8] + b"\x01\x00" + content[start + 10 :]


def compressed(content):
    start = content.index(b"PK\x01\x02")
    return content[: start + 10] + b"\x0c\x00" + content[start + 12 :]


def cut(content):
    return content[:-30]


@pytest.mark.parametrize("change", [several_disks, other_records, encrypted, compressed, cut])
@pytest.mark.parametrize("file", [None, "meta.pt", "apart.pt"])
def test_archives_that_torch_does_not_write(attack, tmp_path, change, file):
    if file is None:
        attack.path = path = tmp_path / "kept.ckpt.saving"
        torch.save({"state_dict": model().state_dict(), "optimizer_states": []}, path)
    else:
        path = attack.path / file
    path.write_bytes(change(path.read_bytes()))
    if file is not None:
        resize(attack.path, file)
    attack()
    if change in (several_disks, cut):
        with pytest.raises(ValueError, match="has no checksums"):
            damaged(path)
    else:
        assert damaged(path) == [path.name]


VALUES = {
    "nothing": {},
    "lists": {"state_dict": [], "optimizer_states": {}, "lightning_ups.extra_state": []},
    "text": {"state_dict": "x", "optimizer_states": "abc", "lightning_ups.extra_state": "x"},
    "numbers": {"state_dict": 1, "optimizer_states": 1, "lightning_ups.places": 1, "lightning_ups.extra_state": 1},
    "numbers as names": {"state_dict": {1: torch.ones(1)}, 1: 2, (1, 2): 3},
    "sharded entries": {"callbacks": {"lightning_ups.sharded": "nothing"}},
    "sharded entries of lists": {"callbacks": {"lightning_ups.sharded": [1]}},
    "odd optimizers": {"state_dict": {}, "optimizer_states": [{"state": 1, "param_groups": 2}]},
    "an optimizer of none": {"state_dict": {}, "optimizer_states": [None]},
    "groups of text": {"state_dict": {}, "optimizer_states": [{"state": {}, "param_groups": ["x"]}]},
    "a tensor of strides": {"state_dict": {"0.weight": torch.ones(1).expand(2**30, 2**30)}},
    "sparse": {"state_dict": {"0.weight": torch.eye(3).to_sparse()}},
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_values_of_other_types(attack, tmp_path, name, kind):
    if kind == "folder":
        torch.save(VALUES[name], attack.path / "meta.pt")
        resize(attack.path, "meta.pt")
    else:
        attack.path = tmp_path / "kept.pt"
        torch.save({"state_dict": model().state_dict()} | VALUES[name], attack.path)
    attack()


# Data of tensors and values


@pytest.mark.parametrize("name", OF_TORCH)
def test_strange_opcodes_in_data(attack, name):
    found, data = metadata(attack.path), attack.path / "__0_0.distcp"
    value = next(n for n, kept in found.state_dict_metadata.items() if isinstance(kept, dcp.BytesStorageMetadata))
    evil = attack.path.with_name("evil.pt")
    torch.save({}, evil)
    repacked(evil, pickle.PROTO + b"\x02" + (PICKLES | ALSO)[name] + pickle.STOP)
    for key in ("state_dict.0.weight", value):
        set_in(found, lambda m, key=key: place(m, key), offset=data.stat().st_size, length=evil.stat().st_size)
    with data.open("ab") as file:
        file.write(evil.read_bytes())
    (attack.path / ".metadata").write_bytes(pickle.dumps(found))
    resize(attack.path, ".metadata", "__0_0.distcp")
    assert attack()


# What export reads of a model


CONFIGS = {
    "nested": {"class": "x.Y", "config": nested(100_000)},
    "no text": {"class": "x.Y", "config": 1},
    "no JSON": {"class": "x.Y", "config": "x"},
    "a list": {"class": "x.Y", "config": "[]"},
    "no class": {"config": "{}"},
    "a class that is none": {"class": 1, "config": "{}"},
    "a list for it": [1],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_no_save_writes(attack, tmp_path, name):
    torch.save({"lightning_ups.models": {"": CONFIGS[name]}}, attack.path / "meta.pt")
    resize(attack.path, "meta.pt")
    words = ["--checkpoint", str(attack.path), "--output", str(tmp_path / "out"), "--names", "hf"]
    with pytest.raises(ValueError, match=r"kept\.ckpt"):
        export.main(words)
    assert not attack.canary.exists()


# Safetensors


INDICES = {
    "nested": nested(100_000),
    "the parent": '{"weight_map": {"0.weight": "../x.safetensors"}}',
    "an absolute path": '{"weight_map": {"0.weight": "/etc/passwd"}}',
    "no map": "{}",
    "a list": "[]",
    "a map that is a list": '{"weight_map": []}',
    "files that are lists": '{"weight_map": {"0.weight": ["x.safetensors"]}}',
    "files that are numbers": '{"weight_map": {"0.weight": 1}}',
    "a file of zeros": '{"weight_map": {"0.weight": "x\\u0000y"}}',
    "the folder itself": '{"weight_map": {"0.weight": ""}}',
    "the folder above": '{"weight_map": {"0.weight": ".."}}',
    "a file that is not there": '{"weight_map": {"0.weight": "other.safetensors"}}',
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_of_safetensors(attack, tmp_path, name):
    attack.path = tmp_path / "hf"
    attack.path.mkdir()
    save_file(model().state_dict(), attack.path / "x.safetensors")
    (attack.path / "model.safetensors.index.json").write_text(INDICES[name])
    assert attack()


@pytest.mark.parametrize(
    "head", [b"", b"\xff" * 8, struct.pack("<Q", 20) + b"{" * 20, struct.pack("<Q", 2**40) + b"{}"]
)
def test_heads_of_safetensors(attack, tmp_path, head):
    attack.path = tmp_path / "x.safetensors"
    attack.path.write_bytes(head)
    assert attack()
