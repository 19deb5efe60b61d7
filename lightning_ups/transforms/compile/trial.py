"""Trying a compiled graph on copies, forward and backward, before a run depends on it.

A graph is a function of tensors alone. To try it touches no module, no hook, no ``.grad``, no metric and no
statistics: what it may write to is copied, and what it draws is put back.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from lightning_ups._compat.torch.compile.cudagraph_trees import Demand
from lightning_ups._compat.torch.compile.dynamo import is_fake, is_static, is_written_to
from lightning_ups.transforms.compile.cuda_graphs import Slot
from lightning_ups.transforms.quoted import quoted

Run = Callable[..., Any]


class GraphError(RuntimeError):
    """A compiled graph failed when it ran for the first time."""


class Caller(Protocol):
    """On whose behalf a graph is made and run."""

    @property
    def is_settled(self) -> bool:
        """Whether it need not hear of a graph that has run before. Each run asks this."""
        ...

    @property
    def slot(self) -> Slot | None:
        """Where the graph that runs now is recorded. Then it holds for buffers where they lie, and not for copies."""
        ...

    def takes_slot(self, graph: fx.GraphModule, demand: Demand) -> bool:
        """Take a slot for ``graph``, and return whether there is one; without it the graph is launched."""
        ...

    def made_graph(self, *, from_cache: bool) -> None:
        """Hear that there is a new graph, and whether it came from inductor's caches."""

    def left_small_graph(self) -> None:
        """Count a new graph that runs as it was captured."""

    def wants_trial(self) -> bool:
        """Return whether a graph that runs for the first time is to be tried."""
        ...

    def wants_again(self, graph: fx.GraphModule) -> bool:
        """Return whether a graph is to be tried that has run before."""
        ...

    def tried(self, graph: fx.GraphModule, rehearsal: "Rehearsal") -> None:
        """Hear that a graph was tried, and run it once more if need be."""

    def not_tried(self, graph: fx.GraphModule, reason: str) -> None:
        """Hear why it is not."""

    def may_save(self, written: Tensor) -> bool:
        """Return whether the backward may read an input that the forward writes to in place."""
        ...

    def runs_graph(self, graph: fx.GraphModule) -> None:
        """Hear that a graph begins to run in earnest."""


def with_trial(run: Run, graph: fx.GraphModule, *, caller: Callable[[], Caller | None]) -> Run:
    """Return a function that does what ``run`` does, and before its first call tries it.

    Args:
        run: What a backend made of ``graph``.
        graph: What Dynamo captured.
        caller: Asked at each call on whose behalf it is.

    Raises:
        GraphError: At the first call, if the trial or the call fails. Running out of memory is no such failure.
    """
    new = True
    placeholders = graph.graph.find_nodes(op="placeholder")
    acts = _acts_outside(graph)

    def first_run(asker: Caller | None, args: Sequence[Any]) -> Any:
        nonlocal new
        new = False  # before the trial, which may call the graph: a checkpoint around the block recomputes it
        try:
            if asker is not None:
                tries = torch.is_grad_enabled() and (asker.wants_trial() or asker.wants_again(graph))
                reason = (acts or _try(run, graph, args, placeholders, asker)) if tries else None
                if reason is not None:
                    asker.not_tried(graph, reason)
                asker.runs_graph(graph)
            return run(*args)
        except (torch.OutOfMemoryError, GraphError):
            new = True
            raise
        except Exception as error:
            new = True  # Dynamo keeps the graph, and a later fit meets it again
            raise GraphError(quoted(error, whole=True)) from error

    def graph_run(*args: Any) -> Any:
        asker = caller()
        if not new and (asker is None or asker.is_settled):
            return run(*args)
        # A graph split for DDP is called with fakes once, for their strides.
        if (new or (asker is not None and asker.wants_again(graph))) and not any(map(is_fake, args)):
            return first_run(asker, args)
        if asker is not None:
            asker.runs_graph(graph)
        return run(*args)

    return graph_run


@contextmanager
def _random_kept() -> Iterator[None]:
    """Put the generators of the CPU and of the current device back when the context closes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=accelerator.type):
            yield


class Rehearsal:
    """A graph with copies of what it was called with, which can be run as often as one likes.

    Args:
        run: The graph.
        inputs: The copies.
    """

    def __init__(self, run: Run, inputs: Sequence[Any]) -> None:
        self.inputs = inputs
        self._run = run
        self._wanted = [value for value in inputs if _wants_grad(value)]

    def forward(self) -> list[Any]:
        """Run the forward and return its outputs."""
        outputs = self._run(*self.inputs)
        return [*outputs] if isinstance(outputs, (tuple, list)) else [outputs]

    def backward(self, outputs: Sequence[Any]) -> None:
        """Run the backward, once for each forward."""
        outputs = [value for value in outputs if _wants_grad(value)]
        if outputs and self._wanted:
            # As in a training step, where autocast ends before the backward.
            with no_autocast({value.device.type for value in self._wanted}):
                # What torch.autograd.grad returns lives on in a thread of the device for a moment after that, and what
                # is alive when a recording is asked for again makes torch record it anew.
                torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs], inputs=self._wanted)
            for value in self._wanted:
                value.grad = None


def _try(
    run: Run, graph: fx.GraphModule, args: Sequence[Any], placeholders: Sequence[fx.Node], asker: Caller
) -> str | None:
    """Run it on copies, forward and backward, or return why that cannot be."""
    if reason := _uncopyable(args, placeholders):
        return reason
    try:
        stay = _buffers(args, placeholders) if asker.slot is not None else []
        copies = _copies(args, placeholders, stay=stay)
        rehearsal, saved = Rehearsal(run, copies), set[int]()
        with (
            _values_kept(stay),
            _random_kept(),
            torch.autograd.set_detect_anomaly(mode=False),
            _own_saved_tensors(saved),
        ):
            outputs = rehearsal.forward()
            _refuse_stale(saved, args, copies, placeholders, asker)
            rehearsal.backward(outputs)
            asker.tried(graph, rehearsal)
    except torch.OutOfMemoryError:  # the call needs less, and raises itself if that is too much
        return "it ran out of memory"
    return None


def _buffers(args: Sequence[Any], placeholders: Sequence[fx.Node]) -> list[Tensor]:
    pairs = zip(args, placeholders, strict=True)
    return [
        arg for arg, node in pairs if is_static(node) and not isinstance(arg, nn.Parameter) and not arg.requires_grad
    ]


@contextmanager
def _values_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put the values of ``tensors`` back when the context closes."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        _put_back(before)


def _put_back(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in before:
            if not torch.equal(tensor, value):  # a needless write would break a backward that saved it
                tensor.copy_(value)


def _copies(args: Sequence[Any], placeholders: Sequence[fx.Node], *, stay: Sequence[Tensor]) -> list[Any]:
    storages: dict[int, torch.UntypedStorage] = {}
    staying = {id(tensor) for tensor in stay}
    return [
        copy_of(arg, written=is_written_to(node), storages=storages)
        if isinstance(arg, Tensor) and id(arg) not in staying
        else arg
        for arg, node in zip(args, placeholders, strict=True)
    ]


def copy_of(tensor: Tensor, *, written: bool, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return a copy of ``tensor`` that a trial may use; views of one storage stay views of one."""
    if isinstance(tensor, nn.Parameter) and not written:  # copying these would cost the memory of the weights
        return tensor.detach().requires_grad_(tensor.requires_grad)
    if _is_plain(tensor):
        # By storage, so that what overlaps still does, with the strides for which the graph was compiled.
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in storages or not address:
            storages[address] = storage.clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(storages[address], tensor.storage_offset(), tensor.size(), tensor.stride())
    else:
        copy = tensor.detach().clone()
    copy.requires_grad_(tensor.requires_grad)
    # Autograd forbids writing to a leaf: an activation that the graph writes to is none.
    return copy.clone() if written and tensor.requires_grad and not tensor.is_leaf else copy


def _uncopyable(args: Sequence[Any], placeholders: Sequence[fx.Node]) -> str | None:
    if len(args) != len(placeholders):
        return "its inputs are not those that were captured"
    for tensor, node in zip(args, placeholders, strict=True):
        if not isinstance(tensor, Tensor):
            continue
        if _is_distributed(tensor):
            return "its inputs are distributed tensors"
        if not _is_plain(tensor) and (tensor.is_quantized or tensor.is_sparse or tensor.is_nested):
            return f"its input {node.name} cannot be copied"
        if is_written_to(node) and tensor.requires_grad and not tensor.is_leaf and not _is_dense(tensor):
            return f"it writes to its input {node.name}, whose memory overlaps or has gaps"
    return None


def _acts_outside(graph: fx.GraphModule) -> str | None:
    """Return what a graph does besides computing, which a trial must not do; None: nothing."""
    # Where one rank compiles and another does not, a trial of its own would wait for the other for ever.
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            target = node.target
            name = str(getattr(target, "namespace", "") or getattr(target, "__module__", ""))
            if node.op == "call_function" and any(word in name for word in ("c10d", "symm_mem", "torch.distributed")):
                return "it communicates with other ranks"
            if name == "lightning_ups" and "watched" in str(target):
                return "what its blocks do is taken down, and a trial would be too"
    return None


def drawing(graph: fx.GraphModule) -> str | None:
    """Return the name of an operator in ``graph`` that draws random numbers, or None."""
    return next((name for name, node in _calls(graph) if _draws(name, node)), None)


def _calls(graph: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op.startswith("call_"):
                yield str(getattr(node.target, "__name__", node.target)), node


def _draws(name: str, node: fx.Node) -> bool:
    if name not in _RATES:
        return _DRAWING.search(name) is not None
    place, word, default = _RATES[name]
    given = dict(enumerate(node.args))
    in_training = node.kwargs.get("training", given.get(2, True) if name == "dropout" else True)
    return bool(in_training and node.kwargs.get(word, given.get(place, default)))


_DRAWING = re.compile(
    r"rand|dropout|binomial|bernoulli|multinomial|^normal(_|$)|log_normal|uniform|exponential|geometric|cauchy|gumbel"
    r"|standard_gamma|dirichlet|poisson$|rrelu|svd_lowrank|pca_lowrank|fractional_max_pool"
)
_RATES = {  # the place of the rate of dropout, its name, and what it is if it is not given
    "dropout": (1, "p", 0.5),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
    "multi_head_attention_forward": (10, "dropout_p", 0.0),
}


def writing_past_autograd(graph: fx.GraphModule) -> str | None:
    """Return the name of a call in ``graph`` by which it may write to what is not known to be written to, or None."""
    names = {"_get_data_attr", "_enter_inference_mode"}
    return next((name for name, _ in _calls(graph) if name in names), None)


def _is_distributed(tensor: Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and needed by few

    return isinstance(tensor, DTensor)


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _is_dense(tensor: Tensor) -> bool:
    return torch.empty_like(tensor).stride() == tensor.stride()


def _wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _own_saved_tensors(seen: set[int]) -> torch.autograd.graph.saved_tensors_hooks:
    # Hides hooks from outside, such as those of a checkpoint around the block, which would recompute it here and now.
    def pack(tensor: Tensor) -> Tensor:
        if _is_plain(tensor):
            seen.add(tensor.untyped_storage().data_ptr())
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _refuse_stale(
    saved: set[int], args: Sequence[Any], copies: Sequence[Any], placeholders: Sequence[fx.Node], asker: Caller
) -> None:
    """Raise if the backward would recompute from an input that the forward has overwritten."""
    for arg, copy, node in zip(args, copies, placeholders, strict=True):
        is_written = isinstance(copy, Tensor) and is_written_to(node) and _is_plain(copy)
        if is_written and copy.untyped_storage().data_ptr() in saved and not asker.may_save(arg):
            raise GraphError(f"it writes in place to {node.name}, from which ActivationCheckpoint would recompute it")


@contextmanager
def no_autocast(device_types: set[str]) -> Iterator[None]:
    """Turn autocast off on ``device_types`` and the CPU while the context is open."""
    with ExitStack() as stack:
        for device_type in device_types | {"cpu"}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


class State:
    """What a forward of ``module`` may change besides its outputs: generators, buffers, plain attributes.

    Modules, parameters and attributes that hold objects of other classes are taken as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random = torch.get_rng_state()
        self._accelerator = torch.accelerator.current_accelerator(check_available=True)
        if self._accelerator is not None:
            self._accelerator_random = torch.get_device_module(self._accelerator).get_rng_state()
        self._attributes = [(vars(m), {k: v for k, v in vars(m).items() if k != "_modules"}) for m in module.modules()]
        self._containers = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in (list, dict, set)
        ]
        tensors = [v for _, saved in self._containers for v in (saved.values() if isinstance(saved, dict) else saved)]
        tensors += [v for _, attributes in self._attributes for v in attributes.values()]
        self._tensors = [
            (t, t.detach().clone()) for t in tensors if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)
        ]

    def put_back(self) -> None:
        """Undo whatever has changed since."""
        torch.set_rng_state(self._random)
        if self._accelerator is not None:
            torch.get_device_module(self._accelerator).set_rng_state(self._accelerator_random)
        for attributes, before in self._attributes:
            for name in attributes.keys() - before.keys() - {"_modules"}:
                del attributes[name]
            attributes.update(before)
        for container, before in self._containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        _put_back(self._tensors)
