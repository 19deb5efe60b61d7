"""Every transform under the contract."""

from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.transforms.activation_offload import offload_activations
from lightning_ups.transforms.casting.cast import cast_around, computing_in_float32
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
            change=partial(replaced, passed_on),
            other=partial(replaced, passed_on_and_scaled),
        ),
        Subject(
            name="recompute nothing",
            change=partial(recomputed, "nothing"),
            other=partial(recomputed, "matmuls"),
        ),
        Subject(
            name="recompute matmuls",
            change=partial(recomputed, "matmuls"),
            other=partial(recomputed, "nothing"),
        ),
        Subject(
            name="recompute operators",
            change=partial(recomputed, ["aten.bmm"]),
            other=partial(recomputed, ["aten.mm"]),
        ),
        Subject(
            name="compiled",
            change=partial(compiled_by, "aot_eager"),
            other=partial(compiled_by, "aot_eager_decomp_partition"),
            rtol=1e-5,
        ),
        Subject(
            name="recompute compiled",
            change=partial(both, "matmuls"),
            other=partial(both, "nothing"),
            rtol=1e-5,
        ),
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
        Subject(
            name="offload_activations",
            change=partial(offloaded, 0),
            other=partial(offloaded, 2048),
            shows=copied_bytes,
        ),
        Subject(
            name="in_float32",
            change=partial(in_float32, torch.float32),
            other=partial(in_float32, torch.bfloat16),
        ),
        Subject(
            name="in_float32 bfloat16",
            change=partial(in_float32, torch.bfloat16),
            other=partial(in_float32, torch.float32),
            rtol=1e-2,
        ),
        Subject(
            name="float8",
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
    if subject.name == "float8" and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    if clause in subject.excused:
        pytest.skip(f"excused: {subject.excused[clause]}")
    CLAUSES[clause](subject)


ON_RANKS = "order_with_fully_shard_does_not_matter"


QUICK = ("gradients_are_equal", "undo_restores_exactly")  # of what two subjects obey, each by itself
CASES = [
    pytest.param(
        subject,
        clause,
        marks=[pytest.mark.slow] * (name == "recompute compiled" and clause not in QUICK),
        id=f"{name}-{clause}",
    )
    for name, subject in SUBJECTS.items()
    for clause in CLAUSES
    if clause != ON_RANKS
]


@pytest.mark.parametrize(("subject", "clause"), CASES)
def test_a_transform_obeys(subject, clause):
    obey(clause, subject)


def on_a_rank(name):
    CLAUSES[ON_RANKS](SUBJECTS[name])


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_transform_obeys_on_ranks(name, ranks):
    ranks(on_a_rank, name)


def test_an_excuse_names_a_clause():
    assert {clause for subject in SUBJECTS.values() for clause in subject.excused} <= set(CLAUSES)
