"""Sharding as plain tensor code: each parameter is a shard, and reading it gathers it.

A module whose ``weight`` is sharded gets a subclass in which ``weight`` is a property: a redistribution of the shard,
which a compiler traces and schedules, and which becomes a reduction in backward. Names, state dicts and optimizers see
the shards. One switch decides what a read returns: the whole parameter within a step, the shard otherwise, so that code
that initializes, restores, ties or groups parameters works on shards.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from typing_extensions import override

from lightning_ups._compat.torch.tensors.tensors import gradient_hooks
from lightning_ups._compat.torch.versions import NormWithStatistics
from lightning_ups.transforms.casting import cast_around, is_wide, kept_in_float32, matmul_weights, within
from lightning_ups.transforms.sharding import (
    DATA,
    GatherOptions,
    ShardRecord,
    check_same,
    data_mesh,
    device_of,
    give_first,
    layout_of,
    num_shares,
    part_of,
    recall,
    refuse_unshardable,
    remember,
)

_LARGE = 2**20  # elements: large enough to shard along another dimension than the first
_Names = dict[str, tuple[bool, bool]]  # of parameters: whether they are cast, and whether they are split


@dataclass(frozen=True, kw_only=True)
class ParametriseOptions(GatherOptions):
    """How parameters are sharded and gathered.

    Args:
        reshard_after_forward: Gather again for the backward, instead of keeping what the forward gathered.
    """

    reshard_after_forward: bool = True


class Gathering:
    """Decides whether, and how, reading a parameter of one model gathers it. Copies of the model share it.

    Args:
        mesh: The devices of shards and replicas.
        options: The options.
    """

    def __init__(self, mesh: DeviceMesh, options: ParametriseOptions) -> None:
        self.active = False
        self.mesh, self.options = mesh, options
        self._whole = tuple(Replicate() for _ in range(mesh.ndim))
        self._mean = tuple(Partial("avg") for _ in range(mesh.ndim))
        self.noted = 0  # a checksum of what training steps called and gathered, in order
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # of roots with split parameters
        self._notes = False
        self._before: list[bool] = []  # of the calls in progress
        self._read: list[tuple[Tensor, int, Tensor]] = []

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @contextmanager
    def reading(self, *, whole: bool) -> Iterator[None]:
        """Let reads return whole parameters, or shards, while the context is open; contexts nest."""
        before, self.active = self.active, whole
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def noting(self, *, training: bool) -> Iterator[None]:
        """Record calls and gathers while the context is open, if it is a training step."""
        before, self._notes = self._notes, training
        try:
            yield
        finally:
            self._notes = before

    def note(self, what: str) -> None:
        """Record a call or a gather, which all devices must make in the same order if anything is split."""
        if self._notes and num_shares(self.mesh) > 1:
            self.noted = crc32(what.encode(), self.noted)

    def placements(self, parameter: Tensor) -> tuple[Placement, ...]:
        """Return how ``parameter`` is sharded: along a dimension that splits evenly, or not at all.

        Uneven shards would make different graphs, whose collectives may not match. Other dimensions than the first are
        used only for large parameters: stock callbacks compare parameters, and torch cannot compare all kinds of
        shards.
        """
        size = num_shares(self.mesh)
        even = [dim for dim, length in enumerate(parameter.shape) if length and length % size == 0]
        if not even or (even[0] > 0 and parameter.numel() < _LARGE):
            return self._whole
        return *self._whole[1:], Shard(even[0])

    def whole(self, shard: Tensor, *, cast: bool, splits: bool = True) -> Tensor:
        """Return ``shard`` gathered, such that its gradient is averaged and sharded; traced by compilers.

        Args:
            shard: A parameter.
            cast: Whether it is gathered in the dtype of the computation.
            splits: Whether it is split. If not, the caller must average its gradient.
        """
        assert isinstance(shard, DTensor)
        dtype = self.options.param_dtype if cast else None
        if not splits:
            local = shard.to_local(grad_placements=self._whole)
            return local if dtype is None else local.to(dtype)
        gathered = shard.redistribute(
            placements=self._whole,
            forward_dtype=dtype,
            backward_dtype=(self.options.reduce_dtype or dtype) if cast else None,
        )
        return gathered.to_local(grad_placements=self._mean)

    def watched(self, whole: Tensor, shard: Tensor) -> Tensor:
        """Return ``whole`` such that `check_unwritten` notices writes to it, which would be lost."""
        seen = whole.as_subclass(_Whole)
        seen.shard, seen.gathering = shard, self
        self.watch(seen, shard)
        return seen

    def watch(self, tensor: Tensor, shard: Tensor) -> None:
        """Record the version that ``tensor``, or a view of it, had when it was read."""
        self._read.append((tensor, tensor._version, shard))

    def check_unwritten(self, model: nn.Module) -> None:
        """Raise if a gathered parameter was written to since the last call."""
        written = {id(shard) for tensor, version, shard in self._read if tensor._version != version}
        self.forget()
        if written:
            names = [name for name, p in model.named_parameters() if id(p) in written]
            raise RuntimeError(_lost(", ".join(names)))

    def forget(self) -> None:
        """Drop references to gathered parameters."""
        self._read.clear()

    # Hooks of the model and its roots, so that a call outside of a step gathers, too.

    def begin_call(self, module: nn.Module, *_: Any) -> None:
        """Gather parameters that are read from here on."""
        if not torch.compiler.is_compiling():
            if module in self.names:
                self.note(self.names[module])
            self._before.append(self.active)
            self.active = True

    def end_call(self, module: nn.Module, *_: Any) -> None:
        """Undo `begin_call`; at the end of a call outside of a step, check for writes."""
        if not torch.compiler.is_compiling():
            self.active = self._before.pop()
            if not self.active:
                self.check_unwritten(module)


def _lost(name: str) -> str:
    return (
        f"{name} was written to within a step, where it is a gathered copy: the write would be lost."
        " Write outside the step, such as in on_train_batch_end, or within"
        " lightning_ups.transforms.simple_fsdp.parametrize.shards_of(module)."
    )


class _Whole(Tensor):
    """A gathered parameter in code that is not compiled; results computed from it are plain tensors."""

    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]  # which is none
    shard: Tensor
    gathering: Gathering

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        # It has its own version counter.
        alias = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        self.gathering.watch(alias, self.shard)
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:  # type: ignore[override]
        raise RuntimeError(_lost("A parameter"))

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self.shard.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # type: ignore[override]
        self.shard.grad = value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:  # type: ignore[override]
        self.shard.requires_grad = value

    @override
    def requires_grad_(self, mode: bool = True) -> Self:
        self.shard.requires_grad = mode
        return self


@dataclass(frozen=True, kw_only=True)
class Parametrised(ShardRecord):
    """How a model was sharded.

    Args:
        options: The options.
        gathering: The switch of its parameters.
    """

    options: ParametriseOptions
    gathering: Gathering
    _casts: ExitStack = field(repr=False)


def parametrised(model: nn.Module) -> Parametrised | None:
    """Return how ``parametrise`` has sharded ``model``, or None."""
    record = recall(model)
    return record if isinstance(record, Parametrised) else None


def is_parametrised(model: nn.Module) -> bool:
    """Return whether any parameter in ``model`` is gathered when it is read."""
    return any(_gathering_of(module) is not None for module in model.modules())


@contextmanager
def shards_of(model: nn.Module) -> Iterator[None]:
    """Let reads of the parameters of ``model`` return shards, also within a step, while the context is open."""
    with ExitStack() as stack:
        for gathering in dict.fromkeys(map(_gathering_of, model.modules())):
            if gathering is not None:
                stack.enter_context(gathering.reading(whole=False))
        yield


def parametrise(
    model: nn.Module,
    *,
    blocks: Mapping[str, nn.Module],
    roots: Iterable[nn.Module],
    mesh: DeviceMesh,
    options: ParametriseOptions,
) -> Parametrised:
    """Shard ``model`` in place over the data-parallel part of ``mesh``; all ranks get shards of rank 0's values.

    A model that an earlier run sharded in the same way keeps its shards. Scalars, and parameters that do not split
    evenly, are replicated: the caller must average their gradients.

    Args:
        model: The model. Its steps need not be its ``forward``.
        blocks: Submodules by name. Their inputs are cast, as those of roots are.
        roots: Its outermost modules that have a forward.
        mesh: A mesh with the dimension ``data_parallel``.
        options: The options.

    Raises:
        ValueError: If it was sharded in another way, or contains something that cannot be sharded.
    """
    layout = layout_of(mesh)
    if (earlier := recall(model)) is not None:
        check_same(model, earlier, options, layout=layout)
        assert isinstance(earlier, Parametrised)
        earlier.gathering.forget()  # left by an exception
        return earlier
    check_parametrisable(model)
    outermost = list(roots)
    gathering = Gathering(data_mesh(mesh), options)
    share = _share(blocks.values(), model)
    names = {p: name for name, p in model.named_parameters()}
    # A recurrent layer keeps its weights in a second list, which a property cannot intercept.
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    in_lists = {p for module in recurrent for p in module.parameters()}
    whole = [p for p in names if p.dim() == 0 or p in in_lists]
    _start_alike([*model.buffers(), *whole], mesh)
    shards = {p: _shard(p, gathering) for p in names if p not in {*whole}}
    classes: dict[Any, type[nn.Module]] = {}
    uncast = within(kept_in_float32(model, options.in_float32).values())
    products: dict[str, set[str]] = {}
    for owner, name in matmul_weights(model) if options.autocast else ():
        products.setdefault(owner, set()).add(name)
    for owner, module in model.named_modules():
        casts = products.get(owner, set()) if options.autocast else None
        if its := _replace(module, shards, casts=set() if module in uncast else casts):
            _give_class(module, its, gathering, classes)
    for module in (model, *outermost):
        module.register_forward_pre_hook(gathering.begin_call)
        module.register_forward_hook(gathering.end_call, always_call=True)
    called = {module: name for name, module in model.named_modules()}
    gathering.names.update((root, called[root]) for root in outermost if any(map(_splits, root.parameters())))
    record = Parametrised(
        options=options,
        layout=layout,
        blocks=tuple(blocks),
        gathering=gathering,
        replicated={name: p for name, p in model.named_parameters() if not _splits(p)},
        share_of_blocks=share,
        _casts=_cast(blocks.values(), outermost, options, uncast=uncast, recurrent=recurrent),
    )
    remember(model, record)
    return record


def check_parametrisable(model: nn.Module) -> None:
    """Raise if ``model`` contains something that cannot be sharded by parametrization."""
    refuse_unshardable(model)
    if sharded := [name for name, p in model.named_parameters() if isinstance(p, DTensor)]:
        raise ValueError(
            f"{sharded[0]} was sharded before the strategy could shard it."
            " Do not shard in the module, or create a new module and load a checkpoint."
        )
    if hooked := [name for name, p in model.named_parameters() if p.dim() > 0 and gradient_hooks(p)]:
        raise ValueError(
            f"{hooked[0]} has a gradient hook, which a graph does not call."
            " Move the code to on_before_optimizer_step, or use FSDP2Strategy, which calls the hook."
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name} has max_norm={module.max_norm}: it scales rows of its weight within its forward, where the"
                " write would be lost. Leave max_norm out, and scale the rows in on_train_batch_end."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name} has sparse=True, and compiled code only reduces dense gradients."
                " Leave sparse out, or use FSDP2Strategy, which replicates such a weight."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name} is a module of TorchScript, whose compiled code would read shards."
                " Use the module that was scripted or traced."
            )


def _share(blocks: Iterable[nn.Module], model: nn.Module) -> float:
    inside = {p for block in blocks for p in block.parameters()}
    return _bytes(inside) / max(_bytes(model.parameters()), 1)


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _start_alike(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Move buffers and replicated parameters to the device, with the values of rank 0."""
    found = [tensor for tensor in tensors if not tensor.is_meta]
    for tensor in found:
        tensor.data = tensor.data.to(device_of(mesh))
    give_first([tensor.detach() for tensor in found], group=mesh[DATA].get_group())


@torch.no_grad()
def _shard(parameter: nn.Parameter, gathering: Gathering) -> nn.Parameter:
    """Return this rank's part of rank 0's values; only one whole parameter at a time is on the device."""
    mesh, placements = gathering.mesh, gathering.placements(parameter)
    whole = parameter.detach()
    if not whole.is_meta:
        whole = whole.to(device_of(mesh)).contiguous()
        for dim in range(mesh.ndim):
            give_first([whole], group=mesh.get_group(dim))
    part = part_of(whole, mesh, placements).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    shard = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
    made = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    for name, mark in vars(parameter).items():  # for optimizers and initializers
        setattr(made, name, mark)
    return made


def _splits(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def _replace(
    module: nn.Module, shards: Mapping[nn.Parameter, nn.Parameter], *, casts: Collection[str] | None
) -> _Names:
    """Replace parameters by shards; return their names, whether they are cast, and whether they are split.

    Args:
        module: The module with the parameters.
        shards: The shard of each parameter.
        casts: The names of those that are cast; None: decided by dtype.
    """
    its: _Names = {}
    for name, p in module._parameters.items():
        if p is not None and p in shards:
            module._parameters[name] = shards[p]
            its[name] = _is_cast(module, p) if casts is None else name in casts, _splits(shards[p])
    return its


def _is_cast(module: nn.Module, parameter: nn.Parameter) -> bool:
    # Running statistics are float32, and kernels of norms require weights of that dtype; wider dtypes were chosen.
    is_low = parameter.is_floating_point() and parameter.dtype.itemsize <= 4
    return is_low and not isinstance(module, NormWithStatistics)


def _give_class(module: nn.Module, names: _Names, gathering: Gathering, classes: dict[Any, type[nn.Module]]) -> None:
    kind = type(module)
    key = (kind, tuple(names.items()))
    if key not in classes:
        classes[key] = _class_of(kind, names, gathering)
    module.__class__ = classes[key]


class _NoSubclass:
    """Skips the ``__init_subclass__`` of a module's class, which may be a registry."""

    def __init_subclass__(cls) -> None:
        pass


def _class_of(kind: type[nn.Module], names: _Names, gathering: Gathering) -> type[nn.Module]:
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        there = self._parameters.get(name)
        if name in names and isinstance(there, DTensor) and param is not None and not isinstance(param, DTensor):
            raise ValueError(
                f"{name} of a {kind.__name__} is sharded and was set to an unsharded tensor, which would be lost."
                " Write module.weight[:] = values within torch.no_grad(), or set it before fit."
            )
        kind.register_parameter(self, name, param)

    namespace: dict[str, Any] = {
        name: property(_reader(name, gathering, cast=cast, splits=splits)) for name, (cast, splits) in names.items()
    }
    namespace |= {
        "register_parameter": register_parameter,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        _MARK: gathering,
    }
    return type(kind.__name__, (_NoSubclass, kind), namespace)


_MARK = "_lightning_ups_gathering"


def _gathering_of(module: nn.Module) -> Gathering | None:
    return getattr(type(module), _MARK, None)


def _reader(name: str, gathering: Gathering, *, cast: bool, splits: bool) -> Callable[[nn.Module], Any]:
    def read(self: nn.Module) -> Any:
        if name not in self._parameters:
            raise AttributeError(f"{type(self).__name__} has no parameter {name!r}")
        shard = self._parameters[name]
        if not gathering.active or not isinstance(shard, DTensor):
            return shard
        whole = gathering.whole(shard, cast=cast, splits=splits)
        if torch.compiler.is_compiling():
            return whole
        if splits:
            gathering.note(f"{name} {tuple(shard.shape)}")
        return gathering.watched(whole, shard)

    return read


def _cast(
    blocks: Iterable[nn.Module],
    roots: list[nn.Module],
    options: ParametriseOptions,
    *,
    uncast: Collection[nn.Module],
    recurrent: Iterable[nn.Module],
) -> ExitStack:
    stack = ExitStack()  # never closed: the sharding stays
    if (low := options.module_dtype) is not None:
        recurrent = {module for module in recurrent if module not in uncast and not is_wide(module)}
        for module in recurrent:  # its weights are not replaced
            out = options.output_dtype if module in roots else low
            stack.enter_context(cast_around([module], inputs=torch.float32, outputs=out))
        roots = [root for root in roots if root not in recurrent and (root in uncast or not is_wide(root))]
        inner = [block for block in blocks if block not in {*roots, *uncast, *recurrent} and not is_wide(block)]
        stack.enter_context(cast_around(inner, inputs=low, outputs=None))
        stack.enter_context(cast_around(roots, inputs=low, outputs=options.output_dtype, given_as_is=uncast))
    return stack
