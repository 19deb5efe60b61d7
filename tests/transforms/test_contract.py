"""Every transform under the contract, and for each clause a transform that breaks it."""

import inspect
import pkgutil
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from traceback import extract_tb
from typing import get_args

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_ups import insight, state, transforms
from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.casting.cast import cast_around
from lightning_ups.transforms.casting.in_float32 import computing_in_float32
from lightning_ups.transforms.compile.compiler import Compiler, compiled
from lightning_ups.transforms.float8.convert import convert_to_float8
from lightning_ups.transforms.forward import replaced_forward
from lightning_ups.transforms.kv_cache import without_kv_cache
from lightning_ups.transforms.recompute.wrapping import memory_budget, recompute
from tests.transforms.contract import CLAUSES, Subject, batch

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


def offloaded(min_bytes, model):
    return offload_activations(model.layers, min_bytes=min_bytes, device=torch.device("cpu"))


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied, to the host and back."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def copied_bytes(model):
    with Copies() as copies:
        model(batch()).backward()
    return copies.nbytes


def in_float32(outputs, model):
    parts = computing_in_float32([*model.layers, model.head], outputs=outputs)
    return stacked(parts, cast(torch.float32, model))  # the loss is compared with one in float32


@contextmanager
def in_float8(recipe, model):
    done = convert_to_float8(model, recipe=recipe, emulate=True)
    try:
        yield done
    finally:
        done.undo()


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            name="replaced_forward",
            of=(replaced_forward,),
            change=partial(replaced, passed_on),
            other=partial(replaced, passed_on_and_scaled),
        ),
        Subject(
            name="recompute nothing",
            of=(recompute,),
            change=partial(recomputed, "nothing"),
            other=partial(recomputed, "matmuls"),
        ),
        Subject(
            name="recompute matmuls",
            of=(recompute,),
            change=partial(recomputed, "matmuls"),
            other=partial(recomputed, "nothing"),
        ),
        Subject(
            name="recompute operators",
            of=(recompute,),
            change=partial(recomputed, ["aten.bmm"]),
            other=partial(recomputed, ["aten.mm"]),
        ),
        Subject(
            name="compiled",
            of=(compiled,),
            change=partial(compiled_by, "aot_eager"),
            other=partial(compiled_by, "aot_eager_decomp_partition"),
            rtol=1e-5,
        ),
        Subject(
            name="recompute compiled",
            of=(recompute, compiled),
            change=partial(both, "matmuls"),
            other=partial(both, "nothing"),
            rtol=1e-5,
        ),
        Subject(
            name="memory_budget",
            of=(memory_budget,),
            change=partial(budgeted, 0.5),
            other=partial(budgeted, 0.0),
            rtol=1e-5,
            excused={"models_share_no_state": "torch has one budget for a process, and a second is refused"},
        ),
        Subject(
            name="without_kv_cache",
            of=(without_kv_cache,),
            change=all_caches,
            other=no_cache,
            excused={
                "a_deepcopy_is_independent": "a copy of the model copies its config as it is; `generate` does not mind"
            },
        ),
        Subject(
            name="cast_around",
            of=(cast_around,),
            change=partial(cast, torch.float32),
            other=partial(cast, torch.float64),
        ),
        Subject(
            name="offload_activations",
            of=(offload_activations,),
            change=partial(offloaded, 0),
            other=partial(offloaded, 2048),
            shows=copied_bytes,
        ),
        Subject(
            name="in_float32",
            of=(computing_in_float32,),
            change=partial(in_float32, torch.float32),
            other=partial(in_float32, torch.bfloat16),
        ),
        Subject(
            name="in_float32 bfloat16",
            of=(computing_in_float32,),
            change=partial(in_float32, torch.bfloat16),
            other=partial(in_float32, torch.float32),
            rtol=1e-2,
        ),
        Subject(
            name="float8",
            of=(convert_to_float8,),
            change=partial(in_float8, "tensorwise"),
            other=partial(in_float8, "rowwise"),
            rtol=0.1,  # of numbers of three bits
            excused={
                "a_deepcopy_is_independent": "a copy of layers of another class has that class: it stays in float8",
                "it_may_be_nested_and_repeated": "what is converted is converted once: a second conversion is refused",
            },
        ),
    )
}


def obey(clause, subject):
    if convert_to_float8 in subject.of and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
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


# Nothing that changes a module is left out

EXCEPTIONS = {
    "WatchedReads": "follows FSDP through one step, of a module that stays sharded",
    "as_compiled": "of a twin on fake tensors, which is thrown away",
    "computed_by": "is `replaced_forward` for modules of Transformer Engine, and a part of `convert_to_te`",
    "cut_for_one_device": "of a twin on fake tensors, which is thrown away",
    "explaining_torch_func": "changes nothing but the words of an error",
    "gather_with_blocks": "moves hooks of FSDP in a module that stays sharded, and back: `test_gathered_together`",
    "keep_gathered": "sets when FSDP frees what it gathered, of a module that stays sharded",
    "replace_methods": "changes a copy on fake tensors, which is dropped after the dry run",
    "kv_cache_as_before": "shows configs as they were, while they are written down",
    "load": "fills weights from a checkpoint, for good",
    "load_optimizers": "fills the state of optimizers from a checkpoint",
    "load_weights": "fills weights from a checkpoint, for good",
    "original_forwards": "takes off for a while what `replaced_forward` has put in place: `order/test_untrained`",
    "parallelize": "splits a module for good: sharding has no undo and no deepcopy",
    "parametrise": "shards a module for good: sharding has no undo and no deepcopy",
    "remember": "keeps a note of what was done, which a copy does not have",
    "restore": "fills an optimizer's state from a checkpoint, for good",
    "rounded_linears": "is `replaced_forward` with numbers that shall differ: `verify` measures by how much",
    "save_whole": "changes nothing: it writes a file",
    "shard": "shards a module for good: sharding has no undo and no deepcopy",
    "shard_alike": "makes shards of the parameters of a copy, for good",
    "shards_of": "says what reads of parameters give, of a module that stays sharded",
    "show_plain_weight": "is a part of `convert_to_float8` with all_gather, whose weights are other Parameters",
    "telling_rounded_losses": "changes nothing: it looks, and tells",
}
QUESTIONS = ("Return", "Yield", "Count", "Raise", "Say so if")


def takes_modules(annotation):
    if inspect.isclass(annotation) and issubclass(annotation, (nn.Module, FSDPModule)):
        return True
    return any(map(takes_modules, get_args(annotation)))


def changes_modules(what):
    """Return whether ``what`` is given modules and is a context, or does by its docstring more than to answer."""
    is_context = hasattr(what, "__enter__") if inspect.isclass(what) else hasattr(what, "__wrapped__")
    if not is_context and (not inspect.isfunction(what) or inspect.getdoc(what).startswith(QUESTIONS)):
        return False
    return any(takes_modules(parameter.annotation) for parameter in inspect.signature(what).parameters.values())


def changing():
    found = {}
    rooms = (transforms, insight, state)
    for info in (info for room in rooms for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")):
        module = import_module(info.name)
        exported = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        own = {name: what for name, what in exported.items() if getattr(what, "__module__", None) == info.name}
        found |= {what: name for name, what in own.items() if changes_modules(what)}
    return found


def test_all_that_changes_modules_is_under_the_contract_or_excepted():
    from tests.transforms.te.test_convert import SUBJECTS as OF_TE

    obeying = {function for subject in (*SUBJECTS.values(), *OF_TE.values()) for function in subject.of}
    found = changing()
    assert sorted(found[what] for what in found.keys() - obeying) == sorted(EXCEPTIONS)
    assert obeying <= found.keys()


def test_each_subject_says_what_it_is_about():
    assert [name for name, subject in SUBJECTS.items() if not subject.of] == []


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


SETTINGS = {}


def as_the_settings_say(inner):
    def forward(self, *args, **kwargs):
        run = partial(inner, **kwargs)
        return checkpoint(run, self, *args, use_reentrant=False) if SETTINGS["recompute"] else run(self, *args)

    return forward


@contextmanager
def with_settings_of_the_process(recompute, model):
    """Right as long as there is one model."""
    SETTINGS["recompute"] = recompute
    with replaced(as_the_settings_say, model):
        yield


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


# For each clause its mutant, and the line or the message where it shall fail: not by a fault of another kind.
MUTANTS = {
    "gradients_are_equal": (
        mutant(partial(replaced, without_random_state)),
        "assert_same(grads(model), expected, rtol=subject.rtol)",
    ),
    "keys_of_the_state_dict_are_unchanged": (mutant(wrapped), "in model.state_dict().items()} == shapes"),
    "requires_grad_is_unchanged": (mutant(with_new_parameters), "in model.named_parameters()} == before"),
    "ties_are_kept": (mutant(untied), "model.layers[1].qkv.weight is model.layers[0].qkv.weight"),
    "models_share_no_state": (
        mutant(partial(with_settings_of_the_process, True), other=partial(with_settings_of_the_process, False)),
        "assert_same(subject.effects(first), alone[0])",
    ),
    "a_deepcopy_is_independent": (mutant(closed_over), "# its own weights"),
    "it_may_be_nested_and_repeated": (mutant(undone_once_for_all), "# the outer one still holds"),
    "undo_restores_exactly": (mutant(with_a_hook_left_behind), "assert (state(model), process()) == before"),
    "it_compiles_as_one_graph": (mutant(partial(replaced, with_a_graph_break)), "it does not compile as one graph"),
    ON_RANKS: (mutant(on_parameters_of_before), "it does not run on shards"),
}


def break_it(clause):
    subject, reason = MUTANTS[clause]
    with pytest.raises(AssertionError) as caught:
        CLAUSES[clause](subject)
    lines = [frame.line for frame in extract_tb(caught.tb) if frame.name == clause]
    assert reason in f"{lines[-1]} {caught.value}"


def test_each_clause_has_a_mutant():
    assert list(MUTANTS) == list(CLAUSES)


@pytest.mark.parametrize("clause", [clause for clause in CLAUSES if clause != ON_RANKS])
def test_a_mutant_breaks_the_clause(clause):
    break_it(clause)


def test_a_mutant_breaks_the_clause_on_ranks(ranks):
    ranks(break_it, ON_RANKS)
