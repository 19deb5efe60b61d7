"""The memory of a run, and of the same run with other settings: the figures of the ``plan`` command."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_ups._compat.optional.packages import has
from lightning_ups.insight.memory.account import Kind, Moment
from lightning_ups.insight.memory.batches import batch_size, resized, sequence_length
from lightning_ups.insight.memory.described_run import (
    Change,
    OptimizerShare,
    Uncountable,
    measure_run,
    optimizer_share,
)
from lightning_ups.insight.memory.devices import Device
from lightning_ups.insight.memory.layout import Layout, Sharding, between, peak_of
from lightning_ups.insight.memory.step import Step
from lightning_ups.order.capabilities import policy_of
from lightning_ups.order.precision import PolicyPrecision
from lightning_ups.order.refusals import one_graph
from lightning_ups.order.run import Placement, Run, Stage

MOST = (1 << 20) - 1  # samples or positions: the limit of the search
MOVES_NOTHING = (
    "ActivationOffload would move nothing: its blocks save no tensor of at least min_mb, or do not run separately."
    " Use larger batches, a smaller min_mb, or leave it out."
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A setting in place of the configured one.

    Args:
        name: The setting.
        yaml: How to write it in YAML.
        python: How to write it in Python.
        change: What the step does differently.
        strategy: The strategy; None: as configured.
        sharding: Its sharding; None: as configured.
        samples: The share of the batch in a microbatch.
        host: The share of each kind of memory on the host.
        chunk: Bytes of a chunk of optimizer state on the host, see `Layout`.
        state: Bytes of optimizer state for a parameter under a sharding strategy; None: as configured.
        price: The cost in speed, as text.
        rank: The order of prices.
    """

    name: str
    yaml: str = ""
    python: str = ""
    change: Change = field(default_factory=Change)
    strategy: Placement | None = None
    sharding: Sharding | None = None
    samples: float = 1
    host: Mapping[Kind, float] = field(default_factory=dict)
    chunk: int | None = None
    state: float | None = None
    price: str = ""
    rank: int = 0

    @property
    def costs_speed(self) -> bool:
        """Whether its only use is to save memory."""
        return not self.price.startswith(("faster", "as fast"))


class Planner:
    """Measures a run and its variants, each step at most once.

    Args:
        run: The run.
        batch: The argument of ``training_step`` on one device.
        settings: Of the strategy: ``sharding``, ``reshard_after_forward``, ``replicate_size``, ``offload``. None: those
            of the strategy of ``run``.
        optimizers: Creates the optimizer in place of ``configure_optimizers``.
        microbatches: Batches in an optimizer step.
        device: The GPU. None: unknown; the plan does not say what fits.

    Attributes:
        declared: The run as configured.
    """

    def __init__(
        self,
        run: Run,
        batch: Any,
        *,
        settings: Mapping[str, Any] | None = None,
        optimizers: Callable[[nn.Module], Any] | None = None,
        microbatches: int = 1,
        device: Device | None = None,
    ) -> None:
        self.run, self.batch, self.device = run, batch, device
        self.samples, self.tokens = batch_size(batch), sequence_length(batch)
        self._settings = run.strategy.settings if settings is None else settings
        self._optimizers, self._microbatches = optimizers, microbatches
        self._steps: dict[Any, Step] = {}
        self.declared = Variant(name="as configured")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.run.num_devices * self.run.num_nodes

    @property
    def _tensor_size(self) -> int:
        return self.run.strategy.settings.get("tensor_parallel_size") or 1

    @property
    def _splits_sequences(self) -> bool:
        return (self.run.strategy.settings.get("context_parallel_size") or 1) > 1

    @property
    def usable(self) -> int | None:
        """The size that torch's pool may reach, if the device is known."""
        return None if self.device is None else self.device.usable(devices=self.devices)

    def moment(self, variant: Variant, *, samples: int | None = None, tokens: int | None = None) -> Moment:
        """Return the moment of a step with the most memory on one device.

        Args:
            variant: The setting.
            samples: Of a microbatch, in place of the batch's.
            tokens: Of a sequence, in place of the batch's.

        Raises:
            Uncountable: If it cannot be measured, or would be refused in the first step because it changes nothing.
        """
        wanted = samples or self._samples_of(variant)
        step = self._at(variant, wanted) if tokens is None else self._step(variant, samples=wanted, tokens=tokens)
        if variant.change.offloading and not step.on_host:
            raise Uncountable(MOVES_NOTHING)
        return peak_of(step, self._layout(variant))

    def fits(self, variant: Variant, **size: int) -> bool:
        """Return whether it fits on the device."""
        return self.usable is not None and self.moment(variant, **size).total <= self.usable

    def largest_batch(self, variant: Variant) -> int | None:
        """Return the largest microbatch that fits, 0 if none does, or None if batches have no size."""
        if self.samples is None or self.usable is None:
            return None
        found = _largest(lambda samples: self.fits(variant, samples=samples))
        if not found or not self._offloads_activations(variant):
            return found
        # Larger batches offload more tensors: memory is linear only among batches that offload the same ones.
        found = _largest(lambda samples: self._holds(variant, self._at(variant, samples, base=found)))
        near = (n for n in (found, int(0.98 * found)) if n and self._holds(variant, self._step(variant, samples=n)))
        return next(near, None) or _largest(lambda n: self._holds(variant, self._step(variant, samples=n)))

    def longest_sequence(self, variant: Variant) -> int | None:
        """Return the longest sequence that fits at the batch's number of samples, or None if it has no sequences.

        Two lengths are measured, and the length found between or beyond them once more. If it does not fit, or the
        module does not support it, a shorter one is tried.

        Raises:
            Uncountable: If the module supports no longer sequences.
        """
        if self.tokens is None or self.usable is None:
            return None
        one, two = self.tokens, 2 * self.tokens - 1 if self.tokens % 2 else 2 * self.tokens
        samples = self._samples_of(variant)
        first, second = (self._step(variant, samples=samples, tokens=n) for n in (one, two))
        base = min(peak_of(step, self._layout(variant)).total for step in (first, second))

        def rounded(tokens: float) -> int:
            return int(tokens) // 64 * 64 + one % 2

        found = rounded(
            _largest(lambda tokens: self._holds(variant, between(first, second, (tokens - one) / (two - one))))
        )
        while found > 64:
            try:
                total = self.moment(variant, tokens=found).total
                if total <= self.usable:
                    return found
                # Memory grows at most quadratically with the sequence.
                share = max(self.usable - base, 0) / max(total - base, 1)
                found = rounded(min(0.95, max(share**0.5, 0.1)) * found)
            except Uncountable:  # beyond the module's own limit; it supports the two measured lengths
                found = max(two, rounded(found / 2))
        return found

    def variants(self) -> Iterator[Variant]:
        """Yield other settings, in the order of their price."""
        yield from sorted(self._variants(), key=lambda variant: variant.rank)

    def moves_nothing(self) -> bool:
        """Return whether a configured callback would offload activations and finds none to offload."""
        if not self._offloads_activations(self.declared):
            return False
        return not self._at(self.declared, self._samples_of(self.declared)).on_host

    def cures(self, *, most: int = 3) -> list[tuple[Variant, int]]:
        """Return the cheapest variants that need less memory, and the bytes that each saves."""
        before, found = self.moment(self.declared).total, []
        for variant in self.variants():
            try:
                saved = before - self.moment(variant).total
            except Uncountable:
                continue
            if saved > 0.01 * before:
                found.append((variant, saved))
        enough = [each for each in found if self.usable is None or before - each[1] <= self.usable]
        return sorted((enough or found)[:most], key=lambda each: each[0].rank)

    def _variants(self) -> Iterator[Variant]:
        run = self.run
        steps = {step.stage: step for step in run.declarations}
        names = {type(step).__name__ for step in run.declarations}
        if Stage.COMPILE not in steps and not run.strategy.whole_graph:
            yield Variant(
                name="Compile",
                **_callback("Compile"),
                change=Change(compiling="blocks"),
                price="faster, after compiling once",
            )
        recomputed = getattr(steps.get(Stage.RECOMPUTE), "save", None)
        if Stage.RECOMPUTE in steps:
            yield Variant(
                name="no checkpointing",
                yaml="# Remove ActivationCheckpoint from trainer.callbacks; from a preset's list by\n"
                "# trainer.callbacks-: [ActivationCheckpoint]",
                python="# Remove ActivationCheckpoint from the Trainer's callbacks.",
                change=Change(checkpointing="off"),
                price="faster",
            )
        matmuls = "faster" if recomputed == "nothing" else "1 to 5 % slower"
        for save, price, rank in (("matmuls", matmuls, 3), ("nothing", "15 to 25 % slower", 5)):
            if recomputed != save:
                yield Variant(
                    name=f"ActivationCheckpoint(save={save})",
                    **_callback("ActivationCheckpoint", save=save),
                    change=Change(checkpointing=save),  # type: ignore[arg-type]
                    price=price,
                    rank=rank,
                )
        in_one_graph = run.compiled_by_user or one_graph(run)
        if Stage.OFFLOAD not in steps and not in_one_graph:
            yield Variant(
                name="ActivationOffload",
                **_callback("ActivationOffload"),
                change=Change(offloading=True),
                price="copies the inputs of blocks over the host link during compute"
                if recomputed == "nothing"
                else "slower if copies to the host take longer than the compute of a block",
                rank=4 if recomputed == "nothing" else 7,
            )
        if self.devices > 1 and self._tensor_size == 1 and not self._splits_sequences:
            yield from self._shardings()
        if "OptimizerOffload" not in names:
            yield Variant(
                name="OptimizerOffload",
                **_callback("OptimizerOffload"),
                host={"optimizer state": 1.0, "master weights": 1.0},
                chunk=256 * 2**20,
                price="streams the state over the host link each step",
                rank=6,
            )
            if has("torchao"):
                yield Variant(
                    name="AdamW8bit",
                    yaml="optimizer: torchao.optim.AdamW8bit",
                    python="torchao.optim.AdamW8bit(self.parameters())  # in configure_optimizers",
                    change=Change(low_bit=None if run.strategy.shards else True),
                    state=2 * (1 + 4 / 256),
                    price="a little slower; another optimizer",
                    rank=8,
                )
        if self.samples is not None and self.samples > 1:
            yield Variant(
                name=f"batch {self.samples // 2}, accumulated twice",
                yaml=f"data.init_args.batch_size: {self.samples // 2}\ntrainer.accumulate_grad_batches:"
                f" {2 * self._microbatches}",
                python=f"DataLoader(..., batch_size={self.samples // 2})\n"
                f"Trainer(accumulate_grad_batches={2 * self._microbatches})",
                samples=0.5,
                price="slower if the GPU is underused with the smaller batch",
                rank=4,
            )

    def _shardings(self) -> Iterator[Variant]:
        now = self._sharding(self.declared)
        if now != "copies":
            yield Variant(
                name="DDP: no sharding",
                yaml="trainer.strategy: ddp",
                python="Trainer(strategy='ddp')",
                strategy=Placement.of(DDPStrategy),
                price="as fast",
            )
        for sharding, rank in (("gradients", 1), ("full", 2)):
            if now != sharding:
                yield Variant(
                    name=f"FSDP2Strategy(sharding={sharding})",
                    yaml=f"trainer.strategy: {{class_path: FSDP2Strategy, init_args: {{sharding: {sharding}}}}}",
                    python="from lightning_ups.strategies import FSDP2Strategy\n"
                    f"Trainer(strategy=FSDP2Strategy(sharding={sharding!r}))",
                    strategy=Placement(name="FSDP2Strategy", shards=True, ours=True),
                    sharding=sharding,  # type: ignore[arg-type]
                    price="exchanges weights, which overlaps with compute on fast links",
                    rank=rank,
                )

    def _offloads_activations(self, variant: Variant) -> bool:
        offloading = variant.change.offloading
        return any(step.moves_saved for step in self.run.declarations) if offloading is None else offloading

    def _holds(self, variant: Variant, step: Step) -> bool:
        return peak_of(step, self._layout(variant)).total <= (self.usable or 0)

    def _samples_of(self, variant: Variant) -> int:
        return max(int((self.samples or 1) * variant.samples), 1)

    def _run(self, variant: Variant) -> Run:
        return self.run if variant.strategy is None else replace(self.run, strategy=variant.strategy)

    def _at(self, variant: Variant, samples: int, *, base: int | None = None) -> Step:
        """Return a step with ``samples``, interpolated between two measured ones: ``base`` and twice that."""
        if self.samples is None:
            return self._step(variant)
        if samples == self.samples:
            return self._step(variant, samples=samples)
        one = max(base or self.samples, 2)  # torch may treat a dimension of one differently
        first, second = (self._step(variant, samples=n) for n in (one, 2 * one))
        return between(first, second, (samples - one) / one)

    def _part_of(self, tokens: int | None, run: Run) -> int | None:
        """Return how many of ``tokens`` of a sequence a device computes, if context parallelism splits them."""
        settings, whole = run.strategy.settings, tokens or self.tokens
        size = settings.get("context_parallel_size") or 1
        if size == 1 or whole is None:
            return tokens
        if (name := settings.get("context_parallel_module")) is not None:
            raise Uncountable(
                f"FSDP2Strategy(context_parallel_module={name!r}) cannot be planned: what is computed outside of that"
                " module is unknown. A GPT of this package and decoders of transformers can be planned."
            )
        return whole // size + whole % 2  # an odd one is the last target

    def _step(self, variant: Variant, *, samples: int | None = None, tokens: int | None = None) -> Step:
        run = self._run(variant)
        if (run.strategy.settings.get("pipeline_parallel_size") or 1) > 1:
            raise Uncountable(
                "FSDP2Strategy(pipeline_parallel_size) cannot be planned: devices have different blocks, and different"
                " numbers of microbatches under way. Plan it without that size, on one device, for a bound."
            )
        tokens = self._part_of(tokens, run)
        microbatches = round(self._microbatches / variant.samples)
        # Strategies that copy the model have equal steps, and so have those that shard it in hooks.
        key = (
            variant.change,
            run.strategy.shards,
            run.strategy.whole_graph,
            min(microbatches, 2),  # a third one is like the second
            samples,
            tokens,
        )
        if key not in self._steps:
            batch = self.batch
            if samples is not None or tokens is not None:
                batch = resized(batch, samples=samples, tokens=tokens)
            self._steps[key] = measure_run(
                run,
                batch,
                optimizers=self._optimizers,
                change=variant.change,
                microbatches=microbatches,
            )
        return self._steps[key]

    def _sharding(self, variant: Variant) -> Sharding:
        if not self._run(variant).strategy.shards:
            return "copies"
        if variant.sharding is not None:
            return variant.sharding
        configured = self._settings.get("sharding", "full")
        return (
            "gradients" if configured == "full" and self._settings.get("reshard_after_forward") is False else configured
        )

    def _layout(self, variant: Variant) -> Layout:
        run, sharding = self._run(variant), self._sharding(variant)
        parameters, policy = [*run.module.parameters()], policy_of(run.precision)
        stored = sum(p.numel() * p.element_size() for p in parameters) / max(sum(p.numel() for p in parameters), 1)
        computed = None if policy is None or policy.param is None else policy.param.itemsize
        host, chunk = self._on_host(variant)
        common: dict[str, Any] = {
            "devices": self.devices,
            "workspace": 0 if self.device is None else self.device.workspace,
        }
        if sharding == "copies":
            has_masters = getattr(run.precision, "weights", None) == "masters"
            return Layout(
                computed=computed if computed and has_masters else stored, on_host=host, chunk=chunk, **common
            )
        if self._settings.get("offload") and variant.strategy is None:
            host |= {"parameters": 1.0, "gradients": 1.0, "optimizer state": 1.0}
            chunk = 0
        computed = computed or stored
        replicas = self._settings.get("replicate_size", 1) if variant.strategy is None else 1
        return Layout(
            sharding=sharding,
            shards=1 if sharding == "none" else max(self.devices // replicas // self._tensor_size, 1),
            stored=stored,
            computed=computed,
            gathered_float8=1 if self._gathers_float8(run) else computed,
            reduced=policy.reduce.itemsize if policy is not None and policy.reduce is not None else computed,
            state=self._share.state if variant.state is None else variant.state,
            stepping=self._share.stepping,
            on_host=host,
            chunk=chunk,
            whole_graph=run.strategy.whole_graph,
            **common,
        )

    @cached_property
    def _share(self) -> OptimizerShare:
        return optimizer_share(self.run, optimizers=self._optimizers)

    def _on_host(self, variant: Variant) -> tuple[dict[Kind, float], int | None]:
        """Return the share of each kind on the host, and the bytes of a chunk of optimizer state there.

        Steps declare the shares as ``host_resident``. A step that owns the optimizer state declares ``resident``, the
        share on the device, and ``chunk_bytes``, which is 0 if the host runs the optimizer step.
        """
        shares: dict[Kind, float] = {}
        chunk = variant.chunk
        for step in self.run.declarations:
            shares.update(getattr(step, "host_resident", None) or {})
            if step.owns_optimizer_state and hasattr(step, "resident"):
                share = 1 - step.resident  # type: ignore[attr-defined]
                shares |= {"optimizer state": share, "master weights": share}
                chunk = step.chunk_bytes  # type: ignore[attr-defined]
        return {**shares, **variant.host}, chunk

    def _gathers_float8(self, run: Run) -> bool:
        precision = run.precision
        if not isinstance(precision, PolicyPrecision):
            return False
        return precision.sharded(in_graph=run.strategy.whole_graph).gathers_float8


class _Written(TypedDict):
    yaml: str
    python: str


def _callback(name: str, **settings: Any) -> _Written:
    """Return how to add a callback, in YAML and in Python."""
    given = ", ".join(f"{key}: {value}" for key, value in settings.items())
    arguments = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return {
        "yaml": f"trainer.callbacks+: [{{class_path: {name}{f', init_args: {{{given}}}' if given else ''}}}]",
        "python": f"from lightning_ups.callbacks import {name}\nTrainer(callbacks=[..., {name}({arguments})])",
    }


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, by bisection; 0 if 1 does not."""
    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
