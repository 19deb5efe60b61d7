"""Float8 matrix products over bfloat16 computation and float32 masters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.trainer import trainer_of
from lightning_ups.insight.advise import decide_on_rank0
from lightning_ups.kernels.float8_casts import HAS_KERNELS
from lightning_ups.order import PrecisionCapabilities, Report, Run, Stage, Weights
from lightning_ups.order.arguments import OnNoEffect, raise_or_warn
from lightning_ups.precision.converting import ConvertingPrecision, Filter
from lightning_ups.transforms.casting import kept_in_float32, within
from lightning_ups.transforms.float8 import (
    RECIPES,
    Float8Conversion,
    Format,
    Scales,
    check_recipe,
    compiler_settings,
    conversion_of,
    convert_to_float8,
    fitting_linears,
    float8_linears,
    recipe_of,
    why_none_fits,
)
from lightning_ups.transforms.sharding import TENSOR

if TYPE_CHECKING:
    RecipeName = str
else:
    RecipeName = Literal[tuple(RECIPES)]  # --help and errors in YAML list the names


class Float8Precision(ConvertingPrecision):
    """Multiply in float8 where linear layers allow it, compute the rest in bfloat16, keep float32 masters.

    Chosen linear layers are swapped, in place, for torchao's; names of parameters stay, and state dicts hold float32
    under them, so that checkpoints load with or without this precision. It gains where products are large, and needs
    `Compile`: without it the casts cost more than the products save.

    Args:
        recipe: How values are scaled: ``"tensorwise"``, the fastest; ``"rowwise"``; ``"rowwise_with_gw_hp"``, whose
            gradients of weights stay in bfloat16; ``"mxfp8"``, a scale for every 32 values, on Blackwell. In
            Python also one that was added by `lightning_ups.transforms.float8.register`.
        include: Patterns of linear layers to convert. None: all in the blocks that repeat.
        exclude: Patterns of linear layers to leave.
        head: Also convert linear layers outside the blocks, such as the head of a language model. Not with ``include``.
        filter: ``"all"`` converts what it can; ``"auto"`` only what is faster so on this GPU: each shape is timed once,
            with its casts, and the times are kept for later runs. It may find that nothing is worth it.
        tokens: For ``"auto"``: how many rows linear layers get. None: what a training step with the first batch shows.
        table: For ``"auto"``: a file of times, as ``python -m lightning_ups advise`` writes it. None: the user's cache.
        number_format: ``"e4m3"`` everywhere, or ``"hybrid"``, with gradients in e5m2, which has more range and is
            coarser; ``"tensorwise"`` alone knows both.
        all_gather: Under a sharding strategy, gather weights in float8. None: where the recipe allows it.
        emulate: Compute in high precision what float8 would, on any device, for tests.
        weights: How everything else computes without sharding, as for `BF16Precision`: ``"autocast"``, or pure
            bfloat16 over float32 ``"masters"``, which takes less memory.
        in_float32: Patterns of submodules that compute in float32 all the same, as for `BF16Precision`; linear layers
            in them stay as they are.
        on_no_effect: If nothing can be converted, ``"raise"`` an error, or ``"warn"`` and train in bfloat16.

    Raises:
        ValueError: If a choice is unknown.
        RuntimeError: If the device cannot multiply in float8, or nothing can be converted and ``on_no_effect="raise"``.
        ModuleNotFoundError: If torchao is missing.

    Example::

        Trainer(plugins=[Float8Precision(recipe="rowwise")], callbacks=[Compile()])
    """

    in_fabric = (
        "Write convert_to_float8(model, recipe='tensorwise'), of lightning_ups.transforms.float8, before fabric.setup,"
        " and Fabric(precision='bf16-mixed')."
    )

    def __init__(
        self,
        *,
        recipe: RecipeName = "tensorwise",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        head: bool = False,
        filter: Filter = "all",
        tokens: int | None = None,
        table: str | Path | None = None,
        number_format: Format = "e4m3",
        all_gather: bool | None = None,
        emulate: bool = False,
        weights: Weights = "autocast",
        in_float32: Sequence[str] = (),
        on_no_effect: OnNoEffect = "raise",
    ) -> None:
        super().__init__(
            include=include,
            exclude=exclude,
            head=head,
            filter=filter,
            tokens=tokens,
            table=table,
            weights=weights,
            in_float32=in_float32,
            on_no_effect=on_no_effect,
        )
        check_recipe(recipe, all_gather=bool(all_gather), number_format=number_format)
        self.recipe: str = recipe
        self.number_format: Format = number_format
        self.all_gather, self.emulate = all_gather, emulate
        self.conversion: Float8Conversion | None
        self._scales: Scales | None = None

    @property
    @override
    def capabilities(self) -> PrecisionCapabilities:
        return replace(super().capabilities, wants_float8_gathers=self.all_gather is True)

    @property
    @override
    def conversion_settings(self) -> dict[str, Any]:
        names = ("recipe", "number_format", "include", "exclude", "head", "filter", "emulate")
        of_policy = {"all_gather": self.gathers_float8, "in_float32": self.policy.in_float32}
        return {name: getattr(self, name) for name in names} | of_policy

    @property
    @override
    def gathers_float8(self) -> bool:
        if self._in_graph:
            return False  # the gathers of a graph know no types but torch's own
        return self._sharded and (recipe_of(self.recipe).gathers if self.all_gather is None else self.all_gather)

    @override
    def convert_layers(self, module: LightningModule) -> None:
        self._check_device(module)
        fitting = fitting_linears(module, **self._selection)
        losers = self._left(module, fitting)
        self.conversion = convert_to_float8(
            module,
            **self._selection,
            losers=losers,
            number_format=self.number_format,
            all_gather=self.gathers_float8,
            emulate=self.emulate,
        )
        if not fitting:
            raise_or_warn(str(why_none_fits(module, **self._selection)), self.on_no_effect)
        elif not self.conversion.converted and self.filter == "all":
            raise_or_warn(
                f"All linear layers of {type(module).__name__} that could compute in float8 compute in float32, by"
                f" in_float32={[*self.policy.in_float32]}. Name fewer, or use BF16Precision, which has it as well.",
                self.on_no_effect,
            )
        if not self._sharded:
            self._undo.callback(self.conversion.undo)
        self._hold_in_fit(module)

    @property
    def _selection(self) -> dict[str, Any]:
        selection = {name: getattr(self, name) for name in ("recipe", "include", "exclude", "head")}
        return selection | {"tensor_size": self._tensor_size}

    def _left(self, module: LightningModule, fitting: Mapping[str, nn.Linear]) -> dict[str, str]:
        """Return why layers stay as they are that could be converted; the same on every rank."""
        precise = within(kept_in_float32(module, self.policy.in_float32).values())
        names = [name for name, part in module.named_modules() if part in precise and isinstance(part, nn.Linear)]
        left = dict.fromkeys(names, "computes in float32")
        linears = {name: linear for name, linear in fitting.items() if name not in left}
        if self.filter == "auto" and linears:
            left |= decide_on_rank0(lambda: self._found_slower(module, linears), by="Float8Precision(filter='auto')")
        return left

    def _found_slower(self, module: LightningModule, linears: Mapping[str, nn.Linear]) -> dict[str, str]:
        if module.trainer.state.fn != TrainerFn.FITTING:
            return dict.fromkeys(linears, "only training was measured")
        if (layers := self.layers_that_run(module, linears)) is None:
            return dict.fromkeys(linears, "a training step did not show its rows")
        advice = self.advise(module, layers, recipe=self.recipe)
        idle = linears.keys() - {layer.name for layer in advice.layers}
        return dict.fromkeys(idle, "does not run in a training step") | advice.losers

    @override
    def keep_module(self, module: nn.Module) -> None:
        super().keep_module(module)
        self._check_device(module)
        self.conversion = conversion_of(module)
        self._hold_in_fit(module)

    def _hold_in_fit(self, module: nn.Module) -> None:
        by_kernels = HAS_KERNELS and not self.emulate and self._tensor_size == 1
        self._undo.enter_context(compiler_settings(self.recipe, by_kernels=by_kernels))

    @property
    def _tensor_size(self) -> int:
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh[TENSOR].size() if self.mesh is not None and TENSOR in names else 1

    @override
    def note_layers(self, report: Report) -> None:
        done = self.conversion
        assert done is not None
        apart = f" but for {len(done.shared)} that other layers have too" if done.shared else ""
        gathered = f", gathered in float8{apart}" if self.gathers_float8 else ""
        coarser = ", gradients in e5m2" if self.number_format == "hybrid" else ""
        report.note(
            "Precision",
            f"{len(done.converted)} linear layers multiply in float8, {self.recipe}{coarser}{gathered};"
            f" {len(done.skipped)} do not{_some(done)}",
            float8=[*done.converted],
            not_float8=dict(done.skipped),
            recipe=self.recipe,
            number_format=self.number_format,
            gathered_in_float8=self.gathers_float8,
            gathered_as_they_are=[*done.shared],
        )

    @override
    def after_optimizer_step(self, module: nn.Module) -> None:
        if self._sharded:
            self._scales_of(module).compute()

    @override
    def after_restore(self, module: nn.Module) -> None:
        self.after_optimizer_step(module)

    def _scales_of(self, module: nn.Module) -> Scales:
        if self._scales is None:
            self._scales = Scales(float8_linears(module).values())
        return self._scales

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        self._scales = None  # of the parameters that sharding has made
        self.after_optimizer_step(model)
        trainer = trainer_of(self.lightning_module(model))
        if trainer is not None and not self.emulate and self.conversion is not None and self.conversion.converted:
            _warn_of_eager(Run.of(trainer))
        return super().connect(model, optimizers, lr_schedulers)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self._scales is not None:
            self._scales.refresh()
        advice = _advice_on_gathers() if self.gathers_float8 else nullcontext()
        with advice, super().forward_context():
            yield

    @override
    def refusal(self, run: Run) -> str | None:
        if run.accelerator == "cpu" and not self.emulate:
            return self._incapable("cpu")
        return why_none_fits(run.module, **self._selection) if self.on_no_effect == "raise" else None

    def _check_device(self, module: nn.Module) -> None:
        trainer = trainer_of(module)
        if self.emulate or trainer is None:
            return
        device = trainer.strategy.root_device
        found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if found is None:
            raise RuntimeError(self._incapable(device.type))
        if found < recipe_of(self.recipe).capability:
            raise RuntimeError(self._incapable(f"{torch.cuda.get_device_name(device)}, capability {found}"))

    def _incapable(self, device: str) -> str:
        recipe = recipe_of(self.recipe)
        return (
            f"Float8Precision(recipe={recipe.name!r}) cannot run on this device: {device}."
            f" Its products need a GPU of capability {recipe.capability} or higher, such as {recipe.gpus}."
            " Use BF16Precision, another recipe or, to test, Float8Precision(emulate=True)."
        )


def _warn_of_eager(run: Run) -> None:
    from lightning_ups._compat.torch.compile.dynamo import (
        compiled_by_itself,  # the compiler, which torchao has imported by now
    )

    compiled = run.compiled_by_user or any(step.stage is Stage.COMPILE for step in run.declarations)
    if run.training and not compiled and not any(map(compiled_by_itself, run.module.modules())):
        rank_zero_warn(
            "Float8Precision trains a model that nothing compiles: casts take more time than products save."
            " Add Compile() to the callbacks."
        )


def _some(done: Float8Conversion) -> str:
    named = [f"{name} ({done.skipped[name]})" for name in done.misfits[:3]]
    more = [f"{len(done.misfits) - 3} more"] if len(done.misfits) > 3 else []
    return f", among them {', '.join(named + more)}" if named else ""


@contextmanager
def _advice_on_gathers() -> Iterator[None]:
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        said = ("Float8TrainingTensor", "Invalid scalar type", "attempting to run aten.")
        if any(words in str(error) for words in said):
            error.add_note(
                "A weight that is gathered in float8 was read outside of the forward of its layer."
                " Set all_gather=False in Float8Precision, or exclude=[...] the layer."
            )
        raise
