"""How much of a GPU's memory a run takes and would take with other settings, and who holds it."""

from lightning_ups.insight.memory.account import GIB, Moment, readable
from lightning_ups.insight.memory.described_run import Uncountable
from lightning_ups.insight.memory.devices import DEVICES, Device, device_of
from lightning_ups.insight.memory.owners import holders, is_out_of_memory
from lightning_ups.insight.memory.plan import MOST, MOVES_NOTHING, Planner, Variant

__all__ = [
    "DEVICES",
    "GIB",
    "MOST",
    "MOVES_NOTHING",
    "Device",
    "Moment",
    "Planner",
    "Uncountable",
    "Variant",
    "device_of",
    "holders",
    "is_out_of_memory",
    "readable",
]
