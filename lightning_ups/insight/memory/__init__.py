"""Accounting for memory, by tensor and by holder."""
