import pytest
import torch
from torch.distributions import Distribution, Normal

from lightning_ups._compat.torch.distributions import without_checks


def test_nothing_is_checked_while_it_is_open(monkeypatch):
    bad = torch.tensor([-1.0])
    monkeypatch.setattr(Distribution, "_validate_args", True)  # Dynamo turns it off for good when it is first used
    with without_checks():
        Normal(torch.zeros(1), bad)
        Normal(torch.zeros(2, device="meta"), torch.ones(2, device="meta")).rsample()
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), bad)
