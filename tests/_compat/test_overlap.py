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

from lightning_ups._compat import overlap
from lightning_ups.transforms.blocks import find_blocks, roots
from lightning_ups.transforms.compile import compiled
from lightning_ups.transforms.compile_frame import Compiler, prepared
from lightning_ups.transforms.gather_graph import GatherPlan
from tests.transforms.test_parametrise import done


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


def passed(graph, inputs):
    inductor_config.post_grad_custom_post_pass(graph.graph)
    for node in graph.graph.nodes:
        if str(node.target) == "control_deps":  # an order for inductor, which torch 2.11 cannot run by itself
            node.target = lambda after, function, *args: function(*args)
    graph.recompile()
    return make_boxed_func(graph.forward)


@cache
def register():
    aot = aot_autograd(fw_compiler=passed, bw_compiler=passed, partition_fn=min_cut_rematerialization_partition)
    register_backend(lambda graph, inputs: aot(graph, inputs), name="ups_passes")


def trained(*, together, tie=False, recompute=True):
    register()
    model, plain, seen = nn.Module(), Model(tie=tie), []
    model.root = Model(tie=tie)
    names, blocks = [name for name, _ in roots(model)], find_blocks(model)
    gathering = done(model).gathering
    plan = GatherPlan.of(blocks, names, recompute=recompute, key=f"{together}")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with (
        overlap.bucketing(together=together, key=str(plan), told=seen.append),
        prepared(plan),
        compiled({"root": model.root}, Compiler(backend="ups_passes", fullgraph=True)),
        gathering.reading(whole=True),
    ):
        loss = model.root(x).square().mean()
        loss.backward()
    right = plain(x).square().mean()
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    for p, q in zip(model.root.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2)
    return [(g.backward, g.before, g.after, g.groups) for g in seen]


# Three blocks of four parameters, and three outside them, which are one group.
@pytest.mark.slow
def test_a_block_gathers_once_and_reduces_once_in_each_direction(ranks):
    forward, backward = ranks(_told_together)
    assert forward == (False, {"gathers": 15}, {"gathers": 4}, 4)
    assert backward[0] is True
    assert backward[1]["reduce-scatters"] == 15
    assert backward[2] == {"gathers": 4, "reduce-scatters": 4}


def _told_together():
    return trained(together=True)


def test_a_tied_parameter_is_reduced_once(ranks):
    forward, backward = ranks(_told_tied)
    assert forward[2] == {"gathers": 4}
    assert backward[1]["reduce-scatters"] == 15
    assert backward[2] == {"gathers": 4, "reduce-scatters": 4}


def _told_tied():
    return trained(together=True, tie=True)


@pytest.mark.slow
def test_what_is_kept_is_not_gathered_again(ranks):
    forward, backward = ranks(_told_kept)
    assert forward[2] == {"gathers": 4}
    assert backward[2] == {"reduce-scatters": 4}


def _told_kept():
    return trained(together=True, recompute=False)


@pytest.mark.slow
def test_apart_they_stay_as_they_are(ranks):
    forward, backward = ranks(_told_apart)
    assert forward[1] == forward[2] == {"gathers": 15}
    assert backward[1] == backward[2]
    assert backward[2]["reduce-scatters"] == 15


def _told_apart():
    return trained(together=False)


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


def test_a_torch_without_the_pass_says_so(monkeypatch):
    assert overlap.missing() is None
    monkeypatch.setattr(overlap, "_function", lambda: None)
    assert "has no manual_overlap_bucketing" in overlap.missing()
    monkeypatch.setattr(overlap, "_function", lambda: lambda gm, module_bucket_plans: gm)
    assert "takes no groups of ours" in overlap.missing()
