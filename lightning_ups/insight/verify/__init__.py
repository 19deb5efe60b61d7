"""Comparing a run with a reference run."""
