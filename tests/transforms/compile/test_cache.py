import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from lightning_ups.transforms.compile.cache import CacheFile

CPU = torch.device("cpu")


@CacheArtifactFactory.register
class Program(CacheArtifact):
    """Stands for what inductor makes, which takes seconds to make."""

    in_use: ClassVar[dict[str, bytes]] = {}

    @staticmethod
    def type():
        return "ups_program"

    def populate_cache(self):
        Program.in_use[self.key] = self.content


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch):
    monkeypatch.setattr(Program, "in_use", {})
    with CacheArtifactManager.with_fresh_cache():
        yield


def compile_something(key="key", content=b"a program"):
    CacheArtifactManager.record_artifact(Program.type(), key, content)


def saved(path):
    with CacheArtifactManager.with_fresh_cache():
        compile_something()
        assert CacheFile(path, CPU).save() == 1
    return path.read_bytes()


def test_what_was_compiled_is_there_in_the_next_process(tmp_path):
    path = tmp_path / "new folder" / "cache"
    saved(path)
    assert CacheFile(path, CPU).load() == 1
    assert Program.in_use == {"key": b"a program"}
    assert [p.name for p in path.parent.iterdir()] == ["cache"]


def test_no_file_is_no_problem_and_nothing_to_save_makes_none(tmp_path):
    file = CacheFile(tmp_path / "cache", CPU)
    assert file.load() == 0
    assert file.save() == 0
    assert not (tmp_path / "cache").exists()


def test_a_run_that_compiles_nothing_new_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path / "cache"
    saved(path)
    os.utime(path, (0, 0))
    file = CacheFile(path, CPU)
    file.load()
    compile_something()  # a hit is recorded like a program that was made
    assert file.save() == 1
    assert path.stat().st_mtime == 0


def test_a_run_that_uses_little_of_the_file_keeps_the_rest(tmp_path):
    path = tmp_path / "cache"
    saved(path)
    with CacheArtifactManager.with_fresh_cache():
        file = CacheFile(path, CPU)
        file.load()
        compile_something("another")
        assert file.save() == 2
    assert CacheFile(path, CPU).load() == 2


def broken_header(content):
    return b"PK" + content


def damaged(content):
    return content[:-1] + b"?"


def cut_short(content):
    return content[: len(content) - 5]


def elsewhere(content):
    header, _, programs = content.partition(b"\n")
    return json.dumps({**json.loads(header), "torch": "1.0"}).encode() + b"\n" + programs


def other_device(content):
    header, _, programs = content.partition(b"\n")
    return json.dumps({**json.loads(header), "device": "cuda, NVIDIA H200"}).encode() + b"\n" + programs


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (broken_header, "it is not a file that Compile wrote"),
        (lambda content: b"", "it is not a file that Compile wrote"),
        (lambda content: b"[1]\n", "it is not a file that Compile wrote"),
        (lambda content: b"[" * 100_000 + b"\n", "it is not a file that Compile wrote"),
        (damaged, "it is damaged"),
        (cut_short, "it is damaged"),
        (elsewhere, r"it was made for torch 1\.0, and here it is 2\."),
        (other_device, "it was made for device cuda, NVIDIA H200, and here it is cpu, "),
    ],
)
def test_a_file_that_cannot_be_used_is_said_and_never_replaced(tmp_path, change, match):
    path = tmp_path / "cache"
    content = change(saved(path))
    path.write_bytes(content)
    file = CacheFile(path, CPU)
    with pytest.raises(ValueError, match=rf"{match}.*give another path, to have a new one written\.$"):
        file.load()
    compile_something("another")
    assert file.save() == 0
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "cache").mkdir()
    with pytest.raises(ValueError, match="reading it failed"):
        CacheFile(tmp_path / "cache", CPU).load()


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    content = saved(path)
    file = CacheFile(path, CPU)
    file.load()
    compile_something("another")

    def crash(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        file.save()
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["cache"]


def test_the_second_device_of_a_machine_has_a_file_of_its_own(tmp_path):
    path = CacheFile(tmp_path / "cache.bin", CPU).path
    second = torch.device("cpu", 1)
    assert CacheFile(tmp_path / "cache.bin", second).path == path.with_name("cache.bin.1")


START = """
import json, sys, torch
from torch import nn
from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.compile.cache import CacheFile
torch.manual_seed(0)
block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
file = CacheFile(sys.argv[1], torch.device("cpu"))
loaded = file.load()
with compiled({"block": block}, Compiler()) as run:
    out = block(torch.ones(2, 8, requires_grad=True)).sum()
    out.backward()
print(json.dumps({"loaded": loaded, "saved": file.save(), "graphs": run.facts["graphs"], "out": out.item(),
                  "from_cache": run.facts["groups"][0]["from_cache"]}))
"""


@pytest.mark.slow
def test_a_second_start_is_warm(tmp_path):
    starts = []
    for number in range(2):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"inductor{number}")}
        command = [sys.executable, "-W", "ignore", "-c", START, str(tmp_path / "cache")]
        process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        starts.append(json.loads(process.stdout.splitlines()[-1]))
    cold, warm = starts
    assert (cold["loaded"], cold["graphs"], cold["from_cache"]) == (0, 1, 0)
    assert (warm["loaded"], warm["graphs"], warm["from_cache"]) == (cold["saved"], 1, 1)
    assert cold["saved"] > 0
    assert warm["out"] == cold["out"]
