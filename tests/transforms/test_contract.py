"""Every transform under the contract, and for each clause a transform that breaks it."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ups.transforms.cast import cast_around
from lightning_ups.transforms.compile import Compiler, compiled
from lightning_ups.transforms.forward import replaced_forward
from lightning_ups.transforms.kv_cache import without_kv_cache
from lightning_ups.transforms.recompute import memory_budget, recompute
from tests.transforms.contract import CLAUSES, Subject

# Raised while inductor's decompositions are imported, inside torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


def recomputed(save, model):
    return recompute(model.layers, save=save)


def compiled_by(backend, model):
    return compiled({f"layers.{i}": layer for i, layer in enumerate(model.layers)}, Compiler(backend=backend))


@contextmanager
def stacked(*changes):
    with ExitStack() as stack:
        yield [stack.enter_context(change) for change in changes]


def budgeted(budget, model):
    return stacked(memory_budget(model.layers, budget=budget), compiled_by("aot_eager", model))


def both(save, model):
    return stacked(recomputed(save, model), compiled_by("aot_eager", model))


def replaced(wrap, model):
    return stacked(*(replaced_forward(layer, wrap) for layer in model.layers))


def passed_on(inner):
    return lambda self, *args, **kwargs: inner(self, *args, **kwargs)


def passed_on_and_scaled(inner):
    return lambda self, *args, **kwargs: inner(self, *args, **kwargs).mul(1.5).div(1.5)


def cast(outputs, model):
    return cast_around([model], inputs=torch.float32, outputs=outputs)


def all_caches(model):
    return without_kv_cache(model)


def no_cache(model):
    return without_kv_cache(model.layers)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            name="replaced_forward", change=partial(replaced, passed_on), other=partial(replaced, passed_on_and_scaled)
        ),
        Subject(name="recompute nothing", change=partial(recomputed, "nothing"), other=partial(recomputed, "matmuls")),
        Subject(name="recompute matmuls", change=partial(recomputed, "matmuls"), other=partial(recomputed, "nothing")),
        Subject(
            name="recompute operators", change=partial(recomputed, ["aten.bmm"]), other=partial(recomputed, ["aten.mm"])
        ),
        Subject(
            name="compiled",
            change=partial(compiled_by, "aot_eager"),
            other=partial(compiled_by, "aot_eager_decomp_partition"),
            rtol=1e-5,
        ),
        Subject(name="recompute compiled", change=partial(both, "matmuls"), other=partial(both, "nothing"), rtol=1e-5),
        Subject(
            name="memory_budget",
            change=partial(budgeted, 0.5),
            other=partial(budgeted, 0.0),
            rtol=1e-5,
            excused={"models_share_no_state": "torch has one budget for a process, and a second is refused"},
        ),
        Subject(
            name="without_kv_cache",
            change=all_caches,
            other=no_cache,
            excused={
                "a_deepcopy_is_independent": "a copy of the model copies its config as it is; `generate` does not mind"
            },
        ),
        Subject(
            name="cast_around",
            change=partial(cast, torch.float32),
            other=partial(cast, torch.float64),
        ),
    )
}


def obey(clause, subject):
    if clause in subject.excused:
        pytest.skip(f"excused: {subject.excused[clause]}")
    CLAUSES[clause](subject)


ON_RANKS = "order_with_fully_shard_does_not_matter"


@pytest.mark.parametrize("clause", [clause for clause in CLAUSES if clause != ON_RANKS])
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_a_transform_obeys(subject, clause):
    obey(clause, subject)


def on_a_rank(name):
    CLAUSES[ON_RANKS](SUBJECTS[name])


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_transform_obeys_on_ranks(name, ranks):
    ranks(on_a_rank, name)


def test_an_excuse_names_a_clause():
    assert {clause for subject in SUBJECTS.values() for clause in subject.excused} <= set(CLAUSES)


# One mutant for each clause: a transform as one might well write it


def without_random_state(inner):
    def forward(self, *args, **kwargs):
        run = partial(inner, **kwargs)
        return checkpoint(run, self, *args, use_reentrant=False, preserve_rng_state=False)

    return forward


class Wrapper(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.wrapped = block

    def forward(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)


@contextmanager
def wrapped(model):
    blocks = [*model.layers]
    for i, block in enumerate(blocks):
        model.layers[i] = Wrapper(block)
    yield
    for i, block in enumerate(blocks):
        model.layers[i] = block


@contextmanager
def with_new_parameters(model):
    """What SimpleFSDP's parametrization did to frozen parameters."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(True)
    yield
    for p, flag in flags:
        p.requires_grad_(flag)


@contextmanager
def untied(model):
    before = [(layer.qkv, layer.qkv.weight) for layer in model.layers]
    for linear, weight in before:
        linear.weight = nn.Parameter(weight.detach().clone())
    yield
    for linear, weight in before:
        linear.weight = weight


FIRST_SETTINGS = {}


def with_the_first_settings(save, model):
    """A cache by class, which forgets that settings belong to the key."""
    return recompute(model.layers, save=FIRST_SETTINGS.setdefault(type(model), save))


@contextmanager
def closed_over(model):
    def closure(forward):
        return lambda *args, **kwargs: forward(*args, **kwargs)  # of the original, for ever

    for layer in model.layers:
        layer.forward = closure(layer.forward)
    yield
    for layer in model.layers:
        del layer.forward


@contextmanager
def undone_once_for_all(model):
    blocks = [*model.layers]
    for layer in blocks:
        layer.forward = without_saves(layer)
    yield
    for layer in blocks:
        vars(layer).pop("forward", None)  # whoever replaced it, and whatever was there before


def without_saves(layer):
    return partial(checkpoint, type(layer).forward.__get__(layer), use_reentrant=False)


@contextmanager
def with_a_hook_left_behind(model):
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: None)
    yield


def with_a_graph_break(inner):
    def forward(self, *args, **kwargs):
        torch._dynamo.graph_break()  # noqa: TID251
        return inner(self, *args, **kwargs)

    return forward


@contextmanager
def on_parameters_of_before(model):
    with ExitStack() as stack:
        for layer in model.layers:
            linear = layer.mlp[0]
            fixed = partial(nn.functional.linear, weight=linear.weight, bias=linear.bias)
            stack.enter_context(replaced_forward(linear, lambda inner, fixed=fixed: lambda self, x: fixed(x)))
        yield


def mutant(change, other=None):
    return Subject(name=getattr(change, "__name__", "mutant"), change=change, other=other or change)


MUTANTS = {
    "gradients_are_equal": mutant(partial(replaced, without_random_state)),
    "keys_of_the_state_dict_are_unchanged": mutant(wrapped),
    "requires_grad_is_unchanged": mutant(with_new_parameters),
    "ties_are_kept": mutant(untied),
    "models_share_no_state": mutant(
        partial(with_the_first_settings, "nothing"), other=partial(with_the_first_settings, "matmuls")
    ),
    "a_deepcopy_is_independent": mutant(closed_over),
    "it_may_be_nested_and_repeated": mutant(undone_once_for_all),
    "undo_restores_exactly": mutant(with_a_hook_left_behind),
    "it_compiles_as_one_graph": mutant(partial(replaced, with_a_graph_break)),
    ON_RANKS: mutant(on_parameters_of_before),
}


def test_each_clause_has_a_mutant():
    assert list(MUTANTS) == list(CLAUSES)


@pytest.mark.parametrize("clause", [clause for clause in CLAUSES if clause != ON_RANKS])
def test_a_mutant_breaks_the_clause(clause):
    with pytest.raises(AssertionError):
        CLAUSES[clause](MUTANTS[clause])


def break_it_on_a_rank():
    with pytest.raises(AssertionError):
        CLAUSES[ON_RANKS](MUTANTS[ON_RANKS])


def test_a_mutant_breaks_the_clause_on_ranks(ranks):
    ranks(break_it_on_a_rank)
