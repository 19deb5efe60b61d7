import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

from lightning_ups._compat.torch import versions as compat

PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())


def torch_bound(operator):
    (torch,) = [r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == "torch"]
    (bound,) = [s for s in torch.specifier if s.operator == operator]
    return Version(bound.version).release[:2]


def test_the_oldest_torch_that_is_supported():
    assert torch_bound(">=") == (2, 11), "look for torch 2.11 in _compat: what is only for it can go"


def test_pyproject_allows_the_tested_torch_and_no_later_one():
    assert torch_bound("<") == compat.UNTESTED
    assert Version(version("torch")).release < compat.UNTESTED


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d])
def test_norms_with_statistics_have_one_class(norm):
    assert isinstance(norm(2), compat.NormWithStatistics)
    assert not isinstance(nn.GroupNorm(1, 2), compat.NormWithStatistics)


def test_the_logger_of_checkpoints_has_this_name():
    assert import_module(compat.CHECKPOINT_LOGGER).log.name == compat.CHECKPOINT_LOGGER


def test_what_is_exported_is_told_from_what_is_compiled():
    class Asking(nn.Module):
        def forward(self, x):
            return x + compat.is_exporting()

    asking, x = Asking(), torch.zeros(2)
    assert torch.compile(asking, backend="eager", fullgraph=True)(x).sum() == asking(x).sum() == 0
    for strict in (False, True):
        assert torch.export.export(asking, (x,), strict=strict).module()(x).sum() == 2
