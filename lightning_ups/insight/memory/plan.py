"""What a run takes of a device's memory, and what it would take with other settings: the figures behind ``plan``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_ups._compat.optional.packages import has
from lightning_ups.insight.memory.account import Kind, Moment
from lightning_ups.insight.memory.batches import batch_size, resized, sequence_length
from lightning_ups.insight.memory.described_run import Change, Uncountable, measure_run, optimizer_share
from lightning_ups.insight.memory.devices import Device
from lightning_ups.insight.memory.layout import Layout, Sharding, between, peak_of
from lightning_ups.insight.memory.step import Step
from lightning_ups.order.placement import Placement
from lightning_ups.order.policy import policy_of
from lightning_ups.order.precision import PolicyPrecision
from lightning_ups.order.refusals import one_graph
from lightning_ups.order.run import Run
from lightning_ups.order.stage import Stage

__all__ = ["MOST", "Planner", "Variant"]

MOST = (1 << 20) - 1  # samples, or positions: beyond that nobody asks, and nothing is looked for


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A setting beside the declared one.

    Args:
        name: What is otherwise.
        yaml: What to write for it.
        change: What is rehearsed otherwise.
        strategy: The strategy under which it runs; None: the declared one.
        sharding: How that shards; None: as declared.
        samples: The share of the batch that a microbatch has.
        host: The share of each kind that lies on the host.
        chunk: Bytes of a chunk of optimizer state on the host, as a layout has it.
        state: Bytes of optimizer state for a parameter under a strategy that shards; None: as declared.
        price: What it costs in speed, for reading.
        rank: The order of prices.
    """

    name: str
    yaml: str = ""
    change: Change = field(default_factory=Change)
    strategy: Placement | None = None
    sharding: Sharding | None = None
    samples: float = 1
    host: Mapping[Kind, float] = field(default_factory=dict)
    chunk: int | None = None
    state: float | None = None
    price: str = ""
    rank: int = 0


class Planner:
    """Rehearses a run and its variants, each no more often than needed.

    Args:
        run: What is asked for.
        batch: What ``training_step`` is given on one device.
        settings: Of the strategy: ``sharding``, ``reshard_after_forward``, ``replicate_size``, ``offload``,
            ``tensor_parallel_size``, ``tensor_parallel_plan``. None: as the strategy of ``run`` says.
        optimizers: Makes the optimizer in place of ``configure_optimizers``.
        microbatches: Batches in an optimizer step.
        device: The kind of GPU; None: not known, so that nothing can be said to fit.
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

    @property
    def devices(self) -> int:
        """How many devices take part."""
        return self.run.num_devices * self.run.num_nodes

    @property
    def usable(self) -> int | None:
        """Bytes that torch's pool may grow to, if the device is known."""
        return None if self.device is None else self.device.usable(devices=self.devices)

    @cached_property
    def declared(self) -> Variant:
        """The run as it is."""
        return Variant(name="as configured")

    def moment(self, variant: Variant, *, samples: int | None = None, tokens: int | None = None) -> Moment:
        """Return when a step takes the most of one device.

        Args:
            variant: The setting.
            samples: Of a microbatch, in place of the batch's.
            tokens: Of a sequence, in place of the batch's.

        Raises:
            Uncountable: If it cannot be rehearsed, or changes nothing and would be refused in the first step.
        """
        wanted = samples or self._samples_of(variant)
        step = self._at(variant, wanted) if tokens is None else self._step(variant, samples=wanted, tokens=tokens)
        if variant.change.offloading and not step.on_host:
            raise Uncountable(
                "ActivationOffload would move nothing: blocks save no tensor of its min_mb, or more."
                " Small copies cost more time than they save memory."
                " Use larger batches."
            )
        return peak_of(step, self._layout(variant))

    def fits(self, variant: Variant, **size: int) -> bool:
        """Return whether it fits on the device."""
        return self.usable is not None and self.moment(variant, **size).total <= self.usable

    def largest_batch(self, variant: Variant) -> int | None:
        """Return how many samples a microbatch may have, 0 if not even one; None if batches have no size."""
        if self.samples is None or self.usable is None:
            return None
        found = _largest(lambda samples: self.fits(variant, samples=samples))
        if not found or not self._moves(variant):
            return found
        # What is too small to be moved is moved in larger batches: only those that move the same lie on a line.
        found = _largest(lambda samples: self._holds(variant, self._at(variant, samples, beside=found)))
        near = (n for n in (found, int(0.98 * found)) if n and self._holds(variant, self._step(variant, samples=n)))
        return next(near, None) or _largest(lambda n: self._holds(variant, self._step(variant, samples=n)))

    def longest_sequence(self, variant: Variant) -> int | None:
        """Return how many positions a sequence may have at the batch's number of samples; None if it has none.

        Two lengths are rehearsed, and what is found between or beyond them once more: if it does not fit after all, or
        the module takes none as long, a shorter one is returned that does both.

        Raises:
            Uncountable: If the module takes no longer sequences.
        """
        if self.tokens is None or self.usable is None:
            return None
        one, two = self.tokens, 2 * self.tokens - 1 if self.tokens % 2 else 2 * self.tokens
        samples = self._samples_of(variant)
        first, second = (self._step(variant, samples=samples, tokens=n) for n in (one, two))
        base = min(peak_of(step, self._layout(variant)).total for step in (first, second))

        def fits(tokens: int) -> bool:
            step = between(first, second, (tokens - one) / (two - one))
            return peak_of(step, self._layout(variant)).total <= (self.usable or 0)

        def rounded(tokens: float) -> int:
            return int(tokens) // 64 * 64 + one % 2

        found = rounded(_largest(fits))
        while found > 64:
            try:
                total = self.moment(variant, tokens=found).total
                if total <= self.usable:
                    return found
                # What grows faster than the sequence does so with its square at the most.
                share = max(self.usable - base, 0) / max(total - base, 1)
                found = rounded(min(0.95, max(share**0.5, 0.1)) * found)
            except Uncountable:  # the module has a limit of its own, and takes two of the lengths
                found = max(two, rounded(found / 2))
        return found

    def variants(self) -> Iterator[Variant]:
        """Yield the neighbouring settings that differ from the declared one, in the order of their price."""
        yield from sorted(self._variants(), key=lambda variant: variant.rank)

    def moves_nothing(self) -> bool:
        """Return whether a declared callback that moves what is saved for backward would find nothing to move."""
        if not self._moves(self.declared) or self._split(self.declared):
            return False
        return not self._at(self.declared, self._samples_of(self.declared)).on_host

    def cures(self, *, most: int = 3) -> list[tuple[Variant, int]]:
        """Return the cheapest variants that save something, and how many bytes each saves."""
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
        steps = {step.stage: step for step in self.run.declarations}
        if Stage.COMPILE not in steps and not self.run.strategy.whole_graph:
            yield Variant(
                name="Compile",
                yaml=_callback("Compile"),
                change=Change(compiling="blocks"),
                price="faster, after compiling once",
            )
        recomputed = getattr(steps.get(Stage.RECOMPUTE), "save", None)
        if Stage.RECOMPUTE in steps:
            yield Variant(
                name="no checkpointing",
                yaml="# Take ActivationCheckpoint out of trainer.callbacks; out of a preset's list by\n"
                "# trainer.callbacks-: [ActivationCheckpoint]",
                change=Change(checkpointing="off"),
                price="faster",
            )
        if recomputed != "matmuls":
            yield _checkpointing("matmuls", price="1 to 5 % slower", rank=3)
        if recomputed != "nothing":
            yield _checkpointing("nothing", price="15 to 25 % slower", rank=5)
        yield from self._moved(with_inputs_alone=recomputed == "nothing")
        if self.devices > 1:
            yield from self._shardings()
        yield from self._offloads({type(step).__name__ for step in self.run.declarations})
        if self.samples is not None and self.samples > 1 and self.run.module.automatic_optimization:
            yield Variant(
                name=f"batch {self.samples // 2}, accumulated twice",
                yaml=f"data.init_args.batch_size: {self.samples // 2}\ntrainer.accumulate_grad_batches:"
                f" {2 * self._microbatches}",
                samples=0.5,
                price="slower where the device is then too small a part busy",
                rank=4,
            )

    def _moved(self, *, with_inputs_alone: bool) -> Iterator[Variant]:
        run = self.run
        declared = any(step.stage is Stage.OFFLOAD for step in run.declarations)
        if declared or run.compiled_by_user or one_graph(run) or self._split(self.declared):
            return
        yield Variant(
            name="ActivationOffload",
            yaml=_callback("ActivationOffload"),
            change=Change(offloading=True),
            price="inputs of blocks travel over the host link beside the work"
            if with_inputs_alone
            else "slower where blocks compute for a shorter time than what they save travels",
            rank=4 if with_inputs_alone else 7,
        )

    def _shardings(self) -> Iterator[Variant]:
        ours = Placement(name="FSDP2Strategy", shards=True, ours=True)
        now = self._sharding(self.declared)
        if now != "copies":
            yield Variant(
                name="DDP: no sharding",
                yaml="trainer.strategy: ddp",
                strategy=Placement.of(DDPStrategy),
                price="as fast",
            )
        for sharding, rank in (("gradients", 1), ("full", 2)):
            if now != sharding:
                yield Variant(
                    name=f"FSDP2Strategy(sharding={sharding})",
                    yaml=f"trainer.strategy: {{class_path: FSDP2Strategy, init_args: {{sharding: {sharding}}}}}",
                    strategy=ours,
                    sharding=sharding,  # type: ignore[arg-type]
                    price="exchanges weights, which hides behind compute on fast links",
                    rank=rank,
                )

    def _offloads(self, declared: set[str]) -> Iterator[Variant]:
        if "OptimizerOffload" not in declared:
            yield Variant(
                name="OptimizerOffload",
                yaml=_callback("OptimizerOffload"),
                host={"optimizer state": 1.0, "master weights": 1.0},
                chunk=256 * 2**20,
                price="streams the state over the host link each step",
                rank=6,
            )
        if has("torchao") and "OptimizerOffload" not in declared:  # what is on the host takes nothing here
            yield Variant(
                name="AdamW8bit",
                yaml="optimizer: torchao.optim.AdamW8bit",
                change=Change(low_bit=None if self.run.strategy.shards else True),
                state=2 * (1 + 4 / 256),
                price="a little slower; another optimizer",
                rank=8,
            )

    def _moves(self, variant: Variant) -> bool:
        offloading = variant.change.offloading
        return any(step.moves_saved for step in self.run.declarations) if offloading is None else offloading

    def _holds(self, variant: Variant, step: Step) -> bool:
        return peak_of(step, self._layout(variant)).total <= (self.usable or 0)

    def _samples_of(self, variant: Variant) -> int:
        return max(int((self.samples or 1) * variant.samples), 1)

    def _run(self, variant: Variant) -> Run:
        return self.run if variant.strategy is None else replace(self.run, strategy=variant.strategy)

    def _at(self, variant: Variant, samples: int, *, beside: int | None = None) -> Step:
        """Return a step with ``samples``, between or beyond two that are rehearsed: ``beside`` and twice that."""
        if self.samples is None:
            return self._step(variant)
        if samples == self.samples:
            return self._step(variant, samples=samples)
        one = max(beside or self.samples, 2)  # not a single sample: torch may treat a dimension of one in its own way
        first, second = (self._step(variant, samples=n) for n in (one, 2 * one))
        return between(first, second, (samples - one) / one)

    def _step(self, variant: Variant, *, samples: int | None = None, tokens: int | None = None) -> Step:
        run = self._run(variant)
        # Strategies that copy the model are alike, and so are those that shard it in hooks: only the layout differs.
        split = self._split(variant)
        microbatches = round(self._microbatches / variant.samples)
        key = (
            variant.change,
            run.strategy.shards,
            run.strategy.whole_graph,
            split is None,
            min(microbatches, 2),  # further ones are like the second
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
                tensor_parallel=split,
            )
        return self._steps[key]

    def _sharding(self, variant: Variant) -> Sharding:
        strategy = self._run(variant).strategy
        if not strategy.shards:
            return "copies"
        if variant.sharding is not None:
            return variant.sharding
        if self._settings.get("reshard_after_forward") is False and self._settings.get("sharding", "full") == "full":
            return "gradients"
        return self._settings.get("sharding", "full")

    def _layout(self, variant: Variant) -> Layout:
        run, sharding = self._run(variant), self._sharding(variant)
        workspace = 0 if self.device is None else self.device.workspace
        host, chunk = self._on_host(variant)
        elements = max(sum(p.numel() for p in run.module.parameters()), 1)
        stored = sum(p.numel() * p.element_size() for p in run.module.parameters()) / elements
        if sharding == "copies":
            computed = next((b for b in (self._computed(run),) if b and self._has_masters(run)), stored)
            return Layout(devices=self.devices, computed=computed, workspace=workspace, on_host=host, chunk=chunk)
        share = self._share
        if self._settings.get("offload") and variant.strategy is None:
            host |= {"parameters": 1.0, "gradients": 1.0, "optimizer state": 1.0}
            chunk = 0
        policy = policy_of(run.precision)
        computed = self._computed(run) or stored
        replicas = self._settings.get("replicate_size", 1) if variant.strategy is None else 1
        _, tensor = self._split(variant) or (None, 1)
        return Layout(
            sharding=sharding,
            shards=1 if sharding == "none" else max(self.devices // replicas // tensor, 1),
            devices=self.devices,
            stored=stored,
            computed=computed,
            gathered_float8=1 if self._gathers_float8(run) else computed,
            reduced=policy.reduce.itemsize if policy is not None and policy.reduce is not None else computed,
            state=share.state if variant.state is None else variant.state,
            stepping=share.stepping,
            on_host=host,
            chunk=chunk,
            workspace=workspace,
            whole_graph=run.strategy.whole_graph,
        )

    @cached_property
    def _share(self) -> Any:
        return optimizer_share(self.run, optimizers=self._optimizers)

    def _on_host(self, variant: Variant) -> tuple[dict[Kind, float], int | None]:
        """Return the shares by kind that lie on the host, and the bytes of a chunk of optimizer state there.

        A declared step says so by ``host_resident``, shares by kind, or, if it keeps the optimizer's state, by
        ``resident``, the share that stays on the device, and ``chunk_bytes``, 0 where the host steps it.
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

    def _split(self, variant: Variant) -> tuple[Any, int] | None:
        """Return the plan of tensor parallelism and its size, if there is one."""
        plan, size = self._settings.get("tensor_parallel_plan"), self._settings.get("tensor_parallel_size", 1)
        declared = variant.strategy is None and self.run.strategy.ours
        return (plan, size) if declared and plan is not None and size > 1 else None

    def _computed(self, run: Run) -> int | None:
        policy = policy_of(run.precision)
        return None if policy is None or policy.param is None else policy.param.itemsize

    def _gathers_float8(self, run: Run) -> bool:
        precision = run.precision
        if not isinstance(precision, PolicyPrecision):
            return False
        return precision.sharded(in_graph=run.strategy.whole_graph).gathers_float8

    def _has_masters(self, run: Run) -> bool:
        return getattr(run.precision, "weights", None) == "masters"


def _checkpointing(save: Any, *, price: str, rank: int) -> Variant:
    return Variant(
        name=f"ActivationCheckpoint(save={save})",
        yaml=_callback("ActivationCheckpoint", save=save),
        change=Change(checkpointing=save),
        price=price,
        rank=rank,
    )


def _callback(name: str, **settings: Any) -> str:
    given = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"trainer.callbacks+: [{{class_path: {name}{f', init_args: {{{given}}}' if given else ''}}}]"


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, by doubling and halving; 0 if 1 does not."""
    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
