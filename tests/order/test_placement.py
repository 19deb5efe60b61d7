import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from lightning_ups.order import Placement
from lightning_ups.strategies import FSDP2Strategy, SimpleFSDPStrategy


@pytest.mark.parametrize(
    ("strategy", "shards", "ours"),
    [
        (SingleDeviceStrategy, False, False),
        (DDPStrategy, False, False),
        (DeepSpeedStrategy, True, False),
        (FSDPStrategy, True, False),
        (ModelParallelStrategy, True, False),
        (FSDP2Strategy, True, True),
    ],
)
def test_where_parameters_are(strategy, shards, ours):
    assert Placement.of(strategy) == Placement(name=strategy.__name__, shards=shards, ours=ours)


def test_a_strategy_that_is_compiled_with_the_model_says_so():
    assert Placement.of(SimpleFSDPStrategy).whole_graph
    assert Placement.of(SimpleFSDPStrategy()).whole_graph


SHARDED = {
    "sharding": "full",
    "replicate_size": 1,
    "reshard_after_forward": True,
    "offload": False,
    "tensor_parallel_size": 1,
    "blocks": None,
}


def test_a_strategy_that_is_made_says_how_it_divides_the_module():
    split = FSDP2Strategy(tensor_parallel_size=2, tensor_parallel_plan="gpt")
    assert Placement.of(split).settings == SHARDED | {
        "tensor_parallel_size": 2,
        "tensor_parallel_plan": "gpt",
        "outside": (),
    }
    assert Placement.of(SimpleFSDPStrategy(sharding="gradients", blocks=["layers.*"])).settings == SHARDED | {
        "sharding": "gradients",
        "reshard_after_forward": False,
        "blocks": ("layers.*",),
    }
    assert Placement.of(FSDP2Strategy).settings == {}
    assert Placement.of(DDPStrategy()).settings == {}
