"""What Float8Precision and TEPrecision have in common; a double of Transformer Engine takes its place."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ups._compat.optional import packages, te
from lightning_ups.callbacks import ActivationCheckpoint
from lightning_ups.insight.advise.timing_table import Times
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.order import applied
from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision
from tests import fake_te
from tests.toys import trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHAPE = GPTConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, vocab_size=32, max_seq_len=16)
FLOAT8 = {n: partial(Float8Precision, recipe=n, emulate=True) for n in ("tensorwise", "rowwise", "rowwise_with_gw_hp")}
FLOAT8["mxfp8"] = partial(Float8Precision, recipe="mxfp8", emulate=True)
ENGINE = {f"te-{recipe}": partial(TEPrecision, recipe=recipe) for recipe in (None, "delayed", "current", "block")}
EACH = pytest.mark.parametrize("make", (FLOAT8 | ENGINE).values(), ids=FLOAT8 | ENGINE)
BOTH = pytest.mark.parametrize("make", [FLOAT8["tensorwise"], ENGINE["te-current"]], ids=["float8", "te"])


@pytest.fixture(autouse=True)
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with fake_te.installed() as module:
        yield module


class Net(LightningModule):
    """A GPT that remembers its losses."""

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
        self.losses.append(loss.detach())
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
    """Train; the module's losses are numbers afterwards."""
    model = model or Net()
    run = trainer(tmp_path, plugins=[] if precision is None else [precision], **({"epochs": 2} | options))
    run.fit(model, data or loader(), ckpt_path=ckpt_path)
    model.losses = [float(loss) for loss in model.losses]
    return model


def near(found, wanted, rel):
    assert found == pytest.approx(wanted, rel=rel)


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("weights", ["masters", "autocast"])
@EACH
def test_it_trains_near_bfloat16_and_leaves_a_plain_float32_module(tmp_path, make, weights):
    found, expected = (fit(tmp_path, kind(weights=weights)) for kind in (make, BF16Precision))
    in_float8 = make is not ENGINE["te-None"]
    near(found.losses, expected.losses, rel=5e-2 if in_float8 else 1e-2)
    assert found.losses != expected.losses or not in_float8
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert classes(found) == classes(Net())


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@EACH
def test_recomputed_blocks_train_bit_for_bit_as_without(tmp_path, make, save):
    recomputed = fit(tmp_path, make(), callbacks=[ActivationCheckpoint(save=save)])
    assert recomputed.losses == fit(tmp_path, make()).losses


@BOTH
def test_gradients_accumulate_and_are_clipped(tmp_path, make):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    near(fit(tmp_path, make(), **options).losses, fit(tmp_path, BF16Precision(), **options).losses, rel=5e-2)


@BOTH
def test_a_second_fit_and_an_exception(tmp_path, make):
    precision, model, failing = make(), Net(), Net(fail_at=1)
    for _ in range(2):
        fit(tmp_path, precision, model=model, epochs=1)
        assert classes(model) == classes(Net())
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, precision, model=failing)
    assert classes(failing) == classes(Net())
    assert fake_te.FP8GlobalStateManager.quantization_state.metas == []
    fit(tmp_path, precision, model=model, epochs=1)


MOVED = {
    "float8": FLOAT8["tensorwise"],
    "rowwise, masters": partial(FLOAT8["rowwise"], weights="masters"),
    "te": ENGINE["te-current"],
    "te-delayed": ENGINE["te-delayed"],
    "bfloat16": BF16Precision,
    "float32": lambda: None,
}


def halfway(tmp_path, precision):
    """Return the checkpoint of a run after one epoch of two, and the losses of both."""
    path, model = tmp_path / "half.ckpt", Net()

    def on_train_epoch_end():
        if model.current_epoch == 0:
            model.trainer.save_checkpoint(path)

    model.on_train_epoch_end = on_train_epoch_end
    fit(tmp_path, precision, model=model)
    return path, model.losses


class TestCheckpoints:
    """They are those of the plain model."""

    @EACH
    def test_a_resumed_run_goes_on_exactly(self, tmp_path, make):
        path, whole = halfway(tmp_path, make())
        assert fit(tmp_path, make(), ckpt_path=path).losses == whole[4:]

    @BOTH
    def test_names_types_and_groups_are_those_of_the_plain_model(self, tmp_path, make):
        path, _ = halfway(tmp_path, make())
        found = torch.load(path, weights_only=True)
        wanted = torch.load(halfway(tmp_path, BF16Precision())[0], weights_only=True)
        assert [*found["state_dict"]] == [*Net().state_dict()] == [*wanted["state_dict"]]
        assert {type(v) for v in found["state_dict"].values()} == {torch.Tensor}
        assert {v.dtype for v in found["state_dict"].values()} == {torch.float32}
        mine, theirs = (each["optimizer_states"][0] for each in (found, wanted))
        assert mine["param_groups"] == theirs["param_groups"]
        averages = [
            {i: (v["exp_avg"].shape, v["exp_avg"].dtype) for i, v in s["state"].items()} for s in (mine, theirs)
        ]
        assert averages[0] == averages[1]
        assert found.keys() == wanted.keys()

    @pytest.mark.parametrize("to", MOVED)
    @pytest.mark.parametrize("begun", MOVED)
    def test_it_moves_between_precisions(self, tmp_path, begun, to):
        path, whole = halfway(tmp_path, MOVED[begun]())
        near(fit(tmp_path, MOVED[to](), ckpt_path=path).losses, whole[4:], rel=5e-2)


def auto(make, factor=lambda product: 0.5, **options):
    """Return the precision, and what it asked the times of; ``factor`` says how much longer a product takes."""
    precision, asked = make(filter="auto", **options), []

    def timer(product, recipe):
        asked.append((product, recipe))
        total = 1.0 if recipe == "bfloat16" else factor(product)
        return Times(forward_ms=total, dgrad_ms=total, wgrad_ms=total)

    precision.timer = timer
    return precision, asked


def seen_in_fit(tmp_path, precision, **options):
    """Return the model after a fit, what was converted in it, and the report."""
    model, seen = options.pop("model", None) or Net(), []
    model.on_train_start = lambda: seen.append((precision.conversion, applied(model.trainer.strategy).report))
    fit(tmp_path, precision, model=model, callbacks=[ActivationCheckpoint(save="nothing")], **options)
    return model, *seen[0]


class TestAuto:
    """`filter="auto"`, by times that are given."""

    LAYERS = ("attention.qkv", "attention.out", "ffn.gate", "ffn.up", "ffn.down")

    @BOTH
    def test_what_is_faster_is_converted_and_the_rest_says_why_not(self, tmp_path, make):
        precision, asked = auto(make, lambda product: 1.2 if str(product) == "32 x 32 x 32" else 0.5)
        model, conversion, report = seen_in_fit(tmp_path, precision)
        names = {f"model.layers.{i}.{layer}" for i in (0, 1) for layer in self.LAYERS}
        slow = {f"model.layers.{i}.attention.out" for i in (0, 1)}
        assert names & {*conversion.converted} == names - slow
        assert "is not faster: 3 ms in bfloat16, 3.6 ms" in conversion.skipped["model.layers.0.attention.out"]
        assert any(line.startswith("Precision: by times of these products: convert") for line in report.lines())
        near(model.losses, fit(tmp_path, BF16Precision()).losses, rel=5e-2)
        assert asked
        again, more = auto(make)
        fit(tmp_path, again, epochs=1)
        assert not more, "what was timed is timed once"

    @BOTH
    def test_where_nothing_is_faster_it_is_bfloat16(self, tmp_path, make, caplog):
        precision, _ = auto(make, lambda product: 1.1)
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            model = fit(tmp_path, precision)
        assert "leave bfloat16" in caplog.text
        assert not precision.advice.winners
        assert model.losses == fit(tmp_path, BF16Precision()).losses

    @BOTH
    def test_a_number_of_tokens_stands_for_a_step(self, tmp_path, make):
        precision, asked = auto(make, tokens=4096)
        fit(tmp_path, precision, epochs=1)
        assert {product.rows for product, _ in asked} == {4096}

    @BOTH
    def test_outside_of_fit_nothing_is_timed_or_converted(self, tmp_path, make):
        precision, asked = auto(make)
        model, seen = Net(), []
        model.on_validation_start = lambda: seen.append([*precision.conversion.converted])
        trainer(tmp_path, plugins=[precision]).validate(model, loader(), verbose=False)
        assert seen == [[]]
        assert model.validated
        assert not asked

    @BOTH
    def test_without_a_gpu_and_a_table_it_says_what_to_do(self, tmp_path, make):
        with pytest.raises(RuntimeError, match=r"timed on this device: cpu.*give a table"):
            fit(tmp_path, make(filter="auto"))

    @BOTH
    def test_it_does_not_decide_about_what_it_saw_nothing_of(self, tmp_path, make):
        class Idle(Net):
            """Leaves its first batch out."""

            def training_step(self, batch, index):
                return None if index == 0 else super().training_step(batch, index)

        precision, _ = auto(make)
        with pytest.raises(ValueError, match=r"No linear layer of Idle ran.*tokens=16384"):
            fit(tmp_path, precision, model=Idle())
        silent, _ = auto(make, on_no_effect="warn")
        with pytest.warns(UserWarning, match=r"converts nothing\. No linear layer of Idle ran"):
            assert not seen_in_fit(tmp_path, silent, model=Idle())[1].converted
        if make.func is Float8Precision:  # the other also refuses a first step that computes nothing
            told, _ = auto(make, tokens=32)
            assert "model.layers.0.attention.qkv" in seen_in_fit(tmp_path, told, model=Idle())[1].converted

    @BOTH
    def test_a_step_that_fails_on_fake_tensors_is_warned_of(self, tmp_path, make):
        class Reading(Net):
            def training_step(self, batch, index):
                loss = super().training_step(batch, index)
                assert loss.detach().numpy() > 0
                return loss

        precision, _ = auto(make, on_no_effect="warn")
        with pytest.warns(UserWarning, match=r"converts nothing\. Reading\.training_step failed on fake tensors"):
            model, conversion, _ = seen_in_fit(tmp_path, precision, model=Reading())
        assert not conversion.converted
        assert model.losses == fit(tmp_path, BF16Precision()).losses


class Bare(Net):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 3)

    def loss(self, batch):
        return self.model(batch[:, :3].float()).square().mean()


class Casting(Net):
    """Has an autocast of its own."""

    def training_step(self, batch, index):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().training_step(batch, index)


@BOTH
@pytest.mark.parametrize("weights", ["masters", "autocast"])
def test_an_autocast_on_top_changes_little(tmp_path, make, weights):
    found, expected = (fit(tmp_path, make(weights=weights), model=model).losses for model in (Casting(), Net()))
    near(found, expected, rel=5e-2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (FLOAT8["tensorwise"], "No linear layer of Bare can compute in float8.*BF16Precision"),
        (ENGINE["te-current"], "Nothing of Bare can be computed by Transformer Engine.*BF16Precision"),
    ],
    ids=["float8", "te"],
)
@pytest.mark.parametrize("filter", ["all", "auto"])
def test_nothing_to_convert_is_an_error_before_the_first_step_or_a_warning(tmp_path, make, filter, text):
    with pytest.raises(RuntimeError, match=f"{text}.*on_no_effect='warn'"):
        fit(tmp_path, make(filter=filter), model=Bare())
    with pytest.warns(UserWarning, match=text):
        found = fit(tmp_path, make(filter=filter, on_no_effect="warn"), model=Bare())
    assert found.losses == fit(tmp_path, BF16Precision(), model=Bare()).losses


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Float8Precision, r"cannot run on this device: cpu.*capability.*emulate=True"),
        (TEPrecision, r"on cpu: it runs on cuda.*recipe=None"),
        (partial(TEPrecision, recipe="mxfp8"), r"recipe='mxfp8'.*required for MXFP8 execution.*Use another recipe"),
    ],
)
def test_a_device_that_cannot_says_what_to_do(tmp_path, make, text):
    with fake_te.installed(everywhere="mxfp8" in repr(make)), pytest.raises(RuntimeError, match=text):
        fit(tmp_path, make())


@BOTH
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, make):
    missing = partial(te.require, requirement="no-such-package", extra="te", feature="TEPrecision")
    extra = "float8" if make.func is Float8Precision else "te"
    with monkeypatch.context() as patched:  # undone before the double goes
        patched.setattr(te, "_required", missing)
        patched.setattr(packages, "RequirementCache", lambda requirement: False)
        with pytest.raises(ModuleNotFoundError, match=f"{make.func.__name__} needs .*'{extra}'. Run: pip install '"):
            fit(tmp_path, make())


class ByHand(Net):
    def configure_model(self):
        for layer in (*self.model.layers, self.model):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def sharded_by_hand(tmp_path, make):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    with fake_te.installed():
        fit(tmp_path, make(), model=ByHand(), strategy=strategy, devices=2)


@BOTH
def test_a_module_that_its_user_sharded_is_refused(ranks, tmp_path, make):
    text = rf"ByHand was sharded before {make.func.__name__} could convert it.*FSDP2Strategy"
    with pytest.raises(AssertionError, match=text):
        ranks(sharded_by_hand, tmp_path, make)


@BOTH
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": 4096}, " reads tokens and table with filter='auto' alone"),
        ({"table": Path("times.json")}, " reads tokens and table with filter='auto' alone"),
        ({"filter": "auto", "tokens": 0}, "(tokens=0) is out of range"),
        ({"filter": "fast"}, "(filter='fast') is not a known choice."),
        ({"include": []}, "(include=[]) is an empty list."),
        ({"head": True, "include": ["a.*"]}, "(include=['a.*'], head=True)"),
        ({"on_no_effect": "stop"}, "(on_no_effect='stop') is not a known choice."),
    ],
    ids=str,
)
def test_settings_without_effect_are_refused(make, given, text):
    with pytest.raises(ValueError, match=re.escape(f"{make.func.__name__}{text}")):
        make(**given)
    assert make(filter="auto", tokens=4096, table="times.json", include=["a.*"]).tokens == 4096
