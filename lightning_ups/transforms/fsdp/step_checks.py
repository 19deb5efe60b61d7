"""Checks that find one kind of mistake each in the steps of a sharded model, on all ranks."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_ups._compat.torch.fsdp.state import held_parameters, replaced, unreduced, written_to
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo
from lightning_ups.transforms.fsdp.model_forward import gathered_when_called, sharded_in
from lightning_ups.transforms.fsdp.stalls import StallWatch
from lightning_ups.transforms.quoted import listed
from lightning_ups.transforms.sharding import StepState

__all__ = ["CollectiveOrder", "LateGradients", "ManualWrites", "StepCheck", "refuse_replaced"]

# A copy of a layer that follows it, such as a teacher network, changes only after the layer was stepped, and the first
# learning rate of a warm-up may be 0.
_STEPS_WITH_WRITES = 3


class StepCheck:
    """One check of each step. A strategy calls the methods of its checks, in the order of the list.

    A method raises on all ranks if it finds a mistake. Its collectives must run on all ranks.
    """

    def begin(self, step: StepState, undo: ExitStack) -> None:
        """Called before a step, with the model's own group gathered; ``undo`` is closed when the step ends or fails."""

    def end(self, step: StepState) -> None:
        """Called after a step, in reverse order, while the model's own group is still gathered."""

    def before_free(self) -> None:
        """Called before the model's own group is freed; several times in a manual step."""

    def before_backward(self, step: StepState) -> None:
        """Called before each backward."""

    def after_reduction(self) -> None:
        """Called after the last backward of an optimizer step, when all gradients are reduced."""


class CollectiveOrder(StepCheck):
    """Records which modules training steps call first, and which gradients are reduced.

    Only the first call of a module in a step counts: whether a later call gathers again depends on what is kept.

    Args:
        names: Names of the modules whose calls gather.
        stalls: Receives the same records, to find ranks that wait for each other.
        undo: Removes the hooks.

    Attributes:
        checksum: The checksum of all records; ranks with different checksums have run something different.
    """

    def __init__(self, names: Iterable[tuple[str, nn.Module]], *, stalls: StallWatch, undo: ExitStack) -> None:
        self.checksum = 0
        self._stalls, self._called, self._is_on = stalls, set[nn.Module](), False
        self._names = {module: name for name, module in names}

        def note(module: nn.Module, *_: Any) -> None:
            if self._is_on and torch.is_grad_enabled() and module not in self._called:
                self._called.add(module)
                self._note(self._names[module])

        hook = hidden_from_dynamo(note)  # graphs of functions that a user compiled would break at the checksum
        for module in self._names:
            undo.callback(module.register_forward_pre_hook(hook).remove)

    @override
    def begin(self, step: StepState, undo: ExitStack) -> None:
        self._called.clear()
        if step.is_training:
            self._stalls.begin_step()
            self._is_on = True
            undo.callback(self._rest)

    def note_reduction(self, names: Sequence[str]) -> None:
        """Record that the gradients of these parameters are about to be reduced."""
        if names:
            self._note(f"the reduction of gradients of {listed(names)}")

    def _rest(self) -> None:
        self._is_on = False

    def _note(self, name: str) -> None:
        self.checksum = crc32(name.encode(), self.checksum)
        self._stalls.note(name)


class LateGradients(StepCheck):
    """Finds gradients, in the first optimizer step, that arrived after their group was reduced.

    Args:
        root: The sharded model.

    Raises:
        RuntimeError: After the reduction, if there are any: they would be added to the next step.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root, self._looks = root, True

    @override
    def after_reduction(self) -> None:
        looks, self._looks = self._looks, False
        if looks and (left := unreduced(self._root)):
            raise RuntimeError(
                f"The gradients of {listed(left)} arrived after their group was reduced, because they are read outside"
                f" the forward of the module that gathers them. Name them: FSDP2Strategy(outside={left[:3]})."
            )


class ManualWrites(StepCheck):
    """Finds writes to gathered parameters in the first steps. They are lost when the parameters are freed.

    Each device compares its shard with its part of the gathered tensor. Version counters are not enough: they do not
    count writes through ``.data``.

    Args:
        root: The sharded model.
        device: The device of this rank.

    Raises:
        RuntimeError: At the end of a step or before its backward, if a write would be lost.
    """

    def __init__(self, root: FSDPModule, *, device: torch.device) -> None:
        self._root, self._device = root, device
        self._looks = False
        self._looked_at: set[int] = set()  # numbers of optimizer steps
        self._written: dict[int, Tensor] = {}

    @override
    def begin(self, step: StepState, undo: ExitStack) -> None:
        self._looks = (
            step.is_training and step.number not in self._looked_at and len(self._looked_at) < _STEPS_WITH_WRITES
        )
        if not self._looks:
            return
        self._looked_at.add(step.number)
        self._written.clear()
        for module, gathered in gathered_when_called(self._root).items():
            look = partial(self._after_forward, gathered)  # before torch's own hook, which frees them
            undo.callback(module.register_forward_hook(look, prepend=True).remove)

    @override
    def end(self, step: StepState) -> None:
        if self._looks:
            self.before_free()
            self._refuse()
            self._looks = not step.is_manual

    @override
    def before_free(self) -> None:
        for module in sharded_in(self._root) if self._looks else ():
            self._look_at(module)

    @override
    def before_backward(self, step: StepState) -> None:
        if self._looks and not step.is_manual:
            self.before_free()  # writes by hooks since the step
            self._refuse()
            self._looks = False

    def _refuse(self) -> None:
        held = [(name, handle) for _, _, _, name, handle in held_parameters(self._root)]
        if not held:
            return
        no = torch.zeros((), dtype=torch.bool, device=self._device)
        found = torch.stack([self._written.get(id(handle), no).to(self._device) for _, handle in held]).int()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if names := sorted(name for (name, _), yes in zip(held, found.tolist(), strict=True) if yes):
            raise RuntimeError(
                f"{', '.join(names[:3])} {'is' if len(names) == 1 else 'are'} written to within training_step, or"
                " between it and its backward. The write would be lost with the gathered copy. Use"
                f" self.register_buffer({names[0].rpartition('.')[2]!r}, ...), write in on_train_batch_end, or train"
                " with strategy='ddp'."
            )

    def _after_forward(self, gathered: Sequence[FSDPModule], *_: Any) -> None:
        for module in gathered:
            self._look_at(module)

    def _look_at(self, module: FSDPModule) -> None:
        for handle, differs in written_to(module):
            before = self._written.get(id(handle))
            self._written[id(handle)] = differs if before is None else before | differs


def refuse_replaced(root: FSDPModule) -> None:
    """Raise if a module has another parameter than the one that was sharded.

    Raises:
        RuntimeError: In that case.
    """
    if names := replaced(root):
        module, _, name = names[0].rpartition(".")
        raise RuntimeError(
            f"{', '.join(names[:3])} {'was' if len(names) == 1 else 'were'} set to another parameter after sharding,"
            f" which would not be trained. Write {module or 'self'}.{name}[:] = values within torch.no_grad(), or set"
            " it before fit."
        )
