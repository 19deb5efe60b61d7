import json
import os
import shlex

import pytest
import yaml

from lightning_ups.__main__ import main
from lightning_ups.commands.starting import recipes
from lightning_ups.insight.memory.plan import Planner
from tests.chats import chat_tokenizer
from tests.hf_models import BERT
from tests.token_files import random_documents, token_folder

FIRST_STEPS = {
    "--preset": "none",
    "--data.batch_size": 2,
    "--trainer.accelerator": "cpu",
    "--trainer.devices": 2,
    "--trainer.num_nodes": 1,
    "--trainer.max_steps": 2,
    "--trainer.val_check_interval": 2,
    "--trainer.limit_val_batches": 1,
    "--trainer.log_every_n_steps": 1,
    "--trainer.enable_model_summary": "false",
}
OF_TOKENS = {"--data.folders": "tokens", "--data.seq_len": 32, "--data.num_workers": 0, "--data.val_fraction": 0.2}
OF_GPT = OF_TOKENS | {"--model.size": "tiny"}
QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
TINY_QWEN = QWEN | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
SHAPES = {"finetune-8b": QWEN, "lora-8b": QWEN, "qlora-70b": LLAMA, "bert-classification": {"model_type": "bert"}}
OF_HF = OF_TOKENS | {"--model.pretrained": "null", "--model.config": json.dumps(TINY_QWEN), "--model.sample": "null"}
SMALL = {
    "bert-classification": {
        "--trainer.devices": 1,
        "--trainer.precision": "32-true",
        "--model.pretrained": "null",
        "--model.config": json.dumps(BERT),
        "--data.tokenizer": "tokenizer",
        "--data.num_workers": 0,
    },
    "gpt-150m": OF_GPT | {"--trainer.devices": 1, "--trainer.callbacks.TextSample.prompt": "w1 w2"},
    "gpt-1b": OF_GPT,
    "finetune-8b": OF_HF,
    "lora-8b": OF_HF | {"--trainer.devices": 1},
    "qlora-70b": OF_HF | {"--model.config": json.dumps(TINY_QWEN | {"hidden_size": 64})},
    "gpt-8b": OF_GPT
    | {"--trainer.strategy.reshard_after_forward": 2, "--trainer.callbacks.Compile.backend": "aot_eager"},
    "gpt-10b-two-24gb": OF_GPT,
    "gpt-70b": OF_GPT
    | {
        "--trainer.strategy.replicate_size": 1,
        "--trainer.strategy.tensor_parallel_size": 2,
        "--trainer.callbacks.Compile.backend": "aot_eager",
    },
    "pde-surrogate": {
        "--trainer.devices": 1,
        "--data.points": 16,
        "--data.trajectories": 2,
        "--data.val_trajectories": 1,
        "--data.frames": 8,
    },
}


def test_all_are_tried():
    assert recipes.names() == sorted(SMALL)


def test_one_line_each(capsys):
    assert main(["recipes"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines, recipes.names(), strict=True):
        assert line.startswith(name)
        assert len(line) <= 130
        assert all(part in line for part in recipes.summary(name))


def test_the_yaml_of_one(capsys):
    assert main(["recipes", "gpt-1b"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["size"] == "1B"


def test_a_name_of_no_recipe(capsys):
    assert main(["recipes", "gpt-1B"]) == 2
    assert "Did you mean 'gpt-1b'?" in capsys.readouterr().err


def command_of(name, command):
    """Return the words of the command in the comments of a recipe."""
    start = "#     python -m lightning_ups "
    (line,) = (line for line in recipes.text(name).splitlines() if line.startswith(start + command))
    return shlex.split(line.removeprefix(start))


def all_but(*fast):
    """Return the parameters of a test which is slow for all recipes but these."""
    marks = {name: () if name in fast else (pytest.mark.slow,) for name in SMALL}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=each) for name, each in marks.items()])


@all_but("gpt-1b")
@pytest.mark.filterwarnings("ignore")  # of peft
def test_the_plan_is_as_the_recipe_says_and_fits(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Planner, "variants", lambda self: iter(()))  # these three take minutes
    monkeypatch.setattr(Planner, "largest_batch", lambda self, variant: None)
    monkeypatch.setattr(Planner, "longest_sequence", lambda self, variant: None)
    monkeypatch.chdir(tmp_path)
    main(["init", name])
    capsys.readouterr()
    # The name of a model would need the network.
    shape = ["--model.pretrained", "null", "--model.config", json.dumps(SHAPES[name])] if name in SHAPES else []
    assert main([*command_of(name, "plan"), *shape, "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["settings"]
    assert planned["fits"]
    assert f"{planned['peak_bytes'] / 2**30:.1f} GiB" == recipes.summary(name)[2]


def trained(folder, words):
    os.chdir(folder)
    assert main(words) == 0


@all_but("pde-surrogate")
@pytest.mark.filterwarnings("ignore")  # of what peft imports
def test_it_trains_at_a_small_size(name, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set by the command line, and put back with this
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if name == "qlora-70b":
        pytest.importorskip("bitsandbytes")
    if name == "bert-classification":
        chat_tokenizer("tokenizer")
        records = ({"text": f"w{index % 60} w1", "label": index % 2} for index in range(40))
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if "--data.folders" in SMALL[name]:
        token_folder("tokens", random_documents(300))
    main(["init", name])
    options = FIRST_STEPS | SMALL[name]
    words = ["fit", "--config", "run.yaml", *(str(word) for pair in options.items() for word in pair)]
    if options["--trainer.devices"] == 1:
        assert main(words) == 0
    else:
        request.getfixturevalue("ranks")(trained, tmp_path, words)
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert len(metrics.read_text().splitlines()) > 2
    assert [*tmp_path.rglob("*.ckpt")]
