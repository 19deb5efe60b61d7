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


def oldest_torch():
    return torch_bound(">=")


@pytest.mark.parametrize("shim", compat.SHIMS, ids=lambda s: s.name)
def test_no_shim_outlives_its_reason(shim):
    assert hasattr(compat, shim.name)
    assert shim.until > oldest_torch(), (
        f"torch {oldest_torch()} is the oldest we support: delete {shim.name} ({shim.why})"
    )


def test_oldest_torch_is_read_from_pyproject():
    assert oldest_torch() == (2, 11)


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
