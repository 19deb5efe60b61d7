"""The HTML page of the report, with style and charts inline."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any

from lightning_ups.insight.report.charts import line_chart, split_bar
from lightning_ups.insight.report.history import Chart


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a report. Empty parts are omitted.

    Args:
        subtitle: When and where the run was, and how it ended.
        error: The error that ended it.
        tiles: The most important figures, by name.
        change: What to change first: the name with its reason, and what to do.
        checks: Thresholds: name, measured, wanted, verdict (``"pass"`` or ``"FAIL"``), note.
        figures: Other figures, by name.
        split: Shares of a step, by phase.
        checkpoints: Paths of checkpoints, by what they are.
        images: PNGs, by name.
        left_out: Names of curves without a chart.
        no_curves: Why there is no curve.
    """

    title: str
    subtitle: str
    error: str = ""
    tiles: Sequence[tuple[str, str]] = ()
    change: tuple[str, str] | None = None
    checks: Sequence[tuple[str, str, str, str, str]] = ()
    figures: Sequence[tuple[str, str]] = ()
    split: Mapping[str, float] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    checkpoints: Sequence[tuple[str, str]] = ()
    images: Sequence[tuple[str, bytes]] = ()
    left_out: Sequence[str] = ()
    no_curves: str = ""
    manifest: Mapping[str, Any] = field(default_factory=dict)


def page(content: Content) -> str:
    """Return the page as HTML. Its style changes nothing outside it, such as the notebook that shows it."""
    body = "\n".join(_body(content))
    return readable(
        '<!doctype html>\n<html lang="en" style="color-scheme:light dark"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(content.title)}</title><style>{_STYLE}</style></head>\n"
        f'<body style="margin:0"><div class="{_SCOPE}"><main>\n{body}\n</main></div></body></html>\n'
    )


def readable(text: str) -> str:
    """Replace the characters of ``text`` that HTML cannot contain: control characters and surrogates."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\ufffd", text)


def _body(content: Content) -> Iterator[str]:
    yield f"<header><h1>{escape(content.title)}</h1><p>{escape(content.subtitle)}</p></header>"
    if content.error:
        yield f'<p class="error">{escape(content.error)}</p>'
    if content.tiles:
        tiles = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in content.tiles)
        yield f'<section class="tiles">{"".join(tiles)}</section>'
    if content.change is not None:
        what, how = content.change
        yield f'<section class="change"><h2>Change first</h2><p><b>{escape(what)}</b></p><p>{escape(how)}</p></section>'
    if content.split:
        yield f"<section><h2>Where a step's time goes</h2>{split_bar(content.split)}</section>"
    curves, others = [c for c in content.charts if c.section == "Curves"], list(content.charts)
    yield from _charts(curves)
    if content.no_curves and not curves:
        yield f"<section><h2>Curves</h2><p>{escape(content.no_curves)}</p></section>"
    if content.left_out:
        names = escape(", ".join(content.left_out))
        said = f"{len(content.left_out)} further curves are not drawn"
        yield f"<details><summary>{said}</summary><p>{names}</p></details>"
    if content.images:
        pictures = (
            f"<figure><figcaption>{escape(name)}</figcaption>"
            f'<img alt="{escape(name, quote=True)}" src="data:image/png;base64,{b64encode(png).decode()}"></figure>'
            for name, png in content.images
        )
        yield f'<section><h2>Images</h2><div class="charts">{"".join(pictures)}</div></section>'
    if content.checkpoints:
        yield f"<section><h2>Saved checkpoints</h2>{_rows(content.checkpoints)}</section>"
    if content.checks:
        yield f"<section><h2>Thresholds</h2>{_table(content.checks)}</section>"
    if content.figures:
        yield f"<section><h2>Figures</h2>{_rows(content.figures)}</section>"
    yield from _charts([chart for chart in others if chart.section != "Curves"])
    if content.manifest:
        yield f"<section><h2>What took effect</h2>{''.join(_manifest(content.manifest))}</section>"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _charts(charts: Sequence[Chart]) -> Iterator[str]:
    for section, group in groupby(charts, key=lambda chart: chart.section):
        figures = (
            f"<figure><figcaption>{escape(chart.title)}</figcaption>"
            f"{line_chart(chart.series, label=chart.title)}</figure>"
            for chart in group
        )
        yield f'<section><h2>{escape(section)}</h2><div class="charts">{"".join(figures)}</div></section>'


def _table(checks: Sequence[tuple[str, str, str, str, str]]) -> str:
    head = "<tr><th>threshold</th><th>measured</th><th>wanted</th><th></th><th></th></tr>"
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(measured)}</td><td>{escape(wanted)}</td>"
        f'<td class="{verdict.lower()}">{escape(verdict)}</td><td>{escape(note)}</td></tr>'
        for name, measured, wanted, verdict, note in checks
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _manifest(manifest: Mapping[str, Any]) -> Iterator[str]:
    for name, value in manifest.items():
        if value in (None, {}, []):
            continue
        text = json.dumps(value, indent=2, default=str) if isinstance(value, (dict, list)) else str(value)
        yield f"<details><summary>{escape(str(name))}</summary><pre>{escape(text)}</pre></details>"


def _scoped(style: str) -> str:
    """Let each rule of ``style`` apply only to what is inside the page."""

    def scoped(match: re.Match[str]) -> str:
        if match[0].startswith("@"):
            return match[0]
        return ",".join(f".{_SCOPE} {selector}" for selector in match[1].split(",")).replace(" :scope", "") + "{"

    return re.sub(r"([^{}\n]+)\{", scoped, style)


_SCOPE = "lightning-ups"
_COLORS = (  # distinguishable with color blindness, on white and on black
    ("#2a6fbb", "#6aa9e9"),
    ("#d1671f", "#f0955a"),
    ("#2e8b57", "#5cc48b"),
    ("#b13a6f", "#e67fae"),
    ("#7a5bc0", "#ab93e6"),
    ("#8a6d1d", "#d0b04c"),
    ("#3f8f9b", "#6fc4d1"),
    ("#666f7a", "#a0a9b4"),
)
_LIGHT = ";".join(f"--k{index}:{light}" for index, (light, _) in enumerate(_COLORS))
_DARK = ";".join(f"--k{index}:{dark}" for index, (_, dark) in enumerate(_COLORS))
_SERIES = "".join(
    f".s{index}{{stroke:var(--k{index})}}.c{index}{{fill:var(--k{index})}}.b{index}{{background:var(--k{index})}}"
    for index in range(len(_COLORS))
)
_STYLE = _scoped(f"""
:scope{{--bg:#fff;--fg:#1b1f24;--soft:#5b6570;--line:#e2e6ea;--box:#f6f8fa;--good:#1f7a3d;--bad:#b3261e;{_LIGHT}}}
@media(prefers-color-scheme:dark){{:scope{{--bg:#12151a;--fg:#e6e9ed;--soft:#9aa4af;--line:#2b3138;--box:#1a1f26;
--good:#5ac27f;--bad:#ff8a80;{_DARK}}}}}
*{{box-sizing:border-box}}
:scope{{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}}
main{{max-width:1080px;margin:0 auto;padding:24px 16px 64px;overflow-wrap:anywhere}}
h1{{font-size:24px;margin:0}}
h2{{font-size:17px;margin:32px 0 8px}}
header p{{color:var(--soft);margin:4px 0 0}}
.error{{color:var(--bad);background:var(--box);padding:12px;border-radius:6px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:24px}}
.tiles div{{background:var(--box);border-radius:8px;padding:12px 14px}}
.tiles b{{display:block;font-size:20px}}
.tiles span{{color:var(--soft);font-size:13px}}
.change{{background:var(--box);border-left:4px solid var(--k1);border-radius:6px;padding:2px 16px 6px;margin-top:24px}}
.change h2{{margin:10px 0 0}}
.change p{{margin:6px 0}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:20px}}
figure{{margin:0;min-width:0}}
figcaption{{font-weight:600;margin-bottom:4px}}
img{{max-width:100%}}
svg{{width:100%;height:auto;display:block}}
polyline{{fill:none;stroke-width:1.8;stroke-linejoin:round}}
.grid{{stroke:var(--line)}}
.tick{{fill:var(--soft);font-size:11px}}
.bad{{stroke:var(--bad);stroke-width:2}}
.legend{{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;padding:0;margin:6px 0 0;color:var(--soft)}}
.legend li{{font-size:13px}}
.legend i{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}}
table{{border-collapse:collapse;width:100%}}
th,td{{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;font-weight:400}}
th{{color:var(--soft)}}
th,td:not(:last-child){{overflow-wrap:normal}}
@media(max-width:600px){{table{{font-size:13px}}th,td{{padding-right:8px}}}}
.pass{{color:var(--good);font-weight:600}}
.fail{{color:var(--bad);font-weight:600}}
.none{{color:var(--soft)}}
details{{border-bottom:1px solid var(--line)}}
summary{{cursor:pointer;padding:6px 0}}
pre{{overflow-x:auto;font-size:12px;background:var(--box);padding:12px;border-radius:6px}}
{_SERIES}
""")
