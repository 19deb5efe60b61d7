"""Large matrices outside blocks have collectives of their own: when these are issued, and that nothing else changes."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_ups.order import applied
from lightning_ups.strategies import FSDP2Strategy
from tests.strategies import cases
from tests.strategies.test_collectives import NAMES, Count
from tests.toys import trainer


def apart_from(elements):
    return patch("lightning_ups.transforms.apart.LEAST", elements)


class Words(cases.Gpt):
    """A GPT whose embedding and head are large: 32 tokens by 16 channels."""

    tie, loss_of = False, "logits"

    def build(self):
        super().build()
        self.model.config = self.model.config.__class__(
            **{name: getattr(self.model.config, name) for name in self.model.config.__slots__ if name != "loss"},
            loss=self.loss_of,
        )


class Chunked(Words):
    loss_of = "chunked"


class FrozenEmbedding(Words):
    def build(self):
        super().build()
        self.model.embedding.requires_grad_(False)


class FrozenHead(Words):
    def build(self):
        super().build()
        self.model.head.requires_grad_(False)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(cases.Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(cases.WIDTH, 1, batch_first=True)
        self.head = nn.Linear(cases.WIDTH, cases.WIDTH)

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        x = self.blocks(x)[:, None]
        return self.head(self.attention(x, x, x, need_weights=False)[0])[:, 0]


class TwoHeads(Body):
    """Calls another head on each device, as one with a task each does."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(cases.WIDTH, cases.WIDTH)

    def forward(self, x):
        x = self.blocks(x)
        return (self.other if torch.distributed.get_rank() else self.head)(x)


class Attention(cases.Case):
    kind = Body

    def build(self):
        self.model = self.kind()

    def run(self, x):
        return self.model(x).sum(-1)


class Either(Attention):
    kind = TwoHeads


class TwiceBody(Body):
    def forward(self, x):
        return self.head(self.head(self.blocks(x)).tanh())


class Twice(Attention):
    kind = TwiceBody


class ByHand(torch.autograd.Function):
    """A product that no function mode sees."""

    @staticmethod
    def forward(ctx, x, weight):
        assert not isinstance(weight, DTensor)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class ByHandBody(Body):
    def forward(self, x):
        return ByHand.apply(self.blocks(x), self.head.weight) + self.head.bias


class ReadByHand(Attention):
    kind = ByHandBody


class ReadInStep(Attention):
    """Reads the head's weight where not even its root runs."""

    def loss(self, x):
        return super().loss(x) + nn.functional.linear(x, self.model.head.weight).square().mean()


class ManualTwice(Words):
    """Two passes in a step, each with a backward of its own."""

    automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.detach())


class MetaWords(Words):
    """Built where Lightning says that large models should."""

    def build(self):
        pass

    def configure_model(self):
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            with torch.device("meta" if self.trainer.world_size > 1 else "cpu"):
                super().build()


class Toggled(Words):
    """One optimizer for the head, another for the rest, each alone in its turn."""

    automatic_optimization = False

    def training_step(self, batch, _):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        head = [*self.model.head.parameters()]
        rest = [p for p in self.parameters() if all(p is not one for one in head)]
        return torch.optim.SGD(head, lr=0.02), torch.optim.SGD(rest, lr=0.02)


class Generating(Words):
    """Calls its head more often where nothing is trained."""

    def validation_step(self, batch, _):
        for _ in range(3):
            super().validation_step(batch, _)


CASES = {
    case.__name__: case
    for case in (
        Words, Chunked, FrozenEmbedding, FrozenHead, Attention, Twice, ReadByHand, ReadInStep, ManualTwice,
        MetaWords, Toggled, Generating, Either,
    )
}  # fmt: skip


class Order(Count):
    """Lists collectives, with how many elements are whole."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = NAMES.get(func._schema.name.partition("::")[2])
        if kind is not None and first(args).is_floating_point():
            whole = [first(args[0])] if kind == "copies" else [first(args[0]), first(args[1])]
            self.events.append((kind, max(tensor.numel() for tensor in whole)))
        return func(*args, **(kwargs or {}))


def first(args):
    return args if isinstance(args, torch.Tensor) else first(args[0])


def ordered(tmp_path, options, arguments, least):
    """Return what happened in the last optimizer step, in order: collectives, and forwards and backwards of modules."""
    events, kept = [], []

    def watch(model):
        model.on_train_epoch_start = events.clear
        model.on_train_end = lambda: kept.extend(events)
        for name in ("layers.0", "layers.1", "head"):
            module = model.model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: events.append(("forward", name)))
            module.register_full_backward_hook(lambda *_, name=name: events.append(("backward", name)))

    with patch.dict(cases.CASES, CASES), apart_from(least), Order(events):
        strategy = FSDP2Strategy(**options)
        cases.train("Words", tmp_path, strategy=strategy, ranks=2, steps=3, prepare=watch, **arguments)
    return kept


ROOT, BLOCK, HEAD = 32 * 16 + 16, 2336, 32 * 16  # embedding and norm, by themselves, and nothing else


def test_a_head_is_gathered_behind_the_blocks_and_reduced_while_they_run_backward(ranks, tmp_path):
    assert ranks(ordered, tmp_path, {"sharding": "gradients"}, {}, HEAD) == [
        ("gather", ROOT),
        ("gather", BLOCK),
        ("forward", "layers.0"),
        ("gather", BLOCK),
        ("forward", "layers.1"),
        ("gather", HEAD),
        ("forward", "head"),
        ("backward", "head"),
        ("reduce", HEAD),
        ("backward", "layers.1"),
        ("reduce", BLOCK),
        ("backward", "layers.0"),
        ("reduce", BLOCK),
        ("reduce", ROOT),
    ]


def test_the_last_block_is_gathered_ahead_of_the_backward_of_the_head(ranks, tmp_path):
    events = ranks(ordered, tmp_path, {}, {}, HEAD)
    start, end = events.index(("forward", "head")), events.index(("backward", "head"))
    assert events[start + 1 : end] == [("gather", BLOCK)]
    assert events.count(("gather", HEAD)) == 1
    assert events.count(("gather", ROOT)) == 1


def test_what_is_not_large_is_gathered_and_reduced_with_its_root(ranks, tmp_path):
    events = ranks(ordered, tmp_path, {}, {}, HEAD + 1)
    collectives = [event for event in events if event[1] not in ("layers.0", "layers.1", "head")]
    assert collectives[0] == ("gather", ROOT + HEAD)
    assert collectives[-1] == ("reduce", ROOT + HEAD)
    assert {size for _, size in collectives[1:-1]} == {BLOCK}


def test_a_head_stays_whole_between_microbatches_and_is_reduced_after_the_last(ranks, tmp_path):
    events = ranks(ordered, tmp_path, {"sync": "last"}, {"accumulate": 4}, HEAD)
    assert events.count(("forward", "head")) == 4
    assert [events.count((kind, size)) for kind in ("gather", "reduce") for size in (ROOT, HEAD)] == [1, 1, 1, 1]


def test_copies_are_reduced_by_group_too(ranks, tmp_path):
    events = ranks(ordered, tmp_path, {"sharding": "none"}, {}, HEAD)
    assert [event for event in events if event[0] == "copies"] == [("copies", n) for n in (HEAD, BLOCK, BLOCK, ROOT)]


def trained(name, tmp_path, options, arguments, least):
    """Train on ranks; return what came out, what is reported, and what was warned of."""
    reported, said = {}, []

    def note(model):
        model.on_train_end = lambda: reported.update(applied(model.trainer.strategy).report.parts["FSDP2Strategy"])

    with (
        patch.dict(cases.CASES, CASES),
        apart_from(least),
        patch("lightning_ups.strategies.fsdp2.rank_zero_warn", said.append),
    ):
        ranks = torch.distributed.get_world_size()
        strategy = FSDP2Strategy(**options)
        result = cases.train(name, tmp_path, strategy=strategy, ranks=ranks, prepare=note, **arguments)[2]
    return result, reported, said


# What is apart, what its root gathers after all, and what the model gathers.
EXPECTED = {
    "Words": (["model.head"], None, None),
    "Llama": (["model.lm_head"], None, None),
    "Gpt": (None, None, None),  # its weights are tied
    "Chunked": (["model.head"], ["model.head.weight"], None),
    "FrozenEmbedding": (["model.head"], None, None),
    "FrozenHead": (["model.head"], None, None),
    "Attention": (["model.head"], None, None),
    "Twice": (["model.head"], ["model.head.weight", "model.head.bias"], None),
    "ReadByHand": (["model.head"], ["model.head.weight", "model.head.bias"], None),
    "ReadInStep": (["model.head"], None, ["model.head.weight"]),
    "ManualTwice": (["model.head"], None, None),
    "MetaWords": (["model.head"], None, None),
    "Toggled": (["model.head"], None, None),
}


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_training_is_that_of_one_device(ranks, tmp_path, name, expected):
    with patch.dict(cases.CASES, CASES):
        alone = cases.train(name, tmp_path)[2]
        least = 512 if name in ("Llama", "Gpt") or issubclass(CASES[name], cases.Gpt) else 64
    result, reported, said = ranks(trained, name, tmp_path, {}, {}, least)
    assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(result["weights"][key], weight, rtol=1e-4, atol=5e-6)
    names = ("apart", "gathered_with_their_root", "gathered_for_the_step")
    assert tuple(reported.get(key) for key in names) == expected
    assert len(said) == (expected[2] is not None)


WAYS = {
    "bf16": ("Words", {}, {"precision": "bf16-mixed"}),
    "kept": ("Words", {"sharding": "gradients"}, {"accumulate": 2}),
    "every": ("Words", {"sync": "every"}, {"accumulate": 2}),
    "copies": ("Words", {"sharding": "none"}, {}),
    "prefetch": ("Words", {"prefetch": 1}, {}),
    "offload": ("Words", {"offload": True}, {"gradient_clip_val": 0.1}),
    "keeps by itself": ("Words", {"reshard_after_forward": "auto"}, {}),
    "chunked, bf16": ("Chunked", {}, {"precision": "bf16-mixed", "accumulate": 2}),
    "toggled": ("Toggled", {}, {}),
    "manual": ("ManualTwice", {}, {"precision": "bf16-mixed"}),
}


def both_ways(name, tmp_path, options, arguments):
    """Train with a head by itself and without, and return the names of what differs in any bit."""
    with patch("lightning_ups.strategies.fsdp2.least_headroom", lambda _: (2**30, 2**30)):
        (ours, reported, _), (plain, _, _) = (
            trained(name, tmp_path, options, arguments, least) for least in (HEAD, 2**62)
        )
    assert reported["apart"] == ["model.head"]
    different = [key for key, value in plain["weights"].items() if not torch.equal(value, ours["weights"][key])]
    return different + (["losses"] if plain["losses"] != ours["losses"] else [])


@pytest.mark.parametrize(("name", "options", "arguments"), WAYS.values(), ids=WAYS)
def test_not_a_bit_changes(ranks, tmp_path, name, options, arguments):
    assert ranks(both_ways, name, tmp_path, options, arguments) == []


def test_not_a_bit_changes_with_copies(four_ranks, tmp_path):
    assert four_ranks(both_ways, "Words", tmp_path, {"replicate_size": 2}, {}) == []


def two_tasks(tmp_path, strategy):
    strategy = strategy if isinstance(strategy, str) else FSDP2Strategy(**strategy)
    with patch.dict(cases.CASES, CASES), apart_from(64):
        result = cases.train("Either", tmp_path, strategy=strategy, ranks=2)[2]
    return result["weights"]


def test_nothing_is_apart_where_devices_may_call_different_heads(ranks, tmp_path):
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("needs torch 2.13")
    ours = ranks(two_tasks, tmp_path, {"unused_parameters": True})  # ranks that gathered heads alone would wait forever
    for name, weight in ranks(two_tasks, tmp_path, "ddp_find_unused_parameters_true").items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=5e-6)


def test_nothing_is_apart_where_products_are_split(four_ranks, tmp_path):
    options = {"tensor_parallel_size": 2, "tensor_parallel_plan": "gpt"}
    with patch.dict(cases.CASES, CASES):
        alone = cases.train("Words", tmp_path)[2]
    result, reported, _ = four_ranks(trained, "Words", tmp_path, options, {"data_ranks": 2}, HEAD)
    assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert "apart" not in reported


def fits(name, tmp_path, least, devices):
    """Evaluate and train a model twice; return what evaluations found, and whether names and groups stay."""
    found = []
    with patch.dict(cases.CASES, CASES), apart_from(least):
        model = CASES[name]()
        before = [*model.state_dict()]
        for epochs in (2, 2):
            strategy = FSDP2Strategy() if devices > 1 else "auto"
            lightning = trainer(tmp_path, strategy=strategy, devices=devices, epochs=epochs)
            samples = DataLoader(cases.data(), batch_size=cases.SAMPLES // devices)
            found += lightning.validate(model, samples, verbose=False)
            lightning.fit(model, samples)
            found += lightning.validate(model, samples, verbose=False)
    head = model.model.head
    apart = isinstance(head, FSDPModule) and head._get_fsdp_state()._fsdp_param_group is not None
    return [each["val_loss"] for each in found], before == [*model.state_dict()], apart


@pytest.mark.parametrize(("name", "stays"), [("Words", True), ("Chunked", False), ("Generating", True)])
@pytest.mark.filterwarnings("ignore")
def test_evaluations_and_a_second_fit_find_what_the_first_left(ranks, tmp_path, name, stays):
    losses, same_names, apart = ranks(fits, name, tmp_path, HEAD, 2)
    assert losses == pytest.approx(fits(name, tmp_path, HEAD, 1)[0], rel=1e-5)
    assert same_names
    assert apart == stays


def resumed(name, tmp_path, saved_with, resumed_with):
    """Return what differs between four epochs in one go and two and two, with heads apart or not."""
    weights = []
    for epochs, least in (((4,), saved_with), ((2, 4), saved_with)):
        for n in epochs:
            with patch.dict(cases.CASES, CASES), apart_from(resumed_with if n == 4 and len(epochs) == 2 else least):
                model = CASES[name]()
                lightning = trainer(tmp_path, strategy=FSDP2Strategy(), devices=2, epochs=n)
                path = tmp_path / "half" if len(epochs) == 2 and n == 4 else None
                lightning.fit(model, DataLoader(cases.data(), batch_size=4), ckpt_path=path)
                if n == 2:
                    lightning.save_checkpoint(tmp_path / "half")
        weights.append(cases.weights_of(model))
    return [key for key, value in weights[0].items() if not torch.equal(value, weights[1][key])]


@pytest.mark.parametrize(("saved_with", "resumed_with"), [(512, 512), (512, 2**62), (2**62, 512)])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_does_not_know_of_groups(ranks, tmp_path, saved_with, resumed_with):
    assert ranks(resumed, "Words", tmp_path, saved_with, resumed_with) == []
