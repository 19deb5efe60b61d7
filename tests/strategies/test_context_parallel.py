"""Context parallelism trains what one device does, in float64."""

import warnings
from types import MappingProxyType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.tensors import all_to_all
from lightning_ups.callbacks import AccelerationFlags, ActivationCheckpoint, Compile, TokenThroughput
from lightning_ups.kernels import attention
from lightning_ups.models import HFCausalLM
from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy
from lightning_ups.transforms.context_parallel import parts, region
from tests.strategies.cases import CASES, WIDTH, Case, data, decoder_of_transformers, on_ranks, train
from tests.toys import trainer


class Criterion(nn.CrossEntropyLoss):
    """That of GPT rounds to float32."""

    def forward(self, input, target):
        return F.cross_entropy(input.flatten(0, 1), target.flatten())


def tokens_of(x):
    return (x * 8).long() % 32


class SplitGpt(Case):
    """Each row ignores other positions, and the last quarter of each is ignored."""

    kv_heads, options = 2, MappingProxyType({})

    def build(self):
        shape = {"dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": self.kv_heads, "ffn_dim": 32}
        self.model = GPT(GPTConfig(**shape, vocab_size=32, max_seq_len=WIDTH, **self.options))
        self.model.criterion = Criterion()
        self.double()

    def targets(self, tokens):
        targets = tokens.roll(-1, 1).masked_fill(tokens % 3 == 0, -100)
        targets[:, WIDTH * 3 // 4 :] = -100
        return targets

    def loss(self, x):
        tokens = tokens_of(x)
        return self.model(tokens, self.targets(tokens))


class OneKvHead(SplitGpt):
    kv_heads, options = 1, MappingProxyType({"qk_norm": True, "tie": True})


class Logits(SplitGpt):
    """The loss is computed from gathered logits."""

    def loss(self, x):
        tokens = tokens_of(x)
        return F.cross_entropy(self.model(tokens).flatten(0, 1), self.targets(tokens).flatten())


class All(SplitGpt):
    """Every target counts, so that the mean over data ranks is that over all samples."""

    def targets(self, tokens):
        return tokens.roll(-1, 1)


class Documents(SplitGpt):
    """Packed rows."""

    def loss(self, x):
        tokens = tokens_of(x)
        documents = attention.Documents.from_ids((tokens < 8).cumsum(1))
        return self.model(tokens, self.targets(tokens), documents)


class Decoder(SplitGpt):
    """Llama of transformers, as its users call it, with padding at the end of rows."""

    def build(self):
        self.model = decoder_of_transformers(layers=2)

    def loss(self, x):
        tokens = tokens_of(x)
        mask = (torch.arange(WIDTH) < 3 + tokens[:, :1] % 6).long()
        labels = tokens.masked_fill((tokens % 3 == 0) | (mask == 0), -100)
        logits = self.model(tokens, attention_mask=mask).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Packed(SplitGpt):
    """A decoder of transformers on packed rows, with this package's loss."""

    def build(self):
        config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.inner = HFCausalLM(config={"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 32, **config})
        self.inner.configure_model()

    def loss(self, x):
        tokens = tokens_of(x)
        starts = (tokens < 8).long()
        starts[:, 0] = 1
        places = torch.arange(WIDTH) * torch.ones_like(tokens)
        positions = places - (places * starts).cummax(1).values
        documents = attention.Documents.from_ids(starts.cumsum(1))
        targets = self.targets(tokens)
        batch = SimpleNamespace(tokens=tokens, targets=targets, positions=positions, documents=documents)
        return self.inner.loss(batch)


class Chunked(SplitGpt):
    options = MappingProxyType({"loss": "chunked"})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Trunk(nn.Module):
    """As users write it: the positions are those of its input, unless it is given them."""

    def __init__(self, given):
        super().__init__()
        self.given, self.layers = given, nn.Sequential(Layer(), Layer())
        self.place = nn.Embedding(WIDTH, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x, positions=None):
        if positions is None or not self.given:
            positions = torch.arange(x.shape[1])
        return self.encoder(self.layers(x + self.place(positions)))


class Own(SplitGpt):
    """A module of a user, without anything of this package."""

    given = True

    def build(self):
        self.embedding, self.trunk, self.head = nn.Embedding(32, 16), Trunk(self.given), nn.Linear(16, 32)
        self.double()

    def loss(self, x):
        tokens = tokens_of(x)
        logits = self.head(self.trunk(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), self.targets(tokens).flatten())


class Steps(Own):
    """Its step calls backward and steps the optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch, _):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.detach())


class Counting(Own):
    given = False


class CountingSteps(Steps):
    given = False


for case in (
    SplitGpt,
    OneKvHead,
    Logits,
    All,
    Documents,
    Decoder,
    Packed,
    Chunked,
    Own,
    Steps,
    Counting,
    CountingSteps,
):
    CASES[case.__name__] = case


def check(result, right, rel=1e-10, atol=1e-10):
    assert result["losses"] == pytest.approx(right["losses"], rel=rel, abs=0)
    assert right["losses"][-1] != right["losses"][0]
    for name, weight in right["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=rel * 10, atol=atol)


def split(name, folder, strategy, ranks, size=2, options=None):
    strategy = {"context_parallel_size": size, **strategy}
    return on_ranks(name, folder, strategy, ranks, {"data_ranks": ranks // size, **(options or {})})


TRUNK = {"context_parallel_module": "trunk"}
STRATEGIES = {"Own": TRUNK, "Steps": TRUNK}


@pytest.mark.parametrize("name", ["SplitGpt", "OneKvHead", "Logits", "Documents", "Decoder", "Own", "Steps"])
def test_two_ranks_are_one_device(ranks, tmp_path, name):
    check(ranks(split, name, tmp_path, STRATEGIES.get(name, {}), 2), train(name, tmp_path / "one")[2])


@pytest.mark.parametrize("strategy", [{}, {"sharding": "none"}, {"reshard_after_forward": False}], ids=repr)
def test_four_ranks_are_one_device(four_ranks, tmp_path, strategy):
    check(four_ranks(split, "OneKvHead", tmp_path, strategy, 4, 4), train("OneKvHead", tmp_path / "one")[2])


@pytest.mark.parametrize("strategy", [{}, {"replicate_size": 2}], ids=repr)
def test_two_data_ranks_of_two_are_one_device(four_ranks, tmp_path, strategy):
    options = {"accumulate": 2, "gradient_clip_val": 0.1}
    result = four_ranks(split, "All", tmp_path, strategy, 4, 2, options)
    check(result, train("All", tmp_path / "one", **options)[2])


@pytest.mark.parametrize("name", ["Packed", "Chunked"])
def test_the_loss_from_hidden_states_is_that_of_one_device(ranks, tmp_path, name):
    check(ranks(split, name, tmp_path, {}, 2), train(name, tmp_path / "one")[2], rel=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SplitGpt", "Packed", "Own"])
def test_in_bfloat16_two_ranks_are_one_device(ranks, tmp_path, name):
    options = {"precision": "bf16-mixed"}
    result = ranks(split, name, tmp_path, STRATEGIES.get(name, {}), 2, 2, options)
    check(result, train(name, tmp_path / "one", **options)[2], rel=1e-2, atol=5e-3)


class Single(SplitGpt):
    """In float32, as precisions expect."""

    def build(self):
        super().build()
        self.float()


CASES["Single"] = Single
PRECISIONS = {"masters": lambda: BF16Precision(weights="masters"), "float8": lambda: Float8Precision(emulate=True)}


def split_in(precision, folder, size):
    strategy = FSDP2Strategy(context_parallel_size=2) if size == 2 else "auto"
    options = {"plugins": [PRECISIONS[precision]()], "data_ranks": 1}
    return train("Single", folder, strategy=strategy, ranks=size, **options)[2]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_a_precision_of_this_package_two_ranks_are_one_device(ranks, tmp_path, precision):
    right = split_in(precision, tmp_path / "one", 1)
    check(ranks(split_in, precision, tmp_path, 2), right, rel=5e-2, atol=0.1)  # float8 rounds as much without


def evaluations(folder, name, strategy, devices):
    warnings.simplefilter("ignore")
    module, losses = CASES[name](), []
    module.on_validation_epoch_end = lambda: losses.append(module.trainer.callback_metrics["val_loss"].item())
    loader = DataLoader(data(), batch_size=16)
    lightning = trainer(folder, strategy=strategy, devices=devices, epochs=2)
    lightning.fit(module, loader, loader)
    lightning.validate(module, loader, verbose=False)
    return losses


def split_evaluations(folder, name):
    strategy = FSDP2Strategy(context_parallel_size=2, **STRATEGIES.get(name, {}))
    return evaluations(folder, name, strategy, 2)


@pytest.mark.parametrize("name", ["SplitGpt", "Own"])
def test_evaluations_are_those_of_one_device(ranks, tmp_path, name):
    right = evaluations(tmp_path, name, "auto", 1)
    assert len(right) == 4, "one of the sanity check, two in fit, one after it"
    assert ranks(split_evaluations, tmp_path, name) == pytest.approx(right, rel=1e-10, abs=0)


CALLBACKS = {
    "recomputed": lambda: [ActivationCheckpoint()],
    "compiled": lambda: [Compile(backend="aot_eager")],
    "both": lambda: [Compile(backend="aot_eager"), ActivationCheckpoint()],
    "routed": lambda: [AccelerationFlags(attention="math"), Compile(backend="aot_eager")],
    "measured": lambda: [TokenThroughput(warmup_steps=1, inspect_at=2, peak_tflops=1.0)],  # by copies of the model
    "compiled loss": lambda: [Compile(backend="aot_eager", losses=True)],
}


def split_with_callbacks(name, folder, callbacks):
    return split(name, folder, STRATEGIES.get(name, {}), 2, 2, {"callbacks": CALLBACKS[callbacks]()})


@pytest.mark.parametrize(
    ("name", "callbacks"),
    [
        ("SplitGpt", "recomputed"),
        ("SplitGpt", "compiled"),
        ("SplitGpt", "measured"),
        ("SplitGpt", "routed"),
        ("Documents", "both"),
        ("Decoder", "both"),
        ("Own", "both"),
        ("Logits", "compiled loss"),
    ],
)
def test_with_callbacks_two_ranks_are_one_device(ranks, tmp_path, name, callbacks):
    check(ranks(split_with_callbacks, name, tmp_path, callbacks), train(name, tmp_path / "one")[2])


def saved(folder):
    strategy = FSDP2Strategy(context_parallel_size=2, save="full")
    _, lightning, _ = train("SplitGpt", folder, strategy=strategy, ranks=2, data_ranks=1)
    lightning.save_checkpoint(folder / "two.ckpt")


def test_a_checkpoint_is_that_of_one_device(ranks, tmp_path):
    ranks(saved, tmp_path)
    state, model = torch.load(tmp_path / "two.ckpt")["state_dict"], SplitGpt()
    model.load_state_dict(state)
    for name, weight in train("SplitGpt", tmp_path / "one")[2]["weights"].items():
        torch.testing.assert_close(state[name], weight, rtol=1e-9, atol=1e-10)


def wrong_order(tensor, group):
    return tensor.chunk(group.size(), dim=1)[group.size() - 1 - group.rank()]


def no_exchange(ctx, grad):
    return grad, None, None


def unscaled(ctx, grad):
    return parts._part(grad, ctx.group), None


FAULTS = {
    "chunks in the wrong order": (parts, "_part", wrong_order, "SplitGpt"),
    "gradients are not exchanged": (all_to_all._AllToAll, "backward", staticmethod(no_exchange), "SplitGpt"),
    "a gathered gradient is not scaled": (parts._Gather, "backward", staticmethod(unscaled), "Logits"),
    "counts are not used": (parts._Average, "backward", staticmethod(no_exchange), "SplitGpt"),
    "positions begin anew": (
        region.ContextParallel,
        "_rotation",
        lambda self, whole: lambda table, x: whole(table, x),
        "SplitGpt",
    ),
}


def split_with(fault, folder):
    owner, name, wrong, case = FAULTS[fault]
    with patch.object(owner, name, wrong):
        return split(case, folder, {}, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(ranks, tmp_path, fault):
    right, wrong = train(FAULTS[fault][-1], tmp_path / "one")[2], ranks(split_with, fault, tmp_path)
    with pytest.raises(AssertionError):
        check(wrong, right)


def refused(ranks, function, *arguments):
    with pytest.raises(AssertionError) as error:
        ranks(function, *arguments)
    return str(error.value)


@pytest.mark.parametrize("name", ["Counting", "CountingSteps"])
def test_a_module_that_counts_positions_is_refused(ranks, tmp_path, name):
    text = refused(ranks, split, name, tmp_path, TRUNK, 2)
    assert "context_parallel_module='trunk'" in text
    assert "positions" in text


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [
        ("Own", {}, "Give context_parallel_module"),
        ("Own", {"context_parallel_module": "trunks"}, "no submodule of Own"),
        ("Own", {"context_parallel_module": "trunk.encoder"}, "outside of the forward of trunk.encoder"),
        ("SplitGpt", {"context_parallel_size": 3}, "context_parallel_size=3 times replicate_size=1"),
    ],
)
def test_what_cannot_be_split_is_refused(ranks, tmp_path, name, strategy, words):
    assert words in refused(ranks, split, name, tmp_path, strategy, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size"),
        ({"context_parallel_module": "model"}, "no effect"),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": "gpt"},
            "Leave tensor_parallel_size out",
        ),
    ],
)
def test_arguments_that_contradict_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        FSDP2Strategy(**options)
