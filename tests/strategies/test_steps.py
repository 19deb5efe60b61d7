from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_ups.order import Context
from lightning_ups.strategies.steps import ShardStep


class _TwoLayers(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@dataclass(frozen=True)
class _Forgetful(ShardStep):
    part = "Forgetful"
    replicated: tuple[str, ...]

    def shard(self, module, blocks, mesh):
        return SimpleNamespace(
            layout=(("data_parallel", mesh),),
            blocks=tuple(blocks),
            share_of_blocks=0.5,
            replicated=dict.fromkeys(self.replicated),
        )

    def report(self, done, context):
        context.report.note(self.part, "and more", more=True)


def _context():
    return Context(device=torch.device("cpu"), mesh=2, training=True, precision=None)  # type: ignore[arg-type]


def test_a_parameter_that_is_left_out_is_an_error():
    module = _TwoLayers()
    names = [name for name, _ in module.named_parameters()]
    context = _context()
    with pytest.raises(RuntimeError, match=rf"Forgetful would never reduce .* of {names[-1]}\. .*report"):
        _Forgetful(None, tuple(names[:-1])).change(module, context)
    assert not context.report.parts


def test_a_sharding_says_what_it_made():
    module, context = _TwoLayers(), _context()
    names = [name for name, _ in module.named_parameters()]
    with _Forgetful(("body.*",), tuple(names)).change(module, context):
        pass
    part = context.report.parts["Forgetful"]
    assert part["lines"] == [
        "2 blocks as named, with 50% of the parameters' bytes, over data_parallel=2",
        f"whole on every device: {', '.join(names)}",
        "and more",
    ]
    facts = {key: value for key, value in part.items() if key != "lines"}
    assert facts == {
        "blocks": ["body.0", "body.1"],
        "mesh": {"data_parallel": 2},
        "share_of_blocks": 0.5,
        "replicated": names,
        "more": True,
    }
