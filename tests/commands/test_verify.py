"""The guard is green on what is right and red on each fault, which it names by its block."""

import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.commands.trial import Trial
from lightning_ups.commands.verify import Verdict, _rounding, show, verify
from lightning_ups.config.requested_run import run_of
from lightning_ups.data import RandomTokens
from lightning_ups.insight.verify.comparison import REST, Departure
from lightning_ups.insight.verify.faults import FAULTS
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision, Float8Precision, TEPrecision
from tests import fake_te
from tests.command import assert_short
from tests.commands.deep import Deep
from tests.config.test_requested_run import DEFAULTS

BLOCK = "model.layers.11"


def trial(*, module=None, callbacks=(), num_layers=16, **settings):
    settings = DEFAULTS | {"accelerator": "cpu", "plugins": None, "precision": None} | settings
    module = module or Deep(num_layers)
    run = run_of(module, settings, callbacks)
    data = RandomTokens(vocab_size=64, seq_len=32, batch_size=4)
    return Trial(module=module, data=data, settings=settings, callbacks=callbacks, run=run, seed=3)


def float8(recipe, **options):
    return lambda: {"plugins": [Float8Precision(recipe=recipe, emulate=True, **options)]}


RIGHT = {
    "bfloat16": lambda: {"plugins": [BF16Precision()]},
    "bfloat16 by autocast, compiled": lambda: {
        "plugins": [BF16Precision(weights="autocast")],
        "callbacks": [Compile(backend="aot_eager")],
    },
    "Lightning's own": lambda: {"precision": "bf16-mixed"},
    "all together": lambda: {
        "plugins": [Float8Precision(emulate=True)],
        "callbacks": [Compile(backend="aot_eager"), ActivationCheckpoint(save="matmuls")],
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
    "compiled as one": lambda: {
        "plugins": [BF16Precision()],
        "callbacks": [Compile(backend="aot_eager", scope="model")],
    },
    "one graph": lambda: {
        "plugins": [BF16Precision()],
        "callbacks": [Compile(backend="aot_eager", scope="model", fullgraph=True)],
    },
    "hybrid": float8("tensorwise", number_format="hybrid"),
    **{recipe: float8(recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")},
}


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        (Float8Precision(emulate=True), "tensor"),
        (Float8Precision(emulate=True, number_format="hybrid"), "tensor, hybrid"),
        (Float8Precision(emulate=True, recipe="rowwise"), "row"),
        (TEPrecision(recipe="delayed"), "tensor, hybrid"),
        (TEPrecision(recipe="current", number_format="e4m3"), "tensor"),
        (TEPrecision(recipe="block"), "block"),
        (TEPrecision(recipe="block", number_format="hybrid"), "block, hybrid"),
    ],
)
def test_what_is_compared_with_rounds_as_the_precision_does(precision, wanted):
    assert _rounding(precision.recipe, precision) == wanted


@pytest.mark.parametrize(
    "settings",
    [pytest.param(make, marks=pytest.mark.slow) if name == "compiled as one" else make for name, make in RIGHT.items()],
    ids=RIGHT,
)
def test_green_on_what_is_right_and_the_band_is_less_than_half_of_every_fault(settings):
    settings = settings()
    verdict = verify(trial(num_layers=4, callbacks=settings.pop("callbacks", ()), **settings))
    assert verdict.green, (verdict.departures[:3], verdict.blind)
    assert verdict.power > 2
    assert not verdict.same
    assert verdict.block is None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "settings",
    [
        "bfloat16",
        "tensorwise",
        "rowwise",
        *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("rowwise_with_gw_hp", "mxfp8")),
    ],
)
def test_red_on_a_fault_in_one_of_sixteen_blocks_which_is_named(settings, fault):
    verdict = verify(trial(**RIGHT[settings]()), steps=1, faults=False, fault=(BLOCK, FAULTS[fault]))
    assert not verdict.green
    assert verdict.block == BLOCK


class SmallGradients(Deep):
    """Has gradients as small as batches of many tokens have them."""

    def training_step(self, batch, index):
        return super().training_step(batch, index) / 256


@pytest.mark.parametrize("fault", FAULTS)
def test_red_on_a_fault_in_what_transformer_engine_computes_as_one(fault):
    with fake_te.installed():
        asked = trial(module=SmallGradients(4), plugins=[TEPrecision()])
        verdict = verify(asked, steps=1, faults=False, fault=("model.layers.2", FAULTS[fault]))
    assert verdict.block == "model.layers.2"


def test_green_on_what_transformer_engine_computes_right():
    with fake_te.installed():
        assert verify(trial(num_layers=4, plugins=[TEPrecision()])).green


def test_a_scale_of_the_package_itself_that_is_stale_is_seen(monkeypatch):
    # Not a model of the fault: torchao's own casts, with the scale of a weight 16 times smaller.
    from torchao.float8 import float8_linear

    cast, seen = float8_linear.hp_tensor_to_float8_dynamic, []

    def stale(tensor, *args, **kwargs):
        if tensor.shape == (64, 32) and not seen:  # of the first such weight, transposed: what `down` multiplies
            seen.append(1)
            tensor = tensor.clamp(-tensor.abs().amax() / 16, tensor.abs().amax() / 16)
        return cast(tensor, *args, **kwargs)

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", stale)
    verdict = verify(trial(plugins=[Float8Precision(emulate=True)]), steps=1, faults=False)
    assert verdict.block == "model.layers.0"


class WrongHead(Deep):
    """Scales its loss where a callback has changed its blocks."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return 1.1 * loss if "forward" in vars(self.model.layers[0]) else loss


def test_a_fault_outside_the_blocks_is_not_blamed_on_one():
    asked = trial(module=WrongHead(4), plugins=[BF16Precision()], callbacks=[ActivationCheckpoint(save="nothing")])
    verdict = verify(asked, steps=1, faults=False)
    assert not verdict.green
    assert verdict.block in (None, REST)
    assert {each.block for each in verdict.departures if each.what == "loss"} == {None}


FAR = Departure(step=0, block=BLOCK, what="output", distance=3.0, allowed=1.0)
REST_OF_VERDICT = {"block": None, "same": False, "nearest": FAR, "power": 9.0, "rounding": "bfloat16"}


@pytest.mark.parametrize(
    ("found", "code", "text"),
    [
        ({}, 0, "GREEN"),
        ({"same": True}, 0, "changes no number"),
        ({"blind": ["a skipped block"]}, 1, "CANNOT TELL: a skipped block"),
        ({"departures": [FAR] * 4, "block": BLOCK}, 1, f"RED: {BLOCK} "),
        ({"departures": [FAR] * 5, "block": BLOCK}, 1, "  and 1 more"),
        ({"departures": [replace(FAR, distance=0.05021, allowed=0.05)]}, 1, "output: 0.0502, allowed 0.05"),
    ],
    ids=str,
)
def test_what_is_printed(capsys, monkeypatch, found, code, text):
    verdict = Verdict(**{"departures": [], "blind": []} | REST_OF_VERDICT | found)
    monkeypatch.setattr("lightning_ups.commands.verify.verify", lambda *_, **__: verdict)
    assert show(trial(num_layers=2, devices=4)) == code
    out = capsys.readouterr().out
    assert "compared on one device; what 4 devices send" in out
    assert text in out
    assert ("more" in out) == (len(verdict.departures) > 4)


def test_a_band_as_wide_as_a_fault_is_no_band(monkeypatch):
    monkeypatch.setattr("lightning_ups.insight.verify.comparison.FACTOR", 100.0)
    verdict = verify(trial(num_layers=2, plugins=[Float8Precision(emulate=True)]))
    assert verdict.blind
    assert not verdict.green


class Idle(Deep):
    def training_step(self, batch, _):
        return None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_module_that_does_not_train_says_so():
    with pytest.raises(ValueError, match=r"Idle took no optimizer step with a gradient.*lightning_ups fit"):
        verify(trial(module=Idle(2)))


class Manual(Deep):
    """Steps two optimizers itself, and returns nothing."""

    scale = 1.0

    def __init__(self):
        super().__init__(4)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.scale * super().training_step(batch, index))
            optimizer.step()

    def configure_optimizers(self):
        ends = [p for name, p in self.named_parameters() if "layers" not in name]
        return [torch.optim.SGD(ends, lr=0.1), torch.optim.SGD(self.model.layers.parameters(), lr=0.1)]


def test_manual_optimization(monkeypatch):
    asked = trial(module=Manual(), plugins=[BF16Precision()])
    verdict = verify(asked)
    assert verdict.green
    assert verdict.power > 2
    red = verify(asked, steps=1, faults=False, fault=("model.layers.2", FAULTS["a skipped block"]))
    assert red.block == "model.layers.2"

    def larger(_):
        monkeypatch.setattr(Manual, "scale", 1.1)
        return nullcontext()

    red = verify(asked, steps=1, faults=False, fault=("model.layers.2", larger))
    assert {each.step for each in red.departures if each.what == "loss"} == {0, 1}  # one for each optimizer


@pytest.mark.parametrize("frozen", [slice(2, None), slice(None)])
def test_a_gradient_that_is_scaled_is_looked_for_where_there_is_one(frozen):
    module = Deep(4)
    module.model.layers[frozen].requires_grad_(False)
    verdict = verify(trial(module=module, plugins=[BF16Precision()]), steps=1)
    assert verdict.green
    assert verdict.power > 2


class ByTurns(Deep):
    """Half of the blocks run in the first step of an optimizer, and the others in the second."""

    def __init__(self):
        super().__init__(4)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for half, optimizer in zip((slice(0, 2), slice(2, 4)), self.optimizers(), strict=True):
            x = self.model.embedding(batch[:, :-1])
            for block in self.model.layers[half]:
                x = block(x)
            optimizer.zero_grad()
            self.manual_backward(x.square().mean())
            optimizer.step()

    def configure_optimizers(self):
        layers = self.model.layers
        return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (layers[:2], layers[2:])]


def test_faults_are_put_into_a_block_that_runs_in_the_step_that_is_looked_at():
    verdict = verify(trial(module=ByTurns(), plugins=[BF16Precision()]))
    assert verdict.green
    assert verdict.power > 2


class Skipping(Deep):
    """Leaves its first batch out."""

    def training_step(self, batch, index):
        return None if index == 0 else super().training_step(batch, index)


def test_a_step_without_a_loss_is_one_on_both_sides():
    verdict = verify(trial(module=Skipping(2), plugins=[BF16Precision()]), steps=2)
    assert verdict.green
    assert verdict.power > 2
    assert verify(trial(module=Skipping(2)), steps=2, faults=False).same


class Diverging(Deep):
    def training_step(self, batch, index):
        return super().training_step(batch, index) * (math.nan if index else 1)


def test_a_reference_that_is_no_number_is_no_fault_of_the_configuration():
    with pytest.raises(ValueError, match=r"The reference of Diverging.*at step 1\..*--steps 1\."):
        verify(trial(module=Diverging(2), plugins=[BF16Precision()]))
    assert verify(trial(module=Diverging(2), plugins=[BF16Precision()]), steps=1).green


class OtherData(RandomTokens):
    """Draws anew in each fit."""

    fits = 0

    def train_dataloader(self):
        OtherData.fits += 1
        return DataLoader(torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(self.fits)), batch_size=4)


class OtherNoise(Deep):
    """Draws from a generator that goes on."""

    def __init__(self):
        super().__init__(2)
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch, index):
        return super().training_step(batch, index) * torch.rand((), generator=self.generator)


def test_data_and_noise_that_no_seed_decides_are_not_compared():
    message = "got other batches, or drew other random numbers"
    drawn = replace(trial(num_layers=2), data=OtherData(vocab_size=64, seq_len=32, batch_size=4))
    with pytest.raises(ValueError, match=message):
        verify(drawn, steps=1)
    with pytest.raises(ValueError, match=message):
        verify(trial(module=OtherNoise()), steps=1)


class Remembering(Deep):
    """Has state that is no tensor, and a parameter of integers."""

    def __init__(self):
        super().__init__(2)
        self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.calls = []

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def training_step(self, batch, index):
        self.calls.append(index)
        return super().training_step(batch, index) * len(self.calls)


def test_what_is_no_tensor_is_put_back_too():
    assert verify(trial(module=Remembering()), steps=2).same


class LowBefore(Deep):
    """Has bfloat16 weights of its own."""

    def __init__(self):
        super().__init__(2)
        self.model.bfloat16()


def test_the_last_bits_of_weights_that_are_bfloat16_are_others():
    verdict = verify(trial(module=LowBefore()), steps=1)
    assert 2 < verdict.power < 100  # bands; of float32 it is 1e5, and compiled code was red
    assert not verify(trial(module=LowBefore()), steps=1, fault=("model.layers.1", FAULTS["a stale scale"])).green


AVERAGED = {"plugins": [BF16Precision(weights="masters")], "callbacks": [WeightAveraging()]}


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"precision": "bf16-true"}, {}, r"precision='bf16-true'.*Use one of \('32-true', 'bf16-mixed'\)"),
        ({"plugins": [BF16WeightsPrecision()]}, {}, r"BF16WeightsPrecision.*with BF16Precision\(\)"),
        (AVERAGED, {}, r"WeightAveraging.*weights='autocast'"),  # fit refuses it
        ({}, {"checkpoint": "folder"}, r"'folder', which is no file.*export --format torch"),
    ],
)
def test_what_cannot_be_compared(tmp_path, monkeypatch, settings, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        verify(replace(trial(num_layers=2, **settings), **changes), steps=1)


@pytest.mark.filterwarnings("ignore:You passed .*16-mixed")
def test_float16_on_a_cpu_is_verified_as_the_trainer_runs_it():
    verdict = verify(trial(num_layers=2, precision="16-mixed"), steps=1)
    assert (verdict.green, verdict.rounding) == (True, "bfloat16")


class Spectral(nn.Module):
    """Mixes by a Fourier transform, which knows no bfloat16 on a CPU."""

    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.fft.irfft(torch.fft.rfft(self.weigh(x), norm="ortho"), n=32, norm="ortho")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, of RMSNorm under autocast
@pytest.mark.parametrize("precision", [BF16Precision, partial(Float8Precision, emulate=True)])
def test_what_computes_in_float32_does_so_in_the_second_reference(precision):
    module = Deep(4)
    for block in module.model.layers:
        block.add_module("spectral", Spectral())
        block.register_forward_hook(lambda block, _, output: block.spectral(output))
    assert verify(trial(module=module, plugins=[precision(in_float32=["model.layers.*.spectral"])])).green


@pytest.mark.parametrize("steps", [0, -1])
def test_no_step_is_none_to_compare(steps):
    with pytest.raises(ValueError, match=rf"--steps {steps} .*--steps 1 or more"):
        verify(trial(num_layers=2), steps=steps)


def test_more_bits_than_float32():
    assert verify(trial(num_layers=2, precision="64-true"), steps=1).green


def test_the_module_is_as_it_was():
    asked = trial(num_layers=2, plugins=[Float8Precision(emulate=True)])
    verify(asked, steps=1)
    assert {p.dtype for p in asked.module.parameters()} == {torch.float32}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in asked.module.modules())


def test_all_begin_with_the_weights_of_a_checkpoint(ups, folder, capsys):
    poisoned = {name: torch.full_like(value, math.nan) for name, value in Deep(2).state_dict().items()}
    torch.save({"state_dict": poisoned, "pytorch-lightning_version": "2.6.6"}, "of_no_number.ckpt")
    assert_short(ups("verify", "--steps=1", "--ckpt_path=of_no_number.ckpt", tree=CONFIG), "at step 0")
    assert show(replace(trial(num_layers=2), checkpoint="last"), steps=1, faults=False) == 0
    assert "begins with the module's own weights" in capsys.readouterr().out


CONFIG = """
model: {class_path: tests.commands.deep.Deep, init_args: {num_layers: 2}}
data: {class_path: RandomTokens, init_args: {vocab_size: 64, seq_len: 32, batch_size: 4}}
trainer: {accelerator: cpu, max_steps: 1, plugins: [{class_path: BF16Precision}]}
"""


def test_from_the_command_line(ups, folder):
    done = ups("verify", "--steps", "1", tree=CONFIG)
    assert done.code == 0
    assert "GREEN" in done.out
    assert sorted(path.name for path in folder.iterdir()) == ["run.yaml"]
    assert_short(ups("verify", "--no-faults", tree=CONFIG), "Did you mean 'no_faults'?")  # as it is typed


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        "strategy: fsdp2",
        "strategy: simple_fsdp, callbacks: [{class_path: Compile, init_args: {backend: aot_eager}}]",
    ],
    ids=["fsdp2", "simple_fsdp"],
)
def test_under_a_strategy_that_shards(tmp_path, trainer):
    (tmp_path / "run.yaml").write_text(CONFIG.replace("max_steps: 1,", f"max_steps: 1, {trainer},"))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_ups", "verify", "--config", tmp_path / "run.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GREEN" in done.stdout
