from torch import fx, nn

from lightning_ups._compat.torch.fsdp.gathers import gathers, group_of, module_path, set_group


def graph_of(build):
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("shard")))
    return fx.GraphModule(nn.Module(), graph)


def prim_redistribute(shard):
    return shard


def prim_to_local(whole):
    return whole


def test_gathers_are_known_as_methods_and_as_the_functions_of_torch_2_11():
    methods = graph_of(lambda g, x: g.call_method("to_local", (g.call_method("redistribute", (x,)),)))
    functions = graph_of(lambda g, x: g.call_function(prim_to_local, (g.call_function(prim_redistribute, (x,)),)))
    assert [len(list(gathers(graph))) for graph in (methods, functions)] == [1, 1]


def test_gathers_in_a_checkpointed_region_are_found_at_its_place():
    def gather(graph, shard):
        return graph.call_method("to_local", (graph.call_method("redistribute", (shard,)),))

    graph = fx.Graph()
    shard = graph.placeholder("shard")
    before, body = gather(graph, shard), graph.get_attr("body")
    after = gather(graph, shard)
    graph.output((before, body, after))
    module = nn.Module()
    module.body = graph_of(gather)
    found = [local for _, local in gathers(fx.GraphModule(module, graph))]
    assert [found[0].name, found[2].name] == [before.name, after.name]
    assert found[1].graph is not found[0].graph


def test_a_mark_leaves_other_marks():
    graph = graph_of(lambda g, x: g.call_method("clone", (x,)))
    node = next(iter(graph.graph.find_nodes(op="call_method", target="clone")))
    node.meta["custom"] = {"theirs": 1}
    assert group_of(node) is None
    set_group(node, "layers.0")
    assert (group_of(node), node.meta["custom"]["theirs"]) == ("layers.0", 1)
    node.meta["nn_module_stack"] = {"a": ("L['self']", nn.Module), "b": ("L['self'].layers.0", nn.Module)}
    assert module_path(node) == ["", "layers.0"]
