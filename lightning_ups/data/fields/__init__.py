"""Data of physics: solvers that generate trajectories of fields, and readers of PDEBench's and The Well's files."""

from lightning_ups.data.fields.datamodules import GeneratedFields, HDF5Fields, StoredFields
from lightning_ups.data.fields.equations import EQUATIONS, solve

__all__ = ["EQUATIONS", "GeneratedFields", "HDF5Fields", "StoredFields", "solve"]
