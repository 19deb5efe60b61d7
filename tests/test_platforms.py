"""What docs/guides/hardware.md says of cards and platforms that are not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_ups._compat.environment import host
from lightning_ups._compat.torch import probes
from lightning_ups.callbacks import (
    AccelerationFlags,
    ActivationCheckpoint,
    Compile,
    OptimizerOffload,
    RunManifest,
    StepGuard,
)
from lightning_ups.commands import doctor
from lightning_ups.commands.machine import hardware
from lightning_ups.commands.machine.hardware import TECHNIQUES, examine
from lightning_ups.commands.machine.packages import KNOWN, Machine, Package
from lightning_ups.config import presets
from lightning_ups.config.command_line import preset_of_device, read_command_line
from lightning_ups.kernels.attention import support
from lightning_ups.kernels.attention.support import Kind
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.transforms import flags
from tests.toys import Net, loader, trainer

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "hardware.md"
ROWS = [
    [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| .*\d\.\d .*", PAGE.read_text(), re.M)
]
TECHNIQUE = {technique.name: technique for technique in TECHNIQUES}


@pytest.fixture
def card(monkeypatch):
    """Pretend a GPU of some compute capability, with every package."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(support, "missing_package", lambda _: None)
        monkeypatch.setattr(hardware, "attention_kernel_error", lambda *_, **__: None)
        for name in (n for n, f in vars(probes).items() if getattr(f, "__module__", "") == probes.__name__):
            monkeypatch.setattr(probes, name, lambda *_, **__: None)
        packages = {known.name: Package(version="1") for known in KNOWN}
        gpus = [{"index": 0, "name": "a card", "capability": [*capability]}]
        return Machine(host={}, gpus=gpus, cuda="13.0", packages=packages)

    return pretend


def float8(tmp_path, recipe):
    """Return "yes", or "error" if the precision refuses the card."""
    precision, module = Float8Precision(recipe=recipe), Net()
    module.trainer = trainer(tmp_path, plugins=[precision])
    module.trainer.strategy._root_device = torch.device("cuda", 0)
    try:
        precision._check_device(module)
    except RuntimeError as error:
        return "error" if "cannot run on this device: a card" in str(error) else error
    return "yes"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_of_cards(row, card, tmp_path):
    _, capability, auto, bf16, tf32, in_bf16, in_float8, mx, kernels = row
    machine = card(tuple(map(int, capability.split("."))))
    answer = {
        name: examine(TECHNIQUE[name], machine).verdict for name in ("bf16", "tf32", "float8-tensorwise", "mxfp8")
    }
    assert auto.strip("`") == (preset_of_device("auto")[0] or "none")
    assert bf16 == in_bf16 == {"runs": "yes", "limited": "slow"}[answer["bf16"]]
    assert tf32 == {"runs": "yes", "no": "no"}[answer["tf32"]]
    for cell, recipe, technique in ((in_float8, "tensorwise", "float8-tensorwise"), (mx, "mxfp8", "mxfp8")):
        assert cell == float8(tmp_path, recipe) == {"runs": "yes", "no": "error"}[answer[technique]]
    kind = Kind("cuda", torch.bfloat16, 4, 4, 64, 64, causal=True)
    can = [name for name in ("fa3", "fa4") if support.refusal(name, kind) is None]
    assert re.findall(r"fa\d", kernels) == can


def test_the_presets_of_the_table_need_what_the_table_says():
    for name in ("a100", "h100", "memory", "h200-fp8"):
        assert ("Float8Precision" in presets.text(name)) == (name == "h200-fp8")
        assert "recipe: tensorwise" in presets.text(name) or "BF16Precision" in presets.text(name)
    assert ROWS


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_attention_kernels_are_tried_in_the_dtype_of_the_card(monkeypatch, capability, dtype):
    seen, stock = [], torch.zeros
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(
        torch, "zeros", lambda *size, device, **rest: seen.append(rest["dtype"]) or stock(*size, **rest)
    )
    assert flags.attention_kernel_error("math", device=torch.device("cuda")) is None
    assert seen == [dtype]


def test_float16_replaces_the_precision_of_a_preset(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    request = read_command_line(["fit", "--config", str(file)], slots={})
    assert any("precision 16-mixed instead of BF16Precision" in note for note in request.notes)
    assert "BF16Precision" not in str([layer.tree for layer in request.texts.values()])
    assert "callbacks.Compile" in str([layer.tree for layer in request.texts.values()])
    assert yaml.safe_load(text)["trainer"]["precision"] == "16-mixed"


class Overflowing(Net):
    def training_step(self, batch, index):
        return super().training_step(batch * (1e3 if self.global_step == 2 else 1.0), index)


def float16(tmp_path, *callbacks):
    """Return losses and the final scale, which is lower after a step that was skipped."""
    module = Overflowing()
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    trainer(tmp_path, plugins=[precision], callbacks=callbacks, gradient_clip_val=1.0).fit(module, loader())
    return torch.stack(module.losses), precision.scaler.get_scale()


@pytest.mark.filterwarnings("ignore")
def test_float16_trains_the_same_with_callbacks(tmp_path):
    expected, scale = float16(tmp_path)
    assert scale < 2**16, "no step was skipped"
    for callbacks in (
        [OptimizerOffload()],
        [
            Compile(backend="aot_eager"),
            ActivationCheckpoint(save="matmuls"),
            AccelerationFlags(tf32=True),
            RunManifest(),
        ],
    ):
        losses, found = float16(tmp_path, *callbacks)
        assert torch.equal(losses, expected)
        assert found == scale
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        float16(tmp_path, StepGuard())


IMITATED = """
import importlib, os, pkgutil, signal, sys
import lightning.pytorch, torch, torch._dynamo, torch._inductor  # whose files for this platform are the ones here
import torch.distributed.checkpoint, torch.distributed.elastic.multiprocessing.redirects
import torch.distributed.tensor.parallel
sys.platform = {platform!r}
for name in {modules}:
    sys.modules[name] = None
for module, name in [(os, name) for name in {calls}] + [(signal, name) for name in {signals}]:
    delattr(module, name)
import lightning_ups
for module in pkgutil.walk_packages(lightning_ups.__path__, "lightning_ups."):
    if module.name != "lightning_ups.__main__":
        importlib.import_module(module.name)
from lightning.pytorch import Trainer
from lightning_ups.callbacks import ActivationCheckpoint, ExactResume, RunManifest, TokenThroughput
from lightning_ups.precision import BF16Precision
from tests.toys import Net, loader
callbacks = [ActivationCheckpoint(), ExactResume(), RunManifest(), TokenThroughput()]
Trainer(accelerator="cpu", max_steps=2, plugins=[BF16Precision()], callbacks=callbacks).fit(Net(), loader())
"""
WINDOWS = {
    "modules": ["resource", "fcntl", "pwd", "grp", "termios"],
    "calls": ["fork", "sched_getaffinity", "getuid", "sysconf"],
    "signals": ["SIGPIPE"],
}


@pytest.mark.parametrize(
    ("platform", "lacks"),
    [("win32", WINDOWS), ("darwin", {"modules": [], "calls": ["sched_getaffinity"], "signals": []})],
)
def test_other_platforms_import_and_train(tmp_path, platform, lacks):
    code = IMITATED.format(platform=platform, **lacks)
    paths = os.pathsep.join([str(PAGE.parent.parent), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr


def test_a_host_without_sysconf_has_no_size_of_memory(monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    found = host() | {"memory_limit": None}
    assert found["memory"] is None
    (line, *_) = doctor._machine_lines({"host": found, "versions": {}, "gpus": []})
    assert "usable" in line.plain
    assert "GiB" not in line.plain


def test_an_apple_gpu_has_no_preset_and_no_float8(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert preset_of_device("auto") == (None, "the device is an Apple GPU")
    precision, module = Float8Precision(), Net()
    module.trainer = trainer(tmp_path, accelerator="cpu", plugins=[BF16Precision()])
    module.trainer.strategy._root_device = torch.device("mps")
    with pytest.raises(RuntimeError, match="cannot run on this device: mps"):
        precision._check_device(module)
