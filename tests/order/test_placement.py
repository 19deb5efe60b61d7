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
