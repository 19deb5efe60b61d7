import re
from xml.etree import ElementTree

import pytest

from lightning_ups.insight.report.charts import line_chart, number, split_bar

NAN = float("nan")


def parsed(html):
    return ElementTree.fromstring(f"<div>{html}</div>")


def points_of(html):
    return [
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        for line in parsed(html).iter("polyline")
    ]


def test_a_rising_line_rises_from_left_to_right():
    ((first, second),) = points_of(line_chart({"loss": [(0, 1.0), (10, 2.0)]}, label="loss"))
    assert first[0] < second[0]
    assert first[1] > second[1]  # upwards is less in SVG


def test_a_gap_is_a_gap_and_is_marked():
    html = line_chart({"loss": [(0, 1.0), (1, 2.0), (2, NAN), (3, 1.0), (4, 1.5)]}, label="loss")
    assert [len(line) for line in points_of(html)] == [2, 2]
    assert "loss: nan at step 2" in html


@pytest.mark.parametrize("points", [[(3, 5.0)], [(0, 0.0), (1, 0.0)], [(0, -1e-9), (1, 1e12)], [(5, 2.0), (5, 3.0)]])
def test_odd_series_are_drawn(points):
    assert "NaN" not in (html := line_chart({"a": points}, label="a"))
    assert parsed(html).find(".//svg") is not None


def test_nothing_finite_is_said():
    assert "no finite value" in line_chart({"a": [(0, NAN)]}, label="loss")


def test_a_wide_span_is_drawn_by_powers_of_ten():
    html = line_chart({"a": [(0, 1e-5), (1, 1.0)]}, label="a")
    assert {"1e-05", "0.001", "1"} <= set(re.findall(r'text-anchor="end">([^<]+)<', html))


def test_names_are_escaped():
    html = line_chart({"<b>&": [(0, 1.0), (1, 2.0)], "c": [(0, 1.0)]}, label='"<i>"')
    assert "<b>" not in html
    assert "<i>" not in html
    assert len([*parsed(html).iter("li")]) == 2


def test_a_bar_is_split_by_shares():
    rectangles = [*parsed(split_bar({"data": 0.25, "forward": 0.75})).iter("rect")]
    widths = [float(rectangle.get("width")) + 2 for rectangle in rectangles]
    assert widths == pytest.approx([230, 690])
    assert float(rectangles[1].get("x")) == 230


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234, "1.234K"), (2.5e9, "2.5G"), (-1e6, "-1M"), (0.00012345, "0.0001234")]
)
def test_numbers_are_short(value, text):
    assert number(value) == text
