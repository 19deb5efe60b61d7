"""Runs a step of a model as one stage: its blocks run, those before are skipped, and at the next one the step ends.

So a step needs no change: each rank calls the user's step with a microbatch. The first stage computes it down to the
last block that it has. Later stages continue with what they receive in place of the input of their first block, and the
last stage runs to the end of the step. Outputs of blocks that are skipped, and what they would write to themselves, are
NaN, so that a loss that depends on them is NaN too.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_ups.transforms.forward import Forward, replaced_forward
from lightning_ups.transforms.pipeline.cut import Cut
from lightning_ups.transforms.random_state import seed_host


class _EndOfStage(BaseException):  # not an Exception, which the user's code may catch
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Run:
    def __init__(self, blocks: range, received: Tensor | None, seed: int, *, ends_with_blocks: bool) -> None:
        self.blocks, self.received, self.seed, self.ends_with_blocks = blocks, received, seed, ends_with_blocks
        self.next = 0  # the block that must be called next
        self.at_first_block = ExitStack()  # undoes what code before the blocks has written
        self.at_end = ExitStack()


def _nan(shape: torch.Size, *, like: Tensor) -> Tensor:
    return like.new_full((), float("nan")).expand(shape)  # without memory


def _attributes(block: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the floating point tensors that are plain attributes of ``block`` and of modules in it."""
    return {
        (place, name): value
        for place, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


class Stages:
    """The stages of a model, of which one runs at a time.

    Args:
        model: The model, with the blocks of ``cut``.
        cut: How it is cut.
        undo: Ends it.
    """

    def __init__(self, model: nn.Module, cut: Cut, *, undo: ExitStack) -> None:
        self._cut = cut
        self._run: _Run | None = None
        self._places: int | None = None  # the length of the tuple that a block returns; None: it returns a tensor
        self._written: dict[int, dict[tuple[str, str], torch.Size]] = {}  # attributes that a block's forward writes
        self._looks = False
        in_blocks = {module for name in cut.blocks for module in model.get_submodule(name).modules()}
        self._buffers = [
            (module, key)
            for name, module in model.named_modules()
            for key in module._buffers
            if module not in in_blocks and cut.homes.get(f"{name}.{key}".removeprefix(".")) == cut.rank
        ]
        for index, name in enumerate(cut.blocks):
            undo.enter_context(replaced_forward(model.get_submodule(name), partial(self._in_turn, index)))

    def run(self, stage: int, step: Callable[[], Any], *, received: Tensor | None, seed: int) -> Any:
        """Call ``step`` as one stage.

        Args:
            stage: The number of the stage.
            step: The user's step, which calls all blocks.
            received: The input of the stage's first block, unless it is the first stage.
            seed: Seeds what is drawn: the same for all stages until their first block, and another in their blocks.

        Returns:
            The output of the stage's last block or, from the last stage, of ``step``.

        Raises:
            ValueError: If ``step`` does not call the blocks once each, in order.
        """
        blocks = self._cut.stages[stage]
        is_last = blocks.stop == len(self._cut.blocks)
        with self._running(_Run(blocks, received, seed + 7919 * stage, ends_with_blocks=False)) as run:
            seed_host(seed)
            if stage > 0:  # the first stage has run the same code before the blocks
                run.at_first_block.callback(self._restoring_buffers())
            try:
                result = step()
            except _EndOfStage as end:
                return end.hidden
            if not is_last or run.next != len(self._cut.blocks):
                raise ValueError(self._wrong_order(f"{run.next} of {len(self._cut.blocks)} blocks were called"))
        return result

    @torch.no_grad()
    def rehearse(self, stage: int, step: Callable[[], Any], *, received: Tensor | None) -> Tensor:
        """Return the output of the blocks of ``stage``, and check what `run` takes for granted.

        Raises:
            ValueError: If blocks have inputs that other stages compute, or change the shape of their input.
        """
        self._looks = True
        try:
            with self._running(_Run(self._cut.stages[stage], received, 0, ends_with_blocks=True)) as run:
                step()
                raise ValueError(self._wrong_order(f"{run.next} of {len(self._cut.blocks)} blocks were called"))
        except _EndOfStage as end:
            out = end.hidden
        finally:
            self._looks = False
        if received is not None and (out.shape, out.dtype) != (received.shape, received.dtype):
            raise ValueError(
                f"Blocks return {tuple(out.shape)} {out.dtype} for {tuple(received.shape)} {received.dtype}. Stages of"
                " a pipeline pass on tensors of one shape and dtype. Use blocks that keep both."
            )
        if out.isnan().any():
            raise ValueError(
                f"The output of stage {stage} is NaN. Its blocks, or what is called before them, read a parameter of"
                " another stage, or are NaN already. Modules that are registered before the blocks belong to the first"
                " stage. Register what the first stage calls before the blocks, or use schedule='zero-bubble', where"
                " one rank has the first and the last stage."
            )
        return out

    @property
    def structure(self) -> Any:
        """What blocks return and write, as the stages so far have seen it; to be set on the other ranks."""
        return self._places, self._written

    @structure.setter
    def structure(self, value: Any) -> None:
        self._places, self._written = value

    @contextmanager
    def _running(self, run: _Run) -> Iterator[_Run]:
        self._run = run
        try:
            with run.at_end:
                yield run
        finally:
            self._run = None

    def _in_turn(self, index: int, forward: Forward) -> Forward:
        def in_turn(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                raise ValueError(
                    f"{self._cut.blocks[index]} is called outside of training_step, validation_step and test_step."
                    " Under pipeline parallelism each rank has only some blocks. Use a checkpoint on one device."
                )
            if index != run.next:
                raise ValueError(self._wrong_order(f"{self._cut.blocks[index]} was called as number {run.next}"))
            args, kwargs, hidden = self._inputs(index, args, kwargs)
            if index == run.blocks.stop:
                raise _EndOfStage(hidden)
            run.next += 1
            if index < run.blocks.start:
                assert run.received is not None
                self._skip(index, block, run)
                return self._as_output(_nan(run.received.shape, like=run.received))
            if index == run.blocks.start and run.received is not None:
                self._check_others(index, args, kwargs)
                args, kwargs, _ = self._inputs(index, args, kwargs, instead=run.received)
                run.at_first_block.close()
                seed_host(run.seed)
            before = _attributes(block) if run.ends_with_blocks else {}
            output = forward(block, *args, **kwargs)
            if run.ends_with_blocks:
                after = _attributes(block).items()
                self._written[index] = {key: x.shape for key, x in after if x is not before.get(key)}
                self._places = len(output) if isinstance(output, tuple) else None
                if index + 1 == len(self._cut.blocks):
                    raise _EndOfStage(output[0] if isinstance(output, tuple) else output)
            return output

        return in_turn

    def _skip(self, index: int, block: nn.Module, run: _Run) -> None:
        """Let what the block would write be NaN until the end of the run."""
        for (place, name), shape in self._written.get(index, {}).items():
            values = vars(block.get_submodule(place))
            undo = partial(values.__setitem__, name, values[name]) if name in values else partial(values.pop, name)
            run.at_end.callback(undo)
            assert run.received is not None
            values[name] = _nan(shape, like=run.received)

    def _restoring_buffers(self) -> Callable[[], None]:
        """Return a function that restores the buffers outside of the blocks."""
        found = [(module, key, module._buffers.get(key)) for module, key in self._buffers]
        kept = [(module, key, buffer, buffer.clone()) for module, key, buffer in found if buffer is not None]

        def restore() -> None:
            for module, key, buffer, value in kept:
                buffer.data.copy_(value)  # a backward of an earlier microbatch may have saved it
                module._buffers[key] = buffer

        return restore

    def _inputs(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, instead: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        """Return the arguments of a block, and its first tensor, which may be replaced."""
        if args and isinstance(args[0], Tensor):
            return (args if instead is None else (instead, *args[1:])), kwargs, args[0]
        for name, value in kwargs.items():
            if not args and isinstance(value, Tensor):
                return args, (kwargs if instead is None else {**kwargs, name: instead}), value
        raise ValueError(
            f"{self._cut.blocks[index]} was called without a tensor as its first argument, which stages of a pipeline"
            " pass on. Give it the hidden states first."
        )

    def _as_output(self, hidden: Tensor) -> Any:
        return hidden if self._places is None else (hidden, *[None] * (self._places - 1))

    def _check_others(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._looks:
            return
        first = args[0] if args and isinstance(args[0], Tensor) else next(iter(kwargs.values()))
        others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not first]
        if any(bool(other.isnan().any()) for other in others):
            raise ValueError(
                f"{self._cut.blocks[index]} has a second input that depends on parameters of the first stage, and"
                " stages of a pipeline pass on the first input only. Compute it within each block."
            )

    def _wrong_order(self, what: str) -> str:
        first, last = self._cut.blocks[0], self._cut.blocks[-1]
        return (
            f"Pipeline parallelism expects that a step calls each block from {first} to {last} once, in this order;"
            f" {what}. Leave pipeline_parallel_size out, or name other blocks: blocks=[...]."
        )
