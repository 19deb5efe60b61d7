"""Transformer Engine's modules and float8 recipes over bfloat16 computation and float32 masters."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.trainer import trainer_of
from lightning_ups._compat.optional.te import (
    autocast,
    checkpoint_by,
    engine,
    forget_scales,
    holds_engine_modules,
    why_not_on,
)
from lightning_ups.insight.advise import decide_on_rank0, engine_layers, engine_name, modules_of, read_first
from lightning_ups.order import PrecisionCapabilities, Report, Run, Weights
from lightning_ups.order.arguments import OnNoEffect, check_choice, check_least, raise_or_warn
from lightning_ups.precision.converting import ConvertingPrecision, Filter
from lightning_ups.transforms.casting import kept_in_float32, within
from lightning_ups.transforms.fsdp import is_sharded
from lightning_ups.transforms.on_module import OnModule
from lightning_ups.transforms.sharding import DATA, TENSOR
from lightning_ups.transforms.te import (
    RECIPES,
    Fuse,
    Fusion,
    Recipe,
    TEConversion,
    convert_to_te,
)

if TYPE_CHECKING:
    RecipeName = str
else:
    RecipeName = Literal[tuple(RECIPES)]  # --help and errors in YAML list the names
Format = Literal["hybrid", "e4m3"]
AmaxCompute = Literal["max", "most_recent"]


class TEPrecision(ConvertingPrecision):
    """Let Transformer Engine compute linear layers, norms and feed-forward networks, in float8 while training.

    Every module stays where it is, with its parameters and their names; only its forward is another's, and that is
    undone after the fit. So checkpoints, optimizers and name-based parameter groups are those of the plain model.

    Args:
        recipe: How values are scaled into float8: ``"current"``, by the tensor's own maximum; ``"delayed"``, by the
            maxima of earlier steps; ``"block"``, by blocks of 128; ``"mxfp8"``, by blocks of 32, on Blackwell. None:
            bfloat16, by Transformer Engine's modules.
        number_format: ``"hybrid"`` has gradients in e5m2, ``"e4m3"`` all in e4m3. None: the recipe's own.
        amax_history: Of ``"delayed"``: how many steps the maxima reach back. None: 1024.
        amax_compute: Of ``"delayed"``: the largest of them, ``"max"``, or ``"most_recent"``. None: the largest.
        include: Patterns of linear layers and norms to convert. None: all in the blocks that repeat.
        exclude: Patterns of those to leave.
        head: Also convert what is outside the blocks, such as the head of a language model. Not with ``include``.
        fuse: Whether norms are computed within the products that read them, and feed-forward networks as one, in
            blocks that are known: our GPT's and transformers' Llama, Mistral and Qwen2. ``"auto"`` leaves out, under a
            sharding strategy, what would join weights of several layers.
        fusions: Further ones, by patterns.
        filter: ``"all"`` converts what it can; ``"auto"`` only products, with what is fused with them, that are faster
            so on this GPU: each is timed once, with its casts, and the times are kept for later runs.
        tokens: For ``"auto"``: how many rows linear layers get. None: what a training step with the first batch shows.
        table: For ``"auto"``: a file of times, as ``python -m lightning_ups advise`` writes it. None: the user's cache.
        evaluate: Also evaluate in float8, whose products need batches whose rows are multiples of 8.
        weights: How everything else computes without sharding, as for `BF16Precision`: ``"autocast"``, or pure
            bfloat16 over float32 ``"masters"``, which takes less memory.
        in_float32: Patterns of submodules that compute in float32 all the same, as for `BF16Precision`; what is in
            them stays torch's.
        on_no_effect: If nothing can be converted or nothing of it runs in the first step, ``"raise"`` an error, or
            ``"warn"`` and go on.

    Raises:
        ValueError: If a choice is unknown or contradicts another, or the module is sharded.
        RuntimeError: If the device cannot, or nothing is converted or runs and ``on_no_effect="raise"``.
        ModuleNotFoundError: If Transformer Engine is missing.

    Example::

        Trainer(plugins=[TEPrecision(recipe="delayed", amax_history=16)])
    """

    in_fabric = "Write Fabric(precision='transformer-engine'), which is Lightning's own."

    def __init__(
        self,
        *,
        recipe: RecipeName | None = "current",
        number_format: Format | None = None,
        amax_history: int | None = None,
        amax_compute: AmaxCompute | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        head: bool = False,
        fuse: Fuse = "auto",
        fusions: Sequence[Fusion] = (),
        filter: Filter = "all",
        tokens: int | None = None,
        table: str | Path | None = None,
        evaluate: bool = False,
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
        choices: dict[str, tuple[object, Sequence[object]]] = {
            "recipe": (recipe, (*RECIPES, None)),
            "number_format": (number_format, (*get_args(Format), None)),
            "fuse": (fuse, get_args(Fuse)),
            "amax_compute": (amax_compute, (*get_args(AmaxCompute), None)),
        }
        for name, (value, known) in choices.items():
            check_choice(name, value, known, of="TEPrecision", why="It stands for one of Transformer Engine's own.")
        check_least("amax_history", amax_history, 1, of="TEPrecision", why="It counts steps.", optional=True)
        _check_options(
            recipe,
            number_format=number_format,
            amax_history=amax_history,
            amax_compute=amax_compute,
            filter=None if filter == "all" else filter,
            evaluate=evaluate,
        )
        self.recipe: str | None = recipe
        self.number_format = number_format
        self.amax_history, self.amax_compute = amax_history or 1024, amax_compute or "max"
        self.fuse: Fuse = fuse
        self.fusions = tuple(fusions)
        self.evaluate = evaluate
        self.conversion: TEConversion | None
        self._made: Any = None  # Transformer Engine's recipe
        self._group: Any = None
        self._last_scales: dict[str, Any] = {}
        self._proven = False  # that something ran, in the first step
        self._begun = False  # whether all that is to be computed in float8 has scales

    @property
    @override
    def capabilities(self) -> PrecisionCapabilities:
        recipe = self._row
        return replace(
            super().capabilities,
            breaks_graphs=True,  # its modules are no part of compiled code
            excludes_compile=None if recipe is None or recipe.compiles else f"recipe={recipe.name!r}",
            recomputes_itself=self.recipe is not None,
            checkpoint=None if self._made is None else checkpoint_by(self._made),
        )

    @override
    def refusal(self, run: Run) -> str | None:
        if (size := run.strategy.settings.get("tensor_parallel_size", 1)) > 1:
            return _split(size)
        why = why_not_on(run.accelerator)
        return None if why is None else _incapable(self.recipe, run.accelerator, why)

    @override
    def convert_layers(self, module: LightningModule) -> None:
        self._check_place(module)
        self._warn_of_engine_modules(module)
        self._last_scales, self._proven, self._begun = {}, False, False
        losers = self._losers(module) if self.filter == "auto" else {}
        conversion = self.conversion = self._converted(module, losers)
        self._undo.callback(self._end, conversion)
        if conversion.nothing is not None and not losers:
            raise_or_warn(conversion.nothing, self.on_no_effect)
        if (recipe := self._row) is None:
            return
        self._made = recipe.make(
            number_format=self.number_format,
            amax_history=self.amax_history,
            amax_compute=self.amax_compute,
            reduce_amax=self._group is not None,
        )

    @property
    def _row(self) -> Recipe | None:
        return None if self.recipe is None else RECIPES[self.recipe]

    @property
    def _keeps_scales(self) -> bool:
        return self._row is not None and self._row.keeps_scales

    def _converted(self, module: nn.Module, losers: dict[str, str]) -> TEConversion:
        recipe = self._row
        return convert_to_te(
            module,
            include=self.include,
            exclude=self.exclude,
            head=self.head,
            fuse=self.fuse,
            fusions=self.fusions,
            sharded=self._sharded,
            multiple=1 if recipe is None else recipe.multiple,
            once=self._keeps_scales,
            in_float32=self.policy.in_float32,
            in_float8=self.recipe is not None,
            losers=losers,
        )

    def planned(self, module: nn.Module) -> TEConversion:
        """Return what would be converted if all of it were, or nothing; it is undone again."""
        conversion = self._converted(module, {})
        conversion.undo()
        return conversion

    def _losers(self, module: LightningModule) -> dict[str, str]:
        """Return why modules stay as they are that could be converted; the same on every rank, and in a later fit."""
        if is_sharded(module):
            return _known_losers(module)
        losers = decide_on_rank0(lambda: self._found_slower(module), by="TEPrecision(filter='auto')")
        _DECIDED.keep(module, losers)
        return losers

    def _found_slower(self, module: LightningModule) -> dict[str, str]:
        plan = self.planned(module)
        if not plan.converted:
            return {}
        if module.trainer.state.fn != TrainerFn.FITTING:
            return dict.fromkeys(plan.converted, "only training was measured")
        linears: dict[str, Any] = {name: module.get_submodule(name) for name in read_first(plan).values()}
        if (run := self.layers_that_run(module, linears)) is None:
            return dict.fromkeys(plan.converted, "a training step did not show its rows")
        layers, others = engine_layers(plan, run)
        advice = self.advise(module, layers, recipe=engine_name(str(self.recipe)))
        if not plan.theirs:  # which would be forgotten with those that were timed
            forget_scales()
        winners = {layer.name for layer in advice.winners}
        losers = dict.fromkeys(plan.converted, "only products were timed, and what is fused with them")
        for unit, names in modules_of(plan).items():
            for name in names:
                losers.pop(name, None)
            if unit not in winners:
                losers |= dict.fromkeys(names, (others | advice.losers)[unit])
        return losers

    def _end(self, conversion: TEConversion) -> None:
        self._last_scales = conversion.scales() if self._keeps_scales else {}
        self.conversion = None
        conversion.undo()

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        lightning = self.lightning_module(model)
        if self.conversion is None and lightning is not None:
            self.convert_layers(lightning)  # sharded by an earlier fit, whose conversion has ended
        if self.conversion is not None and not self._sharded:
            self.conversion.lay_together()  # on the device, and in the type, where they stay
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def note_layers(self, report: Report) -> None:
        done = self.conversion
        assert done is not None
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(done.kinds.items()))
        report.note(
            "Precision",
            f"Transformer Engine computes {len(done.converted)} modules by {counts or 'modules of the model itself'},"
            f" {'in bfloat16' if self.recipe is None else f'in float8, {self.recipe}'}; {len(done.skipped)} not",
            te=dict(done.converted),
            not_te=dict(done.skipped),
            not_fused=dict(done.apart),
            recipe=self.recipe,
            evaluates_in_float8=self.evaluate,
        )

    @override
    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        assert self.conversion is not None
        before = self.conversion.calls.total
        with self._float8(), super().train_step_context():
            yield
        if not self._proven:
            self._check_effect(before)
            self._proven = True

    @override
    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        with self._float8(evaluating=True), super().val_step_context():
            yield

    test_step_context = predict_step_context = val_step_context  # type: ignore[assignment]

    @contextmanager
    def _float8(self, *, evaluating: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            if self._made is not None and self.conversion is not None and (self.evaluate or not evaluating):
                self.conversion.calls.begin()
                if self._keeps_scales and not self._begun:
                    self.conversion.begin_scales(recipe=self._made)  # after a restore, which may bring some
                    self._begun = True
                stack.enter_context(autocast(self._made, group=self._group))
            yield

    def _check_effect(self, calls: int) -> None:
        assert self.conversion is not None
        converted = [*self.conversion.converted]  # if nothing is, that was said before
        if converted and self.conversion.calls.total == calls and not self.conversion.theirs:
            raise_or_warn(
                f"TEPrecision computed nothing in a training step: none of {', '.join(converted[:3])} and the others"
                " ran. Name modules that it calls: TEPrecision(include=[...]).",
                self.on_no_effect,
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self._keeps_scales:
            return {}
        scales = self._last_scales if self.conversion is None else self.conversion.scales()
        return {"recipe": self.recipe, "scales": scales} if scales else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.conversion is None or not self._keeps_scales or state_dict.get("recipe") != self.recipe:
            return  # the others keep no scales from step to step
        if new := self.conversion.set_scales(state_dict["scales"], recipe=self._made):
            rank_zero_info(
                f"TEPrecision: the checkpoint has no scales for {len(new)} modules, such as {new[0]}; they begin anew"
            )

    def _check_place(self, module: nn.Module) -> None:
        engine()
        trainer = trainer_of(module)
        self._group = None
        if self.mesh is not None:
            if self.mesh[TENSOR].size() > 1:
                raise ValueError(_split(self.mesh[TENSOR].size()))
            self._group = self.mesh[DATA].get_group()
        elif trainer is not None and trainer.world_size > 1:
            self._group = dist.group.WORLD
        if trainer is None:
            return
        device = trainer.strategy.root_device
        recipe = self._row
        why = why_not_on(device.type) if recipe is None else recipe.why_not(device)
        if why is not None:
            raise RuntimeError(_incapable(self.recipe, device.type, why))

    def _warn_of_engine_modules(self, module: nn.Module) -> None:
        precise = within(kept_in_float32(module, self.policy.in_float32).values())
        if self.recipe is None or not precise:
            return
        if theirs := [name for name in holds_engine_modules(module) if module.get_submodule(name) in precise]:
            rank_zero_warn(
                f"TEPrecision(in_float32={[*self.policy.in_float32]}) names {theirs[0]}, or what holds it."
                " A module of Transformer Engine that the model has itself computes in float8 all the same."
            )


def _split(size: int) -> str:
    return (
        f"TEPrecision is given with tensor parallelism over {size} devices, whose DTensors its kernels do not know."
        " Use tensor_parallel_size=1, or Float8Precision."
    )


def _incapable(recipe: str | None, device: str, why: str) -> str:
    return (
        f"TEPrecision(recipe={recipe!r}) cannot run on {device}: {why}."
        f" Transformer Engine needs a GPU: {'; '.join(f'{each.name!r} {each.needs}' for each in RECIPES.values())}."
        " Use another recipe, recipe=None for bfloat16, or BF16Precision."
    )


# What is faster, for modules that a fit has left sharded: they cannot be looked at as they were.
_DECIDED = OnModule[dict[str, str]]("te_losers")


def _known_losers(module: nn.Module) -> dict[str, str]:
    if (losers := _DECIDED.get(module)) is None:
        raise RuntimeError(
            f"TEPrecision(filter='auto') cannot look at {type(module).__name__}, which an earlier fit has sharded."
            " Use filter='all', the precision of that fit, or a module built anew."
        )
    return losers


def _check_options(recipe: str | None, **given: Any) -> None:
    for name, value in given.items():
        takers = [each.name for each in RECIPES.values() if each.takes(name)]
        if value and recipe not in takers:
            raise ValueError(
                f"TEPrecision(recipe={recipe!r}) is given with {name}={value!r}, which it does not take."
                f" Use {' or '.join(f'recipe={taker!r}' for taker in takers)}, or leave {name} out."
            )
