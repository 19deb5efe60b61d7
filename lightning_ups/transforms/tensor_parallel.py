"""Tensor parallelism: splits matrix products over devices, and activations between them along the sequence."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_ups.transforms.blocks import select_names

Style = Literal[
    "colwise",
    "rowwise",
    "embedding",
    "norm",
    "norm_of_heads",
    "split_sequence",
    "gather_sequence",
    "gather_hidden_states",
    "rowwise_to_sequence",
    "embedding_to_sequence",
    "colwise_from_sequence",
    "colwise_gathered",
]

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    # Along the sequence: between the products, each device has a part of the positions.
    "norm": SequenceParallel,
    "norm_of_heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "split_sequence": lambda: PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    ),
    "gather_sequence": lambda: PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
    "gather_hidden_states": lambda: PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    ),
    "rowwise_to_sequence": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "embedding_to_sequence": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "colwise_from_sequence": lambda: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}

_SPLITTING = ("split_sequence", "embedding_to_sequence")  # styles whose outputs are split along the sequence

PLANS: Mapping[str, tuple[str, Mapping[str, Style]]] = {
    "gpt": (
        "GPT",
        {
            "embedding": "embedding_to_sequence",
            "layers.*.attention_norm": "norm",
            "layers.*.attention": "gather_sequence",
            "layers.*.attention.qkv": "colwise",
            "layers.*.attention.[qk]_norm": "norm_of_heads",
            "layers.*.attention.out": "rowwise_to_sequence",
            "layers.*.ffn_norm": "norm",
            "layers.*.ffn": "gather_sequence",
            "layers.*.ffn.gate": "colwise",
            "layers.*.ffn.up": "colwise",
            "layers.*.ffn.down": "rowwise_to_sequence",
            "norm": "norm",
            "head": "colwise_from_sequence",
        },
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "model.embed_tokens": "embedding",  # not split: positions are counted from its output
            "model.layers.0": "split_sequence",
            "model.layers.*.input_layernorm": "norm",
            "model.layers.*.self_attn": "gather_hidden_states",
            "model.layers.*.self_attn.[qkv]_proj": "colwise",
            "model.layers.*.self_attn.o_proj": "rowwise_to_sequence",
            "model.layers.*.post_attention_layernorm": "norm",
            "model.layers.*.mlp": "gather_sequence",
            "model.layers.*.mlp.gate_proj": "colwise",
            "model.layers.*.mlp.up_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise_to_sequence",
            "model.norm": "norm",
            "lm_head": "colwise_from_sequence",
        },
    ),
}


def check_plan(plan: str | Mapping[str, Style]) -> None:
    """Raise if ``plan`` is not a valid plan for any model.

    Raises:
        ValueError: If it is empty, or has an unknown name or style.
    """
    if not plan or (isinstance(plan, str) and plan not in PLANS):
        raise ValueError(
            f"tensor_parallel_plan={plan!r} does not say how modules are split."
            f" Use one of {tuple(PLANS)}, or give a mapping from patterns of names to styles."
        )
    styles = [] if isinstance(plan, str) else plan.values()
    if unknown := [style for style in styles if style not in _STYLES]:
        raise ValueError(f"tensor_parallel_plan has the unknown style {unknown[0]!r}. Use one of {get_args(Style)}.")


def plan_of(model: nn.Module, plan: str | Mapping[str, Style]) -> dict[str, Style]:
    """Return ``plan``, or the named plan with the module names of ``model``.

    Raises:
        ValueError: If a name or style is unknown, or if the plan does not fit ``model``.
    """
    check_plan(plan)
    if not isinstance(plan, str):
        return dict(plan)
    kind, styles = PLANS[plan]
    # Before FSDP2 is applied: classes have their own names.
    found = [name for name, m in model.named_modules() if kind in (base.__name__ for base in type(m).__mro__)]
    if not found:
        raise ValueError(
            f"tensor_parallel_plan={plan!r} is for a {kind}, and {type(model).__name__} has none."
            " The names in a plan are those of one model's modules."
            " Give a mapping from patterns of names to styles."
        )
    return {f"{found[0]}.{pattern}".removeprefix("."): style for pattern, style in styles.items()}


def parallelize(model: nn.Module, *, plan: Mapping[str, Style], mesh: DeviceMesh) -> dict[str, Style]:
    """Split the modules of ``model`` that ``plan`` names over ``mesh``, in place; names and ties do not change.

    Returns:
        The style of each split module.

    Raises:
        ValueError: If a pattern matches nothing, if a weight does not divide evenly, or if tied weights have two
            styles.
    """
    styles = styles_of(model, plan=plan, size=mesh.size())
    ties = _ties(model)
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, _STYLES[style]())
        if style in _SPLITTING:
            check = partial(_check_length, name=name, size=mesh.size())
            model.get_submodule(name).register_forward_pre_hook(check, prepend=True)
    for names in ties:
        _tie(model, names)
    return styles


def styles_of(model: nn.Module, *, plan: Mapping[str, Style], size: int) -> dict[str, Style]:
    """Return the style of each module that ``plan`` splits over ``size`` devices.

    Raises:
        ValueError: If a pattern matches nothing, or if a weight does not divide evenly.
    """
    modules = {name: m for name, m in model.named_modules() if name and not isinstance(m, nn.Identity)}
    chosen: dict[str, Style] = {
        pattern: style for pattern, style in plan.items() if not _only_identities(model, pattern)
    }
    matched = select_names(modules, list(chosen), kind="submodule", of=type(model).__name__)
    styles: dict[str, Style] = {name: chosen[pattern] for name, pattern in matched.items()}
    for name, style in styles.items():
        owner, _, last = name.rpartition(".")
        _check_divides(name, modules[name], style, size, together=_rows_together(model.get_submodule(owner), last))
    return styles


def _only_identities(model: nn.Module, pattern: str) -> bool:
    hits = select_names(
        [n for n, _ in model.named_modules() if n], [pattern], kind="submodule", of=type(model).__name__
    )
    return all(isinstance(model.get_submodule(name), nn.Identity) for name in hits)


def _rows_together(owner: nn.Module, name: str) -> int:
    """Return how many rows of a weight of ``owner`` must stay together, such as those of an attention head."""
    of_heads = getattr(owner, "head_dim", 1) if name in ("q_proj", "k_proj", "v_proj") else 1
    return getattr(owner, "rows_together", {}).get(name, of_heads)


def _check_divides(name: str, module: nn.Module, style: Style, size: int, *, together: int) -> None:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        return
    axis = 0 if style.startswith(("colwise", "embedding")) else 1
    together = together if axis == 0 else 1
    if weight.shape[axis] % (size * together):
        of = f", in parts of {together} that belong together, as heads do," if together > 1 else ""
        raise ValueError(
            f"The weight of {name}, of shape {tuple(weight.shape)}, cannot be split along dimension {axis}{of}"
            f" over {size} devices."
            f" Each device would need an equal part for the style {style!r}."
            f" Choose a tensor_parallel_size that divides {weight.shape[axis] // together},"
            f" or {'leave it out of the plan' if together > 1 else 'pad the weight'}."
        )


def _check_length(_: nn.Module, args: tuple[Any, ...], *, name: str, size: int) -> None:
    # Devices assume that all parts are equally long, and would wait for data that others never send.
    if args and isinstance(args[0], Tensor) and args[0].dim() > 1 and args[0].shape[1] % size:
        raise ValueError(
            f"A sequence of {args[0].shape[1]} positions was given to {name} under tensor parallelism."
            f" The plan splits activations along the sequence, and {size} devices need equally long parts."
            f" Make its length a multiple of {size}, by padding or cutting."
        )


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [its for its in names.values() if len(its) > 1]


def _tie(model: nn.Module, names: list[str]) -> None:
    first, *others = (model.get_parameter(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other is first:
            continue
        if not (isinstance(first, DTensor) and isinstance(other, DTensor) and first.placements == other.placements):
            raise ValueError(
                f"{names[0]} and {name} are one weight, and the plan splits it in two ways."
                " Each of them would get a copy of its own, and they would part."
                " Give both the same split: rows for an embedding and columns for a head are the same dimension."
            )
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, first)
