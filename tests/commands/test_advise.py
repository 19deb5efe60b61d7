from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ups.__main__ import main
from lightning_ups._compat.optional.packages import has
from lightning_ups.callbacks import Compile
from lightning_ups.commands import advise
from lightning_ups.commands.advise import show
from lightning_ups.commands.trial import Trial
from lightning_ups.config.requested_run import run_of
from lightning_ups.insight.advise.timing_table import Table, Times
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision, Float8Precision, TEPrecision
from tests import fake_te
from tests.cli_toys import Data, Toy
from tests.config.test_requested_run import DEFAULTS


class Wide(Toy):
    """Two blocks whose products float8 could do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 8))
            for _ in range(2)
        )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def trial(module=None, **settings):
    settings = DEFAULTS | {"accelerator": "cpu", "plugins": None, "precision": None} | settings
    module = module or Wide()
    return Trial(module=module, data=Data(), settings=settings, callbacks=[], run=run_of(module, settings, []), seed=3)


def takes(monkeypatch, *, step_ms):
    """Let a step of any trial take so long."""
    monkeypatch.setattr(advise, "_step", lambda *_: SimpleNamespace(step_ms=step_ms))


def timer(product, recipe):
    """Wide outputs win, by tensorwise more than by rowwise."""
    factors = {"bfloat16": 1.0, "tensorwise": 0.5, "rowwise": 0.8}
    wide = product.out_features == 32
    total = 4.0 * (factors[recipe] if wide or recipe == "bfloat16" else 1.5)
    return Times(forward_ms=total / 4, dgrad_ms=total / 4, wgrad_ms=total / 2)


def test_the_table_the_share_and_what_to_do(capsys, monkeypatch):
    takes(monkeypatch, step_ms=32.0)
    assert show(trial(), recipes=["tensorwise", "rowwise"], timer=timer, steps=20) == 0
    out = capsys.readouterr().out
    assert "4 x 16 x 32" in out
    assert "0.500 + 0.500 + 1.000 ms, x2.00" in out
    assert "blocks.*.1" in out
    assert "a step in bfloat16 takes 32.0 ms, and these products 50% of it" in out
    assert "tensorwise           convert 2 of 4 layers by tensorwise: +14.3% steps a second" in out
    assert "rowwise              convert 2 of 4 layers by rowwise: +5.3% steps a second" in out
    assert "init_args: {recipe: tensorwise, filter: auto}" in out


def test_the_layers_of_a_float8_precision_are_those_considered(capsys):
    asked = trial(plugins=[Float8Precision(exclude=["blocks.*.3"], emulate=True)])
    show(asked, recipes=["tensorwise"], timer=timer)
    table, _, to_do = capsys.readouterr().out.partition("To do:")
    assert "blocks.*.3" not in table
    assert "convert all layers by tensorwise" in table
    assert 'init_args: {recipe: tensorwise, exclude: ["blocks.*.3"]}' in to_do


def test_where_nothing_wins_it_says_so(capsys):
    show(trial(), recipes=["tensorwise"], timer=lambda product, recipe: timer(product, "bfloat16"))
    assert "leave bfloat16" in (out := capsys.readouterr().out)
    assert "keep BF16Precision" in out


def test_times_are_kept_and_serve_elsewhere(capsys, cache):
    show(trial(), recipes=["tensorwise"], timer=timer)
    (written,) = (cache / "cache").rglob("*.json")
    assert str(written) in capsys.readouterr().out
    assert len(Table.read(written).times) == 2
    assert show(trial(), recipes=["tensorwise"], table=written) == 0
    assert "convert 2 of 4" in capsys.readouterr().out


def test_a_step_is_timed_by_training_in_bfloat16():
    tried = trial()
    found = advise.advise(tried, recipes=["tensorwise"], steps=7, timer=timer)
    assert found[0].step_ms > 0
    assert {p.dtype for p in tried.module.parameters()} == {torch.float32}


def test_dry_lists_the_products_on_any_machine(capsys):
    assert show(trial(), dry=True) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("4 x")]
    assert rows == [
        ["4", "x", "16", "x", "32", "2", "50%", "blocks.*.1"],
        ["4", "x", "32", "x", "16", "2", "50%", "blocks.*.3"],
    ]


INCLUDE = {"plugins": [Float8Precision(emulate=True, include=["blocks.*.1"])]}


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        ({}, {}, "advise finds no GPU here.*--table FILE.*--dry"),
        ({}, {"steps": -1}, "--steps -1 .*--steps 0"),
        ({}, {"steps": 5}, "--steps 5 .*--steps 0"),
        ({}, {"dry": True, "table": Path("h200.json")}, "--dry .*--table"),
        ({}, {"dry": True, "steps": 15}, "--dry .*--steps"),
        ({}, {"dry": True, "tokens": 0}, "--tokens 0 is.*1 or more"),
        ({}, {"dry": True, "recipes": ["current"]}, "no recipe 'current'.*te-current"),
        (INCLUDE, {"dry": True, "head": True}, r"include=\['blocks\.\*\.1'\], head=True"),
    ],
)
def test_wrong_options(settings, asked, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        show(trial(**settings), **asked)


class Looking(Wide):
    """Cannot run without values."""

    def training_step(self, batch, index):
        return super().training_step(batch[batch.sum(1) != 0], index)


@pytest.mark.parametrize(
    ("asked", "options"),
    [({}, {"tokens": 64}), ({"plugins": [Float8Precision(filter="auto", tokens=64, emulate=True)]}, {})],
    ids=["option", "precision"],
)
def test_rows_can_be_given_where_no_step_shows_them(asked, options, capsys):
    with pytest.raises(ValueError, match=r"Looking.training_step .*tokens="):
        show(trial(Looking()), dry=True)
    assert show(trial(Looking(), **asked), dry=True, **options) == 0
    assert "64 x 16 x 32" in capsys.readouterr().out


class Idle(Wide):
    """Leaves the first batch out."""

    def training_step(self, batch, index):
        return None if index == 0 else super().training_step(batch, index)


def test_a_step_in_which_nothing_ran_says_what_to_give(capsys):
    with pytest.raises(ValueError, match=r"No linear layer of Idle ran in a training step.*blocks.0.1.*--tokens"):
        show(trial(Idle()), dry=True)
    assert show(trial(Idle()), dry=True, tokens=64) == 0


def init_args(capsys):
    return yaml.safe_load(capsys.readouterr().out.partition("To do:")[2])["trainer"]["plugins"][0]["init_args"]


KEPT = {"include": ["blocks.*.1"], "exclude": ["blocks.0.1"], "weights": "masters", "in_float32": ["blocks.0"]}


@pytest.mark.parametrize(
    ("precision", "asked", "written"),
    [
        (None, {"head": True, "tokens": 64}, {"head": True, "filter": "auto", "tokens": 64}),
        (partial(Float8Precision, emulate=True, **KEPT), {}, KEPT),
        (
            partial(BF16Precision, weights="masters", in_float32=["blocks.0"]),
            {},
            {"weights": "masters", "in_float32": ["blocks.0"], "filter": "auto"},
        ),
        (BF16WeightsPrecision, {}, {"filter": "auto"}),
        (partial(Float8Precision, emulate=True, all_gather=False), {}, {"filter": "auto", "all_gather": False}),
        (partial(Float8Precision, emulate=True, all_gather=False, recipe="rowwise"), {}, {"filter": "auto"}),
    ],
)
def test_what_to_write_converts_what_was_advised(capsys, precision, asked, written):
    show(trial(plugins=precision and [precision()]), recipes=["tensorwise"], timer=timer, **asked)
    assert init_args(capsys) == {"recipe": "tensorwise"} | written


def test_a_precision_without_a_choice_of_weights_is_timed_under_autocast(monkeypatch):
    used = []
    monkeypatch.setattr(Trial, "fit", lambda self, *_, precision, **__: used.append(precision.weights))
    with pytest.raises(ValueError, match="No step was timed"):
        advise.advise(trial(plugins=[BF16WeightsPrecision()]), recipes=["tensorwise"], steps=30, timer=timer)
    assert used == ["autocast"]


class Mixing(Wide):
    """Multiplies by a float32 matrix of its own, which autocast alone allows, and transforms, which float32 does."""

    def __init__(self, *, mixes):
        super().__init__()
        self.mixes, self.part = mixes, Part(mixes=mixes)

    def training_step(self, batch, index):
        return super().training_step(batch, index) + self.part(batch).sum()


class Part(nn.Module):
    def __init__(self, *, mixes):
        super().__init__()
        self.mixes, self.linear = mixes, nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) @ torch.eye(8) if self.mixes else torch.fft.rfft(self.linear(x)).abs()


@pytest.mark.parametrize(
    "asked",
    [
        lambda: Float8Precision(emulate=True, weights="autocast"),
        lambda: BF16Precision(weights="autocast"),
        lambda: Float8Precision(emulate=True, in_float32=["part"]),
        lambda: BF16Precision(in_float32=["part"]),
    ],
)
def test_a_step_is_timed_in_the_types_that_are_asked_for(asked):
    made = asked()
    tried = trial(Mixing(mixes=made.weights == "autocast"), plugins=[made])
    assert show(tried, recipes=["tensorwise"], timer=timer, steps=7) == 0


def test_what_computes_in_float32_is_not_considered(capsys):
    assert show(trial(plugins=[Float8Precision(in_float32=["blocks.*.1"], emulate=True)]), dry=True) == 0
    out = capsys.readouterr().out
    assert "blocks.*.3" in out
    assert "blocks.*.1" not in out


def test_a_module_without_a_fitting_layer_says_what_to_try():
    toy = Toy()
    toy.head = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"No linear layer of Toy can compute in float8.*outside the blocks.*--head"):
        show(trial(toy), dry=True)
    with pytest.raises(ValueError, match=r"multiples of 16: .* Name layers by include=\[...\] in the precision"):
        show(trial(toy, plugins=[Float8Precision(exclude=["head"], emulate=True)]), dry=True, head=True)


@pytest.mark.parametrize("head", [False, True])
def test_a_module_in_which_nothing_could_fit_is_advised_to_keep_bfloat16_alone(head):
    with pytest.raises(ValueError, match=r"float8\. blocks\.0\.0: 8 x 8 is no multiple of 16; .* Use BF16Precision\.$"):
        show(trial(Toy()), dry=True, head=head)


class Network(LightningModule):
    """Two blocks of our GPT's, which Transformer Engine computes fused."""

    def __init__(self):
        super().__init__()
        shape = GPTConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, vocab_size=32, max_seq_len=16)
        self.model = GPT(shape)

    def training_step(self, batch, _):
        return self.model(batch[:, :-1], batch[:, 1:])

    def train_dataloader(self):
        torch.manual_seed(1)
        return torch.utils.data.DataLoader(torch.randint(0, 32, (8, 17)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def engine_timer(product, recipe):
    """Transformer Engine wins where a norm is computed with the product, by current scaling most."""
    factor = {"bfloat16": 1.0, "te-delayed": 0.8, "te-current": 0.6}.get(recipe, 1.2)
    total = 4.0 * (factor if product.norm or recipe == "bfloat16" else 1.2)
    return Times(forward_ms=total / 4, dgrad_ms=total / 4, wgrad_ms=total / 2)


def engine_trial(*callbacks):
    settings = {"plugins": [TEPrecision()], "callbacks": [*callbacks]}
    settings = DEFAULTS | {"accelerator": "cpu", "precision": None} | settings
    module = Network()
    run = run_of(module, settings, [])
    return Trial(module=module, data=None, settings=settings, callbacks=[], run=run, seed=3)


def test_transformer_engine_is_considered_where_the_run_has_it(capsys, monkeypatch):
    takes(monkeypatch, step_ms=64.0)
    with fake_te.installed():
        assert show(engine_trial(), timer=engine_timer, steps=20) == 0
    out = capsys.readouterr().out
    assert "32 x 32 x 64 by swiglu and back after RMSNorm" in out
    assert "model.layers.*.ffn" in out
    assert "te-current           convert 4 of 6 layers by te-current: +11.1% steps a second" in out
    assert "te-delayed           convert 4 of 6 layers by te-delayed: +5.3% steps a second" in out
    assert "rowwise              leave bfloat16" in out  # torchao's are compared with it
    assert "class_path: TEPrecision" in out
    assert "init_args: {recipe: current, filter: auto}" in out


def test_what_the_compiler_cannot_do_is_left_out_beside_compile(capsys):
    with fake_te.installed():
        show(engine_trial(Compile()), timer=engine_timer, steps=0)
    out = capsys.readouterr().out
    assert "left out: te-delayed, since it cannot run with Compile" in out
    assert "te-delayed  " not in out
    assert "te-current  " in out


@pytest.mark.skipif(has("transformer_engine"), reason="it is there")
def test_without_transformer_engine_it_says_so_in_a_line_and_goes_on(capsys):
    assert show(engine_trial(), timer=engine_timer, steps=0) == 0
    lines = capsys.readouterr().out.splitlines()
    (said,) = [line for line in lines if "left out" in line]
    assert said.endswith("te-current, te-block, te-mxfp8, since Transformer Engine is not installed here")
    assert any(line.startswith("tensorwise  ") for line in lines)
    with pytest.raises(ModuleNotFoundError, match="TEPrecision needs transformer-engine"):
        show(engine_trial(), recipes=["te-current"], timer=engine_timer)


def test_its_recipes_may_be_asked_for_by_name(capsys):
    with fake_te.installed():
        show(engine_trial(), recipes=["tensorwise", "te-current"], dry=True)
        assert capsys.readouterr().out.count("rows x in x out") == 2
        show(trial(), recipes=["tensorwise", "te-current"], dry=True)
        assert "te-current leaves out blocks.0.1 and 3 more: gets 4 rows, which is no multiple of 8" in (
            capsys.readouterr().out
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without one")
@pytest.mark.parametrize("settings", ["", "  devices: 4\n  strategy: fsdp2\n"])
def test_advise_takes_a_gpu_configuration_without_a_gpu(tmp_path, capsys, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "preset: h100\nmodel: {class_path: tests.commands.test_advise.Wide}\ndata: {class_path: tests.cli_toys.Data}\n"
        f"trainer:\n  max_steps: 1\n{settings}"
    )
    assert main(["advise", "--config", "run.yaml", "--dry"]) == 0
    assert "4 x 16 x 32" in capsys.readouterr().out
    advise.advise(trial(), recipes=["tensorwise"], steps=0, timer=timer)
    (table,) = (tmp_path / "cache").rglob("*.json")
    assert main(["advise", "--config", "run.yaml", "--recipes", "tensorwise", "--table", str(table)]) == 0
    assert "convert 2 of 4" in capsys.readouterr().out
    assert main(["advise", "--config", "run.yaml"]) == 2
    assert "advise finds no GPU here" in capsys.readouterr().err
    assert main(["verify", "--config", "run.yaml"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "lightning_logs").exists()
