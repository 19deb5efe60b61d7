"""The steps of sharding: conversion, the sharding itself, and values for what is on the meta device."""

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_ups.order import Context, DtypePolicy, PolicyPrecision, Stage, Step
from lightning_ups.transforms.blocks import Blocks, Origin, select_blocks
from lightning_ups.transforms.quoted import listed
from lightning_ups.transforms.sharding import Initialisation, recall, unsharded


@dataclass(frozen=True)
class Convert(Step):
    """Conversions that replace parameters, and must come first."""

    stage = Stage.CONVERT
    layer_sync: Any  # Lightning's plugin for ``sync_batchnorm``, or None

    @override
    def change(self, module: LightningModule, context: Context) -> AbstractContextManager[None]:
        assert isinstance(context.precision, PolicyPrecision)
        if recall(module) is not None:
            context.precision.keep_module(module)
        else:
            context.precision.convert_for_good(module)
            if self.layer_sync is not None and context.training:
                self.layer_sync.apply(module)
        return context.precision.in_float32(module)


@dataclass(frozen=True)
class Materialise(Step):
    """Memory and values for a module on the meta device.

    Args:
        plan: How its tensors get their values.
        offload: Whether shards are on the CPU.
        draw_on: The device that draws random values.
    """

    stage = Stage.MATERIALISE
    plan: Initialisation
    offload: bool
    draw_on: str

    @override
    def change(self, module: LightningModule, context: Context) -> nullcontext[None]:
        cpu = torch.device("cpu")
        self.plan.run(
            module,
            shards_on=cpu if self.offload else context.device,
            device=context.device,
            draw_on=cpu if self.draw_on == "cpu" else context.device,
        )
        replicated, names = recall(module).replicated, dict(module.named_parameters())
        replicated.update((name, names[name]) for name in replicated)  # they had to be created again
        context.report.note(
            context.strategy.name,
            f"{len(self.plan)} tensors initialised from the meta device, drawn on the {self.draw_on}",
        )
        return nullcontext()


@dataclass(frozen=True)
class ShardStep(Step):
    """Shards the module block by block. Subclasses define how.

    Args:
        blocks: Patterns of blocks. None: the blocks that repeat.

    Attributes:
        part: The strategy's name, for the report and for errors.
    """

    stage = Stage.SHARD
    part: ClassVar[str]
    blocks: tuple[str, ...] | None

    @abstractmethod
    def shard(self, module: LightningModule, blocks: Blocks, mesh: DeviceMesh) -> Any:
        """Shard ``module`` and return a record of it."""

    def report(self, done: Any, context: Context) -> None:
        """Report details of this kind of sharding."""

    @override
    def change(self, module: LightningModule, context: Context) -> nullcontext[None]:
        assert context.mesh is not None
        blocks = select_blocks(module, self.blocks)
        done = self.shard(module, blocks, context.mesh)
        if blocks.origin == "named" and done.blocks != tuple(blocks):
            raise ValueError(
                f"{type(module).__name__} was sharded by an earlier run in other blocks: {listed(done.blocks)};"
                f" {self.part}(blocks={[*(self.blocks or ())]}) names {listed([*blocks])}. Sharding stays on a module."
                " Leave blocks as they were, or build the module anew and load a checkpoint."
            )
        if left := [name for name in unsharded(module) if name not in done.replicated]:
            raise RuntimeError(
                f"{self.part} would never reduce the gradients of {', '.join(left[:8])}."
                " This is a defect of lightning_ups. Please report it, with the module."
            )
        self._report_layout(done, context, origin=blocks.origin)
        self.report(done, context)
        return nullcontext()  # undoing would need collectives, which are not possible after an exception

    def _report_layout(self, done: Any, context: Context, *, origin: Origin) -> None:
        layout = ", ".join(f"{name}={size}" for name, size in done.layout)
        how = {"repeated": "", "named": " as named", "roots": ", the roots, since nothing repeats"}[origin]
        context.report.note(
            self.part,
            f"{len(done.blocks)} blocks{how}, with {done.share_of_blocks:.0%} of the parameters' bytes, over {layout}",
            blocks=[*done.blocks],
            mesh=dict(done.layout),
            share_of_blocks=done.share_of_blocks,
        )
        if done.replicated:
            names = [*done.replicated]
            context.report.note(self.part, f"whole on every device: {listed(names)}", replicated=names)


def gather_options(policy: DtypePolicy) -> dict[str, Any]:
    """Return the arguments of `GatherOptions` for the dtypes of ``policy``."""
    return {
        "param_dtype": policy.param,
        "autocast": policy.autocast,
        "reduce_dtype": policy.reduce,
        "output_dtype": None if policy.autocast else policy.output,
        "in_float32": policy.in_float32,
    }
