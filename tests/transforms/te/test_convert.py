import copy
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.te.convert import convert_to_te
from lightning_ups.transforms.te.fusions import Fusion
from tests import fake_te
from tests.transforms.contract import CLAUSES, Subject


@pytest.fixture(autouse=True)
def engine():
    with fake_te.installed() as module:
        yield module


def gpt():
    torch.manual_seed(0)
    shape = {"dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "vocab_size": 32}
    model = GPT(GPTConfig(**shape, max_seq_len=16, qk_norm=True))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def of_transformers(name):
    def build():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        config = getattr(transformers, f"{name}Config")(**sizes, **heads, use_cache=False, pad_token_id=0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    return build


MODELS = {"GPT": gpt} | {name: of_transformers(name) for name in ("Llama", "Mistral", "Qwen2", "Gemma2")}


def logits_and_gradients(model):
    torch.manual_seed(1)
    tokens = torch.randint(1, 32, (2, 8))
    model.zero_grad()
    out = model(tokens)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    (logits * torch.randn(logits.shape)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fuse", ["all", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient_are_those_of_the_model(name, fuse):
    model = MODELS[name]()
    names, types = [*model.state_dict()], {n: type(m) for n, m in model.named_modules()}
    expected, wanted = logits_and_gradients(model)
    conversion = convert_to_te(model, fuse=fuse)
    for together in (False, True):
        if together:
            conversion.lay_together()
        logits, gradients = logits_and_gradients(model)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert gradients.keys() == wanted.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, wanted[key], rtol=1e-3, atol=1e-3, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert [*model.state_dict()] == names
    assert conversion.calls.total > 0
    conversion.undo()
    assert {n: type(m) for n, m in model.named_modules()} == types
    logits, _ = logits_and_gradients(model)
    assert torch.equal(logits, expected)


def test_a_fault_in_the_layout_would_be_seen():
    """The comparison above notices halves of a gated network that are swapped."""
    model = gpt()
    expected, _ = logits_and_gradients(model)
    conversion = convert_to_te(model)
    for borrower in conversion.borrowers.values():
        if "fc1_weight" in borrower.slots:
            borrower.slots["fc1_weight"] = borrower.slots["fc1_weight"][::-1]
    logits, _ = logits_and_gradients(model)
    assert (logits - expected).norm() / expected.norm() > 0.01


def test_what_computes_what():
    done = convert_to_te(gpt())
    assert done.kinds == {"LayerNormLinear": 2, "LayerNormMLP": 2, "Linear": 2, "RMSNorm": 4}
    assert done.converted["layers.0.attention_norm"] == "LayerNormLinear"
    assert done.converted["layers.0.attention.q_norm"] == "RMSNorm"
    assert done.converted["layers.0.ffn.gate"] == "LayerNormMLP"
    assert done.skipped == {"norm": "outside the blocks", "head": "outside the blocks"}


def test_patterns_choose():
    done = convert_to_te(gpt(), include=["layers.*.attention.*", "head"], exclude=["layers.1.*.*"], fuse="none")
    assert set(done.converted) == {*(f"layers.0.attention.{n}" for n in ("qkv", "out", "q_norm", "k_norm")), "head"}
    assert done.skipped["layers.1.attention.qkv"] == "excluded by 'layers.1.*.*'"
    assert done.skipped["layers.0.ffn.up"] == "not included"
    assert "head" in convert_to_te(gpt(), head=True).converted


def test_an_excluded_layer_keeps_its_norm_apart():
    done = convert_to_te(gpt(), exclude=["layers.0.ffn.up"])
    assert done.converted["layers.0.ffn_norm"] == "RMSNorm"
    assert done.converted["layers.0.ffn.gate"] == "Linear"
    assert done.apart["layers.0.ffn_norm"] == "layers.0.ffn.up is left out: excluded by 'layers.0.ffn.up'"


def test_what_computes_in_float32_stays_torchs():
    done = convert_to_te(gpt(), in_float32=["layers.0.ffn", "layers.*.attention.q_norm"])
    assert {name for name, why in done.skipped.items() if why == "computes in float32"} == {
        *(f"layers.0.ffn.{name}" for name in ("gate", "up", "down")),
        *(f"layers.{i}.attention.q_norm" for i in range(2)),
    }
    assert done.apart["layers.0.ffn_norm"] == "layers.0.ffn.gate is left out: computes in float32"
    assert done.converted["layers.1.ffn.gate"] == "LayerNormMLP"


def test_a_network_with_a_part_in_float32_is_not_computed_as_one():
    part, model = "model.layers.0.mlp.act_fn", MODELS["Llama"]()
    called = []
    model.get_submodule(part).register_forward_hook(lambda *_: called.append(part))
    done = convert_to_te(model, fuse="all", in_float32=[part])
    logits_and_gradients(model)
    assert called == [part]
    why = "model.layers.0.mlp has a part that computes in float32"
    assert done.apart["model.layers.0.post_attention_layernorm"] == why
    assert done.kinds["LayerNormMLP"] == 1


def test_under_sharding_weights_are_not_joined_unless_asked():
    done = convert_to_te(gpt(), sharded=True)
    assert done.kinds == {"LayerNormLinear": 2, "Linear": 8, "RMSNorm": 6}
    assert "joining them would copy them" in done.apart["layers.0.ffn_norm"]
    assert all(borrower.module.is_fsdp2 for borrower in done.borrowers.values() if borrower.num_products)
    assert convert_to_te(gpt(), sharded=True, fuse="all").kinds["LayerNormMLP"] == 2


class Odd(nn.Module):
    """What is left out, each for its reason."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 24)) for _ in range(2))
        self.norm = nn.RMSNorm(16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.patched = nn.Linear(16, 16)
        self.patched.forward = lambda x: x
        self.own = Own(16, 16)


class Own(nn.Linear):
    def forward(self, x):
        return x


def test_what_does_not_fit_is_named():
    done = convert_to_te(Odd(), head=True)
    assert [*done.converted] == ["layers.0.0", "layers.1.0"]
    assert done.skipped == {
        "layers.0.2": "16 x 24 is no multiple of 16",
        "layers.1.2": "16 x 24 is no multiple of 16",
        "norm": "its eps is None, which depends on the type of the input",
        "attention.out_proj": "nn.MultiheadAttention reads its weight without calling it",
        "patched": "has its own forward",
        "own": "has its own forward",
    }


def gpt2():
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=50)
    return transformers.GPT2LMHeadModel(config)


NAMED = r"lm_head: .* converted: transformers\.pytorch_utils\.Conv1D \(8 of them, 24,576 weights\)\. Use recipe=None"


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: nn.Linear(4, 4), {}, r"Nothing of Linear.*It has no linear layer.*Use BF16Precision"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {"head": True}, r"Nothing of Sequential.*0: 4 x 4 is no multiple of"),
        (gpt, {"in_float32": ["layers.*"]}, r"Nothing of GPT.*layers\.0\..*: computes in float32;.*use BF16Precision"),
        (gpt2, {"in_float8": True}, NAMED),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(16)),
            {"head": True, "in_float8": True},
            r"compute norms alone.*0: 4 x 4 is no multiple of 16\. Use recipe=None",
        ),
        (
            lambda: nn.Sequential(nn.LayerNorm(16)),
            {"head": True, "in_float8": True},
            r"nothing in float8. It has no nn.Linear in its blocks\. Use recipe=None",
        ),
        (
            lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)),
            {"include": ["1"], "in_float8": True},
            r"compute norms alone.*0: not included\. Name linear layers by include=\[\.\.\.\]",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {"head": True}, r"16\. Use BF16Precision\.$"),
        (
            lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(4, 4)),
            {"include": ["1"]},
            r"0: not included; 1: 4 x 4 .*16\. Name others by include=\[\.\.\.\]",
        ),
    ],
)
def test_why_nothing_is_converted_and_norms_alone_are_nothing_in_float8(make, options, text):
    assert re.search(text, convert_to_te(make(), **options).nothing)
    assert convert_to_te(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(16)), head=True).kinds == {"LayerNorm": 1}


def test_modules_of_its_own_are_enough(engine):
    class Theirs(engine.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    model = nn.Sequential(Theirs(16, 16, params_dtype=torch.float32, device="cpu"))
    assert convert_to_te(model).theirs == ["0"]


class Classic(nn.Module):
    """A block that nobody knows: LayerNorm, two readers, and a network with biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.network = nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16))

    def forward(self, x):
        y = self.first(x)
        x = x + self.a(y) * self.b(y)
        return x + self.network(self.second(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Classic() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


OWN = (
    Fusion(norm="blocks.*.first", linears=["blocks.*.a", "blocks.*.b"]),
    Fusion(
        norm="blocks.*.second",
        mlp="blocks.*.network",
        first=["blocks.*.network.0"],
        second="blocks.*.network.2",
        activation="gelu",
    ),
)


def test_fusions_by_patterns():
    torch.manual_seed(0)
    model, value = Stack(), torch.randn(2, 4, 16)
    expected = model(value)
    done = convert_to_te(model, fusions=OWN)
    assert done.kinds == {"LayerNormLinear": 2, "LayerNormMLP": 2}
    torch.testing.assert_close(model(value), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m.blocks[0], "a", nn.Linear(16, 20)), r"16 x 20 is no multiple of 16"),
        (lambda m: setattr(m.blocks[0], "a", nn.Linear(16, 16, bias=False)), "some of the layers have a bias"),
        (lambda m: setattr(m.blocks[0], "a", nn.Linear(32, 16)), "first is 16 wide, and its readers are not"),
        (lambda m: m.blocks[0].a.register_forward_hook(print), "blocks.0.a has hooks"),
        (lambda m: m.blocks[0].a.half(), "weights of different types"),
        (lambda m: setattr(m.blocks[0], "a", nn.Identity()), "blocks.0.a is no linear layer that is known"),
        (lambda m: setattr(m.blocks[0], "first", nn.Identity()), "blocks.0.first is no norm that is known"),
        (lambda m: setattr(m.blocks[0].network, "2", nn.Linear(32, 32)), "does not return the width of the norm"),
        (lambda m: setattr(m.blocks[0].network, "0", nn.Linear(16, 64)), "not as wide as the first layers"),
        (lambda m: setattr(m.blocks[0].network, "forward", lambda x: x), "network has its own forward"),
    ],
)
def test_a_fusion_that_cannot_be_made_is_refused(change, why):
    model = Stack()
    change(model)
    with pytest.raises(ValueError, match=rf"The fusion of blocks\.0\..* cannot be made: .*{why}"):
        convert_to_te(model, fusions=OWN)
    assert not any("__reduce_ex__" in vars(type(m)) for m in model.modules())  # what was converted before it is undone


@pytest.mark.parametrize(
    ("fusions", "text"),
    [
        ((*OWN, Fusion(norm="blocks.*.second", linears=["blocks.*.b"])), "is in another fusion"),
        ((replace(OWN[1], activation="swiglu"),), "'swiglu' needs 2 first layers"),
    ],
)
def test_layers_in_two_fusions_and_a_wrong_number_of_first_layers_are_refused(fusions, text):
    with pytest.raises(ValueError, match=text):
        convert_to_te(Stack(), fusions=fusions)


def test_a_norm_that_another_module_reads_as_well_is_noticed():
    class Both(Classic):
        def forward(self, x):
            self.first(x)
            return self.a(x)

    model = nn.ModuleList([Both()])
    convert_to_te(model, fusions=[Fusion(norm="0.first", linears=["0.a"])], head=True)
    with pytest.raises(RuntimeError, match=r"0\.a was to be computed together with 0\.first.*fuse='none'"):
        model[0](torch.randn(2, 4, 16))


def test_a_copy_is_the_plain_model():
    model = gpt()
    expected, _ = logits_and_gradients(model)
    calls = convert_to_te(model).calls
    logits_and_gradients(model)
    assert calls.total > 0  # it holds, though nobody holds what was returned
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits_and_gradients(twin)[0], expected)


def test_undo_parts_the_memory():
    model = gpt()
    done = convert_to_te(model)
    done.lay_together()
    gate, up = model.layers[0].ffn.gate.weight, model.layers[0].ffn.up.weight
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    done.undo()
    assert gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
    assert gate.untyped_storage().nbytes() == gate.nbytes


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = gpt()
    done = convert_to_te(model)
    model.to_empty(device="cpu")
    model.init_weights()
    done.lay_together()
    assert logits_and_gradients(model)[0].isfinite().all()


# The contract of every transform


@contextmanager
def computed(fusions, model):
    done = convert_to_te(model, fusions=fusions, multiple=1)
    done.lay_together()
    try:
        yield
    finally:
        done.undo()


FUSED = (Fusion(norm="layers.*.norm", linears=["layers.*.qkv"]),)
EXCUSED = {
    "models_share_no_state": "it makes no other numbers, in bfloat16 or float32: only which kernels make them",
    "it_may_be_nested_and_repeated": "what is converted is converted once, and a second conversion is refused",
    "it_compiles_as_one_graph": "a graph ends before each of its modules; refused in order/refusals.py",
}
SUBJECTS = {
    name: Subject(
        name=name,
        change=partial(computed, fusions),
        other=partial(computed, others),
        rtol=1e-5,
        excused=EXCUSED,
    )
    for name, fusions, others in (("te apart", (), FUSED), ("te fused", FUSED, ()))
}
ON_RANKS = "order_with_fully_shard_does_not_matter"


@pytest.mark.parametrize("clause", [clause for clause in CLAUSES if clause not in (ON_RANKS, *EXCUSED)])
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_it_obeys_the_contract(subject, clause):
    CLAUSES[clause](subject)


def on_a_rank(name):
    with fake_te.installed():
        CLAUSES[ON_RANKS](SUBJECTS[name])


@pytest.mark.parametrize("name", SUBJECTS)
def test_it_obeys_the_contract_on_ranks(name, ranks):
    ranks(on_a_rank, name)


def test_a_second_conversion_takes_nothing_twice():
    model = gpt()
    convert_to_te(model)
    again = convert_to_te(model, head=True)
    assert [*again.converted] == ["norm", "head"]
    assert again.skipped["layers.0.attention.out"] == "is computed by Transformer Engine already"
