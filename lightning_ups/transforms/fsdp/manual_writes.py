"""Manual writes to gathered parameters, which would be lost, as of codebooks that follow their inputs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_ups._compat.torch.fsdp.state import held_parameters, replaced, written_to
from lightning_ups.transforms.fsdp.gathered_together import gathered_when_called

__all__ = ["HandWrites", "refuse_replaced"]


class HandWrites:
    """Finds what is written into gathered parameters, which is lost when these are freed.

    Each device compares its shard with its part of what was gathered. No counter of versions would do: a write through
    ``.data`` counts nowhere.

    Args:
        root: The sharded model, within a step.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self._written: dict[int, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what each module inside the model gathered, after its forward, until the end of the context."""
        with ExitStack() as hooks:
            for module, gathered in gathered_when_called(self._root).items():
                look = partial(self._after_forward, gathered)  # before torch's own hook, which frees them
                hooks.callback(module.register_forward_hook(look, prepend=True).remove)
            yield

    def look(self) -> None:
        """Look at what is gathered now: what the model itself holds, and what modules keep after their forward."""
        for module in self._root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                self._look_at(module)

    def refuse(self, *, device: torch.device) -> None:
        """Say so if any device found a write. Every rank must call it.

        Raises:
            RuntimeError: If what was written would be lost.
        """
        held = [(name, handle) for _, _, _, name, handle in held_parameters(self._root)]
        if not held:
            return
        no = torch.zeros((), dtype=torch.bool, device=device)
        found = torch.stack([self._written.get(id(handle), no).to(device) for _, handle in held]).int()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if names := sorted(name for (name, _), yes in zip(held, found.tolist(), strict=True) if yes):
            raise RuntimeError(
                f"{', '.join(names[:3])} {'is' if len(names) == 1 else 'are'} written to by hand within training_step,"
                " or by a hook between it and its backward."
                " There a sharded parameter is a gathered copy that is freed after use, and what was written would be"
                " lost."
                f" Make it a buffer, self.register_buffer({names[0].rpartition('.')[2]!r}, ...), which stays whole, or"
                " write to it in on_train_batch_end, where it is a shard, or train with strategy='ddp'."
            )

    def _after_forward(self, gathered: Sequence[FSDPModule], *_: Any) -> None:
        for module in gathered:
            self._look_at(module)

    def _look_at(self, module: FSDPModule) -> None:
        for handle, differs in written_to(module):
            before = self._written.get(id(handle))
            self._written[id(handle)] = differs if before is None else before | differs


def refuse_replaced(root: FSDPModule) -> None:
    """Say so if a sharded parameter is no longer the one that its module has.

    Raises:
        RuntimeError: If so.
    """
    if names := replaced(root):
        module, _, name = names[0].rpartition(".")
        raise RuntimeError(
            f"{', '.join(names[:3])} {'was' if len(names) == 1 else 'were'} set to another parameter after sharding."
            " The shard that was there is what is gathered, trained and saved, and the other would be lost."
            f" Write values into it, within torch.no_grad(), as {module or 'self'}.{name}[:] = values; or set it before"
            " fit."
        )
