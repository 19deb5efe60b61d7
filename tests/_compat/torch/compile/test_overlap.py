"""The passes, applied to the graphs of AOTAutograd: what they do to collectives, and that the numbers stay."""

from functools import cache

import pytest
import torch
import torch._inductor.config as inductor_config  # noqa: TID251
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo import register_backend  # noqa: TID251  (the documented way to register a backend)
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251

from lightning_ups._compat.torch.compile import overlap
from lightning_ups._compat.torch.compile.partitioner import gradients_apart
from lightning_ups.transforms.blocks import find_blocks, roots
from lightning_ups.transforms.compile.compiler import compiled
from lightning_ups.transforms.compile.frame import Compiler, prepared
from lightning_ups.transforms.sharding.mesh import MeshSizes, build_mesh
from lightning_ups.transforms.simple_fsdp.gather_graph import GatherPlan
from tests.transforms.simple_fsdp.test_parametrize import done


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, tie=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(8, 8, bias=False)
        self.gains = nn.Parameter(torch.randn(6, 8))
        if tie:
            self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x * self.gains.mean(0))


class Summed(Model):
    """Two layers that are summed, so that their biases have equal gradients, and complex weights."""

    def __init__(self, *, tie=False):
        super().__init__(tie=tie)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.phases = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.turns = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        x = self.one(x) + self.other(torch.tanh(x))
        return super().forward((x * self.phases + self.turns * x * x).abs())


GRAPHS = []  # after the passes
GATHERED = []  # what each graph gathered before them, and what was known of it


def passed(graph, inputs):
    GATHERED.append([known(node) for node in graph.graph.nodes if "all_gather" in str(node.target)])
    inductor_config.post_grad_custom_post_pass(graph.graph)
    GRAPHS.append(graph)
    for node in graph.graph.nodes:
        if str(node.target) == "control_deps":  # an order for inductor, which torch 2.11 cannot run by itself
            node.target = lambda after, function, *args: function(*args)
    graph.recompile()
    return make_boxed_func(graph.forward)


def known(node):
    above, queue = set(), [node]
    while queue:
        new = [other for other in queue.pop().all_input_nodes if other not in above]
        above.update(new)
        queue += new
    sources = [other.name for other in above if other.op == "placeholder"]
    modules = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
    return f"{node.name} {node.args[1:]} of {sources}, {node.meta.get('custom')}, {modules[-1:]}"


@cache
def register():
    aot = aot_autograd(fw_compiler=passed, bw_compiler=passed, partition_fn=min_cut_rematerialization_partition)
    register_backend(lambda graph, inputs: aot(graph, inputs), name="ups_passes")


def run(*, together, tie=False, kind=Model, recompute=True, **options):
    register()
    GRAPHS.clear()
    GATHERED.clear()
    model, seen = nn.Module(), []
    model.root = kind(tie=tie)
    names, blocks = [name for name, _ in roots(model)], find_blocks(model)
    gathering = done(model, **options).gathering
    plan = GatherPlan.of(blocks, names, recompute=recompute, key=f"{together} {options}")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with (
        overlap.bucketing(together=together, key=str(plan), told=seen.append),
        prepared(plan),
        gradients_apart(),
        compiled({"root": model.root}, Compiler(backend="ups_passes", fullgraph=True)),
        gathering.reading(whole=True),
    ):
        loss = model.root(x).square().mean()
        loss.backward()
    return model, x, loss, seen


def trained(*, tie=False, kind=Model, **options):
    model, x, loss, seen = run(tie=tie, kind=kind, **options)
    plain = kind(tie=tie)
    right = plain(x).square().mean()
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    for p, q in zip(model.root.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2)
    assert len({p.grad.to_local().data_ptr() for p in model.parameters()}) == len([*model.parameters()])
    return [(g.backward, g.before, g.after, g.groups) for g in seen]


# Three blocks of four parameters, and three outside them: one before, two after, which the backward still has.
@pytest.mark.slow
def test_a_block_gathers_once_and_reduces_once_in_each_direction(ranks):
    forward, backward = ranks(_told_together)
    assert forward == (False, {"gathers": 15}, {"gathers": 5}, 5)
    assert backward[0] is True
    assert backward[1]["reduce-scatters"] == 15
    assert backward[2] == {"gathers": 3, "reduce-scatters": 5}


def _told_together():
    return trained(together=True)


def test_a_tied_parameter_is_reduced_once(ranks):
    (forward, backward), gathered = ranks(_told_tied)
    assert forward[2] == {"gathers": 5}, gathered
    assert backward[1]["reduce-scatters"] == 15
    assert backward[2] == {"gathers": 3, "reduce-scatters": 5}


def _told_tied():
    return trained(together=True, tie=True), "\n".join(GATHERED[0])


# Beside those of Model: two matrices, two biases of which one is reduced, and two complex parameters.
def test_equal_gradients_are_reduced_once_and_complex_weights_gathered_by_themselves(ranks):
    forward, backward = ranks(_told_summed)
    assert forward == (False, {"gathers": 21}, {"gathers": 7}, 5)
    assert backward[1]["reduce-scatters"] == 20
    assert backward[2]["reduce-scatters"] == 6


def _told_summed():
    return trained(together=True, kind=Summed)


def test_equal_gradients_of_copies_are_reduced_once(ranks):
    ((_, before, after, _),) = ranks(_told_summed_copies)
    assert (before, after) == ({"all-reduces": 20}, {"all-reduces": 2})


def _told_summed_copies():
    return trained(together=True, kind=Summed, mesh=build_mesh("cpu", MeshSizes(replicate=2, shard=1, tensor=1)))


def test_a_block_is_gathered_while_the_one_before_computes(ranks):
    (forward, backward), gathered = ranks(_told_order)
    assert forward == ["gather"] * 3 + ["tanh", "gather", "tanh", "gather", "tanh"], gathered
    # What forward ended with is still there, and the last reduction waits for nothing else.
    assert backward == [
        "gather", "reduce", "gather", "tanh", "reduce", "gather", "tanh", "reduce", "tanh", "reduce", "reduce",
    ]  # fmt: skip


def _told_order():
    trained(together=True)
    words = {"all_gather": "gather", "reduce_scatter_tensor": "reduce", "tanh": "tanh"}
    orders = [
        [
            word
            for node in graph.graph.nodes
            for part, word in words.items()
            if node.op == "call_function" and part in str(node.target) and "bucket" not in str(node.target)
        ]
        for graph in GRAPHS
    ]
    return orders, "\n".join(GATHERED[0])


@pytest.mark.slow
def test_products_are_cast_as_they_are_copied_together(ranks):
    casts, kinds, bits = ranks(_told_casts)
    assert casts == {True: 8, False: 15}  # of the rest most are sums, whose kernels cast
    assert kinds == {torch.float32}
    assert bits


def _told_casts():
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    models, casts = [], {}
    for fused in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not fused:
                patch.setattr(overlap, "cast_where_copied", lambda graph: None)
            models.append(run(together=True, **options)[0])
        casts[fused] = sum(
            node.meta["val"].dtype == torch.float32 and "_to_copy" in str(node.target)
            for node in GRAPHS[1].graph.nodes
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        )
        torch._dynamo.reset()  # noqa: TID251
    pairs = zip(*(model.parameters() for model in models), strict=True)
    kinds = {p.grad.dtype for model in models for p in model.parameters()}
    return casts, kinds, all(torch.equal(p.grad.to_local(), q.grad.to_local()) for p, q in pairs)


@pytest.mark.parametrize("num", [1, 3])
def test_gradients_of_copies_are_reduced_a_few_at_once_and_waited_for_at_the_end(ranks, num):
    ((backward, before, after, _),), order = ranks(_told_copies, num, False)
    assert backward
    assert (before, after) == ({"all-reduces": 15}, {"all-reduces": num})
    first = order.index("wait")
    assert order[first:] == ["wait"] * num
    assert order[:first].count("mm") > 5


def _told_copies(num, tie):
    mesh = build_mesh("cpu", MeshSizes(replicate=2, shard=1, tensor=1))
    size = sum(p.numel() * p.element_size() for p in Model().parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_COPIED_AT_ONCE", size // num + 1)
        told = trained(together=True, tie=tie, mesh=mesh)
    torch.compiler.reset()
    names = [str(node.target) for node in GRAPHS[1].graph.nodes if node.op == "call_function"]
    return told, [word for name in names for part, word in (("wait_tensor", "wait"), ("mm", "mm")) if part in name]


def test_settings_are_put_back_and_a_users_pass_runs_first():
    order, graph = [], fx.Graph()
    before = inductor_config.post_grad_custom_post_pass, inductor_config.reorder_for_peak_memory
    with (
        inductor_config.patch(post_grad_custom_post_pass=lambda graph: order.append(graph)),
        overlap.bucketing(together=True, key="", told=order.append),
    ):
        ours = inductor_config.post_grad_custom_post_pass
        ours(graph)
        assert inductor_config.reorder_for_peak_memory is False
        assert ours.uuid() is None  # a function has no name for caches
    assert order == [graph]
    assert (inductor_config.post_grad_custom_post_pass, inductor_config.reorder_for_peak_memory) == before


def test_caches_know_one_plan_from_another():
    def uuid(**options):
        with overlap.bucketing(told=print, **{"together": True, "key": "a", **options}):
            return inductor_config.post_grad_custom_post_pass.uuid()

    assert uuid() == uuid()
    assert len({str(u) for u in (uuid(), uuid(key="b"), uuid(together=False))}) == 3


def test_where_the_pass_fails_the_error_names_the_option_that_leaves_it_out(ranks):
    with pytest.raises(AssertionError, match="overlap='none' leaves out, failed: AssertionError: not this one"):
        ranks(_failing)


def _failing():
    def fail(*_, **__):
        raise AssertionError("not this one")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.fx_passes.overlap_manual_scheduling.manual_overlap_bucketing", fail)
        run(together=True)
