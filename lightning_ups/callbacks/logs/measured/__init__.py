"""Measuring a run: what the callbacks that log throughput share."""
