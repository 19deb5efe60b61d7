import struct

import pytest

from lightning_ups.insight.report import pictures
from lightning_ups.insight.report.history import Chart
from lightning_ups.insight.report.pictures import can_draw, write_pictures

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


def test_names_may_be_anything_and_no_picture_is_lost(tmp_path):
    pytest.importorskip("matplotlib")
    names = ["\u635f", "\u5931", "acc@1", "acc-1", "$\\bad{$", "_hidden", "x" * 400, "half \udc80"]
    charts = [
        Chart(title=name, section="Curves", series={name: [(0, 1.0), (1, 1e5)], "b": [(0, 2.0)]}) for name in names
    ]
    paths = write_pictures(tmp_path, charts=charts, split={})
    assert len({*paths}) == len(names)
    assert all(path.stat().st_size > 1000 for path in paths)


def test_the_number_of_pictures_is_limited(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "_MOST", 3)
    charts = [Chart(title=f"c{number}", section="Curves", series={"c": [(0, 1.0)]}) for number in range(9)]
    paths = write_pictures(tmp_path, charts=[*charts, CHARTS[1]], split={})
    assert [path.name for path in paths] == ["curves-c0.png", "curves-c1.png", "speed-step-ms.png"]


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(
        "lightning_ups._compat.optional.packages.RequirementCache",
        lambda requirement: type("Missing", (), {"__bool__": lambda _: False, "__str__": lambda _: "not installed"})(),
    )
    with pytest.raises(ModuleNotFoundError, match="pip install 'matplotlib"):
        can_draw()
