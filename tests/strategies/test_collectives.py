"""How often devices talk in one optimizer step of four microbatches; the table of docs/guides/fsdp2.md."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ups.strategies import FSDP2Strategy
from tests.strategies import cases

NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce", "allreduce_": "copies"}


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Whole numbers are the question whether any rank got SIGTERM, over gloo, and no part of sharding.
        if func.namespace == "c10d" and _first(args).is_floating_point():
            self.seen[NAMES.get(func._schema.name.partition("::")[2], func._schema.name)] += 1
        return func(*args, **(kwargs or {}))


def _first(args):
    return args if isinstance(args, torch.Tensor) else _first(args[0])


class ByHand(cases.Configured):
    reshard = None

    def configure_model(self):
        if not hasattr(self, "head"):
            cases.Case.build(self)
            for module in (*self.layers, self.head):
                fully_shard(module, mesh=self.device_mesh["data_parallel"], reshard_after_forward=self.reshard)


class ByHandFreed(ByHand):
    reshard = True


def counted(strategy, tmp_path, size):
    by_hand = isinstance(strategy, type)
    cases.CASES["Counted"] = strategy if by_hand else cases.Case
    made = (
        ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1) if by_hand else FSDP2Strategy(**strategy)
    )
    steps = []

    def watch(model):
        model.on_train_epoch_start = count.seen.clear
        model.on_train_epoch_end = lambda: steps.append(dict(count.seen))

    with Count() as count:
        cases.train("Counted", tmp_path, strategy=made, ranks=size, steps=3, accumulate=4, prepare=watch)
    assert steps[1] == steps[2]
    # Lightning's own broadcast of SIGTERM, a step each, is not of the strategy.
    return {name: steps[2].get(name, 0) for name in NAMES.values()}


# Three groups: two blocks and a head, which is whole from its forward to its backward.
TABLE = {
    "stock ModelParallelStrategy, each group a root": (ByHand, (12, 12, 0)),
    "stock ModelParallelStrategy, reshard_after_forward=True": (ByHandFreed, (24, 12, 0)),
    "full, last": ({"sharding": "full", "sync": "last"}, (17, 3, 0)),
    "full, every": ({"sharding": "full", "sync": "every"}, (17, 12, 0)),
    "gradients, last": ({"sharding": "gradients", "sync": "last"}, (3, 3, 0)),
    "gradients, every": ({"sharding": "gradients", "sync": "every"}, (3, 12, 0)),
    "none, last": ({"sharding": "none", "sync": "last"}, (0, 0, 3)),
    "none, every": ({"sharding": "none", "sync": "every"}, (0, 0, 3)),
}


@pytest.mark.parametrize(("strategy", "expected"), TABLE.values(), ids=TABLE)
def test_collectives_of_an_optimizer_step(ranks, tmp_path, strategy, expected):
    assert tuple(ranks(counted, strategy, tmp_path, 2).values()) == expected


COPIES = {
    "full, last": ({"replicate_size": 2, "sync": "last"}, (17, 3, 3)),
    "full, every": ({"replicate_size": 2, "sync": "every"}, (17, 12, 3)),
}


@pytest.mark.parametrize(("strategy", "expected"), COPIES.values(), ids=COPIES)
def test_copies_are_reduced_once(four_ranks, tmp_path, strategy, expected):
    assert tuple(four_ranks(counted, strategy, tmp_path, 4).values()) == expected


def test_the_table_in_the_docs_is_this_one():
    text = Path("docs/guides/fsdp2.md").read_text()
    for name, (_, counts) in TABLE.items():
        assert f"| {name} | {' | '.join(map(str, counts))} |" in text
