"""What is read of DCP's metadata, compared with what unpickling it gives."""

import gc
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lightning_ups.state.checkpoint import Saver, dcp_metadata
from lightning_ups.state.checkpoint.dcp_metadata import TENSORS, as_json, read_metadata
from lightning_ups.state.checkpoint.io.reading import FolderReader, read_into


@pytest.fixture
def folder(tmp_path):
    tensors = {"a": torch.ones(2, 300), "b": {"c": torch.tensor(1, dtype=torch.int8)}, "e": torch.ones(0)}
    state = tensors | {"lr": 0.1, "é": ["x"], "many": {str(n): torch.ones(n) for n in range(300)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5, "json"])
def test_is_what_unpickling_it_gives(folder, protocol):
    path = folder / ".metadata"
    expected = pickle.loads(path.read_bytes())
    if protocol == "json":
        path = folder / TENSORS
        path.write_bytes(as_json(expected, expected.storage_data))
    else:
        path.write_bytes(pickle.dumps(expected, protocol=protocol))
    found = read_metadata(path)
    assert len(found.storage_data) == 305
    for name in ("state_dict_metadata", "planner_data", "storage_data"):
        assert getattr(found, name) == getattr(expected, name)
    assert [*found.state_dict_metadata] == [*expected.state_dict_metadata], "in the same order"
    assert found.state_dict_metadata["b.c"].properties.dtype == torch.int8
    assert isinstance(found.state_dict_metadata["lr"], BytesStorageMetadata)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_of_which_a_part_is_nowhere_is_refused(folder):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "a")
    del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="a part of a is stored nowhere"):
        read_metadata(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_garbage_collector_runs_again_afterwards(folder):
    read_metadata(folder / ".metadata")
    assert gc.isenabled()
    (folder / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="cannot be read"):
        read_metadata(folder / ".metadata")
    assert gc.isenabled()


def test_no_pickle_describes_the_tensors_of_a_folder_that_we_wrote(tmp_path, monkeypatch):
    Saver(asynchronous=False).save({"state_dict": {"w": torch.ones(2, 3)}}, files={}, path=tmp_path / "a")
    monkeypatch.setattr(dcp_metadata, "_parsed", lambda data, path: pytest.fail(f"{path} was parsed"))
    target = torch.zeros(2, 3)
    read_into({"state_dict.w": target}, FolderReader(tmp_path / "a"))
    assert target.eq(1).all()
