"""Where Triton is not installed a stand-in shows what is asked of it; the interpreted tests of the kernels run it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_ups._compat.optional import packages as optional
from lightning_ups._compat.optional.triton import compiled, language, launching_on

MODULE = """
from lightning_ups._compat.optional.triton import language as tl

def kernel(source, BLOCK: tl.constexpr):
    return tl.name
"""


@pytest.fixture
def kernel():
    names = {}
    exec(MODULE, names)
    return names["kernel"]


@pytest.fixture
def stand_in(monkeypatch):
    triton = ModuleType("triton")
    triton.language = SimpleNamespace(name="Triton's language")
    triton.jit = lambda function, **options: (function, options)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(optional, "RequirementCache", lambda requirement: requirement == "triton")


@pytest.mark.usefixtures("stand_in")
def test_a_kernel_finds_the_language_where_it_is_written_once_it_is_compiled(kernel):
    with pytest.raises(AttributeError):
        kernel(None, 1)
    made, options = compiled(kernel, feature="A kernel", do_not_specialize=["source"])
    assert made is kernel
    assert kernel(None, 1) == "Triton's language"
    assert options == {"do_not_specialize": ["source"]}
    assert not hasattr(language, "name")  # of which other modules' annotations are made


def test_without_triton_the_feature_is_named(kernel, monkeypatch):
    monkeypatch.setattr(optional, "RequirementCache", lambda requirement: False)
    with pytest.raises(ModuleNotFoundError, match=r"^A kernel needs triton.*Run: pip install"):
        compiled(kernel, feature="A kernel")


def test_kernels_are_launched_on_their_gpu_and_interpreted_ones_anywhere(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device", chosen.append)
    launching_on(torch.device("cuda", 1))
    with launching_on(torch.device("cpu")):
        pass
    assert chosen == [torch.device("cuda", 1)]
