"""The commands of docs/guides/language_models.md, with a tiny model that needs no network."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from tests.command import folder, ups  # noqa: F401
from tests.hf_models import pretrained
from tests.token_files import WORDS, jsonl, tokenizer

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "language_models.md").read_text()
NAME = "Qwen/Qwen3-0.6B"


def block(language):
    return re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def trained(folder, ups, caplog):  # noqa: F811
    """Do what the page says up to the export; return the command for that."""
    model = pretrained(folder / NAME, "qwen3")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<eos>").save_pretrained(model)
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(1, 60, (20,), generator=generator)) for _ in range(100)]
    jsonl(folder / "data.jsonl", texts)
    run = yaml.safe_load(block("yaml"))
    run["data"]["init_args"] |= {"seq_len": 16, "num_workers": 0}
    run["trainer"] |= {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 2, "accelerator": "cpu"}
    run["trainer"] |= {"logger": False, "enable_progress_bar": False, "precision": "32-true"}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
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
