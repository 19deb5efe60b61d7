"""Fake tensors, and the graphs that the compiler would make of code that runs on them."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributions import Distribution
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_ups._compat.contexts import only_from
from lightning_ups._compat.torch.tensors.autograd import in_backward

# Raised by operators whose result depends on values, or for which torch has no fake implementation.
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

Graph = fx.GraphModule
_FUSED = frozenset(  # fused into loops by inductor, although they are not pointwise
    {
        "aten._to_copy", "aten.amax", "aten.amin", "aten.any", "aten.arange", "aten.cat", "aten.clone",
        "aten.constant_pad_nd", "aten.copy", "aten.embedding", "aten.empty", "aten.full", "aten.full_like",
        "aten.gather", "aten.index", "aten.mean", "aten.native_dropout", "aten.ones_like", "aten.prod",
        "aten.rand", "aten.repeat", "aten.scalar_tensor", "aten.scatter.value", "aten.select_scatter",
        "aten.slice_scatter", "aten.sum", "aten.var_mean", "aten.zeros_like", "prims.broadcast_in_dim",
        "prims.convert_element_type", "prims.inductor_lookup_seed", "prims.inductor_random",
        "prims.inductor_seeds", "prims.iota", "prims.prepare_softmax_online", "prims.xor_sum",
    }
)  # fmt: skip
_VIEWS = ("aten._unsafe_view", "aten._reshape_alias")


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes, dtypes and storages, and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_mesh(size: int) -> Iterator[DeviceMesh]:
    """Open a process group of ``size`` devices that do not exist, whose collectives do nothing, and yield its mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def has_no_data(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a fake one or on the meta device."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def partitioning_backend(make: Callable[[Graph], Callable[[list[Any]], Sequence[Any]]]) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` that partitions graphs as inductor does, and compiles nothing.

    Args:
        make: Called with each forward and backward graph, in inductor's operators. Returns a function that runs the
            graph on a list of arguments, and empties the list.
    """
    # Imported here: inductor takes seconds to import.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiled(graph: Graph, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:  # noqa: ARG001
        run = make(graph)

        def boxed(args: list[Any]) -> Sequence[Any]:
            return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]  # arguments can be freed while it runs
        return boxed

    return aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        inference_compiler=compiled,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def forget_compiled() -> None:
    """Reset Dynamo, so that another batch size does not count as a recompilation."""
    torch.compiler.reset()


def quiet_compiler() -> AbstractContextManager[None]:
    """Silence the warnings of Dynamo while the context is open."""
    return only_from(logging.ERROR, "torch._dynamo")


def is_tracing() -> bool:
    """Return whether the compiler is tracing, so that operators that run now are not part of a step."""
    return CompileContext.current_compile_id() is not None


def is_view(target: Any) -> bool:
    """Return whether the result of an operator shares the memory of its argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    aliases = [value.alias_info for value in returns if value.alias_info is not None]
    return (bool(aliases) and not any(alias.is_write for alias in aliases)) or _name(target) in _VIEWS


def is_fused(target: Any) -> bool:
    """Return whether inductor fuses an operator with others, so that its result may never be stored."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or _name(target) in _FUSED or str(target) in _FUSED


def _name(target: Any) -> str:
    return f"{target.namespace}.{target._schema.name.partition('::')[2]}"


@contextmanager
def without_checks() -> Iterator[None]:
    """Let distributions made while the context is open skip argument checks, unless a caller asks for them."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def run_backward(loss: Tensor) -> None:
    """Call ``loss.backward()`` with active function modes, which torch disables in ``Tensor.backward``."""
    engine: Any = torch.autograd.Variable._execution_engine
    keep_graph = create_graph = False
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward((loss,), (torch.ones_like(loss),), keep_graph, create_graph, (), **options)


class RecomputeCounter(FlopCounterMode):
    """Counts like torch's counter, and in ``recomputed`` the part that activation checkpointing computes again.

    Args:
        forwards: Operators that only a forward pass calls.
        **options: Options of torch's counter.
    """

    def __init__(self, *, forwards: Collection[Any] = (), **options: Any) -> None:
        super().__init__(**options)
        self.recomputed = 0
        self._forwards = frozenset(forwards)

    @override
    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # Backward formulas run without grad mode. Recomputation runs with it, except inside custom autograd functions.
        again = in_backward() and (torch.is_grad_enabled() or func_packet in self._forwards)
        before = self.flop_counts["Global"].get(func_packet, 0) if again else 0
        result = super()._count_flops(func_packet, out, args, kwargs)
        if again:
            self.recomputed += self.flop_counts["Global"].get(func_packet, 0) - before
        return result
