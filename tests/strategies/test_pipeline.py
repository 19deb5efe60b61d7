"""Pipeline parallelism trains what one device does, in float64."""

import os
import random
import warnings
from contextlib import chdir
from functools import partial
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning import seed_everything
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ups.__main__ import main
from lightning_ups._compat.torch.pipelining import PipelineStage
from lightning_ups.callbacks import ActivationCheckpoint, Compile, TokenThroughput
from lightning_ups.models import HFCausalLM
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.order.precision import stepping
from lightning_ups.strategies import FSDP2Strategy, fsdp2, pipeline
from lightning_ups.transforms.pipeline import split_batch
from tests.ranks import Ranks
from tests.strategies import cases
from tests.strategies.cases import CASES, WIDTH, Case, data, decoder_of_transformers, weights_of
from tests.toys import trainer


class Criterion(nn.CrossEntropyLoss):
    """That of GPT rounds to float32."""

    def forward(self, input, target):
        return F.cross_entropy(input.flatten(0, 1), target.flatten())


class Recording(Case):
    """Records the loss that all ranks get."""

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].double())


class Staged(Recording):
    """Our GPT."""

    layers, options = 4, MappingProxyType({})

    def build(self):
        shape = {"dim": 16, "num_layers": self.layers, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32}
        self.model = GPT(GPTConfig(**shape, vocab_size=32, max_seq_len=WIDTH, **self.options))
        self.model.criterion = Criterion()
        self.double()

    def loss(self, x):
        tokens = (x * 8).long() % 32
        return self.model(tokens, tokens.roll(-1, 1))


class Adam(Staged):
    """With a state for each parameter, in two groups."""

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.ndim > 1]
        gains = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": gains}, {"params": weights, "weight_decay": 0.1}], lr=0.01, eps=1e-3)


class Tied(Staged):
    options = MappingProxyType({"tie": True})


class Logits(Staged):
    """The step computes the loss itself."""

    def loss(self, x):
        tokens = (x * 8).long() % 32
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Decoder(Recording):
    """Llama of transformers, which computes its loss itself; blocks get masks and rotary tables."""

    def build(self):
        self.model = decoder_of_transformers(layers=4)

    def loss(self, x):
        tokens = (x * 8).long() % 32
        mask = (torch.arange(WIDTH) < 3 + tokens[:, :1] % 6).long()
        logits = self.model(tokens, attention_mask=mask).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Gpt2(Decoder):
    """With learned positions, and a head of its own."""

    def build(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": 32, "n_positions": WIDTH}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(GPT2Config(**shape, **none, tie_word_embeddings=False)).double()


class Causal(Recording):
    """This package's module for transformers, with its loss from hidden states."""

    def build(self):
        config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.inner = HFCausalLM(config={"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 32, **config})
        self.inner.configure_model()

    def loss(self, x):
        return self.inner.loss({"input_ids": (x * 8).long() % 32})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x, *, scale):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Own(Recording):
    """A module of a user, without anything of this package."""

    def build(self):
        self.stem = nn.Linear(WIDTH, 16)
        self.trunk = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(4))})
        self.head = nn.Linear(16, WIDTH)
        self.double()

    def before(self, x):
        return x

    def run(self, x):
        h = self.stem(self.before(x))
        for layer in self.trunk["layers"]:
            h = layer(h, scale=x[:, :1])
        return self.head(h)

    def loss(self, x):
        x = x.double()
        return (self.run(x) - x.sin()).square().mean()


class Scaled(Own):
    """With a scalar, which is not sharded, and a parameter of the module itself."""

    def build(self):
        self.gain, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(WIDTH))
        super().build()

    def before(self, x):
        return self.gain * x + self.shift


class Conditioned(Scaled):
    """Blocks have a second input that trained parameters compute."""

    def loss(self, x):
        return (self.run(self.before(x.double())) - x.sin()).square().mean()


class Measured(Staged):
    """Logs a mean, a metric and a number in training and validation."""

    def build(self):
        super().build()
        self.mean, self.seen = MeanMetric(), []

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"rows": float(len(batch)), "twice": 2 * loss}, on_epoch=True, on_step=False)
        self.log("all_rows", float(len(batch)), reduce_fx="sum", on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch, _):
        loss = self.loss(batch)
        self.mean.update(loss, len(batch))
        self.log("val_mean", self.mean)
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.seen.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})


class Manual(Own):
    automatic_optimization = False


class OwnBackward(Own):
    def backward(self, loss):
        (loss * 0.1).backward()


class OwnClip(Own):
    def configure_gradient_clipping(self, *_):
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Frozen(Own):
    """Nothing is left to train on the first rank."""

    def build(self):
        super().build()
        for part in (self.stem, *self.trunk["layers"][:2]):
            part.requires_grad_(False)


class Supervised(Own):
    """The loss reads the hidden states after the first block."""

    def run(self, x):
        h = seen = self.stem(x)
        for number, layer in enumerate(self.trunk["layers"]):
            h = layer(h, scale=x[:, :1])
            seen = h if number == 0 else seen
        return self.head(h + seen)


class Balanced(Own):
    """Blocks keep a loss of their own, which the step adds."""

    def run(self, x):
        out = super().run(x)
        return out + sum(layer.balance for layer in self.trunk["layers"])

    def build(self):
        super().build()
        for layer in self.trunk["layers"]:
            layer.__class__ = Balancing


class Balancing(Layer):
    balance = 0.0

    def forward(self, x, *, scale):
        out = super().forward(x, scale=scale)
        self.balance = out.square().mean()
        return out


class Decayed(Own):
    """The loss reads all parameters."""

    def loss(self, x):
        return super().loss(x) + 0.1 * sum(p.square().sum() for p in self.parameters() if p.requires_grad)


class Drawn(Own):
    """Draws what the loss reads before the blocks; a hook draws on one rank alone."""

    def loss(self, x):
        factor, noise = random.random() + np.random.rand(), torch.randn_like(x.double())
        self.draws = {**getattr(self, "draws", {}), x.sum().item(): (factor, noise.sum().item())}
        return (self.run(x + noise) * factor - noise).square().mean()

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        if self.global_rank == 0:
            torch.randn(3), random.random()


class Normalized(Own):
    """With statistics before and after the blocks."""

    def build(self):
        super().build()
        self.stem = nn.Sequential(self.stem, nn.BatchNorm1d(16, affine=False).double())
        self.head = nn.Sequential(nn.BatchNorm1d(16, affine=False).double(), self.head)


class OnMeta(Staged):
    """Built without memory, where there are several ranks."""

    def build(self):
        pass

    def configure_model(self):
        if not hasattr(self, "model"):
            torch.manual_seed(0)  # Lightning seeds anew where there are several processes
            with torch.device("meta" if self.trainer.world_size > 1 else "cpu"):
                super().build()


class Skipping(Own):
    """What comes after the blocks reads what comes before them."""

    def run(self, x):
        return super().run(x) + self.stem(x)[:, :WIDTH]


for case in (
    Staged,
    Adam,
    Tied,
    Logits,
    Decoder,
    Gpt2,
    Causal,
    Own,
    Scaled,
    Conditioned,
    Measured,
    Manual,
    OnMeta,
    Skipping,
    OwnBackward,
    OwnClip,
    Frozen,
    Supervised,
    Balanced,
    Decayed,
    Drawn,
    Normalized,
):
    CASES[f"Pipeline{case.__name__}"] = case  # other files have cases of these names


def train(name, *args, **options):
    return cases.train(f"Pipeline{name}", *args, **options)


def all_weights(model):
    """Return the weights of all stages."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, weights_of(model))
    return {name: weight for weights in found for name, weight in weights.items()}


def piped(name, folder, strategy, ranks, options=None):
    made = FSDP2Strategy(**{"pipeline_parallel_size": 2, **strategy})
    data_ranks = ranks // made.pipeline_parallel_size // made.tensor_parallel_size
    model, _, result = train(name, folder, strategy=made, ranks=ranks, data_ranks=data_ranks, **(options or {}))
    return {"losses": result["losses"], "weights": all_weights(model)}


def check(result, right, rel=1e-10, atol=1e-10):
    assert result["losses"] == pytest.approx(right["losses"], rel=rel, abs=0)
    assert right["losses"][-1] != right["losses"][0]
    assert {*result["weights"]} == {*right["weights"]}
    for name, weight in right["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=rel * 10, atol=atol)


@pytest.mark.parametrize("name", ["Staged"])
@pytest.mark.parametrize("schedule", ["1F1B", "interleaved", "zero-bubble"])
def test_two_stages_are_one_device(ranks, tmp_path, name, schedule):
    result = ranks(piped, name, tmp_path, {"schedule": schedule, "microbatches": 4}, 2)
    check(result, train(name, tmp_path / "one")[2])


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({}, {}),
        ({"schedule": "zero-bubble"}, {"accumulate": 2, "gradient_clip_val": 0.1}),
        ({"sharding": "none"}, {"gradient_clip_val": 0.1}),
        ({"replicate_size": 2, "schedule": "interleaved", "microbatches": 2}, {"accumulate": 2}),
        ({"pipeline_parallel_size": 4, "microbatches": 8}, {"gradient_clip_val": 0.1}),
    ],
    ids=repr,
)
def test_four_ranks_are_one_device(four_ranks, tmp_path, strategy, options):
    result = four_ranks(piped, "Staged", tmp_path, {"microbatches": 4, **strategy}, 4, options)
    check(result, train("Staged", tmp_path / "one", **options)[2])


def run_on(strategy, folder, epochs, *, stages=None, resume=None):
    """Train to an epoch, from a checkpoint or not, and save one."""
    made, size = "auto", 1
    if strategy is not None:
        size, made = stages or 1, FSDP2Strategy(**strategy)
    seed_everything(3, verbose=False)
    model = CASES["PipelineAdam"]()
    lightning = trainer(folder, epochs=epochs, strategy=made, devices=size)
    lightning.fit(model, DataLoader(data(), batch_size=16), ckpt_path=resume)
    lightning.save_checkpoint(folder / f"{epochs}.ckpt")
    return all_weights(model) if dist.is_initialized() else weights_of(model)


ON_DEVICES = {
    "file": (None, 1),
    "folder": ({}, 1),
    "1F1B": ({"pipeline_parallel_size": 2, "microbatches": 4}, 2),
    "zero-bubble": ({"pipeline_parallel_size": 2, "schedule": "zero-bubble"}, 2),
    "shards": ({}, 2),
}


@pytest.mark.parametrize(
    ("first", "then"),
    [("1F1B", "folder"), ("file", "1F1B"), ("folder", "zero-bubble"), ("zero-bubble", "1F1B"), ("1F1B", "shards")],
)
def test_checkpoints_are_those_of_one_device(ranks, fresh_process, tmp_path, first, then):
    def run(where, *args, **kwargs):
        strategy, size = ON_DEVICES[where]
        pool = ranks if size == 2 else fresh_process
        return pool(partial(run_on, **kwargs), strategy, tmp_path, *args)

    run(first, 2, stages=ON_DEVICES[first][1])
    weights = run(then, 5, stages=ON_DEVICES[then][1], resume=tmp_path / "2.ckpt")
    right = fresh_process(run_on, None, tmp_path / "one", 5)
    assert {*weights} == {*right}
    for name, weight in right.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["Decoder", "Logits", "Own", "Scaled", "Gpt2", "Causal", "OnMeta"])
def test_modules_of_users_are_those_of_one_device(ranks, tmp_path, name):
    right = train(name, tmp_path / "one")[2]
    rel = 1e-5 if name == "Causal" else 1e-10  # its loss rounds to float32
    check(ranks(piped, name, tmp_path, {"microbatches": 4}, 2), right, rel=rel, atol=max(rel / 10, 1e-10))


@pytest.mark.parametrize("name", ["Tied", "Skipping", "Causal"])
def test_with_both_ends_on_one_rank_stages_are_one_device(ranks, tmp_path, name):
    result, rel = ranks(piped, name, tmp_path, {"schedule": "zero-bubble"}, 2), 1e-5 if name == "Causal" else 1e-10
    check(result, train(name, tmp_path / "one")[2], rel=rel, atol=max(rel / 10, 1e-10))


def logged(folder, strategy, ranks):
    seed_everything(3, verbose=False)
    model, rows = CASES["PipelineMeasured"](), DataLoader(data(), batch_size=16)  # Lightning shuffles the rows of ranks
    lightning = trainer(folder, epochs=2, devices=ranks, strategy=strategy)
    lightning.fit(model, rows, DataLoader(data(), batch_size=6))
    tested = lightning.test(model, DataLoader(data(), batch_size=6), verbose=False)
    found = [None] * ranks
    if ranks > 1:
        dist.all_gather_object(found, (model.seen, tested))
    return found if ranks > 1 else (model.seen, tested)


def logged_on_stages(folder, schedule):
    strategy = FSDP2Strategy(pipeline_parallel_size=2, schedule=schedule, microbatches=4)
    return logged(folder, strategy, 2)


@pytest.mark.parametrize("schedule", ["1F1B", "zero-bubble"])
def test_all_ranks_log_the_values_of_one_device(ranks, tmp_path, schedule):
    (right, tested), both = logged(tmp_path / "one", "auto", 1), ranks(logged_on_stages, tmp_path, schedule)
    for seen, results in both:
        for values, wanted in zip(seen, right, strict=True):
            assert values == pytest.approx(wanted | ({"rows": 4.0} if "rows" in wanted else {}), rel=1e-6)
        assert results[0] == pytest.approx(tested[0], rel=1e-6)


def wrong_order(batch, count):
    first, *others = split_batch(batch, count)
    return [*others, first] if dist.get_rank() else [first, *others]


def no_gradient(self, *args, **kwargs):
    grads = backward_one_chunk(self, *args, **kwargs)
    self.bwd_cache = {number: tuple(None if g is None else g * 0 for g in g_) for number, g_ in self.bwd_cache.items()}
    return grads


def skipped(self, stage, number, received):
    out = forward(self, stage, number, received)
    return out * 0 if number == 1 and stage == 0 else out


FAULTS = {
    "microbatches in the wrong order": (pipeline, "split_batch", wrong_order),
    "no gradient is sent": (PipelineStage, "backward_one_chunk", no_gradient),
    "a stage skips a microbatch": (pipeline.Pipeline, "_forward", skipped),
    "the norm is that of one stage": (stepping, "over_stages", lambda norm, group: norm),
    "gradients of scalars are lost": (fsdp2.FSDP2Strategy, "_aside", property(lambda self: {}, lambda self, _: None)),
}
backward_one_chunk, forward = PipelineStage.backward_one_chunk, pipeline.Pipeline._forward


def piped_with(fault, folder, name, options):
    with patch.object(*FAULTS[fault], create=True):
        return piped(name, folder, {"microbatches": 4}, 2, options)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(ranks, tmp_path, fault):
    name, options = "Scaled" if "scalars" in fault else "Staged", {"gradient_clip_val": 0.1}
    right, wrong = train(name, tmp_path / "one", **options)[2], ranks(piped_with, fault, tmp_path, name, options)
    with pytest.raises(AssertionError):
        check(wrong, right)


def refused(ranks, function, *arguments):
    with pytest.raises(AssertionError) as error:
        ranks(function, *arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [
        ("Conditioned", {}, "trunk.layers.2 has a second input"),
        ("Skipping", {}, "The first loss is NaN"),
        ("Supervised", {}, "The first loss is NaN"),
        ("Supervised", {"schedule": "zero-bubble"}, "The first loss is NaN"),
        ("Balanced", {}, "The first loss is NaN"),
        ("Balanced", {"schedule": "zero-bubble"}, "The first loss is NaN"),
        ("Decayed", {}, "The first loss is NaN"),
        ("Decayed", {"schedule": "zero-bubble"}, "The first loss is NaN"),
        ("Manual", {}, "automatic_optimization=False"),
        ("OwnBackward", {}, "OwnBackward.backward"),
        ("OwnClip", {}, "Trainer(gradient_clip_val=1.0)"),
        ("Frozen", {}, "All parameters of Frozen on rank 0 of the pipeline are frozen"),
        ("Tied", {}, "Use schedule='zero-bubble'"),
        ("Staged", {"microbatches": 5}, "A batch of 16 rows cannot be divided into microbatches=5"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused(ranks, tmp_path, name, strategy, words):
    assert words in refused(ranks, piped, name, tmp_path, strategy, 2)


def drawn(folder, schedule):
    made = FSDP2Strategy(pipeline_parallel_size=2, schedule=schedule, microbatches=4)
    model, _, _ = train("Drawn", folder, strategy=made, ranks=2, data_ranks=1)
    found = [None] * 2
    dist.all_gather_object(found, model.draws)
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "zero-bubble"])
def test_all_stages_draw_the_same_numbers_before_the_blocks(ranks, tmp_path, schedule):
    first, second = ranks(drawn, tmp_path, schedule)
    assert first == second


def normalized(folder, schedule):
    made = FSDP2Strategy(pipeline_parallel_size=2, schedule=schedule, microbatches=4)
    model, _, _ = train("Normalized", folder, strategy=made, ranks=2, data_ranks=1)
    found = [None] * 2
    dist.all_gather_object(
        found, {key: value.tolist() for key, value in model.state_dict().items() if ".running" in key}
    )
    return {**found[0], **found[1]}


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_statistics_are_those_of_one_run_of_each_microbatch(ranks, tmp_path, schedule):
    once, result = ranks(normalized, tmp_path / "1F1B", "1F1B"), ranks(normalized, tmp_path, schedule)
    assert {*result} == {f"{place}.running_{name}" for place in ("stem.1", "head.0") for name in ("mean", "var")}
    for name, value in once.items():
        assert result[name] == pytest.approx(value, rel=1e-10)


def uneven(folder):
    lightning = trainer(folder, epochs=1, strategy=FSDP2Strategy(pipeline_parallel_size=2, microbatches=4), devices=2)
    model = CASES["PipelineOwn"]()
    try:
        lightning.fit(model, DataLoader(data()[:14], batch_size=8))
    finally:
        assert not model.losses


def test_a_last_batch_that_does_not_divide_is_refused_before_the_first_step(ranks, tmp_path):
    assert "The last batch of an epoch has 6 rows" in refused(ranks, uneven, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        ({"schedule": "zero-bubble"}, "has no effect"),
        ({"microbatches": 4}, "has no effect"),
        ({"pipeline_parallel_size": 2, "schedule": "gpipe"}, "'zero-bubble'"),
        ({"pipeline_parallel_size": 2, "microbatches": 1}, "Use microbatches=4"),
        ({"pipeline_parallel_size": 2, "offload": True}, "Leave offload out"),
        ({"pipeline_parallel_size": 2, "prefetch": 2}, "Leave prefetch out"),
        ({"pipeline_parallel_size": 2, "context_parallel_size": 2}, "Leave context_parallel_size out"),
        ({"pipeline_parallel_size": 2, "save": "full"}, "lightning_ups export"),
        ({"pipeline_parallel_size": 2, "reshard_after_forward": True}, "Leave reshard_after_forward out"),
    ],
    ids=repr,
)
def test_arguments_that_contradict_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        FSDP2Strategy(**options)


CALLBACKS = {
    "recomputed": lambda: [ActivationCheckpoint()],
    "compiled": lambda: [Compile(backend="aot_eager")],
    "both": lambda: [Compile(backend="aot_eager"), ActivationCheckpoint()],
    "measured": lambda: [TokenThroughput(warmup_steps=1, inspect_at=2, peak_tflops=1.0)],
}


def piped_with_callbacks(name, folder, strategy, callbacks):
    return piped(name, folder, {"microbatches": 4, **strategy}, 2, {"callbacks": CALLBACKS[callbacks]()})


@pytest.mark.parametrize(
    ("callbacks", "schedule"),
    [("recomputed", "1F1B"), ("both", "interleaved"), ("measured", "1F1B"), ("both", "zero-bubble")],
)
def test_with_callbacks_stages_are_one_device(ranks, tmp_path, callbacks, schedule):
    result = ranks(piped_with_callbacks, "Staged", tmp_path, {"schedule": schedule}, callbacks)
    check(result, train("Staged", tmp_path / "one")[2])


def test_tensors_are_split_within_stages(four_ranks, tmp_path):
    strategy = {"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt", "microbatches": 4}
    options = {"gradient_clip_val": 0.1}
    check(four_ranks(piped, "Staged", tmp_path, strategy, 4, options), train("Staged", tmp_path / "one", **options)[2])


@pytest.fixture
def eight_ranks(tmp_path):
    pool = Ranks(8, tmp_path / "store")
    yield pool
    pool.close()


@pytest.mark.slow
def test_stages_shards_and_split_tensors_are_one_device(eight_ranks, tmp_path):
    strategy = {"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt", "schedule": "interleaved", "microbatches": 4}
    options = {"gradient_clip_val": 0.1, "accumulate": 2}
    result = eight_ranks(piped, "Staged", tmp_path, strategy, 8, options)
    check(result, train("Staged", tmp_path / "one", **options)[2])


def in_bfloat16(folder):
    return piped("Staged", folder, {"microbatches": 4}, 2, {"precision": "bf16-mixed"})


def test_in_bfloat16_stages_are_one_device(ranks, tmp_path):
    right = train("Staged", tmp_path / "one", precision="bf16-mixed")[2]
    check(ranks(in_bfloat16, tmp_path), right, rel=1e-2, atol=5e-3)


def twice(folder):
    """Fit a module that an earlier fit has cut."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    model = CASES["PipelineStaged"]()
    for epochs in (2, 3):
        made = FSDP2Strategy(pipeline_parallel_size=2, microbatches=4)
        trainer(folder, epochs=epochs, strategy=made, devices=2).fit(model, DataLoader(data(), batch_size=16))
    return {"losses": torch.stack(model.losses).tolist(), "weights": all_weights(model)}


@pytest.mark.filterwarnings("ignore")
def test_a_second_fit_continues_with_the_stages(ranks, tmp_path):
    model = CASES["PipelineStaged"]()
    for epochs in (2, 3):
        trainer(tmp_path / "one", epochs=epochs).fit(model, DataLoader(data(), batch_size=16))
    check(ranks(twice, tmp_path), {"losses": torch.stack(model.losses).tolist(), "weights": weights_of(model)})


def run_page(text, folder):
    few = ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    with chdir(folder), patch.dict(os.environ, PL_GLOBAL_SEED="0"):  # set by the command line
        Path("run.yaml").write_text(text)
        return main(["fit", "--config", "run.yaml", *few])


def test_the_yaml_of_the_page_runs(ranks, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "guides" / "pipeline_parallel.md"
    text = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    assert ranks(run_page, text, tmp_path) == 0
