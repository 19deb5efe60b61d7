import struct

import pytest

from lightning_ups.transforms.report.history import Chart
from lightning_ups.transforms.report.pictures import can_draw, write_pictures

CHARTS = [
    Chart(title="loss", section="Curves", series={"train": [(0, 2.0), (1, float("nan")), (2, 1.0)], "val": [(1, 2.0)]}),
    Chart(title="step, ms", section="Speed", series={"step": [(0, 2.0)]}),
]


def test_each_chart_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    paths = write_pictures(tmp_path / "report", charts=CHARTS, split={"data": 0.2, "forward": 0.8})
    assert [path.name for path in paths] == ["curves-loss.png", "speed-step-ms.png", "split.png"]
    for path in paths:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:24])) > 200


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(
        "lightning_ups._compat.optional.RequirementCache",
        lambda requirement: type("Missing", (), {"__bool__": lambda _: False, "__str__": lambda _: "not installed"})(),
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-ups\[report\]'"):
        can_draw()
