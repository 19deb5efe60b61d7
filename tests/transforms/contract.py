"""The contract of every transform: what a change of a module may do to it, and what it must leave alone.

A subject says how to make its change and what the change may cost in digits; each clause is a function that raises
AssertionError where the subject breaks it. A clause that cannot hold for a kind is excused by name, with the reason.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch._dynamo  # noqa: TID251
import torch._functorch.config  # noqa: TID251
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

Change = Callable[["Model"], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A transform under the contract.

    Args:
        name: What it is called.
        change: Returns the context in which the change holds.
        other: The same transform with other settings.
        rtol: How far numbers may be from those of before. 0: bit for bit.
        shows: What shows its settings, where `effects` does not.
        excused: Clauses that cannot hold, and why.
    """

    name: str
    change: Change
    other: Change
    rtol: float = 0.0
    shows: Callable[["Model"], int] = lambda model: 0
    excused: Mapping[str, str] = field(default_factory=dict)

    def effects(self, model: "Model") -> list[torch.Tensor]:
        """Return everything that shows which settings are in force."""
        return [*effects(model), torch.tensor(self.shows(model))]


@dataclass
class Config:
    use_cache: bool = True


class Block(nn.Module):
    """A block as transformers have it: attention and a perceptron, with dropout, and a keyword."""

    def __init__(self, size: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        # Written out, since FlopCounterMode fails at a fused one that a compiled backward recomputes.
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return x + scale * self.dropout(self.mlp(x))


class Model(nn.Module):
    """Blocks between an embedding and a head, which returns a loss; and a config, as models of transformers have."""

    def __init__(self, blocks: int = 2, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x).square().mean()


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8)


def grads(model: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the loss of one step, a random number drawn after it, and the gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(batch() if x is None else x)
    loss.sum().backward()
    return [loss.detach(), torch.rand(1), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor], *, rtol: float = 0.0) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10, equal_nan=True)


def saved_bytes(model: nn.Module, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the bytes that autograd saves in a forward, parameters left out, and what the forward returns."""
    seen: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = model(x)
    return sum(seen.values()), result


def effects(model: Model) -> list[torch.Tensor]:
    """Return what shows which settings are in force: numbers, bytes saved, FLOPs in backward, the config."""
    numbers = grads(model)
    saved, loss = saved_bytes(model, batch())
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return [*numbers, *map(torch.tensor, (saved, counter.get_total_flops(), model.config.use_cache))]


def state(module: nn.Module) -> dict[str, Any]:
    """Return everything that hangs on the modules and that a change might forget to take off."""
    return {name: (type(m), _frozen(vars(m))) for name, m in module.named_modules()}


def process() -> dict[str, Any]:
    """Return the settings of the process that a change might turn and leave turned."""
    return {
        "types": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
        "aot": torch._functorch.config.get_config_copy(),  # noqa: TID251
        "dynamo": torch._dynamo.config.get_config_copy(),  # noqa: TID251
    }


def hooks(module: nn.Module) -> dict[str, int]:
    """Return how many hooks of each kind there are."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return {kind: sum(len(getattr(m, kind)) for m in module.modules()) for kind in kinds}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    if isinstance(value, (torch.Tensor, nn.Module)) or callable(value):
        return id(value)
    return copy.copy(value)


# The clauses


def gradients_are_equal(subject: Subject) -> None:
    for dropout in (0.0, 0.5):
        expected = grads(Model(dropout=dropout))
        model = Model(dropout=dropout)
        with subject.change(model):
            for _ in range(2):
                assert_same(grads(model), expected, rtol=subject.rtol)
        assert_same(grads(model), expected)


def keys_of_the_state_dict_are_unchanged(subject: Subject) -> None:
    model, saved = Model(), Model().state_dict()
    shapes = {key: value.shape for key, value in saved.items()}
    with subject.change(model):
        assert {key: value.shape for key, value in model.state_dict().items()} == shapes
        model.load_state_dict(saved)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in Model().named_parameters()]
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes


def requires_grad_is_unchanged(subject: Subject) -> None:
    model = Model()
    model.layers[0].qkv.weight.requires_grad_(False)
    model.embed.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with subject.change(model):
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
        grads(model)
        assert model.layers[0].qkv.weight.grad is None
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def ties_are_kept(subject: Subject) -> None:
    def tied() -> Model:
        model = Model()
        model.layers[1].qkv.weight = model.layers[0].qkv.weight
        return model

    model, expected = tied(), grads(tied())
    with subject.change(model):
        assert model.layers[1].qkv.weight is model.layers[0].qkv.weight
        assert_same(grads(model), expected, rtol=subject.rtol)
        with torch.no_grad():
            model.layers[0].qkv.weight.zero_()
        assert not model.layers[1].qkv.weight.any()
    assert model.layers[1].qkv.weight is model.layers[0].qkv.weight


def models_share_no_state(subject: Subject) -> None:
    alone, before = [], process()
    for change in (subject.change, subject.other):
        model = Model()
        with change(model):
            alone.append(subject.effects(model))
    assert any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(*alone, strict=True)), "no difference shows"
    first, second, third = Model(), Model(), Model()
    with ExitStack() as outer:
        with subject.change(first):
            outer.enter_context(subject.other(second))  # undone later than the first
            assert_same(subject.effects(first), alone[0])
            assert_same(subject.effects(second), alone[1])
            assert_same(subject.effects(third), subject.effects(Model()))
        assert_same(subject.effects(second), alone[1])  # undoing one leaves the other
    plain = subject.effects(Model())
    for model in (first, second, third):
        assert_same(subject.effects(model), plain)
    assert process() == before  # although the first was not the last to be undone


def a_deepcopy_is_independent(subject: Subject) -> None:
    plain = subject.effects(Model())
    model = Model()
    with subject.change(model):
        grads(model)
        changed = subject.effects(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.embed.weight.zero_()
        assert_same(grads(twin), grads(Model()), rtol=subject.rtol)  # its own weights
        with torch.no_grad():
            twin.head.weight.zero_()
        assert model.head.weight.any()
    twin.load_state_dict(Model().state_dict())
    assert_same(subject.effects(twin), plain)  # nobody undoes a copy
    assert hooks(twin) == hooks(Model())
    with subject.change(twin):  # and it can be changed itself
        assert_same(subject.effects(twin), changed)
    assert_same(subject.effects(twin), plain)


def it_may_be_nested_and_repeated(subject: Subject) -> None:
    model, expected = Model(), grads(Model())
    before = state(model)
    with subject.change(model):
        once = subject.effects(model)
        with subject.change(model):
            assert_same(grads(model), expected, rtol=subject.rtol)
        assert_same(subject.effects(model), once)  # the outer one still holds
    assert state(model) == before
    with subject.change(model):
        assert_same(subject.effects(model), once)
    assert state(model) == before


def undo_restores_exactly(subject: Subject) -> None:
    class StopHereError(Exception):
        pass

    def fail(model: Model) -> None:
        with subject.change(model):
            grads(model)
            raise StopHereError

    model = Model()
    plain, before = subject.effects(model), (state(model), process())
    with subject.change(model):
        grads(model)
    assert (state(model), process()) == before
    assert_same(subject.effects(model), plain)
    with suppress(StopHereError):
        fail(model)
    assert (state(model), process()) == before
    assert_same(subject.effects(model), plain)


def it_compiles_as_one_graph(subject: Subject) -> None:
    model, expected = Model(), grads(Model())

    def run(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    # Dynamo keeps graphs, and its limit of them, by code object: one for each subject.
    own = FunctionType(run.__code__.replace(co_name=subject.name), globals(), "run", None, run.__closure__)
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    with subject.change(model), _no_error("it does not compile as one graph"):
        model.zero_grad()
        loss = compiled(batch())
        loss.backward()
    rtol = max(subject.rtol, 1e-5)  # a compiler reorders sums
    assert_same([loss.detach(), *(p.grad for p in model.parameters())], [expected[0], *expected[2:]], rtol=rtol)


def order_with_fully_shard_does_not_matter(subject: Subject) -> None:
    """Run on each of several ranks. A refusal is as good, if it explains itself."""
    for first in (True, False):
        model = Model()
        with ExitStack() as stack:
            if first:
                _shard(model)
            try:
                stack.enter_context(subject.change(model))
            except ValueError as error:
                if str(error).count(". ") < 2:
                    raise AssertionError("a refusal says what happened, why, and what to do") from error
                continue
            if not first:
                _shard(model)
            _is_that_of_the_whole(model, rtol=max(subject.rtol, 1e-5))


def _is_that_of_the_whole(model: Model, *, rtol: float) -> None:
    expected = grads(Model())
    for _ in range(2):
        with _no_error("it does not run on shards"):
            loss, _, *actual = grads(model)
        actual = [gradient.full_tensor() for gradient in actual]
        assert_same([loss, *actual], [expected[0], *expected[2:]], rtol=rtol)


@contextmanager
def _no_error(message: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise AssertionError(message) from error


def _shard(model: Model) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


CLAUSES: dict[str, Callable[[Subject], None]] = {
    clause.__name__: clause
    for clause in (
        gradients_are_equal,
        keys_of_the_state_dict_are_unchanged,
        requires_grad_is_unchanged,
        ties_are_kept,
        models_share_no_state,
        a_deepcopy_is_independent,
        it_may_be_nested_and_repeated,
        undo_restores_exactly,
        it_compiles_as_one_graph,
        order_with_fully_shard_does_not_matter,
    )
}
