"""Gradients of low-precision parameters, gathered and reduced over ranks in float32 by their masters until a step."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_ups.optim.adamw_step import gradient_column
from lightning_ups.optim.master_weights import MasterWeights, taken_over

_LAYOUT = attrgetter("layout")


class MasterGradients:
    """The gradients of one optimizer's parameters, in float32 where these have masters.

    A backward leaves gradients in the parameters, in low precision. They move to the masters before another backward
    would add to them there, and before a step. A data-parallel wrapper whose reduction is made in float32 leaves its
    sums in the masters itself. While users may look, parameters show rounded copies, and what is written there counts.
    """

    def __init__(
        self,
        masters: MasterWeights,
        *,
        parameters: Callable[[], list[nn.Parameter]],
        accumulate: bool = False,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        self.wrapper = wrapper
        self._masters, self._of, self._parameters = masters, masters.of, parameters
        self._accumulates, self._handles = accumulate, list[RemovableHandle]()
        self._followed: set[nn.Parameter] = set()
        # Parameters that were frozen when the wrapper was made: it does not reduce them.
        self._late = {p for p in masters.of if not p.requires_grad} if wrapper is not None else set[nn.Parameter]()
        self._late_done = self._are_aside = False
        self._stepped: list[nn.Parameter] = []  # by the last step, which has taken their gradients
        self._seen: set[nn.Parameter] = set()  # in whose gradients others may write now
        self._shown: set[nn.Parameter] = set()  # of these, whose gradients are copies and not a wrapper's

    def follow(self) -> None:
        """Move gradients of microbatches, if they accumulate, of parameters that have become trainable too."""
        if self._accumulates:
            new = [p for p in self._mastered() if p.requires_grad and p not in self._followed]
            self._handles += [p.register_post_accumulate_grad_hook(self._move_unless_reduced) for p in new]
            self._followed.update(new)

    def stop(self) -> None:
        """Leave gradients of microbatches to the parameters."""
        for handle in self._handles:
            handle.remove()

    def all(self) -> Sequence[Tensor]:
        """Return the gradients that the next step uses, before any clipping."""
        self.complete()
        parameters = self._parameters()
        wide = gradient_column(map(self._of.get, parameters, parameters))
        pairs = zip(wide, gradient_column(parameters), strict=True)
        return [found for master, own in pairs if (found := own if master is None else master) is not None]

    def complete(self) -> None:
        """Let masters have the gradients of all ranks, with what was written into those that are shown."""
        are_shown = bool(self._seen)
        self.take_over()
        self._complete_reduction()
        if are_shown:
            self.show()

    def prepare_step(self) -> None:
        """Let masters have all that the next step uses, if they do not have it from the parameters then."""
        self.take_over()
        self._complete_reduction()
        self._late_done = self._are_aside = False
        parameters = self._parameters()
        if _are_dense(gradient_column(parameters)):  # which takes no hash: every step comes here
            self._stepped = parameters
        else:
            self._stepped = [
                p for p in parameters if _is_dense(p.grad) or (p in self._of and _is_dense(self._of[p].grad))
            ]

    def hand_over(self) -> None:
        """Move to the masters what a step by another optimizer reads there."""
        if self.wrapper is None:  # with a wrapper, the reduction has left its sums in the masters
            self._move(self._mastered())

    def spend(self, parameters: Iterable[nn.Parameter], masters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that a step has used; those in the parameters of a wrapper are the wrapper's."""
        for each in masters if self.wrapper is not None else (*masters, *parameters):
            each.grad = None

    def clear(self, *, to_none: bool) -> None:
        """Drop the gradients of masters, as ``zero_grad`` does those of parameters after this."""
        if to_none:
            self._stepped = []
        elif self.wrapper is None:
            # A gradient that a step has taken, or that a master has, is one to be set to zero: it decays its weight.
            for parameter in (*self._stepped, *(p for p in self._mastered() if _is_dense(self._of[p].grad))):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._are_aside = self._late_done = False
        self._seen.clear()
        self._shown.clear()
        self.follow()  # of those that were frozen
        if self._masters.reduced:
            self._masters.reduced.difference_update(self._parameters())
        for master in map(self._of.get, self._parameters()):
            if master is not None:
                master.grad = None

    # Showing them

    @torch.no_grad()
    def show(self) -> None:
        """Let each parameter whose master has a gradient have it too, rounded, for those who look and write there."""
        self._seen.clear()
        for parameter in self._mastered():
            gradient = self._of[parameter].grad
            if not _is_dense(gradient):
                continue
            if parameter.grad is None and parameter not in self._masters.reduced:  # else no rank has used it
                parameter.grad = gradient.to(parameter.dtype)
                self._shown.add(parameter)
            elif parameter.grad is not None and parameter not in self._late:
                parameter.grad.copy_(gradient)
            if parameter.grad is not None:
                self._seen.add(parameter)

    def show_again(self) -> None:
        """Let parameters have what was made of the masters' gradients, if they are shown."""
        if self._seen:
            self.show()

    @torch.no_grad()
    def take_over(self) -> None:
        """Bring into the masters' gradients what others have written into those that are shown, and hide these."""
        for parameter in self._seen:
            master = self._of[parameter]
            if parameter.grad is None:
                master.grad = None
            elif master.grad is not None:
                taken_over(master.grad, parameter.grad)
        for parameter in self._shown:
            parameter.grad = None
        self._shown.clear()
        self._seen.clear()

    # Adding the backwards of one step

    def set_aside(self) -> None:
        """Let masters have what a backward has left in parameters: the next would add to it in low precision."""
        self.take_over()
        if self.wrapper is not None:
            return
        if left := [p for p in self._mastered() if _is_dense(p.grad)]:
            self._move(left)
            self._are_aside = True

    def add_to_those_aside(self) -> None:
        """Add what the last backward has left in parameters to what `set_aside` has given to masters."""
        if self._are_aside:
            self._move([p for p in self._mastered() if self._of[p].grad is not None])

    def _move(self, parameters: Iterable[nn.Parameter]) -> None:
        # All in one kernel, where there is nothing to add to: one for each would keep a fast GPU waiting.
        first: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            if self._of[parameter].grad is None:
                first.append((parameter, gradient))
            else:
                self._move_one(parameter)
        if not first:
            return
        wide = [torch.empty_like(gradient, dtype=self._of[parameter].dtype) for parameter, gradient in first]
        torch._foreach_copy_(wide, [gradient for _, gradient in first])
        for (parameter, _), gradient in zip(first, wide, strict=True):
            self._of[parameter].grad, parameter.grad = gradient, None

    def _move_unless_reduced(self, parameter: nn.Parameter) -> None:
        if self.wrapper is None or parameter in self._late or not self.wrapper.require_backward_grad_sync:
            self._move_one(parameter)

    def _move_one(self, parameter: nn.Parameter) -> None:
        master, gradient = self._of[parameter], parameter.grad
        assert gradient is not None
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)  # of the low precision: torch adds in the type of the sum

    # Reducing them over ranks

    def _complete_reduction(self) -> None:
        for parameter in self._masters.reduced:
            if parameter.grad is None:  # the wrapper has left it so: no rank has used it
                self._of[parameter].grad = None
        self._masters.reduced.clear()
        self._reduce_late()

    @torch.no_grad()
    def _reduce_late(self) -> None:
        """Average, once a step, gradients of parameters that were frozen when the wrapper was made."""
        late = [p for p in self._parameters() if p in self._late and p.requires_grad] if self._late else []
        if self._late_done or not late:
            return
        group = self.wrapper.process_group if self.wrapper is not None else None
        assert group is not None
        sums: list[Tensor] = []
        for parameter in late:
            master = self._of[parameter]
            if parameter.grad is not None:
                self._move_one(parameter)
            elif master.grad is None:  # of a rank that has not used it; the others wait for it
                master.grad = torch.zeros_like(parameter, dtype=master.dtype)  # the master may be on the host
            assert master.grad is not None
            sums.append(master.grad)
        total = torch.cat([each.flatten() for each in sums])
        dist.all_reduce(total.div_(group.size()), group=group)
        for each, part in zip(sums, total.split([each.numel() for each in sums]), strict=True):
            each.copy_(part.view_as(each))
        self._late_done = True

    def _mastered(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters() if parameter in self._of]


def _are_dense(gradients: Sequence[Tensor | None]) -> bool:
    return not any(map(is_, gradients, repeat(None))) and all(map(is_, map(_LAYOUT, gradients), repeat(torch.strided)))


def _is_dense(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.layout is torch.strided


def reduce_into_masters(wrapper: DistributedDataParallel, masters: MasterWeights) -> None:
    """Let ``wrapper`` average gradients in the type of the masters, with what they have accumulated already.

    The wrapper's own buckets have the type of the parameters: their sum over many ranks would be rounded to it.

    Raises:
        ValueError: If the wrapper has a communication hook already.
    """
    group = wrapper.process_group
    assert group is not None
    with torch.no_grad():
        for parameter, master in masters.of.items():
            # The wrapper has given every rank the first one's parameters, but knows nothing of their masters.
            dist.broadcast(master, src=dist.get_global_rank(group, 0), group=group)
            parameter.copy_(master)
    masters.take_over(by_value=True)
    try:
        wrapper.register_comm_hook(masters, _reduced)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise ValueError(
            "Gradients are reduced by a hook of the user's already, and masters need theirs to sum in float32."
            " Leave ddp_comm_hook out of the strategy, or set weights='autocast' in the precision."
        ) from error


def _reduced(masters: MasterWeights, bucket: dist.GradBucket) -> Future[Tensor]:
    parameters = [parameter for parameter in bucket.parameters() if isinstance(parameter, nn.Parameter)]
    buffer = bucket.buffer()
    if not any(parameter in masters.of for parameter in parameters):
        return _averaged(buffer)  # complex numbers among others, whose bucket is of their parts
    total = buffer.to(torch.float32)
    parts = total.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if masters.accumulates and parameter in masters.of and (earlier := masters.of[parameter].grad) is not None:
            part.add_(earlier.flatten())  # of the microbatches before this one

    def finish(_: Any) -> Tensor:
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter in masters.of:
                masters.of[parameter].grad = part.view_as(parameter)
                masters.reduced.add(parameter)
        return buffer.copy_(total)

    return _averaged(total).then(finish)


def _averaged(total: Tensor) -> Future[Tensor]:
    work = dist.all_reduce(total.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: total)
