import json

import pytest
import torch
from safetensors.torch import load_file

from lightning_ups.state.checkpoint.consolidation import (
    SavedWeights,
    check_file,
    consolidated,
    rest_of,
    write_safetensors,
)
from tests.state.checkpoint.test_loading import sharded_file, single_file, trained


def test_a_folder_becomes_what_one_device_would_have_saved(tmp_path):
    model, optimizer = trained()
    path = sharded_file(tmp_path / "c", model, optimizer, loops=3, hyper_parameters={"a": 1})
    checkpoint, left = consolidated(path)
    assert left == {}
    assert checkpoint["loops"] == 3
    assert checkpoint["hyper_parameters"] == {"a": 1}
    assert all(torch.equal(checkpoint["state_dict"][name], value) for name, value in model.state_dict().items())
    stock, ours = optimizer.state_dict(), checkpoint["optimizer_states"][0]
    assert ours["param_groups"] == stock["param_groups"]
    assert ours["state"].keys() == stock["state"].keys()
    for number, entries in stock["state"].items():
        assert all(torch.equal(ours["state"][number][key], value) for key, value in entries.items())


def test_tuples_of_optimizer_state_stay_tuples(tmp_path):
    model, optimizer = trained()
    state = optimizer.state[model.first.weight]
    state["past"] = [(torch.ones(5, 3), torch.zeros(())), (torch.ones(2), 3)]
    state["none"] = ((1, 2), [])
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), 0.999)
    checkpoint, _ = consolidated(sharded_file(tmp_path / "c", model, optimizer))
    stock, ours = optimizer.state_dict(), checkpoint["optimizer_states"][0]
    number = stock["param_groups"][0]["params"][0]
    for key in ("past", "none"):
        assert repr(ours["state"][number][key]) == repr(stock["state"][number][key])
    assert repr(ours["param_groups"]) == repr(stock["param_groups"])


def test_dicts_of_optimizer_state_keep_their_keys(tmp_path):
    model, optimizer = trained()
    state = optimizer.state[model.first.weight]
    state["by"] = {0: torch.ones(2), 1: {2: torch.zeros(()), None: 4}}
    state["past"] = [{"a": 1}, {(0, 1): torch.ones(1)}]
    optimizer.param_groups[0].update(schedule={0: 1.0, 10: 0.5}, scale=torch.tensor(2.0))
    checkpoint, _ = consolidated(sharded_file(tmp_path / "c", model, optimizer))
    stock, ours = optimizer.state_dict(), checkpoint["optimizer_states"][0]
    number = stock["param_groups"][0]["params"][0]
    for key in ("by", "past"):
        assert repr(ours["state"][number][key]) == repr(stock["state"][number][key])
    assert ours["param_groups"] == stock["param_groups"]


@pytest.mark.parametrize("write", [sharded_file, single_file])
def test_weights_are_read_one_by_one(tmp_path, write):
    model, optimizer = trained()
    weights = SavedWeights(write(tmp_path / "c", model, optimizer))
    assert set(weights) == set(model.state_dict())
    assert len(weights) == len(model.state_dict())
    assert weights.like("first.weight").shape == (5, 3)
    assert weights.like("first.weight").is_meta
    assert torch.equal(weights["first.weight"], model.first.weight)


@pytest.mark.parametrize("write", [sharded_file, single_file])
def test_the_rest_is_neither_weights_nor_optimizer(tmp_path, write):
    path = write(tmp_path / "c", *trained(), loops=3)
    assert rest_of(path) == ({"loops": 3}, {})


def test_files_of_a_limited_size_and_their_index(tmp_path):
    tied = torch.arange(4.0)
    weights = {"a": torch.ones(3, 2).T, "b": tied, "c": tied, "big": torch.zeros(20)}
    sizes = {name: value.nbytes for name, value in weights.items()}
    files = write_safetensors(tmp_path, weights, sizes=sizes, max_shard_bytes=40)
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for name, value in weights.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], value)


def test_one_file_has_no_index(tmp_path):
    files = write_safetensors(tmp_path, {"a": torch.ones(2)}, sizes={"a": 8}, max_shard_bytes=100)
    assert [file.name for file in files] == ["model.safetensors"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "state",
    [
        {"best_k_models": {"/runs/a/../../home": 1}},
        {"last_model_path": "a/../b"},
        {"best_model_path": "a/../b"},
        {"kth_best_model_path": "a/../b"},
        {"best_model_path": "local:///home"},  # which Lightning takes for a remote file, and deletes wherever it is
        {"best_model_path": "FILE:///home"},
        {"best_model_path": "dir::file:///home"},
    ],
)
def test_a_file_that_would_have_another_folder_deleted_is_refused(tmp_path, state):
    saved = {"state_dict": {"a": torch.ones(1)}, "pytorch-lightning_version": "2.6.6"}
    for callbacks in (
        {},
        {"ModelCheckpoint": {"best_k_models": {"/runs/a/b": 1}, "last_model_path": ""}, "Other": None},
        {"ModelCheckpoint": {"best_model_path": "s3://bucket/run/a.ckpt", "kth_best_model_path": "local/a.ckpt"}},
    ):
        torch.save(saved | {"callbacks": callbacks}, tmp_path / "kept.ckpt")
        check_file(tmp_path / "kept.ckpt")
    torch.save(saved | {"callbacks": {"ModelCheckpoint": state}}, tmp_path / "kept.ckpt")
    with pytest.raises(ValueError, match=r"kept\.ckpt names '.*a run that goes on would delete"):
        check_file(tmp_path / "kept.ckpt")
