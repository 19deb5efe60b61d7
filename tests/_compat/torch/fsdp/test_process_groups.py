import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ups._compat.torch.fsdp import process_groups
from lightning_ups._compat.torch.fsdp.process_groups import prepare_nccl, shared_store


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
    asked = prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8)
    assert asked == {"NCCL_MAX_CTAS": "8"}
    assert os.environ["NCCL_MAX_CTAS"] == "8"
    assert prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8) == asked


def test_what_would_have_no_effect_is_refused(monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    with pytest.raises(ValueError, match=r"=8\) would have no effect.*environment has NCCL_MAX_CTAS=16"):
        prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8)
    monkeypatch.delenv("NCCL_MAX_CTAS")
    monkeypatch.setattr(process_groups.dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"=8\) would have no effect.*groups exist already"):
        prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8)
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    prepare_nccl(high_priority=False, flight_recorder=None, multiprocessors=8)  # as it was when groups were made


def test_this_torch_reads_the_names():

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    assert b"TORCH_FR_BUFFER_SIZE" in library.read_bytes()


def exchanged(prefix):
    store = shared_store(prefix)
    store.set(str(dist.get_rank()), f"from {dist.get_rank()}")
    return [store.get(str(rank)).decode() for rank in range(dist.get_world_size())]


def test_what_one_process_writes_the_others_read(ranks):
    assert ranks(exchanged, "a test") == ["from 0", "from 1"]
