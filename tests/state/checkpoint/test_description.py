import json
from dataclasses import dataclass

from torch import nn

from lightning_ups.state.checkpoint.description import described


@dataclass
class Config:
    width: int = 3


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.part = nn.Linear(1, 1)
        self.part.config = Config(9)


class Odd(nn.Module):
    config = object()


def test_outermost_models_say_their_config():
    module = nn.ModuleDict({"model": Inner(), "odd": Odd(), "plain": nn.Linear(1, 1)})
    found = described(module)
    assert list(found) == ["model"]
    assert found["model"]["class"].endswith("test_description.Inner")
    assert json.loads(found["model"]["config"]) == {"width": 3}
