import os
from pathlib import Path

import pytest

from lightning_ups._compat import nccl
from lightning_ups._compat.nccl import prepare_nccl


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("TORCH_NCCL", "TORCH_FR", "NCCL_"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def test_a_recorder_writes_where_it_is_told(tmp_path):
    prepare_nccl(high_priority=True, flight_recorder=tmp_path / "hangs")
    assert (tmp_path / "hangs").is_dir()
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "hangs" / "rank_")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"


def test_what_the_user_set_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    assert prepare_nccl(high_priority=True, flight_recorder=None) == {"TORCH_NCCL_HIGH_PRIORITY": "0"}
    assert prepare_nccl(high_priority=False, flight_recorder=None) == {}


def test_what_is_asked_of_groups_is_set_before_they_are_made():
    asked = prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8, copy_engines=True)
    assert asked == {"NCCL_MAX_CTAS": "8", "NCCL_CTA_POLICY": "2"}
    assert os.environ["NCCL_MAX_CTAS"] == "8"
    assert prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8, copy_engines=True) == asked


def test_what_would_have_no_effect_is_refused(monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    with pytest.raises(ValueError, match=r"says NCCL_MAX_CTAS=16.*ask for 8"):
        prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8)
    monkeypatch.setattr(nccl.dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"NCCL_CTA_POLICY=2 in the environment"):
        prepare_nccl(high_priority=False, flight_recorder=None, copy_engines=True)
    monkeypatch.setenv("NCCL_CTA_POLICY", "2")
    prepare_nccl(high_priority=False, flight_recorder=None, copy_engines=True)  # as it was when groups were made


def test_this_torch_reads_the_names():
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    assert b"TORCH_FR_BUFFER_SIZE" in library.read_bytes()


def test_groups_are_closed_once(monkeypatch):
    registered = []
    monkeypatch.setattr(nccl.atexit, "register", registered.append)
    nccl.destroy_at_exit.cache_clear()
    nccl.destroy_at_exit()
    nccl.destroy_at_exit()
    assert len(registered) == 1
    nccl.destroy_at_exit.cache_clear()
