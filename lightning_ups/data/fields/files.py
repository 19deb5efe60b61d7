"""Readers of HDF5 files and zarr stores in the layouts of PDEBench and of The Well.

Files are opened when they are first read, once in each process: handles of HDF5 survive neither a fork nor pickling.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_ups._compat.optional.packages import require

_SUFFIXES = (".h5", ".hdf5")
_MARKS = ("zarr.json", ".zgroup")  # in the folder of a group of zarr


class FieldFile(ABC):
    """Trajectories in one HDF5 file or zarr store, read lazily.

    Args:
        path: Of the file or store.
        time_stride: Take one frame in so many.
        space_stride: Take one grid point in so many along each axis.

    Raises:
        ModuleNotFoundError: If h5py or zarr is missing.
        ValueError: If the layout is unknown.
    """

    fields: tuple[str, ...]
    grid: tuple[int, ...]
    count: int
    frames: int
    conditions: Tensor
    condition_names: tuple[str, ...]

    def __init__(self, path: str | Path, *, time_stride: int = 1, space_stride: int = 1) -> None:
        self.path = Path(path)
        self._time_stride, self._space_stride = time_stride, space_stride
        self._handle: Any = None
        self._opened_by: int | None = None
        with _opened(self.path) as file:
            grid, frames = self._look(file)
        self.grid = tuple(-(-points // space_stride) for points in grid)
        self.frames = -(-frames // time_stride)

    def read(self, trajectory: int, start: int, length: int) -> Tensor:
        """Return the frames [length, channels, *grid] from ``start`` on, in float32."""
        first, step = start * self._time_stride, self._time_stride
        times = slice(first, first + (length - 1) * step + 1, step)
        channels = self._channels(self._file(), trajectory, times, slice(None, None, self._space_stride))
        full = (length, *self.grid)
        return torch.from_numpy(np.stack([np.broadcast_to(c, full) for c in channels], axis=1).astype(np.float32))

    @abstractmethod
    def _look(self, file: Any) -> tuple[Sequence[int], int]:
        """Set ``fields``, ``count`` and the conditions; return the grid and the number of frames in the file."""

    @abstractmethod
    def _channels(self, file: Any, trajectory: int, times: slice, space: slice) -> list[np.ndarray]:
        """Return each channel in a shape that broadcasts to [time, *grid]."""

    def _file(self) -> Any:
        if self._opened_by != os.getpid():
            self._handle, self._opened_by = _open(self.path), os.getpid()
        return self._handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_opened_by": None}


class PDEBenchFile(FieldFile):
    """A file of PDEBench (Takamoto et al. 2022, github.com/pdebench/PDEBench).

    There are four layouts:

    - ``tensor`` [N, T, *grid], of advection, Burgers and reaction-diffusion in one dimension;
    - ``density``, ``pressure``, ``Vx``, ``Vy``, ``Vz``, each [N, T, *grid], of compressible Navier-Stokes;
    - a group for each trajectory, ``0000``, ``0001``, ..., with ``data`` [T, *grid, channels] and ``grid``, of
      diffusion-sorption, reaction-diffusion in two dimensions and shallow water;
    - ``velocity`` [N, T, *grid, D], ``particles`` [N, T, *grid, 1] and ``force`` [N, *grid, D], of incompressible
      Navier-Stokes.

    Coordinates are in ``x-coordinate`` and so on. Parameters are in the names of the files only: there are no
    conditions.
    """

    _GASES = ("density", "pressure", "Vx", "Vy", "Vz")

    @override
    def _look(self, file: Any) -> tuple[Sequence[int], int]:
        self.condition_names = ()
        if "tensor" in file:
            shape = file["tensor"].shape
            axes = sum(f"{axis}-coordinate" in file for axis in "xyz") or len(shape) - 2
            self._form, self._last = "tensor", len(shape) > 2 + axes
            self.fields = _numbered("u", shape[-1] if self._last else 1)
            count, frames, grid = shape[0], shape[1], shape[2 : 2 + axes]
        elif "density" in file:
            self._form, self.fields = "gas", tuple(name for name in self._GASES if name in file)
            count, frames, *grid = file["density"].shape
        elif "velocity" in file:
            count, frames, *grid, axes = file["velocity"].shape
            self._form, self.fields = "velocity", _numbered("velocity", axes)
            self.fields += ("particles",) if "particles" in file else ()
            self.fields += _numbered("force", axes) if "force" in file else ()
        elif seeds := sorted(name for name in file if name.isdigit() and "data" in file[name]):
            self._form, self._seeds = "seeds", seeds
            frames, *grid, channels = file[seeds[0]]["data"].shape
            count, self.fields = len(seeds), _numbered("u", channels)
        else:
            raise ValueError(
                f"{self.path} has {', '.join(sorted(file)) or 'nothing'} at its top, which is no layout of PDEBench or"
                " The Well. Expected tensor, density, velocity, groups such as 0000 with data, or t0_fields."
            )
        self.count, self.conditions = count, torch.zeros(count, 0)
        return grid, frames

    @override
    def _channels(self, file: Any, trajectory: int, times: slice, space: slice) -> list[np.ndarray]:
        where = (times, *[space] * len(self.grid))
        if self._form == "gas":
            return [file[name][(trajectory, *where)] for name in self.fields]
        if self._form == "seeds":
            return _unstacked(file[self._seeds[trajectory]]["data"][where])
        if self._form == "tensor":
            found = file["tensor"][(trajectory, *where)]
            return _unstacked(found) if self._last else [found]
        channels = _unstacked(file["velocity"][(trajectory, *where)])
        if "particles" in self.fields:
            channels += _unstacked(file["particles"][(trajectory, *where)])
        return channels + (_unstacked(file["force"][(trajectory, *where[1:])]) if "force" in file else [])


class WellFile(FieldFile):
    """A file of The Well (Ohana et al. 2024), as its "Data format" page specifies it.

    Scalars, vectors and tensors are in the groups ``t0_fields``, ``t1_fields`` and ``t2_fields``, whose attribute
    ``field_names`` lists them: [N, T, *grid, *components]. The attributes ``sample_varying``, ``time_varying`` and
    ``dim_varying`` of a field say which of these axes it has; it is repeated along the others. Each component is a
    channel. Scalars of the group ``scalars`` that do not vary in time are the conditions.
    """

    _GROUPS = ("t0_fields", "t1_fields", "t2_fields")

    @override
    def _look(self, file: Any) -> tuple[Sequence[int], int]:
        self.count = int(file.attrs["n_trajectories"])
        dims = file["dimensions"]
        grid = [dims[_text(name)].shape[-1] for name in dims.attrs["spatial_dims"]]
        frames = dims["time"].shape[-1]
        self._parts, names = [], []
        for order, group in enumerate(self._GROUPS):
            for name in map(_text, file[group].attrs["field_names"]) if group in file else ():
                field = file[group][name]
                part = _Part.of(f"{group}/{name}", field)
                leading = (
                    part.has_sample + part.has_time + (len(grid) if part.is_padded(field, order) else sum(part.dims))
                )
                count = int(np.prod(field.shape[leading:], dtype=int))
                names += [name] if order == 0 else _numbered(name, count)
                self._parts.append(part._replace(leading=leading))
        self.fields = tuple(names)
        self._look_at_scalars(file)
        return grid, frames

    def _look_at_scalars(self, file: Any) -> None:
        scalars = file.get("scalars", {})
        names = map(_text, scalars.attrs["field_names"]) if scalars else ()
        self.condition_names = tuple(name for name in names if not scalars[name].attrs["time_varying"])
        columns = [
            np.broadcast_to(np.asarray(scalars[name], dtype=np.float32).reshape(-1), (self.count,))
            for name in self.condition_names
        ]
        self.conditions = torch.tensor(np.array(columns)).T if columns else torch.zeros(self.count, 0)

    @override
    def _channels(self, file: Any, trajectory: int, times: slice, space: slice) -> list[np.ndarray]:
        channels = []
        for part in self._parts:
            axes = len(self.grid)
            padded = part.leading - part.has_sample - part.has_time == axes
            where = [trajectory] if part.has_sample else []
            where += [times] if part.has_time else []
            where += [space for varies in part.dims if varies or padded]
            found = file[part.path][tuple(where)]
            if not part.has_time:
                found = found[None]
            if not padded:
                found = np.expand_dims(found, [1 + axis for axis, varies in enumerate(part.dims) if not varies])
            channels += _unstacked(found.reshape(*found.shape[: 1 + axes], -1))
        return channels


class _Part(NamedTuple):
    """A field of The Well and the axes that it has in its file."""

    path: str
    has_sample: bool
    has_time: bool
    dims: tuple[bool, ...]
    leading: int

    @classmethod
    def of(cls, path: str, field: Any) -> "_Part":
        dims = tuple(bool(varies) for varies in field.attrs["dim_varying"])
        return cls(path, bool(field.attrs["sample_varying"]), bool(field.attrs["time_varying"]), dims, 0)

    def is_padded(self, field: Any, order: int) -> bool:
        """Return whether axes along which the field is constant are stored with one point; they may be missing."""
        components = field.ndim - self.has_sample - self.has_time - len(self.dims)
        return components == order or (order == 2 and components == 1)


def open_fields(path: str | Path, **strides: int) -> list[FieldFile]:
    """Open an HDF5 file, a zarr store, or all in a folder, and return a reader of each.

    Raises:
        ModuleNotFoundError: If h5py or zarr is missing.
        FileNotFoundError: If there is none.
        ValueError: If layouts are unknown, or files differ in fields, grid or conditions.
    """
    path = Path(path)
    paths = [path] if path.is_file() else _below(path)
    if not paths:
        raise FileNotFoundError(
            f"{path} is neither an HDF5 file nor a zarr store nor a folder with stores or with files named *.h5 or"
            " *.hdf5."
        )
    files = [_kind(each)(each, **strides) for each in paths]
    for each in files[1:]:
        for name in ("fields", "grid", "condition_names"):
            if getattr(each, name) != getattr(files[0], name):
                raise ValueError(
                    f"{each.path} and {files[0].path} differ in {name}: {getattr(each, name)} and"
                    f" {getattr(files[0], name)}. Put files of one kind into a folder."
                )
    return files


def write_pdebench(path: str | Path, films: Mapping[str, Tensor], *, interval: float, length: float) -> None:
    """Write trajectories in PDEBench's layout.

    Args:
        path: Of the new file.
        films: For each field its trajectories [N, T, *grid]. Written as ``tensor`` if there is one field, else under
            their names.
        interval: Between frames.
        length: Of the domain along each axis.
    """
    with _h5py().File(path, "w") as file:
        for name, film in films.items():
            file["tensor" if len(films) == 1 else name] = film.cpu().float().numpy()
        _, frames, *grid = next(iter(films.values())).shape
        for axis, points in zip("xyz", grid, strict=False):
            file[f"{axis}-coordinate"] = np.arange(points, dtype=np.float32) * (length / points)
        file["t-coordinate"] = np.arange(frames, dtype=np.float32) * interval


def _h5py() -> Any:
    return require("h5py", requirement="h5py>=3.8", extra="hdf5", feature="Reading HDF5 files")


def _below(path: Path) -> list[Path]:
    if _is_store(path) or (path.is_file() and path.suffix in _SUFFIXES):
        return [path]
    return [found for inside in sorted(path.iterdir()) for found in _below(inside)] if path.is_dir() else []


def _is_store(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)


def _open(path: Path) -> Any:
    """Open an HDF5 file or a zarr store. Groups and arrays of both have the methods that are used here."""
    if _is_store(path):
        zarr = require("zarr", requirement="zarr>=3", extra="zarr", feature="Reading zarr stores")
        return zarr.open_group(path, mode="r")
    return _h5py().File(path, "r")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    file = _open(path)
    try:
        yield file
    finally:
        if not _is_store(path):
            file.close()


def _kind(path: Path) -> type[FieldFile]:
    with _opened(path) as file:
        return WellFile if "t0_fields" in file or "t1_fields" in file else PDEBenchFile


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}_{index}" for index in range(count))


def _unstacked(found: np.ndarray) -> list[np.ndarray]:
    return [found[..., index] for index in range(found.shape[-1])]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
