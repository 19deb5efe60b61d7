import random
from xml.etree import ElementTree

import pytest

from lightning_ups.insight.tune import Bar, Gain, Spot, bars, frontier, gib, html_page, rate_bar, table


def test_bars_have_lengths_and_intervals():
    rows = [Bar(name="a <b>", value=1.0, text="1/s"), Bar(name="c", value=2.0, text="2/s", interval=(1.5, 2.5))]
    svg = ElementTree.fromstring(bars(rows, label="rates"))
    widths = [float(rect.get("width")) for rect in svg.iter("rect")]
    assert widths[1] == 2 * widths[0]
    assert len([*svg.iter("line")]) == 3
    assert "a <b>" in [text.text for text in svg.iter("text")]


def test_the_frontier_joins_what_no_other_beats():
    spots = [
        Spot(name="fast", rate=9, gib=8, is_chosen=True),
        Spot(name="small", rate=3, gib=1),
        Spot(name="beaten", rate=2, gib=5),
    ]
    svg = ElementTree.fromstring(frontier(spots, label="frontier"))
    (line,) = svg.iter("polyline")
    assert len(line.get("points").split()) == 2
    assert len([*svg.iter("circle")]) == 4  # the winner has a ring
    assert any(text.text == "best: fast" for text in svg.iter("text"))


def boxes(svg):
    """The boxes of labels, by the width of letters in a wide font."""
    for text in svg.iter("text"):
        width, x, y = 7.2 * len(text.text), float(text.get("x")), float(text.get("y"))
        low = {"start": x, "middle": x - width / 2, "end": x - width}[text.get("text-anchor")]
        yield low, y - 10, low + width, y + 2, text.text


@pytest.mark.parametrize("count", [1, 2, 8, 40])
@pytest.mark.parametrize("spread", [0.0, 0.001, 0.1])
def test_labels_of_the_frontier_do_not_overlap_and_the_winner_is_marked(count, spread):
    draw = random.Random(count)
    spots = [
        Spot(
            name=f"precision: bf16, compilation: auto, with losses {index}",
            rate=300 * draw.gauss(1, spread),
            gib=0.5 * draw.gauss(1, spread),
            is_chosen=index == count - 1,
            is_reference=index == 0,
        )
        for index in range(count)
    ]
    svg = ElementTree.fromstring(frontier(spots, label="frontier"))
    found = [*boxes(svg)]
    for index, (x1, y1, x2, y2, _) in enumerate(found):
        assert min(x1, y1) >= 0
        assert x2 <= 920
        assert y2 <= 420
        assert not any(x1 < b and a < x2 and y1 < d and c < y2 for a, c, b, d, _ in found[index + 1 :])
    texts = [text for *_, text in found]
    assert any(text.startswith("best: ") for text in texts)
    assert "peak memory, MiB; less is better" in texts
    assert "samples per second; more is better" in texts
    assert len([circle for circle in svg.iter("circle") if circle.get("r") == "10"]) == 1
    assert len([*svg.iter("circle")]) == count + 1


def test_bars_stay_in_the_picture():
    name = "+ " + "a very long name of a configuration " * 3
    rows = [
        Bar(name=name, value=1.0, text="1/s", interval=(-0.5, 1.5)),
        rate_bar("b", 2.0, Gain(value=1.0), reference=1.0),
    ]
    svg = ElementTree.fromstring(bars(rows, label="rates"))
    assert all(float(line.get("x1")) >= 300 for line in svg.iter("line"))
    assert len([*svg.iter("line")]) == 3, "a gain of one round has no interval"
    assert all(low >= 0 for low, *_ in boxes(svg))


def test_the_page_is_self_contained():
    page = html_page("t", "s", tiles=[("gain", "+1 %")], sections=[("rows", table(["a"], [["<x>"]]))])
    assert page.count("</main>") == 1
    assert "&lt;x&gt;" in page
    assert "http" not in page.replace("http-equiv", "")


def test_figures_are_short():
    assert (gib(3 * 2**30), gib(5 * 2**20)) == ("3.0 GiB", "5 MiB")
    bar = rate_bar("x", 11.0, Gain(value=0.1, low=0.05, high=0.15), reference=10)
    assert bar.interval == (10.5, 11.5)
    assert bar.text == "11/s, +10.0%"
    assert rate_bar("x", 11.0, None, reference=10).interval is None


@pytest.mark.parametrize(
    ("verdict", "color"), [("worth it", "c0"), ("neutral", "c7"), ("harmful; the loss differs", "c1")]
)
def test_a_bar_shows_the_verdict(verdict, color):
    bar = rate_bar("a", 2.0, Gain(value=0.1), reference=1.8, verdict=verdict)
    assert (bar.text, bar.color) == (f"2/s, +10.0%, {verdict}", color)
    failed = rate_bar("a", 0.0, None, reference=1.8, verdict="harmful: crash")
    assert (failed.text, failed.interval) == ("harmful: crash", None)


def test_short_cells_stay_on_one_line():
    shown = table(["head"], [["short", "a long text that " * 4]])
    assert shown.count("nowrap") == shown.count("anywhere") == 1
