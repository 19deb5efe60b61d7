import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_ups.data.fields import EQUATIONS, GeneratedFields, HDF5Fields, StoredFields
from tests.data.fields.files import h5py, pdebench, well


def generated(tmp_path, **options):
    small = {
        "equation": "burgers",
        "points": 32,
        "trajectories": 4,
        "val_trajectories": 2,
        "frames": 6,
        "batch_size": 4,
    }
    data = GeneratedFields(**{**small, "cache_dir": str(tmp_path), **options})
    data.setup("fit")
    return data


@pytest.fixture
def cache(tmp_path):
    return {"cache_dir": str(tmp_path / "cache"), "num_workers": 0, "batch_size": 2}


class TestGenerated:
    @pytest.mark.parametrize("equation", EQUATIONS)
    def test_batches_are_normalized_windows(self, tmp_path, equation):
        kind = EQUATIONS[equation]
        grid = [{1: 64, 2: 32}[kind.num_axes]] * kind.num_axes
        data = generated(tmp_path, equation=equation, points=grid[0], inputs=2, targets=3)
        inputs, targets, conditions = next(iter(data.train_dataloader()))
        assert inputs.shape == (4, 2, len(kind.fields), *grid)
        assert targets.shape == (4, 3, len(kind.fields), *grid)
        assert conditions.shape == (4, len(kind.ranges))
        assert (data.fields, data.num_axes, data.num_conditions) == (kind.fields, kind.num_axes, len(kind.ranges))
        films = torch.cat([torch.cat([i, t], dim=1) for i, t, _ in data.train_dataloader()])
        assert films.std().item() == pytest.approx(1, abs=0.3)

    def test_validation_has_trajectories_of_its_own_and_longer_windows(self, tmp_path):
        data = generated(tmp_path, val_targets=8)
        ((inputs, targets, _),) = data.val_dataloader()
        assert (inputs.shape[:2], targets.shape[:2]) == ((2, 1), (2, 5))
        train = torch.cat([torch.cat([i, t], dim=1).flatten(0, 1) for i, t, _ in data.train_dataloader()])
        assert not any(torch.equal(frame, other) for frame in targets.flatten(0, 1) for other in train)

    def test_equal_arguments_share_a_file_and_others_do_not(self, tmp_path, monkeypatch):
        one = generated(tmp_path)
        (path,) = tmp_path.iterdir()
        monkeypatch.setattr("lightning_ups.data.fields.datamodules.solve", None)
        same = generated(tmp_path, batch_size=2, targets=2)  # they do not decide what is solved
        assert torch.equal(same.statistics.mean, one.statistics.mean)
        assert [*tmp_path.iterdir()] == [path]
        for other in ({"seed": 1}, {"points": 48}, {"ranges": {"viscosity": [0.1, 0.2]}}, {"interval": 0.1}):
            with pytest.raises(TypeError):  # it would be solved
                generated(tmp_path, **other)

    def test_the_same_seed_gives_the_same_batches(self, tmp_path):
        one, other = (next(iter(generated(tmp_path / name).train_dataloader())) for name in "ab")
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def test_too_few_windows_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="batch_size=20"):
            generated(tmp_path, batch_size=64).train_dataloader()

    @pytest.mark.parametrize("wrong", [{"equation": "heat"}, {"trajectories": 0}, {"targets": 0}])
    def test_wrong_arguments_are_refused(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GeneratedFields(**wrong)


class TestStored:
    def test_the_last_of_each_group_is_held_out(self, tmp_path, cache):
        films = torch.from_numpy(pdebench(tmp_path / "a.h5", "gas", count=6))
        data = StoredFields(path=str(tmp_path / "a.h5"), hold_out_one_in=3, val_targets=5, **cache)
        data.setup("fit")
        ((inputs, targets, _),) = data.val_dataloader()
        found = data.statistics.denormalized(torch.cat([inputs, targets], dim=1))
        torch.testing.assert_close(found, films[[2, 5]])
        assert (data.fields[0], data.num_axes, data.num_conditions) == ("density", 2, 0)

    def test_one_is_held_out_where_there_are_few(self, tmp_path, cache):
        pdebench(tmp_path / "a.h5", "tensor", count=2)
        data = StoredFields(path=str(tmp_path / "a.h5"), **cache)
        data.setup("fit")
        assert (len(data._train), len(data._val)) == (1, 1)

    def test_folders_for_training_and_validation(self, tmp_path, cache):
        for folder, seed in {"train": 0, "valid": 1}.items():
            (tmp_path / folder).mkdir()
            for index in range(2):
                well(tmp_path / folder / f"{index}.hdf5", reynolds=100.0 * (index + 1), seed=seed)
        data = StoredFields(path=str(tmp_path / "train"), val_path=str(tmp_path / "valid"), **cache)
        data.setup("fit")
        assert (len(data._train), len(data._val)) == (6, 6)
        conditions = torch.cat([conditions for _, _, conditions in data.train_dataloader()])
        assert sorted(set(conditions[:, 0].tolist())) == [-1, 1]

    def test_statistics_are_computed_once_for_a_file(self, tmp_path, cache, monkeypatch):
        pdebench(tmp_path / "a.h5", "gas")
        StoredFields(path=str(tmp_path / "a.h5"), **cache).prepare_data()
        with monkeypatch.context() as patch:
            patch.setattr("lightning_ups.data.fields.datamodules.Statistics.of", None)
            StoredFields(path=str(tmp_path / "a.h5"), **cache).setup("fit")
            pdebench(tmp_path / "a.h5", "gas", count=5)
            with pytest.raises(TypeError):  # it has changed
                StoredFields(path=str(tmp_path / "a.h5"), **cache).setup("fit")

    def test_a_single_trajectory_is_refused(self, tmp_path, cache):
        pdebench(tmp_path / "a.h5", "gas", count=1)
        with pytest.raises(ValueError, match="val_path"):
            StoredFields(path=str(tmp_path / "a.h5"), **cache).setup("fit")

    def test_workers_read(self, tmp_path, cache):
        pdebench(tmp_path / "a.h5", "gas")
        batches = []
        for workers in (0, 2):
            data = StoredFields(path=str(tmp_path / "a.h5"), **{**cache, "num_workers": workers})
            data.setup("fit")
            batches.append([*data.train_dataloader()])
        assert len(batches[0]) > 3
        for one, other in zip(*batches, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0].mean().view(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_keeps_the_statistics(tmp_path):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    data = generated(tmp_path)
    trainer = Trainer(max_steps=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(Mean(), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = generated(tmp_path, seed=1)
    assert not torch.equal(other.statistics.mean, data.statistics.mean)
    Trainer(max_steps=2, default_root_dir=tmp_path, **quiet).fit(Mean(), other, ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(other.statistics.mean, data.statistics.mean)


@pytest.mark.parametrize("kind", [StoredFields, HDF5Fields])
def test_files_need_no_h5py_until_they_are_read(kind):
    assert h5py
    data = kind(path="nowhere.h5", batch_size=4)
    assert (data.path, data.batch_size, data.num_workers) == ("nowhere.h5", 4, 2)
