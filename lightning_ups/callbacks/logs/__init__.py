"""Callbacks that log, report and show."""
