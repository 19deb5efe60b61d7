"""What inductor schedules and writes for an H200, on a machine without a GPU: Triton has to be there, and runs nothing.

Graphs are made on the CPU, of tensors without values, and moved: torch built for CPUs has no CUDA to make them with.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface  # noqa: TID251
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, config, scheduler  # noqa: TID251
from torch._inductor.fx_passes import reinplace  # noqa: TID251
from torch._inductor.graph import GraphLowering  # noqa: TID251
from torch._subclasses import FakeTensorMode

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, regs_per_multiprocessor=65536, warp_size=32, gcnArchName="", L2_cache_size=50 * 2**20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, total_memory=140 * 2**30,
)  # fmt: skip


class Scheduled(NamedTuple):
    """What a graph became.

    Args:
        num_bytes: That its kernels read and write, as inductor counts.
        code: That launches them.
    """

    num_bytes: int
    code: str


class _Enough(Exception):  # noqa: N818
    pass


def scheduled(
    build: Callable[[], nn.Module], shape: tuple[int, ...], settings: Callable[[], AbstractContextManager[Any]]
) -> list[Scheduled]:
    """Return what the graphs of a module's forward and backward in bfloat16 become within ``settings``."""
    found: list[Scheduled] = []

    def compile_to_module(graph: GraphLowering) -> None:
        code: Any = graph.codegen()[0]
        found.append(Scheduled(graph.count_bytes()[0], code.value))
        raise _Enough

    def compiled(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        mode = detect_fake_mode(inputs)
        values = [
            node.meta["val"] if isinstance(node, fx.Node) else node for node in module.graph.output_node().args[0]
        ]
        moved = _moved(module.graph, mode)
        with _on_an_h200(), patch.object(GraphLowering, "compile_to_module", compile_to_module):
            try:
                compile_fx.compile_fx_inner(module, moved, **options)
            except Exception as error:
                if "_Enough" not in repr(error):
                    raise

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            with mode:
                return [torch.empty_like(value) if isinstance(value, Tensor) else value for value in values]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=compiled)

    torch.compiler.reset()
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), config.patch(fx_graph_cache=False, compile_threads=1), settings():
        module, values = build(), torch.empty(shape, requires_grad=True)
        torch.set_default_dtype(torch.float32)
        output = torch.compile(module, backend=backend, fullgraph=True)(values)
        output.backward(torch.empty_like(output))
    return found


def _moved(graph: fx.Graph, mode: Any) -> list[Any]:
    """Move a graph to the GPU, and return its inputs there."""
    device = torch.device("cuda", 0)

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = on_gpu(node.meta["val"])
            elif node.op == "call_function":
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": device}
                args, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                node.meta["val"] = node.target(*args, **named)
                node.meta.pop("tensor_meta", None)
    return [node.meta["val"] for node in graph.find_nodes(op="placeholder")]


@contextmanager
def _on_an_h200():
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from lightning_ups.kernels import float8_casts_triton

    def always(value: Any) -> Any:
        return staticmethod(lambda *_, **__: value)

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    told = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200,
        "get_device_capability": (9, 0), "get_rng_state": torch.empty(1), "set_rng_state": None, "synchronize": None,
        "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    interface = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200,
        "get_compute_capability": 90, "is_triton_capable": True, "raise_if_triton_unavailable": None,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in told.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        for name, value in interface.items():
            stack.enter_context(patch.object(CudaInterface, name, always(value)))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(patch.object(CudaInterface.Worker, name, always(interface[name])))
        stack.enter_context(patch.object(scheduler, "has_triton", lambda *_: True))
        stack.enter_context(patch.object(float8_casts_triton, "_multiprocessors", lambda _: 132))
        # What it puts together runs a slice, for which torch's Python wants a device.
        stack.enter_context(patch.object(reinplace, "canonicalize_view_scatter_ops", lambda _: None))
        yield


@torch.library.custom_op("tests::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stand for attention's kernel, which reads and writes [batch, heads, seq, width] with heads side by side."""
    return torch.empty_like(q)


@torch.library.custom_op("tests::attend_backward", mutates_args=())
def _attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [torch.empty_like(each) for each in (q, k, v)]


def _side_by_side(value: Tensor) -> Tensor:
    batch, heads, seq, width = value.shape
    return value.new_empty(batch, seq, heads, width).transpose(1, 2)


attend.register_fake(lambda q, k, v: _side_by_side(q))
_attend_backward.register_fake(lambda gradient, *inputs: [_side_by_side(each) for each in inputs])
attend.register_autograd(
    lambda ctx, gradient: tuple(_attend_backward(gradient, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
