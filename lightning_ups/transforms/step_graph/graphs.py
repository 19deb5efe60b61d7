"""Capture and replay: as a CUDA graph, and emulated for tests without a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ups._compat.torch.device import end_allocations


class Graph(Protocol):
    """A step that is captured once, and then replayed on the same memory."""

    def capture(self, step: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Capture ``step`` and run it once; return its outputs, which each replay overwrites."""
        ...

    def replay(self) -> None:
        """Run the step on what its inputs now contain."""
        ...


@contextmanager
def warmed_up(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the kernels of the context on ``stream``, as torch asks for before a capture."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)


class CudaGraph:
    """A CUDA graph.

    Args:
        stream: The stream on which the step was warmed up.
        pool: The memory pool, which graphs may share if nothing reads the outputs of one after another's replay.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._stream, self._pool = stream, pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, step: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Capture ``step`` and run it once; return its outputs, which each replay overwrites."""
        outputs: list[Tensor] = []
        failure: list[Exception] = []
        current = torch.cuda.current_stream(self._stream.device)
        try:
            with self._recording(self._graph, pool=self._pool):
                try:
                    outputs = step()
                except Exception as error:
                    failure.append(error)
                    raise
        except Exception as error:  # noqa: BLE001  (raised again)
            self._leave(current)
            raise failure[0] if failure else error from None
        self.replay()
        return outputs

    def _leave(self, current: torch.cuda.Stream) -> None:
        """Leave capture mode: if its end raises, torch leaves the stream, the pool and random numbers in it."""
        torch.cuda.set_stream(current)
        end_allocations(self._stream.device, self._pool)
        with suppress(RuntimeError), self._recording(torch.cuda.CUDAGraph(), pool=None):
            torch.zeros((), device=self._stream.device)  # a capture that ends well resets the random numbers
        torch.cuda.set_stream(current)

    def _recording(self, graph: torch.cuda.CUDAGraph, *, pool: Any) -> torch.cuda.graph:
        # Other threads, such as one that pins memory, may call CUDA meanwhile.
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")

    def replay(self) -> None:
        """Run the step on what its inputs now contain."""
        self._graph.replay()


class EmulatedGraph:
    """Runs the step again at each replay, and copies the results to the memory of the first ones.

    Args:
        parameters: The parameters whose gradients the step computes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._step: Callable[[], list[Tensor]] = list
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor | None] = []

    def capture(self, step: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Run ``step``; return its outputs, which each replay overwrites."""
        self._step, self._outputs = step, step()
        self._gradients = [parameter.grad for parameter in self._parameters]
        return self._outputs

    @torch.no_grad()
    def replay(self) -> None:
        """Run the step on what its inputs now contain."""
        with torch.enable_grad():
            outputs = self._step()
        for old, new in zip(self._outputs, outputs, strict=True):
            old.copy_(new)
        for parameter, old in zip(self._parameters, self._gradients, strict=True):
            if old is not None and parameter.grad is not None and parameter.grad is not old:
                old.copy_(parameter.grad)
            parameter.grad = old
