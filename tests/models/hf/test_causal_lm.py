import math
import warnings
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_ups.callbacks import Compile
from lightning_ups.data import PackedTokens
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.models import HFCausalLM
from lightning_ups.models.hf import causal_lm as hf_causal_lm
from lightning_ups.precision import BF16Precision
from tests.hf_models import config, packed, pretrained
from tests.strategies.cases import two_ranks
from tests.token_files import random_documents, token_folder
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, Dynamo and transformers, about small models


def module(kind="llama", **options):
    torch.manual_seed(0)
    return HFCausalLM(**({} if "pretrained" in options else {"config": config(kind)}), lr=1e-2, **options)


def built(kind="llama", **options):
    made = module(kind, **options)
    made.configure_model()
    return made.eval()


def data(path, **options):
    folder = path / "tokens"
    if not folder.exists():  # ranks find it
        token_folder(folder, random_documents(200))
    return PackedTokens(str(folder), seq_len=16, batch_size=4, val_fraction=0.2, num_workers=0, **options)


def fit(path, made, *, steps=4, **options):
    run = trainer(path, max_steps=steps, val_check_interval=steps, num_sanity_val_steps=0, **options)
    run.fit(made, data(path))
    return run


@pytest.mark.parametrize("kind", ["cohere", "gemma2", "gpt2", "llama", "mixtral"])
def test_loss_and_gradients_are_those_of_transformers(kind):
    tokens = torch.randint(64, (2, 9))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[1, 6:] = 0
    labels[mask == 0] = labels[0, :3] = -100
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    made = built(kind)
    ours = torch.autograd.grad(made.loss(batch), [*made.model.parameters()])
    loss = made.model(**batch).loss
    torch.testing.assert_close(made.loss(batch), loss)
    for mine, theirs in zip(ours, torch.autograd.grad(loss, [*made.model.parameters()]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_perplexity_is_of_the_tokens_alone_where_experts_are_balanced(tmp_path):
    made = module("mixtral")
    run = fit(tmp_path, made, steps=1)
    total = tokens = 0
    for batch in run.val_dataloaders:
        with torch.no_grad():
            logits = made.eval().model(**made._inputs(batch)[0]).logits.flatten(0, 1)
        targets = batch.targets.long().flatten()
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        tokens += int((targets != -100).sum())
    expected = total / tokens
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(run.callback_metrics["val_perplexity"]) == pytest.approx(math.exp(expected), rel=1e-5)


def test_without_labels_each_token_but_padding_is_predicted():
    made, tokens = built(), torch.randint(64, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    expected = made.loss({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    assert torch.equal(made.loss({"input_ids": tokens, "attention_mask": mask}), expected)
    assert torch.equal(made.loss({"input_ids": tokens}), made.loss({"input_ids": tokens, "labels": tokens}))


def test_logits_are_not_computed_where_the_head_is_plain(monkeypatch):
    made = built()
    monkeypatch.setattr(made.model, "forward", None)
    batch = packed((5, 4))[0]
    assert made.loss(batch) > 0
    made.model.lm_head.forward = lambda hidden: hidden @ made.model.lm_head.weight.T  # as a conversion does
    with pytest.raises(TypeError):
        made.loss(batch)


class EndsEarly(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= 4


def test_logits_are_not_computed_either_where_auto_compiles_the_head(monkeypatch, tmp_path):
    made, calls = module(), []

    def counted(*given):
        calls.append(1)
        return linear_cross_entropy(*given)

    monkeypatch.setattr(hf_causal_lm, "linear_cross_entropy", counted)
    callbacks = [Compile(scope="auto", backend="aot_eager"), EndsEarly()]
    run = trainer(tmp_path, max_steps=100_000, callbacks=callbacks, limit_val_batches=0)
    run.fit(made, data(tmp_path))
    assert len(calls) == run.global_step == 4


def test_perplexity_is_that_of_the_mean_over_tokens(tmp_path):
    made = module()
    values = trainer(tmp_path).validate(made, data(tmp_path), verbose=False)[0]
    losses, tokens = [], []
    with torch.no_grad():
        for batch in made.trainer.val_dataloaders:
            tokens.append(int((batch.targets != -100).sum()))
            losses.append(float(made.loss(batch)) * tokens[-1])
    assert values["val_loss"] == pytest.approx(sum(losses) / sum(tokens))
    assert values["val_perplexity"] == pytest.approx(math.exp(values["val_loss"]))


@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 4, "use_dora": True}])
def test_only_adapters_train(tmp_path, lora):
    made = module(lora=lora)
    made.configure_model()
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    values = fit(tmp_path, made, precision="bf16-mixed").callback_metrics
    changed = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert values["train_loss"] < 5


def losses(path, made, **options):
    return float(fit(path, made, **options).callback_metrics["val_loss"])


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed"}, {"plugins": [BF16Precision()]}, {"plugins": [BF16Precision(weights="masters")]}],
)
def test_training_in_bfloat16_is_as_in_float32(tmp_path, options):
    loss = losses(tmp_path / "bf16", module(), steps=20, **options)
    assert loss == pytest.approx(losses(tmp_path / "fp32", module(), steps=20), abs=0.01)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_compiled_training_is_the_same(tmp_path, lora):
    sample = {"prompt": "w1 w2", "max_new_tokens": 3}
    plain = losses(tmp_path / "plain", module(lora=lora))
    compiled = losses(tmp_path / "compiled", module(lora=lora, sample=sample), callbacks=[Compile(backend="eager")])
    assert compiled == pytest.approx(plain, abs=1e-5)


@two_ranks
def two_devices_train_as_one(path, options):
    from lightning_ups.strategies import FSDP2Strategy

    results, calls = [], []

    def counted(*given):
        calls.append(1)
        return linear_cross_entropy(*given)

    for strategy in ("ddp", FSDP2Strategy()):
        made = module(**options, sample={"prompt": "w1 w2", "max_new_tokens": 3})
        with mock.patch.object(hf_causal_lm, "linear_cross_entropy", counted):
            run = fit(path, made, strategy=strategy, devices=2, precision="bf16-mixed")
        results.append({name: float(value) for name, value in run.callback_metrics.items()})
        assert len(calls) > 4, "logits were computed"
        calls.clear()
    for name, value in results[0].items():
        assert abs(results[1][name] - value) < 2e-3 * value, (name, results)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_two_devices_train_alike_whether_or_not_sharded(ranks, tmp_path, lora):
    folder = pretrained(tmp_path / "model", tie_word_embeddings=lora is None)
    data(tmp_path)
    two_devices_train_as_one(ranks, path=tmp_path, options={"pretrained": folder, "lora": lora})


@two_ranks
def one_graph_trains_as_one(path, folder):
    losses_of = {}
    for strategy, callbacks in (("ddp", []), ("simple_fsdp", [Compile(backend="aot_eager", scope="model")])):
        run = fit(
            path, module(pretrained=folder), strategy=strategy, devices=2, precision="bf16-mixed", callbacks=callbacks
        )
        losses_of[strategy] = float(run.callback_metrics["val_loss"])
    assert abs(losses_of["simple_fsdp"] - losses_of["ddp"]) < 2e-3 * losses_of["ddp"]


@pytest.mark.slow
def test_simple_fsdp_trains_alike(ranks, tmp_path):
    folder = pretrained(tmp_path / "model")
    data(tmp_path)
    one_graph_trains_as_one(ranks, path=tmp_path, folder=folder)


def test_a_sample_is_logged_at_each_validation(tmp_path):
    made = module(sample={"prompt": "w1 w2 w3", "max_new_tokens": 5, "do_sample": True, "temperature": 2.0})
    logger, texts = TensorBoardLogger(tmp_path), []
    logger.experiment.add_text = lambda name, text, step: texts.append((name, text, step))
    trainer(tmp_path, logger=logger).validate(made, data(tmp_path), verbose=False)
    ((name, text, step),) = texts
    assert (name, step) == ("sample", 0)
    assert text.startswith("w1 w2 w3 ")
    assert 3 < len(text.split()) <= 8
    before = torch.get_rng_state()
    made._log_sample(**made.sample)
    assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[1]


def test_a_sample_has_the_models_own_tokenizer_if_the_data_have_none(tmp_path):
    from transformers import PreTrainedTokenizerFast

    from tests.token_files import tokenizer

    folder = pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<eos>").save_pretrained(folder)
    made = module(pretrained=folder, sample={"prompt": "w1 w2", "max_new_tokens": 3})
    with warnings.catch_warnings(record=True):
        loader = torch.utils.data.DataLoader([{"input_ids": torch.arange(9)}], batch_size=1)
        assert trainer(tmp_path).validate(made, loader, verbose=False)[0]["val_loss"] > 0


def test_tokens_without_an_embedding_are_refused(tmp_path):
    made = HFCausalLM(config=config(vocab_size=32))
    with pytest.raises(ValueError, match="Tokenize with the model's own tokenizer"):
        fit(tmp_path, made)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exactly one of the two"),
        ({"pretrained": "a", "config": "b"}, "exactly one of the two"),
        ({"config": "b", "dtype": "half"}, "dtype='half'"),
        ({"config": "b", "schedule": "no"}, "schedule='no'"),
    ],
)
def test_wrong_arguments_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        HFCausalLM(**options)
