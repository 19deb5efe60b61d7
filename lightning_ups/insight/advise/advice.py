"""Which linear layers of a model would be faster in float8, on the evidence of times, and what the step would gain."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_ups.insight.advise.shapes import Layer, Product, names_of, products_of
from lightning_ups.insight.advise.table import BFLOAT16, Table, Times

__all__ = ["Advice", "best_recipe"]

MARGIN = 0.03  # a product must be faster by this share: times of two runs differ by about as much
WORTH = 0.01  # of the step, or of the products where no step was timed; below it nothing is converted
BUSY = 0.9  # of a step: a device that does less waits for the host, and finds nothing in less work


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What float8 by one recipe would do to one model.

    Args:
        recipe: The recipe.
        layers: The layers that could be converted, and what they multiply in one microbatch.
        table: Times of these products.
        step_ms: What a whole step in bfloat16 takes; None: not known.
        microbatches: How many there are in a step.
        busy_ms: In how much of a step the device does something; None: not known.
    """

    recipe: str
    layers: Sequence[Layer]
    table: Table
    step_ms: float | None = None
    microbatches: int = 1
    busy_ms: float | None = None

    def milliseconds(self, layer: Layer, recipe: str) -> float:
        """Return what the products of ``layer`` take in a microbatch."""
        times = {product: self.table.times[product][recipe] for product in layer.calls}
        return sum(times[product].of(dgrad=layer.dgrad, wgrad=layer.wgrad) * n for product, n in layer.calls.items())

    def wins(self, layer: Layer) -> bool:
        """Return whether ``layer`` by itself is faster in float8, by more than times vary."""
        return self.milliseconds(layer, self.recipe) < (1 - MARGIN) * self.milliseconds(layer, BFLOAT16)

    @property
    def winners(self) -> list[Layer]:
        """The layers to convert: those that win, or none, if all together they save too little."""
        found = [layer for layer in self.layers if self.wins(layer)]
        whole = self.step_ms or self.products_ms
        return found if self.saved_ms(found) > WORTH * whole else []

    @property
    def losers(self) -> dict[str, str]:
        """Why each other layer stays in bfloat16, by its name."""
        winning = {layer.name for layer in self.winners}
        return {layer.name: self._why_not(layer) for layer in self.layers if layer.name not in winning}

    def _why_not(self, layer: Layer) -> str:
        bfloat16, float8 = self.milliseconds(layer, BFLOAT16), self.milliseconds(layer, self.recipe)
        times = f"{bfloat16:.3g} ms in bfloat16, {float8:.3g} ms in float8"
        return f"saves too little with the rest: {times}" if self.wins(layer) else f"is not faster: {times}"

    @property
    def products_ms(self) -> float:
        """What all these products take in a step, in bfloat16."""
        return self.microbatches * sum(self.milliseconds(layer, BFLOAT16) for layer in self.layers)

    def saved_ms(self, layers: Sequence[Layer]) -> float:
        """Return how much shorter a step is with ``layers`` in float8; negative: longer."""
        saved = (self.milliseconds(layer, BFLOAT16) - self.milliseconds(layer, self.recipe) for layer in layers)
        return self.microbatches * sum(saved)

    def gain(self, layers: Sequence[Layer]) -> float | None:
        """Return by what share more steps run in the same time with ``layers`` in float8; None: no step was timed."""
        if self.step_ms is None:
            return None
        return self.step_ms / max(self.step_ms - self.saved_ms(layers), 1e-9) - 1

    @property
    def idle(self) -> float | None:
        """The share of a step in which the device waits for the host, if it is one that matters."""
        if self.step_ms is None or self.busy_ms is None or self.busy_ms >= BUSY * self.step_ms:
            return None
        return 1 - self.busy_ms / self.step_ms

    def verdict(self) -> str:
        """Return what to do, in one sentence."""
        winners = self.winners
        if not winners:
            return f"leave bfloat16: all layers by {self.recipe} would mean {self._said(self.layers)}{self._doubt()}"
        which = "all" if len(winners) == len(self.layers) else f"{len(winners)} of {len(self.layers)}"
        alternative = "" if which == "all" else f"; with all of them {self._said(self.layers)}"
        return f"convert {which} layers by {self.recipe}: {self._said(winners)}{alternative}{self._doubt()}"

    def _doubt(self) -> str:
        """Return what to add to a verdict that may not come true: by a device that waits, or that others used."""
        products = [*products_of(self.layers)]
        found = {p: t.doubt for p in products for t in self._both(p) if t.doubt}
        waits = (
            "" if self.idle is None else f" (if the device had not to wait, as it does for {self.idle:.0%} of a step)"
        )
        if not found:
            return waits
        said = ", ".join(dict.fromkeys(found.values()))
        return (
            f"{waits} (the device was busy: of {len(found)} of {len(products)} products, {said};"
            " time again when it is idle)"
        )

    def _both(self, product: Product) -> list[Times]:
        return [self.table.times[product][name] for name in (BFLOAT16, self.recipe)]

    def _said(self, layers: Sequence[Layer]) -> str:
        gain = self.gain(layers)
        if gain is None:
            return f"{-self.saved_ms(layers) / max(self.products_ms, 1e-9):+.1%} of the time of these products"
        return f"{gain:+.1%} steps a second"

    def rows(self, recipes: Sequence[str]) -> Iterator[Mapping[str, str]]:
        """Yield a row of the table for each shape, with the times of ``recipes``."""
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
    """Return the advice whose layers, those that win, save the most."""
    return max(choices, key=lambda advice: advice.saved_ms(advice.winners))
