"""Checkpoints x exports x models: what is exported loads and equals the weights of the run, or is refused by a fix."""

from functools import partial

import pytest
import torch

from lightning_ups.commands.export import main
from lightning_ups.state.checkpoint import load_weights
from tests.commands.test_export import LlamaModule, gpt_module, logits, train
from tests.foreign import import_peft
from tests.models.test_peft_adapters import Adapted


class GPT2Module(LlamaModule):
    """Has tied weights, and names that no other model here has."""

    def __init__(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))


MODELS = {
    "plain": LlamaModule,
    "tied": partial(LlamaModule, tie=True),
    "gpt2": GPT2Module,
    "gpt": gpt_module,
    "lora": Adapted,
    "lora-tied": partial(Adapted, tie=True),
}
EXPORTS = {
    "one-file": ["--format=torch"],
    "plain": [],
    "bfloat16": ["--dtype=bfloat16"],
    "hf": ["--names=hf"],
    "hf-in-parts": ["--names=hf-llama", "--max-shard-size=20KB"],
    "merge": ["--names=hf", "--adapters=merge"],
    "keep": ["--names=hf", "--adapters=keep"],
}


def build(kind, state=None):
    module = MODELS[kind]()
    module.configure_model()
    if state is not None:
        module.load_state_dict(state)
    return module


def save(folder, kind, checkpoint):
    """Train a model, with the weights of the run as another file beside the checkpoint."""
    from lightning_ups.strategies import FSDP2Strategy

    options = {"strategy": "auto", "devices": 1}
    if checkpoint != "file":
        options = {"strategy": FSDP2Strategy(save="full" if checkpoint == "whole-file" else "sharded")}
    module = train(folder, MODELS[kind](), **options)
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in module.state_dict().items()}
    if module.global_rank == 0:
        torch.save(state, folder / "state.pt")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return, for a model and a kind of checkpoint, its folder, and the weights of the run; each run is made once."""
    runs = {}

    def saved(kind, checkpoint):
        if (kind, checkpoint) not in runs:
            folder = tmp_path_factory.mktemp(f"{kind}-{checkpoint}")
            (save if checkpoint == "file" else partial(ranks, save))(folder, kind, checkpoint)
            runs[kind, checkpoint] = folder, torch.load(folder / "state.pt")
            if kind != "gpt":
                model = build(kind).model
                model.config.architectures = ["GPT2LMHeadModel" if kind == "gpt2" else "LlamaForCausalLM"]
                for config in (model.config, *getattr(model, "peft_config", {}).values()):
                    config.save_pretrained(folder)
        return runs[kind, checkpoint]

    return saved


def refusal(kind, checkpoint, export):
    if kind == "gpt2" and export == "hf-in-parts":
        return "is a model of type gpt2. Use --names hf"
    if export == "one-file" and checkpoint != "folder":
        return "one file already"
    if export in ("merge", "keep") and "lora" not in kind:
        return "holds no adapters"
    return "--adapters merge" if export.startswith("hf") and "lora" in kind else None


def by_transformers(output, kind, export):
    from transformers import AutoModelForCausalLM

    if export == "keep":
        return import_peft().PeftModel.from_pretrained(LlamaModule(tie=kind == "lora-tied").model, output)
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    assert model.config.architectures == [type(model).__name__]
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("checkpoint", ["file", "folder", "whole-file"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_exported_equals_the_run(saved, tmp_path, monkeypatch, kind, checkpoint, export):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, state = saved(kind, checkpoint)
    output, options = tmp_path / "out", EXPORTS[export]
    words = [f"--checkpoint={folder / 'trained.ckpt'}", f"--output={output}", *options]
    if checkpoint == "file" and kind != "gpt" and "names" in "".join(options):  # a stock strategy saves no config
        words.append(f"--config={folder / 'config.json'}")
    if cure := refusal(kind, checkpoint, export):
        with pytest.raises(ValueError, match=cure):
            main(words)
        return
    assert main(words) == 0
    if "names" in "".join(options):
        assert (output / "model.safetensors.index.json").exists() == (export == "hf-in-parts")
        found = torch.tensor(logits(by_transformers(output, kind, export)))
        torch.testing.assert_close(found, torch.tensor(logits(build(kind, state).model)), rtol=0, atol=2e-6)
        assert not torch.allclose(found, torch.tensor(logits(build(kind).model)), atol=1e-3), "it was not trained"
        return
    if export == "one-file":
        found = torch.load(output / "checkpoint.ckpt")["state_dict"]
    else:
        load_weights(module := build(kind), output)
        found, dtype = module.state_dict(), torch.bfloat16 if export == "bfloat16" else torch.float32
        state = {name: value.to(dtype).float() for name, value in state.items()}
    torch.testing.assert_close(found, state, rtol=0, atol=0)
