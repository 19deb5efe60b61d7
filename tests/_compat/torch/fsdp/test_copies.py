import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group  # noqa: TID251

from lightning_ups._compat.torch.fsdp.copies import copying_beside

GPU = torch.device("cuda", 0)


@pytest.fixture
def said(monkeypatch):
    """Pretend that there is a GPU, and return what its streams are told, in order."""
    said = []

    class Stream:
        def __init__(self, name):
            self.name = name if isinstance(name, str) else "copying"

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            said.append(f"{self.name} waits for {event}")

        def record_event(self):
            said.append(f"mark in {self.name}")
            return "mark"

    current = [Stream("computing")]

    @contextmanager
    def stream(other):
        current.append(other)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    copy = lambda *_: said.append(f"copy in {current[-1].name}")  # noqa: E731
    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather_copy_out", copy)
    for name in ("_to_sharded", "_to_sharded_post_forward"):
        monkeypatch.setattr(_fsdp_param_group.FSDPParamGroup, name, lambda _, name=name: said.append(name))
    return said


def copy(device=GPU):
    gathered = SimpleNamespace(all_gather_output=SimpleNamespace(device=device))
    _fsdp_param_group.foreach_all_gather_copy_out(gathered, [], None)


def free(name="_to_sharded", device=GPU):
    getattr(_fsdp_param_group.FSDPParamGroup, name)(SimpleNamespace(device=device))


def test_a_copy_waits_for_what_was_freed_and_computing_for_the_copy(said):
    with copying_beside():
        copy()
        assert said == ["copying waits for computing", "copy in copying", "computing waits for copying"]
        said.clear()
        copy()
        assert said == ["copy in copying", "computing waits for copying"]  # and not for what computes now
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            said.clear()
            free(name)
            copy()
            assert said == [
                name,
                "mark in computing",
                "copying waits for mark",
                "copy in copying",
                "computing waits for copying",
            ]


def test_elsewhere_and_afterwards_torch_does_as_it_did(said):
    before = _fsdp_param_group.foreach_all_gather_copy_out
    cpu = torch.device("cpu")
    with copying_beside(), copying_beside():
        copy(cpu)
        free(device=cpu)
    assert said == ["copy in computing", "_to_sharded"]
    assert _fsdp_param_group.foreach_all_gather_copy_out is before
    said.clear()
    copy()
    free()
    assert said == ["copy in computing", "_to_sharded"]


RUN = """
import json, sys
from contextlib import nullcontext
from unittest.mock import patch
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_ups.data import RandomTokens
from lightning_ups.models import GPTModule
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy

def train(precision, **options):
    seed_everything(0, verbose=False)
    module, losses = GPTModule(size="150M", schedule="constant", warmup_steps=1), []
    step = module.training_step
    module.training_step = lambda *args: losses.append(step(*args)) or losses[-1]
    trainer = Trainer(accelerator="gpu", devices=2, strategy=FSDP2Strategy(**options), plugins=[precision],
                      max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, gradient_clip_val=1.0)
    trainer.fit(module, RandomTokens(vocab_size=50304, seq_len=256, batch_size=2))
    return [loss.item() for loss in losses]

torch.use_deterministic_algorithms(True, warn_only=True)
same = {}
for name, precision in (("bf16", BF16Precision), ("float8", Float8Precision)):
    for options in ({"sharding": "full"}, {"sharding": "gradients"}, {"sharding": "full", "prefetch": 2}):
        runs = [train(precision(), **options)]
        with patch("lightning_ups.strategies.fsdp2.copying_beside", nullcontext):
            runs.append(train(precision(), **options))
        same[f"{name} {options}"] = runs[0] == runs[1] and runs[0][0] != runs[0][-1]
if torch.distributed.get_rank() == 0:
    print(json.dumps(same))
"""


@pytest.mark.gpu(count=2)
def test_on_two_gpus_not_a_bit_changes(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[4]), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(launch, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    same = json.loads(done.stdout.splitlines()[-1])
    assert len(same) == 6
    assert all(same.values()), same
