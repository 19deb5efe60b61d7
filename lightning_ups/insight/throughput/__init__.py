"""The throughput of a run, where its time goes, and what to change first."""

from lightning_ups.insight.throughput.bottlenecks import bottlenecks, checks, first_change
from lightning_ups.insight.throughput.flops import StepFlops, count_flops, step_flops
from lightning_ups.insight.throughput.meter import Flops, Inspection, Meter, Span, Summary, inspect_spans, quantile
from lightning_ups.insight.throughput.peaks import Arithmetic, Peaks, given_peaks, peaks_of
from lightning_ups.insight.throughput.table import PHASE_NAMES, phase_names, rows, text_table
from lightning_ups.insight.throughput.timeline import PAUSES, Clock, Phase, Timeline, clock_for, phase_of
from lightning_ups.insight.throughput.units import Count, counter, tensors_of

__all__ = [
    "PAUSES",
    "PHASE_NAMES",
    "Arithmetic",
    "Clock",
    "Count",
    "Flops",
    "Inspection",
    "Meter",
    "Peaks",
    "Phase",
    "Span",
    "StepFlops",
    "Summary",
    "Timeline",
    "bottlenecks",
    "checks",
    "clock_for",
    "count_flops",
    "counter",
    "first_change",
    "given_peaks",
    "inspect_spans",
    "peaks_of",
    "phase_names",
    "phase_of",
    "quantile",
    "rows",
    "step_flops",
    "tensors_of",
    "text_table",
]
