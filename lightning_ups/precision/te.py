"""Transformer Engine's modules and float8 recipes over bfloat16 computation and float32 masters."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.lightning.fit_setup import first_batch
from lightning_ups._compat.lightning.trainer import trainer_of
from lightning_ups._compat.optional.te import (
    autocast,
    checkpoint_by,
    engine,
    forget_scales,
    holds_engine_modules,
    why_not_on,
)
from lightning_ups.insight.advise import (
    Advice,
    Layer,
    Timer,
    check_ran,
    decide_on_rank0,
    engine_layers,
    engine_name,
    layers_in_step,
    layers_with_rows,
    modules_of,
    obtain_table,
    products_of,
    read_first,
    timer_on,
)
from lightning_ups.order import DtypePolicy, PolicyPrecision, PrecisionCapabilities, Report, Run, Weights
from lightning_ups.order.arguments import check_choice, check_kind
from lightning_ups.precision.arguments import Filter, check_head, check_timed
from lightning_ups.transforms.blocks import as_patterns, find_blocks
from lightning_ups.transforms.casting import kept_in_float32, refused_autocast, within
from lightning_ups.transforms.fsdp import is_sharded
from lightning_ups.transforms.on_module import OnModule
from lightning_ups.transforms.sharding import DATA, TENSOR
from lightning_ups.transforms.te import (
    RECIPES,
    EngineAttention,
    Fuse,
    Fusion,
    Recipe,
    TEConversion,
    convert_to_te,
    engine_attention,
)

__all__ = ["TEPrecision"]

if TYPE_CHECKING:
    RecipeName = str
else:
    RecipeName = Literal[tuple(RECIPES)]  # --help and errors in YAML list the names
Format = Literal["hybrid", "e4m3"]
AmaxCompute = Literal["max", "most_recent"]


class TEPrecision(PolicyPrecision):
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
        margin: Of ``"delayed"``: powers of two that scales stay below.
        include: Patterns of linear layers and norms to convert. None: all in the blocks that repeat.
        exclude: Patterns of those to leave.
        head: Also convert what is outside the blocks, such as the head of a language model. Not with ``include``.
        norms: Also convert norms that are in no fusion.
        fuse: Whether norms are computed within the products that read them, and feed-forward networks as one, in
            blocks that are known: our GPT's and transformers' Llama, Mistral and Qwen2. ``"auto"`` leaves out, under a
            sharding strategy, what would join weights of several layers.
        fusions: Further ones, by patterns.
        filter: ``"all"`` converts what it can; ``"auto"`` only products, with what is fused with them, that are faster
            so on this GPU: each is timed once, with its casts, and the times are kept for later runs.
        tokens: For ``"auto"``: how many rows linear layers get. None: what a training step with the first batch shows.
        table: For ``"auto"``: a file of times, as ``python -m lightning_ups advise`` writes it. None: the user's cache.
        evaluate: Also evaluate in float8, whose products need batches whose rows are multiples of 8.
        fp8_attention: Also compute causal attention in float8; on Hopper with ``"delayed"`` and heads of 128 alone.
        weights: How everything else computes without sharding, as for `BF16Precision`: ``"autocast"``, or pure
            bfloat16 over float32 ``"masters"``, which takes less memory.
        in_float32: Patterns of submodules that compute in float32 all the same, as for `BF16Precision`; what is in
            them stays torch's.

    Raises:
        ValueError: If a choice is unknown or contradicts another, or nothing can be converted.
        RuntimeError: If the device cannot, or the module is sharded already.
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
        margin: int = 0,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        head: bool = False,
        norms: bool = True,
        fuse: Fuse = "auto",
        fusions: Sequence[Fusion] = (),
        filter: Filter = "all",
        tokens: int | None = None,
        table: str | Path | None = None,
        evaluate: bool = False,
        fp8_attention: bool = False,
        weights: Weights = "autocast",
        in_float32: Sequence[str] = (),
    ) -> None:
        super().__init__(DtypePolicy.bf16_mixed(in_float32=in_float32), name="bf16-mixed", weights=weights)
        _check_known("recipe", recipe, (*RECIPES, None))
        _check_known("number_format", number_format, (*get_args(Format), None))
        _check_known("fuse", fuse, get_args(Fuse))
        _check_known("amax_compute", amax_compute, (*get_args(AmaxCompute), None))
        check_kind("amax_history", amax_history, int, of="TEPrecision", why="It counts steps.", optional=True)
        check_kind("margin", margin, int, of="TEPrecision", why="It is a power of two.")
        check_head("TEPrecision", head=head, include=include)
        check_timed("TEPrecision", filter=filter, tokens=tokens, table=table)
        _check_filter(filter, recipe, fp8_attention=fp8_attention)
        _check_recipe(recipe, amax_history, amax_compute, margin, fp8_attention=fp8_attention)
        _check_in_float8(recipe, number_format=number_format, evaluate=evaluate, fp8_attention=fp8_attention)
        self.recipe: str | None = recipe
        self.number_format, self.margin = number_format, margin
        self.amax_history, self.amax_compute = amax_history or 1024, amax_compute or "max"
        self.include = None if include is None else as_patterns(include)
        self.exclude, self.head, self.norms = as_patterns(exclude), head, norms
        self.fuse: Fuse = fuse
        self.fusions = tuple(fusions)
        self.filter: Filter = filter
        self.tokens, self.table = tokens, table
        self.timer: Timer | None = None  # None: on the device
        self.advice: Advice | None = None
        self.evaluate, self.fp8_attention = evaluate, fp8_attention
        self.conversion: TEConversion | None = None
        self._made: Any = None  # Transformer Engine's recipe
        self._group: Any = None
        self._attention: EngineAttention | None = None
        self._last_scales: dict[str, Any] = {}
        self._proven = False  # that something ran, in the first step
        self._begun = False  # whether all that is to be computed in float8 has scales

    @property
    @override
    def capabilities(self) -> PrecisionCapabilities:
        excludes = "fp8_attention=True" if self.fp8_attention else None
        if (recipe := self._row) is not None and not recipe.compiles:
            excludes = f"recipe={recipe.name!r}"
        return replace(
            super().capabilities,
            breaks_graphs=True,  # its modules are no part of compiled code
            excludes_compile=excludes,
            recomputes_itself=self.recipe is not None,
            checkpoint=None if self._made is None else checkpoint_by(self._made),
        )

    @override
    def sharded(self, mesh: DeviceMesh | None = None, *, in_graph: bool = False) -> Self:
        twin = super().sharded(mesh, in_graph=in_graph)
        twin.conversion = None
        return twin

    @override
    def refusal(self, run: Run) -> str | None:
        if (size := run.strategy.settings.get("tensor_parallel_size", 1)) > 1:
            return _split(size)
        why = why_not_on(run.accelerator)
        return None if why is None else _incapable(self.recipe, run.accelerator, why)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if is_sharded(module):
            raise RuntimeError(
                f"{type(module).__name__} was sharded before TEPrecision could convert it."
                " The conversion chooses by whole weights, and comes before everything that splits them."
                " Use strategy='fsdp2', which keeps that order, and shard nothing in configure_model."
            )
        if not isinstance(module, LightningModule):
            self.refuse_fabric()
        self.teardown()  # of a run that an exception ended before its own
        self._convert(module)
        return self._with_masters(module)

    def _convert(self, module: nn.Module) -> None:
        self._check_place(module)
        self._check_in_float32(module)
        self._last_scales, self._proven, self._begun = {}, False, False
        losers = self._losers(module) if self.filter == "auto" else None
        conversion = self.conversion = self._converted(module, losers)
        self._undo.callback(self._end, conversion)
        if (recipe := self._row) is None:
            return
        self._made = recipe.make(
            number_format=self.number_format,
            amax_history=self.amax_history,
            amax_compute=self.amax_compute,
            margin=self.margin,
            reduce_amax=self._group is not None,
            attention=self.fp8_attention,
        )
        if self._sharded or self.weights == "masters":
            self._undo.enter_context(refused_autocast(module, by="TEPrecision", choice=not self._sharded))
        if self.fp8_attention:
            attention = engine_attention(find_blocks(module), recipe, self._made)
            self._attention = self._undo.enter_context(attention)

    @property
    def _row(self) -> Recipe | None:
        return None if self.recipe is None else RECIPES[self.recipe]

    @property
    def _keeps_scales(self) -> bool:
        return self._row is not None and self._row.keeps_scales

    def _converted(self, module: nn.Module, losers: dict[str, str] | None) -> TEConversion:
        recipe = self._row
        return convert_to_te(
            module,
            include=self.include,
            exclude=self.exclude,
            head=self.head,
            norms=self.norms,
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

    def _losers(self, module: nn.Module) -> dict[str, str]:
        """Return why modules stay as they are that could be converted; the same on every rank, and in a later fit."""
        if is_sharded(module):
            return _known_losers(module)
        losers = decide_on_rank0(lambda: self._found_slower(module), by="TEPrecision(filter='auto')")
        _DECIDED.keep(module, losers)
        return losers

    def _found_slower(self, module: nn.Module) -> dict[str, str]:
        plan = self.planned(module)
        if not plan.converted:
            self._converted(module, None)  # which says so
        if not isinstance(module, LightningModule) or module.trainer.state.fn != TrainerFn.FITTING:
            return dict.fromkeys(plan.converted, "only training was measured")
        layers, others = self._layers(module, plan)
        self.advice = self._advise(module, layers)
        if not plan.theirs:  # which would be forgotten with those that were timed
            forget_scales()
        winners = {layer.name for layer in self.advice.winners}
        losers = dict.fromkeys(plan.converted, "only products were timed, and what is fused with them")
        for unit, names in modules_of(plan).items():
            for name in names:
                losers.pop(name, None)
            if unit not in winners:
                losers |= dict.fromkeys(names, (others | self.advice.losers)[unit])
        return losers

    def _layers(self, module: LightningModule, plan: TEConversion) -> tuple[list[Layer], dict[str, str]]:
        linears: dict[str, Any] = {name: module.get_submodule(name) for name in read_first(plan).values()}
        if self.tokens is not None:
            return engine_layers(plan, layers_with_rows(linears, self.tokens))
        called = layers_in_step(module, linears, first_batch(module.trainer))
        if linears:
            check_ran(called, linears=linears, of=type(module).__name__, tokens="tokens=16384")
        return engine_layers(plan, called)

    def _advise(self, module: LightningModule, layers: Sequence[Layer]) -> Advice:
        device, name = module.trainer.strategy.root_device, engine_name(str(self.recipe))
        timer = self.timer or (timer_on(device) if device.type == "cuda" else None)
        table = obtain_table(products_of(layers), [name], device=device, path=self.table, timer=timer)
        return Advice(recipe=name, layers=layers, table=table)

    def _end(self, conversion: TEConversion) -> None:
        self._last_scales = conversion.scales() if self._keeps_scales else {}
        self.conversion = self._attention = None
        conversion.undo()

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        lightning = next((m for m in model.modules() if isinstance(m, LightningModule)), None)
        if self.conversion is None and lightning is not None:
            self._convert(lightning)  # sharded by an earlier fit, whose conversion has ended
        if self.conversion is not None and not self._sharded:
            self.conversion.lay_together()  # on the device, and in the type, where they stay
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def note(self, report: Report) -> None:
        super().note(report)
        if (done := self.conversion) is None:
            return
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(done.kinds.items()))
        report.note(
            "Precision",
            f"Transformer Engine computes {len(done.converted)} modules by {counts or 'modules of the model itself'},"
            f" {'in bfloat16' if self.recipe is None else f'in float8, {self.recipe}'}; {len(done.skipped)} not",
            te=dict(done.converted),
            not_te=dict(done.skipped),
            not_fused=dict(done.apart),
            recipe=self.recipe,
            fp8_attention=self.fp8_attention,
            evaluates_in_float8=self.evaluate,
        )
        if self.advice is not None:
            report.note("Precision", f"by times of these products: {self.advice.verdict()}", filter=self.filter)

    @override
    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        assert self.conversion is not None
        before = self.conversion.calls.total, self._attention.total if self._attention is not None else 0
        with self._float8(), super().train_step_context():
            yield
        if not self._proven:
            self._check_effect(*before)
            self._proven = True

    @override
    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        with self._float8(evaluating=True), super().val_step_context():
            yield

    @override
    @contextmanager
    def test_step_context(self) -> Iterator[None]:
        with self._float8(evaluating=True), super().test_step_context():
            yield

    @override
    @contextmanager
    def predict_step_context(self) -> Iterator[None]:
        with self._float8(evaluating=True), super().predict_step_context():
            yield

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

    def _check_effect(self, calls: int, attention: int) -> None:
        assert self.conversion is not None
        nothing = self.filter == "auto" and not self.conversion.converted  # and that was decided by times
        if self.conversion.calls.total == calls and not self.conversion.theirs and not nothing:
            some = ", ".join([*self.conversion.converted][:3])
            raise RuntimeError(
                f"TEPrecision computed nothing in a training step: none of {some} and the others ran."
                " Their forwards are what it replaces, and training_step calls none of them."
                " Name modules that it calls: TEPrecision(include=[...])."
            )
        if self._attention is not None and self._attention.total == attention:
            raise RuntimeError(
                "TEPrecision(fp8_attention=True) met no attention in a training step."
                " It stands in for torch.nn.functional.scaled_dot_product_attention within blocks that repeat."
                " Let the model use that function, or use fp8_attention=False."
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
        if self.fp8_attention and recipe is not None and (why := recipe.why_no_attention(device)) is not None:
            raise RuntimeError(
                f"TEPrecision(recipe={self.recipe!r}, fp8_attention=True) cannot train here: {why}."
                " Its kernels are cuDNN's: 'delayed' from capability 9.0, Hopper, 'current' and 'mxfp8' from 10.0,"
                " Blackwell."
                " Use recipe='delayed' where that has it, or fp8_attention=False."
            )

    def _check_in_float32(self, module: nn.Module) -> None:
        precise = within(kept_in_float32(module, self.policy.in_float32).values())
        if self.recipe is None or not precise:
            return
        if theirs := [name for name in holds_engine_modules(module) if module.get_submodule(name) in precise]:
            raise ValueError(
                f"TEPrecision(in_float32={[*self.policy.in_float32]}) names {theirs[0]}, or what holds it."
                " It is a module of Transformer Engine that the model has itself, and these compute in float8 wherever"
                " they are called in its autocast."
                " Take it out of in_float32, or use a module of torch there."
            )
        inside = [name for name, m in find_blocks(module).items() if not precise.isdisjoint(m.modules())]
        if self.fp8_attention and inside:
            raise ValueError(
                f"TEPrecision(fp8_attention=True, in_float32={[*self.policy.in_float32]}) cannot be: {inside[0]} holds,"
                " or is, what in_float32 names."
                " All attention that is called in a block that repeats is computed in float8 then."
                " Use fp8_attention=False, or name parts outside of the blocks."
            )


def _split(size: int) -> str:
    return (
        f"TEPrecision is given with tensor parallelism over {size} devices."
        " Its kernels know no DTensor, which is what tensor parallelism here is made of."
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
            " What is faster is found out before weights are split."
            " Use filter='all', the precision of that fit, or a module built anew."
        )
    return losers


def _check_filter(filter: str, recipe: str | None, *, fp8_attention: bool) -> None:
    if filter == "auto" and (recipe is None or fp8_attention):
        wrong = "recipe=None" if recipe is None else "fp8_attention=True"
        raise ValueError(
            f"TEPrecision(filter='auto', {wrong}) cannot be."
            " By times is decided which products are computed in float8, and nothing else."
            " Use filter='all', or leave the other out."
        )


def _check_known(name: str, value: str | None, known: tuple[str | None, ...]) -> None:
    check_choice(name, value, known, of="TEPrecision", why="It stands for one of Transformer Engine's own.")


def _check_recipe(
    recipe: str | None,
    history: int | None,
    compute: str | None,
    margin: int,
    *,
    fp8_attention: bool,
) -> None:
    known = None if recipe is None else RECIPES[recipe]
    given = {"amax_history": history, "amax_compute": compute, "margin": margin or None}
    accepted = () if known is None else known.options
    if wrong := [name for name, value in given.items() if value is not None and name not in accepted]:
        others = " or ".join(f"recipe={each.name!r}" for each in RECIPES.values() if wrong[0] in each.options)
        raise ValueError(
            f"TEPrecision(recipe={recipe!r}) is given with {wrong[0]}={given[wrong[0]]!r}, which it does not take."
            f" Use {others}, or leave {wrong[0]} out."
        )
    if history is not None and history < 1:
        raise ValueError(
            f"TEPrecision(amax_history={history}) has no step to look back at."
            " It counts the steps whose maxima the scales come from."
            " Use 1 or more; 16 and 1024 are common."
        )
    if fp8_attention and known is not None and known.attention is None:
        others = " or ".join(repr(each.name) for each in RECIPES.values() if each.attention is not None)
        raise ValueError(
            f"TEPrecision(recipe={recipe!r}, fp8_attention=True) cannot be: the recipe has no float8 attention."
            f" Use recipe={others}, or fp8_attention=False."
        )


def _check_in_float8(recipe: str | None, **settings: Any) -> None:
    if recipe is None and (given := {name: value for name, value in settings.items() if value}):
        name, value = next(iter(given.items()))
        raise ValueError(
            f"TEPrecision(recipe=None, {name}={value!r}) is given with a setting of float8."
            " Without a recipe everything is computed in bfloat16."
            " Choose a recipe, or leave number_format, evaluate and fp8_attention out."
        )
