"""Finds torch's operators by name, lists those that are expensive to recompute, and replaces cross-entropy.

Names are those in ``torch.ops``, with dots: ``aten.mm`` means every overload that creates a new tensor,
``aten.mm.default`` a single one.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload

from lightning_ups._compat.patches import applied

Operator = OpOverload | HigherOrderOperator

_COSTLY: dict[str, None] = dict.fromkeys(
    (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten._grouped_mm",
        "aten._scaled_mm",
        "aten._scaled_mm_v2",
        "aten._scaled_grouped_mm",
        "aten._scaled_grouped_mm_v2",
        "aten.convolution",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "aten._cudnn_attention_forward",
        "higher_order.flex_attention",
    )
)


def register_costly_op(name: str) -> None:
    """Add the operator ``name`` to the expensive ones, for models that are checkpointed from now on.

    For kernels that autograd sees as one operator, such as a custom attention. The name is enough: the operator may be
    defined later, or on another machine only.
    """
    if len(name.split(".")) < 2:
        raise ValueError(f"register_costly_op({name!r}) has no namespace. Say 'namespace.{name}', as in torch.ops.")
    _COSTLY[name] = None


def costly_ops() -> list[Operator]:
    """Return the matrix products, convolutions and attention kernels that this torch build has."""
    return [op for name in _COSTLY for op in _overloads(name)]


def operators(names: Iterable[str]) -> list[Operator]:
    """Return the operators of these ``names``.

    Raises:
        ValueError: If there is no operator of a name.
    """
    found = {name: _overloads(name) for name in names}
    for name, ops in found.items():
        if not ops:
            near = get_close_matches(name, _known_names(), n=6, cutoff=0.4)
            raise ValueError(
                f"There is no operator {name!r} in torch.ops; operators of a package exist once it is imported."
                f" Use one of these, nearest first: {', '.join(near) or ', '.join(_COSTLY)}."
            )
    return [op for ops in found.values() for op in ops]


def is_composite(op: Operator) -> bool:
    """Return whether ``op`` is decomposed before a kernel is chosen, so that it never runs itself."""
    if not isinstance(op, OpOverload) or not torch._C._dispatch_has_kernel(op.name()):
        return False
    # Checks what is registered: some are composite on one device and have a kernel on another.
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    return has_kernel("CompositeImplicitAutograd") and not any(
        map(has_kernel, ("CPU", "CUDA", "CompositeExplicitAutograd"))
    )


def uncalled(names: Iterable[str], called: set[Operator]) -> list[str]:
    """Return the ``names`` that match no operator in ``called``."""
    return [name for name in names if called.isdisjoint(_overloads(name))]


def alike(names: Sequence[str], called: Iterable[Operator]) -> list[str]:
    """Return operators in ``called`` that ``names`` may refer to, closest first: expensive ones, or similar names.

    Raises:
        ValueError: If there is no operator of a name.
    """
    known, wanted = {_name(op) for op in called}, {_name(op) for op in operators(names)}
    found = set[str]()
    for name in wanted:
        near = () if name in _COSTLY else get_close_matches(name, known)
        found.update(near or known & _COSTLY.keys())
    return sorted(found, key=lambda each: (-max(SequenceMatcher(a=each, b=name).ratio() for name in wanted), each))


def _name(op: Operator) -> str:
    return str(op.overloadpacket) if isinstance(op, OpOverload) else f"{op.namespace}.{op.name()}"


def _overloads(name: str) -> list[Operator]:
    namespace, _, path = name.replace("::", ".").partition(".")
    found: Any = getattr(torch.ops, namespace, None)
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, (OpOverload, HigherOrderOperator)):
        return [found]
    if not isinstance(found, torch._ops.OpOverloadPacket):
        return []
    overloads = [getattr(found, overload) for overload in found.overloads()]
    return [op for op in overloads if not op._schema.is_mutable]


def _known_names() -> list[str]:
    names = (name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return [name for name in dict.fromkeys(names) if (ops := _overloads(name)) and not all(map(is_composite, ops))]


def replaced_cross_entropy(
    make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
) -> AbstractContextManager[None]:
    """Let ``F.cross_entropy`` call ``make(operator)`` while the context is open, in place of the operator.

    TorchScript treats the replacement as the operator.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map  # slow to import
    from torch.jit._builtins import _get_builtin_table

    get_torch_obj_rule_map()  # Dynamo finds the operators that it knows by their names, once

    def made(operator: Any) -> Any:
        replacement = make(operator)
        _get_builtin_table()[id(replacement)] = "aten::cross_entropy_loss"
        return replacement

    return applied("torch._C._nn:cross_entropy_loss", made)
