"""Trials of configurations: each runs in a process of its own, and a search or a ladder compares them."""

from lightning_ups.insight.tune.axes import AXES, Axis, Choice, Objective, Setting, Situation, Space
from lightning_ups.insight.tune.effects import LEAST, Gain, Rounds, Verdict, loss_difference, loss_fault
from lightning_ups.insight.tune.engine import Configuration, Effort, Engine, visible_devices
from lightning_ups.insight.tune.fragments import Tree, appending, leaves, merged, text_of
from lightning_ups.insight.tune.page import Bar, Spot, bars, frontier, gib, html_page, rate_bar, table
from lightning_ups.insight.tune.result import FAILURES, Failure, Result, failure_of, failure_of_exit
from lightning_ups.insight.tune.search import Outcome, Progress, Row, Search, Verification
from lightning_ups.insight.tune.steady_steps import Steady, steady
from lightning_ups.insight.tune.store import Store, default_folder, digest, digest_of_files, shape_of

__all__ = [
    "AXES",
    "FAILURES",
    "LEAST",
    "Axis",
    "Bar",
    "Choice",
    "Configuration",
    "Effort",
    "Engine",
    "Failure",
    "Gain",
    "Objective",
    "Outcome",
    "Progress",
    "Result",
    "Rounds",
    "Row",
    "Search",
    "Setting",
    "Situation",
    "Space",
    "Spot",
    "Steady",
    "Store",
    "Tree",
    "Verdict",
    "Verification",
    "appending",
    "bars",
    "default_folder",
    "digest",
    "digest_of_files",
    "failure_of",
    "failure_of_exit",
    "frontier",
    "gib",
    "html_page",
    "leaves",
    "loss_difference",
    "loss_fault",
    "merged",
    "rate_bar",
    "shape_of",
    "steady",
    "table",
    "text_of",
    "visible_devices",
]
