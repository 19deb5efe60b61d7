import re
from html.parser import HTMLParser

from lightning_ups.insight.report.history import Chart, History
from lightning_ups.insight.report.html_page import Content, page

FULL = Content(
    title="Net <x>",
    subtitle="finished, 10 steps",
    error="ValueError: <oops>",
    tiles=[("tokens per second", "1,234")],
    change=("slow loader: 40 % of each step", "Raise num_workers."),
    checks=[("MFU", "51.0%", "> 50 %", "pass", ""), ("waiting for data", "40.0%", "< 5 %", "FAIL", "a note")],
    figures=[("step", "3 ms")],
    split={"waiting for data": 0.4, "forward": 0.6},
    charts=[
        Chart(title="loss", section="Curves", series={"train_loss": [(0, 2.0), (1, 1.0)]}),
        Chart(title="peak memory, GiB", section="Memory", series={"reserved": [(0, 2.0), (1, 1.0)]}),
    ],
    checkpoints=[("best val_loss: 0.5", "/logs/best <1>.ckpt")],
    images=[("samples", b"\x89PNG")],
    manifest={"versions": {"torch": "2.13"}, "code": None, "config": "</pre><script>alert(1)</script>"},
)


class Balanced(HTMLParser):
    VOID = ("meta", "line", "rect", "circle", "polyline", "br", "img")

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_all_that_is_given_is_on_the_page():
    text = page(FULL)
    for part in (
        "Net &lt;x&gt;",
        "1,234",
        "slow loader: 40 % of each step",
        "Raise num_workers.",
        "51.0%",
        "a note",
        "peak memory, GiB",
        "&quot;torch&quot;: &quot;2.13&quot;",
        "ValueError: &lt;oops&gt;",
        "best val_loss: 0.5",
        "/logs/best &lt;1&gt;.ckpt",
        "<figcaption>samples</figcaption>",
        "data:image/png;base64,iVBORw==",
    ):
        assert part in text, part
    assert text.index("loss") < text.index("Thresholds") < text.index("peak memory, GiB")


def test_the_page_fetches_nothing_and_runs_nothing():
    text = page(FULL)
    assert not re.search(r"https?:|<script|<link|@import|url\(|\bsrc=(?!.data:image/png;base64,)|\bhref=", text)


def test_every_tag_is_closed():
    checker = Balanced()
    checker.feed(page(FULL))
    assert checker.open == []
    assert checker.tags.count("svg") == 3


def test_empty_parts_are_omitted():
    text = page(Content(title="Net", subtitle="finished"))
    assert "<section" not in text
    assert "<h1>Net</h1>" in text


def test_names_may_be_anything():
    odd = ["<script>alert('x')</script>", 'a"b&c', "\x00\x1b[31m", "half \udc80", "\u635f\u5931", "a/b/c", "$x$"]
    made = History()
    made.add(dict.fromkeys(odd, 1.0), 1)
    text = page(Content(title=odd[3], subtitle=odd[0], error=odd[2], charts=made.charts(), left_out=odd))
    text.encode("utf-8")
    assert "<script" not in text
    assert "\x00" not in text
    assert "7 further curves are not drawn" in text
    assert "\u635f\u5931" in text


def test_a_notebook_that_shows_the_page_keeps_its_style():
    text = page(FULL)
    style = text.partition("<style>")[2].partition("</style>")[0]
    selectors = [each.strip() for group in re.findall(r"([^{}]+)\{", style) for each in group.split(",")]
    assert len(selectors) > 50
    assert all(each.startswith((".lightning-ups", "@media")) for each in selectors)
    # A notebook drops these tags and keeps the rest; the page on its own has no margin and a dark background.
    assert '<html lang="en" style="color-scheme:light dark">' in text
    assert '<body style="margin:0"><div class="lightning-ups"><main>' in text
