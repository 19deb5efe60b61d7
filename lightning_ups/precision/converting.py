"""What precisions that convert layers share: which layers, by patterns or by times, and what holds while they run."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_ups._compat.lightning.fit_setup import first_batch
from lightning_ups.insight.advise import (
    Advice,
    Layer,
    Timer,
    check_ran,
    layers_in_step,
    layers_with_rows,
    obtain_table,
    products_of,
    timer_on,
)
from lightning_ups.order import DtypePolicy, PolicyPrecision, Report, Weights
from lightning_ups.order.arguments import (
    OnNoEffect,
    check_choice,
    check_least,
    check_on_no_effect,
    check_path,
    check_some,
)
from lightning_ups.transforms.blocks import as_patterns
from lightning_ups.transforms.fsdp import is_sharded

Filter = Literal["all", "auto"]


class ConvertingPrecision(PolicyPrecision):
    """Converts layers before everything that splits weights, and computes the rest in bfloat16.

    The arguments are documented in the subclasses, which implement `convert_layers` and `note_layers`.
    """

    def __init__(
        self,
        *,
        include: Sequence[str] | None,
        exclude: Sequence[str],
        head: bool,
        filter: Filter,
        tokens: int | None,
        table: str | Path | None,
        weights: Weights,
        in_float32: Sequence[str],
        on_no_effect: OnNoEffect,
    ) -> None:
        super().__init__(DtypePolicy.bf16_mixed(in_float32=in_float32), name="bf16-mixed", weights=weights)
        name = type(self).__name__
        check_head(name, head=head, include=include)
        check_choice("filter", filter, get_args(Filter), of=name, why="It says which layers are converted.")
        check_path("table", table, of=name, why="It is a file of times.")
        check_least("tokens", tokens, 1, of=name, why="It is a number of rows.", optional=True)
        if filter != "auto" and (tokens is not None or table is not None):
            raise ValueError(f"{name} reads tokens and table with filter='auto' alone. Set it, or leave them out.")
        self.include = None if include is None else as_patterns(include)
        self.exclude, self.head = as_patterns(exclude), head
        self.filter: Filter = filter
        self.tokens, self.table = tokens, table
        self.on_no_effect: OnNoEffect = check_on_no_effect(on_no_effect, of=name)
        self.timer: Timer | None = None  # None: on the device
        self.advice: Advice | None = None
        self.conversion: Any = None

    @abstractmethod
    def convert_layers(self, module: LightningModule) -> None:
        """Convert layers of ``module``, set `conversion`, and register with ``_undo`` what ends it."""

    @abstractmethod
    def note_layers(self, report: Report) -> None:
        """Write into ``report`` which layers are converted."""

    @override
    def as_new(self, *, sharded: bool) -> Self:
        twin = super().as_new(sharded=sharded)
        twin.conversion = None
        return twin

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, LightningModule):
            self.refuse_fabric()
        if is_sharded(module):
            raise ValueError(
                f"{type(module).__name__} was sharded before {type(self).__name__} could convert it."
                " A conversion chooses by whole weights, and comes before everything that splits them."
                " Shard nothing in configure_model and use FSDP2Strategy, or use precision='bf16-mixed'."
            )
        self.teardown()  # of a run that an exception ended before its own
        self.convert_layers(module)
        return self._with_masters(module)

    @override
    def note(self, report: Report) -> None:
        super().note(report)
        if self.conversion is not None:
            self.note_layers(report)
            if self.advice is not None:
                report.note("Precision", f"by times of these products: {self.advice.verdict()}", filter=self.filter)

    def layers_that_run(self, module: LightningModule, linears: Mapping[str, nn.Linear]) -> list[Layer] | None:
        """Return which of ``linears`` a training step runs, and with how many rows.

        If the step does not show it, with ``on_no_effect="warn"`` warn, and return None.
        """
        if self.tokens is not None:
            return layers_with_rows(linears, self.tokens)
        batch = first_batch(module.trainer)
        try:
            layers = layers_in_step(module, linears, batch)
            if linears:
                check_ran(layers, linears=linears, of=type(module).__name__, tokens="tokens=16384")
        except ValueError as error:
            if self.on_no_effect == "raise":
                raise
            rank_zero_warn(f"{type(self).__name__}(filter='auto') converts nothing. {error}")
            return None
        return layers

    def advise(self, module: LightningModule, layers: Sequence[Layer], *, recipe: str) -> Advice:
        """Return which of ``layers`` gain by ``recipe``; times that are not known are taken on the device."""
        device = module.trainer.strategy.root_device
        timer = self.timer or (timer_on(device) if device.type == "cuda" else None)
        table = obtain_table(products_of(layers), [recipe], device=device, path=self.table, timer=timer)
        self.advice = Advice(recipe=recipe, layers=layers, table=table)
        return self.advice


def check_head(of: str, *, head: bool, include: Sequence[str] | None) -> None:
    """Raise ValueError for ``head`` beside ``include``, which names what is converted wherever it is."""
    check_some("include", include, of=of, why="It would convert nothing, since it names what is converted.")
    if head and include is not None:
        raise ValueError(
            f"{of}(include={[*include]!r}, head=True) says twice what is converted: include names all of it."
            " Add the names outside the blocks to include, or leave one of the two out."
        )
