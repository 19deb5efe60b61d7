import logging

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.config.requested_run import run_of
from lightning_ups.insight.advise.timing_table import Times
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.precision import float8 as float8_precision
from lightning_ups.precision.float8 import _warn_of_eager
from lightning_ups.transforms.float8.convert import float8_linears
from tests.config.test_requested_run import DEFAULTS
from tests.toys import Net, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Wide(Net):
    """Blocks that float8 takes, and a head that it does not."""

    def __init__(self, **options):
        super().__init__(**options)
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.layers, self.head = nn.ModuleList(blocks), nn.Linear(32, 1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    torch.manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=8)


def fit(tmp_path, precision, *, model=None, **options):
    model = model or Wide()
    trainer(tmp_path, plugins=[precision], **options).fit(model, loader())
    return model


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_what_is_recomputed_has_the_types_of_forward_under_autocast(tmp_path, recipe):
    losses = [
        fit(tmp_path, Float8Precision(recipe=recipe, emulate=True, weights="autocast"), callbacks=callbacks).losses
        for callbacks in ([], [ActivationCheckpoint(save="nothing")])
    ]
    assert torch.equal(*map(torch.stack, losses))


@pytest.mark.parametrize("weights", ["masters", "autocast"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_it_trains_near_bfloat16_and_leaves_a_plain_float32_module(tmp_path, recipe, weights):
    model = fit(tmp_path, Float8Precision(recipe=recipe, emulate=True, weights=weights))
    expected = fit(tmp_path, BF16Precision())
    found, wanted = (torch.stack(m.losses).float() for m in (model, expected))
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=0)
    assert not torch.equal(found, wanted)
    assert not float8_linears(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_state_dicts_are_plain_and_a_checkpoint_moves_between_precisions(tmp_path):
    path, model = tmp_path / "last.ckpt", Wide()
    lightning = trainer(tmp_path, plugins=[Float8Precision(emulate=True)], epochs=2)
    seen = []

    def on_train_end():
        seen.extend(float8_linears(model))
        lightning.save_checkpoint(path)

    model.on_train_end = on_train_end
    lightning.fit(model, loader())
    assert len(seen) == 6
    state = torch.load(path, weights_only=True)["state_dict"]
    assert list(state) == list(Wide().state_dict())
    assert {type(v) for v in state.values()} == {torch.Tensor}
    assert {v.dtype for v in state.values()} == {torch.float32}
    whole = fit(tmp_path, Float8Precision(emulate=True), epochs=4)
    for precision, exact in ((Float8Precision(emulate=True), True), (BF16Precision(), False)):
        resumed = Wide()
        trainer(tmp_path, plugins=[precision], epochs=4).fit(resumed, loader(), ckpt_path=path)
        if exact:
            assert resumed.losses == whole.losses[2:]
        else:
            assert resumed.losses[0].item() == pytest.approx(whole.losses[2].item(), rel=5e-2)


PRECISIONS = {
    "float8": lambda: Float8Precision(emulate=True),
    "float8 by autocast": lambda: Float8Precision(emulate=True, weights="autocast"),
    "rowwise": lambda: Float8Precision(recipe="rowwise", emulate=True),
    "bfloat16": BF16Precision,
    "float32": lambda: None,
}


@pytest.mark.parametrize("to", PRECISIONS)
@pytest.mark.parametrize("begun", PRECISIONS)
def test_a_checkpoint_of_one_precision_goes_on_in_another(tmp_path, begun, to):
    def run(name, epochs, **options):
        model, made = Wide(), PRECISIONS[name]()
        lightning = trainer(tmp_path, plugins=None if made is None else [made], epochs=epochs)
        lightning.fit(model, loader(), **options)
        return model, lightning

    model, lightning = run(begun, 2)
    path = tmp_path / "half.ckpt"
    lightning.save_checkpoint(path)
    state = torch.load(path, weights_only=True)
    assert all(torch.equal(value, state["state_dict"][name]) for name, value in model.state_dict().items())
    resumed, again = run(to, 3, ckpt_path=path)
    assert resumed.losses[0].item() == pytest.approx(run(begun, 3)[0].losses[2].item(), rel=5e-2)
    moments = again.optimizers[0].state_dict()["state"][0]
    assert moments["exp_avg"].dtype is torch.float32
    assert moments["step"] == 3


def test_a_second_fit_and_an_exception(tmp_path):
    precision, model = Float8Precision(emulate=True), Wide()
    for _ in range(2):
        fit(tmp_path, precision, model=model, epochs=1)
        assert not float8_linears(model)
    failing = Wide(fail=True)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, precision, model=failing)
    assert not float8_linears(failing)


@pytest.mark.parametrize("weights", ["masters", "autocast"])
def test_the_format_is_that_of_gradients_in_training(tmp_path, weights):
    exact, fine, coarse = (
        fit(tmp_path, precision).losses
        for precision in (
            BF16Precision(weights=weights),
            Float8Precision(weights=weights, emulate=True),
            Float8Precision(weights=weights, number_format="hybrid", emulate=True),
        )
    )
    assert fine[0] == coarse[0] != exact[0], "forward is the same"
    assert fine[1:] != coarse[1:]


def test_what_was_converted_and_what_not_is_reported(tmp_path):
    model, seen = Wide(), []
    model.on_train_start = lambda: seen.append(applied(model.trainer.strategy).report.parts["Precision"])
    fit(tmp_path, Float8Precision(emulate=True), model=model, callbacks=[ActivationCheckpoint(save="nothing")])
    assert len(seen[0]["float8"]) == 6
    assert seen[0]["not_float8"] == {"head": "outside the blocks"}
    assert (seen[0]["recipe"], seen[0]["number_format"]) == ("tensorwise", "e4m3")


def test_what_is_coarser_than_it_could_be_is_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Float8Precision(number_format="hybrid", emulate=True))
    assert "multiply in float8, tensorwise, gradients in e5m2; 1 do not" in caplog.text


def test_a_device_that_cannot_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"cannot run on this device: cpu.*capability.*emulate=True"):
        fit(tmp_path, Float8Precision())


def test_bad_choices_are_refused_at_construction():
    with pytest.raises(ValueError, match="recipe 'rowise' is unknown"):
        Float8Precision(recipe="rowise")
    with pytest.raises(ValueError, match="all_gather=False"):
        Float8Precision(recipe="rowwise", all_gather=True)
    with pytest.raises(ValueError, match=r"'rowwise' is given with number_format='hybrid'"):
        Float8Precision(recipe="rowwise", number_format="hybrid")
    with pytest.raises(TypeError, match=r"given as the string 'head'.*Write \['head'\]"):
        Float8Precision(exclude="head")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    from lightning_ups._compat.optional import packages as optional

    monkeypatch.setattr(optional, "RequirementCache", lambda requirement: False)
    with pytest.raises(ModuleNotFoundError, match=r"Float8Precision needs torchao.*lightning-ups\[float8\]"):
        fit(tmp_path, Float8Precision(emulate=True))


class Bare(LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def training_step(self, batch, _):
        raise NotImplementedError

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nothing_to_convert_is_an_error_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="No linear layer of Bare can compute in float8"):
        fit(tmp_path, Float8Precision(emulate=True), model=Bare())


def times(*, up, down):
    """Return a timer that knows two shapes and counts what it is asked."""
    asked = []

    def timer(product, recipe):
        asked.append((product, recipe))
        factor = up if product.out_features == 64 else down
        total = 3.0 if recipe == "bfloat16" else 3.0 * factor
        return Times(forward_ms=total / 3, dgrad_ms=total / 3, wgrad_ms=total / 3)

    return timer, asked


def auto(tmp_path, monkeypatch, **options):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision = Float8Precision(filter="auto", emulate=True, **{k: v for k, v in options.items() if k == "tokens"})
    precision.timer, asked = times(up=options.get("up", 0.5), down=options.get("down", 0.5))
    model, seen = Wide(), []
    model.on_train_start = lambda: seen.append((sorted(float8_linears(model)), applied(model.trainer.strategy)))
    fit(tmp_path, precision, model=model, callbacks=[ActivationCheckpoint(save="nothing")])
    return seen[0][0], seen[0][1].report, asked, model


def test_auto_converts_what_is_faster_and_says_why_not(tmp_path, monkeypatch):
    converted, report, asked, _ = auto(tmp_path, monkeypatch, down=1.2)
    assert converted == ["layers.0.0", "layers.1.0", "layers.2.0"]
    assert [str(product) for product, _ in asked] == ["8 x 32 x 64"] * 2 + ["8 x 64 x 32"] * 2
    assert "not faster: 3 ms in bfloat16, 3.6 ms in float8" in report.parts["Precision"]["not_float8"]["layers.0.2"]
    assert any("convert 3 of 6 layers by tensorwise" in line for line in report.lines())


def test_auto_leaves_bfloat16_where_nothing_wins(tmp_path, monkeypatch):
    converted, report, _, model = auto(tmp_path, monkeypatch, up=1.1, down=1.1)
    assert converted == []
    assert any("leave bfloat16" in line for line in report.lines())
    expected = fit(tmp_path, BF16Precision(), callbacks=[ActivationCheckpoint(save="nothing")])
    assert model.losses == expected.losses


def test_auto_by_a_number_of_tokens(tmp_path, monkeypatch):
    _, _, asked, _ = auto(tmp_path, monkeypatch, tokens=4096)
    assert {product.rows for product, _ in asked} == {4096}


def test_auto_without_a_gpu_and_without_a_table_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r"timed on this device: cpu.*give a table"):
        fit(tmp_path, Float8Precision(filter="auto", emulate=True))


def test_auto_outside_of_fit_converts_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision, model = Float8Precision(filter="auto", emulate=True), Wide()
    model.test_step = lambda batch: model.seen.append(len(float8_linears(model)))
    model.seen = []
    trainer(tmp_path, plugins=[precision]).test(model, loader(), verbose=False)
    assert model.seen == [0]


def test_auto_leaves_what_does_not_run(tmp_path, monkeypatch):
    class Idle(Wide):
        def __init__(self):
            super().__init__()
            self.layers[2] = nn.Sequential(nn.Identity(), nn.Linear(32, 64), nn.Linear(64, 32))
            self.layers[2].forward = lambda x: x

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision, model = Float8Precision(filter="auto", emulate=True), Idle()
    precision.timer, _ = times(up=0.5, down=0.5)
    fit(tmp_path, precision, model=model, epochs=1)
    assert precision.conversion.skipped["layers.2.1"] == "does not run in a training step"
    assert len(precision.conversion.converted) == 4


class Idle(Wide):
    """Leaves its first batch out."""

    def training_step(self, batch, index):
        return None if index == 0 else super().training_step(batch, index)


def test_auto_does_not_decide_about_what_it_saw_nothing_of(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision = Float8Precision(filter="auto", emulate=True)
    precision.timer, _ = times(up=0.5, down=0.5)
    with pytest.raises(ValueError, match=r"No linear layer of Idle ran.*tokens=16384"):
        fit(tmp_path, precision, model=Idle())
    told = Float8Precision(filter="auto", emulate=True, tokens=8)
    told.timer = precision.timer
    fit(tmp_path, told, model=Idle())
    assert len(told.conversion.converted) == 6


def test_a_filter_is_one_of_two():
    with pytest.raises(ValueError, match=r"filter='fast'\) is not a known choice.*'all', 'auto'"):
        Float8Precision(filter="fast")


class Watched(Wide):
    """Sees what inductor is told while it trains."""

    def training_step(self, batch, index):
        from torch._inductor import config  # noqa: TID251

        self.rounds = config.emulate_precision_casts
        self.passes = config.joint_custom_pre_pass is not None
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("recipe", "rounds"), [("tensorwise", False), ("rowwise", True), ("rowwise_with_gw_hp", True), ("mxfp8", False)]
)
def test_compiled_code_is_made_as_each_recipe_wants(tmp_path, recipe, rounds):
    from torch._inductor import config  # noqa: TID251

    model = fit(tmp_path, Float8Precision(recipe=recipe, emulate=True), model=Watched(), epochs=1)
    assert model.rounds is rounds
    assert model.passes is (recipe == "tensorwise")
    assert config.emulate_precision_casts is False
    assert config.joint_custom_pre_pass is None


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", pytest.param("mxfp8", marks=pytest.mark.slow)]
)
def test_compiled_blocks_train_as_eager_ones(tmp_path, recipe):
    losses = [
        torch.stack(fit(tmp_path, Float8Precision(recipe=recipe, emulate=True), callbacks=callbacks, epochs=3).losses)
        for callbacks in ([], [Compile(backend="aot_eager")])
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "tensor_size", "rounds"), [({}, 1, False), ({"emulate": True}, 1, True), ({}, 2, True)]
)
def test_compiled_code_need_not_round_where_all_layers_cast_by_kernels(monkeypatch, options, tensor_size, rounds):
    from torch._inductor import config  # noqa: TID251

    monkeypatch.setattr(float8_precision, "HAS_KERNELS", True)
    monkeypatch.setattr(Float8Precision, "_tensor_size", tensor_size)
    precision = Float8Precision(recipe="rowwise", **options)
    with precision._undo:
        precision._hold_in_fit(Wide())
        assert config.emulate_precision_casts is rounds
    assert config.emulate_precision_casts is False


def test_mxfp8_on_a_gpu_that_cannot_names_what_can(tmp_path, monkeypatch):
    precision, module = Float8Precision(recipe="mxfp8"), Wide()
    lightning = trainer(tmp_path, plugins=[precision])
    lightning.strategy._root_device = torch.device("cuda", 0)
    module.trainer = lightning
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.raises(RuntimeError, match=r"recipe='mxfp8'\) cannot run on this device: NVIDIA H200.*B200"):
        precision.convert_module(module)


def test_what_does_not_fit_is_named(tmp_path):
    class Odd(Wide):
        def __init__(self):
            super().__init__()
            self.layers[1] = nn.Sequential(nn.Linear(32, 40), nn.GELU(), nn.Linear(40, 32))

    model, seen = Odd(), []
    model.on_train_start = lambda: seen.append(applied(model.trainer.strategy).report.lines())
    fit(tmp_path, Float8Precision(emulate=True), model=model, callbacks=[ActivationCheckpoint(save="nothing")])
    assert any("3 do not, among them layers.1.0 (32 x 40 is no multiple of 16)" in line for line in seen[0])


@pytest.mark.parametrize("callbacks", [[], [ActivationCheckpoint(save="nothing")]], ids=["alone", "with a callback"])
@pytest.mark.parametrize("weights", ["masters", "autocast"])
def test_what_it_did_is_said_once_in_each_run_alone_as_well(tmp_path, caplog, weights, callbacks):
    precision = Float8Precision(emulate=True, weights=weights, include=["layers.*.0", "head"])
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            fit(tmp_path, precision, callbacks=callbacks)
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Precision: ")]
        assert len(said) == 2
        assert said[0].endswith({"masters": "by master weights", "autocast": "by autocast"}[weights])
        assert said[1].endswith(
            "3 linear layers multiply in float8, tensorwise; 1 do not, among them head (32 x 1 is no multiple of 16)"
        )


def test_that_auto_leaves_bfloat16_is_said_by_the_precision_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision = Float8Precision(emulate=True, filter="auto")
    precision.timer = lambda *_: Times(forward_ms=1, dgrad_ms=1, wgrad_ms=1)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, precision)
    assert any("leave bfloat16" in record.getMessage() for record in caplog.records)


class Casting(Wide):
    """Has an autocast of its own."""

    def training_step(self, batch, index):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().training_step(batch, index)


def test_an_autocast_on_top_is_refused_and_allowed_where_the_precision_is_one(tmp_path):
    message = r"within torch.autocast, and Float8Precision has set its types already.*weights='autocast'"
    with pytest.raises(RuntimeError, match=message):
        fit(tmp_path, Float8Precision(emulate=True, weights="masters"), model=Casting())
    fit(tmp_path, Float8Precision(emulate=True, weights="autocast"), model=Casting(), epochs=1)


def test_conversion_after_sharding_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("lightning_ups.precision.float8.is_sharded", lambda module: True)
    with pytest.raises(ValueError, match=r"was sharded before Float8Precision could convert it.*FSDP2Strategy"):
        fit(tmp_path, Float8Precision(emulate=True))


@pytest.mark.filterwarnings("error")
def test_products_that_nothing_compiles_are_warned_of():
    def run(*callbacks):
        return run_of(Wide(), DEFAULTS | {"accelerator": "cpu"}, callbacks)

    _warn_of_eager(run(Compile(backend="eager")))
    model = Wide()
    model.layers[0].compile(backend="eager")
    _warn_of_eager(run_of(model, DEFAULTS | {"accelerator": "cpu"}, ()))
    with pytest.warns(UserWarning, match=r"nothing compiles.*Add Compile\(\) to the callbacks"):
        _warn_of_eager(run())
