import json
from types import SimpleNamespace

import pytest
import torch

from lightning_ups._compat.optional.packages import has
from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.models import HFCausalLM, HFSequenceClassifier
from lightning_ups.models.hf import four_bit
from lightning_ups.models.hf.four_bit import FourBitLinear, full_weights, quantize
from lightning_ups.precision import BF16Precision
from tests.hf_models import BERT, config, packed, pretrained
from tests.models.hf.test_causal_lm import data
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, PEFT and bitsandbytes, about small models
needs_library = pytest.mark.skipif(not has("bitsandbytes"), reason="bitsandbytes quantizes")
WIDE = {"hidden_size": 64, "intermediate_size": 128}
LORA = {"r": 4, "target_modules": "all-linear"}


def module(**options):
    torch.manual_seed(0)
    options = {"config": config(**WIDE), "lora": LORA, "four_bit": True, **options}
    return HFCausalLM(**options, lr=1e-2, warmup_steps=2)


@needs_library
@pytest.mark.parametrize("source", ["config", "pretrained"])
def test_weights_are_those_of_a_full_model_rounded_to_four_bits(tmp_path, source):
    where = {"config": config(**WIDE)} if source == "config" else {}
    where = where or {"config": None, "pretrained": pretrained(tmp_path, **WIDE, tie_word_embeddings=True)}
    small, full = module(**where), module(**where, four_bit=False)
    full.configure_model()
    torch.manual_seed(0)
    small.configure_model()
    expected, found = full.model.state_dict(), full_weights(small.model.state_dict(), dtype=torch.float32)
    assert found.keys() == expected.keys()
    rounded = 0
    for name, tensor in expected.items():
        if "lora_" in name:
            continue
        if torch.equal(found[name], tensor):
            continue
        rounded += 1
        assert "layers." in name
        assert (found[name] - tensor).abs().max() < 0.2 * tensor.abs().max()
    assert rounded == 2 * 7
    layer = small.model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert isinstance(layer, FourBitLinear)
    assert layer.weight.nbytes + layer.scales.nbytes == 128 * 64 / 2 + 128 * 64 / 64 * 4


@needs_library
def test_outputs_and_gradients_are_those_of_the_rounded_weights():
    linear = torch.nn.Linear(64, 32)
    layer = FourBitLinear(linear, *quantize(linear.weight.data))
    rounded = full_weights({f"a.{name}": p for name, p in layer.named_parameters()}, dtype=torch.float32)["a.weight"]
    x = torch.randn(5, 64, requires_grad=True)
    expected = torch.nn.functional.linear(x, rounded, linear.bias)
    torch.testing.assert_close(layer(x), expected)
    (ours,), (theirs,) = (torch.autograd.grad(y.square().sum(), [x]) for y in (layer(x), expected))
    torch.testing.assert_close(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


@needs_library
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed", "callbacks": [ActivationCheckpoint(save="nothing")]},
        {"plugins": [BF16Precision(weights="masters")]},
        pytest.param({"callbacks": [Compile(backend="eager")]}, marks=pytest.mark.slow),
    ],
)
def test_adapters_train(tmp_path, options):
    made, tokens = module(), data(tmp_path)
    before = trainer(tmp_path).validate(made, tokens, verbose=False)[0]["val_loss"]
    kept = {name: p.clone() for name, p in made.model.named_parameters() if not p.requires_grad}
    run = trainer(tmp_path, epochs=3, **options)
    run.fit(made, tokens)
    assert float(run.callback_metrics["val_loss"]) < before - 0.02
    for name, p in made.model.named_parameters():
        if name in kept and p.dtype is torch.uint8:
            assert torch.equal(p, kept[name])


@needs_library
@pytest.mark.parametrize("adapters", ["keep", "merge"])
def test_a_checkpoint_is_loaded_and_exported(ups, tmp_path, adapters):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    where = pretrained(tmp_path / "model", **WIDE)
    made = module(config=None, pretrained=where)
    run = trainer(tmp_path, max_steps=4)
    run.fit(made, data(tmp_path))
    run.save_checkpoint(tmp_path / "a.ckpt")
    tokens = packed((5, 4))[0].tokens
    with torch.no_grad():
        expected = made.eval()(tokens)
        again = HFCausalLM.load_from_checkpoint(tmp_path / "a.ckpt").eval()(tokens)
    torch.testing.assert_close(again, expected)
    done = ups("export", "--checkpoint", "a.ckpt", "--names", "hf", "--adapters", adapters, "--output", "out")
    assert done.code == 0, done.err
    if adapters == "keep":
        found = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(where), "out")
        assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 4
    else:
        found = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    with torch.no_grad():
        difference = (found.eval()(input_ids=tokens).logits - expected).abs().max()
    assert difference < (0.25 if adapters == "keep" else 0.02) * expected.abs().max()


@needs_library
def test_the_head_of_a_classifier_stays():
    made = HFSequenceClassifier(config={**BERT, **WIDE}, lora={"r": 4}, four_bit=True)
    made.configure_model()
    kinds = {name.rpartition(".")[2] for name, m in made.model.named_modules() if isinstance(m, FourBitLinear)}
    assert "classifier" not in kinds
    assert made.loss({"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.tensor([0, 1])}) > 0


def test_a_plan_needs_no_library(monkeypatch):
    monkeypatch.setattr(four_bit, "_library", None)
    made = module()
    with torch.device("meta"):
        made.configure_model()
    layer = made.model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.is_meta
    assert layer.weight.shape == (128, 32)


def test_a_missing_library_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setattr("lightning_ups._compat.optional.packages.RequirementCache", lambda _: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bitsandbytes"):
        four_bit._library()


@pytest.mark.parametrize("lora", [None, {"r": 4, "use_dora": True}, {"r": 4, "init_lora_weights": "pissa"}])
def test_adapters_that_read_the_weights_are_refused(lora):
    with pytest.raises(ValueError, match="do not read the weights below"):
        module(lora=lora)


def test_shards_are_refused():
    made = module()
    made._trainer = SimpleNamespace(strategy=SimpleNamespace(shards=True))
    with pytest.raises(ValueError, match="use strategy='ddp'"):
        made.configure_model()
