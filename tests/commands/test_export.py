import json
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ups.commands import tokenize
from lightning_ups.commands.export import main
from lightning_ups.data import PackedTokens
from lightning_ups.models.gpt import GPTModule
from tests.state.checkpoint import test_loading as saving
from tests.state.checkpoint.test_checksums import flip, saved

TOKENS = torch.arange(34).reshape(2, 17) % 64


class LlamaModule(LightningModule):
    def __init__(self, *, tie=False):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
            max_position_embeddings=32,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, _):
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def gpt_module():
    torch.manual_seed(0)
    return GPTModule(size="tiny", vocab_size=64, max_seq_len=32, lr=1e-2, warmup_steps=1)


def train(path, model, *, strategy="fsdp2", devices=2, **options):
    warnings.simplefilter("ignore")
    saver = ModelCheckpoint(path, filename="trained", every_n_train_steps=2, enable_version_counter=False)
    run = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_steps=2,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **options,
    )
    run.fit(model, DataLoader(TOKENS, batch_size=1))
    return model


@torch.no_grad()
def logits(model):
    model.eval()
    found = model(TOKENS)
    return (found if isinstance(found, torch.Tensor) else found.logits).tolist()


def sharded(path):
    train(path, gpt_module())


def train_compiled(path):
    from lightning_ups.callbacks import Compile

    model = LlamaModule()
    model.configure_callbacks = lambda: [Compile(backend="aot_eager")]
    train(path, model)


def test_what_compile_turns_off_reaches_no_config(ranks, tmp_path):
    ranks(train_compiled, tmp_path)
    (path,) = tmp_path.glob("trained*")
    main(["--checkpoint", str(path), "--output", str(tmp_path / "hf"), "--names", "hf"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["use_cache"] is True


@pytest.mark.filterwarnings("ignore")
def test_one_file_resumes_on_a_single_device(ranks, tmp_path):
    ranks(sharded, tmp_path)
    file = tmp_path / "new" / "one.ckpt"
    main(["--checkpoint", str(tmp_path / "trained.ckpt"), "--output", str(file), "--format", "torch"])
    with pytest.raises(ValueError, match=r"one\.ckpt exists and is not an empty folder"):
        main(["--checkpoint", str(tmp_path / "trained.ckpt"), "--output", str(file), "--format", "torch"])
    saved = torch.load(file, weights_only=True)
    assert saved["global_step"] == 2
    assert saved["hyper_parameters"]["size"] == "tiny"
    module = gpt_module()
    run = Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    run.fit(module, DataLoader(TOKENS, batch_size=2), ckpt_path=file)
    assert run.global_step == 3
    assert int(run.optimizers[0].state[module.model.norm.weight]["step"]) == 3
    loaded = GPTModule.load_from_checkpoint(file, weights_only=True)
    assert torch.equal(loaded.model.norm.weight, saved["state_dict"]["model.norm.weight"])


@pytest.mark.filterwarnings("ignore")
def test_plain_names_and_another_type(tmp_path):
    from safetensors.torch import load_file

    model = train(tmp_path, gpt_module(), strategy="auto", devices=1)
    (tmp_path / "c.json").write_text("{}")
    arguments = ["--checkpoint", tmp_path / "trained.ckpt", "--output", tmp_path / "p", "--config", tmp_path / "c.json"]
    main([*map(str, arguments), "--dtype", "bfloat16"])
    weights = load_file(tmp_path / "p" / "model.safetensors")
    assert set(weights) == set(model.state_dict())
    assert weights["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "p" / "config.json").read_text()) == {}
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "p").iterdir()}
    (tmp_path / "any").touch()
    assert modes["model.safetensors"] == (tmp_path / "any").stat().st_mode, "others may read what they may read of mine"


class Strange:
    pass


class WithStrange(LlamaModule):
    def __init__(self, strange):
        super().__init__()
        self.save_hyperparameters()


def strange(path):
    train(path, WithStrange(Strange()))


def test_what_is_not_trusted_is_left_out_and_told(ranks, tmp_path, capsys):
    ranks(strange, tmp_path)
    arguments = ["--checkpoint", str(tmp_path / "trained.ckpt"), "--format", "torch", "--output"]
    main([*arguments, str(tmp_path / "one")])
    assert (
        "hyper_parameters.strange (tests.commands.test_export.Strange). --trust keeps them." in capsys.readouterr().out
    )
    main([*arguments, str(tmp_path / "all"), "--trust"])
    saved = torch.load(tmp_path / "all" / "checkpoint.ckpt", weights_only=False)
    assert isinstance(saved["hyper_parameters"]["strange"], Strange)


@pytest.mark.parametrize("option", ["--names=hf", "--dtype=bfloat16", "--max-shard-size=1GB", "--config=c.json"])
def test_options_of_safetensors_are_refused_for_one_file(tmp_path, option):
    saved = saving.sharded_file(tmp_path / "c", *saving.trained())
    with pytest.raises(ValueError, match=rf"--format torch takes no {option}: "):
        main(["--checkpoint", str(saved), "--output", str(tmp_path / "o"), "--format", "torch", option])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint=gone"], "does not exist"),
        (["--output=full"], r"--output full .*Name a new one"),
        (["--output=w.ckpt/x"], "Not a directory"),
        (["--formt=torch"], "'--formt'.*'--format'"),
        (["--format=torch"], "one file already"),
        (["--names=hf"], "by --config. Otherwise use --names plain"),
        (["--max-shard-size=big"], "Write it like 5GB"),
        (["--max-shard-size=0"], "Write it like 5GB"),
        (["--config=none.json"], r"--config none\.json"),
        (["--checkpoint=gpt.ckpt", "--names=hf"], "Save the checkpoint from GPTModule"),
    ],
    ids=str,
)
def test_errors(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"a.weight": torch.ones(2)}}, "w.ckpt")
    torch.save({"state_dict": {"layers.0.attention.qkv.weight": torch.ones(2)}}, "gpt.ckpt")
    (tmp_path / "full" / "x").mkdir(parents=True)
    with pytest.raises((ValueError, OSError), match=message):
        main(["--checkpoint", "w.ckpt", "--output", "o", *words])
    assert not [*tmp_path.rglob("*.safetensors")]
    assert not (tmp_path / "o").exists()


def test_a_checkpoint_is_checked_without_writing_anything(tmp_path, capsys):
    path = saved(tmp_path / "a")
    assert main(["--checkpoint", str(path), "--check"]) == 0
    assert f"{len([*path.iterdir()])} files, all as saved" in capsys.readouterr().out
    flip(path / "__0_0.distcp", 8 * 30_000)
    with pytest.raises(ValueError, match=r"__0_0\.distcp does not hold"):
        main(["--checkpoint", str(path), "--check"])
    with pytest.raises(ValueError, match="--output is missing"):
        main(["--checkpoint", str(path)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def with_tokens(path):
    """Return a folder of tokens, each a byte, whose documents end with 256."""
    (path / "texts").mkdir()
    (path / "texts" / "a.txt").write_text("some words, and more of them. " * 40)
    words = ["--source", path / "texts", "--tokenizer", "bytes", "--output", path / "tokens"]
    tokenize.main([*map(str, words)])
    return path / "tokens"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("known", [True, False])
def test_the_tokenizer_of_the_run_is_put_beside_the_weights(tmp_path, capsys, known):
    transformers = pytest.importorskip("transformers")
    data = PackedTokens(with_tokens(tmp_path), seq_len=16, batch_size=2, val_fraction=0, num_workers=0)
    module = GPTModule(size="tiny", vocab_size=257, max_seq_len=32, warmup_steps=1)
    options = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_progress_bar": False}
    run = Trainer(**options, default_root_dir=tmp_path, enable_checkpointing=False)
    run.fit(module, data)
    if not known:
        run.datamodule = None
    run.save_checkpoint(tmp_path / "x.ckpt")
    main(["--checkpoint", str(tmp_path / "x.ckpt"), "--output", str(tmp_path / "hf"), "--names", "hf-llama"])
    config = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").config
    assert (config.bos_token_id, config.eos_token_id) == (None, 256 if known else None)
    said = capsys.readouterr().out
    if known:
        assert "tokenizer.json" in said
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").encode("ab") == data.encode("ab")
    else:
        assert "No tokenizer" in said
