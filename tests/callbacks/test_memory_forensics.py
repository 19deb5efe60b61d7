import gc
import re

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from torch import nn

import lightning_ups.callbacks.memory_forensics as forensics
from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, MemoryForensics
from lightning_ups.data import RandomTokens
from lightning_ups.models import GPTModule
from lightning_ups.precision import BF16Precision
from lightning_ups.strategies import FSDP2Strategy

OOM = "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.10 GiB"


class Failing(GPTModule):
    """Its third block, or its backward, has no memory at a step."""

    def __init__(self, at=1, where="forward", error=torch.OutOfMemoryError):
        super().__init__(size="tiny")
        self.at, self.where, self.error = at, where, error

    def training_step(self, batch, i):
        loss = super().training_step(batch, i)
        if self.global_step == self.at and self._trainer.__class__ is Trainer:
            if self.where == "forward":
                self.model.layers[2].ffn.down.forward = self.fail
                super().training_step(batch, i)
            if self.where == "backward":
                loss.register_hook(self.fail)
        return loss

    def fail(self, _):
        raise self.error(OOM)


def fit(*callbacks, module=None, folder, expect=torch.OutOfMemoryError, seq_len=32, **options):
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"plugins": [BF16Precision(weights="masters")], "devices": 1, "limit_val_batches": 0, **options},
    )
    data = RandomTokens(vocab_size=256, seq_len=seq_len, batch_size=4)
    if expect is None:
        trainer.fit(module or GPTModule(size="tiny"), data)
        return None
    with pytest.raises(expect) as caught:
        trainer.fit(module or Failing(), data)
    error = caught.value.with_traceback(None)
    del caught
    gc.collect()  # older torch leaves the hooks of a checkpoint that failed on this thread while its frames live
    return error


@pytest.fixture
def counters(monkeypatch):
    """Make the allocator's counters; each look takes the next, and the last from then on."""

    def made(*series):
        looks = iter(series)
        last = {}

        def read(device):
            last.update(next(looks, {}))
            return dict(last)

        monkeypatch.setattr(forensics, "allocator_counters", read)

    return made


def counted(retries, allocated=2**30, reserved=2**31):
    return {
        "num_alloc_retries": retries,
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.current": reserved,
    }


def test_the_text_of_the_error(tmp_path, monkeypatch):
    quick(monkeypatch)
    error = fit(MemoryForensics(), folder=tmp_path, seq_len=256)
    text = str(error)
    lines = text.splitlines()
    assert lines[0] == f"Out of memory on cpu at step 1, in the forward pass of model.layers.2.ffn.down. {OOM}."
    assert lines[1].startswith("Held now, ")
    held = text.split("Held now")[1].split("By plan")[0]
    for kind in ("parameters", "master weights", "optimizer state"):
        assert kind in held
    assert "By plan, this run needs " in text
    assert "activations" in text.split("By plan")[1]
    cures = text.split("The cheapest ways to need less")[1]
    assert all(f"  {number}. " in cures for number in (1, 2, 3))
    assert "  4. " not in cures
    assert "ActivationCheckpoint(save=matmuls): " in cures
    assert "less, " in cures
    assert "\n       Trainer(callbacks=[..., ActivationCheckpoint(save='matmuls')])" in cures
    assert "class_path" not in cures


def test_cures_are_yaml_on_the_command_line(tmp_path, monkeypatch):
    quick(monkeypatch)

    class Saved(SaveConfigCallback):
        def __init__(self):
            super().__init__(None, None, save_to_log_dir=False)

        def save_config(self, *_):
            pass

    text = str(fit(MemoryForensics(), Saved(), folder=tmp_path, seq_len=256))
    assert "\n       trainer.callbacks+: [{class_path: ActivationCheckpoint" in text
    assert "Trainer(" not in text


def quick(monkeypatch):
    """Leave out the variant that takes the most time."""
    variants = forensics.Planner._variants
    monkeypatch.setattr(forensics.Planner, "_variants", lambda self: (v for v in variants(self) if v.name != "Compile"))


def test_it_is_written_beside_the_logs(tmp_path):
    error = fit(MemoryForensics(plan=False), folder=tmp_path)
    assert (tmp_path / "out-of-memory-rank0.txt").read_text() == f"{error}\n"
    assert not (tmp_path / "out-of-memory-rank0.pickle").exists()  # the CPU has no such allocator


def test_a_folder_of_its_own_and_one_that_cannot_be(tmp_path):
    fit(MemoryForensics(plan=False, folder=tmp_path / "a" / "b"), folder=tmp_path)
    assert (tmp_path / "a" / "b" / "out-of-memory-rank0.txt").exists()
    (tmp_path / "file").touch()
    error = fit(MemoryForensics(plan=False, folder=tmp_path / "file"), folder=tmp_path)
    assert f"Cannot write to {tmp_path / 'file'}" in str(error)


def test_the_snapshot_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(forensics, "write_snapshot", lambda path, device: path.write_bytes(b"blocks") > 0)
    error = fit(MemoryForensics(plan=False), folder=tmp_path)
    assert f"A snapshot of the allocator, for pytorch.org/memory_viz: {tmp_path}/out-of-memory-rank0.pickle" in str(
        error
    )
    assert (tmp_path / "out-of-memory-rank0.pickle").read_bytes() == b"blocks"
    fit(MemoryForensics(plan=False, snapshot=False, folder=tmp_path / "none"), folder=tmp_path)
    assert not (tmp_path / "none" / "out-of-memory-rank0.pickle").exists()


def test_in_backward_and_without_a_plan(tmp_path):
    error = fit(MemoryForensics(plan=False), module=Failing(where="backward"), folder=tmp_path)
    assert "at step 1, in the backward pass. CUDA out of memory" in str(error)
    assert "By plan" not in str(error)


def test_other_allocators_errors_are_explained_and_keep_their_type(tmp_path):
    class Allocator(Failing):
        def fail(self, _):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    error = fit(MemoryForensics(plan=False), module=Allocator(), folder=tmp_path, expect=RuntimeError)
    assert str(error).startswith("Out of memory on cpu at step 1")
    assert "you tried to allocate 9 bytes." in str(error)


def test_other_errors_are_left_alone(tmp_path):
    error = fit(MemoryForensics(), module=Failing(error=ValueError), folder=tmp_path, expect=ValueError)
    assert str(error) == OOM
    assert not (tmp_path / "out-of-memory-rank0.txt").exists()


def test_what_the_allocator_has_beside_is_activations(tmp_path, counters):
    counters(counted(0, allocated=5 * 2**30))
    error = fit(MemoryForensics(plan=False), folder=tmp_path)
    assert "Held now, 5.0 GiB, 2.0 GiB reserved:" in str(error)
    assert "activations and temporaries" in str(error)


def test_blocks_that_grew_in_the_first_step_are_named(tmp_path, counters):
    series = []  # before and after each of four blocks, in the first forward pass
    for block in range(4):
        series += [counted(0, allocated=block * 2**30), counted(0, allocated=(block * 2 + 1) * 2**30)]
    counters(*series)
    error = fit(MemoryForensics(plan=False), module=Failing(at=0), folder=tmp_path)
    assert "model.layers.3: 4.0 GiB activations; model.layers.2: 3.0 GiB activations" in str(error)


@pytest.mark.slow
def test_the_plan_knows_what_is_declared(tmp_path, monkeypatch):
    monkeypatch.setattr(forensics.Planner, "variants", lambda self: iter(()))
    needs = []
    for callbacks in ([], [ActivationCheckpoint(save="nothing")], [ActivationOffload(min_mb=0)]):
        error = fit(MemoryForensics(), *callbacks, folder=tmp_path, module=Failing(), seq_len=256)
        assert "By plan" in str(error), str(error)
        needs.append(str(error).split("By plan")[1])
    assert len({*needs}) == 3
    assert "No single setting needs less." in needs[0]


class Odd(LightningModule):
    """Depends on numbers, so that it cannot be rehearsed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(33, 33)), nn.Sequential(nn.Linear(33, 33))])

    def training_step(self, batch, _):
        x = batch.float()
        for layer in self.layers:
            x = layer(x)
        if x.sum().item() < 1e30:
            raise torch.OutOfMemoryError(OOM)

    def validation_step(self, batch, _):
        """Is there since there is data for it."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_run_that_cannot_be_counted_says_so(tmp_path):
    error = fit(MemoryForensics(), module=Odd(), folder=tmp_path, plugins=None)
    assert "What the run needs could not be counted: Odd.training_step depends on values" in str(error)


class Unlucky(Odd):
    def training_step(self, batch, _):
        return self.layers[0](batch.float()).square().mean()

    def validation_step(self, batch, _):
        raise torch.OutOfMemoryError(OOM)


def test_outside_of_a_training_step_it_says_that_the_plan_is_of_no_use(tmp_path):
    error = fit(MemoryForensics(), module=Unlucky(), folder=tmp_path, plugins=None, limit_val_batches=1)
    assert "in the validation" in str(error)
    assert "By plan" not in str(error)
    assert "smaller batches" in str(error)


def test_under_fsdp2_the_plan_is_of_the_module_as_it_was_built_and_of_how_it_is_sharded(tmp_path, ranks):
    kept = {}
    for sharding in ("full", "none"):
        text = ranks(_sharded, str(tmp_path), sharding)
        assert "By plan, this run needs " in text
        kept[sharding] = float(re.search(r"([0-9.]+) MiB optimizer state", text.split("By plan")[1])[1])
    assert kept["none"] == pytest.approx(2 * kept["full"], rel=0.05)


def _sharded(folder, sharding):
    forensics.Planner.variants = lambda self: iter(())
    error = fit(
        MemoryForensics(),
        module=Failing(),
        folder=folder,
        plugins=[BF16Precision(weights="masters")],
        devices=2,
        strategy=FSDP2Strategy(sharding=sharding),
    )
    return str(error)


def test_the_alarm_before_it(tmp_path, counters, monkeypatch):
    monkeypatch.setattr(forensics, "_EVERY", 1)
    counters(*[counted(0)] * 9, counted(3), counted(3))  # eight in the first step, for its four blocks
    with pytest.warns(UserWarning, match="retried 3 times in the last 1 batches") as caught:
        fit(MemoryForensics(), folder=tmp_path, expect=None)
    alarms = [w for w in caught if "retried" in str(w.message)]
    assert len(alarms) == 1
    assert "1.0 GiB allocated, 2.0 GiB reserved" in str(alarms[0].message)


def test_nothing_stays_on_the_module(tmp_path):
    module = GPTModule(size="tiny")
    callback = MemoryForensics()
    fit(callback, module=module, folder=tmp_path, expect=None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert callback._batch is None


class Loading(Odd):
    """Has a ``configure_model`` that needs the machine, and does not run on the meta device."""

    def configure_model(self):
        if next(self.parameters()).is_meta:
            raise FileNotFoundError("no such file as weights.bin")


def test_an_error_while_planning_does_not_hide_the_one_that_counts(tmp_path):
    error = fit(MemoryForensics(), module=Loading(), folder=tmp_path, plugins=None)
    assert "Out of memory on cpu" in str(error)
    assert "could not be counted: FileNotFoundError: no such file as weights.bin" in str(error)
