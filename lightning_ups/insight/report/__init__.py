"""A run's report: one page that needs nothing else, and pictures of its curves."""

from lightning_ups.insight.report.history import Chart, History
from lightning_ups.insight.report.html_page import Content, page
from lightning_ups.insight.report.pictures import write_pictures

__all__ = ["Chart", "Content", "History", "page", "write_pictures"]
