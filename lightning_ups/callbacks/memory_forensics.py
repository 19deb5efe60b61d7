"""Explanations of out-of-memory errors: who holds the memory, what the run needs, and how to need less."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_ups._compat.lightning.trainer import config_of_cli, trainer_of
from lightning_ups._compat.torch.device import (
    allocator_counters,
    begin_history,
    device_memory,
    end_history,
    write_snapshot,
)
from lightning_ups.insight.dry_run import FakeCopies
from lightning_ups.insight.memory import (
    GIB,
    Device,
    Moment,
    Planner,
    Uncountable,
    holders,
    is_out_of_memory,
    readable,
)
from lightning_ups.insight.report import run_folder
from lightning_ups.order import Run, Stage, TrainerOnly
from lightning_ups.transforms.blocks import find_blocks
from lightning_ups.transforms.quoted import first_line, quoted

_EVERY = 10  # batches between two reads of the counters
_RETRIES, _ALLOCATED, _RESERVED = "num_alloc_retries", "allocated_bytes.all.current", "reserved_bytes.all.current"


class MemoryForensics(Callback, TrainerOnly):
    """Explain out-of-memory errors, and warn before they happen.

    The text of the error becomes: where it happened; what is held, by kind and by block; what the run needs at its
    peak, as `plan` counts it; and the three cheapest settings that need less, in Python, or in YAML if LightningCLI
    made the Trainer. The text is also written to a file, next to a snapshot of the allocator for
    pytorch.org/memory_viz. The type of the error does not change.

    In training, the allocator's counters are read regularly, without a synchronization. A warning is given once if the
    allocator had to free its cache and retry, which takes time and often precedes an error.

    Args:
        folder: The folder of the files. None: that of the logs.
        snapshot: Whether to write a snapshot of the allocator.
        history: Whether to record where each allocation comes from, which takes some microseconds each.
        plan: Whether to count what the run needs, which takes some seconds after the error.

    Example::

        Trainer(callbacks=[MemoryForensics()])
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        snapshot: bool = True,
        history: bool = False,
        plan: bool = True,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.snapshot, self.history, self.plan = snapshot, history, plan
        self.text: str | None = None
        self._default_folder = Path()
        self._module: LightningModule | str | None = None  # as it was built, or why it could not be copied
        self._batch: Any = None
        self._retries: int | None = None
        self._warned = False
        self._hooks = ExitStack()
        self._activations: dict[str, int] = {}

    # Before

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._default_folder = Path(run_folder(trainer))  # a collective
        self.text, self._batch, self._retries, self._warned = None, None, None, False
        if self.history:
            begin_history(trainer.strategy.root_device)
        if stage == "fit" and self.plan:
            # As it was built, before sharding replaces its parameters.
            try:
                self._module = _described(pl_module)
            except Exception as error:  # noqa: BLE001  (a module of the user's that cannot be copied must not end here)
                self._module = quoted(error, whole=True)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()
        self._activations.clear()
        if not _compiled_whole(trainer):  # a hook inside would break the graph
            for name, block in find_blocks(pl_module).items():
                self._follow(name, block, trainer.strategy.root_device)

    def _follow(self, name: str, block: nn.Module, device: torch.device) -> None:
        """Record the growth of allocated memory in the first forward pass of ``block``."""
        began: list[int] = []

        def enter(_: nn.Module, _args: Any) -> None:
            began[:] = [allocator_counters(device).get(_ALLOCATED, 0)]

        def leave(_: nn.Module, _args: Any, _output: Any) -> None:
            grown = allocator_counters(device).get(_ALLOCATED, 0) - began.pop()
            if torch.is_grad_enabled() and name not in self._activations and grown > 0:
                self._activations[name] = grown

        self._hooks.callback(block.register_forward_pre_hook(enter).remove)
        self._hooks.callback(block.register_forward_hook(leave).remove)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None
        self._hooks.close()  # the first step is enough
        if not self._warned and batch_idx % _EVERY == 0:
            self._look(trainer.strategy.root_device)

    def _look(self, device: torch.device) -> None:
        counters = allocator_counters(device)
        retries = counters.get(_RETRIES)
        if retries is None:
            return
        before, self._retries = self._retries, retries
        if before is None or retries <= before:
            return
        self._warned = True
        rank_zero_warn(
            f"The allocator of {device} freed its cache and retried {retries - before} times in the last {_EVERY}"
            f" batches ({readable(counters.get(_ALLOCATED, 0))} allocated, {readable(counters.get(_RESERVED, 0))}"
            " reserved). Each retry waits for the device, and larger batches may not fit. Use smaller batches, or see"
            " `python -m lightning_ups plan`."
        )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer.strategy.root_device)

    def _close(self, device: torch.device) -> None:
        self._hooks.close()
        self._batch = self._module = None
        if self.history:
            end_history(device)

    # After

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        device = trainer.strategy.root_device
        if is_out_of_memory(exception):
            self.text = "\n".join(self._explained(trainer, pl_module, exception, device))
            self._write(trainer, device)
            exception.args = (self.text,)
            exception.lightning_ups_text = self.text  # type: ignore[attr-defined]  # for the command line
        self._close(device)

    def _explained(
        self, trainer: Trainer, module: LightningModule, exception: BaseException, device: torch.device
    ) -> Iterator[str]:
        where = _where(module, exception)
        yield f"Out of memory on {device} at step {trainer.global_step}, {where}. {first_line(exception)}."
        yield from self._held(trainer, module, device)
        yield from self._needed(trainer, device)

    def _held(self, trainer: Trainer, module: LightningModule, device: torch.device) -> Iterator[str]:
        counters, all_of_it = allocator_counters(device), device_memory(device)
        found = holders(
            module,
            optimizers=trainer.optimizers,
            blocks=find_blocks(module),
            device=device,
            total=counters.get(_ALLOCATED),
        )
        of = f" of {readable(all_of_it)}" if all_of_it else ""
        reserved = f", {readable(counters[_RESERVED])} reserved" if _RESERVED in counters else ""
        yield f"Held now, {readable(found.total)}{of}{reserved}:"
        yield from _kinds(found)
        largest = sorted(((size, kind, owner) for (kind, owner), size in found.held.items() if owner), reverse=True)[:3]
        measured = sorted(((size, "activations", name) for name, size in self._activations.items()), reverse=True)[:3]
        if tops := sorted([*largest, *measured], reverse=True)[:4]:
            told = [f"{owner}: {readable(size)} {kind}" for size, kind, owner in tops]
            yield f"The largest blocks hold {'; '.join(told)}."

    def _needed(self, trainer: Trainer, device: torch.device) -> Iterator[str]:
        if not self.plan or self._module is None:
            return
        if self._batch is None:
            evaluates = trainer.evaluating or trainer.predicting or trainer.sanity_checking
            yield (
                "This was not in a training step, and only training steps are planned."
                + (
                    " Use smaller batches there, such as in validation."
                    if evaluates
                    else " The model itself is too large, since no batch has been processed."
                )
            )
            return
        if isinstance(self._module, str):
            yield f"What the run needs could not be counted: {self._module}"
            return
        try:
            planner = self._planner(trainer, self._module, device)
            # After an error in a recomputed block its saved-tensor hooks may still be active and would run it again.
            # Only the innermost hooks are called.
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                lines = [*_plan_lines(planner, in_yaml=config_of_cli(trainer) is not None)]
            yield from lines
        except Uncountable as error:
            yield f"What the run needs could not be counted: {error}"
        except Exception as error:  # noqa: BLE001  (the out-of-memory error matters more)
            yield f"What the run needs could not be counted: {quoted(error)}"

    def _planner(self, trainer: Trainer, module: LightningModule, device: torch.device) -> Planner:
        if is_overridden("configure_model", module):
            with torch.device("meta"):
                module.configure_model()
        run = Run.of(trainer)
        asked = Run(**{**vars(run), "module": module})
        memory = device_memory(device)
        kind = None
        if memory is not None:
            kind = Device(
                name=torch.cuda.get_device_name(device),
                gib=memory / GIB,
                capability=torch.cuda.get_device_capability(device),
            )
        return Planner(
            asked,
            FakeCopies().copy(self._batch, "the batch"),
            microbatches=trainer.accumulate_grad_batches,
            device=kind,
        )

    def _write(self, trainer: Trainer, device: torch.device) -> None:
        assert self.text is not None
        folder = self.folder or self._default_folder
        name = f"out-of-memory-rank{trainer.global_rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.snapshot and write_snapshot(folder / f"{name}.pickle", device):
                self.text = (
                    f"{self.text}\nA snapshot of the allocator, for pytorch.org/memory_viz: {folder / name}.pickle"
                )
            (folder / f"{name}.txt").write_text(f"{self.text}\n")
        except OSError as error:
            self.text = f"{self.text}\nCannot write to {folder}: {error}"


_PARTS = {  # the innermost applies
    "training_step": "in the forward pass",
    "validation_step": "in the validation",
    "_engine_run_backward": "in the backward pass",
    "step": "in the optimizer",
}


def _described(module: LightningModule) -> LightningModule:
    copies = FakeCopies()
    copies.keep(trainer_of(module), None)
    return copies.copy(module)


def _compiled_whole(trainer: Trainer) -> bool:
    run = Run.of(trainer)
    return (
        run.compiled_by_user
        or run.strategy.whole_graph
        or any(
            step.stage is Stage.COMPILE and getattr(step, "scope", "blocks") != "blocks" for step in run.declarations
        )
    )


def _where(module: LightningModule, error: BaseException) -> str:
    """Return the part of the step and the innermost module in the traceback of ``error``."""
    names = {inner: name for name, inner in module.named_modules() if name}
    place, part, traceback = "", "in the step", error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if isinstance(owner := frame.f_locals.get("self"), nn.Module):
            place = names.get(owner, place)
        part = _PARTS.get(frame.f_code.co_name, part)
    return f"{part} of {place}" if place and part == "in the forward pass" else part


def _plan_lines(planner: Planner, *, in_yaml: bool) -> Iterator[str]:
    moment = planner.moment(planner.declared)
    place = f" of {moment.place}" if moment.place else ""
    yield f"By plan, this run needs {readable(moment.total)} on each device at its peak, in {moment.phase}{place}:"
    yield from _kinds(moment)
    cures = planner.cures()
    if not cures:
        yield "No single setting needs less. Use more or larger devices, or a smaller model."
        return
    fits = "" if planner.usable is None else f" ({readable(planner.usable)} are usable)"
    yield f"The cheapest ways to need less{fits}:"
    for index, (variant, saved) in enumerate(cures, start=1):
        then = readable(moment.total - saved)
        yield f"  {index}. {variant.name}: {readable(saved)} less, {then} in all; {variant.price}."
        for line in (variant.yaml if in_yaml else variant.python).splitlines():
            yield f"       {line}"


def _kinds(moment: Moment) -> Iterator[str]:
    names = {"activations": "activations and temporaries"} if not moment.of("temporaries") else {}
    for kind, size in moment.by_kind().items():
        if size >= 0.005 * moment.total:
            yield f"  {readable(size):>9} {names.get(kind, kind)}"
