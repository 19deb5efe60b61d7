import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from lightning_ups._compat.torch.fsdp.gathers import gathers, group_of
from lightning_ups.transforms.simple_fsdp.gather_graph import GatherPlan


def graph_of(*paths, value=None):
    """A graph with one gather for each of ``paths``, made in these modules."""
    graph = fx.Graph()
    for i, path in enumerate(paths):
        shard = graph.placeholder(f"shard_{i}")
        whole = graph.call_method("redistribute", (shard,))
        local = graph.call_method("to_local", (whole,))
        for node in (whole, local):
            parts = path.split(".") if path else []
            stack = [".".join(parts[: n + 1]) for n in range(len(parts))]
            node.meta["nn_module_stack"] = {name: (f"L['self'].{name}", nn.Module) for name in stack}
        local.meta["example_value"] = value
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph)


def groups(plan, graph):
    plan(graph)
    return [group_of(local) for _, local in gathers(graph)]


def test_a_gather_belongs_to_the_block_that_it_is_made_in():
    plan = GatherPlan.of(["model.layers.0", "model.layers.10"], ["model", "other"], recompute=True)
    graph = graph_of("layers.0.up", "layers.10", "layers.1.up", "embed", "")
    assert groups(plan, graph) == ["layers.0", "layers.10", "rest", "rest", "rest"]


def test_the_text_of_a_plan_is_the_same_in_every_process():
    names = [f"model.layers.{i}" for i in range(8)]
    text = str(GatherPlan.of(reversed(names), ["model"], recompute=True))
    places = [text.index(f"'layers.{i}'") for i in range(8)]
    assert places == sorted(places)  # inductor's cache is found by this text, and sets have another order each time
    assert text == str(GatherPlan.of(names, ["model"], recompute=True))


def test_a_plan_says_what_a_graph_gathers_in_its_order():
    plan = GatherPlan.of(["model.a"], ["model"], recompute=True)
    assert plan(graph_of("a", "", "a")) == "shard_0, shard_1, shard_2"
    assert plan(graph_of()) == ""


def test_the_outermost_block_counts():
    plan = GatherPlan.of(["model.layers.0", "model.layers.0.up"], ["model"], recompute=True)
    assert groups(plan, graph_of("layers.0.up")) == ["layers.0"]


def test_what_is_read_far_apart_is_not_gathered_together():
    plan = GatherPlan.of(["model.a", "model.b"], ["model"], recompute=True)
    graph = graph_of("embed", "a", "a", "norm", "between", "b", "norm", "head")
    assert groups(plan, graph) == ["rest", "a", "a", "rest, 2", "rest, 2", "b", "rest, 3", "rest, 3"]


def test_what_the_backward_begins_with_stays_gathered():
    graph = graph_of("embed", "a", "norm", "head")
    *_, head = graph.graph.find_nodes(op="call_method", target="redistribute")
    embed = next(node for node in graph.graph.nodes if node.op == "placeholder")
    head.args = (embed,)  # tied, so that it stays gathered from the first read on
    GatherPlan.of(["model.a"], ["model"], recompute=True)(graph)
    assert [("recompute" in whole.meta, "recompute" in local.meta) for whole, local in gathers(graph)] == [
        (False, False), (True, True), (False, False), (False, False),
    ]  # fmt: skip


@pytest.mark.parametrize("recompute", [True, False])
def test_what_is_gathered_anew_is_marked(recompute):
    graph = graph_of("a")
    GatherPlan.of([], ["model"], recompute=recompute)(graph)
    marks = [node.meta.get("recompute") for pair in gathers(graph) for node in pair]
    assert marks == ([CheckpointPolicy.MUST_RECOMPUTE] * 2 if recompute else [None] * 2)


def test_plans_are_equal_by_what_they_do():
    def plan(**options):
        return GatherPlan.of(["m.a"], ["m"], **{"recompute": True, "key": "k", **options})

    assert plan() == plan()
    assert hash(plan()) == hash(plan())
    assert len({plan(), plan(recompute=False), plan(key="other")}) == 3


def test_a_write_to_what_was_gathered_is_refused():
    value = torch.zeros(2)
    value.add_(1)
    fake = torch.nn.Parameter(value)  # any subclass stands for a fake tensor here
    fake.data.add_(1)
    with torch.no_grad():
        fake.add_(1)
    with pytest.raises(
        RuntimeError, match=r"(?s)^layers.0 writes to a parameter within its forward.*on_train_batch_end"
    ):
        GatherPlan.of([], ["model"], recompute=True)(graph_of("layers.0", value=fake))
