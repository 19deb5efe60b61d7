"""Backends for ``torch.compile`` that fail in one way each, and the names under which they are registered."""

import time
from collections import Counter
from functools import cache

import torch
from functorch.compile import make_boxed_func
from torch._dynamo import register_backend  # noqa: TID251  (the documented way to register a backend)
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251
from torch._inductor import compile_fx, cudagraph_trees  # noqa: TID251
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ups._compat import patches


def _as_it_is(graph, inputs):
    return make_boxed_func(graph.forward)


def _refuses(graph, inputs):
    raise RuntimeError("no kernel for this graph")


def _refuses_silently(graph, inputs):
    raise NotImplementedError


def _dies_silently(*args):
    raise NotImplementedError


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


def _finds_half_a_file(graph, inputs):
    raise ImportError("/cache/ab/kernel.main.so: file too short")


def _memory(graph, inputs):
    def run(*args):
        raise torch.OutOfMemoryError("out of memory")

    return make_boxed_func(run)


class _Recorded:
    """Runs a graph so that each call leaves its outputs in the same memory, as a CUDA graph does."""

    def __init__(self, graph):
        self._graph, self._memory = graph, None

    def __call__(self, *args):
        outputs = self._graph(*args)
        if self._memory is None:
            self._memory = [o.clone() if isinstance(o, torch.Tensor) else o for o in outputs]
        RECORDED.append(self)
        pairs = zip(self._memory, outputs, strict=True)
        return [self._in_place(m, o) if isinstance(o, torch.Tensor) else o for m, o in pairs]

    @staticmethod
    def _in_place(memory, output):
        memory.data.copy_(output)
        return torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage(), 0, memory.size(), memory.stride())


RECORDED = []  # for each call of a recorded graph, forward or backward


def recordings(device=None):
    """Return how many graphs have been recorded."""
    return len({id(recorded) for recorded in RECORDED})


class _Watched:
    """Runs a graph, and keeps count of what it returned that is still alive when a forward runs again."""

    def __init__(self, graph, *, forward):
        self._graph, self._forward = graph, forward

    def __call__(self, *args):
        if self._forward:
            ALIVE.append(sum(not memory.expired() for memory in _RETURNED))
            _RETURNED.clear()
        outputs = self._graph(*args)
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        storages = [o.untyped_storage() for o in outputs if isinstance(o, torch.Tensor)]
        _RETURNED.extend(StorageWeakRef(s) for s in storages if s.data_ptr() not in given)
        return outputs


ALIVE = []  # for each forward: how much of what the last forward and backward returned was alive
_RETURNED = []


def forget():
    """Forget what graphs of earlier tests did."""
    for kept in (RECORDED, ALIVE, _RETURNED):
        kept.clear()


SLOW_MS = 5.0


def _slow(graph, inputs):
    def run(*args):
        time.sleep(SLOW_MS / 1e3)
        return graph.forward(*args)

    return make_boxed_func(run)


class _Node:
    def __init__(self, *, recorded):
        if recorded:
            self.children = {}


class _Manager:
    """Imitates the manager that torch has for each recording, which records a function when it runs again."""

    roots = None

    def __init__(self):
        self.calls, self.nodes, self.current_node = Counter(), {}, None

    def run(self, function):
        self.calls[function] += 1
        if self.calls[function] <= 2:
            self.nodes[function] = _Node(recorded=self.calls[function] > 1)
        self.current_node = self.nodes[function]

    def live_cudagraph_pool_storages_in_curr_execution(self):
        return []

    def shutdown(self):
        self.nodes.clear()


def runs(function, device=0):
    """Do what torch does when ``function`` runs in the recording that is in use."""
    container = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers").get(device)
    if container is not None:  # none where a mode asks for CUDA graphs, since a CPU has none
        container.tree_manager = container.tree_manager or _Manager()
        container.tree_manager.run(function)


def cudagraphify(model, static_input_idxs=(), *, is_backward, records, **options):
    """Stand for inductor's function of this name: record ``model`` by ``records``."""

    def graph(*args):
        return model([*args])

    recorded = records(graph, is_backward)

    def run(inputs):
        args = [*inputs]
        inputs.clear()
        runs(object() if isinstance(recorded, _Watched) else run)  # whose outputs lie elsewhere in each call
        return recorded(*args)

    run._boxed_call = True
    return run


def _with_modes(records):
    """Return a backend that records in its mode "reduce-overhead", where and when inductor would."""

    def part(is_backward=False, is_inference=False):
        def compiled(graph, inputs):
            make, place = cudagraphify, patches._PLACES.get((id(compile_fx), "cudagraphify"))
            for replaced in place._makers.values() if place is not None else ():
                make = replaced(make)
            kind = {"is_backward": is_backward, "is_inference": is_inference}
            return make(make_boxed_func(graph.forward), **kind, records=records)

        return compiled

    parts = {"bw_compiler": part(is_backward=True), "inference_compiler": part(is_inference=True)}
    recording = aot_autograd(fw_compiler=part(), **parts)

    def backend(graph, inputs, *, mode=None):
        return (recording if mode == "reduce-overhead" else _BACKENDS["aot_as_it_is"])(graph, inputs)

    return backend


def _not_permitted(graph, is_backward):
    def run(*args):
        raise RuntimeError("operation not permitted when stream is capturing")

    return run


_BACKENDS = {
    "aot_as_it_is": aot_autograd(fw_compiler=_as_it_is),
    "forward_refused": _refuses,
    "backward_refused": aot_autograd(fw_compiler=_as_it_is, bw_compiler=_refuses),
    "forward_dies": aot_autograd(fw_compiler=_breaks),
    "backward_dies": aot_autograd(fw_compiler=_as_it_is, bw_compiler=_breaks),
    "silently_refused": _refuses_silently,
    "silently_dies": aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(_dies_silently)),
    "no_tanh": _no_tanh,
    "no_tanh_backward": _no_tanh_backward,
    "half_a_file": _finds_half_a_file,
    "slow": aot_autograd(fw_compiler=_slow),
    "no_memory": aot_autograd(fw_compiler=_memory),
}

# Inductor has modes, and of the others those that take one.
_WITH_MODES = {
    "modes": _with_modes(lambda graph, is_backward: _Recorded(graph)),
    "modes_watched": _with_modes(lambda graph, is_backward: _Watched(graph, forward=not is_backward)),
    "modes_slow": lambda graph, inputs, *, mode=None: _BACKENDS["slow"](graph, inputs),
    "modes_no_recording": _with_modes(_not_permitted),
    "modes_backward_dies": _with_modes(
        lambda graph, is_backward: _not_permitted(graph, True) if is_backward else graph
    ),
}
FAIL_TO_RECORD = ("ups_modes_no_recording", "ups_modes_backward_dies")


@cache
def register():
    """Register them all, under these names with ``ups_`` before them."""
    for name, backend in _WITH_MODES.items():
        register_backend(backend, name=f"ups_{name}")
    for name, backend in _BACKENDS.items():
        register_backend(lambda graph, inputs, backend=backend: backend(graph, inputs), name=f"ups_{name}")
