"""Pipeline parallelism trains what one device does, in float64."""

from functools import partial
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning import seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.strategies import FSDP2Strategy
from tests.strategies.cases import CASES, WIDTH, Case, data, train, weights_of
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


for case in (Staged, Adam):
    CASES[case.__name__] = case


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
    model = CASES["Adam"]()
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
