"""Whether float8 would make a configuration faster on this GPU, layer by layer, and by how much; nothing is trained."""

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from lightning_ups._compat.fake import fake_step, fake_twin
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.tools.trial import StepClock, Trial
from lightning_ups.transforms import float8_mx
from lightning_ups.transforms.advise import Advice, best_recipe
from lightning_ups.transforms.advise_shapes import Layer, layers_of, names_of, products_of
from lightning_ups.transforms.advise_table import Timer, cache_path, obtain_table, where
from lightning_ups.transforms.advise_timer import timer_on
from lightning_ups.transforms.float8 import Recipe, fitting_linears

__all__ = ["TRIES", "advise", "own_options", "show"]

TRIES = True

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
WARMUP, STEPS = 5, 15


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what `advise` is told beside the options of fit, and the rest of the command line."""
    parser = ArgumentParser(
        prog="python -m lightning_ups advise",
        description=__doc__,
        allow_abbrev=False,
        epilog="All options of fit are taken as well, such as --config run.yaml.",
    )
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", help="float8 recipes; all that this GPU knows")
    parser.add_argument("--steps", type=int, help=f"steps in bfloat16 to time a whole one by; {STEPS} on a GPU")
    parser.add_argument("--table", type=Path, help="a file of times from another run, instead of timing anything")
    parser.add_argument("--head", action="store_true", help="consider layers outside the blocks too")
    parser.add_argument("--dry", action="store_true", help="only list the products that a step has, on any machine")
    own, rest = parser.parse_known_args(argv)
    return vars(own), rest


def show(trial: Trial, **asked: Any) -> int:
    """Print the products of a step, their times by each recipe, and what to do; ``asked`` is what `advise` takes."""
    choices = advise(trial, **asked)
    if not choices:
        return 0
    best = best_recipe(choices)
    _print_table([*best.rows([advice.recipe for advice in choices])])
    print("\nforward + gradient of the input + gradient of the weight, casts included; x: times as fast as bfloat16")
    if best.step_ms is not None:
        share = best.products_ms / best.step_ms
        print(f"a step in bfloat16 takes {best.step_ms:.1f} ms, and these products {share:.0%} of it")
    for advice in choices:
        print(f"{advice.recipe:20} {advice.verdict()}")
    print(*_cure(best), sep="\n")
    return 0


def advise(
    trial: Trial,
    *,
    recipes: Sequence[str] | None = None,
    steps: int | None = None,
    table: Path | None = None,
    head: bool = False,
    dry: bool = False,
    timer: Timer | None = None,
) -> list[Advice]:
    """Return what each recipe would do to a trial's module.

    Args:
        trial: What is asked for.
        recipes: Float8 recipes. None: all that the device knows.
        steps: For how many steps to train in bfloat16, to time a whole one. None: some on a GPU, else none.
        table: A file of times. None: the user's cache, and what it lacks is timed.
        head: Consider layers outside the blocks too.
        dry: Print the products, and time none.
        timer: Times a product. None: on the device.

    Raises:
        RuntimeError: If there is no GPU, and neither a table nor ``dry``.
        ValueError: If no layer fits, or the step cannot run without values.
    """
    device = torch.device("cuda", 0) if trial.run.accelerator == "cuda" else torch.device("cpu")
    can_time = device.type == "cuda" and torch.cuda.is_available()
    if not (dry or table or timer or can_time):
        raise RuntimeError(
            "advise finds no GPU here."
            " Whether float8 is faster is a matter of the GPU, so it is measured on the one that will train."
            " Run it there; or bring the times from there by --table FILE; or see the products alone by --dry."
        )
    names = [*(recipes or _known(device))]
    layers = _layers(trial, names[0], head=head)
    if dry:
        _print_table([*_shares(layers)])
        return []
    if timer is None and can_time:
        timer = timer_on(device)
    times = obtain_table(products_of(layers), names, device=device, path=table, timer=timer)
    if table is None:
        print(f"times are kept in {cache_path(where(device))}")
    step_ms = _step_ms(trial, steps if steps is not None else STEPS if can_time else 0)
    microbatches = trial.settings.get("accumulate_grad_batches") or 1
    return [
        Advice(
            recipe=name,
            layers=_fit(trial, layers, name, head=head),
            table=times,
            step_ms=step_ms,
            microbatches=microbatches,
        )
        for name in names
    ]


def _known(device: torch.device) -> Sequence[str]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= float8_mx.CAPABILITY:
        return (*RECIPES, "mxfp8")
    return RECIPES


def _layers(trial: Trial, recipe: str, *, head: bool) -> list[Layer]:
    batch = trial.batch()
    linears = fitting_linears(trial.module, **_selection(trial, recipe, head=head))
    if not linears:
        raise ValueError(
            f"No linear layer of {type(trial.module).__name__} can compute in float8."
            " Layers outside the blocks that repeat are left out, and so are dimensions that are no multiples of 16."
            " Try --head, or name layers by include=[...] in a Float8Precision."
        )
    with fake_twin(trial.module) as twin:
        fakes = cast("dict[str, Any]", {name: twin.get_submodule(name) for name in linears})
        layers = layers_of(fakes, lambda: fake_step(twin, batch))
    trial.module._trainer = None
    return layers


def _fit(trial: Trial, layers: Sequence[Layer], recipe: str, *, head: bool) -> list[Layer]:
    names = fitting_linears(trial.module, **_selection(trial, recipe, head=head))
    return [layer for layer in layers if layer.name in names]


def _selection(trial: Trial, recipe: str, *, head: bool) -> dict[str, Any]:
    asked = trial.precision
    selection: dict[str, Any] = {"recipe": cast("Recipe", recipe), "head": head}
    if isinstance(asked, Float8Precision):
        selection |= {"include": asked.include, "exclude": asked.exclude, "head": head or asked.head}
    return selection


def _step_ms(trial: Trial, steps: int) -> float | None:
    if steps <= WARMUP:
        return None
    clock = StepClock(warmup=WARMUP)
    trial.fit(clock, steps=steps, precision=BF16Precision())
    return clock.step_ms


def _shares(layers: Sequence[Layer]) -> Iterator[dict[str, str]]:
    products = products_of(layers)
    total = sum(product.flops * n for product, n in products.items())
    for product, n in products.items():
        share = f"{product.flops * n / total:.0%}"
        yield {"rows x in x out": str(product), "a step": str(n), "share": share, "in": names_of(layers, product)}


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    columns = [*rows[0]]
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    for row in ({column: column for column in columns}, *rows):
        print("  ".join(row[column].ljust(widths[column]) for column in columns).rstrip())


def _cure(best: Advice) -> Iterator[str]:
    if not best.winners:
        yield "\nTo do: keep BF16Precision."
        return
    everything = len(best.winners) == len(best.layers)
    rest = "" if everything else ", filter: auto"
    yield "\nTo do:\ntrainer:\n  plugins:\n    - class_path: Float8Precision"
    yield f"      init_args: {{recipe: {best.recipe}{rest}}}"
