"""The report of a run: a self-contained HTML page, PNGs of its curves, and its manifest."""

from lightning_ups.insight.report.dtypes import dtype_name, layer_dtypes
from lightning_ups.insight.report.history import Chart, History
from lightning_ups.insight.report.html_page import Content, page
from lightning_ups.insight.report.manifest import difference, flattened, reserve, write
from lightning_ups.insight.report.manifest import read as read_manifest
from lightning_ups.insight.report.pictures import can_draw, write_pictures
from lightning_ups.insight.report.run_files import give_to_loggers, logged_images, run_folder

__all__ = [
    "Chart",
    "Content",
    "History",
    "can_draw",
    "difference",
    "dtype_name",
    "flattened",
    "give_to_loggers",
    "layer_dtypes",
    "logged_images",
    "page",
    "read_manifest",
    "reserve",
    "run_folder",
    "write",
    "write_pictures",
]
