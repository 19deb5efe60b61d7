import contextlib
import os
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.config.requested_run import run_of
from lightning_ups.insight.advise.timing_table import Times
from lightning_ups.models.gpt import GPT
from lightning_ups.order import Placement, Run, applied, refusals
from lightning_ups.precision import BF16Precision, TEPrecision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.te.fusions import Fusion
from tests import fake_te
from tests.config.test_requested_run import DEFAULTS
from tests.precision.test_converting import SHAPE, Net, auto, engine, fit, halfway, loader, near, seen_in_fit, tokens
from tests.toys import trainer

__all__ = ["engine"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RECIPES = ("delayed", "current", "block")
TWO = {"devices": 2, "use_distributed_sampler": False}
PRECISE = ("model.layers.*.ffn", "model.head")
bf16, current, delayed = (partial(TEPrecision, recipe=recipe) for recipe in (None, "current", "delayed"))
in_float32 = partial(TEPrecision, in_float32=PRECISE)


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


class TestAuto:
    def test_fusions_are_timed_as_one_and_converted_whole(self, tmp_path):
        precision, asked = auto(current, lambda product: 0.5 if product.norm else 1.2)
        _, conversion, report = seen_in_fit(tmp_path, precision)
        assert conversion.kinds == {"LayerNormLinear": 2, "LayerNormMLP": 2}
        names = ["32 x 32 x 32", "32 x 32 x 64 after RMSNorm", "32 x 32 x 64 by swiglu and back after RMSNorm"]
        asked = [(str(product), recipe) for product, recipe in asked]
        assert asked == [(name, recipe) for name in names for recipe in ("bfloat16", "te-current")]
        assert any("convert 4 of 6 layers by te-current" in line for line in report.lines())

    def test_a_fusion_that_was_asked_for_and_is_slower_is_not_made(self, tmp_path):
        own = [Fusion(norm="model.layers.*.attention_norm", linears=["model.layers.*.attention.qkv"])]
        precision, _ = auto(current, lambda product: 0.5 if product.activation else 1.5, fusions=own)
        assert seen_in_fit(tmp_path, precision, epochs=1)[1].kinds == {"LayerNormMLP": 2}

    def test_rows_that_do_not_fit_stay_in_bfloat16(self, tmp_path):
        precision, asked = auto(current)
        _, conversion, _ = seen_in_fit(tmp_path, precision, data=loader(length=8), epochs=1)
        assert not asked
        assert "14 rows, which is no multiple of 8" in conversion.skipped["model.layers.0.attention.qkv"]


class TestCheckpoints:
    def test_delayed_scaling_goes_on_with_its_scales(self, tmp_path):
        path, whole = halfway(tmp_path, TEPrecision(recipe="delayed"))
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
        path, whole = halfway(tmp_path, TEPrecision(recipe="delayed", amax_history=16))
        resumed = fit(tmp_path, TEPrecision(recipe="delayed", amax_history=2), ckpt_path=path)
        assert resumed.losses[0] == whole[4]

    def test_a_module_without_scales_begins_anew(self, tmp_path):
        path, whole = halfway(tmp_path, TEPrecision(recipe="delayed", exclude=["model.layers.1.ffn.up"]))
        resumed = fit(tmp_path, TEPrecision(recipe="delayed"), ckpt_path=path)
        near(resumed.losses, whole[4:], rel=5e-2)

    def test_scales_can_be_saved_after_the_fit(self, tmp_path):
        model = Net()
        run = trainer(tmp_path, plugins=[TEPrecision(recipe="delayed")], epochs=1)
        run.fit(model, loader())
        run.save_checkpoint(tmp_path / "after.ckpt")
        assert torch.load(tmp_path / "after.ckpt", weights_only=True)["TEPrecision"]["scales"]


class TestWithCallbacks:
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
        ("options", "callbacks", "text"),
        [
            ({"recipe": "delayed"}, [Compile()], r"\(recipe='delayed'\) is given with Compile.*Use recipe='current'"),
            ({}, [Compile(fullgraph=True)], r"given with Compile\(fullgraph=True\).*Leave fullgraph out"),
            ({}, [Compile(), ActivationCheckpoint()], "given with ActivationCheckpoint and Compile.*Leave one of"),
        ],
    )
    def test_what_cannot_be_compiled_is_refused(self, tmp_path, options, callbacks, text):
        with pytest.raises(ValueError, match=text):
            fit(tmp_path, TEPrecision(**options), callbacks=callbacks)

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

    def test_modules_of_its_own_in_them_are_warned_of(self, tmp_path, engine):
        class Theirs(engine.Linear):
            __module__ = "transformer_engine.pytorch.module.linear"

        model = Net()
        model.model.layers[1].ffn.down = Theirs(64, 32, bias=False, params_dtype=torch.float32, device="cpu")
        message = r"names model\.layers\.1\.ffn\.down, or what holds it.*in float8 all the same\.$"
        with pytest.warns(UserWarning, match=message):
            fit(tmp_path, TEPrecision(in_float32=PRECISE), model=model)


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


@pytest.mark.parametrize(
    ("given", "first", "cure"),
    [
        ({"recipe": "delay"}, "recipe='delay'", "Use one of ('delayed', 'current', 'block', 'mxfp8', None)"),
        ({"fuse": "some"}, "fuse='some'", "Use one of"),
        ({"recipe": "delayed", "amax_compute": "mean"}, "amax_compute='mean'", "Use one of"),
        ({"number_format": "e5m2"}, "number_format='e5m2'", "Use one of ('hybrid', 'e4m3', None)"),
        ({"recipe": "delayed", "amax_history": 0}, "amax_history=0", "Use 1 or more"),
        ({"amax_history": 16}, "recipe='current') is given with amax_history=16", "Use recipe='delayed', or leave"),
        *(
            ({"recipe": None, **given}, "(recipe=None) is given with", f"or leave {next(iter(given))} out")
            for given in ({"number_format": "e4m3"}, {"evaluate": True}, {"filter": "auto"})
        ),
    ],
    ids=str,
)
def test_what_a_recipe_of_transformer_engine_does_not_take_is_refused(given, first, cure):
    with pytest.raises(ValueError, match=rf"{re.escape(first)}.*{re.escape(cure)}"):
        TEPrecision(**given)


class TestErrors:
    def test_what_cannot_be_on_a_machine_that_is_not_here_is_known_without_it(self):
        settings = DEFAULTS | {"accelerator": "gpu", "devices": 2}
        split = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
        with fake_te.installed(everywhere=False):
            assert TEPrecision().refusal(run_of(Net(), settings, [])) is None
            on_cpu = TEPrecision().refusal(run_of(Net(), DEFAULTS, []))
            assert on_cpu.startswith("TEPrecision(recipe='current') cannot run on cpu: it runs on cuda devices alone.")
            text = TEPrecision().refusal(run_of(Net(), settings | {"strategy": split}, []))
            assert text.endswith("Use tensor_parallel_size=1, or Float8Precision.")

    def test_modules_that_do_not_run(self, tmp_path):
        class Idle(Net):
            def loss(self, batch):
                return self.model.head(self.model.embedding(batch)).square().mean()

        with pytest.raises(RuntimeError, match=r"computed nothing in a training step.*include=\[...\]"):
            fit(tmp_path, TEPrecision(), model=Idle())
        with pytest.warns(UserWarning, match="computed nothing in a training step"):
            fit(tmp_path, TEPrecision(on_no_effect="warn"), model=Idle())

    def test_a_block_that_runs_twice_with_delayed_scaling(self, tmp_path):
        class Twice(Net):
            def loss(self, batch):
                return super().loss(batch) + super().loss(batch)

        with pytest.raises(RuntimeError, match=r"ran twice in one training step.*recipe='current'"):
            fit(tmp_path, TEPrecision(recipe="delayed"), model=Twice())
        fit(tmp_path, TEPrecision(recipe="current"), model=Twice())


# Two ranks


def ddp(precision, folder):
    """Train on half of each batch; return the mean losses, how many scales there are, and whether ranks agree."""
    rank = dist.get_rank()
    with fake_te.installed():
        model, rows, made = Net(), tokens(), precision()
        half = torch.cat([rows[i + 2 * rank : i + 2 * rank + 2] for i in (0, 4)])
        fit(folder, made, model=model, data=DataLoader(half, batch_size=2), strategy="ddp", **TWO)
        scales = [value for state in made.state_dict().get("scales", {}).values() for value in state.values()]
        both = [None, None]
        dist.all_gather_object(both, [v.double().sum().item() for v in (*scales, *model.parameters())])
        losses = torch.tensor(model.losses)
        dist.all_reduce(losses)
        return (losses / 2).tolist(), len(scales), both[0] == both[1]


@pytest.mark.parametrize("precision", [bf16, current, delayed], ids=["bf16", "current", "delayed"])
def test_two_ranks_under_ddp_agree_and_train_as_one_device_on_both_halves(ranks, tmp_path, precision):
    found, num_scales, agree = ranks(ddp, precision, tmp_path)
    near(found, fit(tmp_path, precision(), data=loader(batch=4)).losses, rel=1e-2 if precision is bf16 else 3e-2)
    assert (num_scales > 0) == (precision is delayed)
    assert agree


def alone_in_a_group(folder):
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
    assert ranks(alone_in_a_group, tmp_path) == 0


def sharded(precision, folder, *, kind=Net, epochs=2, ckpt=None, into=None, callbacks=(), **options):
    """Train on two ranks under FSDP2, and return the losses."""
    with fake_te.installed():
        model = kind()
        if into:
            model.on_train_end = lambda: model.trainer.save_checkpoint(into)
        more = {"callbacks": callbacks, "epochs": epochs, "ckpt_path": ckpt, **TWO}
        return fit(folder, precision(), model=model, strategy=FSDP2Strategy(**options), **more).losses


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


FP8 = pytest.mark.parametrize("precision", [current, delayed], ids=["current", "delayed"])


class TestFSDP2:
    def test_it_trains_as_bfloat16_does(self, ranks, tmp_path):
        expected = ranks(sharded, BF16Precision, tmp_path)
        for precision in (bf16, partial(bf16, fuse="all")):
            near(ranks(sharded, precision, tmp_path), expected, rel=1e-2)

    @pytest.mark.parametrize("precision", [current, delayed, in_float32], ids=["current", "delayed", "in_float32"])
    def test_each_recipe_trains_near_one_device(self, ranks, tmp_path, precision):
        near(ranks(sharded, precision, tmp_path), fit(tmp_path, precision()).losses, rel=2e-2)

    @pytest.mark.parametrize("precision", [bf16, current, delayed], ids=["bf16", "current", "delayed"])
    def test_blocks_that_end_with_a_norm(self, ranks, tmp_path, precision):
        train = partial(sharded, kind=PostNorm)
        found, plain = (ranks(train, each, tmp_path) for each in (precision, BF16Precision))
        near(found, plain, rel=2e-2)
        assert found != plain

    @FP8
    def test_recomputed_blocks_train_bit_for_bit_as_without(self, ranks, tmp_path, precision):
        recomputing = partial(sharded, callbacks=[ActivationCheckpoint(save="nothing")])
        assert ranks(recomputing, precision, tmp_path) == ranks(sharded, precision, tmp_path)

    def test_a_sharded_checkpoint_goes_on_exactly(self, ranks, tmp_path):
        whole, path = ranks(sharded, delayed, tmp_path), tmp_path / "half.ckpt"
        ranks(partial(sharded, epochs=1, into=path), delayed, tmp_path)
        assert ranks(partial(sharded, ckpt=path), delayed, tmp_path) == whole[4:]

    def test_scales_go_from_two_ranks_to_one(self, ranks, tmp_path):
        precision, path = partial(delayed, fuse="all"), tmp_path / "full.ckpt"
        whole = ranks(sharded, precision, tmp_path)
        ranks(partial(sharded, epochs=1, into=path, save="full"), precision, tmp_path)
        assert len(torch.load(path, weights_only=True)["TEPrecision"]["scales"]) == 6
        near(fit(tmp_path, delayed(), ckpt_path=path).losses, whole[4:], rel=2e-2)

    def test_a_module_from_the_meta_device_is_the_same(self, ranks, tmp_path):
        found = ranks(partial(sharded, meta_device=True, kind=Late), current, tmp_path)
        assert found == ranks(sharded, current, tmp_path)

    def test_a_second_fit_converts_again(self, ranks, tmp_path):
        assert ranks(two_fits, tmp_path) == ([True] * 16, True)

    def test_what_is_faster_is_found_on_rank_0_and_kept_for_a_second_fit(self, ranks, tmp_path):
        first, second, everywhere = ranks(decided_by_times, tmp_path)
        assert first == second == {"LayerNormLinear": 2, "Linear": 2}
        assert everywhere

    def test_tensor_parallelism_is_refused(self, ranks, tmp_path):
        assert ranks(tensor_parallel, tmp_path).endswith("Use tensor_parallel_size=1, or Float8Precision.")


def two_fits(folder):
    """Return whether the conversion runs in each of two fits, and whether classes are their own after the first."""
    with fake_te.installed():
        model, ran = Net(), []
        model.on_train_batch_end = lambda *_: ran.append(model.trainer.precision_plugin.conversion.calls.total > 0)
        fit(folder, TEPrecision(), model=model, strategy=FSDP2Strategy(), **TWO)
        undone = "__reduce_ex__" not in vars(type(model.model.layers[0].ffn.up))
        fit(folder, TEPrecision(), model=model, strategy=FSDP2Strategy(), **TWO)
        return ran, undone


def decided_by_times(folder):
    """Return what was converted in two fits of one module, and whether ranks agree; rank 1 has no times."""

    def timer(product, recipe):
        assert rank == 0
        total = 1.0 if recipe == "bfloat16" else 0.5
        return Times(forward_ms=total, dgrad_ms=total, wgrad_ms=total)

    rank, seen = dist.get_rank(), []
    with fake_te.installed(), patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / f"cache of {rank}")}):
        model = Net()
        model.on_train_start = lambda: seen.append(dict(model.trainer.precision_plugin.conversion.kinds))
        for _ in range(2):
            precision = TEPrecision(filter="auto", exclude=["model.layers.*.ffn.*"])
            precision.timer = timer
            fit(folder, precision, model=model, epochs=1, strategy=FSDP2Strategy(), **TWO)
    both = [None, None]
    dist.all_gather_object(both, seen)
    return *seen, both[0] == both[1]


def tensor_parallel(folder):
    strategy = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
    with fake_te.installed(), pytest.raises(ValueError, match="is given with tensor parallelism over 2") as error:
        fit(folder, TEPrecision(), strategy=strategy, **TWO)
    return str(error.value)
