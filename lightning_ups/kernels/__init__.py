"""Fused operations, each with an eager reference that is its specification."""
