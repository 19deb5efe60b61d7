"""Whether float8 would make a configuration faster on this GPU, layer by layer, and by how much; nothing is trained."""

import json
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from lightning_ups._compat.optional.te import engine
from lightning_ups.commands.trial import StepClock, Trial
from lightning_ups.config.suggestions import parse_own_options
from lightning_ups.insight.advise import (
    ENGINE,
    Advice,
    Layer,
    Table,
    Timer,
    best_recipe,
    cache_path,
    check_ran,
    engine_layers,
    engine_recipe,
    is_engine,
    layers_in_step,
    layers_with_rows,
    names_of,
    obtain_table,
    products_of,
    read_first,
    timer_on,
    where,
)
from lightning_ups.order import PolicyPrecision, Stage, Weights, policy_of
from lightning_ups.precision import BF16Precision, Float8Precision, TEPrecision
from lightning_ups.precision.converting import check_head
from lightning_ups.transforms.casting import kept_in_float32, within
from lightning_ups.transforms.float8 import RECIPES, fitting_linears, why_left, why_none_fits
from lightning_ups.transforms.te import RECIPES as ENGINE_RECIPES
from lightning_ups.transforms.te import TEConversion

TRIES = True

WARMUP, STEPS = 5, 15


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of `advise` itself, and the words that are options of fit."""
    parser = ArgumentParser(
        prog="python -m lightning_ups advise",
        description=__doc__,
        allow_abbrev=False,
        epilog="All options of fit are taken as well, such as --config run.yaml.",
    )
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", help="float8 recipes, such as rowwise or te-current")
    parser.add_argument("--steps", type=int, help=f"steps in bfloat16 to time a whole one by; {STEPS} on a GPU")
    parser.add_argument("--table", type=Path, help="a file of times from another run, instead of timing anything")
    parser.add_argument("--head", action="store_true", help="consider layers outside the blocks too")
    parser.add_argument("--tokens", type=int, help="how many rows linear layers get; what a step with a batch shows")
    parser.add_argument("--dry", action="store_true", help="only list the products that a step has, on any machine")
    own, rest = parse_own_options(parser, argv)
    return vars(own), rest


def show(trial: Trial, **asked: Any) -> int:
    """Print the products of a step, their times by each recipe, and what to do; ``asked`` is what `advise` takes."""
    choices = advise(trial, **asked)
    if not choices:
        return 0
    best = best_recipe(choices)
    for of_engine in (False, True):  # which computes other products as one
        if family := [advice for advice in choices if is_engine(advice.recipe) == of_engine]:
            _print_table([*best_recipe(family).rows([advice.recipe for advice in family])])
            print()
    print("forward + gradient of the input + gradient of the weight, casts included; x: times as fast as bfloat16")
    if best.step_ms is not None:
        share = best.products_ms / best.step_ms
        print(f"a step in bfloat16 takes {best.step_ms:.1f} ms, and these products {share:.0%} of it")
    for advice in choices:
        print(f"{advice.recipe:20} {advice.verdict()}")
    print(*_cure(best, _settings(trial, best, head=asked.get("head", False), tokens=asked.get("tokens"))), sep="\n")
    return 0


def advise(
    trial: Trial,
    *,
    recipes: Sequence[str] | None = None,
    steps: int | None = None,
    table: Path | None = None,
    head: bool = False,
    tokens: int | None = None,
    dry: bool = False,
    timer: Timer | None = None,
) -> list[Advice]:
    """Return what each recipe would do to a trial's module.

    Args:
        trial: What is asked for.
        recipes: Float8 recipes, Transformer Engine's with ``te-`` in front. None: all of torchao's that the device
            knows, and Transformer Engine's where the run has its precision.
        steps: For how many steps to train in bfloat16, to time a whole one. None: some on a GPU, else none.
        table: A file of times. None: the user's cache, and what it lacks is timed.
        head: Consider layers outside the blocks too.
        tokens: How many rows linear layers get. None: as the run's precision says, or what a step with the first batch
            shows.
        dry: Print the products, and time none.
        timer: Times a product. None: on the device.

    Raises:
        RuntimeError: If there is no GPU, and neither a table nor ``dry``.
        ValueError: If no layer fits, the step cannot run without values, ``steps`` are too few, or ``dry`` is given
            with ``steps`` or ``table``.
    """
    if steps is not None and steps != 0 and steps <= WARMUP:
        raise ValueError(
            f"--steps {steps} is too few: the first {WARMUP} compile and are not timed."
            f" Give --steps {STEPS} or so, or --steps 0 to do without the time of a whole step."
        )
    if dry and (table or steps):
        raise ValueError("--dry times nothing and looks at neither --table nor --steps. Leave them out, or --dry.")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens {tokens} is out of range: it is a number of rows. Give 1 or more, or leave it out.")
    can_time = trial.run.accelerator == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if can_time else torch.device("cpu")
    if not (dry or table or timer or can_time):
        raise RuntimeError(
            "advise finds no GPU here. Run it on the one that will train, bring the times from there by --table FILE,"
            " or see the products alone by --dry."
        )
    check_head(type(trial.precision).__name__, head=head, include=getattr(trial.precision, "include", None))
    steps = 0 if dry else steps if steps is not None else STEPS if can_time else 0
    if steps:
        trial.check_fits_one_device()
    wanted = recipes or [*_known(device), *(ENGINE if isinstance(trial.precision, TEPrecision) else ())]
    names = [*_possible(trial, wanted, device=device, here=can_time)]
    considered = _layers(trial, names, head=head, tokens=_rows(trial, tokens))
    if not considered:
        module = trial.module
        nowhere = [None if is_engine(name) else why_none_fits(module, recipe=name, head=True) for name in names]
        if nowhere and all(nowhere):
            raise ValueError(nowhere[0])
        raise ValueError(
            f"No linear layer of {type(module).__name__} can compute in float8."
            " Layers outside the blocks that repeat are left out, and so are dimensions that are no multiples of 16"
            f"{_reasons(trial, names, head=head)}."
            f" {'Name' if head else 'Try --head, or name'} layers by include=[...] in the precision, or keep"
            " BF16Precision."
        )
    if dry:
        for name in _one_of_each(considered):
            _print_table([*_shares(considered[name])])
        return []
    if timer is None and can_time:
        timer = timer_on(device)
    times = Table(where(device))
    for name, layers in considered.items():
        times = times.joined(obtain_table(products_of(layers), [name], device=device, path=table, timer=timer))
    if table is None:
        print(f"times are kept in {cache_path(where(device))}")
    clock = _step(trial, steps) if steps > WARMUP else None
    step_ms = None if clock is None else clock.step_ms
    microbatches = trial.settings.get("accumulate_grad_batches") or 1
    return [
        Advice(recipe=name, layers=layers, table=times, step_ms=step_ms, microbatches=microbatches)
        for name, layers in considered.items()
    ]


def _reasons(trial: Trial, names: Iterable[str], *, head: bool) -> str:
    """Return why layers are left out, for the first recipe of torchao's among ``names``."""
    recipe = next((name for name in names if not is_engine(name)), None)
    if recipe is None:
        return ""
    reasons = why_left(trial.module, **_selection(trial, recipe, head=head))
    return ": " + "; ".join(f"{name}, {why}" for name, why in [*reasons.items()][:4]) if reasons else ""


def _rows(trial: Trial, tokens: int | None) -> int | None:
    return tokens if tokens is not None else getattr(trial.precision, "tokens", None)


def _one_of_each(names: Iterable[str]) -> list[str]:
    return [*{is_engine(name): name for name in reversed([*names])}.values()][::-1]


def _possible(trial: Trial, names: Sequence[str], *, device: torch.device, here: bool) -> Iterator[str]:
    """Yield the recipes that can run, and print in a line why the others cannot; raise if none can."""
    known = (*RECIPES, *ENGINE)
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"advise knows no recipe {wrong[0]!r}. Use some of {', '.join(known)}.")
    if all(map(is_engine, names)):
        engine()  # or its error
    reasons = {
        name: _why_not(trial, engine_recipe(name), device if here else None) for name in names if is_engine(name)
    }
    left_out = {name: why for name, why in reasons.items() if why is not None}
    for why in dict.fromkeys(left_out.values()):
        print(f"left out: {', '.join(name for name, other in left_out.items() if other == why)}, since {why}")
    yield from (name for name in names if name not in left_out)


def _why_not(trial: Trial, recipe: str, device: torch.device | None) -> str | None:
    try:
        engine()
    except ModuleNotFoundError:
        return "Transformer Engine is not installed here"
    except ImportError as error:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    run, known = trial.run, ENGINE_RECIPES[recipe]
    compiled = run.compiled_by_user or any(step.stage is Stage.COMPILE for step in run.declarations)
    if compiled and not known.compiles:
        return "it cannot run with Compile"
    return None if device is None else known.why_not(device)


def _known(device: torch.device) -> Sequence[str]:
    least = min(recipe.capability for recipe in RECIPES.values())
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else least
    return [name for name, recipe in RECIPES.items() if recipe.capability <= max(found, least)]


def _layers(trial: Trial, names: Sequence[str], *, head: bool, tokens: int | None) -> dict[str, list[Layer]]:
    """Return what a step multiplies in the layers that each recipe would compute; those that have none are left out."""
    batch = trial.batch()  # which builds the module, too
    plans = {name: _engine_plan(trial, name, head=head) for name in names if is_engine(name)}
    precise = _in_float32(trial)
    fitting = {
        name: [*read_first(plans[name]).values()]
        if is_engine(name)
        else [n for n in fitting_linears(trial.module, **_selection(trial, name, head=head)) if n not in precise]
        for name in names
    }
    linears = dict.fromkeys(linear for found in fitting.values() for linear in found)
    if not linears:
        return {}
    if tokens is None:
        called = layers_in_step(trial.module, linears, batch)
    else:
        modules: dict[str, Any] = {name: trial.module.get_submodule(name) for name in linears}
        called = layers_with_rows(modules, tokens)
    trial.module.trainer = None
    check_ran(called, linears=linears, of=type(trial.module).__name__, tokens="--tokens 16384")
    layers = {name: [layer for layer in called if layer.name in fitting[name]] for name in names}
    for name, plan in plans.items():
        layers[name], others = engine_layers(plan, called)
        for why in dict.fromkeys(others.values()):
            which = [unit for unit, other in others.items() if other == why]
            print(f"{name} leaves out {which[0]}{f' and {len(which) - 1} more' if which[1:] else ''}: {why}")
    return {name: found for name, found in layers.items() if found}


def _engine_plan(trial: Trial, recipe: str, *, head: bool) -> TEConversion:
    asked = trial.precision
    chosen = copy(asked) if isinstance(asked, TEPrecision) else TEPrecision()
    chosen.recipe, chosen.head = engine_recipe(recipe), head or chosen.head
    return chosen.planned(trial.module)


def _in_float32(trial: Trial) -> set[str]:
    policy = policy_of(trial.precision)
    kept = kept_in_float32(trial.module, policy.in_float32) if policy is not None and policy.in_float32 else {}
    parts = within(kept.values())
    return {name for name, module in trial.module.named_modules() if module in parts}


def _selection(trial: Trial, recipe: str, *, head: bool) -> dict[str, Any]:
    if not isinstance(asked := trial.precision, Float8Precision):
        return {"recipe": recipe, "head": head}
    return {"recipe": recipe, "head": head or asked.head, "include": asked.include, "exclude": asked.exclude}


def _step(trial: Trial, steps: int) -> StepClock:
    """Return the clock that saw some steps in bfloat16."""
    clock, policy = StepClock(warmup=WARMUP), policy_of(trial.precision)
    precision = BF16Precision(weights=_weights(trial), in_float32=() if policy is None else policy.in_float32)
    trial.fit(clock, steps=steps, precision=precision)
    return clock


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


def _settings(trial: Trial, best: Advice, *, head: bool, tokens: int | None) -> dict[str, Any]:
    """Return the arguments of a precision that converts what ``best`` would, and leaves the rest as it is asked for."""
    asked, kind = trial.precision, _kind(best)
    found: dict[str, Any] = {"recipe": engine_recipe(best.recipe)}
    if head or (isinstance(asked, kind) and asked.head):
        found["head"] = True
    if (weights := _weights(trial)) != signature(kind).parameters["weights"].default:
        found["weights"] = weights
    alike = isinstance(asked, kind) and getattr(asked, "recipe", None) == found["recipe"]
    for name in ("include", "exclude", "norms", "fuse", *(["all_gather"] if alike else [])):
        parameter = signature(kind).parameters.get(name)
        if parameter is None or not isinstance(asked, kind):
            continue
        value = getattr(asked, name)
        if value != parameter.default:
            found[name] = value
    policy = policy_of(asked)
    if policy is not None and policy.in_float32:
        found["in_float32"] = policy.in_float32
    if len(best.winners) < len(best.layers):
        found["filter"] = "auto"
        if (rows := _rows(trial, tokens)) is not None:
            found["tokens"] = rows
    return found


def _weights(trial: Trial) -> Weights:
    """Return how the run that is asked for has weights of low precision, if its precision asks for one of the two."""
    if isinstance(asked := trial.precision, PolicyPrecision) and "weights" in signature(type(asked)).parameters:
        return asked.weights
    return "autocast"


def _kind(best: Advice) -> type[Float8Precision] | type[TEPrecision]:
    return TEPrecision if is_engine(best.recipe) else Float8Precision


def _cure(best: Advice, settings: Mapping[str, Any]) -> Iterator[str]:
    if not best.winners:
        yield "\nTo do: keep BF16Precision."
        return
    yield f"\nTo do:\ntrainer:\n  plugins:\n    - class_path: {_kind(best).__name__}"
    said = (f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items())
    yield f"      init_args: {{{', '.join(said)}}}"
