import re

import pytest
import torch
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.config.requested_run import run_of
from lightning_ups.insight.advise.timing_table import Times
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.precision import float8 as float8_precision
from lightning_ups.precision.float8 import _warn_of_eager
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


class Judged(Wide):
    def validation_step(self, batch, index):
        assert torch.is_inference_mode_enabled()
        self.log("judged", super().training_step(batch, index))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_was_trained_is_evaluated_in_inference_mode(tmp_path, recipe):
    """Scales that a fit has left behind must not be needed for gradients there."""
    model = Judged()
    run = trainer(tmp_path, plugins=[Float8Precision(recipe=recipe, emulate=True)], epochs=2)
    run.fit(model, loader())
    model.losses.clear()
    (first,), (second,) = (run.validate(model, loader(), verbose=False) for _ in range(2))
    assert first == second
    assert first["judged"] < 2 * model.losses[0]


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


class Odd(Wide):
    def __init__(self):
        super().__init__()
        self.layers[1] = nn.Sequential(nn.Linear(32, 40), nn.GELU(), nn.Linear(40, 32))


@pytest.mark.parametrize("callbacks", [[], [ActivationCheckpoint(save="nothing")]], ids=["alone", "with a callback"])
@pytest.mark.parametrize("weights", ["masters", "autocast"])
def test_what_it_did_is_said_once_in_each_run_alone_as_well(tmp_path, caplog, weights, callbacks):
    precision = Float8Precision(emulate=True, weights=weights, number_format="hybrid")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            fit(tmp_path, precision, model=Odd(), callbacks=callbacks)
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Precision: ")]
        assert len(said) == 2
        assert said[0].endswith({"masters": "by master weights", "autocast": "by autocast"}[weights])
        assert said[1].endswith(
            "4 linear layers multiply in float8, tensorwise, gradients in e5m2; 3 do not, among them layers.1.0"
            " (32 x 40 is no multiple of 16), layers.1.2 (40 x 32 is no multiple of 16)"
        )


def test_auto_leaves_what_does_not_run(tmp_path, monkeypatch):
    class Idle(Wide):
        def __init__(self):
            super().__init__()
            self.layers[2].forward = lambda x: x

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precision = Float8Precision(filter="auto", emulate=True)
    ms = ("forward_ms", "dgrad_ms", "wgrad_ms")
    precision.timer = lambda _, recipe: Times(**dict.fromkeys(ms, 1.0 if recipe == "bfloat16" else 0.5))
    fit(tmp_path, precision, model=Idle(), epochs=1)
    assert precision.conversion.skipped["layers.2.0"] == "does not run in a training step"
    assert len(precision.conversion.converted) == 4


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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"recipe": "rowise"}, "recipe 'rowise' is unknown. Use one of ('tensorwise', "),
        ({"number_format": "e5m2"}, "format 'e5m2' is unknown. Use one of ('e4m3', 'hybrid')"),
        ({"recipe": "rowwise", "all_gather": True}, "'rowwise' is given with all_gather=True"),
        ({"recipe": "rowwise", "number_format": "hybrid"}, "'rowwise' is given with number_format='hybrid'"),
    ],
    ids=str,
)
def test_what_a_float8_recipe_does_not_have_is_refused(given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Float8Precision(**given)
