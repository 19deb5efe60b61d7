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

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from lightning_ups.transforms.checkpoint import (
    SavedWeights,
    Saver,
    consolidated,
    load,
    load_weights,
    resolve,
    rest_of,
    save_sharded,
)

CANARY = "lightning_ups_canary"  # a module whose import leaves a file of that name
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


class Attack:
    """Opens a checkpoint in every way, and says what came of it."""

    def __init__(self, path, canary):
        self.path, self.canary = path, canary

    def __call__(self):
        """Return the errors of all readers; fail if one executed code, changed the process or hid the file's name."""
        before = [dict(vars(each)) for each in WATCHED]
        modules = {*sys.modules}
        errors = [error for open_ in READERS if (error := self._error(open_))]
        assert not self.canary.exists(), "code was executed"
        assert CANARY not in sys.modules
        assert {name for name in {*sys.modules} - modules if not name.startswith(("torch", "encodings"))} == set()
        for each, attributes in zip(WATCHED, before, strict=True):
            assert dict(vars(each)) == attributes, f"{each} was changed"
        for error in errors:
            assert isinstance(error, ValueError | FileNotFoundError), repr(error)
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
    lambda path: consolidated(resolve(path)),
    lambda path: [SavedWeights(resolve(path))[name] for name in SavedWeights(resolve(path))],
)


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
        "optimizer_states": [named(module, optimizer)],
        "hyper_parameters": {"width": 3},
        "callbacks": {},
    }
    save_sharded(Saver(asynchronous=False), kept, path, apart=("hyper_parameters",))
    return path


def named(module, optimizer):
    from lightning_ups.transforms.checkpoint import named_state

    return named_state(module, optimizer)


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
    "nested lists": pickle.EMPTY_LIST * 100_000 + pickle.APPEND * 99_999,
    "nested tuples": pickle.EMPTY_TUPLE + pickle.TUPLE1 * 300_000,
    "nested tuples as a key": pickle.EMPTY_DICT
    + pickle.EMPTY_TUPLE
    + pickle.TUPLE1 * 300_000
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
        del marker[key]
    for name in names:
        marker["files"][name] = (path / name).stat().st_size
    (path / "complete.json").write_text(json.dumps(marker))
