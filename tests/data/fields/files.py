"""Small HDF5 files and zarr stores in the real layouts of PDEBench and The Well."""

from contextlib import contextmanager

import numpy as np
import pytest

h5py = pytest.importorskip("h5py")


@contextmanager
def created(path):
    if path.suffix == ".zarr":
        yield pytest.importorskip("zarr").open_group(path, mode="w")
        return
    with h5py.File(path, "w") as file:
        yield file


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pdebench(path, kind, *, count=4, frames=6, points=8):
    """Write a file and return what its trajectories contain [N, T, C, *grid]."""
    grid = (points,) if kind == "tensor" else (points, points)
    with created(path) as file:
        if kind == "seeds":
            films = values(count, frames, *grid, 2)
            for index, film in enumerate(films):
                group = file.create_group(f"{index:04d}")
                group["data"] = film
                group["grid/t"], group["grid/x"], group["grid/y"] = np.arange(frames), *[np.arange(points)] * 2
            return np.moveaxis(films, -1, 2)
        file["t-coordinate"] = np.arange(frames + 1)
        for axis, _ in zip("xyz", grid, strict=False):
            file[f"{axis}-coordinate"] = np.arange(points)
        if kind == "tensor":
            file["tensor"] = films = values(count, frames, *grid)
            return films[:, :, None]
        if kind == "gas":
            films = values(count, frames, 4, *grid)
            for index, name in enumerate(("density", "pressure", "Vx", "Vy")):
                file[name] = films[:, :, index]
            return films
        velocity, particles = values(count, frames, *grid, 2), values(count, frames, *grid, 1, seed=1)
        force = values(count, *grid, 2, seed=2)
        file["velocity"], file["particles"], file["force"], file["t"] = (
            velocity,
            particles,
            force,
            values(count, frames),
        )
        steady = np.broadcast_to(force[:, None], velocity.shape)
        return np.moveaxis(np.concatenate([velocity, particles, steady], axis=-1), -1, 2)


def well(path, *, count=3, frames=5, width=8, height=6, reynolds=100.0, seed=0):
    """Write a file with scalars, a vector, a symmetric tensor, a steady and a one-dimensional field.

    Returns what its trajectories contain [N, T, C, *grid].
    """
    with created(path) as file:
        file.attrs.update({
            "dataset_name": "toy", "grid_type": "cartesian", "n_spatial_dims": 2, "n_trajectories": count,
            "simulation_parameters": ["Re"], "Re": reynolds,
        })  # fmt: skip
        dims = file.create_group("dimensions")
        dims.attrs["spatial_dims"] = ["x", "y"]
        for name, points in {"time": frames, "x": width, "y": height}.items():
            dims[name] = np.linspace(0, 1, points, dtype=np.float32)
            dims[name].attrs["sample_varying"] = False
        side = file.create_group("boundary_conditions/x_periodic")
        side.attrs.update({"associated_dims": ["x"], "associated_fields": [], "bc_type": "PERIODIC"})
        scalars = file.create_group("scalars")
        scalars.attrs["field_names"] = ["Re", "drive", "start"]
        for name, content, sample, time in (
            ("Re", np.float32(reynolds), False, False),
            ("drive", values(frames), False, True),
            ("start", values(count, seed=3), True, False),
        ):
            put = scalars.create_dataset if isinstance(file, h5py.File) else scalars.create_array
            put(name, data=np.asarray(content))
            scalars[name].attrs.update({"sample_varying": sample, "time_varying": time})
        contents = {
            "t0_fields": {
                "pressure": (values(count, frames, width, height, seed=seed), True, True, [True, True]),
                "terrain": (values(width, height, seed=4), False, False, [True, True]),
                "column": (values(count, frames, width, seed=5), True, True, [True, False]),
            },
            "t1_fields": {"velocity": (values(count, frames, width, height, 2, seed=6), True, True, [True, True])},
            "t2_fields": {"strain": (values(count, frames, width, height, 2, 2, seed=7), True, True, [True, True])},
        }
        for group, fields in contents.items():
            file.create_group(group).attrs["field_names"] = [*fields]
            for name, (content, sample, time, varying) in fields.items():
                file[group][name] = content
                file[group][name].attrs.update({"sample_varying": sample, "time_varying": time, "dim_varying": varying})
    full = (count, frames, width, height)
    scalar = contents["t0_fields"]
    column = np.broadcast_to(scalar["column"][0][..., None], full)
    channels = [scalar["pressure"][0], np.broadcast_to(scalar["terrain"][0], full), column]
    channels += [*np.moveaxis(contents["t1_fields"]["velocity"][0], -1, 0)]
    channels += [*np.moveaxis(contents["t2_fields"]["strain"][0].reshape(*full, 4), -1, 0)]
    return np.stack(channels, axis=2)
