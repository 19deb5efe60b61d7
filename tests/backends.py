"""Backends for ``torch.compile`` that fail in one way each, and the names under which they are registered."""

from functools import cache

import torch
from functorch.compile import make_boxed_func
from torch._dynamo import register_backend  # noqa: TID251  (the documented way to register a backend)
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251


def _as_it_is(graph, inputs):
    return make_boxed_func(graph.forward)


def _refuses(graph, inputs):
    raise RuntimeError("no kernel for this graph")


def _breaks(graph, inputs):
    def run(*args):
        raise RuntimeError("the kernel was launched and died")

    return make_boxed_func(run)


def _has_tanh(graph):
    return any("tanh" in str(node.target) for node in graph.graph.nodes)


def _no_tanh(graph, inputs):
    if _has_tanh(graph):
        raise RuntimeError("no kernel for tanh")
    return _BACKENDS["aot_as_it_is"](graph, inputs)


def _no_tanh_backward(graph, inputs):
    return _BACKENDS["backward_dies" if _has_tanh(graph) else "aot_as_it_is"](graph, inputs)


def _memory(graph, inputs):
    def run(*args):
        raise torch.OutOfMemoryError("out of memory")

    return make_boxed_func(run)


_BACKENDS = {
    "aot_as_it_is": aot_autograd(fw_compiler=_as_it_is),
    "forward_refused": _refuses,
    "backward_refused": aot_autograd(fw_compiler=_as_it_is, bw_compiler=_refuses),
    "forward_dies": aot_autograd(fw_compiler=_breaks),
    "backward_dies": aot_autograd(fw_compiler=_as_it_is, bw_compiler=_breaks),
    "no_tanh": _no_tanh,
    "no_tanh_backward": _no_tanh_backward,
    "no_memory": aot_autograd(fw_compiler=_memory),
}


@cache
def register():
    """Register them all, under these names with ``ups_`` before them."""
    for name, backend in _BACKENDS.items():
        register_backend(lambda graph, inputs, backend=backend: backend(graph, inputs), name=f"ups_{name}")
