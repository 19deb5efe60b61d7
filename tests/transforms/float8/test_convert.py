import copy
import re
import sys
from contextlib import nullcontext
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import random_unstructured

from lightning_ups.transforms.float8 import recipes as float8
from lightning_ups.transforms.float8.convert import (
    conversion_of,
    convert_to_float8,
    fitting_linears,
    float8_linears,
)
from lightning_ups.transforms.float8.gather import gathers_in_float8
from lightning_ups.transforms.float8.recipes import compiler_settings

STATES = [f"autograd_cache_{state}" for state in ("hit", "miss", "bypass")]
MARKED = "unsafe_marked_cacheable_functions"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.layers = nn.ModuleList(blocks)
        self.attention = nn.MultiheadAttention(32, 2)
        self.own, self.odd, self.head = Own(32, 32), nn.Linear(32, 24), nn.Linear(32, 48)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def data():
    torch.manual_seed(1)
    return torch.randn(32, 32, dtype=torch.bfloat16)


def gradients(model):
    model.zero_grad()
    loss = model(data()).float().square().mean()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_in_float8_and_near_those_of_bfloat16(recipe):
    model, plain = Model().to(torch.bfloat16), Model().to(torch.bfloat16)
    convert_to_float8(model, recipe=recipe, emulate=True)
    (loss, found), (expected_loss, expected) = gradients(model), gradients(plain)
    assert loss != expected_loss  # it has an effect
    assert loss == pytest.approx(expected_loss, rel=2e-2)
    for g, e in zip(found, expected, strict=True):
        error = (g.float() - e.float()).norm() / e.float().norm()
        assert error < 0.08, error


IN_BLOCKS = tuple(f"layers.{i}.{j}" for i in range(3) for j in (0, 2))


@pytest.mark.parametrize(
    ("options", "converted", "skipped"),
    [
        ({}, IN_BLOCKS, dict.fromkeys(("attention.out_proj", "own", "odd", "head"), "outside the blocks")),
        ({"include": ["layers.*.0", "head"]}, ("layers.0.0", "layers.1.0", "layers.2.0", "head"), {}),
        (
            {"head": True, "exclude": ["layers.0.*"]},
            (*IN_BLOCKS[2:], "head"),
            {
                "layers.0.0": "excluded by 'layers.0.*'",
                "layers.0.2": "excluded by 'layers.0.*'",
                "attention.out_proj": "nn.MultiheadAttention reads its weight without calling it",
                "own": "has its own forward",
                "odd": "32 x 24 is no multiple of 16",
            },
        ),
    ],
    ids=["in blocks", "by pattern", "with the head"],
)
def test_patterns_choose_and_what_is_left_says_why(options, converted, skipped):
    model = Model()
    fitting = fitting_linears(model, recipe="tensorwise", **options)
    done = convert_to_float8(model, recipe="tensorwise", emulate=True, **options)
    assert (done.converted, done.skipped) == (converted, skipped)
    assert tuple(fitting) == converted
    assert conversion_of(model) is done


def test_names_values_flags_ties_and_hooks_stay():
    model, calls = Model(), []
    model.layers[1][0].weight = model.layers[0][0].weight
    model.layers[2][0].weight.requires_grad_(False)
    model.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    before = [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    convert_to_float8(model, recipe="tensorwise", emulate=True)
    assert [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)] == before
    assert all(torch.equal(model.state_dict()[k], v) and v.dtype is torch.float32 for k, v in state.items())
    model.to(torch.bfloat16)(data())
    assert calls == [1]


def test_hooks_of_each_kind_are_called_as_before():
    calls = []
    for convert in (False, True):
        model, seen = Model(), []
        layer = model.layers[1][0]
        layer.register_full_backward_hook(lambda _, inputs, outputs, seen=seen: seen.append(("after", len(inputs))))
        layer.register_full_backward_pre_hook(lambda *_, seen=seen: seen.append("before"))
        layer.register_forward_hook(lambda *_, seen=seen: seen.append("always"), always_call=True)
        if convert:
            convert_to_float8(model, recipe="tensorwise", emulate=True)
        model.to(torch.bfloat16)(data()).sum().backward()
        with pytest.raises((RuntimeError, AssertionError)):
            model.layers[1][0](torch.ones(1, 3))  # of no such width
        calls.append(seen)
    assert calls[0] == calls[1] == ["always", "before", ("after", 1), "always"]


def test_hooks_that_are_taken_off_are_off_whichever_layer_has_them():
    model, seen = Model(), []
    layer = model.layers[1][0]
    before = layer.register_forward_hook(lambda *_: seen.append("before"))
    done = convert_to_float8(model, recipe="tensorwise", emulate=True)
    between = model.layers[1][0].register_forward_hook(lambda *_: seen.append("between"))
    model.to(torch.bfloat16)(data())
    before.remove()
    model(data())
    assert seen == ["before", "between", "between"]
    done.undo()
    model(data())
    between.remove()
    model(data())
    assert seen == ["before", *3 * ["between"]]


def test_undo_puts_the_layers_back_with_the_weights_of_now():
    model = Model()
    originals = dict(model.named_modules())
    done = convert_to_float8(model, recipe="tensorwise", emulate=True)
    assert set(float8_linears(model)) == set(done.converted)
    model.layers[0][0].weight = nn.Parameter(torch.ones(64, 32))
    done.undo()
    assert dict(model.named_modules()) == originals
    assert torch.equal(model.layers[0][0].weight, torch.ones(64, 32))
    assert conversion_of(model) is None


def test_undo_of_an_earlier_conversion_leaves_what_the_last_did():
    model = Model()
    first = convert_to_float8(model, recipe="tensorwise", include=["layers.0.0"], emulate=True)
    last = convert_to_float8(model, recipe="tensorwise", include=["layers.1.0"], emulate=True)
    first.undo()
    assert conversion_of(model) is last
    assert [*float8_linears(model)] == [*last.converted]


@pytest.mark.parametrize("of", ["torch's", "float8's"])
def test_what_is_pruned_meanwhile_is_pruned_where_it_runs(of):
    # ModelPruning holds the layers that there were before.
    model = Model().to(torch.bfloat16)
    before = dict(model.named_modules())
    done = convert_to_float8(model, recipe="tensorwise", emulate=True)
    pruned = before["layers.1.2"] if of == "torch's" else model.layers[1][2]
    random_unstructured(pruned, "weight", amount=0.5)
    mask = model.state_dict()["layers.1.2.weight_mask"] == 0
    model.layers[1][2].weight_orig.data[mask] = 1e3  # would be seen
    loss, _ = gradients(model)
    assert loss < 10
    assert (model.layers[1][2].weight_orig.grad[mask] == 0).all()
    done.undo()
    assert dict(model.named_modules()) == before
    assert torch.equal(model.layers[1][2].weight == 0, mask)
    assert gradients(model)[0] == pytest.approx(loss, rel=2e-2)


def test_a_buffer_that_no_state_dict_has_stays_out_of_it():
    model = Model().to(torch.bfloat16)
    names = model.state_dict().keys()
    model.layers[0][0].register_buffer("seen", torch.zeros(1), persistent=False)
    done = convert_to_float8(model, recipe="tensorwise", emulate=True)
    assert model.layers[0][0].seen == 0
    assert model.state_dict().keys() == names
    model.layers[1][2].register_buffer("late", torch.zeros(1), persistent=False)
    done.undo()
    assert model.state_dict().keys() == names


class Reused(nn.Module):
    """One layer in two places, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.again, self.layers[1].weight = self.first, self.layers[0].weight


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_in_two_places_is_converted_in_both(recipe):
    model = Reused()
    done = convert_to_float8(model, recipe=recipe, include=["*", "layers.*"], emulate=True)
    assert done.converted == ("first", "layers.0", "layers.1", "layers.2")
    assert model.again is model.first
    assert "first" in float8_linears(model)
    done.undo()
    assert model.again is model.first
    assert type(model.first) is nn.Linear


def test_a_weight_in_two_places_stays_one_and_is_gathered_as_it_is():
    model = Reused()
    done = convert_to_float8(model, recipe="tensorwise", include=["*", "layers.*"], all_gather=True, emulate=True)
    assert model.layers[1].weight is model.layers[0].weight
    gathered = {name: gathers_in_float8(layer) for name, layer in float8_linears(model).items()}
    assert gathered == {"first": False, "layers.0": False, "layers.1": False, "layers.2": True}
    assert done.shared == ("first", "layers.0", "layers.1")


def test_a_copy_is_independent():
    model = Model().to(torch.bfloat16)
    convert_to_float8(model, recipe="tensorwise", emulate=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert twin(data()).abs().sum() > 0


class Drawn(nn.Linear):
    """Has an initialisation of its own, as a GPT's layers do."""

    def __init__(self, *args, std):
        self.std = std
        super().__init__(*args)

    def reset_parameters(self):
        nn.init.constant_(self.weight, self.std)


def test_an_initialisation_of_its_own_is_kept_for_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(Drawn(16, 16, std=i + 1.0)) for i in range(2)))
    convert_to_float8(model, recipe="tensorwise", emulate=True)
    model.to_empty(device="cpu")
    for block in model:
        block[0].reset_parameters()
    assert [block[0].weight.mean().item() for block in model] == [1.0, 2.0]


def test_a_batch_of_no_multiple_of_sixteen_tokens_trains():
    model = Model().to(torch.bfloat16)
    convert_to_float8(model, recipe="tensorwise", emulate=True)
    model(data()[:7]).float().sum().backward()


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 32))


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=50)
    return transformers.GPT2LMHeadModel(config)


def others(*more):
    return nn.Sequential(Transposed(), Transposed(), nn.RNNCell(4, 4), nn.Embedding(99, 99), nn.Conv1d(4, 4, 1), *more)


NAMED = re.escape(f"{__name__}.Transposed (2 of them, 1,024 weights), torch.nn.modules.rnn.RNNCell (1 of them, 32 weig")
NONE = {
    r"No linear layer of Sequential.*0: 3 x 3 is no multiple of 16; .*16\. Use BF16Precision\.$": lambda: nn.Sequential(
        nn.Linear(3, 3), nn.Linear(3, 3)
    ),
    r"head: outside the blocks; .*Name others by include=\[\.\.\.\], or use BF16Precision\.$": lambda: nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2)), "head": nn.Linear(16, 16)}
    ),
    rf"not converted: {NAMED}hts\)\. Use BF16Precision\.$": others,
    rf"5: .*are no nn\.Linear are not converted: {NAMED}hts\)\. Use BF16Precision\.$": lambda: others(nn.Linear(3, 3)),
    r"lm_head: .*: transformers\.pytorch_utils\.Conv1D \(8 of them, 24,576 weights": gpt2,
    r"in float8\. It has no nn\.Linear\. Use BF16Precision\.$": lambda: nn.Sequential(nn.Conv1d(4, 4, 1)),
}


@pytest.mark.parametrize(
    ("text", "make"), NONE.items(), ids=["too small", "outside", "others", "both", "gpt2", "no linear layer"]
)
def test_nothing_to_convert_says_why_and_names_layers_of_other_kinds(text, make):
    with pytest.raises(ValueError, match=text):
        convert_to_float8(make(), recipe="tensorwise", emulate=True)


def test_a_pattern_that_matches_nothing_says_what_would():
    with pytest.raises(ValueError, match=r"'layer\.\*' matches no linear layer of Model.*layers\.\*\.\*"):
        convert_to_float8(Model(), recipe="tensorwise", include=["layer.*"], emulate=True)


def test_losers_stay_and_if_all_lose_it_is_no_error():
    done = convert_to_float8(Model(), recipe="tensorwise", losers={"layers.0.0": "is not faster"}, emulate=True)
    assert "layers.0.0" not in done.converted
    assert done.skipped["layers.0.0"] == "is not faster"
    names = [*fitting_linears(Model(), recipe="tensorwise")]
    none = convert_to_float8(Model(), recipe="tensorwise", losers=dict.fromkeys(names, "is not faster"), emulate=True)
    assert none.converted == ()


def test_a_layer_that_tensor_parallelism_would_split_too_small_is_named():
    done = convert_to_float8(Model(), recipe="mxfp8", tensor_size=1, emulate=True)
    assert done.misfits == ()
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64))
    done = convert_to_float8(model, recipe="tensorwise", tensor_size=4, include=["*"], emulate=True)
    assert done.converted == ("1",)
    assert done.skipped == {"0": "32 x 64, split over 4 devices, is no multiple of 16"}


def test_kernels_compiled_later_store_right_bytes():
    # Torchao guards against a fault of Triton's in its public entry, which a swap of our own would pass by.
    from torchao.float8 import _inductor_patch

    convert_to_float8(Model(), recipe="tensorwise", emulate=True)
    assert _inductor_patch._PATCHED


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_is_left_and_named():
    done = convert_to_float8(nn.Sequential(nn.Linear(16, 32), nn.LazyLinear(16)), recipe="rowwise", include=["*"])
    assert (done.converted, done.skipped) == (("0",), {"1": "its weight has no shape before the first batch"})


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_caches_of_graphs_know_every_file_that_decides_on_a_launch(monkeypatch, recipe):
    found = []

    def launched(operators, *, sources):
        used = [value for operator in operators for value in operator.launch.__globals__.values()]
        named = [each.__module__ for each in used if isinstance(each, type | FunctionType)]
        found.append(({sys.modules[name].__file__ for name in named if "kernels.float8" in name}, {*sources}))
        return nullcontext()

    monkeypatch.setattr(float8, "launched_by_graphs", launched)
    with compiler_settings(recipe):
        ((wanted, sources),) = found
    assert wanted
    assert wanted <= sources


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rowwise", "rowwise_with_gw_hp"))],
)
def test_a_second_start_neither_traces_nor_differentiates_what_caches_know(recipe, monkeypatch, tmp_path):
    from torch._dynamo.utils import counters  # noqa: TID251
    from torch._inductor import config  # noqa: TID251

    def trained(number_format="e4m3") -> tuple[str, list[torch.Tensor]]:
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16, bias=False))
        convert_to_float8(net, recipe=recipe, number_format=number_format, include=["*"])
        x = torch.randn(64, 32, requires_grad=True)
        torch.compile(net, fullgraph=True)(x).square().sum().backward()
        (state,) = [name for name in counters["aot_autograd"] if name in STATES]
        return state.removeprefix("autograd_cache_"), [x.grad, *(weight.grad for weight in net.parameters())]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with compiler_settings(recipe):
        first, wanted = trained()
        second, found = trained()
        assert (first, second) == ("miss", "hit")
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        if recipe == "tensorwise":  # what is computed by another type is another graph
            assert trained("hybrid")[0] == "miss"
        with config.patch({MARKED: dict.fromkeys(getattr(config, MARKED), "changed")}):
            assert trained()[0] == "miss", "and so is what another source computes"
    assert getattr(config, MARKED) == {}
