"""What the strategies that shard have in common; what they do with it is tested by each."""

import inspect

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_ups  # noqa: F401  (registers the names)
from lightning_ups.order.placement import Placement
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy
from lightning_ups.strategies.sharding import ShardingStrategy, check_known, check_sharding, some

BOTH = (FSDP2Strategy, SimpleFSDPStrategy)


@pytest.mark.parametrize("strategy", BOTH)
def test_both_apply_the_one_order(strategy):
    assert issubclass(strategy, ShardingStrategy)
    placement = Placement.of(strategy)
    assert (placement.shards, placement.ours) == (True, True)
    assert placement.whole_graph is (strategy is SimpleFSDPStrategy)


def test_a_user_switches_by_changing_the_name():
    fsdp2, simple = (inspect.signature(strategy).parameters for strategy in BOTH)
    assert list(simple.keys() - fsdp2.keys()) == ["overlap"]
    for name in simple.keys() & fsdp2.keys():
        assert simple[name].default == fsdp2[name].default, name
    # What hooks do and a graph cannot, or needs no setting for.
    assert fsdp2.keys() - simple.keys() == {
        "prefetch", "offload", "outside", "unused_parameters", "tensor_parallel_size", "tensor_parallel_plan",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "strategy"), [("fsdp2", FSDP2Strategy), ("simple_fsdp", SimpleFSDPStrategy)])
def test_a_name_is_enough(name, strategy):
    assert type(StrategyRegistry.get(name)) is strategy


def test_choices_are_checked_in_the_name_of_the_strategy():
    check_known(object(), "x", 1, (1, 2))
    with pytest.raises(ValueError, match=r"object\(x=3\) is not a known choice.*Use one of \(1, 2\)"):
        check_known(object(), "x", 3, (1, 2))
    check_sharding(object(), "none", replicate_size=1, reshard_after_forward=False)
    with pytest.raises(ValueError, match=r"object\(sharding='none', replicate_size=2.*contradicts itself"):
        check_sharding(object(), "none", replicate_size=2, reshard_after_forward=None)


def test_many_names_are_cut():
    assert some(["a", "b"]) == "a, b"
    assert some([*"abcdefg"]) == "a, b, c, d, e and 2 more"
