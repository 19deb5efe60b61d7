import sys

import pytest
import torch

from lightning_ups._compat.environment import installed
from lightning_ups.commands.machine import packages as machine
from lightning_ups.commands.machine.packages import KNOWN, Known
from tests.commands.here import here


def test_this_machine_is_described():
    found = here()
    assert found.packages["torch"].version == torch.__version__  # noqa: TID251
    assert found.packages["lightning"].version == installed("lightning")
    assert found.packages["lightning"].loads
    assert found.threads == torch.get_num_threads()
    assert len(found.gpus) == torch.cuda.device_count()
    for known in KNOWN:
        assert (known.name in found.packages) >= (installed(known.name) is not None)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Packages of any behaviour."""
    for name, code in {
        "ups_good": "",
        "ups_bad": "import sys; print('noise'); raise ImportError('undefined symbol: _ZN5torch')",
        "ups_dead": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "ups_slow": "import time; time.sleep(60)",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {name: Known(name, name, "") for name in ("ups_good", "ups_bad", "ups_dead", "ups_slow", "ups_absent")}


def test_a_package_that_fails_to_load_says_why_and_harms_nothing(modules, capfd):
    loading = {name: machine._Loading(modules[name]) for name in ("ups_good", "ups_bad", "ups_dead")}
    found = {name: each.package() for name, each in loading.items()}
    assert found["ups_good"].loads
    assert found["ups_bad"].error == "ImportError: undefined symbol: _ZN5torch"
    assert found["ups_dead"].error == "importing it ends the interpreter by signal 11"
    assert "ups_good" not in sys.modules
    assert capfd.readouterr() == ("", "")
    assert not any(each._said.exists() for each in loading.values())


def test_a_package_that_hangs_is_left(modules):
    found = machine._Loading(modules["ups_slow"]).package(patience_s=0.5)
    assert "takes more than" in found.error
