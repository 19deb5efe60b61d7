import json
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_ups._compat.optional.packages import has
from lightning_ups.callbacks import LMEval
from lightning_ups.models import HFCausalLM
from tests.chats import chat_tokenizer
from tests.hf_models import pretrained
from tests.models.hf.test_causal_lm import data
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and lm_eval


def module(path):
    torch.manual_seed(0)
    folder = pretrained(path / "model", vocab_size=80)
    chat_tokenizer(folder)
    return HFCausalLM(pretrained=folder)


@pytest.fixture
def library(monkeypatch):
    """Replace lm_eval by what records its calls, and seeds all random numbers as lm_eval does."""
    calls = []

    def simple_evaluate(model, **options):
        calls.append((model, model.pretrained.training, options))
        torch.manual_seed(1234)
        random.seed(0)
        metrics = {
            "alias": "words",
            "acc,none": len(calls) / 4,
            "acc_stderr,none": 0.1,
            "em,strict": 1,
            "sample_len": 3,
        }
        return {"results": {"words": metrics}}

    made, models, face = ModuleType("lm_eval"), ModuleType("lm_eval.models"), ModuleType("lm_eval.models.huggingface")
    made.simple_evaluate, face.HFLM = simple_evaluate, lambda **options: SimpleNamespace(**options)
    for name, part in {"lm_eval": made, "lm_eval.models": models, "lm_eval.models.huggingface": face}.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr("lightning_ups.callbacks.logs.lm_eval.require", lambda *_, **__: made)
    return calls


def test_results_are_logged_and_training_is_not_affected(library, tmp_path):
    losses, logged = [], []
    for callbacks in ([], [LMEval(["words"], limit=2, options={"num_fewshot": 1})]):
        run = trainer(tmp_path, callbacks=callbacks, epochs=2)
        run.fit(module(tmp_path), data(tmp_path))
        losses.append(float(run.callback_metrics["train_loss"]))
        logged.append({name: float(value) for name, value in run.callback_metrics.items() if "/" in name})
    assert losses[0] == losses[1]
    assert logged == [{}, {"words/acc": 0.5, "words/em,strict": 1.0}]
    model, training, options = library[0]
    assert not training
    assert run.lightning_module.model.training
    assert model.tokenizer.encode("w1")
    assert options == {
        "tasks": ["words"], "limit": 2, "num_fewshot": 1, "bootstrap_iters": 0, "log_samples": False
    }  # fmt: skip


def test_every_counts_validations(library, tmp_path):
    trainer(tmp_path, callbacks=[LMEval(["words"], every=2)], epochs=5).fit(module(tmp_path), data(tmp_path))
    assert len(library) == 2


def test_without_the_package_it_is_one_line_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr("lightning_ups._compat.optional.packages.RequirementCache", lambda _: False)
    with pytest.raises(ModuleNotFoundError, match=r"LMEval needs lm_eval.*pip install 'lm_eval"):
        LMEval(["words"]).setup(None, None, "fit")


def test_a_sharded_model_is_refused(library):
    with pytest.raises(ValueError, match="Use strategy='ddp'"):
        LMEval(["words"]).setup(SimpleNamespace(strategy=SimpleNamespace(shards=True)), None, "fit")


@pytest.mark.parametrize("wrong", [{"every": 0}, {"limit": 0}, {"batch_size": 0}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LMEval(["words"], **wrong)


@pytest.mark.slow
@pytest.mark.skipif(not has("lm_eval"), reason="runs a task of lm_eval")
def test_a_task_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [{"question": f"w{i} w2", "choices": ["w3", "w4"], "answer": i % 2} for i in range(8)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    task = {
        "task": "words", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "questions.jsonl")},
        "test_split": "train", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    run = trainer(tmp_path, callbacks=[LMEval([task])], max_steps=1, val_check_interval=1)
    run.fit(module(tmp_path), data(tmp_path))
    assert 0 <= float(run.callback_metrics["words/acc"]) <= 1
