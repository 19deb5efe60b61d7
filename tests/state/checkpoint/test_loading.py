import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from lightning_ups.state.checkpoint import SavedWeights, Saver, save_sharded
from lightning_ups.state.checkpoint.consolidation import consolidated
from lightning_ups.state.checkpoint.loading import load, load_weights, resolve
from lightning_ups.state.checkpoint.state import named_state


class Net(nn.Module):
    def __init__(self, seed=0, width=5):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, width), nn.Linear(width, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


def trained(seed=0, *, mesh=None):
    model = Net(seed)
    if mesh is not None:
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    train(model, optimizer)
    return model, optimizer


def train(model, optimizer):
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_file(path, model, optimizer, **rest):
    checkpoint = {"state_dict": model.state_dict(), "optimizer_states": [named_state(model, optimizer)], **rest}
    save_sharded(Saver(asynchronous=False), checkpoint, path, apart=("hyper_parameters",))
    return path


def single_file(path, model, optimizer, **rest):
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], **rest}, path)
    return path


@pytest.mark.parametrize("write", [sharded_file, single_file])
def test_a_module_and_its_optimizer_come_back(tmp_path, write):
    model, optimizer = trained()
    path = write(tmp_path / "c", model, optimizer, loops=3, hyper_parameters={"a": 1})
    other = Net(seed=9)
    fresh = torch.optim.AdamW(other.parameters(), lr=3)
    rest, left = load(path, module=other, optimizers=[fresh], needless=("hyper_parameters",))
    assert rest["loops"] == 3
    assert rest["hyper_parameters"] == {"a": 1}
    assert left == {}
    torch.manual_seed(1)
    train(model, optimizer)
    torch.manual_seed(1)
    train(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(model.norm.running_mean, other.norm.running_mean)


class Strange:
    pass


@pytest.mark.parametrize("write", [sharded_file, single_file])
def test_strange_hyperparameters_do_not_stop_it(tmp_path, write):
    model, optimizer = trained()
    path = write(tmp_path / "c", model, optimizer, loops=3, hyper_parameters={"a": 1, "odd": Strange()})
    rest, left = load(path, module=model, optimizers=[optimizer], needless=("hyper_parameters",))
    assert rest["loops"] == 3
    assert rest["hyper_parameters"] == {"a": 1}
    assert "test_loading.Strange" in left["hyper_parameters.odd"]
    rest, left = load(path, module=model, optimizers=[optimizer], weights_only=False)
    assert isinstance(rest["hyper_parameters"]["odd"], Strange)


def test_a_dict_of_ones_own_in_the_hyperparameters_does_not_stop_a_folder(tmp_path):
    model, optimizer = trained()
    path = sharded_file(tmp_path / "c", model, optimizer, hyper_parameters={"a": Odd(b=1)})
    rest, left = load(path, module=model, optimizers=[], needless=("hyper_parameters",))
    assert "hyper_parameters" not in rest
    assert left


class Odd(dict):
    pass


def test_other_names_are_told(tmp_path):
    path = sharded_file(tmp_path / "c", *trained())
    other = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(ValueError, match=r"0.bias, 0.weight are missing; first.bias.*strict_loading = False"):
        load(path, module=other, optimizers=[])
    before = other[0].weight.clone()
    load(path, module=other, optimizers=[], strict=False)
    assert torch.equal(other[0].weight, before)


def test_other_names_in_fit_are_told_with_what_works_there(tmp_path):
    path = sharded_file(tmp_path / "c", *trained())
    other = Net(seed=9)
    other.new = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(
        ValueError, match=r"new.bias, new.weight are missing.*if no optimizer.*load_weights with strict=False in"
    ):
        load(path, module=other, optimizers=[optimizer])
    load_weights(other, path, strict=False)
    assert torch.equal(other.first.weight, trained()[0].first.weight)
    with pytest.raises(ValueError, match=r"new.weight only here.*load_weights.*on_fit_start"):
        load(path, module=other, optimizers=[optimizer], strict=False)


def test_another_shape_is_told(tmp_path):
    path = sharded_file(tmp_path / "c", *trained())
    with pytest.raises(ValueError, match=r"first.weight has the shape \(5, 3\) in .*, and \(4, 3\) in Net\."):
        load(path, module=Net(width=4), optimizers=[])


def test_weights_alone_do_not_resume_a_fit(tmp_path):
    model, optimizer = trained()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "file")
    save_sharded(Saver(asynchronous=False), {"state_dict": model.state_dict()}, tmp_path / "folder")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    for path in (tmp_path / "file", tmp_path / "folder", tmp_path / "w.safetensors"):
        load(path, module=model, optimizers=[])
        with pytest.raises(ValueError, match=r"load_weights in on_fit_start, or name a full checkpoint\.$"):
            load(path, module=model, optimizers=[optimizer])


def test_one_that_is_not_whole_names_the_newest_that_is(tmp_path):
    sharded_file(tmp_path / "good", *trained())
    sharded_file(tmp_path / "bad", *trained())
    (tmp_path / "bad" / "complete.json").unlink()
    (tmp_path / "bad" / "incomplete").touch()
    with pytest.raises(FileNotFoundError, match=r"bad is not whole: .*good', the newest whole one beside it\.$"):
        resolve(tmp_path / "bad")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        resolve(tmp_path / "none")
    assert resolve(tmp_path / "good") == tmp_path / "good"


def test_a_folder_around_checkpoints_is_no_dead_one(tmp_path, monkeypatch):
    (tmp_path / "run" / "version_0" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"run is a folder, and no checkpoint\. .*There is none below it\.$"):
        resolve(tmp_path / "run")
    torch.save({}, tmp_path / "run" / "version_0" / "checkpoints" / "old.ckpt")
    whole = sharded_file(tmp_path / "run" / "version_0" / "checkpoints" / "last", *trained())
    for place in (tmp_path, tmp_path / "run", whole.parent):
        with pytest.raises(FileNotFoundError, match=r"no checkpoint\. .*checkpoints/last': give that\.$") as refused:
            resolve(place)
        assert "delete" not in str(refused.value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^\. is a folder, and no checkpoint"):
        resolve(Path())


@pytest.mark.parametrize(
    ("saved", "match"),
    [
        ({"a.weight": torch.ones(2)}, r"has no 'state_dict', but 'a.weight'\. It holds weights alone\. .*load_weights"),
        ({"a": 1}, r"has no 'state_dict', but 'a'\. What goes on"),
        ([1, 2], "holds a list, and no checkpoint"),
    ],
)
def test_another_file_of_torch_is_told(tmp_path, saved, match):
    torch.save(saved, tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "c.ckpt", module=Net(), optimizers=[])


@pytest.mark.parametrize("saved", [{"a": 1}, {"state_dict": {}}, {}, [1]])
def test_a_file_without_weights_is_told(tmp_path, saved):
    torch.save(saved, tmp_path / "c")
    for read in (lambda: load_weights(Net(), tmp_path / "c"), lambda: SavedWeights(tmp_path / "c")):
        with pytest.raises(ValueError, match=r"c holds (no weights|a list)"):
            read()


@pytest.mark.parametrize("kind", ["safetensors", "file", "state dict", "folder"])
def test_weights_from_anywhere(tmp_path, kind):
    model, optimizer = trained()
    path = tmp_path / "c"
    if kind == "safetensors":
        path.mkdir()
        save_file(model.state_dict(), path / "model.safetensors")
    elif kind == "folder":
        sharded_file(path, model, optimizer)
    else:
        torch.save(model.state_dict() if kind == "state dict" else {"state_dict": model.state_dict()}, path)
    other = Net(seed=9)
    load_weights(other, path)
    assert torch.equal(other.second.weight, model.second.weight)
    assert other.norm.num_batches_tracked == 1


def on_two_ranks(path):
    """Write on two ranks what two ranks trained; read what one device wrote, and the other way round."""
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = trained(mesh=mesh)
    saver = Saver(asynchronous=False)
    checkpoint = {"state_dict": model.state_dict(), "optimizer_states": [named_state(model, optimizer)]}
    save_sharded(saver, checkpoint, path / "sharded")
    results = []
    for name in ("file", "one rank", "sharded", "safetensors"):
        other, fresh = trained(seed=9, mesh=mesh)
        optimizers = [] if name == "safetensors" else [fresh]
        load(path / name, module=other, optimizers=optimizers, group=saver.group)
        if optimizers:
            torch.manual_seed(1)
            train(other, fresh)
        results.append(other.second.weight.full_tensor().flatten().tolist())
    saver.close()
    return results


def test_between_one_device_and_two_ranks(ranks, tmp_path):
    model, optimizer = trained()
    single_file(tmp_path / "file", model, optimizer)
    sharded_file(tmp_path / "one rank", model, optimizer)
    (tmp_path / "safetensors").mkdir()
    save_file(model.state_dict(), tmp_path / "safetensors" / "model.safetensors")
    untrained = model.second.weight.flatten().tolist()
    *resumed, weights = ranks(on_two_ranks, tmp_path)
    assert weights == untrained
    other = Net(seed=9)
    fresh = torch.optim.AdamW(other.parameters(), lr=3)
    load(tmp_path / "sharded", module=other, optimizers=[fresh])
    torch.manual_seed(1)
    train(model, optimizer)
    torch.manual_seed(1)
    train(other, fresh)
    expected = model.second.weight.flatten().tolist()
    assert other.second.weight.flatten().tolist() == pytest.approx(expected, rel=1e-5)
    for values in resumed:
        assert values == pytest.approx(expected, rel=1e-5)


def what_is_kept_of(path):
    model = tied(trained(seed=9, mesh=init_device_mesh("cpu", (2,)))[0])
    kept = load(path, module=model, optimizers=[])[0]["kept"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    alike = {name: value.placements == parameters[name].placements for name, value in kept["average"].items()}
    values = {name: value.full_tensor() for name, value in kept["average"].items()}
    return alike, values, kept["others"]


def tied(model):
    model.again = model.first
    return model


def test_what_a_file_keeps_under_the_name_of_a_sharded_parameter_comes_back_as_shards(ranks, tmp_path):
    model = tied(trained()[0])
    average = {name: torch.rand(p.shape) for name, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1}
    others = {"first.weight": torch.rand(2), "norm.running_mean": torch.rand(3), "steps": [torch.ones(()), 3]}
    kept = {"average": average, "others": others}
    torch.save({"state_dict": model.state_dict(), "kept": kept}, tmp_path / "file")
    alike, values, rest = ranks(what_is_kept_of, tmp_path / "file")
    assert alike == dict.fromkeys(["first.weight", "second.weight", "again.weight"], True)
    assert all(torch.equal(values[name], average[name]) for name in average)
    assert str(rest) == str(others), "of another shape, no parameter, or no tensor"


def within(inner):
    outer = nn.Module()
    outer.net = inner
    return outer


def averages_of_what_is_within(path):
    inner, optimizer = trained(mesh=init_device_mesh("cpu", (2,)))
    by_name = {name: p.detach() + 1 for name, p in inner.named_parameters()}
    sharded_file(path / "folder", within(inner), optimizer, kept={"names": by_name, "order": [*by_name.values()]})
    outer, found = within(trained(seed=9, mesh=init_device_mesh("cpu", (2,)))[0]), []
    if dist.get_rank() == 0:
        torch.save(consolidated(path / "folder")[0], path / "consolidated")
    dist.barrier()
    for kind in ("folder", "consolidated", "file"):
        kept = load(path / kind, module=outer, optimizers=[])[0]["kept"]
        average = [kept["names"], *([dict(zip(by_name, kept["order"], strict=True))] if kind != "file" else [])]
        for name, shard in outer.net.named_parameters():
            same = [(a[name].placements == shard.placements, a[name].full_tensor().tolist()) for a in average]
            expected = (True, by_name[name].full_tensor().tolist())
            found += [(kind, name) for is_ in same if is_ != expected]
    return found


def test_averages_by_names_within_a_submodule_or_by_order_come_back_as_shards(ranks, tmp_path):
    model = trained()[0]
    average = {name: p.detach() + 1 for name, p in model.named_parameters()}
    torch.save({"state_dict": within(model).state_dict(), "kept": {"names": average}}, tmp_path / "file")
    assert ranks(averages_of_what_is_within, tmp_path) == []


def test_a_copy_elsewhere_is_whole(tmp_path):
    path = sharded_file(tmp_path / "c", *trained())
    shutil.copytree(path, tmp_path / "elsewhere" / "d")
    load_weights(Net(seed=9), tmp_path / "elsewhere" / "d")
    assert not dist.is_initialized()
