"""What slows a fit down, found by experiments on the fit itself."""

from lightning_ups.insight.diagnose.probe import Probe
from lightning_ups.insight.diagnose.tree import TREE, Cause, Facts, Finding, Fix, findings

__all__ = ["TREE", "Cause", "Facts", "Finding", "Fix", "Probe", "findings"]
