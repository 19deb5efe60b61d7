"""Private names of FSDP2 that its public functions do not cover.

FSDP2 keeps a *state* for each sharded module and, in it, *groups* of parameters that are gathered and reduced together.
Torch 2.11 to 2.13 differ here in details only; check for a feature, not for a version.
"""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor, _chunk_with_empty
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

from lightning_ups._compat.patches import GROUP, PARAM, STATE, installed
from lightning_ups._compat.torch.fsdp.backward import find_in_objects, keep_for_derivatives
from lightning_ups._compat.torch.tensors.autograd import hidden_from_dynamo, outside_function_modes, unseen_by_selection
from lightning_ups._compat.torch.tensors.tensors import gradient_hooks


def sharding_policy(module: FSDPModule) -> MixedPrecisionPolicy:
    """Return the policy with which ``module`` was sharded."""
    return module._get_fsdp_state()._mp_policy


@contextmanager
def gathered_with(outer: nn.Module, inner: FSDPModule) -> Iterator[None]:
    """Let ``inner``, a submodule of ``outer``, be gathered and freed with ``outer``, while the context is open.

    If ``outer`` is compiled, the hooks of ``inner`` would break its graph.
    """
    state = inner._get_fsdp_state()
    _call_state_with(outer, state)
    try:
        yield
    finally:
        _call_state_with(cast("nn.Module", inner), state)


def _call_state_with(module: nn.Module, state: Any) -> None:
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        _unseen(state._pre_forward), prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(_unseen(state._post_forward))


def cast_when_recomputed(module: FSDPModule) -> None:
    """Let ``module`` also cast inputs and outputs when a user's checkpoint recomputes it.

    Torch does so since 2.13; before, float32 inputs met gathered weights of another dtype there.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_cast_forward_inputs"):
        return
    policy, owner = state._mp_policy, cast("nn.Module", module)

    def again(dtype: torch.dtype, tree: Any) -> Any:
        if state._training_state != TrainingState.PRE_BACKWARD:
            return None  # unchanged
        return _apply_to_tensors(partial(_cast_fp_tensor, dtype), tree)

    if policy.cast_forward_inputs and (inside := policy.param_dtype) is not None:
        hook = _untraced(unseen_by_selection(lambda _, args, kwargs: again(inside, (args, kwargs))))
        owner.register_forward_pre_hook(hook, with_kwargs=True)
    if (outside := policy.output_dtype) is not None:
        owner.register_forward_hook(_untraced(unseen_by_selection(lambda _, __, output: again(outside, output))))


def initialise(root: FSDPModule) -> None:
    """Make ``root`` the root of all sharded modules inside it; by default the first to run becomes the root."""
    root._get_fsdp_state()._lazy_init()
    states = _states(root)
    context: Any = root._get_fsdp_state()._state_ctx
    context.note_reduced, context.on_any, context.puts_off = None, None, False
    for state in states:
        end = partial(_end_backward, root, state, context)
        installed(f"{STATE}._root_post_backward_final_callback", state, lambda _, end=end: end)
        _gather_unseen(state)
        find_in_objects(state)
        for group in _groups(state):
            _type_of_frozen(group)
            _reduce_rightly(group, context)
    context.stop_keeping = keep_for_derivatives(states, [group for state in states for group in _groups(state)])


def _gather_unseen(state: Any) -> None:
    """Hide gathering and freeing from selective checkpoints, which count operators.

    The second run of a block gathers what was freed, which may differ from the first run.
    """
    (module,) = state._modules
    for hooks, handle, hook in (
        (module._forward_pre_hooks, state._pre_forward_hook_handle, state._pre_forward),
        (module._forward_hooks, state._post_forward_hook_handle, state._post_forward),
    ):
        hooks[handle.id] = _unseen(hook)


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hidden_from_dynamo(unseen_by_selection(hook))


def _type_of_frozen(group: Any) -> None:
    types = {(held.orig_dtype, held.reduce_dtype) for held in group.fsdp_params}
    if group._orig_dtype is None and len(types) == 1:  # all frozen now; a callback may unfreeze them
        ((group._orig_dtype, group._reduce_dtype),) = types


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of compiled code, as FSDP2's own are; without Dynamo there is nothing to do."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _reduce_rightly(group: Any, context: Any) -> None:
    reached: set[Any] = set()

    def post_backward(*_: Any) -> None:
        if context.puts_off:
            _keep_whole(group)
            return
        if group.fsdp_params and not hasattr(group.fsdp_params[0], "_unsharded_param"):
            return  # has never run, and torch expects that each group runs before the first backward ends
        none_yet = _fill_up(group, reached)
        # Torch leaves gradients that only the last microbatch reached in the dtype of the forward, and then reduces
        # none.
        left = [held for held in group.fsdp_params if held.unsharded_accumulated_grad is None]
        if len(left) < len(group.fsdp_params):
            for held in left:
                held.to_accumulated_grad_if_needed()
        if context.note_reduced is not None and group.reduce_grads:
            context.note_reduced([_name(held) for held in group.fsdp_params if _has_gradient(held)])
        type(group).post_backward(group)
        for held in none_yet:
            held.sharded_param.grad = None

    installed(f"{GROUP}.post_backward", group, lambda _: _untraced(post_backward))


def _keep_whole(group: Any) -> None:
    """Let ``group`` keep its gathered parameters, and the gradients of a backward, until that ends."""
    before = group.reduce_grads, group.reshard_after_backward
    group.reduce_grads, group.reshard_after_backward = False, False
    try:
        type(group).post_backward(group)
    finally:
        group.reduce_grads, group.reshard_after_backward = before
    group._training_state = TrainingState.IDLE  # the state in which the end of a backward finds what to reduce


def _has_gradient(held: Any) -> bool:
    if held.unsharded_accumulated_grad is not None:
        return True
    return hasattr(held, "_unsharded_param") and held._unsharded_param.grad is not None


@contextmanager
def noting_reductions(root: FSDPModule, note: Callable[[list[str]], None]) -> Iterator[None]:
    """Call ``note`` with the names of the parameters that each group is about to reduce, while the context is open."""
    context: Any = root._get_fsdp_state()._state_ctx
    context.note_reduced = note
    try:
        yield
    finally:
        context.note_reduced = None


@contextmanager
def reducing_last(root: FSDPModule, on_any: Callable[[list[bool]], list[bool]]) -> Iterator[None]:
    """Reduce parameters with a gradient on any rank at the end of a backward, in one order, while the context is open.

    A rank without such a gradient counts as zero. Until then gradients and gathered parameters stay unsharded.

    Args:
        root: The outermost sharded module.
        on_any: Called in each backward with whether each parameter has a gradient here; returns whether any rank has
            one. A collective.
    """
    context: Any = root._get_fsdp_state()._state_ctx
    context.on_any, context.puts_off = on_any, True
    try:
        yield
    finally:
        context.on_any, context.puts_off = None, False


def gather_all(root: FSDPModule) -> None:
    """Gather everything that a backward may need, in one order: ranks may reach parameters in different orders."""
    for state in _states(root):
        for group in _groups(state):
            group.unshard()
            group.wait_for_unshard()


@contextmanager
def kept_gathered(root: FSDPModule) -> Iterator[None]:
    """Keep everything gathered, and gradients unsharded, through all forwards and backwards in this context.

    The next backward after it reduces the gradients.
    """
    gather_all(root)
    context: Any = root._get_fsdp_state()._state_ctx
    before = [(g, g.reduce_grads, g.reshard_after_backward) for state in _states(root) for g in _groups(state)]
    for group, *_ in before:
        group.reduce_grads = group.reshard_after_backward = False
    context.is_last_backward = False
    try:
        yield
    finally:
        context.is_last_backward = True
        for group, reduces, reshards in before:
            group.reduce_grads, group.reshard_after_backward = reduces, reshards


def _end_backward(root: FSDPModule, state: Any, context: Any) -> None:
    context.puts_off = False
    try:
        if context.on_any is not None:
            _count_missing_as_zero(root, context.on_any)
        type(state)._root_post_backward_final_callback(state)
    finally:
        context.puts_off = context.on_any is not None


def _count_missing_as_zero(root: FSDPModule, on_any: Callable[[list[bool]], list[bool]]) -> None:
    due = [held for _, group, held in _handles(root) if group.reduce_grads and held.sharded_param.requires_grad]
    here = [_has_gradient(held) for held in due]
    for held, has, wanted in zip(due, here, on_any(here) if due else [], strict=True):
        if wanted and not has:
            held._unsharded_param.grad = _zeros(held)


def _zeros(held: Any) -> Tensor:
    whole = held._unsharded_param
    return torch.zeros_like(whole, dtype=whole.grad_dtype)


def _fill_up(group: Any, reached: set[Any]) -> list[Any]:
    """Let the sum over replicas cover all parameters of ``group`` in each microbatch.

    Torch sums one flat tensor of those with gradients: a different set of parameters would be added to it, or none.

    Returns:
        The parameters that no microbatch has ``reached``, if this is the last one: they get no gradient.
    """
    waiting = group._partial_reduce_output is not None
    if not waiting:
        reached.clear()
    if not group.reduce_grads or (group.all_reduce_grads and not waiting):
        return []
    trained = [h for h in group.fsdp_params if hasattr(h, "_unsharded_param") and h._unsharded_param.requires_grad]
    without = [h for h in trained if h.unsharded_accumulated_grad is None and h._unsharded_param.grad is None]
    if not waiting and len(without) == len(trained):
        return []
    reached.update({*trained} - {*without})
    for held in without:
        held._unsharded_param.grad = _zeros(held)
    last = [h for h in without if h not in reached and h.sharded_param.grad is None]
    return last if group.all_reduce_grads else []


def carry_over(root: FSDPModule, originals: Mapping[Tensor, nn.Parameter]) -> None:
    """Move the attributes and gradient hooks of parameters to the shards that replace them.

    A hook sees the gradient unsharded and before it is reduced, as under DDP.

    Args:
        root: The outermost sharded module.
        originals: The original parameter of each shard.
    """
    for held in _before_first_forward(root):
        if (original := originals.get(held.sharded_param)) is not None:
            _copy_attributes(original, held.sharded_param)
            if hooks := gradient_hooks(original):
                held.hang_hooks = partial(_hang_hooks, held, hooks)
                installed(
                    f"{PARAM}.to_unsharded", held, lambda stock, held=held: partial(_gather_with_hooks, held, stock)
                )


def gather_in(root: FSDPModule, shards: Container[Tensor], *, dtype: torch.dtype) -> None:
    """Gather ``shards`` in ``dtype``; if they are used several times, accumulate gradients in their own dtype.

    A group is still gathered by one collective: FSDP2 gathers bytes if dtypes differ.
    """
    for held in _before_first_forward(root):
        if held.sharded_param in shards:
            installed(f"{PARAM}.init_dtype_attrs", held, lambda _, held=held: partial(_init_types, held, dtype))
            installed(f"{PARAM}.init_unsharded_param", held, lambda _, held=held: partial(_init_gathered, held))


def gathered_type(module: FSDPModule) -> dict[Tensor, torch.dtype]:
    """Return the dtype in which each of the module's own shards is gathered, once it has run."""
    held_here = (held for group in _groups(module._get_fsdp_state()) for held in group.fsdp_params)
    return {held.sharded_param: held.param_dtype or held.orig_dtype for held in held_here}


def _before_first_forward(root: FSDPModule) -> Iterator[Any]:
    """Yield the handle of every sharded parameter, even if ``root`` is not initialized yet."""
    states = [m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]
    return (held for state in states for group in _groups(state) for held in group.fsdp_params)


def _init_types(held: Any, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> None:
    type(held).init_dtype_attrs(held, policy)
    held.param_dtype = dtype


def _init_gathered(held: Any) -> None:
    first = not hasattr(held, "_unsharded_param")
    type(held).init_unsharded_param(held)
    if first:
        held._unsharded_param.grad_dtype = held.orig_dtype


def _copy_attributes(source: Tensor, target: Tensor) -> None:
    for name, value in vars(source).items():
        if not hasattr(target, name):
            setattr(target, name, value)


def _gather_with_hooks(held: Any, gather: Callable[[], None]) -> None:
    gather()
    held.hang_hooks()


def _hang_hooks(held: Any, hooks: Sequence[Callable[[Tensor], Any]]) -> None:
    gathered = held._unsharded_param
    if not gathered.requires_grad:
        return  # frozen, possibly temporarily
    there = gradient_hooks(gathered)
    if not any(hook is other for hook in hooks for other in there):
        for hook in hooks:
            gathered.register_hook(hook)


def follow_requires_grad(root: FSDPModule) -> None:
    """Let gathered parameters require gradients as their shards do; torch updates that only at the next gather."""
    for _, shard, gathered, _, held in held_parameters(root):
        if gathered is not None:
            gathered.requires_grad_(shard.requires_grad)
            if hasattr(held, "hang_hooks"):
                held.hang_hooks()


def begin_forward(root: FSDPModule) -> None:
    """Gather the parameters of ``root`` itself, as a call of it would."""
    # One argument that is not a tensor: torch 2.11 cannot move an empty tuple to a GPU.
    root._get_fsdp_state()._pre_forward(cast("nn.Module", root), (0,), {})


def end_forward(root: FSDPModule) -> None:
    """End the forward of ``begin_forward``."""
    root._get_fsdp_state()._post_forward(cast("nn.Module", root), (), None)


def expect_backward(root: FSDPModule, loss: Tensor) -> None:
    """Prepare the backward from ``loss`` to reduce the group of ``root``, and other groups without an announcement."""
    if loss.requires_grad:
        # Not with `_post_forward`, which would warn about every loss that is a view.
        loss.register_hook(root._get_fsdp_state()._pre_backward)


def settle(root: FSDPModule, *, discard: bool = False) -> None:
    """Reshard every group, without a collective, as after a backward.

    A forward without a backward leaves the roots unsharded. After an exception within a forward, a group is still in
    its forward state, and ``reshard()`` does nothing.

    Args:
        root: The outermost sharded module.
        discard: Drop gradients that wait for their reduction, from a failed iteration.
    """
    context: Any = root._get_fsdp_state()._state_ctx
    if hasattr(context, "stop_keeping"):  # from the initialization on
        context.stop_keeping()
    communication = root._get_fsdp_state()._comm_ctx
    if hasattr(communication, "all_gather_stream"):  # created by the lazy initialization
        _wait_for_collectives(communication)
    communication.post_forward_order.clear()
    for state in _states(root):
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        for group in _groups(state):
            _settle_group(group)
            if discard:
                _discard_gradients(group)
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _wait_for_collectives(communication: Any) -> None:
    current = communication.device_handle.current_stream()
    if (gathered := communication.all_gather_state) is not None:
        if gathered.event is not None:
            current.wait_event(gathered.event)
        communication.all_gather_state = None
    # One state in torch 2.11, a list of them in 2.13.
    reducing: list[Any] | None = getattr(communication, "reduce_scatter_states", None)
    if reducing is None:
        reducing = [communication.reduce_scatter_state]
        communication.reduce_scatter_state = None
    for reduced in reducing:
        if reduced is not None and reduced.event is not None:
            current.wait_event(reduced.event)
    reducing.clear()


def _settle_group(group: Any) -> None:
    if group._all_gather_result is not None:
        _wait_for_gather(group._all_gather_result)
        group._all_gather_result = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _wait_for_gather(result: Any) -> None:
    if result.all_gather_event is not None and torch.accelerator.is_available():
        torch.accelerator.current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, torch.distributed.Work):
        result.all_gather_work.wait()


def _discard_gradients(group: Any) -> None:
    group._partial_reduce_output = None
    for held in group.fsdp_params:
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None


def unreduced(root: FSDPModule) -> list[str]:
    """Return the names of parameters whose gradient came after their group was reduced, and was left behind."""
    return [_name(held) for _, group, held in _handles(root) if group.reduce_grads and _has_gradient(held)]


def replaced(root: FSDPModule) -> list[str]:
    """Return the names of sharded parameters that their modules have replaced by something else."""
    return [
        _name(held)
        for *_, held in _handles(root)
        if (found := held._module_info.module._parameters.get(held._module_info.param_name)) is not held.sharded_param
        and found is not getattr(held, "_unsharded_param", None)
    ]


def _handles(root: FSDPModule) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (state, group, handle) for every sharded parameter."""
    return ((state, group, held) for state in _states(root) for group in _groups(state) for held in group.fsdp_params)


def _name(held: Any) -> str:
    return held._param_fqn or held._module_info.param_name


def held_parameters(root: FSDPModule) -> Iterator[tuple[nn.Module, Tensor, Tensor | None, str, Any]]:
    """Yield (gathering module, shard, gathered or None, name, handle) for every sharded parameter."""
    for state, _, held in _handles(root):
        gathered = getattr(held, "_unsharded_param", None)
        yield state._modules[0], held.sharded_param, gathered, held._param_fqn or "", held


def written_to(module: FSDPModule) -> Iterator[tuple[Any, Tensor]]:
    """Yield (handle, whether it differs from its shard here) for each parameter that ``module`` has gathered."""
    with outside_function_modes(), torch.no_grad():
        for group in _groups(module._get_fsdp_state()):
            for held in group.fsdp_params:
                shard = held._sharded_local_tensor
                of_its_own = hasattr(shard, "fsdp_pre_all_gather")  # it gathers something else than it stores
                if held.sharded_state.name == "UNSHARDED" and shard.numel() and not of_its_own:
                    yield held, _differs(held, shard)


@unseen_by_selection
def _differs(held: Any, shard: Tensor) -> Tensor:
    whole = held._unsharded_param
    whole = (whole.to_local() if isinstance(whole, DTensor) else whole).detach()
    size, rank = getattr(held.mesh_info, "shard_mesh_size", 1), getattr(held.mesh_info, "shard_mesh_rank", 0)
    part = _chunk_with_empty(whole, size, dim=held.fsdp_placement.dim)[rank]
    shard = shard.detach().to(part.device, part.dtype)
    both_nan = (part != part) & (shard != shard)
    return ((part != shard) & ~both_nan).any()


def gather_with_root(root: FSDPModule, handle: Any, *, uncast: bool = False) -> Tensor:
    """Let ``root``, which is unsharded now, gather a parameter from now on instead of its own module.

    Neither the sharded Parameter nor the gathered one is replaced, so optimizers and graphs that hold them stay valid.
    Every rank must call it for the same parameters in the same order.

    Args:
        root: The outermost sharded module.
        handle: The handle of the parameter.
        uncast: Gather it in its own dtype even if `gather_in` chose another, unless it was gathered before.

    Returns:
        The gathered parameter.
    """
    state, group = next((state, group) for state, group, held in _handles(root) if held is handle)
    if group._all_gather_result is not None:  # prefetched
        group.wait_for_unshard()
    if uncast and not hasattr(handle, "_unsharded_param"):
        for own in ("init_dtype_attrs", "init_unsharded_param"):
            vars(handle).pop(own, None)
        handle.init_dtype_attrs(group.mp_policy)
    target = _group_of_root(root, like=group, handle=handle)
    group.fsdp_params.remove(handle)
    if not group.fsdp_params:
        _groups(state).remove(group)
        group.unshard_in_backward = False  # it may have run already, and backward prefetches what has
    if group.is_unsharded is False:
        alone = _empty_group(root, like=group)
        if group.is_sharded_post_forward:
            handle.to_sharded()
        alone.fsdp_params.append(handle)
        alone.unshard()
        alone.wait_for_unshard()
    target.fsdp_params.append(handle)
    target._init_mp_dtypes()
    _type_of_frozen(target)
    target._sharded_state = type(target._sharded_state).UNSHARDED
    return handle._unsharded_param


def _group_of_root(root: FSDPModule, *, like: Any, handle: Any) -> Any:
    """Return a group of ``root`` that gathers and reduces ``handle`` in the dtypes of ``like``, possibly a new one."""
    groups, dtype = _groups(root._get_fsdp_state()), handle.sharded_param.dtype
    alike = [group for group in groups if _types_of(group.mp_policy) == _types_of(like.mp_policy)]
    for group in alike:
        if all(held.sharded_param.dtype == dtype for held in group.fsdp_params):
            return group
    if groups and isinstance(groups, _OnlyGroup):
        held = [*groups[0].fsdp_params, handle]
        if alike and len({each.sharded_param.dtype for each in held if each.sharded_param.requires_grad}) < 2:
            return groups[0]
        cure = "install torch 2.13" if alike else f"use FSDP2Strategy(outside=[{handle._param_fqn!r}])"
        raise RuntimeError(
            f"{handle._param_fqn} is read outside the forward of its module, and so are parameters of another dtype."
            f" This torch gathers all of them together, in one dtype. Read parameters of one dtype so, or {cure}."
        )
    made = _empty_group(root, like=like)
    made._training_state = TrainingState.FORWARD
    groups.append(made)
    return made


def _types_of(policy: MixedPrecisionPolicy) -> tuple[torch.dtype | None, torch.dtype | None]:
    return policy.param_dtype, policy.reduce_dtype


def _empty_group(root: FSDPModule, *, like: Any) -> Any:
    group = type(like)(
        params=[],
        modules=(root,),
        mesh_info=like.mesh_info,
        post_forward_mesh_info=None,  # a root stays unsharded from forward to backward
        device=like.device,
        shard_placement_fn=None,
        mp_policy=like.mp_policy,
        offload_policy=like.offload_policy,
    )
    group.comm_ctx = like.comm_ctx
    group.reduce_grads, group.all_reduce_grads = like.reduce_grads, like.all_reduce_grads
    group.reshard_after_backward = like.reshard_after_backward
    group._reset_sharded_params = True  # already done in the group that the parameters come from
    _reduce_rightly(group, root._get_fsdp_state()._state_ctx)
    return group


def rehome(root: FSDPModule, temporary: Iterable[str]) -> None:
    """Remove the names under which ``root`` held parameters only so that ``fully_shard`` would accept them."""
    names = set(temporary)
    for group in _groups(root._get_fsdp_state()):
        for held in group.fsdp_params:
            info = held._module_info
            if info.module is root and info.param_name in names:
                info.module, info.param_name = info.shared_modules.pop(0), info.shared_param_names.pop(0)
    for name in names:
        del root._parameters[name]  # type: ignore[attr-defined]


def move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move the tensors of ``module`` itself, not those of its children, to ``device``."""
    own = [*module._parameters.values(), *module._buffers.values()]
    if any(t is not None and t.device != device and not t.is_meta for t in own):
        module._apply(lambda t: t if t.is_meta else t.to(device), recurse=False)


def allocate(root: nn.Module, *, shards_on: torch.device, rest_on: torch.device) -> None:
    """Allocate every tensor in ``root`` that is on the meta device; its content is undefined."""

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=shards_on if isinstance(tensor, DTensor) else rest_on)

    before = dict(root.named_parameters())
    root._apply(real)
    for name, parameter in root.named_parameters():
        _copy_attributes(before[name], parameter)


def flattened(mesh: DeviceMesh, names: tuple[str, ...], into: str) -> DeviceMesh:
    """Return the dimensions ``names`` of ``mesh`` as one, also available as ``mesh[into]``."""
    return mesh[names]._flatten(into)


def _states(root: FSDPModule) -> list[Any]:
    return root._get_fsdp_state()._state_ctx.all_states


def _groups(state: Any) -> Any:
    groups = getattr(state, "_fsdp_param_groups", None)
    return _OnlyGroup(state) if groups is None else groups


class _OnlyGroup:
    """Presents the groups of a state as a list, if torch has at most one."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self._state._fsdp_param_group is None else (self._state._fsdp_param_group,))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Any:
        return [*self][index]

    def append(self, group: Any) -> None:
        self._state._fsdp_param_group = group

    def remove(self, group: Any) -> None:
        if self._state._fsdp_param_group is group:
            self._state._fsdp_param_group = None
