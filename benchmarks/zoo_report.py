"""The report of `zoo.py`: what trains, how fast, in how much memory, and how well."""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

__all__ = ["compare", "read", "report", "summary"]

Record = Mapping[str, Any]
OURS = ("preset", "fsdp2", "simple_fsdp")
FIRST = 5  # losses that are compared
T_95 = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # Student's t by degrees of freedom, from one on


def read(paths: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of ``paths`` by kind; of runs that were made again, the last."""
    found: dict[str, list[dict[str, Any]]] = {"call": [], "run": []}
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(text)
            except ValueError:  # cut off as the machine went away
                continue
            if record["kind"] == "call":
                found["call"].append(record)
            else:
                last[record["line"], record["side"], record["round"], record["tiny"]] = record
    found["run"] = [*last.values()]
    return found


def speed_up(base: Sequence[Record], side: Sequence[Record]) -> tuple[float, float, float] | None:
    """Return how much faster ``side`` is, with an interval of 95 %: over rounds, or over the blocks of one or two."""
    rounds = sorted({r["round"] for r in base if "step_ms" in r} & {r["round"] for r in side if "step_ms" in r})
    if not rounds:
        return None

    def blocks(runs: Sequence[Record], turn: int) -> list[float]:
        return next(r["blocks_ms"] for r in runs if r["round"] == turn)

    pairs = [(blocks(base, turn), blocks(side, turn)) for turn in rounds]
    ratios = [math.log(median(one) / median(other)) for one, other in pairs]
    middle = fmean(ratios)
    if len(ratios) >= 3:
        wide = T_95[min(len(ratios) - 2, len(T_95) - 1)] * stdev(ratios) / math.sqrt(len(ratios))
        return math.exp(middle), math.exp(middle - wide), math.exp(middle + wide)
    draw = random.Random(0)
    drawn = sorted(
        fmean(
            math.log(median(draw.choices(one, k=len(one))) / median(draw.choices(other, k=len(other))))
            for one, other in pairs
        )
        for _ in range(1000)
    )
    return math.exp(middle), math.exp(drawn[25]), math.exp(drawn[974])


def trains(runs: Sequence[Record]) -> bool:
    """Return whether every one of ``runs`` ended without an error, with finite losses."""
    return bool(runs) and all("error" not in r and all(map(math.isfinite, r.get("losses", ()))) for r in runs)


def compare(runs: Mapping[str, Sequence[Record]], ours: str, base: str) -> dict[str, Any]:
    """Compare a side of ours with stock.

    Args:
        runs: Of one line, by side.
        ours: The side of ours.
        base: The side of stock.
    """
    stock, mine = runs.get(base, ()), runs.get(ours, ())
    found: dict[str, Any] = {"stock": trains(stock), "trains": trains(mine) if mine else None}
    if mine:
        found["error"] = next((r["error_line"] for r in mine if "error_line" in r), None)
        found["notes"] = mine[-1].get("notes", [])
    if stock:
        found["stock_error"] = next((r["error_line"] for r in stock if "error_line" in r), None)
        found["busy"] = stock[-1].get("busy")
    if found["stock"] and found["trains"]:
        found["speed_up"] = speed_up(stock, mine)
        found["lost"] = sorted({*mine[-1]["unchanged"]} - {*stock[-1]["unchanged"]})
        found["memory"] = _memory(stock[-1], mine[-1])
        found["step_ms"] = [stock[-1].get("step_ms"), mine[-1].get("step_ms")]
        found["first_step_s"] = [stock[-1].get("first_step_s"), mine[-1].get("first_step_s")]
        found["last_losses"] = [_last(stock[-1]), _last(mine[-1])]
        found["one_call"] = len({(r["call"], r.get("card"), r["gpus"]) for r in (stock[-1], mine[-1])}) == 1
    compiled = runs.get("stock_compile", ())
    if ours == "preset" and trains(compiled):
        found["over_compile"] = speed_up(compiled, mine) if found["trains"] else None
        found["compile_first_step_s"] = compiled[-1].get("first_step_s")
    draws = any(run.get("draws") for run in mine)  # compiled code draws other numbers than eager
    if ours == "preset" and trains(runs.get("fp32", ())) and not draws:
        found["error_to_fp32"] = {
            side: distance(runs["fp32"][-1], runs[side][-1])
            for side in ("stock", "stock_compile", "preset")
            if trains(runs.get(side, ()))
        }
    for one, other in (("stock_bits", "precision_bits"), ("stock", "precision")):
        if ours == "preset" and trains(runs.get(one, ())) and runs.get(other):
            pair = [runs[one][-1]["losses"][:FIRST], runs[other][-1].get("losses", [])[:FIRST]]
            found["same_bits"] = pair[0] == pair[1]
            break
    again = runs.get("stock_bits_again", ())
    if found.get("same_bits") is False and trains(again):  # two runs of stock may differ as well
        found["bits_vary"] = again[-1]["losses"][:FIRST] != runs["stock_bits"][-1]["losses"][:FIRST]
    return found


def distance(exact: Record, run: Record, steps: int = 10) -> float | None:
    """Return the mean distance of the first losses, relative to the size of the exact ones."""
    pairs = [*zip(exact["losses"][:steps], run["losses"][:steps], strict=False)]
    size = fmean(abs(a) for a, _ in pairs) if pairs else 0.0
    return fmean(abs(a - b) for a, b in pairs) / size if size else None


def _memory(stock: Record, mine: Record) -> dict[str, Any] | None:
    if "peak_gib" not in stock or "peak_gib" not in mine:
        return None
    more = (mine["peak_gib"] - stock["peak_gib"]) * 2**30
    allowed = max(0.05 * stock["peak_gib"] * 2**30, 2 * stock["parameters"]) + 2**22
    peaks = [stock["peak_gib"], mine["peak_gib"]]
    return {"ratio": round(peaks[1] / max(peaks[0], 1e-3), 3), "gib": peaks, "too_much": more > allowed}


def _last(run: Record) -> float | None:
    losses = run.get("losses", [])[-5:]
    return fmean(losses) if losses else None


def summary(records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """Return every comparison, and what all of them come to, for each side of ours."""
    lines: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records["run"], key=lambda r: r["round"]):
        lines[record["line"]][record["side"]].append(record)
    made: dict[str, Any] = {}
    for ours in OURS:
        base = "stock" if ours == "preset" else "stock_ddp"
        rows = {
            name: {"family": next(iter(runs.values()))[0]["family"], **compare(runs, ours, base)}
            for name, runs in lines.items()
            if runs.get(ours) or (ours == "preset" and runs.get("stock"))
        }
        if rows:
            made[ours] = {"lines": rows, "totals": _totals(rows)}
    return made


def _totals(rows: Mapping[str, Record]) -> dict[str, Any]:
    ratios = {name: row["speed_up"] for name, row in rows.items() if row.get("speed_up")}
    families: dict[str, list[float]] = defaultdict(list)
    for name, (ratio, _, _) in ratios.items():
        families[rows[name]["family"]].append(ratio)
    busy = [row["busy"] for row in rows.values() if row.get("busy") is not None]
    errors = {name: row["error_to_fp32"] for name, row in rows.items() if row.get("error_to_fp32")}
    return {
        "lines": len(rows),
        "stock_trains": sum(row["stock"] for row in rows.values()),
        "trains": sum(bool(row["trains"]) for row in rows.values()),
        "fails": {name: row["error"] for name, row in rows.items() if row["stock"] and row["trains"] is False},
        "stock_fails": {n: row["stock_error"] for n, row in rows.items() if row.get("stock_error")},
        "median": median(ratio for ratio, _, _ in ratios.values()) if ratios else None,
        "geometric_mean": _geometric(ratio for ratio, _, _ in ratios.values()),
        "by_family": {f: {"lines": len(r), "geometric_mean": _geometric(r)} for f, r in sorted(families.items())},
        "slower": {name: ratio for name, ratio in ratios.items() if ratio[0] < 0.98},
        "slower_than_compile": {
            n: row["over_compile"]
            for n, row in rows.items()
            if row.get("over_compile") and row["over_compile"][0] < 0.98
        },
        "memory": {
            n: row["memory"]["gib"] for n, row in rows.items() if row.get("memory") and row["memory"]["too_much"]
        },
        "lost": {name: row["lost"] for name, row in rows.items() if row.get("lost")},
        "other_bits": [
            name for name, row in rows.items() if row.get("same_bits") is False and not row.get("bits_vary")
        ],
        "worse_than_compile": {
            n: e
            for n, e in errors.items()
            if None not in e.values() and e.get("preset", 0) > 1.5 * e.get("stock_compile", math.inf)
        },
        "busy_above_70": [sum(each > 0.7 for each in busy), len(busy)],
    }


def _geometric(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(fmean(logs)) if logs else None


def report(records: Mapping[str, Sequence[Record]]) -> str:
    """Return a table for each side of ours, and its totals, as text."""
    made = summary(records)
    parts = [
        f"{call['call']}: {', '.join(sorted({*call['cards']})) or 'CPU'}, {call['commit']}" for call in records["call"]
    ]
    for ours, found in made.items():
        parts += ["", f"## {ours}", "", _table(found["lines"]), "", *_said(found["totals"])]
    return "\n".join(parts)


_HEAD = (
    "line",
    "trains",
    "busy",
    "ms",
    "speed-up",
    "over compile",
    "memory",
    "first step",
    "bits",
    "error/compile's",
    "unchanged",
)


def _table(rows: Mapping[str, Record]) -> str:
    cells = [_HEAD, ("---",) * len(_HEAD), *(_cells(name, row) for name, row in rows.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _cells(name: str, row: Record) -> tuple[str, ...]:
    if row["trains"] is None:
        state = "not run"
    elif row["trains"]:
        state = "yes" if row["stock"] else "yes, stock does not"
    else:
        state = "**no**" if row["stock"] else "no, stock neither"
    times, first = row.get("step_ms", [None, None]), row.get("first_step_s", [None, None])
    errors = row.get("error_to_fp32") or {}
    relative = (
        errors["preset"] / errors["stock_compile"] if errors.get("preset") and errors.get("stock_compile") else None
    )
    memory = row.get("memory")
    return (
        name + ("" if row.get("one_call", True) else " *"),
        state,
        _number(row.get("busy"), 2),
        f"{_number(times[0], 2)} > {_number(times[1], 2)}",
        _ratio(row.get("speed_up")),
        _ratio(row.get("over_compile")),
        f"{memory['ratio']:.2f}" + (" !" if memory["too_much"] else "") if memory else "",
        f"{_number(first[0], 0)} > {_number(first[1], 0)} s ({_number(row.get('compile_first_step_s'), 0)})",
        "stock varies" if row.get("bits_vary") else {True: "same", False: "**other**", None: ""}[row.get("same_bits")],
        _number(relative, 2),
        f"**{len(row['lost'])}**" if row.get("lost") else "",
    )


def _ratio(found: Sequence[float] | None) -> str:
    return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]" if found else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _said(totals: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- trains: {totals['trains']} of {totals['lines']} (stock: {totals['stock_trains']})",
        f"- speed-up: median {_number(totals['median'], 3)}, geometric mean {_number(totals['geometric_mean'], 3)}",
        "- by family: "
        + ", ".join(f"{f} {e['geometric_mean']:.2f} ({e['lines']})" for f, e in totals["by_family"].items()),
        f"- GPU busy for more than 70 % of a stock step: {totals['busy_above_70'][0]} of {totals['busy_above_70'][1]}",
    ]
    for key, what in (
        ("slower", "slower than 0.98x of stock"),
        ("slower_than_compile", "more than 2 % slower than stock with torch.compile"),
        ("memory", "peak memory more than 5 % and 2 bytes per parameter above stock (GiB)"),
        ("lost", "parameters that change with stock and do not here"),
        ("other_bits", "first losses differ from stock with the precision alone"),
        ("worse_than_compile", "error against float32 above 1.5 times that of stock with torch.compile"),
        ("fails", "fails here and trains with stock"),
        ("stock_fails", "fails with stock"),
    ):
        if isinstance(totals[key], list):
            told = ", ".join(totals[key])
        else:
            told = "; ".join(f"{name}: {_brief(value)}" for name, value in totals[key].items())
        lines.append(f"- {what}: {told or 'none'}")
    return lines


def _brief(value: Any) -> str:
    if isinstance(value, str):
        return value[:200]
    if isinstance(value, Mapping):
        return ", ".join(f"{side} {_number(error, 5)}" for side, error in value.items())
    if value and isinstance(value[0], float):
        return ", ".join(f"{each:.3f}" for each in value)
    return f"{len(value)}, {value[0]} ..."
