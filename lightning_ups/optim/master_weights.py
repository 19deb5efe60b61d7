"""Computing with low-precision weights whose full-precision masters only the optimizer and the state dicts see.

Autocast casts every weight in every forward and keeps the copies for backward. Here the module itself holds the
low-precision copy, written once a step by the optimizer:

    masters = MasterWeights(module, dtype=torch.bfloat16)
    optimizer = MasteredOptimizer(AdamW(module.parameters(), lr=3e-4, fused=True), masters)
    ...
    masters.undo()

``module.parameters()`` stay the same objects, so that whatever holds them goes on to work; only their data changes.
State dicts of the module, and of any module around it, hold the masters under the same names, and load into them.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_ups._compat.torch.tensors.tensors import count_writes, counts_of_writes, memories_of, memory_of

FIRST_LOOKS, LOOK_EVERY = 3, 50  # steps at which writes that are not counted are looked for
TOLD_AFTER = 3  # steps in which others have written into a parameter
PIECE = 2**24  # elements that are compared at once: an embedding's own size again may not be free


class Writes:
    """Which parameters others may have written into since their masters were last written into them.

    Writes in place are seen by their count, and other memory in the place of a parameter's by its address. Writes
    through ``.data`` are not counted, and looked for by value: at the first steps and at every fiftieth, and, once one
    was found, at each.
    """

    def __init__(self) -> None:
        # By the parameters' ids: hashing a tensor is Python's, and slow.
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._looks, self._looking, self._by_value = 0, False, False
        self._flags: list[Tensor] = []
        self._found: tuple[Tensor, torch.cuda.Event | None] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._looks += 1
        self._by_value = self._by_value or self._found_before()
        self._looking = self._by_value or self._looks <= FIRST_LOOKS or self._looks % LOOK_EVERY == 0

    def possible(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is to be compared with its master."""
        return self._looking or self._shows(parameter)

    def possible_among(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of ``parameters`` that are to be compared with their masters."""
        if self._looking:
            return [*parameters]
        keys = [*map(id, parameters)]
        counts, places = map(self._counts.__getitem__, keys), map(self._places.__getitem__, keys)
        if [*counts] == counts_of_writes(parameters) and [*places] == memories_of(parameters):
            return []
        return [*filter(self._shows, parameters)]

    def counted(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` was written in place, which torch counts."""
        return count_writes(parameter) != self._counts[id(parameter)]

    def found(self, parameter: nn.Parameter, written: Tensor) -> None:
        """Note whether any element of ``parameter`` was found to be ``written``."""
        if not (self._by_value or self._shows(parameter)):
            self._flags.append(written)

    def end(self) -> None:
        """End what `begin` began; what was found without being counted is known to later steps."""
        if self._flags:
            self._by_value = self._by_value or self._found_before()
            device = self._flags[0].device
            self._found = _sent(torch.stack([flag.to(device) for flag in self._flags]).any())
            self._flags.clear()

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take what ``parameters`` hold now for written by their masters."""
        noted = [*parameters]
        keys = [*map(id, noted)]
        self._counts.update(zip(keys, counts_of_writes(noted), strict=True))
        self._places.update(zip(keys, memories_of(noted), strict=True))

    def _shows(self, parameter: nn.Parameter) -> bool:
        return self.counted(parameter) or memory_of(parameter) != self._places[id(parameter)]

    def _found_before(self) -> bool:
        # Of the look before: its event has passed, or is about to, and what was queued since is not waited for.
        found, self._found = self._found, None
        if found is None:
            return False
        flag, event = found
        if event is not None:
            event.synchronize()
        return bool(flag)


def taken_over(master: Tensor, low: Tensor) -> Tensor:
    """Bring into ``master`` what others have written into ``low``, its rounded copy; return whether they have.

    A master on the host is compared where its copy is, which takes a fraction of the time.
    """
    flat = all(type(each) in (Tensor, nn.Parameter) and each.is_contiguous() for each in (master, low))
    pieces = [(each.view(-1).split(PIECE) if flat else [each]) for each in (master, low)]
    return torch.stack([_piece_taken_over(*pair) for pair in zip(*pieces, strict=True)]).any()


def _piece_taken_over(master: Tensor, low: Tensor) -> Tensor:
    there = master.to(low.device)
    written = low != there.to(low.dtype)
    if there is master or written.any():
        master.copy_(torch.where(written, low.to(master.dtype), there))
    return written.any()


def nothing_to_settle() -> None:
    """Do nothing: masters are where they are read, and not on their way from or to another device."""


class MasterWeights:
    """The full-precision parameters behind a module that computes in ``dtype``.

    Parameters of float32 are turned into ``dtype`` in place, but for those of modules that keep floating-point
    statistics beside their weights, such as BatchNorm, whose kernels want both of one kind. Tied parameters have one
    master. Buffers stay as they are. A copy or a pickle of the module has full-precision parameters of its own.

    Others may write into the parameters: a copy, a clamp, a reset. What they wrote is taken over by the masters before
    the next step, and before a state dict is made; `Writes` says how they are seen. It is computed and rounded in
    ``dtype``, where small changes are lost, so that a warning names parameters that are written repeatedly.

    Args:
        module: The module, with its float32 parameters.
        dtype: The type to compute in.
        leave: Modules in it whose parameters stay as they are.
        tell: Called with a warning about parameters that others write repeatedly.

    Raises:
        ValueError: If a parameter has no shape yet.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype,
        leave: Collection[nn.Module] = (),
        tell: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.dtype, self._tell = dtype, tell
        _refuse_lazy(module)
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        self.accumulates = True  # whether a reduction adds to what there is: else parameters keep it themselves
        self.reduced: set[nn.Parameter] = set()  # since the last step, by a wrapper, which counts unused ones as zero
        convertible = _convertible(module, leave)
        _refuse_scripted(module, convertible)
        for parameter in convertible:
            self.of[parameter] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.to(dtype)
            _copy_as(parameter, self.of[parameter])
        self.writes = Writes()
        self._names = {id(p): name for name, p in module.named_parameters() if p in self.of}
        self._loaded = set[int]()  # since the last step, from a state dict
        self._written: dict[int, int] | None = {}  # in how many steps by others; None: the warning was given
        self.settle: Callable[[], None] = nothing_to_settle  # called before masters are read
        self.writes.note(self.of)
        self._handles: list[RemovableHandle] = []
        for part in module.modules():  # each, since a part of it may be saved alone
            if part is module or any(p in self.of for p in part.parameters(recurse=False)):
                self._handles += [
                    part.register_state_dict_post_hook(partial(self._show, whole=part is module)),
                    part.register_load_state_dict_pre_hook(self._read),
                ]

    def to_device(self) -> None:
        """Bring each master to where its parameter has gone."""
        for parameter, master in self.of.items():
            if master.device != parameter.device:
                master.data = master.data.to(parameter.device)
        self.writes.note(self.of)

    @torch.no_grad()
    def take_over(self, *, by_value: bool = False) -> None:
        """Bring into the masters what others have written into the parameters since they were last written here."""
        self.settle()
        if not by_value:
            self.writes.begin()
        compared = [*self.of] if by_value else self.writes.possible_among(self.of)
        if not compared:
            return
        self._note_others(filter(self.writes.counted, compared))
        for parameter in compared:
            self.writes.found(parameter, taken_over(self.of[parameter].detach(), parameter.detach()))
        self.writes.end()
        self.writes.note(compared)

    def _note_others(self, written: Iterable[nn.Parameter]) -> None:
        if self._written is None:
            return
        for key in {id(parameter) for parameter in written} - self._loaded:
            self._written[key] = self._written.get(key, 0) + 1
        self._loaded.clear()
        names = [self._names[key] for key, steps in self._written.items() if steps >= TOLD_AFTER]
        if not names:
            return
        self._written = None
        low = str(self.dtype).removeprefix("torch.")
        self._tell(
            f"{len(names)} parameters, {names[0]} among them, are written in place in one step after another, beside"
            f" the optimizer. Written values are rounded to {low}, which loses changes smaller than about 1/256 of a"
            " value, such as those of a moving average. Set weights='autocast' in the precision, or in_float32="
            f"['{names[0].rpartition('.')[0] or names[0]}']."
        )

    def write(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Write the masters into the low-precision parameters."""
        mine = [p for p in (self.of if parameters is None else parameters) if p in self.of]
        if mine:
            with torch.no_grad():
                torch._foreach_copy_([*mine], [self.of[p] for p in mine])
            self.writes.note(mine)

    def undo(self) -> None:
        """Give the module its full-precision parameters back, where it is now, and forget it."""
        self.take_over(by_value=True)
        for handle in self._handles:
            handle.remove()
        for parameter, master in self.of.items():
            parameter.grad = None  # of the low precision, which a full-precision parameter cannot have
            parameter.data = master.data.to(parameter.device)
            vars(parameter).pop("__deepcopy__", None)
            vars(parameter).pop("__reduce_ex__", None)
        self.of.clear()

    def __reduce__(self) -> Any:
        # What is copied with the module has nothing to do there.
        return partial(MasterWeights, dtype=self.dtype), (nn.Identity(),)

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any, *, whole: bool) -> None:
        if whole or not prefix:  # and not in each of its parts, too; what these show are views
            self.take_over(by_value=True)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in self.of and prefix + name in state:
                # Detached, as torch's own entries are; a view of the master, so that nothing is copied.
                state[prefix + name] = self.of[parameter].detach()

    def _read(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        self.settle()
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                value = state.get(prefix + name)
                if parameter in self.of and isinstance(value, Tensor) and value.shape == parameter.shape:
                    self.of[parameter].copy_(value)
                    self._loaded.add(id(parameter))


def _sent(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if not flag.is_cuda:
        return flag, None
    host, event = flag.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    return host, event


def _refuse_lazy(module: nn.Module) -> None:
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise ValueError(
            f"The parameter {lazy[0]} has no shape yet, and is to have a master: it belongs to a lazy module."
            " Run one batch through the module before fit, or give it its sizes, or set weights='autocast'."
        )


def _refuse_scripted(module: nn.Module, convertible: Collection[nn.Parameter]) -> None:
    chosen = {*convertible}
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and not chosen.isdisjoint(part.parameters()):
            raise ValueError(
                f"{name} is a module of TorchScript, whose state dict would have weights in low precision."
                " Use the module that was scripted, or set weights='autocast' in the precision."
            )


def _convertible(module: nn.Module, leave: Collection[nn.Module]) -> list[nn.Parameter]:
    keep = {p for m in module.modules() if m in leave or has_statistics(m) for p in m.parameters(recurse=False)}
    return [p for p in module.parameters() if p.dtype is torch.float32 and p not in keep]


def has_statistics(module: nn.Module) -> bool:
    """Return whether ``module`` keeps floating-point numbers beside its weights that belong into its state dict.

    Those that do not are constants, such as what Gemma multiplies its embeddings by.
    """
    kept = (buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set)
    return any(buffer.is_floating_point() for buffer in kept if buffer is not None)


def _copy_as(parameter: nn.Parameter, master: nn.Parameter) -> None:
    """Let a copy and a pickle of ``parameter`` be those of its master: nobody would undo the low precision there."""

    def like(value: nn.Parameter) -> nn.Parameter:
        value.requires_grad_(parameter.requires_grad)  # it may have been frozen since
        if value.device != parameter.device:
            return nn.Parameter(value.data.to(parameter.device), requires_grad=value.requires_grad)
        return value

    # Both are looked up on the object, and not on its class, by `copy` and `pickle`.
    vars(parameter).update(
        __deepcopy__=lambda memo: copy.deepcopy(like(master), memo),
        __reduce_ex__=lambda protocol: like(master).__reduce_ex__(protocol),
    )
