from xml.etree import ElementTree

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
    assert len([*svg.iter("circle")]) == 3
    assert any(text.text == "fast" for text in svg.iter("text"))


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
