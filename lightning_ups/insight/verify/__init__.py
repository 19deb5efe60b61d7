"""The comparison of a run with a reference run, step by step and block by block."""

from lightning_ups.insight.verify.comparison import (
    REST,
    Band,
    Departure,
    Step,
    band_between,
    departures,
    distances,
    first_block,
    is_same,
    largest,
)
from lightning_ups.insight.verify.faults import FAULTS, Fault
from lightning_ups.insight.verify.float8_rounding import Rounding, rounded, rounded_linears
from lightning_ups.insight.verify.recording import Tape, Watch

__all__ = [
    "FAULTS",
    "REST",
    "Band",
    "Departure",
    "Fault",
    "Rounding",
    "Step",
    "Tape",
    "Watch",
    "band_between",
    "departures",
    "distances",
    "first_block",
    "is_same",
    "largest",
    "rounded",
    "rounded_linears",
]
