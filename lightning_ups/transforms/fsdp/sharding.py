"""Shards parameters, gradients and optimizer state of any module with FSDP2.

The parameters of a block form one group, which is gathered and reduced together, and so do those of a root. The
remaining parameters form the model's own group, which is unsharded from the start of a step to the end of its backward.
Parameters that no group can hold (scalars, odd dtypes, batch norm weights in float32) are replicated, and their
gradients are averaged as in DDP.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import getattr_static, isbuiltin, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_ups._compat.torch.fsdp.copies import reduce_as_real
from lightning_ups._compat.torch.fsdp.state import (
    carry_over,
    cast_when_recomputed,
    gather_in,
    move_own_tensors,
    rehome,
    settle,
)
from lightning_ups._compat.torch.versions import NormWithStatistics
from lightning_ups.transforms.blocks import own_class, select_parameters
from lightning_ups.transforms.casting import cast_tensors, is_wide, kept_in_float32, matmul_weights, within
from lightning_ups.transforms.sharding import (
    DATA,
    TENSOR,
    GatherOptions,
    ShardRecord,
    check_same,
    data_mesh,
    device_of,
    give_first,
    layout_of,
    recall,
    refuse_unshardable,
    remember,
)

_LARGE = 2**20  # elements: large enough for its own collective


@dataclass(frozen=True, kw_only=True)
class ShardOptions(GatherOptions):
    """How parameters are sharded.

    Args:
        reshard_after_forward: Free a block's gathered parameters after its forward, and gather them again for its
            backward; a number: keep them sharded over that many devices. Roots are needed first in backward, and stay
            gathered.
        offload: Keep shards, gradients and optimizer state on the CPU.
        prefetch: Gather this many blocks ahead, in the order of the model; None: FSDP2's default, in the order of
            execution.
        outside: Patterns of parameters that are read outside the forward of their module.
    """

    reshard_after_forward: bool | int = True
    offload: bool = False
    prefetch: int | None = None
    outside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sharded(ShardRecord):
    """How a model was sharded.

    Args:
        options: The options.
        roots: The modules that are unsharded from their forward to their backward, the model first.
        shared: Names of parameters that several groups share, or that are read outside of their module: the model's own
            group gathers them.
    """

    options: ShardOptions
    roots: tuple[FSDPModule, ...]
    shared: tuple[str, ...]

    @property
    def root(self) -> FSDPModule:
        """The model."""
        return self.roots[0]


def sharded(model: nn.Module) -> Sharded | None:
    """Return how ``shard`` has sharded ``model``, or None."""
    record = recall(model)
    return record if isinstance(record, Sharded) else None


def is_sharded(model: nn.Module) -> bool:
    """Return whether any module in ``model`` was sharded by FSDP2."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def shard(
    model: nn.Module,
    *,
    blocks: Mapping[str, nn.Module],
    roots: Iterable[nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
) -> Sharded:
    """Shard ``model`` in place over the data-parallel part of ``mesh``; all ranks get shards of rank 0's values.

    A model that an earlier run sharded in the same way keeps its shards.

    Args:
        model: The model. Its steps need not be its ``forward``.
        blocks: Submodules by name, each of which is gathered separately.
        roots: Its outermost modules that have a forward.
        mesh: A mesh with the dimension ``data_parallel``.
        options: The options.

    Raises:
        ValueError: If the model was sharded in another way, if the user sharded part of it, if a parameter has no
            shape, or if a parameter has a hook that would see gradients before they are reduced.
    """
    layout = layout_of(mesh)
    if (earlier := recall(model)) is not None:
        check_same(model, earlier, options, layout=layout)
        settle(earlier.root, discard=True)  # left by an evaluation or an exception
        return earlier
    _check_shardable(model)
    plan = _plan(model, blocks, list(roots), options)
    total = _bytes(model.parameters())
    in_blocks = _bytes(p for group in plan.groups if plan.groups[group] != _ROOT for p in _managed(plan, group))
    names = {p: name for name, p in model.named_parameters()}
    low = _cast_by_autocast(model, options)
    root = _shard_groups(model, plan, mesh, options)
    shards = dict(model.named_parameters())
    if options.param_dtype is not None:
        gather_in(root, {shards[names[p]] for p in low}, dtype=options.param_dtype)
    carry_over(root, {shards[name]: p for p, name in names.items() if shards[name] is not p})
    record = Sharded(
        options=options,
        layout=layout,
        blocks=tuple(blocks),
        roots=(root, *(g for g, kind in plan.groups.items() if kind == _ROOT and isinstance(g, FSDPModule))),
        replicated={names[p]: p for p in plan.replicated},
        shared=tuple(names[p] for p in plan.shared),
        share_of_blocks=in_blocks / max(total, 1),
    )
    _prefetch([block for block in blocks.values() if isinstance(block, FSDPModule)], options.prefetch)
    remember(model, record)
    return record


def _cast_by_autocast(model: nn.Module, options: ShardOptions) -> list[nn.Parameter]:
    """Return the parameters that are gathered in the dtype to which autocast would cast them."""
    if not options.autocast:
        return []
    precise = within(kept_in_float32(model, options.in_float32).values())
    modules = {name: module for name, module in model.named_modules() if module not in precise}
    return [getattr(modules[owner], name) for owner, name in matmul_weights(model) if owner in modules]


def _check_shardable(model: nn.Module) -> None:
    refuse_unshardable(model)
    if by_user := [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]:
        raise ValueError(
            f"{by_user[0] or type(model).__name__} was passed to fully_shard before the strategy could shard it."
            " Remove the calls of fully_shard from the module, or use ModelParallelStrategy."
        )


_BLOCK, _ROOT, _OWN_TYPE, _FLOAT32 = "block", "root", "own type", "float32"


@dataclass(frozen=True)
class _Plan:
    model: nn.Module
    outermost: set[nn.Module]
    groups: dict[nn.Module, str]  # innermost first, with the reason why each is a group
    homes: dict[nn.Parameter, list[nn.Module]]  # the groups whose modules have a parameter
    replicated: list[nn.Parameter]
    shared: list[nn.Parameter]
    in_float32: set[nn.Module]
    ungrouped: list[nn.Module]  # modules that cannot be groups because of their class or parameters


def _plan(model: nn.Module, blocks: Mapping[str, nn.Module], roots: list[nn.Module], options: ShardOptions) -> _Plan:
    outside = set(select_parameters(model, options.outside).values()) if options.outside else set()
    kinds = dict.fromkeys(roots, _ROOT) | dict.fromkeys(blocks.values(), _BLOCK)
    kept = kept_in_float32(model, options.in_float32) if options.module_dtype else {}
    kinds |= {module: kinds.get(module, _FLOAT32) for module in kept.values()}
    wanted = [*kinds]
    kinds = {module: kind for module, kind in kinds.items() if _can_be_group(module)}
    whole = {p for p in model.parameters() if p.dim() == 0 or p.numel() == 0} | _written_or_sparse(model)
    whole |= _scripted(model)
    whole |= _norms_in_float32(model) if options.module_dtype else set()
    whole |= {p for module in kept.values() if module not in kinds for p in module.parameters()}
    odd = _odd_types(_homes(model, kinds), whole)
    kinds |= dict.fromkeys(_modules_of_one_type(model, odd), _OWN_TYPE)
    homes = _homes(model, kinds)
    whole |= _odd_types(homes, whole)
    # Parameters that the model's own group gathers for others are gathered in the dtype of the computation.
    precise = {p for module in kept.values() for p in module.parameters()}
    whole |= {p for p, its in homes.items() if p in precise and (len(its) > 1 or p in outside)}
    kinds = {group: kind for group, kind in kinds.items() if any(p not in whole for p in group.parameters())}
    depth: dict[nn.Module, int] = {}  # the maximum for a module that is in several places
    for name, module in model.named_modules(remove_duplicate=False):
        depth[module] = max(name.count("."), depth.get(module, 0))
    innermost_first = sorted(kinds, key=lambda group: -depth[group])
    homes = _homes(model, kinds)
    return _Plan(
        model=model,
        outermost=set(roots),
        groups={group: kinds[group] for group in innermost_first},
        homes=homes,
        replicated=[p for p in homes if p in whole],  # a list: all ranks must have the same order
        shared=[p for p, its in homes.items() if (len(its) > 1 or p in outside) and p not in whole],
        in_float32=within(kept.values()),
        ungrouped=[module for module in wanted if module not in kinds],
    )


def _can_be_group(module: nn.Module) -> bool:
    # A recurrent layer keeps its weights in a second list that FSDP2 does not know, and TorchScript in C++; and FSDP2
    # creates a subclass, while the `__init_subclass__` of some classes requires arguments.
    return not isinstance(module, nn.RNNBase | torch.jit.ScriptModule) and _takes_subclasses(type(module))


def _takes_subclasses(kind: type) -> bool:
    told = kind.__init_subclass__
    if isbuiltin(told):
        return True
    try:
        signature(told).bind()
    except TypeError:
        return False
    return True


def _written_or_sparse(model: nn.Module) -> set[nn.Parameter]:
    # Writes in a forward would be lost with the gathered copy, and reductions of shards do not support sparse
    # gradients.
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    odd = (table for table in tables if table.max_norm is not None or table.sparse)
    return {p for table in odd for p in table.parameters(recurse=False)}


def _scripted(model: nn.Module) -> set[nn.Parameter]:
    scripted = (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))
    return {p for module in scripted for p in module.parameters()}


def _norms_in_float32(model: nn.Module) -> set[nn.Parameter]:
    # Their running statistics are float32, and the kernels require weights of the same dtype.
    return {p for m in model.modules() if isinstance(m, NormWithStatistics) for p in m.parameters(recurse=False)}


def _homes(model: nn.Module, groups: Mapping[nn.Module, str]) -> dict[nn.Parameter, list[nn.Module]]:
    homes: dict[nn.Parameter, dict[nn.Module, None]] = {}
    for module, group in _with_group(model, groups, group=model):
        for p in module.parameters(recurse=False):
            homes.setdefault(p, {})[group] = None
    return {p: [*its] for p, its in homes.items()}


def _with_group(
    module: nn.Module, groups: Container[nn.Module], *, group: nn.Module
) -> Iterator[tuple[nn.Module, nn.Module]]:
    # Not nested in the function above: a recursive closure is a reference cycle, which would keep every unsharded
    # parameter until garbage is collected.
    group = module if module in groups else group
    yield module, group
    for child in module.children():
        yield from _with_group(child, groups, group=group)


def _odd_types(homes: Mapping[nn.Parameter, list[nn.Module]], whole: set[nn.Parameter]) -> set[nn.Parameter]:
    """Return trainable parameters whose dtype differs from most of their group: FSDP2 reduces one dtype per group."""
    by_group: dict[nn.Module, list[nn.Parameter]] = {}
    frozen: dict[nn.Module, list[nn.Parameter]] = {}
    for p, groups in homes.items():
        if p not in whole and (p.requires_grad or p.is_floating_point() or p.is_complex()):
            (by_group if p.requires_grad else frozen).setdefault(groups[0], []).append(p)
    by_group = {**frozen, **by_group}  # completely frozen groups may be trained later, by a callback
    odd: set[nn.Parameter] = set()
    for parameters in by_group.values():
        sizes: Counter[torch.dtype] = Counter()
        for p in parameters:
            sizes[p.dtype] += p.numel()
        most = sizes.most_common(1)[0][0]
        odd.update(p for p in parameters if p.dtype != most)
    return odd


def _modules_of_one_type(model: nn.Module, odd: set[nn.Parameter]) -> Iterator[nn.Module]:
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        called = getattr_static(type(module), "forward") is not nn.Module.forward and module is not model
        large = sum(p.numel() for p in own) >= _LARGE
        if called and large and all(p in odd for p in own) and len({p.dtype for p in own}) == 1:
            yield module


def _managed(plan: _Plan, group: nn.Module) -> list[nn.Parameter]:
    whole = {*plan.replicated, *plan.shared}
    return [p for p, groups in plan.homes.items() if groups == [group] and p not in whole]


def _shard_groups(model: nn.Module, plan: _Plan, mesh: DeviceMesh, options: ShardOptions) -> FSDPModule:
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": data_mesh(mesh), "offload_policy": offload}
    only_one = len(plan.groups) == 1  # nothing to free: its backward begins where its forward ends
    for group, kind in plan.groups.items():
        _start_alike(group, plan, mesh)
        part = fully_shard(
            group,
            mp_policy=_policy(options, plan, group),
            reshard_after_forward=False if kind == _ROOT or only_one else options.reshard_after_forward,
            ignored_params={*plan.replicated, *plan.shared},
            **common,
        )
        cast_when_recomputed(part)
        reduce_as_real(part)
        _keep_name(part)
    _start_alike(model, plan, mesh)
    _cast_around_recurrent_layers(plan, options)
    _cast_around_ungrouped(plan, options)
    temporary = {f"_shared_{i}": p for i, p in enumerate(plan.shared)}
    for name, p in temporary.items():
        model.register_parameter(name, p)
    root = fully_shard(
        model,
        mp_policy=_policy(options, plan, model),
        ignored_params=set(plan.replicated),
        **common,
    )
    reduce_as_real(root)
    rehome(root, temporary)
    _keep_name(root).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
    return root


def _keep_name(module: Any) -> type:
    """Give the class that FSDP2 created for ``module`` the original name, which users, loggers and later runs use."""
    kind = type(module)
    kind.__name__ = own_class(module).__name__
    return kind


def _refuse_copy(self: nn.Module, _: Any) -> Any:
    raise ValueError(
        f"{type(self).__name__} is sharded and cannot be copied."
        " If a callback that averages weights copies it, create a new module and load a checkpoint."
    )


def _policy(options: ShardOptions, plan: _Plan, group: nn.Module) -> MixedPrecisionPolicy:
    output = options.output_dtype if group in plan.outermost else None
    complex_ = _is_complex(plan, group)  # casting parameters and gradients would drop the imaginary part
    if group in plan.in_float32:
        return MixedPrecisionPolicy(None, None if complex_ else options.reduce_dtype, output, cast_forward_inputs=False)
    if complex_ or is_wide(group):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    if _is_double(plan, group):  # a float64 group is not cast to lower precision
        return MixedPrecisionPolicy(output_dtype=output, cast_forward_inputs=False)
    casts = group is not plan.model and not options.autocast
    return MixedPrecisionPolicy(options.module_dtype, options.reduce_dtype, output, cast_forward_inputs=casts)


def _is_complex(plan: _Plan, group: nn.Module) -> bool:
    # then all of its trainable parameters are complex
    return any(p.is_complex() and p.requires_grad for p in _managed(plan, group))


def _is_double(plan: _Plan, group: nn.Module) -> bool:
    return any(p.dtype is torch.float64 and p.requires_grad for p in _managed(plan, group))


def _start_alike(group: nn.Module, plan: _Plan, mesh: DeviceMesh) -> None:
    """Move the group's parameters and all its buffers to the device, with the values of rank 0."""
    device = device_of(mesh)
    found: list[Tensor] = []
    whole: list[Tensor] = []  # on each of the devices that split a product
    for module in _territory(group, plan):
        for p in module.parameters(recurse=False):
            if not p.is_contiguous():  # such as channels last; FSDP2 only supports flat memory
                p.data = p.data.contiguous()
        move_own_tensors(module, device)
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        found += [_local(tensor) for tensor in tensors if not tensor.is_meta]
        whole += [_local(tensor) for tensor in tensors if not tensor.is_meta and not _is_split(tensor)]
    if TENSOR in (mesh.mesh_dim_names or ()):
        give_first(whole, group=mesh[TENSOR].get_group())
    give_first(found, group=mesh[DATA].get_group())


def _territory(group: nn.Module, plan: _Plan) -> Iterator[nn.Module]:
    yield group
    for child in group.children():
        if child not in plan.groups:
            yield from _territory(child, plan)


def _is_split(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _cast_around_recurrent_layers(plan: _Plan, options: ShardOptions) -> None:
    # The model's group does not cast inputs, because these are the batch, and a recurrent layer can only be in that
    # group.
    if options.module_dtype is None:
        return
    for module in _territory(plan.model, plan):
        if isinstance(module, nn.RNNBase) and module not in plan.in_float32 and not is_wide(module):
            _cast_inputs(module, options.module_dtype)
            _cast_outputs(module, options.output_dtype)


def _cast_around_ungrouped(plan: _Plan, options: ShardOptions) -> None:
    """Cast inputs and outputs of modules that are no groups, as FSDP2 does for groups."""
    for module in plan.ungrouped if options.module_dtype is not None else ():
        precise = module in plan.in_float32
        if not precise and (_can_be_group(module) or isinstance(module, nn.RNNBase) or is_wide(module)):
            continue  # nothing to shard, its own casts, or no casts
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{module.original_name}, a TorchScript module, cannot be cast to {options.module_dtype}."
                " Use the module that was scripted, or precision='32-true'."
            )
        if not precise:
            _cast_inputs(module, options.module_dtype)
        if module in plan.outermost:
            _cast_outputs(module, options.output_dtype)


def _cast_inputs(module: nn.Module, dtype: torch.dtype | None) -> None:
    module.register_forward_pre_hook(lambda _, args, kwargs: cast_tensors((args, kwargs), dtype), with_kwargs=True)


def _cast_outputs(module: nn.Module, dtype: torch.dtype | None) -> None:
    module.register_forward_hook(lambda _, __, output: cast_tensors(output, dtype))


def _prefetch(blocks: list[FSDPModule], depth: int | None) -> None:
    if depth is None:
        return
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(i - depth, 0) : i][::-1])


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
