"""The commands of docs/guides/language_models.md, with a tiny model that needs no network."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from tests.chats import chat_tokenizer, chats, says
from tests.command import folder, ups  # noqa: F401
from tests.hf_models import pretrained
from tests.token_files import WORDS, jsonl

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "language_models.md").read_text()
NAME = "Qwen/Qwen3-0.6B"


def block(language):
    return re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def prepared(folder):  # noqa: F811
    """Make a model, the documents and the run of the page."""
    chat_tokenizer(pretrained(folder / NAME, "qwen3", vocab_size=80))
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(1, 60, (20,), generator=generator)) for _ in range(100)]
    jsonl(folder / "data.jsonl", texts)
    run = yaml.safe_load(block("yaml"))
    run["data"]["init_args"] |= {"seq_len": 16, "num_workers": 0}
    run["trainer"] |= {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 2, "accelerator": "cpu"}
    run["trainer"] |= {"logger": False, "enable_progress_bar": False, "precision": "32-true"}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


@pytest.fixture
def trained(prepared, ups, caplog):  # noqa: F811
    """Do what the page says up to the export; return the command for that."""
    tokenize, fit, export = (shlex.split(line)[3:] for line in block("").splitlines())
    for command in (tokenize, fit):
        done = ups(*command)
        assert done.code == 0, done.err
    assert "step 4: " in caplog.text
    return export


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


@pytest.mark.parametrize("adapters", ["merge", "keep"])
def test_the_exported_model_has_the_logits_of_the_trained_one(trained, ups, adapters):  # noqa: F811
    from peft import PeftModel

    from lightning_ups.models import HFCausalLM

    done = ups(*(adapters if word == "merge" else word for word in trained))
    assert done.code == 0, done.err
    tokens = torch.arange(10)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(NAME)
    before = logits(base, tokens)
    if adapters == "merge":
        exec(compile(block("python"), "language_models.md", "exec"), names := {})
        tuned = names["model"]
    else:
        tuned = PeftModel.from_pretrained(base, "tuned")
    expected = logits(HFCausalLM.load_from_checkpoint("run/tuned.ckpt", map_location="cpu").model, tokens)
    assert not torch.allclose(before, expected, atol=1e-5)
    torch.testing.assert_close(logits(tuned, tokens), expected, atol=1e-6, rtol=1e-5)


def test_a_chat_is_fine_tuned_on_its_answers(prepared, folder, ups, caplog):  # noqa: F811
    from lightning_ups.models import HFCausalLM

    chats(folder / "chat.jsonl", [[says("user", f"w{i} w2"), says("assistant", f"w{i % 7} w3")] for i in range(60)])
    tokenize = next(line for line in PAGE.splitlines() if " --chat " in line)
    for command in (tokenize, block("").splitlines()[1]):
        done = ups(*shlex.split(command)[3:])
        assert done.code == 0, done.err
    assert "<|user|> <eos> <|end|>" in caplog.text, "the prompt as a message, of which the tokenizer knows no word"
    tokens = transformers.AutoTokenizer.from_pretrained("tokens").apply_chat_template(
        [says("user", "w5 w2"), says("assistant", "w5 w3")], return_tensors="pt"
    )["input_ids"]

    def loss(model):
        return torch.nn.functional.cross_entropy(logits(model, tokens)[0, -4:-1], tokens[0, -3:])

    tuned = HFCausalLM.load_from_checkpoint("run/tuned.ckpt", map_location="cpu").model
    assert loss(tuned) < loss(transformers.AutoModelForCausalLM.from_pretrained(NAME))
