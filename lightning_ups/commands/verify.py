"""Whether a configuration trains as the plain module does: from the same weights, on the same batches, step by step."""

import math
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ups._compat.torch.compile.inductor import eager_random_numbers
from lightning_ups.commands.trial import Trial
from lightning_ups.config.suggestions import parse_own_options
from lightning_ups.insight.verify import (
    FAULTS,
    REST,
    Band,
    Departure,
    Fault,
    Rounding,
    Step,
    Tape,
    Watch,
    band_between,
    departures,
    distances,
    first_block,
    is_same,
    largest,
    rounded_linears,
)
from lightning_ups.order import Weights, policy_of
from lightning_ups.order.capabilities import STOCK_POLICIES
from lightning_ups.order.refusals import check
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision, Float8Precision, TEPrecision
from lightning_ups.state.checkpoint import check_file
from lightning_ups.transforms.blocks import find_blocks
from lightning_ups.transforms.casting import kept_in_float32, within
from lightning_ups.transforms.float8 import RECIPES, fitting_linears
from lightning_ups.transforms.te import RECIPES as ENGINE_RECIPES

OPTIONS = ("no_faults", "steps")  # as typed
TRIES = True
_COARSER: Mapping[Rounding, Rounding] = {"tensor": "tensor, hybrid", "block": "block, hybrid"}


_LOOKED_UP = ("best", "hpc", "last")  # by callbacks and folders of a run
_SAME = 1e-4  # how far apart two trainings may be that should be one: kernels may sum in another order


def own_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of `verify` itself, and the words that are options of fit."""
    parser = ArgumentParser(
        prog="python -m lightning_ups verify",
        description=__doc__,
        allow_abbrev=False,
        epilog="All options of fit are taken as well, such as --config run.yaml. Exit code 0: it does; 1: it does not.",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare; 3")
    parser.add_argument(
        "--no_faults", dest="faults", action="store_false", help="do not try whether injected faults would be seen"
    )
    own, rest = parse_own_options(parser, argv)
    return vars(own), rest


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a comparison found."""

    departures: Sequence[Departure]  # the distances that left the band
    block: str | None  # the first that left it; None: none did
    same: bool  # whether the configuration changed no number at all
    nearest: Departure  # the distance that came nearest to its bound
    blind: Sequence[str]  # the faults whose effect is not twice the band, or more, in any distance
    power: float | None  # the effect of the smallest fault, in bands; None: no fault was tried
    rounding: str  # what the second reference rounds to

    @property
    def green(self) -> bool:
        """Whether the configuration trains as the plain module does, and a fault would have been seen."""
        return not self.departures and not self.blind


def show(trial: Trial, **asked: Any) -> int:
    """Print whether the configuration trains as the plain module does; ``asked`` is what `verify` takes."""
    if trial.run.num_devices * trial.run.num_nodes > 1:
        count = trial.run.num_devices * trial.run.num_nodes
        print(f"compared on one device; what {count} devices send each other is not part of it")
    if trial.checkpoint in _LOOKED_UP:
        print(f"begins with the module's own weights: a trial finds no checkpoint {trial.checkpoint!r}, but a file")
    verdict = verify(trial, **asked)
    print(*_lines(verdict), sep="\n")
    return 0 if verdict.green else 1


def verify(trial: Trial, *, steps: int = 3, faults: bool = True, fault: tuple[str, Fault] | None = None) -> Verdict:
    """Train three times from one state on the same batches: plainly, with rounding alone, and as asked for.

    Args:
        trial: What is asked for.
        steps: Optimizer steps to compare.
        faults: Also train once for each known fault, put into the plain module, to see that it would be found.
        fault: A block and what to do to it in the configured training: for tests of this.

    Raises:
        ValueError: If no step is to be taken, or none was, how the precision rounds is not known, fit would refuse the
            run, or a second training gets other data.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps} leaves nothing to compare. Give --steps 1 or more; 3 are enough for most.")
    check(trial.run)  # of its callbacks a trial has but some, and fit would have them all
    _check_known(trial.precision)
    trial.check_fits_one_device()
    references = _References(trial, steps=steps)
    plain = references.plain()
    if not any(step.norm for step in plain):
        raise ValueError(
            f"{type(trial.module).__name__} took no optimizer step with a gradient, so there is nothing to compare."
            " Check that the configuration trains by itself: python -m lightning_ups fit."
        )
    if (wrong := next((i for i, step in enumerate(plain) if not _is_number(step)), None)) is not None:
        before = f", or compare the steps before it: --steps {wrong}" if wrong else ""
        raise ValueError(
            f"The reference of {type(trial.module).__name__}, float32 and eager, has NaN or infinity at step {wrong}."
            f" Mend the module or its data first{before}."
        )
    band = band_between(plain, references.rounded())
    powers = references.powers(plain, band) if faults else {}
    found = references.configured(fault)
    left = departures(plain, found, band)
    return Verdict(
        departures=left,
        block=first_block(left, [*find_blocks(trial.module)]),
        same=is_same(plain, found),
        nearest=largest(plain, found, band),
        blind=[name for name, power in powers.items() if power < 2],
        power=min(powers.values()) if powers else None,
        rounding=references.rounding,
    )


def _check_same_data(plain: Sequence[Step], found: Sequence[Step], *, of: str) -> None:
    forward = ("input", "loss")
    if any(each.what in forward and each.distance > _SAME for each in distances(plain, found)):
        raise ValueError(
            f"{of} got other batches, or drew other random numbers, in a second training from one seed and state."
            " Let data and the module draw from torch, numpy or random as they are seeded, and keep no generator or"
            " count outside of the state dict."
        )


def _check_known(precision: Precision) -> None:
    if isinstance(precision, BF16WeightsPrecision):
        raise ValueError(
            "verify has no reference for BF16WeightsPrecision, whose optimizer rounds weights by chance."
            " Verify the same run with BF16Precision(), and an optimizer that does not round."
        )
    if policy_of(precision) is None and not isinstance(precision, DoublePrecision):  # which rounds less than float32
        raise ValueError(
            f"verify does not know how {type(precision).__name__}, precision={precision.precision!r}, rounds."
            f" Use one of {tuple(STOCK_POLICIES)}, or a precision of lightning_ups."
        )


class _References:
    """Trains a trial's module in several ways, each time from the same state."""

    def __init__(self, trial: Trial, *, steps: int) -> None:
        self._trial, self._steps = trial, steps
        self._state: dict[str, Any] | None = None
        self._tape = Tape()

    def plain(self) -> list[Step]:
        return self._train(precision=Precision(), plain=True)

    def rounded(self) -> list[Step]:
        precision = self._trial.precision
        policy = policy_of(precision)
        if policy is None or policy.param is None:
            return self._train(precision=Precision(), plain=True, prepare=_disturbed)
        own: Weights = getattr(precision, "weights", "autocast")
        weights: Weights = "masters" if self._trial.run.strategy.shards else own
        reference = BF16Precision(weights=weights, in_float32=policy.in_float32)
        return self._train(precision=reference, plain=True, prepare=self._rounded_products)

    @property
    def rounding(self) -> str:
        """What the second reference rounds to, in words."""
        policy = policy_of(self._trial.precision)
        if policy is None or policy.param is None:
            return "float32, each weight disturbed in its last bits"
        name = str(policy.param).removeprefix("torch.")
        recipe = _recipe(self._trial.precision)
        if recipe is None:
            return name
        coarser = ", gradients in e5m2" if _rounding(recipe, self._trial.precision).endswith("hybrid") else ""
        return f"{name}, products in float8 {recipe}{coarser}"

    @contextmanager
    def _rounded_products(self, module: LightningModule) -> Iterator[None]:
        asked: Any = self._trial.precision
        recipe = _recipe(asked)
        if recipe is None:
            yield
            return
        options: dict[str, Any] = {"recipe": "tensorwise", "head": asked.head}
        if isinstance(asked, Float8Precision):  # of others, patterns may name what is no linear layer
            options |= {"recipe": asked.recipe, "include": asked.include, "exclude": asked.exclude}
        precise = within(kept_in_float32(module, asked.policy.in_float32).values())
        linears = [linear for linear in fitting_linears(module, **options).values() if linear not in precise]
        with rounded_linears(linears, _rounding(recipe, asked)):
            yield

    def powers(self, plain: Sequence[Step], band: Band) -> dict[str, float]:
        """Return how many bands away from the reference each fault leads, where it shows most."""
        steps = 1 + next(i for i, step in enumerate(plain) if step.norm)
        did = plain[steps - 1].blocks
        ran = [name for name in find_blocks(self._trial.module) if name in did and did[name].added is not None]
        trained = [name for name in ran if did[name].norm]
        if not (blocks := trained or ran):
            return {}
        middle = blocks[len(blocks) // 2]
        result: dict[str, float] = {}
        for name, fault in FAULTS.items():
            # A scaled gradient is visible in any gradient, if necessary in one outside the blocks.
            place = REST if fault is FAULTS["a gradient scaled by 2"] and not trained else middle
            found = self._train(precision=Precision(), plain=True, fault=(place, fault), steps=steps)
            if fault is FAULTS["a gradient scaled by 2"]:  # whose forward, until the first step, is the reference's
                _check_same_data(plain[:steps], found, of=type(self._trial.module).__name__)
            result[name] = max(
                each.distance / band[each.step, each.block, each.what]
                for each in distances(plain[:steps], found)
                if each.block in (place, None)
            )
        return result

    def configured(self, fault: tuple[str, Fault] | None) -> list[Step]:
        with eager_random_numbers():
            return self._train(fault=fault)

    def _train(
        self,
        *,
        precision: Precision | None = None,
        plain: bool = False,
        steps: int | None = None,
        fault: tuple[str, Fault] | None = None,
        prepare: Any = None,
    ) -> list[Step]:
        given = self._trial.checkpoint
        checkpoint = given if self._state is None and given not in _LOOKED_UP else None
        watch = _WatchSteps(self._tape, fault, prepare, checkpoint)
        module = self._trial.module
        self._trial.fit(watch, steps=steps or self._steps, precision=precision, plain=plain, state=self._state)
        if self._state is None:
            self._state = watch.state
        module.zero_grad(set_to_none=True)
        return watch.steps


def _is_number(step: Step) -> bool:
    return math.isfinite(step.norm) and (step.loss is None or math.isfinite(step.loss))


def _recipe(precision: Precision) -> str | None:
    """Return the recipe by which ``precision`` multiplies in float8, or None."""
    return precision.recipe if isinstance(precision, (Float8Precision, TEPrecision)) else None


def _rounding(recipe: str, asked: Any) -> Rounding:
    engine = isinstance(asked, TEPrecision)
    known: Any = ENGINE_RECIPES[recipe] if engine else RECIPES[recipe]
    chosen = asked.number_format or ("hybrid" if engine and known.hybrid else "e4m3")
    return _COARSER.get(known.rounding, known.rounding) if chosen == "hybrid" else known.rounding


class _WatchSteps(Callback):
    """Takes steps down, from the first to the last, in a training that it may prepare or break."""

    def __init__(
        self, tape: Tape, fault: tuple[str, Fault] | None, prepare: Any, checkpoint: str | None = None
    ) -> None:
        self._tape, self._fault, self._prepare, self._checkpoint = tape, fault, prepare, checkpoint
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._loss: Tensor | None = None
        self._stepped = False  # in the batch that is under way
        self.state: dict[str, Any] = {}
        self.steps: list[Step] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        blocks = find_blocks(pl_module)
        if self._checkpoint is not None:
            _load_weights(trainer, pl_module, self._checkpoint)
        self.state = {
            name: value.detach().cpu().clone() if isinstance(value, Tensor) else deepcopy(value)  # an extra state
            for name, value in pl_module.state_dict().items()
        }
        if self._prepare is not None:
            self._stack.enter_context(self._prepare(pl_module))
        if self._fault is not None:
            name, fault = self._fault
            self._stack.enter_context(fault(pl_module if name == REST else blocks[name]))
        self._watch = Watch(pl_module, blocks, self._tape)
        self._stack.callback(self._watch.close)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert self._watch is not None
        self._stepped = True
        masters: Mapping[nn.Parameter, Tensor] = getattr(getattr(optimizer, "masters", None), "of", {})

        def gradient(parameter: nn.Parameter) -> Tensor | None:
            moved = masters[parameter].grad if parameter in masters else None
            return parameter.grad if moved is None else moved

        self._watch.note_gradients(gradient)
        if self._loss is not None and not pl_module.automatic_optimization:  # which need not return one
            self._watch.note_loss(self._loss.item())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        stepped, self._stepped = self._stepped, False  # other batches are of a step that is yet to come
        if self._watch is not None and stepped and isinstance(loss, Tensor) and pl_module.automatic_optimization:
            self._watch.note_loss(loss.item())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.close()
        self.steps = self._watch.steps if self._watch is not None else []

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stack.close()


def _load_weights(trainer: Trainer, module: LightningModule, path: str) -> None:
    """Let ``module`` have the weights of a checkpoint, whose progress and optimizers no trial goes on from."""
    if not Path(path).is_file():
        raise ValueError(
            f"verify cannot begin with the weights of {path!r}, which is no file."
            " Make one of a checkpoint folder by python -m lightning_ups export --format torch."
        )
    check_file(Path(path))
    checkpoint = trainer.strategy.load_checkpoint(path)
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)


@contextmanager
def _disturbed(module: LightningModule) -> Iterator[None]:
    """Change each weight by some of its last bits: what another order of summation does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (p for p in module.parameters() if p.is_floating_point() or p.is_complex()):
            noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            p.mul_(1 + max(2**-20, torch.finfo(p.dtype).eps) * noise)  # of few bits, the last is far from that
    yield


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"reference: float32, eager, one device; the band: twice what {verdict.rounding} changes"
    if verdict.power is not None:
        yield f"the smallest injected fault would be {verdict.power:.1f} times as far away as the band is wide"
    if verdict.same:
        yield "The configuration changes no number: every loss and gradient is that of the reference, bit for bit."
    nearest = verdict.nearest
    if verdict.departures:
        yield f"RED: {_where(verdict.block)} leaves the band first, at step {verdict.departures[0].step}:"
        shown = [each for each in verdict.departures if each.block == verdict.block][:4] or verdict.departures[:4]
        for each in shown:
            distance, allowed = _unlike(each.distance, each.allowed)
            yield f"  step {each.step}, {each.what}: {distance}, allowed {allowed}"
        if others := len(verdict.departures) - len(shown):
            yield f"  and {others} more"
    elif verdict.blind:
        yield f"CANNOT TELL: {' and '.join(verdict.blind)} would stay within twice the band."
        yield (
            "Use a larger batch, or --ckpt_path FILE: in a model that is not trained, a layer may do so little that"
            " nobody misses it."
        )
    else:
        distance, allowed = _unlike(nearest.distance, nearest.allowed)
        yield (
            f"GREEN: nearest to its bound is {_where(nearest.block)}, step {nearest.step}, {nearest.what}:"
            f" {distance} of {allowed}"
        )


def _where(block: str | None) -> str:
    return block if block is not None else "the model as a whole"


def _unlike(distance: float, allowed: float) -> tuple[str, str]:
    """Return both as text, with as many digits as it takes to tell them apart."""
    pairs = ((f"{distance:.{digits}g}", f"{allowed:.{digits}g}") for digits in (2, 3, 4, 6, 9))
    return next((pair for pair in pairs if pair[0] != pair[1]), (f"{distance:.9g}", f"{allowed:.9g}"))
