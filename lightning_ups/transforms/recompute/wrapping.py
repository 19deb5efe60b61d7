"""Activation checkpointing as a reversible replacement of ``forward``."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_ups._compat.contexts import without
from lightning_ups._compat.torch.compile.partitioner import random_numbers_kept
from lightning_ups._compat.torch.tensors.autograd import (
    activation_memory_budget,
    checkpoint_options,
    has_values,
    hidden_from_dynamo,
    in_torch_func,
    outside_modes,
)
from lightning_ups._compat.torch.tensors.ops import Operator, costly_ops, is_composite, operators
from lightning_ups._compat.torch.versions import CHECKPOINT_LOGGER
from lightning_ups.kernels.float8_casts import maxima
from lightning_ups.transforms.error_hints import explaining_torch_func
from lightning_ups.transforms.forward import Forward, replaced_forward
from lightning_ups.transforms.recompute.kept import CALLED_TRACED, TRACED, TRACED_IDLE, Copies, Kept, Measurement
from lightning_ups.transforms.recompute.second_run import (
    Buffers,
    DrawnBefore,
    Held,
    HeldBefore,
    Taken,
    run_with_drawn,
)

Save = Literal["nothing", "matmuls"]


class _Opened(NamedTuple):
    """The state of a block while its forward is replaced."""

    kept: Kept
    buffers: Buffers
    held: Held
    checkpoint: Callable[..., Any]


class _Before(NamedTuple):
    """The state of a block when its forward began, recorded in the first run for the second."""

    held: list[HeldBefore]
    drawn: list[list[DrawnBefore]]
    buffers: list[Taken]


# A global, not an argument of the forward: equal blocks share their forward, and therefore its compilation.
_OPENED: dict[nn.Module, _Opened] = {}


@contextmanager
def recompute(
    blocks: Iterable[nn.Module],
    *,
    save: Save | Sequence[str],
    save_less: bool = False,
    by: Callable[..., Any] | None = None,
) -> Iterator[Kept]:
    """Recompute ``blocks`` in backward while the context is open, keeping only what ``save`` selects.

    The second run equals the first: it draws the same random numbers, from torch's generators of the CPU and of the
    arguments' device, from Python's and NumPy's, and from generators that are attributes within the block. Buffers,
    attributes and `requires_grad` are those of the first run, and changes by the second run are undone.

    Args:
        blocks: The blocks, each recomputed separately.
        save: ``"nothing"``, ``"matmuls"`` or names of operators; see ``saved_ops``.
        save_less: Let a block that writes in place to a kept result keep nothing, instead of raising.
        by: A replacement of torch's ``checkpoint`` for eager blocks with modules that must distinguish both forwards,
            such as those of Transformer Engine. None: torch's.

    Yields:
        What the blocks keep; the counts grow as they run.

    Raises:
        ValueError: If an operator of ``save`` is unknown or never runs itself.
    """
    kept = Kept(save_less=save_less)
    # Advice against operations in place: compiled code has none, and eager code raises where they matter.
    with without("context_fn is passed", CHECKPOINT_LOGGER), ExitStack() as undo:
        for block in dict.fromkeys(blocks):
            undo.enter_context(replaced_forward(block, partial(_recomputed, ops=saved_ops(save, block))))
            kept.forwards[block] = vars(block)["forward"].__func__
            undo.enter_context(_opened(block, kept, by or partial(checkpoint, **checkpoint_options())))
        yield kept


def is_recomputed(module: nn.Module) -> bool:
    """Return whether ``module``, or a part of it, is currently recomputed in backward."""
    return not _OPENED.keys().isdisjoint(module.modules())


def saved_ops(save: Save | Sequence[str], block: nn.Module) -> tuple[Operator, ...]:
    """Return the operators whose results ``save`` keeps: none, the expensive ones, or those named.

    Raises:
        ValueError: If a name matches no operator, or one that is decomposed before it runs.
    """
    if save == "nothing":
        return ()
    ops = costly_ops() if save == "matmuls" else _named_ops(save)
    if any(base.__name__ == "Float8Linear" for module in block.modules() for base in type(module).__mro__):
        # Its scale is the maximum of a tensor: a single value, but recomputing it reads the whole tensor again
        # (https://github.com/pytorch/ao/issues/893).
        ops = [*ops, *operators(["aten.max.default", "aten.amax.default"]), maxima]
    return tuple(dict.fromkeys(ops))


def refuse_recomputed(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Raise if ``model`` recomputes one of ``blocks`` itself, as models of transformers and timm can.

    Raises:
        ValueError: If it does.
    """
    chosen = set(blocks)
    inside = {inner for block in chosen for inner in block.modules()}
    for name, module in model.named_modules():
        told = [
            flag for flag in ("gradient_checkpointing", "grad_checkpointing") if getattr(module, flag, None) is True
        ]
        if told and (module in inside or not chosen.isdisjoint(module.modules())):
            raise ValueError(
                f"{name or type(model).__name__} has {told[0]}=True: it recomputes its blocks itself."
                " Turn it off, in transformers by activation_checkpointing_disable() or, in older ones,"
                " gradient_checkpointing_disable(), in timm by set_grad_checkpointing(False), or do without"
                " ActivationCheckpoint."
            )


@contextmanager
def memory_budget(modules: Iterable[nn.Module], *, budget: float) -> Iterator[None]:
    """Let compiled code keep ``budget`` of what it would keep by default, while the context is open.

    0 keeps as much as checkpointing everything, 1 is the default. Inputs of random operators are always kept.
    ``modules`` are those whose code must not share graphs made under another budget.

    Raises:
        RuntimeError: If another budget is active: torch has one per process.
    """
    with random_numbers_kept(), activation_memory_budget(budget), ExitStack() as undo:
        for module in dict.fromkeys(modules):
            undo.enter_context(replaced_forward(module, partial(_budgeted, budget=budget)))
        yield


def _named_ops(names: str | Sequence[str]) -> list[Operator]:
    ops = operators([names] if isinstance(names, str) else names)
    for op in filter(is_composite, ops):
        raise ValueError(
            f"The operator {op.name()!r} never runs itself. Name the operators into which it is decomposed, as"
            " aten.linear is into aten.addmm, or use save='matmuls'."
        )
    return ops


@contextmanager
def _opened(block: nn.Module, kept: Kept, by: Callable[..., Any]) -> Iterator[None]:
    outer = _OPENED.get(block)
    _OPENED[block] = _Opened(kept, Buffers(block), Held(block), by)
    try:
        yield
    finally:
        del _OPENED[block]
        if outer is not None:
            _OPENED[block] = outer


@lru_cache(maxsize=256)  # equal blocks get the same function, and therefore share a compilation
def _recomputed(inner: Forward, *, ops: tuple[Operator, ...]) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False}
    traced = {**options}
    if ops:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(ops))
        traced["context_fn"] = lambda: _watched_selection(ops, CALLED_TRACED.setdefault(forward, set()))

    # The block's keyword arguments are passed as one argument: `checkpoint` has some of its own, such as `debug`; and
    # it looks for the devices whose random state to save among the positional ones. The list is the same in both runs.
    def run(before: _Before, kwargs: dict[str, Any], self: nn.Module, *args: Any) -> Any:
        # Compiled code recomputes the outputs of a graph, but not its writes to buffers.
        if torch.compiler.is_compiling() or self not in _OPENED:
            return inner(self, *args, **kwargs)
        kept, buffers, held, _ = _OPENED[self]
        if before.held:
            kept.ran_again = self
        with _explaining_writes(kept.name(self)), explaining_torch_func(self, part="ActivationCheckpoint"):
            forward = partial(buffers.run, before.buffers, partial(inner, self, *args, **kwargs))
            return held.run(before.held, lambda: run_with_drawn(before.drawn, held.own_values(before.held), forward))

    # A function of this package, not `partial(checkpoint, inner)`: Dynamo skips torch's own frames, so a block whose
    # forward is torch.utils.checkpoint itself would silently not be compiled.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                note_idle()
            elif self in _OPENED:
                _OPENED[self].kept.idle.add(self)
            return inner(self, *args, **kwargs)
        # Caches are refused there, since an error during tracing would not be raised.
        if not torch.compiler.is_compiling() or any(map(_is_cache, (*args, *kwargs.values()))):
            return _run_eager(run, options, self, args, kwargs, ops=ops)
        # A graph without a backward has nothing to recompute, and torch refuses one that draws random numbers.
        if not any(map(_may_need_gradient, (*tree_leaves((args, kwargs)), *self.parameters()))):
            note_idle()
            return inner(self, *args, **kwargs)
        note_traced()
        return checkpoint(run, _Before([], [], []), kwargs, self, *args, **traced)

    @torch.compiler.assume_constant_result  # runs while Dynamo traces, and is not part of the graph
    def note_traced() -> None:
        TRACED.add(forward)

    @torch.compiler.assume_constant_result
    def note_idle() -> None:
        TRACED_IDLE.add(forward)

    return forward


def _watched_selection(ops: Container[Operator], called: set[Operator]) -> tuple[Any, Any]:
    """Return the contexts of a checkpoint that keeps the results of ``ops``, and adds each operator to ``called``.

    Torch's own contexts, created from a list, cost less per operator.
    """

    def policy(_: Any, op: Operator, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        called.add(op)
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _may_need_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return not (value is None or isinstance(value, int | float | complex | str | torch.dtype | torch.device))


@contextmanager
def _explaining_writes(name: str) -> Iterator[None]:
    """Explain the error if a kept result was written to before the second run."""
    try:
        yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise _written_to(name) from error


def _written_to(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} writes in place to a result that ActivationCheckpoint keeps for backward."
        " Kept results must not change: the second run would use other values, and gradients would be wrong."
        " Use save='nothing', or leave the result as it is: write `x = x * y` instead of `x *= y`, and nn.ReLU()"
        " instead of nn.ReLU(inplace=True)."
    )


def _refuse_torch_func(block: nn.Module) -> None:
    if in_torch_func():
        raise RuntimeError(
            f"torch.func (vmap, grad, jvp, jacrev ...) is applied to {type(block).__name__}, which ActivationCheckpoint"
            " recomputes. Name other blocks in ActivationCheckpoint(blocks=[...]), leave it out, or use"
            " torch.autograd.grad(..., create_graph=True) with save='nothing'."
        )


def _is_cache(value: Any) -> bool:
    # By the methods that all caches of transformers have, not by class: this module depends on torch only.
    return hasattr(value, "get_seq_length")


def _refuse_key_value_cache(block: nn.Module, caches: Iterable[Any]) -> None:
    for cache in caches:
        raise RuntimeError(
            f"{type(block).__name__} is given a key-value cache, {type(cache).__name__}, to which the second run by"
            " ActivationCheckpoint would append again. Train with use_cache=False, or leave ActivationCheckpoint out."
        )


@hidden_from_dynamo  # otherwise Dynamo compiles this function when a graph break leaves a recomputed block uncompiled
def _run_eager(
    run: Callable[..., Any],
    options: dict[str, Any],
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ops: tuple[Operator, ...],
) -> Any:
    _refuse_torch_func(block)
    before = _Before([], [], [])
    if block not in _OPENED:
        return _finished(partial(checkpoint, **checkpoint_options()), run, before, kwargs, block, *args, **options)
    kept, checkpointed = _OPENED[block].kept, _OPENED[block].checkpoint
    if block in kept.measured or not _is_real(block, args, kwargs):
        if block in kept.saves_nothing:
            options = {name: value for name, value in options.items() if name != "context_fn"}
        elif ops and kept.watches:
            options = {**options, "context_fn": partial(_watched_selection, ops, kept.called_eagerly)}
        if block in kept.writes_arguments:
            copied = _OnCopies(run, args, kwargs, kept.copies)
            return _finished(checkpointed, copied, before, block, *copied.copies(), **options)
        return _finished(checkpointed, run, before, kwargs, block, *args, **options)
    _refuse_key_value_cache(block, filter(_is_cache, (*args, *kwargs.values())))
    # The first call keeps only the arguments: whether results of `ops` may be kept is known at its end.
    called = kept.called_eagerly if kept.watches else set[Operator]()
    measurement = Measurement(run, ops=ops, called=called, name=kept.name(block))
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    copied = _OnCopies(measurement, args, kwargs, kept.copies)
    result = _finished(checkpointed, copied, before, block, *copied.copies(), use_reentrant=False)
    if any(tensor._version != version for tensor, version in versions):
        kept.writes_arguments.add(block)
    if measurement.writes_to_results:
        if not kept.save_less:
            raise _written_to(kept.name(block))
        kept.saves_nothing.add(block)
        measurement.results.clear()
    taken = [(taken.tensor, taken.value) for taken in before.buffers]
    kept.add(block, saved=measurement.saved, kept=tree_leaves((tensors, measurement.results, taken)))
    measurement.results.clear()
    return result


def _is_real(block: nn.Module, *arguments: Any) -> bool:
    """Return whether the block computes on real data, and not in a dry run, which measures by itself."""
    tensors = (*tree_leaves(arguments), *islice(block.parameters(), 1))
    return all(has_values(tensor) for tensor in tensors if isinstance(tensor, Tensor))


class _OnCopies:
    """Runs a function on its arguments, and in backward on copies: the first run may write to them in place."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shared: Copies) -> None:
        self._run, self._given = run, [(args, kwargs)]
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        with outside_modes(), torch.no_grad():
            self._copies = [shared.of(self._leaves[i]) for i in self._places]
        for i in self._places:
            self._leaves[i] = None

    def copies(self) -> list[Tensor]:
        """Return the copies, to be passed to each call, and drop them: a checkpoint keeps its arguments."""
        copies, self._copies = self._copies, []
        return copies

    def __call__(self, before: _Before, block: nn.Module, *copies: Tensor) -> Any:
        """Run it."""
        if self._given:
            args, kwargs = self._given.pop()
            return self._run(before, kwargs, block, *args)
        leaves = [*self._leaves]
        with outside_modes(), torch.enable_grad():
            for i, copy in zip(self._places, copies, strict=True):
                leaves[i] = copy.clone()  # not a leaf, so that it may be written to
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._run(before, kwargs, block, *args)


def _finished(checkpointed: Callable[..., Any], run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Checkpoint ``run``, and raise its first error only after checkpointing has ended.

    Before torch 2.13, checkpoint leaves its hooks active until the error is freed.
    """
    failed, has_run = list[BaseException](), False

    def first(*args: Any) -> Any:
        nonlocal has_run
        if has_run:
            return run(*args)
        has_run = True
        try:
            return run(*args)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    try:
        return checkpointed(first, *args, **options)
    finally:
        if failed:
            raise failed.pop()


@lru_cache(maxsize=256)
def _budgeted(inner: Forward, *, budget: float) -> Forward:  # noqa: ARG001  (the cache goes by it)
    # Only serves as a separate function per budget: Dynamo keys its graphs by function, not by budget.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    return forward
