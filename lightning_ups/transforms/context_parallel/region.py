"""Runs the forward of one module on this rank's part of the sequence."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_ups.kernels.attention import attention
from lightning_ups.kernels.linear_cross_entropy import linear_cross_entropy
from lightning_ups.transforms.context_parallel.attention_calls import (
    attention_by_heads,
    replaced,
    torch_attention_by_heads,
)
from lightning_ups.transforms.context_parallel.kinds import find, positions_argument
from lightning_ups.transforms.context_parallel.loss_calls import loss_by_rows
from lightning_ups.transforms.context_parallel.parts import average, gather, split
from lightning_ups.transforms.forward import Forward, replaced_forward

_IGNORED = -100
_POSITIONS = 4  # of each rank in a trial


class ContextParallel:
    """Splits the sequence of one module of a model over ``group``.

    The module's tensor arguments whose dimension 1 is as long as that of the first one are split there, and its outputs
    are gathered. Between the two, attention exchanges heads for positions. All other code computes whole sequences,
    the same on each rank.

    Args:
        model: The model.
        group: The ranks, which have the same batches.
        module: The name of the module; None: this package's GPT, or the trunk of a decoder of transformers.
        undo: Ends it.

    Raises:
        ValueError: If there is no such module, or it cannot be split.
    """

    def __init__(self, model: nn.Module, *, group: ProcessGroup, module: str | None, undo: ExitStack) -> None:
        self.name, self._module, self._kind = find(model, module)
        self._group = group
        self._signature = inspect.signature(type(self._module).forward.__get__(self._module))
        self._positions = positions_argument(self._module)
        self._is_split, self._length = False, 0
        self._runs_whole = self._has_run = False
        self._example: tuple[Any, Any] | None = None  # the arguments of the first call that trains
        self._torchs: Callable[..., Tensor] | None = None  # what is in the place of torch's attention
        self._undo = undo.enter_context(ExitStack())
        self._undo.enter_context(replaced(attention, attention_by_heads(attention, group, self._splits)))
        self._undo.enter_context(
            replaced(linear_cross_entropy, loss_by_rows(linear_cross_entropy, group, self._gathered))
        )
        for each in self._module.modules():
            if "RotaryTable" in (base.__name__ for base in type(each).__mro__):
                self._undo.enter_context(replaced_forward(each, self._rotation))
        # A transformer of torch computes without gradients in one operator, which is not split.
        self._undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        self._undo.enter_context(replaced_forward(self._module, self._parted))

    @contextmanager
    def splitting(self, *, on: bool = True) -> Iterator[None]:
        """Let attention take its inputs for parts, as in a backward, which may compute the forward again."""
        before, self._is_split = self._is_split, on
        try:
            yield
        finally:
            self._is_split = before

    @property
    def wants_trial(self) -> bool:
        """Whether the module has run, and `deviation` is not known yet."""
        return self._example is not None

    @torch.no_grad()
    def deviation(self) -> float:
        """Return by how much the outputs of a few positions differ from those without splitting, as a fraction.

        A collective, called after a first forward, of a module that is not known to be right.
        """
        assert self._example is not None
        args, kwargs = self._example
        self._example, modes = None, [(module, module.training) for module in self._module.modules()]
        self._module.eval()  # no dropout
        try:
            parts = self._module(*args, **kwargs)
            self._runs_whole = True
            whole = self._module(*args, **kwargs)
        finally:
            self._runs_whole = False
            for module, training in modes:
                module.training = training
        pairs = zip(tree_leaves(parts), tree_leaves(whole), strict=True)
        found = [(a - b).norm() / b.norm() for a, b in pairs if isinstance(b, Tensor) and b.is_floating_point()]
        return max(map(float, found))

    def _splits(self, *tensors: Tensor, seq: int) -> bool:
        if not self._is_split and any(tensor.requires_grad for tensor in tensors):
            raise ValueError(
                f"Attention is called outside of the forward of {self.name}, the only module that context parallelism"
                " splits. Give context_parallel_module the name of a module that contains all attention."
            )
        # A traced graph calls torch's function by its name, and so its replacement once more, with whole sequences.
        return self._is_split and seq != self._length

    def _gathered(self, seq: int) -> bool:
        return not self._is_split and seq == self._length

    def _rotation(self, whole: Forward) -> Forward:
        rank = self._group.rank()

        def forward(table: Any, x: Tensor) -> Tensor:
            if not self._is_split:
                return whole(table, x)
            begin = rank * x.shape[1]
            return whole(_Tables(table.cos[begin:], table.sin[begin:]), x)

        return forward

    def _parted(self, whole: Forward) -> Forward:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._run(partial(whole, module), args, kwargs)

        return forward

    def _route(self) -> None:
        """Replace torch's attention, or what has replaced it since the last call."""
        present = F.scaled_dot_product_attention
        if present is not self._torchs:
            self._torchs = torch_attention_by_heads(present, self._group, self._splits)
            self._undo.enter_context(replaced(present, self._torchs))

    def _keywords(self, given: dict[str, Any], count: int) -> dict[str, Any]:
        """Return what was given after ``count`` positional arguments; models of transformers add keywords to these."""
        found: dict[str, Any] = {}
        for place, (name, parameter) in enumerate(self._signature.parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= given.get(name, {})
            elif place >= count and name in given and parameter.kind is not parameter.VAR_POSITIONAL:
                found[name] = given[name]
        return found

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._route()
        size = self._group.size()
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        sequences = [leaf for leaf in tree_leaves(dict(given)) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        if not sequences:
            raise ValueError(f"{self.name} was called without a tensor [batch, seq, ...], which could be split.")
        length, device = sequences[0].shape[1], sequences[0].device
        is_split = self._kind.adapt(self.name, self._module, given, length)
        if length % size and torch.is_grad_enabled():
            raise ValueError(
                f"A sequence of {length} positions was given to {self.name}, and context_parallel_size={size} does not"
                f" divide it. Make its length a multiple of {size}, by padding or cutting."
            )
        self._length = 0
        if length % size or not is_split or self._runs_whole:
            with self.splitting(on=False):
                return forward(*args, **kwargs)
        targets = given.get(self._kind.targets) if self._kind.targets else None
        if self._positions is not None and given.get(self._positions) is None:
            given[self._positions] = torch.arange(length, device=device).unsqueeze(0)

        if self._kind.needs_trial and not self._has_run and torch.is_grad_enabled():
            short = min(length, _POSITIONS * size)
            self._example = tree_map_only(Tensor, lambda t: _shortened(t, length, short), (args, kwargs))
            self._has_run = True

        def part(tensor: Tensor) -> Tensor:
            is_sequence = tensor.dim() > 1 and tensor.shape[1] == length
            return split(tensor, self._group) if is_sequence else tensor

        def joined(tensor: Tensor) -> Tensor:
            if tensor.dim() > 1 and tensor.shape[1] == length // size:
                return gather(tensor, self._group)
            if tensor.dim() == 0 and targets is not None:
                return average(tensor, (part(targets) != _IGNORED).sum(), self._group)
            raise ValueError(
                f"{self.name} returned a tensor of shape {tuple(tensor.shape)} under context parallelism, which is not"
                f" [batch, {length // size}, ...] and so cannot be joined. Compute it outside of that module."
            )

        for name, value in given.items():
            given[name] = tree_map_only(Tensor, part, value)
        self._length = length
        with self.splitting():
            result = forward(*bound.args[: len(args)], **self._keywords(given, len(args)))
        return tree_map_only(Tensor, joined, result)


def _shortened(tensor: Tensor, length: int, short: int) -> Tensor:
    is_sequence = tensor.dim() > 1 and tensor.shape[1] == length
    return (tensor[:, :short] if is_sequence else tensor).detach().clone()


class _Tables(NamedTuple):
    cos: Tensor
    sin: Tensor
