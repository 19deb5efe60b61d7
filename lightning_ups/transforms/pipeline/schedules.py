"""Builds torch's pipeline schedules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from typing_extensions import override

from lightning_ups._compat.torch.pipelining import PipelineStage
from lightning_ups.transforms.pipeline.cut import Cut, Schedule

_KINDS: dict[Schedule, Any] = {
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleZBVZeroBubble,
}


class Stage(nn.Module):
    """A stage as torch's schedules see it: they call it with the number of a microbatch.

    Args:
        run: Runs the stage, given the number of the microbatch and what was received.
        parts: The modules with its parameters, which are those gathered at the time.
    """

    def __init__(
        self, run: Callable[[int, Tensor | None], Tensor], parts: Callable[[], Iterable[nn.Parameter]]
    ) -> None:
        super().__init__()
        self._run, self._parts = run, parts

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for p in self._parts() if isinstance(p, nn.Parameter))  # others are of other ranks

    @override
    def forward(self, received: Tensor, *, number: Tensor) -> Tensor:
        output = self._run(int(number), received if received.is_floating_point() else None)
        # Torch detaches it in place in a backward of inputs alone, which is not possible for a view.
        return output.clone() if output._is_view() else output


def _nothing_later() -> Callable[..., None]:
    """Return what computes gradients of weights, if the backward of inputs has done that."""
    return lambda: None


def build_schedule(
    cut: Cut,
    stages: Sequence[Stage],
    *,
    hidden: Tensor,
    microbatches: int,
    loss_scale: Callable[[], float],
    divides: bool,
    device: torch.device,
    group: ProcessGroup,
) -> Callable[[], None]:
    """Return a function that runs forward and backward of all microbatches through the stages of this rank.

    Args:
        cut: How the model is cut.
        stages: The stages of this rank, which return hidden states, and the last one a float64 scalar.
        hidden: A meta tensor like what stages pass on.
        microbatches: Their number.
        loss_scale: Returns the factor of each loss in the backward.
        divides: Whether blocks can compute gradients of inputs first, and those of weights later.
        device: The device of this rank.
        group: The ranks of the pipeline.
    """
    numbers = torch.arange(microbatches)
    hidden = hidden.detach().requires_grad_()
    loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
    last = len(cut.stages) - 1
    made = [
        PipelineStage(
            module,
            index,
            last + 1,
            device,
            input_args=(numbers[:1].to("meta") if index == 0 else hidden,),
            output_args=(loss if index == last else hidden,),
            group=group,
            # A fused loss computes both gradients at once, and once.
            dw_builder=None if divides and index < last else _nothing_later,
        )
        for index, module in zip(cut.own_stages, stages, strict=True)
    ]

    def scaled(output: Tensor, _: Any) -> Tensor:
        return output * loss_scale()

    schedule = _KINDS[cut.schedule](
        made[0] if cut.schedule == "1F1B" else made,
        n_microbatches=microbatches,
        loss_fn=scaled,
        scale_grads=False,
    )

    def run() -> None:
        schedule.step(numbers, number=numbers, target=numbers, return_outputs=False)

    return run
