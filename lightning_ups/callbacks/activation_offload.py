"""Offloads activations of blocks to the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_ups._compat.lightning.steps import was_skipped
from lightning_ups.order import Context, Declaration, Report, Stage
from lightning_ups.order.arguments import (
    OnNoEffect,
    check_finite,
    check_least,
    check_on_no_effect,
    check_some,
    raise_or_warn,
)
from lightning_ups.transforms.activation_offload import MIN_BYTES, Offloaded, offload_activations
from lightning_ups.transforms.blocks import as_patterns, select_blocks
from lightning_ups.transforms.quoted import several

_PART = "ActivationOffload"


class ActivationOffload(Declaration):
    """Move the tensors that blocks save for backward to pinned host memory, and back before they are needed.

    The copies overlap with computation: to the host while the next block runs forward, back while the following block
    runs backward. Parameters, and views and casts of them, are not moved. Values do not change, bit for bit.

    With `ActivationCheckpoint(save="nothing")` on the same blocks, it moves the inputs of each block, which are all
    that is saved then. With `Compile` it moves the tensors that compiled code saves.

    Args:
        blocks: Patterns of submodule names, such as ``["model.layers.*"]``. Each must match. None: the blocks that
            repeat.
        every_k: Take the first block and every k-th after it.
        min_mb: Saved tensors smaller than this many MiB stay on the device.
        on_no_effect: If nothing was moved in the first step, ``"raise"`` an error, or ``"warn"`` and go on.

    Raises:
        TypeError: If ``blocks`` is a single string.
        ValueError: If an argument is out of its range; when fitting starts, if a pattern matches no submodule, or if
            whole models are compiled, or CUDA graphs are used.
        RuntimeError: Before the first optimizer step, if nothing was moved and ``on_no_effect="raise"``. With manual
            optimization this is a warning.

    Example::

        Trainer(callbacks=[ActivationCheckpoint(save="nothing"), ActivationOffload()])
    """

    stage = Stage.OFFLOAD
    in_fabric = "Open the context offload_activations() of lightning_ups.transforms.activation_offload instead."
    moves_saved = True

    def __init__(
        self,
        *,
        blocks: Sequence[str] | None = None,
        every_k: int = 1,
        min_mb: float = MIN_BYTES / 2**20,
        on_no_effect: OnNoEffect = "raise",
    ) -> None:
        check_least("every_k", every_k, 1, of=_PART, why="1 selects every block, 2 every second one.")
        check_finite("min_mb", min_mb, of=_PART, why="Tensors of fewer MiB stay.")
        self.blocks = None if blocks is None else as_patterns(blocks)
        check_some("blocks", self.blocks, of=_PART, why="It selects no block, so it would change nothing.")
        self.every_k, self.min_mb = every_k, min_mb
        self.on_no_effect: OnNoEffect = check_on_no_effect(on_no_effect, of=_PART)
        self._unproven: tuple[Offloaded, Report] | None = None
        self._told = False  # whether the report says that nothing was moved so far
        self._began_at = 0  # the global step of the current batch

    @override
    @contextmanager
    def change(self, module: LightningModule, context: Context) -> Iterator[None]:
        if not context.training:
            yield
            return
        found = select_blocks(module, self.blocks)
        chosen = dict(islice(found.items(), None, None, self.every_k))
        context.report.note(
            _PART,
            f"{len(chosen)} of {len(found)} blocks offload what they save for backward to the host"
            f"{' (nothing repeats, so each root is a block)' if found.origin == 'roots' else ''}",
            blocks=[*chosen],
            every_k=self.every_k,
        )
        with offload_activations(
            chosen.values(), memory=context.memory, device=context.device, min_bytes=int(self.min_mb * 2**20)
        ) as offloaded:
            self._unproven, self._told = (offloaded, context.report), False
            try:
                yield
            finally:
                self._unproven = None

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._began_at = trainer.global_step

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization and (fault := self._fault()):
            raise_or_warn(fault, self.on_no_effect)  # no optimizer has stepped yet

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With manual optimization, any backward may be that of other blocks, and an optimizer may already have stepped.
        manual = not pl_module.automatic_optimization
        if manual and not was_skipped(pl_module, outputs, began_at=self._began_at) and (fault := self._fault()):
            rank_zero_warn(fault)

    def _fault(self) -> str | None:
        """Return the error if the first step moved nothing, and report what it moved."""
        if self._unproven is None:
            return None
        done, report = self._unproven
        if done.ran and not done.moved_bytes and not done.left_bytes:  # frozen, perhaps until a later epoch
            if not self._told:
                self._told = True
                rank_zero_warn(
                    f"ActivationOffload has moved nothing so far: {several(len(done.ran), 'block')} ran without needing"
                    " gradients, so that nothing is saved for backward. It takes effect once they are unfrozen."
                )
            return None
        self._unproven = None
        report.update(_PART, blocks_run=len(done.ran), moved_bytes=done.moved_bytes, left_bytes=done.left_bytes)
        if not done.ran:
            return (
                "ActivationOffload moved nothing in the first step: none of its blocks ran separately."
                " training_step does not call their forwards, or runs them as parts of one graph."
                " Use Compile(scope='blocks'), or name blocks that are called: ActivationOffload(blocks=[...])."
            )
        if done.moved_bytes:
            return None
        return (
            f"ActivationOffload moved nothing in the first step: {several(len(done.ran), 'block')} saved no tensor of"
            f" {self.min_mb:g} MiB beside parameters, and {done.left_bytes} bytes in smaller ones."
            " Small copies cost more time than they save memory."
            " Use larger batches, a smaller min_mb, or leave the callback out."
        )
