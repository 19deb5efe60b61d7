import contextlib
import os

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.config.requested_run import run_of
from lightning_ups.insight.advise.timing_table import Times
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.order import Placement, Run, applied, refusals
from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.te import Recipe
from lightning_ups.transforms.te.fusions import Fusion
from tests import fake_te
from tests.config.test_requested_run import DEFAULTS
from tests.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RECIPES = ("delayed", "current", "block")
SHAPE = GPTConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, vocab_size=32, max_seq_len=16)


@pytest.fixture(autouse=True)
def engine():
    with fake_te.installed() as module:
        yield module


class Net(LightningModule):
    """A GPT that remembers its losses and what ran in float8."""

    def __init__(self, *, fail_at=None, lr=1e-3):
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(SHAPE)
        self.losses, self.validated, self.fail_at, self.lr = [], [], fail_at, lr

    def loss(self, batch):
        return self.model(batch[:, :-1], batch[:, 1:])

    def training_step(self, batch, index):
        if index == self.fail_at:
            raise RuntimeError("stop here")
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self):
        # By name: norms decay less.
        groups = {False: [], True: []}
        for name, parameter in self.named_parameters():
            groups["norm" in name].append(parameter)
        return torch.optim.AdamW(
            [{"params": groups[False], "weight_decay": 0.1}, {"params": groups[True], "weight_decay": 0.0}], lr=self.lr
        )


def tokens(size=8, length=17):
    torch.manual_seed(1)
    return torch.randint(0, 32, (size, length))


def loader(batch=2, **options):
    return DataLoader(tokens(**options), batch_size=batch)


def fit(tmp_path, precision, *, model=None, data=None, ckpt_path=None, **options):
    model = model or Net()
    run = trainer(tmp_path, plugins=[precision], **({"epochs": 2} | options))
    run.fit(model, data or loader(), ckpt_path=ckpt_path)
    return model


def near(found, wanted, rel):
    assert found == pytest.approx(wanted, rel=rel)


@contextlib.contextmanager
def seen_runs(monkeypatch):
    """Collect every module of the double that is made, by its class."""
    made = []
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "RMSNorm"):
        kind, start = getattr(fake_te, name), getattr(fake_te, name).__init__

        def init(self, *args, _start=start, **kwargs):
            _start(self, *args, **kwargs)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", init)
    yield made


class TestOneDevice:
    @pytest.mark.parametrize("weights", ["masters", "autocast"])
    @pytest.mark.parametrize("fuse", ["auto", "none"])
    def test_in_bfloat16_it_trains_as_bfloat16_does(self, tmp_path, weights, fuse):
        found = fit(tmp_path, TEPrecision(recipe=None, weights=weights, fuse=fuse))
        near(found.losses, fit(tmp_path, BF16Precision(weights=weights)).losses, rel=1e-2)

    @pytest.mark.parametrize("weights", ["masters", "autocast"])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_each_recipe_trains_near_it(self, tmp_path, recipe, weights):
        found = fit(tmp_path, TEPrecision(recipe=recipe, weights=weights))
        expected = fit(tmp_path, BF16Precision(weights=weights))
        near(found.losses, expected.losses, rel=5e-2)
        assert found.losses != expected.losses
        assert {p.dtype for p in found.parameters()} == {torch.float32}
        assert {n: type(m) for n, m in found.named_modules()} == {n: type(m) for n, m in Net().named_modules()}

    def test_training_is_in_float8_and_evaluation_by_choice(self, tmp_path, monkeypatch):
        for evaluate in (False, True):
            with monkeypatch.context() as patched, seen_runs(patched) as made:
                model = Net()
                data = {"train_dataloaders": loader(), "val_dataloaders": loader()}
                run = trainer(tmp_path, plugins=[TEPrecision(evaluate=evaluate)], epochs=1, num_sanity_val_steps=0)
                run.fit(model, **data)
                products = [m for m in made if not isinstance(m, fake_te.RMSNorm)]
                assert len(products) == 6
                assert all(m.ran == [True] * 4 + [evaluate] * 4 for m in products)

    def test_without_evaluation_in_float8_a_last_batch_may_have_any_size(self, tmp_path):
        model = Net()
        data = DataLoader(tokens(size=3, length=8), batch_size=2)
        run = trainer(tmp_path, plugins=[TEPrecision()], epochs=1, num_sanity_val_steps=0)
        run.fit(model, loader(), data)
        assert len(model.validated) == 2
        with pytest.raises(ValueError, match=r"model\.layers\.0\.attention\.qkv got \(2, 7, 32\): 14 rows"):
            fit(tmp_path, TEPrecision(), data=data)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_gradients_accumulate(self, tmp_path, accumulate):
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
        found = fit(tmp_path, TEPrecision(recipe=None), **options)
        near(found.losses, fit(tmp_path, BF16Precision(), **options).losses, rel=1e-2)

    def test_joined_weights_lie_together_while_it_trains_and_apart_afterwards(self, tmp_path):
        model, seen = Net(), []

        def look():
            ffn = model.model.layers[0].ffn
            return ffn.gate.weight.untyped_storage().data_ptr() == ffn.up.weight.untyped_storage().data_ptr()

        model.on_train_start = lambda: seen.append(look())
        model.on_train_end = lambda: seen.append(look())
        fit(tmp_path, TEPrecision(), model=model)
        assert seen == [True, True]
        assert not look()

    def test_what_was_done_is_reported(self, tmp_path):
        model, seen = Net(), []
        model.on_train_start = lambda: seen.append(applied(model.trainer.strategy).report)
        fit(tmp_path, TEPrecision(recipe="delayed"), model=model, callbacks=[ActivationCheckpoint(save="nothing")])
        part = seen[0].parts["Precision"]
        assert (
            "Transformer Engine computes 16 modules by 2 LayerNormLinear, 2 LayerNormMLP, 2 Linear" in part["lines"][1]
        )
        assert part["te"]["model.layers.0.ffn.up"] == "LayerNormMLP"
        assert part["not_te"] == {"model.norm": "outside the blocks", "model.head": "outside the blocks"}
        assert part["recipe"] == "delayed"

    def test_a_second_fit_and_an_exception(self, tmp_path):
        precision, model = TEPrecision(recipe="delayed"), Net()
        for _ in range(2):
            fit(tmp_path, precision, model=model, epochs=1)
            assert type(model.model.layers[0].ffn) is type(Net().model.layers[0].ffn)
        failing = Net(fail_at=1)
        with pytest.raises(RuntimeError, match="stop here"):
            fit(tmp_path, precision, model=failing)
        assert type(failing.model.layers[0].ffn) is type(Net().model.layers[0].ffn)
        assert fake_te.FP8GlobalStateManager.quantization_state.metas == []
        fit(tmp_path, precision, model=model, epochs=1)

    def test_fusions_of_the_users_own(self, tmp_path):
        class Custom(Net):
            def __init__(self):
                super().__init__()
                other = type("Other", (type(self.model.layers[0]),), {"__module__": "elsewhere"})
                for layer in self.model.layers:
                    layer.__class__ = other

        own = [Fusion(norm="model.layers.*.attention_norm", linears=["model.layers.*.attention.qkv"])]
        model, seen = Custom(), []
        model.on_train_start = lambda: seen.append(model.trainer.precision_plugin.conversion.kinds)
        fit(tmp_path, TEPrecision(recipe=None, fusions=own), model=model)
        assert seen == [{"LayerNormLinear": 2, "Linear": 8, "RMSNorm": 2}]
        near(model.losses, fit(tmp_path, BF16Precision()).losses, rel=1e-2)


class Kept(Net):
    """Looks at no value in a training step."""

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss


class TestAuto:
    """`filter="auto"`, by times that are given."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def auto(self, factor, **options):
        """Return the precision, and what it asked the times of; ``factor`` says how much longer a product takes."""
        precision, asked = TEPrecision(filter="auto", **options), []

        def timer(product, recipe):
            asked.append((str(product), recipe))
            total = 1.0 if recipe == "bfloat16" else factor(product)
            return Times(forward_ms=total, dgrad_ms=total, wgrad_ms=total)

        precision.timer = timer
        return precision, asked

    def test_what_is_faster_is_converted_whole_and_the_rest_says_why_not(self, tmp_path):
        precision, asked = self.auto(lambda product: 0.5 if product.norm else 1.2, recipe="delayed")
        model, seen = Kept(), []
        model.on_train_start = lambda: seen.append((precision.conversion, applied(model.trainer.strategy).report))
        fit(tmp_path, precision, model=model, callbacks=[ActivationCheckpoint(save="nothing")])
        conversion, report = seen[0]
        assert conversion.kinds == {"LayerNormLinear": 2, "LayerNormMLP": 2}
        names = ["32 x 32 x 32", "32 x 32 x 64 after RMSNorm", "32 x 32 x 64 by swiglu and back after RMSNorm"]
        assert asked == [(name, recipe) for name in names for recipe in ("bfloat16", "te-delayed")]
        assert "is not faster: 3 ms in bfloat16, 3.6 ms" in conversion.skipped["model.layers.0.attention.out"]
        assert any("convert 4 of 6 layers by te-delayed" in line for line in report.lines())
        near(
            [float(loss) for loss in model.losses],
            [float(loss) for loss in fit(tmp_path, BF16Precision(), model=Kept()).losses],
            rel=5e-2,
        )

    def test_where_nothing_is_faster_it_is_bfloat16(self, tmp_path):
        precision, _ = self.auto(lambda product: 1.1)
        model, seen = Kept(), []
        model.on_train_start = lambda: seen.append((precision.conversion.converted, precision.advice.verdict()))
        fit(tmp_path, precision, model=model)
        assert seen[0][0] == {}
        assert seen[0][1].startswith("leave bfloat16")
        assert model.losses == fit(tmp_path, BF16Precision(), model=Kept()).losses

    def test_a_fusion_that_was_asked_for_and_is_slower_is_not_made(self, tmp_path):
        own = [Fusion(norm="model.layers.*.attention_norm", linears=["model.layers.*.attention.qkv"])]
        precision, _ = self.auto(lambda product: 0.5 if product.activation else 1.5, fusions=own)
        model, seen = Kept(), []
        model.on_train_start = lambda: seen.append(precision.conversion.kinds)
        fit(tmp_path, precision, model=model, epochs=1)
        assert seen == [{"LayerNormMLP": 2}]

    def test_rows_that_do_not_fit_stay_in_bfloat16(self, tmp_path):
        precision, asked = self.auto(lambda product: 0.5)
        model, seen = Kept(), []
        model.on_train_start = lambda: seen.append(precision.conversion)
        fit(tmp_path, precision, model=model, data=loader(length=8), epochs=1)
        assert not asked
        assert "14 rows, which is no multiple of 8" in seen[0].skipped["model.layers.0.attention.qkv"]

    def test_a_number_of_tokens_stands_for_a_step(self, tmp_path):
        precision, asked = self.auto(lambda product: 0.5, tokens=4096)
        fit(tmp_path, precision, model=Kept(), epochs=1)
        assert {name.partition(" ")[0] for name, _ in asked} == {"4096"}

    def test_what_was_timed_is_timed_once(self, tmp_path):
        precision, asked = self.auto(lambda product: 0.5)
        fit(tmp_path, precision, model=Kept(), epochs=1)
        assert asked
        again, more = self.auto(lambda product: 0.5)
        fit(tmp_path, again, model=Kept(), epochs=1)
        assert not more

    def test_outside_of_fit_nothing_is_timed(self, tmp_path):
        precision, asked = self.auto(lambda product: 0.5)
        model = Net()
        run = trainer(tmp_path, plugins=[precision])
        run.validate(model, loader(), verbose=False)
        assert model.validated
        assert not asked

    def test_without_a_gpu_and_a_table_it_says_what_to_do(self, tmp_path):
        with pytest.raises(RuntimeError, match=r"timed on this device: cpu.*give a table"):
            fit(tmp_path, TEPrecision(filter="auto"), model=Kept())

    @pytest.mark.parametrize("options", [{"recipe": None}, {"fp8_attention": True}], ids=str)
    def test_it_decides_about_products_in_float8_alone(self, options):
        with pytest.raises(ValueError, match=r"filter='auto', .*Use filter='all'"):
            TEPrecision(filter="auto", **options)


class TestCheckpoints:
    def halfway(self, tmp_path, precision):
        """Return the checkpoint of a run after one epoch of two, and the losses of both."""
        path, model = tmp_path / "half.ckpt", Net()

        def on_train_epoch_end():
            if model.current_epoch == 0:
                model.trainer.save_checkpoint(path)

        model.on_train_epoch_end = on_train_epoch_end
        fit(tmp_path, precision, model=model)
        return path, model.losses

    def test_it_is_that_of_the_plain_model(self, tmp_path):
        path, _ = self.halfway(tmp_path, TEPrecision())
        plain = tmp_path / "plain"
        plain.mkdir()
        other, _ = self.halfway(plain, BF16Precision())
        state, expected = (torch.load(p, weights_only=True) for p in (path, other))
        assert [*state["state_dict"]] == [*Net().state_dict()] == [*expected["state_dict"]]
        assert {type(v) for v in state["state_dict"].values()} == {torch.Tensor}
        assert {v.dtype for v in state["state_dict"].values()} == {torch.float32}
        mine, theirs = (c["optimizer_states"][0] for c in (state, expected))
        assert mine["param_groups"] == theirs["param_groups"]
        shapes = [{i: v["exp_avg"].shape for i, v in s["state"].items()} for s in (mine, theirs)]
        assert shapes[0] == shapes[1]
        assert "TEPrecision" not in state  # which keeps scales only where a recipe does

    @pytest.mark.parametrize("recipe", [None, *RECIPES])
    def test_a_resumed_run_goes_on_exactly(self, tmp_path, recipe):
        path, whole = self.halfway(tmp_path, TEPrecision(recipe=recipe))
        resumed = fit(tmp_path, TEPrecision(recipe=recipe), ckpt_path=path)
        assert resumed.losses == whole[4:]

    def test_delayed_scaling_goes_on_with_its_scales(self, tmp_path):
        path, whole = self.halfway(tmp_path, TEPrecision(recipe="delayed"))
        saved = torch.load(path, weights_only=True)
        assert set(saved["TEPrecision"]["scales"]) == {
            f"model.layers.{i}.{n}" for i in (0, 1) for n in ("attention.qkv", "attention.out", "ffn")
        }
        del saved["TEPrecision"]
        torch.save(saved, path)
        resumed = fit(tmp_path, TEPrecision(recipe="delayed"), ckpt_path=path)
        assert resumed.losses != whole[4:]  # so that the test above could fail

    @pytest.mark.parametrize("evaluate", [False, True])
    def test_what_has_no_scales_begins_with_some_that_lose_no_gradients(self, tmp_path, evaluate):
        precision, seen = TEPrecision(recipe="delayed", evaluate=evaluate), []
        model = Net()

        def look():
            seen.append(precision.conversion.scales()["model.layers.0.ffn"])

        model.on_train_batch_start = lambda *_: look() if evaluate else None  # after the sanity check
        model.on_train_batch_end = lambda *_: look()
        data = {"train_dataloaders": loader(), "val_dataloaders": loader()}
        trainer(tmp_path, plugins=[precision], epochs=1, num_sanity_val_steps=1).fit(model, **data)
        assert all(
            scales["scaling_bwd.scale"].tolist() == [65536.0] * 4 for scales in seen[:2]
        )  # the double has no more
        if evaluate:
            assert seen[0]["scaling_fwd.scale"].tolist() == [1.0, 64.0, 1.0] * 2
        assert all(x > 1 for i, x in enumerate(seen[-1]["scaling_fwd.scale"].tolist()) if i % 3 < 2)

    def test_a_history_of_another_length_goes_on_with_what_both_have(self, tmp_path):
        path, whole = self.halfway(tmp_path, TEPrecision(recipe="delayed", amax_history=16))
        resumed = fit(tmp_path, TEPrecision(recipe="delayed", amax_history=2), ckpt_path=path)
        assert resumed.losses[0] == whole[4]

    def test_a_module_without_scales_begins_anew(self, tmp_path):
        path, whole = self.halfway(tmp_path, TEPrecision(recipe="delayed", exclude=["model.layers.1.ffn.up"]))
        resumed = fit(tmp_path, TEPrecision(recipe="delayed"), ckpt_path=path)
        near(resumed.losses, whole[4:], rel=5e-2)

    @pytest.mark.parametrize(
        "others", [BF16Precision, lambda: Float8Precision(emulate=True), lambda: TEPrecision(recipe="delayed")]
    )
    def test_it_moves_between_precisions_both_ways(self, tmp_path, others):
        for first, second in (
            (lambda: TEPrecision(recipe="current"), others),
            (others, lambda: TEPrecision(recipe="current")),
        ):
            path, whole = self.halfway(tmp_path, first())
            near(fit(tmp_path, second(), ckpt_path=path).losses, whole[4:], rel=5e-2)

    def test_scales_can_be_saved_after_the_fit(self, tmp_path):
        model = Net()
        run = trainer(tmp_path, plugins=[TEPrecision(recipe="delayed")], epochs=1)
        run.fit(model, loader())
        run.save_checkpoint(tmp_path / "after.ckpt")
        assert torch.load(tmp_path / "after.ckpt", weights_only=True)["TEPrecision"]["scales"]


class TestWithCallbacks:
    @pytest.mark.parametrize("save", ["nothing", "matmuls"])
    @pytest.mark.parametrize("recipe", [None, *RECIPES])
    def test_recomputed_blocks_train_bit_for_bit_as_without(self, tmp_path, recipe, save):
        recomputed = fit(tmp_path, TEPrecision(recipe=recipe), callbacks=[ActivationCheckpoint(save=save)])
        assert recomputed.losses == fit(tmp_path, TEPrecision(recipe=recipe)).losses

    def test_torchs_checkpoint_would_not(self, tmp_path, monkeypatch):
        from torch.utils.checkpoint import checkpoint

        from lightning_ups.precision import te

        monkeypatch.setattr(te, "checkpoint_by", lambda recipe: checkpoint)
        with pytest.raises(RuntimeError, match="is recomputed in backward outside of Transformer Engine's autocast"):
            fit(tmp_path, TEPrecision(recipe="current"), callbacks=[ActivationCheckpoint(save="nothing")])

    def test_a_model_that_recomputes_by_itself_is_told_how_to(self, tmp_path):
        from torch.utils.checkpoint import checkpoint

        class Own(Net):
            def loss(self, batch):
                x = self.model.embedding(batch[:, :-1])
                for layer in self.model.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                return self.model.head(x).square().mean()

        with pytest.raises(RuntimeError, match=r"recomputed in backward outside of.*use ActivationCheckpoint\(\)"):
            fit(tmp_path, TEPrecision(), model=Own())
        fit(tmp_path, TEPrecision(recipe=None), model=Own())

    def test_compiled_blocks_are_compiled_between_its_modules(self, tmp_path):
        model, seen = Net(), []
        model.on_train_end = lambda: seen.append(applied(model.trainer.strategy).report.parts["Compile"])
        fit(tmp_path, TEPrecision(), model=model, callbacks=[Compile(backend="aot_eager")])
        near(model.losses, fit(tmp_path, TEPrecision()).losses, rel=1e-2)
        assert seen[0]["graphs"] > 0
        assert seen[0]["recompiles"] == 0  # equal blocks share their graphs, fused as they are

    @pytest.mark.parametrize(
        ("precision", "callbacks", "text"),
        [
            (
                TEPrecision(recipe="delayed"),
                [Compile(backend="eager")],
                r"\(recipe='delayed'\) is given with Compile.*Use recipe='current'",
            ),
            (
                TEPrecision(fp8_attention=True),
                [Compile(backend="eager")],
                r"\(fp8_attention=True\) is given with Compile.*or leave Compile out",
            ),
            (
                TEPrecision(),
                [Compile(backend="eager", fullgraph=True)],
                r"given with Compile\(fullgraph=True\).*Leave fullgraph out",
            ),
            (
                TEPrecision(),
                [Compile(backend="aot_eager"), ActivationCheckpoint()],
                "given with ActivationCheckpoint and Compile.*Leave one of the two",
            ),
        ],
    )
    def test_what_cannot_be_compiled_is_refused(self, tmp_path, precision, callbacks, text):
        with pytest.raises(ValueError, match=text):
            fit(tmp_path, precision, callbacks=callbacks)

    def test_what_can_is_not(self):
        def asked(precision, *callbacks, training=True):
            strategy = Placement(name="SingleDeviceStrategy", shards=False, ours=False)
            options = {"strategy": strategy, "accelerator": "cuda", "num_devices": 1, "num_nodes": 1}
            return refusals(Run(module=Net(), precision=precision, callbacks=callbacks, training=training, **options))

        graph = Placement(name="SimpleFSDPStrategy", shards=True, ours=True, whole_graph=True)
        run = {"strategy": graph, "accelerator": "cuda", "num_devices": 2, "num_nodes": 1}
        (refusal,) = refusals(Run(module=Net(), precision=TEPrecision(), callbacks=(), **run))
        assert refusal.cure.startswith("Leave fullgraph out, use FSDP2Strategy")
        both = (Compile(backend="aot_eager"), ActivationCheckpoint())
        assert asked(TEPrecision(recipe=None), *both) == []
        assert asked(TEPrecision(recipe="delayed"), ActivationCheckpoint()) == []
        assert asked(TEPrecision(recipe="delayed"), *both, training=False) == []
        assert len(asked(TEPrecision(recipe="current"), *both)) == 1


class TestAttention:
    @pytest.mark.parametrize("recipe", ["delayed", "current"])
    def test_it_trains_in_float8(self, tmp_path, recipe):
        found = fit(tmp_path, TEPrecision(recipe=recipe, fp8_attention=True))
        without = fit(tmp_path, TEPrecision(recipe=recipe))
        near(found.losses, without.losses, rel=5e-2)
        assert found.losses != without.losses

    def test_recomputed(self, tmp_path):
        options = {"callbacks": [ActivationCheckpoint(save="nothing")]}
        found = fit(tmp_path, TEPrecision(fp8_attention=True), **options)
        near(found.losses, fit(tmp_path, TEPrecision(fp8_attention=True)).losses, rel=1e-6)

    def test_a_recipe_without_kernels_is_refused_before_anything_is_converted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Recipe, "why_no_attention", lambda recipe, device: f"not with {recipe.name}")
        model = Net()
        with pytest.raises(
            RuntimeError, match=r"fp8_attention=True\) cannot train here: not with current\..*=False\.$"
        ):
            fit(tmp_path, TEPrecision(fp8_attention=True), model=model)
        assert type(model.model.layers[0].ffn) is type(Net().model.layers[0].ffn)
        fit(tmp_path, TEPrecision(), epochs=1)

    def test_none_is_an_error(self, tmp_path):
        class Without(Net):
            def loss(self, batch):
                x = self.model.embedding(batch[:, :-1])
                for layer in self.model.layers:
                    x = x + layer.ffn(layer.ffn_norm(x))
                return self.model.head(x).square().mean()

        with pytest.raises(RuntimeError, match=r"met no attention.*fp8_attention=False"):
            fit(tmp_path, TEPrecision(fp8_attention=True), model=Without())


PRECISE = ("model.layers.*.ffn", "model.head")


class Precise(Net):
    """Notes the types that parts in float32 compute with."""

    def on_train_start(self):
        self.types = set()
        for layer in self.model.layers:
            layer.ffn.down.register_forward_hook(self.note)

    def note(self, linear, args, out):
        self.types.add((args[0].dtype, linear.weight.dtype, out.dtype))


class TestInFloat32:
    @pytest.mark.parametrize("weights", ["masters", "autocast"])
    @pytest.mark.parametrize("recipe", [None, *RECIPES])
    def test_parts_compute_in_float32_beside_it(self, tmp_path, recipe, weights):
        precision = TEPrecision(recipe=recipe, weights=weights, in_float32=PRECISE)
        found = fit(tmp_path, precision, model=Precise())
        assert found.types == {(torch.float32, torch.float32, torch.float32)}
        expected = fit(tmp_path, BF16Precision(weights=weights, in_float32=PRECISE))
        near(found.losses, expected.losses, rel=5e-2 if recipe else 1e-2)
        assert (found.losses != expected.losses) or recipe is None
        assert {p.dtype for p in found.parameters()} == {torch.float32}

    def test_they_are_told_with_the_rest(self, tmp_path):
        told, model = {}, Net()
        model.on_train_start = lambda: told.update(applied(model.trainer.strategy).report.parts["Precision"])
        fit(tmp_path, TEPrecision(in_float32=PRECISE), model=model, callbacks=[Compile(backend="aot_eager")], epochs=1)
        assert told["in_float32"] == ["model.layers.0.ffn", "model.layers.1.ffn", "model.head"]
        assert told["not_te"]["model.layers.1.ffn.up"] == "computes in float32"
        assert "model.layers.1.attention.qkv" in told["te"]

    def test_modules_of_its_own_in_them_are_refused(self, tmp_path, engine):
        class Theirs(engine.Linear):
            __module__ = "transformer_engine.pytorch.module.linear"

        model = Net()
        model.model.layers[1].ffn.down = Theirs(64, 32, bias=False, params_dtype=torch.float32, device="cpu")
        message = r"names model\.layers\.1\.ffn\.down, or what holds it.*a module of torch there\.$"
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, TEPrecision(in_float32=PRECISE), model=model)

    def test_float8_attention_in_a_block_that_has_some_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"cannot be: model\.layers\.0 holds.*parts outside of the blocks\.$"):
            fit(tmp_path, TEPrecision(fp8_attention=True, in_float32=PRECISE))
        fit(tmp_path, TEPrecision(fp8_attention=True, in_float32=["model.head"]), epochs=1)


def test_from_yaml():
    import yaml
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(TEPrecision, "precision")
    text = """
        class_path: lightning_ups.precision.TEPrecision
        init_args:
          recipe: delayed
          amax_history: 16
          number_format: e4m3
          fusions: [{norm: layers.*.norm, linears: [layers.*.q, layers.*.k]}]
    """
    config = parser.parse_object({"precision": yaml.safe_load(text)})
    made = parser.instantiate_classes(config).precision
    assert (made.recipe, made.amax_history, made.amax_compute, made.number_format) == ("delayed", 16, "max", "e4m3")
    assert made.fusions[0].norm == "layers.*.norm"
    assert [*made.fusions[0].linears] == ["layers.*.q", "layers.*.k"]


class Casting(Net):
    """Has an autocast of its own."""

    def training_step(self, batch, index):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().training_step(batch, index)


class TestErrors:
    def test_an_autocast_on_top_is_refused_and_allowed_where_the_precision_is_one(self, tmp_path):
        message = r"within torch.autocast, and TEPrecision has set its types already.*weights='autocast'"
        with pytest.raises(RuntimeError, match=message):
            fit(tmp_path, TEPrecision(recipe="current", weights="masters"), model=Casting())
        for allowed in (TEPrecision(recipe="current"), TEPrecision(recipe=None)):
            fit(tmp_path, allowed, model=Casting())

    def test_a_device_that_cannot_says_what_to_do(self, tmp_path):
        with (
            fake_te.installed(everywhere=False),
            pytest.raises(RuntimeError, match=r"on cpu: it runs on cuda.*recipe=None"),
        ):
            fit(tmp_path, TEPrecision())

    def test_what_cannot_be_on_a_machine_that_is_not_here_is_known_without_it(self):
        settings = DEFAULTS | {"accelerator": "gpu", "devices": 2}
        split = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
        with fake_te.installed(everywhere=False):
            assert TEPrecision().refusal(run_of(Net(), settings, [])) is None
            on_cpu = TEPrecision().refusal(run_of(Net(), DEFAULTS, []))
            assert on_cpu.startswith("TEPrecision(recipe='current') cannot run on cpu: it runs on cuda devices alone.")
            text = TEPrecision().refusal(run_of(Net(), settings | {"strategy": split}, []))
            assert text.endswith("Use tensor_parallel_size=1, or Float8Precision.")

    def test_a_recipe_that_the_device_lacks(self, tmp_path):
        with pytest.raises(RuntimeError, match=r"recipe='mxfp8'.*required for MXFP8 execution.*Use another recipe"):
            fit(tmp_path, TEPrecision(recipe="mxfp8"))

    def test_a_missing_package_names_the_extra(self, tmp_path, monkeypatch):
        from lightning_ups._compat.optional import te

        monkeypatch.setattr(
            te,
            "_required",
            lambda module: te.require(module, requirement="no-such-package", extra="te", feature="TEPrecision"),
        )
        with pytest.raises(ModuleNotFoundError, match=r"lightning-ups\[te\]"):
            fit(tmp_path, TEPrecision())

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"recipe": "delay"}, r"recipe='delay'.*Use one of \('delayed', 'current', 'block', 'mxfp8', None\)"),
            ({"number_format": "e5m2"}, r"number_format='e5m2'.*'hybrid', 'e4m3'"),
            ({"recipe": "delayed", "amax_compute": "mean"}, r"amax_compute='mean'.*'most_recent'"),
            ({"fuse": "some"}, "fuse='some'.*'auto', 'all', 'none'"),
            ({"amax_history": 16}, r"recipe='current'\) is given with amax_history=16.*leave amax_history out"),
            ({"recipe": "block", "margin": 1}, r"given with margin=1.*leave margin out"),
            ({"recipe": "delayed", "amax_history": 0}, "amax_history=0.*1 or more"),
            ({"recipe": None, "number_format": "e4m3"}, r"=None, number_format='e4m3'\).*leave number_format"),
            ({"recipe": None, "fp8_attention": True}, r"recipe=None, fp8_attention=True\).*Choose a recipe"),
            ({"recipe": "block", "fp8_attention": True}, "has no float8 attention.*or fp8_attention=False"),
        ],
    )
    def test_bad_choices_are_refused_at_construction(self, options, text):
        with pytest.raises(ValueError, match=text):
            TEPrecision(**options)

    def test_a_string_of_patterns(self):
        with pytest.raises(TypeError, match=r"Write \['head'\]"):
            TEPrecision(exclude="head")

    def test_norms_alone_are_nothing_in_float8(self, tmp_path):
        with pytest.raises(ValueError, match=r"Of Net Transformer Engine can compute norms alone"):
            fit(tmp_path, TEPrecision(include=["model.layers.*.attention_norm"], fuse="none"))
        fit(tmp_path, TEPrecision(include=["model.layers.*.attention_norm"], fuse="none", recipe=None), epochs=1)

    def test_nothing_to_convert(self, tmp_path):
        class Bare(LightningModule):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(3, 3)

            def training_step(self, batch, _):
                raise NotImplementedError

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        with pytest.raises(ValueError, match=r"Nothing of Bare can be computed by Transformer Engine.*BF16Precision"):
            fit(tmp_path, TEPrecision(), model=Bare())

    def test_modules_that_do_not_run(self, tmp_path):
        class Idle(Net):
            def loss(self, batch):
                return self.model.head(self.model.embedding(batch)).square().mean()

        with pytest.raises(RuntimeError, match=r"computed nothing in a training step.*include=\[...\]"):
            fit(tmp_path, TEPrecision(), model=Idle())

    def test_a_block_that_runs_twice_with_delayed_scaling(self, tmp_path):
        class Twice(Net):
            def loss(self, batch):
                return super().loss(batch) + super().loss(batch)

        with pytest.raises(RuntimeError, match=r"ran twice in one training step.*recipe='current'"):
            fit(tmp_path, TEPrecision(recipe="delayed"), model=Twice())
        fit(tmp_path, TEPrecision(recipe="current"), model=Twice())


# Two ranks


def ddp(recipe, folder, accumulate=1):
    """Train on two ranks, and return the losses, the groups of reductions and whether ranks have the same scales."""
    import torch.distributed as dist

    with fake_te.installed():
        model, precision = Net(), TEPrecision(recipe=recipe)
        data = loader(batch=2) if dist.get_rank() == 0 else DataLoader(tokens().flip(0), batch_size=2)
        run = trainer(
            folder, plugins=[precision], epochs=2, strategy="ddp", devices=2, use_distributed_sampler=False,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        run.fit(model, data)
        state = fake_te.FP8GlobalStateManager.quantization_state
        scales = precision.state_dict().get("scales", {})
        mine = {f"{n}.{k}": v.sum().item() for n, s in scales.items() for k, v in s.items()}
        both = [None, None]
        dist.all_gather_object(both, mine)
        weights = [None, None]
        dist.all_gather_object(weights, {n: p.double().sum().item() for n, p in model.named_parameters()})
        return model.losses, both[0] == both[1], weights[0] == weights[1], len(mine), len(state.reductions)


@pytest.mark.parametrize("recipe", [None, "current", "delayed"])
def test_under_ddp_ranks_agree_in_weights_and_scales(ranks, tmp_path, recipe):
    losses, same_scales, same_weights, num_scales, _ = ranks(ddp, recipe, tmp_path)
    assert len(losses) == 8
    assert same_weights
    assert same_scales
    assert (num_scales > 0) == (recipe == "delayed")


def ddp_of_halves(folder, precision):
    import torch.distributed as dist

    with fake_te.installed():
        model, rows = Net(), tokens()
        half = torch.cat([rows[i + 2 * dist.get_rank() : i + 2 * dist.get_rank() + 2] for i in (0, 4)])
        run = trainer(
            folder, plugins=[precision()], epochs=2, strategy="ddp", devices=2, use_distributed_sampler=False
        )  # fmt: skip
        run.fit(model, DataLoader(half, batch_size=2))
        losses = torch.tensor(model.losses)
        dist.all_reduce(losses)
        return (losses / 2).tolist()


@pytest.mark.parametrize("recipe", [None, "current", "delayed"])
def test_two_ranks_under_ddp_train_as_one_device_on_both_halves(ranks, tmp_path, recipe):
    precision = {None: bf16, "current": current, "delayed": delayed}[recipe]
    found = ranks(ddp_of_halves, tmp_path, precision)
    near(found, fit(tmp_path, precision(), data=loader(batch=4)).losses, rel=1e-2 if recipe is None else 3e-2)


def ddp_on_rank_alone(folder):
    """A single device within a process group reduces with nobody."""
    with fake_te.installed():
        reductions = []
        model = Net()
        model.on_train_end = lambda: reductions.extend(fake_te.FP8GlobalStateManager.quantization_state.reductions)
        precision = TEPrecision(recipe="delayed")
        from lightning.pytorch.strategies import SingleDeviceStrategy

        run = trainer(folder, plugins=[precision], epochs=1, strategy=SingleDeviceStrategy("cpu"))
        run.fit(model, loader())
        return len(reductions)


def test_a_single_device_reduces_with_nobody(ranks, tmp_path):
    assert ranks(ddp_on_rank_alone, tmp_path) == 0


def sharded(precision, folder, *, epochs=2, ckpt=None, into=None, **options):
    """Train on two ranks under FSDP2, and return the losses."""
    with fake_te.installed():
        made = precision()
        callbacks = [ActivationCheckpoint(save="nothing")] if options.pop("recompute", False) else []
        model = options.pop("kind", Net)()
        run = trainer(
            folder, plugins=[made], callbacks=callbacks, epochs=epochs, strategy=FSDP2Strategy(**options), devices=2,
            use_distributed_sampler=False,
        )  # fmt: skip
        if into:
            model.on_train_end = lambda: run.save_checkpoint(into)
        run.fit(model, loader(), ckpt_path=ckpt)
        return model.losses


class Late(Net):
    def __init__(self):
        super().__init__()
        del self.model

    def configure_model(self):
        torch.manual_seed(0)
        self.model = GPT(SHAPE)


class PostNorm(Net):
    """Blocks that end with a norm, whose backward is the first thing in that of the block."""

    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.model = nn.ModuleDict(
            {"in": nn.Embedding(32, 32), "blocks": nn.TransformerEncoder(block, 2), "out": nn.Linear(32, 32)}
        )

    def loss(self, batch):
        x = self.model["blocks"](self.model["in"](batch[:, :-1]))
        return nn.functional.cross_entropy(self.model["out"](x).flatten(0, 1), batch[:, 1:].flatten())


def plain():
    return BF16Precision()


def in_float32():
    return TEPrecision(in_float32=PRECISE)


def bf16():
    return TEPrecision(recipe=None)


def bf16_all():
    return TEPrecision(recipe=None, fuse="all")


def current():
    return TEPrecision(recipe="current")


def delayed():
    return TEPrecision(recipe="delayed")


def delayed_all():
    return TEPrecision(recipe="delayed", fuse="all")


class TestFSDP2:
    def test_it_trains_as_bfloat16_does(self, ranks, tmp_path):
        expected = ranks(sharded, plain, tmp_path)
        for precision in (bf16, bf16_all):
            near(ranks(sharded, precision, tmp_path), expected, rel=1e-2)

    @pytest.mark.parametrize("precision", [current, delayed, in_float32])
    def test_each_recipe_trains_near_one_device(self, ranks, tmp_path, precision):
        with fake_te.installed():
            expected = fit(tmp_path, precision()).losses
        found = ranks(sharded, precision, tmp_path)
        near(found, expected, rel=2e-2)

    @pytest.mark.parametrize("precision", [bf16, current, delayed])
    def test_blocks_that_end_with_a_norm(self, ranks, tmp_path, precision):
        found = ranks(post_norm, precision, tmp_path)
        near(found, ranks(post_norm, plain, tmp_path), rel=2e-2)
        assert found != ranks(post_norm, plain, tmp_path)

    @pytest.mark.parametrize("precision", [current, delayed])
    def test_recomputed_blocks_train_bit_for_bit_as_without(self, ranks, tmp_path, precision):
        found = ranks(recomputing, precision, tmp_path)
        assert found == ranks(sharded, precision, tmp_path)

    def test_a_sharded_checkpoint_goes_on_exactly_here_and_on_one_device(self, ranks, tmp_path):
        whole = ranks(sharded, delayed, tmp_path)
        path = tmp_path / "half.ckpt"
        ranks(saving, delayed, tmp_path, path)
        assert ranks(resuming, delayed, tmp_path, path) == whole[4:]

    def test_scales_go_from_two_ranks_to_one(self, ranks, tmp_path):
        whole, path = ranks(sharded, delayed_all, tmp_path), tmp_path / "full.ckpt"
        ranks(saving_full, delayed_all, tmp_path, path)
        state = torch.load(path, weights_only=True)
        assert len(state["TEPrecision"]["scales"]) == 6
        near(fit(tmp_path, delayed(), ckpt_path=path).losses, whole[4:], rel=2e-2)

    def test_a_module_from_the_meta_device_is_the_same(self, ranks, tmp_path):
        found = ranks(on_meta, current, tmp_path)
        assert found == ranks(sharded, current, tmp_path)

    def test_a_second_fit_converts_again(self, ranks, tmp_path):
        assert ranks(two_fits, tmp_path) == [[True] * 8, True, [True] * 8]

    def test_what_is_faster_is_found_on_rank_0_and_kept_for_a_second_fit(self, ranks, tmp_path):
        first, second, everywhere = ranks(decided_by_times, tmp_path)
        assert first == second == {"LayerNormLinear": 2, "Linear": 2}
        assert everywhere

    def test_tensor_parallelism_is_refused(self, ranks, tmp_path):
        text = ranks(tensor_parallel, tmp_path)
        assert "TEPrecision is given with tensor parallelism over 2 devices" in text
        assert text.endswith("Use tensor_parallel_size=1, or Float8Precision.")

    def test_a_module_that_is_sharded_already_is_refused(self, ranks):
        text = ranks(sharded_before)
        assert "Net was sharded before TEPrecision could convert it." in text
        assert text.endswith("shard nothing in configure_model.")


def post_norm(precision, folder):
    return sharded(precision, folder, kind=PostNorm)


def recomputing(precision, folder):
    return sharded(precision, folder, recompute=True)


def on_meta(precision, folder):
    return sharded(precision, folder, meta_device=True, kind=Late)


def saving(precision, folder, path):
    sharded(precision, folder, epochs=1, into=path)


def saving_full(precision, folder, path):
    sharded(precision, folder, epochs=1, into=path, save="full")


def resuming(precision, folder, path):
    return sharded(precision, folder, ckpt=path)


def two_fits(folder):
    with fake_te.installed():
        model, seen, ran = Net(), [], []
        model.on_train_batch_end = lambda *_: ran.append(model.trainer.precision_plugin.conversion.calls.total > 0)
        for _ in range(2):
            trainer(
                folder, plugins=[TEPrecision()], epochs=2, strategy=FSDP2Strategy(), devices=2,
                use_distributed_sampler=False,
            ).fit(model, loader())  # fmt: skip
            seen.append([*ran])
            ran.clear()
            seen.append("__reduce_ex__" not in vars(type(model.model.layers[0].ffn.up)))
        return seen[:3]


def decided_by_times(folder):
    """Return what was converted in two fits of one module, and whether ranks agree; rank 1 has no times."""

    def timer(product, recipe):
        assert rank == 0
        total = 1.0 if recipe == "bfloat16" else 0.5
        return Times(forward_ms=total, dgrad_ms=total, wgrad_ms=total)

    rank, seen = torch.distributed.get_rank(), []
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache of {rank}")
    try:
        with fake_te.installed():
            model = Kept()
            model.on_train_start = lambda: seen.append(dict(model.trainer.precision_plugin.conversion.kinds))
            for _ in range(2):
                precision = TEPrecision(filter="auto", exclude=["model.layers.*.ffn.*"])
                precision.timer = timer
                trainer(
                    folder, plugins=[precision], epochs=1, strategy=FSDP2Strategy(), devices=2,
                    use_distributed_sampler=False,
                ).fit(model, loader())  # fmt: skip
    finally:
        del os.environ["XDG_CACHE_HOME"]
    both = [None, None]
    torch.distributed.all_gather_object(both, seen)
    return *seen, both[0] == both[1]


def tensor_parallel(folder):
    with fake_te.installed():
        strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
        run = trainer(folder, plugins=[TEPrecision()], strategy=strategy, devices=2, use_distributed_sampler=False)
        try:
            run.fit(Net(), loader())
        except ValueError as error:
            return str(error)


def sharded_before():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_te.installed():
        model = Net()
        fully_shard(model.model, mesh=init_device_mesh("cpu", (2,)))
        try:
            TEPrecision().convert_module(model)
        except RuntimeError as error:
            return str(error)
