"""Whatever stock DDP trains on two ranks, FSDP2Strategy trains to the same losses, weights and buffers."""

import pytest

from tests.strategies.any_module import PARTS, PLACES, TRAITS, compare, plainly

# Each has once differed, failed or hung.
FOUND = {
    "parameters without elements": plainly(("empty", "list")),
    "sparse gradients": plainly(("sparse embedding", "list"), resume="own"),
    "rows that the forward writes": plainly(("embedding, norm", "list")),
    "a hook for a gradient": plainly(("gradient hook", "list")),
    "a hook for a gradient, accumulated": plainly(("gradient hook", "plain"), accumulate=2),
    "a manual backward that runs a forward again": plainly(("bare", "recomputed"), manual="toggle"),
    "a weight in hand before it is found": plainly(("symmetric", "nested")),
    "a penalty in validation": plainly(("bare", "plain"), traits=[("penalty", 1, 2)], validate=True),
    "a norm that keeps statistics, resumed": plainly(("batch norm", "plain"), resume="own"),
    "averages written between microbatches": plainly(
        ("bare", "plain"), traits=[("average", 1, 2)], accumulate=2, strategy={"sharding": "none"}
    ),
    "a block that has not run yet": plainly(("bare", "odd steps"), accumulate=2, precision="bf16-mixed"),
    "recurrent layers with one weight": plainly(("gru", "lists"), traits=[("tied", 2, 2)]),
    "double precision stays so": plainly(("double", "list"), precision="bf16-mixed"),
    "norms of complex and of double": plainly(("complex", "list"), ("mixed", "list"), clip=0.1),
    "a module's own state, resumed": plainly(("extra state", "list"), resume="own"),
    "frozen in several types, and unfrozen": plainly(("mixed", "list"), unfreeze=True),
    "optimizers toggled while the model's own group is gathered": plainly(
        ("bare", "plain"), traits=[("root", 0, 0), ("read", 0, 0)], manual="toggle", optimizers=2
    ),
    "marks for an optimizer's groups": plainly(("bare", "plain"), traits=[("marked", 0, 0)], groups=True),
    "saved after a manual step": plainly(("bare", "nested"), manual="toggle", resume="own"),
    "a checkpoint of its own around what gets other types": plainly(("bare", "recomputed"), precision="bf16-mixed"),
    "read outside once it is unfrozen": plainly(("bare", "plain"), traits=[("penalty", 0, 0)], unfreeze=True),
    "a list of state, resumed": plainly(("bare", "list"), optimizer="past", resume="own"),
    "a list of state, resumed from the background": plainly(
        ("bare", "list"), optimizer="past", resume="own", **{"async": True}
    ),
    "a list of state, resumed from DDP": plainly(("bare", "list"), optimizer="past", resume="from ddp"),
    "a list of state, resumed under DDP": plainly(("bare", "list"), optimizer="past", resume="to ddp"),
    "tuples of state, resumed": plainly(("bare", "list"), optimizer="pairs", resume="own"),
    "tuples of state, resumed from the background": plainly(
        ("bare", "list"), optimizer="pairs", resume="own", **{"async": True}
    ),
    "tuples of state, resumed from DDP": plainly(("bare", "list"), optimizer="pairs", resume="from ddp"),
    "tuples of state, resumed under DDP": plainly(("bare", "list"), optimizer="pairs", resume="to ddp"),
    "clipped in double precision": plainly(("bare", "list"), clip=0.1, double=True),
    "a hook for a gradient, unfrozen": plainly(("gradient hook", "plain"), unfreeze=True),
    "a hook for a gradient, unfrozen while it is gathered": plainly(
        ("gradient hook", "plain"), unfreeze=True, strategy={"sharding": "gradients"}
    ),
    "a hook for a gradient of what is read outside, unfrozen": plainly(
        ("gradient hook", "plain"), traits=[("read", 0, 0)], unfreeze=True
    ),
    "read outside, unfrozen in another type": plainly(
        ("bare", "list"), traits=[("read", 0, 0)], unfreeze=True, precision="bf16-mixed"
    ),
    "a buffer that first changes in a later step": plainly(("rebound", "odd steps")),
    "experts that only the last microbatch reaches": plainly(
        ("bare", "plain"), ("experts", "sequential"), accumulate=2, precision="bf16-mixed"
    ),
    "experts that microbatches reach by turns, copied": plainly(
        ("bare", "plain"), ("experts", "sequential"), accumulate=2, strategy={"sharding": "none", "sync": "every"}
    ),
    "a block that not every microbatch reaches, copied": plainly(
        ("bare", "plain"), ("bare", "odd steps"), accumulate=2, strategy={"sharding": "none", "sync": "every"}
    ),
    "objects that hold tensors": plainly(("objects", "plain")),
    "objects that hold tensors, accumulated": plainly(("objects", "plain"), accumulate=2),
    "types that only autocast mixes": plainly(("mixed", "list"), precision="bf16-mixed"),
    "unfrozen, sharded and whole": plainly(("bare", "plain"), ("scalars", "plain"), unfreeze=True),
}


EACH = {
    **{f"part: {kind}": plainly((kind, "list")) for kind in PARTS},
    **{f"place: {place}": plainly(("mlp", place)) for place in PLACES},
    **{f"trait: {trait}": plainly(("bare", "plain"), ("mlp", "list"), traits=[(trait, 0, 1)]) for trait in TRAITS},
    **{f"optimizer: {optimizer}": plainly(("mlp", "list"), optimizer=optimizer) for optimizer in ("adamw", "adamax")},
}


@pytest.mark.parametrize("name", [*FOUND, *(pytest.param(name, marks=pytest.mark.slow) for name in EACH)])
def test_what_ddp_trains_is_trained_the_same(ranks, tmp_path, name):
    assert ranks(compare, (FOUND | EACH)[name], tmp_path) == ""


def test_reads_of_two_types_are_gathered_in_groups_of_one_type(ranks, tmp_path):
    parts = plainly(("complex", "by method"), ("bare", "by method"))
    try:
        found = ranks(compare, parts, tmp_path)
    except AssertionError as error:  # FSDP2 of torch 2.11 has one group for each module
        found = str(error)
    assert found == "" or ("part1" in found and "install torch 2.13" in found)


@pytest.mark.parametrize(("optimizer", "manual"), [("lbfgs", None), ("adafactor", None), ("whole", "plain")])
def test_an_optimizer_that_needs_whole_parameters_is_right_or_says_so(ranks, tmp_path, optimizer, manual):
    try:
        found = ranks(compare, plainly(("bare", "plain"), optimizer=optimizer, manual=manual), tmp_path)
    except AssertionError as error:
        found = str(error)
    assert found == "" or "cannot step sharded parameters" in found
