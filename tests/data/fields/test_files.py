import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ups.data.fields.files import PDEBenchFile, WellFile, open_fields, write_pdebench
from lightning_ups.data.fields.windows import Statistics, Windows
from tests.data.fields.files import h5py, pdebench, values, well

NAMES = {
    "tensor": ("u",),
    "gas": ("density", "pressure", "Vx", "Vy"),
    "seeds": ("u_0", "u_1"),
    "velocity": ("velocity_0", "velocity_1", "particles", "force_0", "force_1"),
}


@pytest.fixture(params=["a.h5", "a.zarr"])
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.mark.parametrize("kind", NAMES)
def test_pdebench(path, kind):
    expected = torch.from_numpy(pdebench(path, kind))
    (file,) = open_fields(path)
    assert isinstance(file, PDEBenchFile)
    assert file.fields == NAMES[kind]
    assert (file.count, file.frames, file.grid) == (4, 6, tuple(expected.shape[3:]))
    assert file.conditions.shape == (4, 0)
    assert torch.equal(file.read(2, 1, 3), expected[2, 1:4])


def test_pdebench_with_channels_in_a_tensor(tmp_path):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["tensor"], file["x-coordinate"] = (films := values(3, 5, 8, 2)), np.arange(8)
    (file,) = open_fields(tmp_path / "a.hdf5")
    assert torch.equal(file.read(1, 0, 5), torch.from_numpy(films[1]).movedim(-1, 1))


@pytest.mark.parametrize("kind", [*NAMES, "well"])
def test_strides(path, kind):
    expected = torch.from_numpy(well(path) if kind == "well" else pdebench(path, kind))
    (file,) = open_fields(path, time_stride=2, space_stride=3)
    expected = expected[:, ::2, :, ::3] if expected.dim() == 4 else expected[:, ::2, :, ::3, ::3]
    assert (file.frames, file.grid) == (expected.shape[1], tuple(expected.shape[3:]))
    assert torch.equal(file.read(1, 1, 2), expected[1, 1:3])


def test_the_well(path):
    expected = torch.from_numpy(well(path))
    (file,) = open_fields(path)
    assert isinstance(file, WellFile)
    assert file.fields == (
        "pressure", "terrain", "column", "velocity_0", "velocity_1", *(f"strain_{index}" for index in range(4)),
    )  # fmt: skip
    assert (file.count, file.frames, file.grid) == (3, 5, (8, 6))
    assert torch.equal(file.read(2, 1, 4), expected[2, 1:])
    assert file.condition_names == ("Re", "start")  # what varies in time is no condition
    torch.testing.assert_close(
        file.conditions, torch.stack([torch.full((3,), 100.0), torch.tensor(values(3, seed=3))], 1)
    )


def test_the_well_stores_axes_without_variation_with_one_point_too(tmp_path):
    expected = torch.from_numpy(well(tmp_path / "a.hdf5"))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        field = file["t0_fields/column"]
        attributes, column = dict(field.attrs), field[...]
        del file["t0_fields/column"]
        file["t0_fields/column"] = column[..., None]
        file["t0_fields/column"].attrs.update(attributes)
    (file,) = open_fields(tmp_path / "a.hdf5")
    assert torch.equal(file.read(2, 1, 4), expected[2, 1:])


@pytest.mark.parametrize("suffix", ["hdf5", "zarr"])
def test_a_folder_is_all_of_its_files(tmp_path, suffix):
    for index in range(2):
        well(tmp_path / f"{index}.{suffix}", reynolds=100.0 * index, seed=index, count=index + 1)
    files = open_fields(tmp_path)
    assert [file.count for file in files] == [1, 2]
    assert [file.conditions[0, 0].item() for file in files] == [0, 100]


def test_files_that_differ_are_refused(tmp_path):
    pdebench(tmp_path / "a.h5", "gas")
    pdebench(tmp_path / "b.h5", "seeds")
    with pytest.raises(ValueError, match="differ in fields"):
        open_fields(tmp_path)


def test_unknown_layouts_and_missing_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_fields(tmp_path / "nowhere.h5")
    with pytest.raises(FileNotFoundError):
        open_fields(tmp_path)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["voltage"] = values(3)
    with pytest.raises(ValueError, match="voltage"):
        open_fields(tmp_path / "a.h5")


def test_without_a_package_the_command_is_named(path, monkeypatch):
    pdebench(path, "tensor")
    monkeypatch.setattr("lightning_ups._compat.optional.packages.RequirementCache", lambda _: False)
    package = {".h5": "h5py", ".zarr": "zarr"}[path.suffix]
    with pytest.raises(ModuleNotFoundError, match=rf"pip install '{package}") as error:
        open_fields(path)
    assert "\n" not in str(error.value)


def test_reading_is_lazy_and_each_process_opens_the_file(path):
    expected = torch.from_numpy(pdebench(path, "gas"))
    (file,) = open_fields(path)
    assert file._handle is None
    file.read(0, 0, 1)  # a handle that workers must not use
    twin = pickle.loads(pickle.dumps(file))
    assert twin._handle is None
    assert torch.equal(twin.read(3, 0, 6), expected[3])
    chosen = [(file, index) for index in range(4)]
    plain = Statistics(torch.zeros(4), torch.ones(4), torch.zeros(0), torch.ones(0))
    windows = Windows(chosen, statistics=plain, inputs=1, targets=5)
    loader = DataLoader(windows, batch_size=1, num_workers=2, collate_fn=lambda batch: batch)
    for index, (inputs, targets, _) in enumerate(loader):
        assert torch.equal(torch.cat([inputs, targets], dim=1)[0], expected[index])


@pytest.mark.parametrize("names", [("tensor",), ("density", "Vx")])
def test_what_is_written_is_read_again(tmp_path, names):
    films = {name: torch.randn(2, 3, 8, 8) for name in names}
    write_pdebench(tmp_path / "a.h5", films, interval=0.1, length=1.0)
    (file,) = open_fields(tmp_path / "a.h5")
    assert torch.equal(file.read(1, 0, 3), torch.stack([film[1] for film in films.values()], dim=1))
