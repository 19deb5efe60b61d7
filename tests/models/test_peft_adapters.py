import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from lightning_ups.commands.export import main
from lightning_ups.models import peft_adapters
from lightning_ups.state.checkpoint import MODELS, described
from tests.commands.test_export import TOKENS, LlamaModule, train
from tests.foreign import import_peft

SCALE = 3 / 2  # lora_alpha / r
LORA = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


class Adapted(LlamaModule):
    def __init__(self, *, tie=False, injected=False, **changed):
        super().__init__(tie=tie)
        peft = import_peft()
        config = peft.LoraConfig(**LORA | changed)
        if injected:
            self.model.add_adapter(config)
        else:
            self.model = peft.get_peft_model(self.model, config)


class Named(Adapted):
    """Its base has a name, which the adapter is to keep, and its head is trained whole."""

    def __init__(self):
        LlamaModule.__init__(self)
        peft = import_peft()
        self.model.name_or_path = "someone/tiny"
        config = peft.LoraConfig(**LORA, modules_to_save=["lm_head"])
        self.model = peft.get_peft_model(self.model, config, adapter_name="mine")


def build(kind):
    return {
        "plain": Adapted,
        "injected": lambda: Adapted(injected=True),
        "named": Named,
        "dora": lambda: Adapted(use_dora=True),
        "pissa": lambda: Adapted(init_lora_weights="pissa"),
    }[kind]()


@torch.no_grad()
def loss_of(model):
    model.eval()
    return float(model(input_ids=TOKENS, labels=TOKENS).loss)


def trained(path, kind):
    """Train on two ranks and return the loss of the trained model, and that of its base."""
    model, whole = train(path, build(kind)), build(kind)
    untrained = loss_of(whole.model)
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    whole.load_state_dict(state)
    return loss_of(whole.model), untrained


def export(path, output, *more, adapters="merge"):
    arguments = ["--checkpoint", path, "--output", output, "--names", "hf", "--adapters", adapters, *more]
    return main([*map(str, arguments)])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("kind", ["injected", "named"])
def test_the_loss_of_what_is_written_is_that_of_the_trained_model(ranks, tmp_path, kind, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected, untrained = ranks(trained, tmp_path, kind)
    assert abs(expected - untrained) > 1e-3
    assert export(tmp_path / "trained.ckpt", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name in merged.state_dict())
    assert loss_of(merged) == pytest.approx(expected, abs=1e-6)

    assert export(tmp_path / "trained.ckpt", tmp_path / "kept", adapters="keep") == 0
    folder = tmp_path / "kept" / ("mine" if kind == "named" else "")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in folder.iterdir()}
    kept = import_peft().PeftModel.from_pretrained(LlamaModule().model, folder)
    assert loss_of(kept) == pytest.approx(expected, abs=1e-6)
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == ("someone/tiny" if kind == "named" else None)
    assert saved["lora_alpha"] == 3


def stock(path, kind="plain"):
    """Train on a stock strategy, whose checkpoint holds no config, and write those of the model into a folder."""
    module = train(path, build(kind), strategy="auto", devices=1)
    module.model.config.architectures = ["LlamaForCausalLM"]
    module.model.config.save_pretrained(path / "configs")
    module.model.peft_config["default"].save_pretrained(path / "configs")
    return module, path / "trained.ckpt", path / "configs" / "config.json"


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_a_stock_strategy_takes_both_configs_and_every_merged_weight_is_w_plus_scaled_b_a(tmp_path):
    module, path, config = stock(tmp_path)
    with pytest.raises(ValueError, match=r"save_pretrained\('configs'\).*--config configs/config\.json"):
        export(path, tmp_path / "none")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "config.json").write_text(config.read_text())
    with pytest.raises(ValueError, match="adapter_config"):
        export(path, tmp_path / "none", "--config", tmp_path / "only" / "config.json")
    export(path, tmp_path / "merged", "--config", config)
    weights, state = load_file(tmp_path / "merged" / "model.safetensors"), module.model.state_dict()
    assert set(weights) == set(LlamaModule().model.state_dict())
    for name, found in weights.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = state.get(f"{layer}.weight")
        if expected is None:
            a, b = (state[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            expected = state[f"{layer}.base_layer.weight"] + SCALE * b @ a
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
def test_another_type_and_files_of_a_limited_size(tmp_path):
    module, path, config = stock(tmp_path)
    more = ("--config", config, "--dtype", "bfloat16")
    export(path, tmp_path / "merged", *more, "--max-shard-size", "20KB")
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists()
    export(path, tmp_path / "kept", *more, adapters="keep")
    kept = load_file(tmp_path / "kept" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.{}weight"
    expected = module.model.state_dict()[name.format("default.")].bfloat16()
    assert torch.equal(kept[name.format("")], expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapters", ["merge", "keep"])
def test_a_written_weight_that_differs_is_an_error(tmp_path, monkeypatch, adapters):
    from safetensors import torch as safetensors

    _, path, config = stock(tmp_path)

    def damaging(tensors, file, **options):
        name = next(name for name in tensors if "q_proj" in name)
        return save(tensors | {name: tensors[name] + 1e-3}, file, **options)

    save = safetensors.save_file
    peft = import_peft()
    places = (sys.modules["transformers.modeling_utils"], sys.modules[peft.PeftModel.__module__])
    monkeypatch.setattr(places[adapters == "keep"], "safe_save_file", damaging)
    with pytest.raises(RuntimeError, match=r"q_proj.* differs from the checkpoint"):
        export(path, tmp_path / "out", "--config", config, adapters=adapters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "adapters", "other"), [("dora", "merge", "keep"), ("pissa", "keep", "merge")])
def test_what_cannot_be_verified_is_refused_and_the_other_way_is_taken(tmp_path, kind, adapters, other):
    module, path, config = stock(tmp_path, kind)
    with pytest.raises(ValueError, match=rf"--adapters {adapters}.*--adapters {other}"):
        export(path, tmp_path / "refused", "--config", config, adapters=adapters)
    export(path, tmp_path / "taken", "--config", config, adapters=other)
    if other == "merge":
        from transformers import AutoModelForCausalLM

        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "taken")
        assert loss_of(merged) == pytest.approx(loss_of(module.model), abs=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["AdaLoraConfig", "IA3Config", "LoHaConfig", "LoKrConfig", "OFTConfig"])
def test_other_adapters_are_kept_and_several_at_once(tmp_path, kind):
    peft, module = import_peft(), Adapted()
    options = {
        "AdaLoraConfig": {"total_step": 9},
        "IA3Config": {"feedforward_modules": []},
    }
    config = getattr(peft, kind)(target_modules=["q_proj"], **options.get(kind, {}))
    module.model = peft.get_peft_model(LlamaModule().model, config)
    if kind in ("LoHaConfig", "LoKrConfig"):
        module.model.add_adapter("second", getattr(peft, kind)(target_modules=["o_proj"]))
    for name, weight in module.named_parameters():
        if module.model.prefix in name:
            torch.nn.init.normal_(weight, std=0.1)
    torch.save({"state_dict": module.state_dict(), MODELS: described(module)}, tmp_path / "trained.ckpt")
    export(tmp_path / "trained.ckpt", tmp_path / "kept", adapters="keep")
    kept = peft.PeftModel.from_pretrained(LlamaModule().model, tmp_path / "kept")
    assert loss_of(kept) == pytest.approx(loss_of(module.model), abs=1e-6)
    if "second" in module.model.peft_config:
        kept.load_adapter(tmp_path / "kept" / "second", "second")
        for model in (kept, module.model):
            model.set_adapter("second")
        assert loss_of(kept) == pytest.approx(loss_of(module.model), abs=1e-6)
    with pytest.raises(ValueError, match="--adapters keep"):
        export(tmp_path / "trained.ckpt", tmp_path / "merged")


@pytest.mark.filterwarnings("ignore")
def test_without_a_choice_both_are_named_and_a_choice_without_adapters_is_refused(tmp_path):
    _, path, _ = stock(tmp_path)
    common = ["--checkpoint", str(path), "--output"]
    with pytest.raises(ValueError, match=r"q_proj.*--adapters merge .*--adapters keep "):
        main([*common, str(tmp_path / "a"), "--names", "hf"])
    with pytest.raises(ValueError, match="--names hf"):
        main([*common, str(tmp_path / "b"), "--adapters", "merge"])
    (tmp_path / "plain").mkdir()
    train(tmp_path / "plain", LlamaModule(), strategy="auto", devices=1)
    with pytest.raises(ValueError, match="holds no adapters"):
        export(tmp_path / "plain" / "trained.ckpt", tmp_path / "c")


def test_only_models_of_transformers_are_built_and_no_config_imports_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(
        peft_adapters, "_built", lambda peft, kind, config, adapters, weights: seen.update(adapters) or 1 / 0
    )
    seen, options = {}, {"merge": True, "dtype": None, "shard": 1}
    config = {**LORA, "peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "this"}
    with pytest.raises(ZeroDivisionError):
        peft_adapters.write({}, {}, "LlamaForCausalLM", {"default": config}, tmp_path, **options)
    assert seen["default"].megatron_config is None
    with pytest.raises(ValueError, match="XLORA"):
        peft_adapters.write({}, {}, "LlamaForCausalLM", {"default": {"peft_type": "XLORA"}}, tmp_path, **options)
    with pytest.raises(ValueError, match='Add it, as in "architectures"'):
        peft_adapters.write({}, {"model_type": "llama"}, "", {}, tmp_path, **options)
    for name in ("pipeline", "NoSuchModel"):
        with pytest.raises(ValueError, match=rf"{name} is not a model of transformers"):
            peft_adapters.write({}, {"model_type": "llama"}, name, {}, tmp_path, **options)
