"""Trials of configurations: each runs in a process of its own, and a search or a ladder compares them."""

from lightning_ups.insight.tune.engine import Configuration, Effort, Engine, visible_devices
from lightning_ups.insight.tune.result import FAILURES, Failure, Result, failure_of, failure_of_exit
from lightning_ups.insight.tune.steady_steps import Steady, steady
from lightning_ups.insight.tune.store import Store, default_folder, digest, digest_of_files, shape_of, versions

__all__ = [
    "FAILURES",
    "Configuration",
    "Effort",
    "Engine",
    "Failure",
    "Result",
    "Steady",
    "Store",
    "default_folder",
    "digest",
    "digest_of_files",
    "failure_of",
    "failure_of_exit",
    "shape_of",
    "steady",
    "versions",
    "visible_devices",
]
