"""Float8 matrix products over bfloat16 computation and float32 masters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import override

from lightning_ups.order import DtypePolicy, PolicyPrecision, Report, Weights
from lightning_ups.transforms.blocks import as_patterns
from lightning_ups.transforms.float8 import (
    Float8Conversion,
    Recipe,
    check_recipe,
    convert_to_float8,
    precompute_scales,
)

__all__ = ["Float8Precision"]

CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


class Float8Precision(PolicyPrecision):
    """Multiply in float8 where linear layers allow it, compute the rest in bfloat16, keep float32 masters.

    Chosen linear layers are swapped, in place, for torchao's; names of parameters stay, and state dicts hold float32
    under them, so that checkpoints load with or without this precision. It gains where products are large, and needs
    `Compile`: without it the casts cost more than the products save.

    Args:
        recipe: How values are scaled: ``"tensorwise"``, the fastest; ``"rowwise"``; or ``"rowwise_with_gw_hp"``, whose
            gradients of weights stay in bfloat16.
        include: Patterns of linear layers to convert. None: all in the blocks that repeat.
        exclude: Patterns of linear layers to leave.
        head: Also convert linear layers outside the blocks, such as the head of a language model.
        all_gather: Under a sharding strategy, gather weights in float8. None: where the recipe allows it.
        emulate: Compute in high precision what float8 would, on any device, for tests.
        weights: Without sharding, whether the module holds bfloat16 ``"masters"``' copies or ``"autocast"`` casts.

    Raises:
        ValueError: If a choice is unknown, or nothing can be converted.
        RuntimeError: If the device cannot multiply in float8.
        ModuleNotFoundError: If torchao is missing.

    Example::

        Trainer(plugins=[Float8Precision(recipe="rowwise")], callbacks=[Compile()])
    """

    def __init__(
        self,
        *,
        recipe: Recipe = "tensorwise",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        head: bool = False,
        all_gather: bool | None = None,
        emulate: bool = False,
        weights: Weights = "masters",
    ) -> None:
        policy = DtypePolicy(param=torch.bfloat16, reduce=torch.float32, output=torch.float32)
        super().__init__(policy, name="bf16-mixed", weights=weights)
        check_recipe(recipe, all_gather=bool(all_gather))
        self.recipe: Recipe = recipe
        self.include = None if include is None else as_patterns(include)
        self.exclude, self.head = as_patterns(exclude), head
        self.all_gather, self.emulate = all_gather, emulate
        self.conversion: Float8Conversion | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._check_device(module)
        self.teardown()  # of a run that an exception ended before its own
        gather = self.recipe == "tensorwise" if self.all_gather is None else self.all_gather
        self.conversion = convert_to_float8(
            module,
            recipe=self.recipe,
            include=self.include,
            exclude=self.exclude,
            head=self.head,
            all_gather=self._sharded and gather,
            emulate=self.emulate,
        )
        if not self._sharded:
            self._undo.callback(self.conversion.undo)
        return self._with_masters(module)

    @override
    def note(self, report: Report) -> None:
        super().note(report)
        if (done := self.conversion) is None:
            return
        report.note(
            "Precision",
            f"{len(done.converted)} linear layers multiply in float8, {self.recipe}; {len(done.skipped)} do not",
            float8=[*done.converted],
            not_float8=dict(done.skipped),
            recipe=self.recipe,
        )

    @override
    def after_optimizer_step(self, module: nn.Module) -> None:
        if self._sharded:
            precompute_scales(module)

    @override
    def after_restore(self, module: nn.Module) -> None:
        self.after_optimizer_step(module)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context(), _autocast_as_torchao_asks(self.policy.param):
            yield

    def _check_device(self, module: nn.Module) -> None:
        trainer: Any = module._trainer if isinstance(module, LightningModule) else None
        if self.emulate or trainer is None:
            return
        device = trainer.strategy.root_device
        found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if found is None or found < CAPABILITY:
            what = f"{device.type}" if found is None else f"{torch.cuda.get_device_name(device)}, capability {found}"
            raise RuntimeError(
                f"Float8Precision cannot run on this device: {what}."
                f" Products in float8 need a GPU of capability {CAPABILITY} or higher, such as H100, H200 or L40S."
                " Use BF16Precision, or, to test, Float8Precision(emulate=True)."
            )


@contextmanager
def _autocast_as_torchao_asks(dtype: torch.dtype | None) -> Iterator[None]:
    # Torchao asks whether CUDA's autocast is on, and for its type, wherever it runs; that type is float16 by default.
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", before[0] or torch.is_autocast_enabled("cpu"))
    torch.set_autocast_dtype("cuda", dtype or before[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
