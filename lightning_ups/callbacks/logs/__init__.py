"""Callbacks that log, report and display."""
