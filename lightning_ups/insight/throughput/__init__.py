"""How fast a run is, what its time goes into, and what to change first."""

from lightning_ups.insight.throughput.counted_step import StepFlops, step_flops
from lightning_ups.insight.throughput.flops import count_flops
from lightning_ups.insight.throughput.inspection import Inspection, Span, look
from lightning_ups.insight.throughput.meter import Flops, Meter, RankTimes, Summary, quantile
from lightning_ups.insight.throughput.peaks import Arithmetic, Peaks, own_peaks, peaks_of
from lightning_ups.insight.throughput.table import PHASE_NAMES, rendered, rows
from lightning_ups.insight.throughput.timeline import Phase, StepTime, Timeline, clock_for
from lightning_ups.insight.throughput.units import Count, counter, tensors_of
from lightning_ups.insight.throughput.verdicts import Check, Trouble, checks, first_change, troubles

__all__ = [
    "PHASE_NAMES",
    "Arithmetic",
    "Check",
    "Count",
    "Flops",
    "Inspection",
    "Meter",
    "Peaks",
    "Phase",
    "RankTimes",
    "Span",
    "StepFlops",
    "StepTime",
    "Summary",
    "Timeline",
    "Trouble",
    "checks",
    "clock_for",
    "count_flops",
    "counter",
    "first_change",
    "look",
    "own_peaks",
    "peaks_of",
    "quantile",
    "rendered",
    "rows",
    "step_flops",
    "tensors_of",
    "troubles",
]
