"""Measuring which float8 recipe is fastest for the shapes of a model."""

from lightning_ups.insight.advise.advice import Advice, best_recipe, decide_on_rank0
from lightning_ups.insight.advise.linear_shapes import (
    Layer,
    check_ran,
    layers_in_step,
    layers_with_rows,
    names_of,
    products_of,
)
from lightning_ups.insight.advise.te_products import (
    ENGINE,
    engine_layers,
    engine_name,
    engine_recipe,
    is_engine,
    modules_of,
    read_first,
)
from lightning_ups.insight.advise.timer import timer_on
from lightning_ups.insight.advise.timing_table import Table, Timer, Times, cache_path, obtain_table, where

__all__ = [
    "ENGINE",
    "Advice",
    "Layer",
    "Table",
    "Timer",
    "Times",
    "best_recipe",
    "cache_path",
    "check_ran",
    "decide_on_rank0",
    "engine_layers",
    "engine_name",
    "engine_recipe",
    "is_engine",
    "layers_in_step",
    "layers_with_rows",
    "modules_of",
    "names_of",
    "obtain_table",
    "products_of",
    "read_first",
    "timer_on",
    "where",
]
