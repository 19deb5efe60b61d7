import sys
import warnings

import pytest

from lightning_ups._compat.optional.packages import has, require


def test_missing_package_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=r"Float8 needs nowhere>=1.*pip install 'lightning-ups\[float8\]'"):
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


def test_present_package_is_returned():
    assert require("json", requirement="torch>=2.0", extra="x", feature="X").__name__ == "json"


def test_what_is_installed_is_known_without_importing_it(monkeypatch):
    assert has("yaml")
    assert not has("nowhere")
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert has("wave")
    assert "wave" not in sys.modules
