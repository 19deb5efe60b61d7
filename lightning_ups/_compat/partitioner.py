"""AOTAutograd's split of a graph into forward and backward, where it loses count of what it passes between the two."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

__all__ = ["random_states_in_place"]


@contextmanager
def random_states_in_place() -> Iterator[None]:
    """Let graphs draw anew, in what backward recomputes, also where they pass more than tensors and numbers.

    From torch 2.13 on a graph whose parameters are sharded passes their mesh to its backward, after all tensors and
    before numbers. The partitioner puts the states of random numbers before the numbers, as if there were no mesh, and
    the runtime takes the mesh for a tensor. Attention counts as random on a CPU, whatever its dropout is.
    """
    from torch._functorch import partitioners  # slow to import, and nothing that --help needs

    original = getattr(partitioners, "functionalize_rng_ops", None)
    is_opaque = getattr(partitioners, "is_opaque_node", None)
    if original is None or is_opaque is None or "num_sym_nodes" not in inspect.signature(original).parameters:
        yield  # another torch, whose own order may be right
        return

    def functionalize_rng_ops(
        joint_module: fx.GraphModule, fw_module: fx.GraphModule, bw_module: fx.GraphModule, num_sym_nodes: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        saved = [p for p in bw_module.graph.find_nodes(op="placeholder") if "tangent" not in p.name]
        opaque = [p for p in saved if is_opaque(p)]
        forward, backward = original(joint_module, fw_module, bw_module, num_sym_nodes + len(opaque))
        for state in backward.graph.find_nodes(op="placeholder") if opaque else ():
            if state.name.startswith("rng_state_output"):
                opaque[0].prepend(state)
        backward.recompile()
        return forward, backward

    module: Any = partitioners
    module.functionalize_rng_ops = functionalize_rng_ops
    try:
        yield
    finally:
        module.functionalize_rng_ops = original
