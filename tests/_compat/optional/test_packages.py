import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_ups._compat.optional import packages as optional
from lightning_ups._compat.optional.packages import compiled, has, language, launching_on, require


def test_missing_package_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=r"Float8 needs nowhere>=1.*pip install 'nowhere>=1'"):
        require("nowhere", requirement="nowhere>=1", extra="float8", feature="Float8")


def test_package_that_cannot_load_keeps_the_cause(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)  # import raises ImportError
    with pytest.raises(ImportError, match=r"could not load yaml.*Reinstall") as caught:
        require("yaml", requirement="PyYAML>=3", extra="cli", feature="The command line")
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_package_that_raises_whatever_it_likes_is_one_that_cannot_load(monkeypatch, tmp_path):
    (tmp_path / "ups_broken.py").write_text("raise RuntimeError('No kernels installed.')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"could not load ups_broken: No kernels installed\. This usually means"):
        require("ups_broken", requirement="torch>=2.0", extra="flash", feature="Attention")


def test_what_a_package_uses_that_is_deprecated_is_no_error(monkeypatch, tmp_path):
    source = "import warnings\nfor kind in (DeprecationWarning, FutureWarning): warnings.warn('old', kind)\n"
    (tmp_path / "ups_ageing.py").write_text(source + "loaded = True")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        assert require("ups_ageing", requirement="torch>=2.0", extra="flash", feature="Attention").loaded
        with pytest.raises(DeprecationWarning):
            warnings.warn("of others", DeprecationWarning, stacklevel=1)
    assert not shown


def test_what_is_loaded_does_not_let_python_forget_which_warnings_it_has_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            require("json", requirement="torch>=2.0", extra="x", feature="X")
            warnings.warn("once", UserWarning, stacklevel=1)
    assert len(shown) == 1


def test_what_is_installed_is_known_without_importing_it(monkeypatch):
    assert has("yaml")
    assert not has("nowhere")
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert has("wave")
    assert "wave" not in sys.modules


MODULE = """
from lightning_ups._compat.optional.packages import language as tl

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
