"""A training step as one CUDA graph: input buffers, capture and replay, and what a replay cannot repeat."""

from lightning_ups.transforms.step_graph.buffers import difference, layout_of
from lightning_ups.transforms.step_graph.graphs import CudaGraph, EmulatedGraph, Graph, warmed_up
from lightning_ups.transforms.step_graph.host_state import ConstantIndex, HostState, line_of, names_read, refusing_reads
from lightning_ups.transforms.step_graph.rates import Rates, can_capture, device_rates

__all__ = [
    "ConstantIndex",
    "CudaGraph",
    "EmulatedGraph",
    "Graph",
    "HostState",
    "Rates",
    "can_capture",
    "device_rates",
    "difference",
    "layout_of",
    "line_of",
    "names_read",
    "refusing_reads",
    "warmed_up",
]
