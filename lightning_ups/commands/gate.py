"""``python -m lightning_ups gate``: an exit code for CI: at most so much slower, the loss within a band."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from lightning_ups.commands.compare import add_runs, sides_of, write_json
from lightning_ups.config.suggestions import parse_options
from lightning_ups.insight.compare import PASS, Band, gate


def main(argv: Sequence[str]) -> int:
    """Print one sentence, and return 0 if the new run passes, else 1."""
    asked = parse_options(_parser(), argv)
    sides = sides_of(asked)
    if len(sides) != 2:
        raise ValueError(f"gate takes two runs, BASE NEW, or BASE BASE vs NEW NEW; {len(asked.runs)} were given.")
    base, new = sides
    slower = None if asked.slower is None else _share("--slower", asked.slower, needs_percent=True).size
    loss = None if asked.loss is None else _share("--loss", asked.loss)
    decision = gate(base, new, slower=slower, loss=loss, metric=asked.metric, warmup=asked.warmup)
    print(f"{decision.verdict}: {new.name} against {base.name}: {decision.reason}.")
    if asked.json:
        write_json(asked.json, asdict(decision) | {"base": base.name, "new": new.name})
    return 0 if decision.verdict == PASS else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups gate", description="Exit with 0 if NEW may replace BASE, else with 1."
    )
    add_runs(parser)
    parser.add_argument("--slower", metavar="2%", help="how much slower its steps may be; default 2%%")
    parser.add_argument(
        "--loss", metavar="BAND", help="how much greater its loss may be: 0.01, or 1%%; default: by the loss's noise"
    )
    parser.add_argument("--metric", metavar="NAME", help="the loss; default: val_loss, else train_loss")
    return parser


def _share(option: str, text: str, *, needs_percent: bool = False) -> Band:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (needs_percent and not text.endswith("%")):
        raise ValueError(f"{option} {text} is not a limit. Write it like {option} 2%.")
    return Band(value / 100, relative=True) if text.endswith("%") else Band(value)
