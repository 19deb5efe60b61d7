from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from lightning_ups.transforms.compile import compiler as compile
from lightning_ups.transforms.recompute import register_costly_op
from lightning_ups.transforms.recompute.wrapping import (
    memory_budget,
    recompute,
    refuse_recomputed,
    saved_ops,
)
from tests.transforms.contract import assert_same, batch, grads, saved_bytes

SAVES = ["nothing", "matmuls", ["aten.mm", "aten.addmm"]]


class Attention(nn.Module):
    """A block as transformers have it: attention and a perceptron, with dropout, a keyword and a tuple."""

    def __init__(self, size=16, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + scale * self.dropout(self.mlp(x))


class Model(nn.Module):
    def __init__(self, blocks=3, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Attention(**options) for _ in range(blocks))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


def compiled(blocks, *, fullgraph=True):
    named = {str(i): block for i, block in enumerate(blocks)}
    return compile.compiled(named, compile.Compiler(backend="aot_eager", fullgraph=fullgraph))


# Numbers are those without it


@pytest.mark.parametrize("save", SAVES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_and_random_numbers_are_bitwise_equal(save, dropout):
    model = Model(dropout=dropout)
    expected = grads(model)
    with recompute(model.layers, save=save):
        for _ in range(2):  # the first is measured, the second is not
            assert_same(grads(model), expected)


@pytest.mark.parametrize("save", SAVES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled_gradients_are_those_of_compiled_code(save, dropout):
    model = Model(dropout=dropout)
    with compiled(model.layers):
        expected = grads(model)
    with recompute(model.layers, save=save) as kept, compiled(model.layers):
        torch.testing.assert_close(grads(model), expected, rtol=1e-6, atol=1e-7)
    assert kept.num_ran == 3


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_frozen_blocks_below_trained_ones_compile_with_their_dropout(save):
    model = Model(dropout=0.5)
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    with compiled(model.layers):
        expected = grads(model)
    with recompute(model.layers, save=save), compiled(model.layers):
        torch.testing.assert_close(grads(model), expected, rtol=1e-6, atol=1e-7)


@dataclass
class Hidden:
    x: torch.Tensor


class Opens(nn.Module):
    """Takes its input out of an object that no tree knows."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)

    def forward(self, hidden):
        return self.net(hidden.x)


def test_a_frozen_block_whose_input_is_in_an_object_is_recomputed():
    block = Opens()
    with recompute([block], save="nothing") as kept, compiled([block]):
        block(Hidden(torch.randn(4, 8, requires_grad=True))).sum().backward()
    assert (kept.num_ran, kept.num_idle) == (1, 0)


# What is saved and what is done again


def backward_flops(model, context):
    with context:
        model(batch()).backward()  # the first step keeps arguments alone
        loss = model(batch())
        with FlopCounterMode(display=False) as counter:
            loss.backward()
    return counter.get_total_flops(), counter.get_flop_counts()["Global"]


def test_the_backward_recomputes_what_was_not_kept_and_only_that():
    model = Model()
    with FlopCounterMode(display=False) as counter:
        for layer in model.layers:
            layer(torch.randn(2, 4, 16))
    forward = counter.get_total_flops()
    plain, _ = backward_flops(model, nullcontext())
    nothing, _ = backward_flops(model, recompute(model.layers, save="nothing"))
    matmuls, _ = backward_flops(model, recompute(model.layers, save="matmuls"))
    every_second, _ = backward_flops(model, recompute(model.layers[::2], save="nothing"))
    last = 2 * 2 * 4 * (4 * 16) * 16  # the second run stops at the last tensor that it needs: before the last product
    assert nothing == plain + forward - 3 * last
    assert every_second == plain + (forward - 3 * last) * 2 // 3
    assert matmuls == plain


def test_compiled_code_recomputes_the_same():
    model = Model()
    blocks = [layer.mlp for layer in model.layers]  # FlopCounterMode fails at compiled attention that is recomputed
    x = torch.randn(2, 4, 16, requires_grad=True)
    figures = {}
    for name, save in {"plain": None, "nothing": "nothing", "matmuls": "matmuls"}.items():
        with recompute(blocks, save=save) if save else nullcontext() as kept, compiled(blocks):
            blocks[0](x).sum().backward()  # backward is compiled by now
            bytes_, loss = saved_bytes(blocks[0], x)
            with FlopCounterMode(display=False) as counter:
                loss.sum().backward()
        figures[name] = (bytes_, counter.get_total_flops())
        assert kept is None or (kept.num_ran, kept.measured) == (3, set())  # equal blocks share the code
    assert figures["nothing"][0] < figures["matmuls"][0] <= figures["plain"][0]
    assert figures["nothing"][1] > figures["matmuls"][1] == figures["plain"][1]


def test_a_budget_keeps_less_in_compiled_code_and_is_not_shared():
    torch.manual_seed(0)
    block, x = Attention(), torch.randn(2, 4, 16, requires_grad=True)

    def kept():
        with compiled([block]):
            return saved_bytes(block, x)[0]

    default = kept()
    with memory_budget([block], budget=0.0):
        least = kept()
    with memory_budget([block], budget=0.5):
        half = kept()
    assert least < half < default
    assert kept() == default
    assert torch._functorch.config.activation_memory_budget == 1.0  # noqa: TID251


# Operators


def test_an_unknown_operator_names_near_ones():
    with pytest.raises(ValueError, match=r"no operator 'aten\.addm'.*nearest first: .*aten\.addmm"):
        saved_ops(["aten.mm", "aten.addm"], nn.Linear(2, 2))


def test_an_operator_that_never_runs_as_itself_says_what_to_do():
    with pytest.raises(ValueError, match=r"'aten::linear' never runs itself.*or use save='matmuls'"):
        saved_ops(["aten.linear"], nn.Linear(2, 2))


def test_a_registered_operator_is_kept():
    @torch.library.custom_op("recompute_tests::wave", mutates_args=())
    def wave(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    wave.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=setup)

    class Waves(nn.Linear):
        def forward(self, x):
            return wave(super().forward(x)).exp()

    calls, block, x = [], Waves(2, 2), torch.ones(1, 2)

    def calls_in_second_step():
        with recompute([block], save="matmuls"):
            block(x).sum().backward()
            calls.clear()
            block(x).sum().backward()
        return len(calls)

    assert calls_in_second_step() == 2
    register_costly_op("recompute_tests.wave")
    assert calls_in_second_step() == 1


def setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


class Float8Linear(nn.Linear):
    """Named as torchao's is, which takes the maximum in its forward."""


def test_the_scale_of_float8_is_kept():
    model = nn.Sequential(Float8Linear(2, 2))
    assert torch.ops.aten.max.default in saved_ops("matmuls", model)
    assert torch.ops.lightning_ups.float8_maxima.default in saved_ops("matmuls", model)
    assert torch.ops.aten.max.default in saved_ops(["aten.mm"], model)
    assert torch.ops.aten.max.default not in saved_ops("matmuls", nn.Linear(2, 2))
    assert saved_ops("nothing", model) == ()


# Modules


def test_a_block_given_twice_or_inside_another_is_recomputed_and_right():
    model = Model()
    expected = grads(model)
    with (
        recompute([*model.layers, model.layers[0], model.layers[1].mlp], save="nothing") as outer,
        recompute(model.layers, save="matmuls") as inner,
    ):
        assert_same(grads(model), expected)
    assert outer.num_ran + inner.num_ran > 0


class Talkative(nn.Linear):
    def forward(self, x, *, debug):
        return super().forward(x) * (2 if debug else 1)


def test_a_keyword_that_checkpoint_has_too_reaches_the_block():
    block, x = Talkative(2, 2), torch.ones(1, 2)
    expected = block(x, debug=True)
    with recompute([block], save="matmuls"):
        assert torch.equal(block(x, debug=True), expected)


class Overwriting(nn.Linear):
    """Does to what it is given, in place, what `x += y` does."""

    def forward(self, x, more=None):
        x = x if more is None else more["x"]
        x += self.bias
        return super().forward(x)


@pytest.mark.parametrize("save", SAVES, ids=str)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_block_that_writes_to_its_argument_is_recomputed_from_a_copy(as_keyword, needs_grad, save):
    torch.manual_seed(0)
    block = nn.ModuleList([Overwriting(2, 2), Overwriting(2, 2)])

    def steps():
        block.zero_grad()
        for _ in range(3):
            x = torch.ones(1, 2, requires_grad=needs_grad) * 2
            first = block[0](None, {"x": x}) if as_keyword else block[0](x)
            block[1](first).square().sum().backward()
        return [p.grad.clone() for p in block.parameters()] + [x.detach()]

    expected = steps()
    with recompute(block, save=save):
        assert_same(steps(), expected)


def test_a_block_that_writes_to_what_is_kept_may_keep_less():
    torch.manual_seed(0)
    block, x = Scaling(), torch.randn(2, 3, 8)

    def steps():
        block.zero_grad()
        for _ in range(2):
            block(x).square().sum().backward()
        return [p.grad.clone() for p in block.parameters()]

    expected = steps()
    with recompute([block], save="matmuls", save_less=True) as kept:
        assert_same(steps(), expected)
    assert kept.saves_nothing == {block}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("through", [torch.vmap, torch.func.jacrev])
def test_torch_func_through_a_block_is_refused_and_beside_it_is_not(save, through):
    block, other, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)
    with recompute([block], save=save):
        with pytest.raises(RuntimeError, match=r"is applied to Linear.*create_graph=True"):
            through(block)(x)
        (block(x).sum() + through(other)(x).sum()).backward()
        assert block.weight.grad is not None
        with torch.no_grad():
            torch.vmap(block)(x)


class Slopes(nn.Sequential):
    def forward(self, x):
        return torch.func.jacrev(super().forward)(x)


@pytest.mark.parametrize("save", SAVES)
def test_a_block_that_differentiates_by_torch_func_says_what_to_do(save):
    block = Slopes(nn.Linear(2, 2), nn.Tanh())
    with recompute([block], save=save):
        with pytest.raises(RuntimeError, match=r"Slopes uses torch\.func .* ActivationCheckpoint\(blocks="):
            block(torch.ones(2))
        with torch.no_grad():
            block(torch.ones(2))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_after_an_error_nothing_is_left_of_checkpointing(save, kind):
    class Failing(nn.Linear):
        fails = True

        def forward(self, x):
            if self.fails:
                raise kind("by the user")
            return super().forward(x)

    block, x = Failing(2, 2), torch.ones(1, 2)
    with recompute([block], save=save):
        for _ in range(2):
            with pytest.raises(kind, match="by the user") as caught:
                block(x)
            assert caught.value.__context__ is None
            with torch.autograd.graph.disable_saved_tensors_hooks("refused where there are any"):
                torch.ones(2, requires_grad=True).exp()  # while the error, and with it torch's frames, is kept
        block.fails = False
        block(x).sum().backward()
        assert block.weight.grad is not None


class Scaling(nn.Module):
    """Scales scores in place, as some window attentions do."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x):
        scores = torch.matmul(self.up(x), self.up.weight)
        scores *= 0.5
        return x + scores.tanh()


@pytest.mark.parametrize("shape", [(2, 8), (2, 3, 8)])  # of three dimensions, torch's own check sees no write
def test_a_block_that_writes_to_what_is_kept_is_told_of_save(shape):
    torch.manual_seed(0)
    block, x = Scaling(), torch.randn(*shape, requires_grad=True)
    block(x).sum().backward()
    expected = block.up.weight.grad
    block.zero_grad()
    said = r"Scaling writes in place to a result that ActivationCheckpoint keeps for backward.*Use save='nothing'"
    with recompute([block], save="matmuls"), pytest.raises(RuntimeError, match=said):
        block(x).sum().backward()
    for save in ("nothing", ["aten.addmm"]):
        block.zero_grad()
        with recompute([block], save=save):
            block(x).sum().backward()
        assert torch.equal(block.up.weight.grad, expected)


class Flexible(nn.Module):
    """Calls an operator of higher order, which asks each mode of dispatch whether it knows it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        x = self.up(x)
        fixed = x.detach()  # on a CPU it has no backward
        return x * flex_attention(fixed, fixed, fixed)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_a_block_may_call_operators_of_higher_order(save):
    torch.manual_seed(0)
    block, x = Flexible(), torch.randn(1, 1, 16, 16, requires_grad=True)
    block(x).sum().backward()
    expected = block.up.weight.grad
    block.zero_grad()
    with recompute([block], save=save):
        block(x).sum().backward()
    torch.testing.assert_close(block.up.weight.grad, expected)


@pytest.mark.parametrize("compile_", [False, True])
def test_a_block_that_is_given_a_growing_cache_is_refused(compile_):
    class Cache:
        def __init__(self):
            self.kept = []

        def get_seq_length(self):
            return len(self.kept)

    class Attending(nn.Linear):
        def forward(self, x, *, past_key_values):
            past_key_values.kept.append(super().forward(x))
            return torch.cat(past_key_values.kept).sin()

    block, x = Attending(2, 2), torch.ones(1, 2)
    with recompute([block], save="nothing"), compiled([block], fullgraph=False) if compile_ else nullcontext():
        with torch.no_grad():
            block(x, past_key_values=Cache())
        with pytest.raises(RuntimeError, match=r"Attending is given a key-value cache, Cache, .*use_cache=False"):
            block(x, past_key_values=Cache())


def test_a_cache_that_a_block_writes_to_is_no_such_argument():
    class Caching(nn.Linear):
        def forward(self, x, *, cache):
            cache[0] = y = super().forward(x)
            cache[1].copy_(y.detach())
            return y.sin()

    block, x = Caching(2, 2), torch.ones(1, 2, requires_grad=True)
    block(x, cache=[None, torch.zeros(1, 2)]).sum().backward()
    expected, x.grad = x.grad, None
    with recompute([block], save="nothing"):
        block(x, cache=[None, torch.zeros(1, 2)]).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
@pytest.mark.parametrize("where", ["", "layers.0", "layers.0.mlp"])
def test_what_recomputes_itself_is_refused(where, flag):
    model = Model()
    setattr(model.get_submodule(where), flag, False)
    refuse_recomputed(model, model.layers)
    setattr(model.get_submodule(where), flag, True)
    with pytest.raises(ValueError, match=rf"{where or 'Model'} has {flag}=True.*Turn it off"):
        refuse_recomputed(model, model.layers)
    if where:
        refuse_recomputed(model, model.layers[1:])


# More than one device


def compare_on_a_rank(order, save, compile_):
    expected = grads(Model())
    model = Model()
    mesh = init_device_mesh("cpu", (2,))

    def shard():
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    if order == "shard first":
        shard()
    with recompute(model.layers, save=save) as kept:
        if order == "shard last":
            shard()
        with compiled(model.layers) if compile_ else nullcontext():
            loss, _, *actual = grads(model)
    torch.testing.assert_close([loss, *(g.full_tensor() for g in actual)], [expected[0], *expected[2:]])
    return kept.num_ran, kept.bytes_without, kept.bytes_kept


@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.parametrize("order", ["shard first", "shard last"])
def test_order_with_fully_shard_does_not_matter(ranks, order, save):
    ran, without, kept = ranks(compare_on_a_rank, order, save, False)
    model = Model()
    with recompute(model.layers, save=save) as alone:
        grads(model)
    assert (ran, without, kept) == (3, alone.bytes_without, alone.bytes_kept)  # parameters are not counted


@pytest.mark.parametrize("order", ["shard first", "shard last"])
def test_compiled_under_fully_shard(ranks, order):
    assert ranks(compare_on_a_rank, order, "matmuls", True)[0] == 3


def ddp_on_a_rank():
    expected = grads(Model(dropout=0.5))
    model = Model(dropout=0.5)
    ddp = nn.parallel.DistributedDataParallel(model)
    with recompute(model.layers, save="matmuls"):
        for _ in range(2):
            torch.testing.assert_close(grads(ddp), expected)
    return True


def test_under_ddp(ranks):
    assert ranks(ddp_on_a_rank)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_dropout_on_a_device_when_all_tensors_are_keywords(save):
    class Keywords(Attention):
        def forward(self, *, hidden):
            return super().forward(hidden)

    block = Keywords(dropout=0.5).cuda()
    x = torch.randn(2, 4, 16, device="cuda", requires_grad=True)
    run = partial(grads_of, block, x)
    expected = run()
    with recompute([block], save=save):
        assert_same(run(), expected)


def grads_of(block, x):
    torch.manual_seed(1)
    return torch.autograd.grad(block(hidden=x).square().sum(), [x, *block.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_inductor_on_a_device(save):
    block, x = Attention(dropout=0.5).cuda(), torch.randn(2, 64, 16, device="cuda", requires_grad=True)

    def step():
        torch.manual_seed(1)
        return torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])

    named, compiler = {"0": block}, compile.Compiler(fullgraph=True)
    with compile.compiled(named, compiler):
        expected = step()
        without, _ = saved_bytes(block, x)
    with recompute([block], save=save), compile.compiled(named, compiler):
        torch.testing.assert_close(step(), expected, rtol=1e-3, atol=1e-4)
        kept, _ = saved_bytes(block, x)
    assert save == "matmuls" or kept < without
