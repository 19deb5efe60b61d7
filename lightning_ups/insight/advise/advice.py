"""Which linear layers of a model are faster in float8, by measured times, and how much the step gains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_ups.insight.advise.linear_shapes import Layer, Product, names_of, products_of
from lightning_ups.insight.advise.timing_table import BFLOAT16, Table, Times

MARGIN = 0.03  # a layer must be faster by this share: times of two runs differ by about as much
WORTH = 0.01  # the least gain of the step, or of the products if no step was timed


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The effect of one float8 recipe on one model.

    Args:
        recipe: The recipe.
        layers: The layers that could be converted, with their products in one microbatch.
        table: The times of these products.
        step_ms: The time of a step in bfloat16; None: unknown.
        microbatches: Microbatches in a step.
    """

    recipe: str
    layers: Sequence[Layer]
    table: Table
    step_ms: float | None = None
    microbatches: int = 1

    def milliseconds(self, layer: Layer, recipe: str) -> float:
        """Return the time of the products of ``layer`` in a microbatch."""
        times = {product: self.table.times[product][recipe] for product in layer.calls}
        return sum(times[product].of(dgrad=layer.dgrad, wgrad=layer.wgrad) * n for product, n in layer.calls.items())

    def wins(self, layer: Layer) -> bool:
        """Return whether ``layer`` is faster in float8 by more than the noise."""
        return self.milliseconds(layer, self.recipe) < (1 - MARGIN) * self.milliseconds(layer, BFLOAT16)

    @property
    def winners(self) -> list[Layer]:
        """The layers to convert: those that are faster, or none if they save too little together."""
        found = [layer for layer in self.layers if self.wins(layer)]
        whole = self.step_ms or self.products_ms
        return found if self.saved_ms(found) > WORTH * whole else []

    @property
    def losers(self) -> dict[str, str]:
        """The reason why each other layer stays in bfloat16, by name."""
        winning = {layer.name for layer in self.winners}
        return {layer.name: self._why_not(layer) for layer in self.layers if layer.name not in winning}

    def _why_not(self, layer: Layer) -> str:
        bfloat16, float8 = self.milliseconds(layer, BFLOAT16), self.milliseconds(layer, self.recipe)
        times = f"{bfloat16:.3g} ms in bfloat16, {float8:.3g} ms in float8"
        return f"saves too little with the rest: {times}" if self.wins(layer) else f"is not faster: {times}"

    @property
    def products_ms(self) -> float:
        """The time of all products in a step, in bfloat16."""
        return self.microbatches * sum(self.milliseconds(layer, BFLOAT16) for layer in self.layers)

    def saved_ms(self, layers: Sequence[Layer]) -> float:
        """Return the time that ``layers`` in float8 save in a step; negative if it is longer."""
        saved = (self.milliseconds(layer, BFLOAT16) - self.milliseconds(layer, self.recipe) for layer in layers)
        return self.microbatches * sum(saved)

    def gain(self, layers: Sequence[Layer]) -> float | None:
        """Return the relative gain in steps per second with ``layers`` in float8; None: no step was timed."""
        if self.step_ms is None:
            return None
        return self.step_ms / max(self.step_ms - self.saved_ms(layers), 1e-9) - 1

    def verdict(self) -> str:
        """Return the recommendation in one sentence."""
        winners = self.winners
        if not winners:
            return f"leave bfloat16: all layers by {self.recipe} would mean {self._said(self.layers)}{self._doubt()}"
        which = "all" if len(winners) == len(self.layers) else f"{len(winners)} of {len(self.layers)}"
        alternative = "" if which == "all" else f"; with all of them {self._said(self.layers)}"
        return f"convert {which} layers by {self.recipe}: {self._said(winners)}{alternative}{self._doubt()}"

    def _doubt(self) -> str:
        """Return why the recommendation may be wrong: others used the device."""
        products = [*products_of(self.layers)]
        found = {p: t.doubt for p in products for t in self._both(p) if t.doubt}
        if not found:
            return ""
        said = ", ".join(dict.fromkeys(found.values()))
        return (
            f" (the device was busy: of {len(found)} of {len(products)} products, {said}; time again when it is idle)"
        )

    def _both(self, product: Product) -> list[Times]:
        return [self.table.times[product][name] for name in (BFLOAT16, self.recipe)]

    def _said(self, layers: Sequence[Layer]) -> str:
        gain = self.gain(layers)
        if gain is None:
            return f"{-self.saved_ms(layers) / max(self.products_ms, 1e-9):+.1%} of the time of these products"
        return f"{gain:+.1%} steps a second"

    def rows(self, recipes: Sequence[str]) -> Iterator[Mapping[str, str]]:
        """Yield a table row for each shape, with the times of ``recipes``."""
        for product, count in products_of(self.layers).items():
            times = self.table.times[product]
            base = times[BFLOAT16].total_ms
            row = {"rows x in x out": str(product), "a step": str(count * self.microbatches)}
            for name in (BFLOAT16, *recipes):
                if (each := times.get(name)) is None:
                    row[name] = "does not fit"
                    continue
                parts = f"{each.forward_ms:.3f} + {each.dgrad_ms:.3f} + {each.wgrad_ms:.3f} ms"
                factor = "" if name == BFLOAT16 else f", x{base / each.total_ms:.2f}"
                row[name] = f"{parts}{factor}{' (in doubt)' if each.doubt else ''}"
            yield row | {"in": names_of(self.layers, product)}


def best_recipe(choices: Sequence[Advice]) -> Advice:
    """Return the advice that saves the most."""
    return max(choices, key=lambda advice: advice.saved_ms(advice.winners))


def decide_on_rank0(find: Callable[[], dict[str, str]], *, by: str) -> dict[str, str]:
    """Call ``find`` on rank 0 and return its result on every rank, since measured times differ between ranks.

    Args:
        find: Decides.
        by: The caller, for the error on other ranks.

    Raises:
        RuntimeError: On the other ranks, if rank 0 failed.
    """
    found: list[dict[str, str] | None] = [None]
    failure: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = [find()]
        except Exception as error:  # noqa: BLE001  (the other ranks must not wait forever)
            failure = error
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if failure is not None:
        raise failure
    if found[0] is None:
        raise RuntimeError(f"{by} failed on rank 0, which times the layers for all ranks. See the error of rank 0.")
    return found[0]
