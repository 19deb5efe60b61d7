"""Sharding by parametrization, for one compiled graph."""

from lightning_ups.transforms.simple_fsdp.gather_graph import GatherPlan
from lightning_ups.transforms.simple_fsdp.parametrize import (
    Gathering,
    Parametrised,
    ParametriseOptions,
    check_parametrisable,
    is_parametrised,
    parametrise,
    parametrised,
)

__all__ = [
    "GatherPlan",
    "Gathering",
    "ParametriseOptions",
    "Parametrised",
    "check_parametrisable",
    "is_parametrised",
    "parametrise",
    "parametrised",
]
